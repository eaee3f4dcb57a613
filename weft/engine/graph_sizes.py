"""Sizes of passes in CUDA graphs: buckets of decode steps, and prompts that are captured at start."""

from __future__ import annotations

from collections.abc import Sequence

from weft.engine.prefill import Shape
from weft.engine.ragged_prefill import Gathering, RaggedShape, padded_tokens
from weft.runtime.arithmetic import cdiv, next_power_of_2

# Rows of a tile of cuBLAS. It takes longer for some sizes between its multiples (docs/decisions.md, "Prompts").
ROWS = 128
# Sequences of a captured pass of prompts: the head and sampling take about as long for 64 rows as for one.
PROMPTS = 64
# Bytes of a layer that a captured pass gathers at least: 7 us by the links of an H200. With fewer, entries are padded to them.
FEWEST_GATHERED = 2 << 20


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
    ragged = {
        RaggedShape(size, min(size, batch, max_batch))
        for size in _all_sizes(chunk_tokens)
        for batch in (PROMPTS, max_batch)
    }
    single = [Shape(1, length) for length in lengths]
    return sorted([*ragged, *single], key=lambda shape: (shape.tokens, shape.batch), reverse=True)


def gathering_shapes(chunk_tokens: int, max_batch: int, gathering: Gathering, longest: int) -> list[RaggedShape]:
    """Shapes of prompts behind cached tokens in a spread cache, the largest first.

    longest  number of entries of the longest sequence

    Numbers of entries are powers of two from FEWEST_GATHERED bytes on, up to the longest sequence's and ``gathering.most``.
    Tokens are those of ``prompt_shapes`` up to 256, then powers of two with one size between them, and from 1,024 on with
    three: each size is captured once for each number of entries.
    """
    most = min(longest, gathering.most)
    entries, few = [], next_power_of_2(cdiv(FEWEST_GATHERED, gathering.nbytes))
    while few < most:
        entries.append(few)
        few *= 2
    *sizes, last = _all_sizes(chunk_tokens)
    sizes = [size for size in sizes if size % (next_power_of_2(size) // (8 if size > 1024 else 4)) == 0]
    shapes = {
        RaggedShape(size, min(size, batch, max_batch), count)
        for size in [*sizes, last]
        for batch in (PROMPTS, max_batch)
        for count in [*entries, most]
    }
    return sorted(shapes, key=lambda shape: (shape.tokens, shape.batch, shape.entries), reverse=True)


def _all_sizes(chunk_tokens: int) -> list[int]:
    """Numbers of tokens that ``padded_tokens`` gives for up to `chunk_tokens`."""
    sizes = [padded_tokens(1)]
    while sizes[-1] < chunk_tokens:
        sizes.append(padded_tokens(sizes[-1] + 1))
    return sizes
