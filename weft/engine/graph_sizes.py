"""Sizes of passes in CUDA graphs: buckets of decode steps, and prompts that are captured at start."""

from __future__ import annotations

from collections.abc import Sequence

from weft.engine.prefill import Shape
from weft.engine.ragged_prefill import RaggedShape, padded_tokens

# Rows of a tile of cuBLAS. It takes longer for some sizes between its multiples (docs/decisions.md, "Prompts").
ROWS = 128
# Sequences of a captured pass of prompts: the head and sampling take about as long for 64 rows as for one.
PROMPTS = 64


def decode_buckets(max_batch: int) -> list[int]:
    """Batch sizes that decode steps are padded to: 1, 2, 4 … 64, 96, 128, 256, 384, 512 … and `max_batch`.

    Sizes between those up to 64 would run the same tiles (SMALL_M_ROWS of weft/plan/table.py). Rows of tables for more than 64
    begin at 96, and those of 96 serve 112 too. From 128 on all are multiples of ROWS, four or more to a factor of two.
    """
    sizes, size = [], 1
    while size < max_batch:
        sizes.append(size)
        if size in (64, 96):
            size += 32
        else:
            size += size if size <= ROWS else max(ROWS, (1 << size.bit_length()) // 8)
    return [*sizes, max_batch]


def prompt_shapes(chunk_tokens: int, max_batch: int, lengths: Sequence[int]) -> list[Shape | RaggedShape]:
    """Shapes of which one holds any chunk of prompts, the largest first.

    lengths  of single new prompts that have a shape of their own
    """
    sizes = [padded_tokens(1)]
    while sizes[-1] < chunk_tokens:
        sizes.append(padded_tokens(sizes[-1] + 1))
    ragged = {RaggedShape(size, min(size, batch, max_batch)) for size in sizes for batch in (PROMPTS, max_batch)}
    single = [Shape(1, length) for length in lengths]
    return sorted([*ragged, *single], key=lambda shape: (shape.tokens, shape.batch), reverse=True)
