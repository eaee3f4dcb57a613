"""Tokens of sequences sharded over ranks zig-zag, so that causal attention costs every rank the same.

A sequence of L tokens is cut into 2 W stripes, as even as possible. Rank r has stripes r and 2 W - 1 - r: one with few keys to
attend to and one with many. A rank's tokens are the first stripes of all sequences, then the second ones.

    W = 2, one sequence   | 0 | 1 | 2 | 3 |        rank 0: 0 3        rank 1: 1 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weft.arguments import check_int, quoted
from weft.ops.attention.sequence_ranges import SequenceRanges
from weft.runtime.copying import upload


@dataclass(frozen=True, slots=True, kw_only=True)
class ZigzagShards:
    """The shards of ``lengths`` over ``world_size`` ranks, on the host.

    lengths  tokens of each sequence, 0 or more; token t of the whole is counted through all sequences
    """

    lengths: tuple[int, ...]
    world_size: int

    def __post_init__(self) -> None:
        if not isinstance(self.lengths, tuple) or not self.lengths:
            raise ValueError(
                f"lengths={quoted(self.lengths)} is no tuple of tokens of each sequence; pass at least one"
            )
        for number, length in enumerate(self.lengths):
            check_int(f"lengths[{number}]", length, 0)
        check_int("world_size", self.world_size, 1)

    def stripe(self, number: int, length: int) -> range:
        """Positions of stripe ``number`` in a sequence of ``length`` tokens."""
        cuts = 2 * self.world_size
        return range(number * length // cuts, (number + 1) * length // cuts)

    def stripes_of(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.world_size - 1 - rank

    @property
    def rows(self) -> list[int]:
        """Tokens of all sequences in each of the 2 W stripes."""
        return [sum(len(self.stripe(i, length)) for length in self.lengths) for i in range(2 * self.world_size)]

    @property
    def tokens(self) -> list[int]:
        """Tokens of each rank."""
        rows = self.rows
        return [sum(rows[stripe] for stripe in self.stripes_of(rank)) for rank in range(self.world_size)]

    def indices(self, rank: int) -> torch.Tensor:
        """int64 [tokens of ``rank``]: which tokens of the whole they are."""
        firsts = [sum(self.lengths[:b]) for b in range(len(self.lengths))]
        parts = [
            torch.arange(first + stripe.start, first + stripe.stop)
            for number in self.stripes_of(rank)
            for first, length in zip(firsts, self.lengths, strict=True)
            for stripe in [self.stripe(number, length)]
        ]
        return torch.cat(parts)

    def take(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        """Shard of ``rank`` of x [all tokens, ...]."""
        return x[self.indices(rank).to(x.device)]

    def join(self, shards: torch.Tensor) -> torch.Tensor:
        """Undo ``take``: [all tokens, ...] in order, of all ranks' shards one after the other."""
        order = torch.cat([self.indices(rank) for rank in range(self.world_size)]).to(shards.device)
        return torch.empty_like(shards).index_copy_(0, order, shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZigzagRanges:
    """Tables of gathered_prefill_attention for one batch of sequences (``make``), for many calls.

    shards   which tokens each rank has
    rank     whose tables these are
    own      ranges of this rank's stripes, for its queries: segments of (half, sequence)
    every    ranges of all ranks' stripes, for queries of a few heads: segments of (rank, half, sequence)
    stripes  int32 [2 W, B, 4]: (row in its rank's tensor, row in all ranks' one after the other, first position, end) of the
             stripe of each sequence
    """

    shards: ZigzagShards
    rank: int
    own: SequenceRanges
    every: SequenceRanges
    stripes: torch.Tensor

    @classmethod
    def make(
        cls,
        lengths: Sequence[int],
        rank: int,
        world_size: int,
        group: int,
        dtype: torch.dtype,
        *,
        block_m: int | None = None,
    ) -> ZigzagRanges:
        """Tables in host memory. group: query heads of a KV head; block_m: as in SequenceRanges."""
        if not isinstance(lengths, (list, tuple)):
            raise ValueError(f"lengths={quoted(lengths)} is no list of tokens of each sequence; pass a list")
        shards = ZigzagShards(lengths=tuple(lengths), world_size=world_size)
        table: list[list[list[int]]] = [[] for _ in range(2 * world_size)]
        spans: list[list[tuple[int, int]]] = []
        whole = 0
        for owner in range(world_size):
            row, of_owner = 0, []
            for number in shards.stripes_of(owner):
                for length in lengths:
                    stripe = shards.stripe(number, length)
                    table[number].append([row, whole + row, stripe.start, stripe.stop])
                    of_owner.append((stripe.start, len(stripe)))
                    row += len(stripe)
            spans.append(of_owner)
            whole += row
        return cls(
            shards=shards,
            rank=rank,
            own=SequenceRanges.make(spans[rank], group, dtype, block_m=block_m),
            every=SequenceRanges.make([span for each in spans for span in each], group, dtype, block_m=block_m),
            stripes=torch.tensor(table, dtype=torch.int32),
        )

    def to(self, device: torch.device) -> ZigzagRanges:
        """Copy to ``device`` without waiting."""
        stripes = upload(self.stripes, device)
        return replace(self, own=self.own.to(device), every=self.every.to(device), stripes=stripes)
