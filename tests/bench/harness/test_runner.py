"""Runs of several workloads: their memory."""

from weft.bench.harness.runner import heap_bytes
from weft.bench.ops.shapes import parse_shapes
from weft.bench.ops.workload import OpWorkload


def test_the_heap_grows_with_the_largest_shape():
    small, large = (
        OpWorkload(name=op, shapes=parse_shapes(op, [shape], 2))
        for op, shape in (("gemm-rs", "2,16,16"), ("ag-gemm", "16384,6656,16384"))
    )
    assert heap_bytes([small]) < 7 << 30
    assert heap_bytes([small, large]) > 10 << 30
