"""Shapes and figures of attention over sharded prompts."""

import pytest

from weft.bench.ops.shapes import parse_shapes
from weft.bench.ops.workload import OpWorkload

OP = "gathered-prefill-attention"


def test_figures_of_a_prompt():
    """Half of the operations at each of two ranks; the second stripe of rank 0 stays at home."""
    shapes = parse_shapes(OP, ["qwen3-30b-a3b:32768"], 2)
    work = OpWorkload(name=OP, shapes=shapes, dtype="bf16")
    (size,) = (shape.size for shape in shapes)
    assert size == (32768, 32, 4, 128)
    assert work.rate(2, size, 1e6) == pytest.approx(2 * 32 * 32768 * 32769 * 128 / 2 / 1e12)
    # Rank 1 sends both of its stripes, of 8192 tokens, to rank 0.
    assert work.wire_bytes(2, size) == 2 * 8192 * 2 * 4 * 128 * 2
    for word, message in (
        ("qwen4", "neither a set .qwen3-30b-a3b, qwen3-8b, qwen3-32b. nor TOKENS,QUERY_HEADS"),
        ("64,6,4,64", "q has 6 heads and k 4"),
        ("64,8,4,60", "head_dim=60 is not one of"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_shapes(OP, [word], 2)
