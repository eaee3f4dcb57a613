"""Prefill of prompts, and of parts of prompts, by CUDA graphs: one per number of tokens.

Launching the kernels one by one may take the host longer than they take the GPU (docs/decisions.md, "Prompts").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from weft.engine.prefill import PrefillChunk, StaticPrefill
from weft.ops import SequenceRanges
from weft.parallel.context import gathered_entries
from weft.runtime.arithmetic import cdiv

# Token counts: powers of two up to ROWS, then its multiples, and above 2048 multiples of a sixteenth of the next power of two.
# cuBLAS may take longer for rows in between than for the next multiple of 128 (docs/decisions.md, "Prompts").
SHORTEST, ROWS, STEPS = 16, 128, 16
# Sequence counts are powers of this: the head's GEMM takes as long for 8 rows as for one.
BATCHES = 8
# Most bytes of a layer that a graph gathers from a spread cache: up to 0.4 ms by the links of an H200. With more of them the
# kernels take longer than their launches, and padding to a power of two costs more than a graph saves.
MOST_GATHERED = 128 << 20


@dataclass(frozen=True, slots=True)
class RaggedShape:
    """Number of tokens and of sequences of a pass.

    entries  of page tables that it gathers from a spread cache
    """

    tokens: int
    batch: int
    entries: int = 0


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


def ragged_shape_of(
    chunks: Sequence[PrefillChunk], max_batch: int, gathering: Gathering | None = None
) -> RaggedShape | None:
    """Smallest shape that the chunks fit; `max_batch` bounds the number of sequences.

    gathering  of a spread cache; None: nothing is gathered

    None for more entries than a graph gathers.
    """
    batch = 1
    while batch < len(chunks):
        batch *= BATCHES
    entries = 0 if gathering is None else gathering.entries(chunks)
    if gathering is not None and entries > gathering.most:
        return None
    entries = 1 << (entries - 1).bit_length() if entries else 0
    return RaggedShape(padded_tokens(sum(len(chunk.tokens) for chunk in chunks)), min(batch, max_batch), entries)


def padded_tokens(tokens: int) -> int:
    """Number of tokens of the smallest shape that holds `tokens`."""
    power = max(SHORTEST, 1 << (tokens - 1).bit_length())
    step = power if power <= ROWS else max(ROWS, power // STEPS)
    return cdiv(tokens, step) * step


class RaggedPrefill(StaticPrefill):
    """Prefill of sequences of any lengths, one after the other, padding behind the last.

    For fused plans only: unfused attention takes its sequence lengths from the host.
    """

    def _starts(self, chunks: Sequence[PrefillChunk]) -> Iterable[int]:
        return accumulate((len(chunk.tokens) for chunk in chunks), initial=0)

    def _ranges_of(self, chunks: Sequence[PrefillChunk]) -> SequenceRanges:
        sequences = [(chunk.before, len(chunk.tokens)) for chunk in chunks]
        sizes = {"tokens": self._tokens, "batch": self._batch}
        return SequenceRanges.make(sequences, self.model.group, self.model.dtype, **sizes)
