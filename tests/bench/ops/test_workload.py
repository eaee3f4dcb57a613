"""Traffic of ops, and the limits that follow from it."""

import pytest

from weft.bench.harness.limits import GPUS
from weft.bench.names import OPS, VARIED
from weft.bench.ops.shapes import parse_shapes
from weft.bench.ops.workload import OpWorkload

NORMED = "all-reduce-rms-norm"


def of(op, dtype="bf16"):
    return OpWorkload(name=op, shapes=(), dtype=dtype)


def test_the_wire_carries_the_fewest_bytes():
    n = 4 << 20
    assert of("all-reduce").wire_bytes(4, (n,)) == 1.5 * n
    assert of("all-gather").wire_bytes(4, (n,)) == 0.75 * n
    assert of("gemm-ar").wire_bytes(2, (8, 16, 32)) == 2 * 8 * 16
    assert of("ag-gemm").wire_bytes(2, (8, 16, 32)) == 8 * 32
    assert of("gemm").wire_bytes(2, (8, 16, 32)) == 0
    assert of(NORMED).wire_bytes(4, (8, 512)) == of("all-reduce").wire_bytes(4, (8192,))


def test_a_dispatch_sends_a_row_once_to_each_rank_that_has_an_expert_for_it():
    """With 2 of 8 experts a token needs the other of two ranks in 22 of 28 cases; 6 bytes a choice come beside the rows."""
    size = (28, 2, 8, 4, 256, 64, 0)
    assert of("moe-dispatch").wire_bytes(2, size) == 22 * 256 * 2 + 28 * 2 * 6
    assert of("moe-dispatch+fp8").wire_bytes(2, size) == 22 * (256 + 2 * 4) + 28 * 2 * 6
    assert of("moe-combine").wire_bytes(2, size) == 22 * 256 * 2


def test_the_floor_is_the_larger_of_both():
    h200 = GPUS["NVIDIA H200"]
    assert of("all-reduce").floor_us(2, (389_000,), h200) == pytest.approx(1.0 + 1.2)
    # Weights of 65.5 MB at 4.3 TB/s; 2 * 8192 * 12800 * 5120 / 790e12; a wire that is slower than the GEMM.
    assert of("gemm").floor_us(4, (128, 5120, 6400), h200) == pytest.approx(15.9, abs=0.1)
    assert of("ag-gemm").floor_us(4, (8192, 12800, 5120), h200) == pytest.approx(1359, abs=1)
    assert of("ag-gemm").floor_us(4, (8192, 256, 5120), h200) == pytest.approx(161.8, abs=0.1)
    assert of("gemm", "fp32").floor_us(4, (128, 5120, 6400), h200) is None
    assert of("gemm").floor_us(4, (128, 5120, 6400), None) is None
    assert of(NORMED).floor_us(2, (389, 500), h200) == pytest.approx(1.0 + 1.2)
    assert of("gemm").rate(1, (1000, 1000, 1000), 2.0) == pytest.approx(1000)
    assert of("all-reduce").rate(2, (1_000_000,), 10.0) == pytest.approx(100)


@pytest.mark.parametrize("op", [*OPS, *VARIED])
def test_every_op_has_a_floor_and_a_rate_at_its_own_shapes(op):
    """On GPUs with known limits; simulated ranks have none, so no other test computes them."""
    for world_size in (1, 2):
        for shape in parse_shapes(op, (), world_size, dtype="bf16", tiny=False):
            assert of(op).floor_us(world_size, shape.size, GPUS["NVIDIA H200"]) >= 0
            assert of(op).rate(world_size, shape.size, 10.0) >= 0
