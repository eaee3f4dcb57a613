"""Context parallelism: a KV cache whose pages are dealt out to the ranks, each page with all KV heads.

Page p of a sequence is at rank p % W, as entry p // W of the sequence's row of the page table. The table is the same on all
ranks: an entry is a page of each rank's cache, and W * page_size tokens. Query heads stay split as in TPAttention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft import ops
from weft.parallel.tensors import AttentionWeights

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

Cache = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadPages:
    """Pages of the sequences of one pass.

    table  [B, n] int32: the entries that the pass may read
    """

    team: Team
    table: Tensor

    def heads(self, w: AttentionWeights, rank: int | None = None) -> slice:
        """KV heads that the query heads of a rank, this one by default, attend to."""
        rank = self.team.rank if rank is None else rank
        group = w.heads * self.team.size // w.kv_heads
        first = rank * w.heads // group
        return slice(first, first + max(1, w.heads // group))

    def exchange(self, w: AttentionWeights, cache: Cache) -> tuple[Cache, Tensor]:
        """(keys and values of all ranks' pages of this pass, of my KV heads; their page table).

        One all_to_all: rank r gets the KV heads that its query heads attend to.
        """
        W, (B, n) = self.team.size, self.table.shape
        mine = self.table.flatten().long()
        sent = torch.stack([torch.stack([part[mine, self.heads(w, rank)] for part in cache[:2]]) for rank in range(W)])
        keys, values = ops.all_to_all(sent, self.team).transpose(0, 1).flatten(1, 2)
        page = torch.arange(n * W, device=mine.device)
        row = torch.arange(B, device=mine.device)[:, None]
        pages = (page % W * (B * n) + row * n + page // W).to(torch.int32)
        return (keys, values), pages

    def all_queries(self, q: Tensor) -> Tensor:
        """Queries of all heads [T, W * heads, head_dim] of this rank's [T, heads, head_dim]."""
        by_rank = ops.all_gather(q, self.team).view(self.team.size, *q.shape)
        return by_rank.transpose(0, 1).flatten(1, 2)
