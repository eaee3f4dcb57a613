"""Context parallelism: a KV cache whose pages are dealt out to the ranks, each page with all KV heads.

Page p of a sequence is at rank p % W, as entry p // W of the sequence's row of the page table. The table is the same on all
ranks: an entry is a page of each rank's cache, and W * page_size tokens. Query heads stay split as in TPAttention.

Every rank computes the keys and values of all new tokens, so attention of a prompt gathers the pages of cached tokens alone.
The next layer's pages travel by copy engine during this one's attention, where they are many (weft.ops.collectives.ahead).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from weft import ops
from weft.ops.collectives.ahead import InFlight, travels_ahead
from weft.parallel.tensors import AttentionWeights, MLAWeights
from weft.runtime.arithmetic import cdiv
from weft.runtime.copying import upload

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

Cache = tuple[Tensor, ...]
Weights = AttentionWeights | MLAWeights


def gathered_entries(before: int, entry: int, window: int | None = None) -> range:
    """Entries of a sequence's page table that attention of its tokens after the first ``before`` gathers.

    entry   tokens of an entry
    window  most tokens that any layer attends to: earlier pages are not gathered; None: all
    """
    first = 0 if window is None else max(0, before + 1 - window) // entry
    return range(first, max(first, cdiv(before, entry)))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredLayout:
    """Places of the pages that attention of a prefill reads, on the host.

    First come the gathered pages, ``len(rows)`` of rank 0, then of rank 1, …; then the new tokens' pages; last one for
    padding. A page with cached and new tokens is a gathered one.

    rows, columns  of the entries of the page table that are gathered
    table          [B, pages of the longest sequence] int32: the page table of these pages
    slots          [T] int64: slots of the new tokens in them
    pages          number of pages
    """

    rows: numpy.ndarray
    columns: numpy.ndarray
    table: numpy.ndarray
    slots: numpy.ndarray
    pages: int

    @classmethod
    def make(
        cls,
        sequences: Sequence[tuple[int, int]],
        page_size: int,
        world_size: int,
        *,
        window: int | None = None,
        entries: int | None = None,
        tokens: int | None = None,
        batch: int | None = None,
        starts: Sequence[int] | None = None,
    ) -> GatheredLayout:
        """Layout of sequences (before, length), which go on by ``length`` tokens after ``before`` cached ones.

        window                  as in ``gathered_entries``
        entries, tokens, batch  capacities, on which alone ``pages`` depends; None: as many as given
        starts                  first token of each sequence in the pass; None: one sequence after the other
        """
        entry, lengths = page_size * world_size, [length for _, length in sequences]
        columns = [gathered_entries(before, entry, window) for before, _ in sequences]
        counts = [len(column) for column in columns]
        entries = sum(counts) if entries is None else entries
        tokens = sum(lengths) if tokens is None else tokens
        starts = accumulate(lengths, initial=0) if starts is None else starts
        batch = len(sequences) if batch is None else batch
        assert sum(counts) <= entries
        longest = max((sum(sequence) for sequence in sequences), default=0)
        table = numpy.zeros((batch, cdiv(longest, page_size)), numpy.int32)
        gathered, fresh = world_size * entries, tokens // page_size + batch
        slots = numpy.full(tokens, (gathered + fresh) * page_size, numpy.int64)  # padding
        place, page = 0, gathered
        for row, column, start, (before, length) in zip(table, columns, starts, sequences, strict=False):
            skip, count = column.start, len(column)
            cached, end = numpy.arange(skip * world_size, cdiv(before, page_size)), cdiv(before + length, page_size)
            row[cached] = cached % world_size * entries + place + cached // world_size - skip
            new = max(0, end - cdiv(before, page_size))
            row[end - new : end] = numpy.arange(page, page + new)
            at = numpy.arange(before, before + length)
            slots[start : start + length] = row[at // page_size].astype(numpy.int64) * page_size + at % page_size
            place, page = place + count, page + new
        return cls(
            rows=numpy.arange(len(counts)).repeat(counts),
            columns=numpy.array([at for column in columns for at in column], numpy.int64),
            table=table,
            slots=slots,
            pages=gathered + fresh + 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadPages:
    """The spread cache in one pass; a prefill has the page table of ``gathered`` and, further:

    entries  [n] int64: entries of the page table whose pages are gathered
    slots    [T] int64: slots of the new tokens in the gathered pages
    pages    number of gathered pages (GatheredLayout)
    ahead    the exchange, where it runs ahead of the layers
    """

    team: Team
    entries: Tensor | None = None
    slots: Tensor | None = None
    pages: int = 0
    ahead: LayersAhead | None = None

    @classmethod
    def of_prefill(cls, team: Team, table: Tensor, layout: GatheredLayout) -> SpreadPages:
        """Pages of a layout; ``table`` [B, max_pages] on the device is the page table of the cache."""
        slots = upload(torch.from_numpy(layout.slots), table.device)
        entries = slots[:0]
        if len(layout.rows) > 0:
            rows, columns = (upload(torch.from_numpy(x), table.device) for x in (layout.rows, layout.columns))
            entries = table[rows, columns].long()
        return cls(team=team, entries=entries, slots=slots, pages=layout.pages)

    def heads(self, w: Weights, rank: int | None = None) -> slice:
        """KV heads that the query heads of a rank, this one by default, attend to."""
        rank = self.team.rank if rank is None else rank
        group = w.heads * self.team.size // w.kv_heads
        first = rank * w.heads // group
        return slice(first, first + max(1, w.heads // group))

    def gathered(self, w: Weights, cache: Cache, *new: Tensor) -> Cache:
        """Keys and values of this rank's KV heads by this prefill's page table, cached and new ones.

        Of a cache of latents their rows.
        new  keys and values of the new tokens, [T, this rank's KV heads, head_dim], as the cache holds them
        """
        W, n, size = self.team.size, len(self.entries), cache[0].shape[2]
        new = tuple(map(_as_bits, new))
        gathered = new[0].new_empty((len(new), self.pages, new[0].shape[1], size, new[0].shape[2]))
        if n > 0:
            by_rank = gathered[:, : W * n].unflatten(1, (W, n)).transpose(0, 1)
            if self.ahead is None:
                by_rank.copy_(ops.all_to_all(self.sent(w, cache), self.team))
            else:
                self.ahead.receive(by_rank)
        # Padding after a prompt in its pages: a masked-out NaN times the zero weight of the softmax would still be NaN.
        gathered[:, W * n :].zero_()
        page, offset = self.slots // size, self.slots % size
        for part, rows in zip(gathered, new, strict=True):
            part[page, :, offset] = rows
        return tuple(gathered.view(cache[0].dtype))

    def ahead_of(self, w: Weights, layers: Sequence[Cache]) -> SpreadPages:
        """The same for a pass through ``layers``, whose attentions have the sizes of ``w``. Collective."""
        if self.entries is None or len(self.entries) == 0:
            return self
        heads, (_, _, *row) = self.heads(w), layers[0][0].shape
        part = (
            len(layers[0][:2]) * len(self.entries) * (heads.stop - heads.start) * math.prod(row) * layers[0][0].itemsize
        )
        return replace(self, ahead=LayersAhead(self, w, layers)) if travels_ahead(part, self.team) else self

    def all_pages(self, w: Weights, cache: Cache, table: Tensor) -> tuple[Cache, Tensor]:
        """(keys and values of all pages of ``table`` [B, n], of this rank's KV heads; their page table)."""
        W, (B, n) = self.team.size, table.shape
        received = ops.all_to_all(replace(self, entries=table.flatten().long()).sent(w, cache), self.team)
        parts = received.view(cache[0].dtype).transpose(0, 1).flatten(1, 2)
        page = torch.arange(n * W, device=table.device)
        row = torch.arange(B, device=table.device)[:, None]
        pages = (page % W * (B * n) + row * n + page // W).to(torch.int32)
        return tuple(parts), pages

    def all_queries(self, q: Tensor) -> Tensor:
        """Queries of all heads [T, W * heads, head_dim] of this rank's [T, heads, head_dim]."""
        by_rank = ops.all_gather(q, self.team).view(self.team.size, *q.shape)
        return by_rank.transpose(0, 1).flatten(1, 2)

    def sent(self, w: Weights, cache: Cache) -> Tensor:
        """[W, 2, n, heads, page_size, head_dim]: this rank's pages of ``entries``, for each rank its KV heads."""
        pages = torch.stack([_as_bits(part)[self.entries] for part in cache[:2]])
        return torch.stack([pages[:, :, self.heads(w, rank)] for rank in range(self.team.size)])


class LayersAhead:
    """Exchange of cached pages that is a layer ahead: layer l + 1's are sent once layer l's have come.

    A pass writes pages of its new tokens alone, and no attention reads these from the exchange.
    """

    def __init__(self, spread: SpreadPages, w: Weights, layers: Sequence[Cache]) -> None:
        self._spread, self._w, self._layers = spread, w, iter(layers)
        self._send()

    def receive(self, out: Tensor) -> None:
        """Write the next layer's pages to ``out``, by sender as in ``sent``, and send the layer after it."""
        self._flight.receive(out)
        self._send()

    def _send(self) -> None:
        if (layer := next(self._layers, None)) is not None:
            self._flight = InFlight.send(self._spread.sent(self._w, layer), self._spread.team)


def _as_bits(x: Tensor) -> Tensor:
    """``x``; bytes in place of e4m3, which torch does not index on all devices."""
    return x.view(torch.uint8) if x.itemsize == 1 else x
