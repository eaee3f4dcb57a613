"""Shapes of attention over a sharded cache, and the limit of its time."""

import pytest
import torch

from weft.bench.ops.shapes import op_of, parse_shapes
from weft.bench.ops.workload import OpWorkload

OP = "sharded-decode-attention"


def test_shapes():
    assert [shape.size for shape in parse_shapes(OP, ["12-kv-heads", "qwen3-30b-a3b:100,7"], 2)] == [
        (1, 96, 12, 128, 65536, 2),
        (1, 96, 12, 128, 1 << 20, 2),
        (1, 32, 4, 128, 100, 2),
        (1, 32, 4, 128, 7, 2),
    ]
    for word, message in (
        ("1,32,4,128", "is neither a set"),
        ("1,32,4,100,64", "head_dim=100 is not one of"),
        ("1,30,4,128,64", "heads=30 is not divisible by kv_heads=4; take 32"),
        ("1,4,4,128,64", "heads=4 is not divisible by world_size=3; take 6"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_shapes(OP, [word], 3)


def test_the_limit_is_a_ranks_share_of_the_cache():
    workload = OpWorkload(name=OP, shapes=(), dtype="bf16", words=())
    size = (1, 32, 4, 128, 1 << 20, 2)
    assert op_of(OP).memory_bytes(size, torch.bfloat16) == 2 * (1 << 19) * 4 * 128 * 2
    assert workload.wire_bytes(2, size) == 16 * 129 * 4 and workload.unit == "GB/s"
