"""``SequenceRanges``: tokens of each sequence of a prefill, and tiles of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weft.arguments import check_int, quoted
from weft.runtime.arithmetic import cdiv
from weft.runtime.copying import upload


def default_block_m(dtype: torch.dtype) -> int:
    """Rows of a tile, unless a caller asks for another number."""
    return 16 if dtype == torch.float32 else 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRanges:
    """The ranges of T tokens that belong to each sequence, made once for a forward pass (``make``).

    spans     [B + 2, 3] int32: (first_token, length, before) of each sequence, of the padding, and of an empty sequence
    tiles     [N, 2] int32: (sequence, tile of its rows) of each program of a KV head, most keys first
    block_m   rows of a tile, each a query head of a token
    group     query heads of a KV head
    tokens    T, padding included
    longest   tokens of the longest sequence, earlier ones included: what its row of pages must hold
    """

    spans: torch.Tensor
    tiles: torch.Tensor
    block_m: int
    group: int
    tokens: int
    longest: int

    @classmethod
    def make(
        cls,
        sequences: Sequence[tuple[int, int]],
        group: int,
        dtype: torch.dtype,
        *,
        tokens: int | None = None,
        batch: int | None = None,
        block_m: int | None = None,
    ) -> SequenceRanges:
        """Ranges in host memory, for tokens that lie one sequence after the other.

        sequences      (before, length) of each: it goes on by ``length`` tokens after ``before`` earlier ones
        tokens, batch  capacities, on which alone the tensors' sizes depend; None: as many as given. Tokens after the last
                       sequence's are padding: they attend to nothing, and their rows become 0
        block_m        None: the fast one for ``dtype``

        ValueError for sequences or sizes that do not fit.
        """
        _check_sequences(sequences)
        real, given = sum(length for _, length in sequences), len(sequences)
        exact = tokens is None and batch is None
        tokens, batch = real if tokens is None else tokens, given if batch is None else batch
        if real > tokens or given > batch:
            raise ValueError(f"{given} sequences of {real} tokens are more than {batch} of {tokens}")
        check_int("group", group, 1)
        block_m = default_block_m(dtype) if block_m is None else block_m
        if block_m < 16 or block_m & (block_m - 1):
            raise ValueError(f"block_m={block_m} is not a power of two of at least 16")
        rows, tiles = _rows_and_tiles([*sequences, (real - tokens, tokens - real)], group, block_m)
        # The largest number of tiles: the last one of each sequence, and of the padding, may be ragged.
        room = len(tiles) if exact else cdiv(tokens * group, block_m) + batch
        rows += [(0, 0, 0)] * (batch + 2 - len(rows))
        tiles += [(batch + 1, 0)] * (room - len(tiles))
        longest = max((sum(span) for span in sequences), default=0)
        return cls(
            spans=torch.tensor(rows, dtype=torch.int32),
            tiles=torch.tensor(tiles, dtype=torch.int32).view(-1, 2),  # there may be none
            block_m=block_m,
            group=group,
            tokens=tokens,
            longest=longest,
        )

    def to(self, device: torch.device) -> SequenceRanges:
        """Copy to ``device`` without waiting."""
        return replace(self, spans=upload(self.spans, device), tiles=upload(self.tiles, device))


def _check_sequences(sequences: Sequence[tuple[int, int]]) -> None:
    """ValueError unless all are (before, length)."""
    try:
        fits = all(len(span) == 2 and min(span) >= 0 and sum(span) == int(sum(span)) for span in sequences)
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"sequences={quoted(sequences)} are not all (before, length), integers and none negative")


def _rows_and_tiles(
    sequences: Sequence[tuple[int, int]], group: int, block_m: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
    """Rows of ``spans``, and of ``tiles``, most keys first.

    Lists, not tensors: torch would start its threads for this.
    """
    rows, tiles, first = [], [], 0
    for sequence, (before, length) in enumerate(sequences):
        rows.append((first, length, before))
        first += length
        for tile in range(cdiv(length * group, block_m)):
            keys = before + min((tile * block_m + block_m - 1) // group + 1, length)
            tiles.append((-keys, sequence, tile))
    return rows, [(sequence, tile) for _, sequence, tile in sorted(tiles)]
