"""SequenceChunks: prompts of several sequences, cut in chunks of tokens, for linear attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from weft.arguments import quoted
from weft.ops.local import check_like, check_shape
from weft.runtime.copying import upload

CHUNK = 64


class SequenceChunks(NamedTuple):
    """New tokens of sequences that follow one another in the rows of a call, and where their states lie.

    rows    int32 [B, 3]: first row of a sequence, its new tokens, tokens before; with none before, its state begins as zeros
    slots   int32 [B]: index of a sequence's state, each once
    chunks  int32 [n, 2]: sequence and first new token of each run of at most CHUNK tokens, in the order of the rows: the first
            one of a sequence has as its index the number of runs of the sequences before. Runs without tokens come last
    """

    rows: torch.Tensor
    slots: torch.Tensor
    chunks: torch.Tensor

    @classmethod
    def make(cls, sequences: Sequence[tuple[int, int]], slots: Sequence[int]) -> SequenceChunks:
        """Chunks of sequences (before, length), on the CPU. ValueError for other sequences or slots."""
        try:
            spans = [(int(before), int(length)) for before, length in sequences]
            fits = spans == [tuple(span) for span in sequences] and all(min(span) >= 0 for span in spans)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise ValueError(f"sequences={quoted(sequences)} are not all (before, length), integers and none negative")
        where = list(slots)
        if len({*where}) != len(spans) or not all(type(slot) is int and slot >= 0 for slot in where):
            raise ValueError(f"slots={quoted(slots)} are not {len(spans)} different integers of at least 0")
        rows, chunks, first = [], [], 0
        for index, (before, length) in enumerate(spans):
            rows.append((first, length, before))
            chunks += [(index, at) for at in range(0, length, CHUNK)]
            first += length
        # Views: there may be none.
        return cls(
            rows=torch.tensor(rows, dtype=torch.int32).view(-1, 3),
            slots=torch.tensor(where, dtype=torch.int32),
            chunks=torch.tensor(chunks, dtype=torch.int32).view(-1, 2),
        )

    def to(self, device: torch.device) -> SequenceChunks:
        """Copy to ``device`` without waiting."""
        return SequenceChunks(*(upload(x, device) for x in self))

    def spans(self) -> list[tuple[int, int, int, int]]:
        """(first row, length, before, slot) of each sequence; waits for the device."""
        return [(*row, slot) for row, slot in zip(self.rows.tolist(), self.slots.tolist(), strict=True)]


def check_chunks(op: str, sequences: SequenceChunks, device: torch.device) -> None:
    """ValueError unless ``sequences`` are SequenceChunks on ``device``."""
    if not isinstance(sequences, SequenceChunks):
        raise ValueError(
            f"{op}: sequences={quoted(sequences)} are not SequenceChunks; make them with SequenceChunks.make"
        )
    for name, tensor, shape in zip(sequences._fields, sequences, (("B", 3), ("B",), ("n", 2)), strict=True):
        check_like(op, f"sequences.{name}", tensor, device, (torch.int32,), shape)
    check_shape(op, "sequences.slots", sequences.slots, (len(sequences.rows),))


def check_columns(op: str, name: str, x: torch.Tensor) -> None:
    """ValueError unless rows of x are contiguous; between rows there may be other columns."""
    if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(
            f"{op}: {name} has shape {tuple(x.shape)} and strides {x.stride()}; pass rows [tokens, columns], which may be "
            f"columns of a wider tensor"
        )
