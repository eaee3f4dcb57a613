"""Shapes of prompts in CUDA graphs: numbers of tokens, sequences and gathered pages that passes are padded to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from weft.parallel.context import gathered_entries
from weft.runtime.arithmetic import cdiv, next_power_of_2

if TYPE_CHECKING:
    from weft.engine.prefill import PrefillChunk

# Token counts: powers of two up to ROWS, then its multiples, and above 2048 multiples of a sixteenth of the next power of two.
# cuBLAS may take longer for rows in between than for the next multiple of 128 (docs/decisions.md, "Prompts").
SHORTEST, ROWS, STEPS = 16, 128, 16
# Sequence counts are powers of this: the head's GEMM takes as long for 8 rows as for one.
BATCHES = 8
# Up to this many tokens padding of new prompts is free, since a pass takes as long as reading the weights.
FREE_TOKENS = 256
# Largest ratio of padded to real tokens above that.
SLACK = 1.25
# Sequences of a pass that is captured at start: the head and sampling take about as long for 64 rows as for one.
PROMPTS = 64
# Bytes of a layer that a captured pass gathers at least: 7 us by the links of an H200. With fewer, entries are padded to them.
FEWEST_GATHERED = 2 << 20
# Most bytes of a layer that a graph gathers from a spread cache: up to 0.4 ms by the links of an H200. With more of them the
# kernels take longer than their launches, and padding to a power of two costs more than a graph saves.
MOST_GATHERED = 128 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """Number of tokens and of sequences of a pass.

    entries  of page tables that it gathers from a spread cache
    length   of each of `batch` new prompts, with the padding behind it; None: sequences of any lengths, one after the other
    """

    tokens: int
    batch: int
    entries: int = 0
    length: int | None = None

    @classmethod
    def of_new(cls, batch: int, length: int) -> Shape:
        """Shape of `batch` new prompts of up to `length` tokens each."""
        return cls(batch * length, batch, length=length)


class Gathering(NamedTuple):
    """Sizes of the pages that prompts gather from a spread cache.

    tokens  of an entry of a page table: of a page of each rank
    nbytes  of an entry's keys and values in one layer, of a rank's own KV heads
    window  most tokens that any layer attends to; None: all
    """

    tokens: int
    nbytes: int
    window: int | None = None

    @property
    def most(self) -> int:
        """Number of entries that a graph gathers at most."""
        return max(1, MOST_GATHERED // self.nbytes)

    def entries(self, chunks: Sequence[PrefillChunk]) -> int:
        """Number of entries with the cached tokens of these chunks."""
        return sum(len(gathered_entries(chunk.before, self.tokens, self.window)) for chunk in chunks)


def shape_of_new(chunks: Sequence[PrefillChunk]) -> Shape | None:
    """Shape of equal lengths that the chunks fit with little padding; None: there is none."""
    if any(chunk.before for chunk in chunks):
        return None
    batch = 1 << (len(chunks) - 1).bit_length()
    lengths = [len(chunk.tokens) for chunk in chunks]
    length = max(SHORTEST, 1 << (max(lengths) - 1).bit_length())
    fits = batch * length <= max(FREE_TOKENS, int(SLACK * sum(lengths)))
    return Shape.of_new(batch, length) if fits else None


def ragged_shape_of(chunks: Sequence[PrefillChunk], max_batch: int, gathering: Gathering | None = None) -> Shape | None:
    """Smallest shape of any lengths that the chunks fit; `max_batch` bounds the number of sequences.

    gathering  of a spread cache; None: nothing is gathered

    None for more entries than a graph gathers.
    """
    batch = 1
    while batch < len(chunks):
        batch *= BATCHES
    entries = 0 if gathering is None else gathering.entries(chunks)
    if gathering is not None and entries > gathering.most:
        return None
    entries = next_power_of_2(entries) if entries else 0
    return Shape(padded_tokens(sum(len(chunk.tokens) for chunk in chunks)), min(batch, max_batch), entries)


def padded_tokens(tokens: int) -> int:
    """Number of tokens of the smallest shape of any lengths that holds `tokens`."""
    power = max(SHORTEST, 1 << (tokens - 1).bit_length())
    step = power if power <= ROWS else max(ROWS, power // STEPS)
    return cdiv(tokens, step) * step


def single_lengths(most: int) -> list[int]:
    """Lengths of the shapes that single new prompts of up to `most` tokens fit."""
    lengths = [SHORTEST]
    while lengths[-1] < most and 2 * lengths[-1] <= max(FREE_TOKENS, int(SLACK * most)):
        lengths.append(2 * lengths[-1])
    return lengths


def prompt_shapes(chunk_tokens: int, max_batch: int, lengths: Sequence[int]) -> list[Shape]:
    """Shapes of which one holds any chunk of prompts, the largest first.

    lengths  of single new prompts that have a shape of their own
    """
    ragged = {
        Shape(size, min(size, batch, max_batch)) for size in _all_sizes(chunk_tokens) for batch in (PROMPTS, max_batch)
    }
    single = [Shape.of_new(1, length) for length in lengths]
    return sorted([*ragged, *single], key=lambda shape: (shape.tokens, shape.batch), reverse=True)


def gathering_shapes(chunk_tokens: int, max_batch: int, gathering: Gathering, longest: int) -> list[Shape]:
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
        Shape(size, min(size, batch, max_batch), count)
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
