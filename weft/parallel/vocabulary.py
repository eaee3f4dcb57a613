"""Embedding and head split by words: rank r has words r * V' / W and on, V' = V rounded up to a multiple of W."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from weft import ops
from weft.parallel.linear import all_gather, all_reduce, empty_parameter, matmul
from weft.parallel.sharding import Shard
from weft.parallel.step_plan import Mode, Plan, check_mode, plan_alone

if TYPE_CHECKING:
    from weft.runtime.team import Team


class VocabParallel(nn.Module):
    """This rank's rows of a [V, hidden] weight. Rows past V are zero and no rank reads them from a checkpoint."""

    def __init__(self, vocab_size: int, hidden_size: int, *, team: Team, mode: Mode, dtype: torch.dtype) -> None:
        super().__init__()
        check_mode(mode)
        self.team, self.mode, self.vocab_size = team, mode, vocab_size
        self.local_size = -(-vocab_size // team.size)
        self.start = team.rank * self.local_size
        self.real_size = max(min(self.local_size, vocab_size - self.start), 0)
        self.weight = empty_parameter(self.local_size, hidden_size, team=team, dtype=dtype)
        self.weight.data[self.real_size :].zero_()

    def shards(self) -> dict[str, Shard]:
        shape = (self.vocab_size, self.weight.shape[1])
        return {"weight": Shard(target=self.weight.data[: self.real_size], shape=shape, start=self.start)}


class VocabParallelEmbedding(VocabParallel):
    def forward(self, tokens: torch.Tensor, plan: Plan | None = None) -> torch.Tensor:
        """x = weight[tokens]          tokens: [n]; x: [n, hidden], or [n'/W, hidden] in ag_rs, n' the multiple of W

        Every row comes from one rank and is zero on the others, so the sum over ranks is exact. A deferred plan leaves that
        sum to the first norm.
        """
        plan = plan or plan_alone(self.mode, self.team)
        if plan.fused:
            x = ops.embed_rows(tokens, self.weight, self.start)
        else:
            local = tokens - self.start
            mine = (local >= 0) & (local < self.local_size)
            x = F.embedding(local.clamp(0, self.local_size - 1), self.weight).masked_fill(~mine[:, None], 0)
        if plan.deferred:
            return x
        if plan.mode == "ag_rs":
            if padding := -len(tokens) % self.team.size:
                x = F.pad(x, (0, 0, 0, padding))
            return ops.reduce_scatter(x, self.team)
        return all_reduce(x, self.team, self.mode)


class VocabParallelHead(VocabParallel):
    def forward(self, x: torch.Tensor, plan: Plan | None = None) -> torch.Tensor:
        """x[n, hidden], the same on every rank → this rank's logits [n, V'/W], -inf for words past V.

        In fp32; in a fused plan in x's dtype, since the kernels that read them widen them.
        """
        plan = plan or plan_alone(self.mode, self.team)
        logits = matmul(x, self.weight, plan)
        logits = logits if plan.fused else logits.float()
        if self.real_size < self.local_size:
            logits[:, self.real_size :] = float("-inf")
        return logits

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's logits [n, V'/W] → all of them [n, V], the same on every rank."""
        n, local = logits.shape
        by_rank = all_gather(logits[None], self.team, self.mode).view(self.team.size, n, local)
        return by_rank.transpose(0, 1).reshape(n, -1)[:, : self.vocab_size]

    def argmax(self, logits: torch.Tensor, *, fused: bool | None = None) -> torch.Tensor:
        """This rank's logits [n, V'/W] → the best word [n] of all; ranks send each other values and words, no logits.

        Of equal values the lowest word wins. Words travel as fp32, exact up to 2**24. fused: by weft.ops' kernels; None: where
        the team is on GPUs.
        """
        assert self.vocab_size <= 1 << 24
        if plan_alone(self.mode, self.team).fused if fused is None else fused:
            return ops.join_words(all_gather(ops.best_words(logits, self.start)[None], self.team, self.mode))
        value, index = logits.max(dim=-1)
        pair = torch.stack((value.float(), (index + self.start).float()), dim=-1)
        pairs = all_gather(pair[None], self.team, self.mode).view(self.team.size, -1, 2)
        winner = pairs[:, :, 0].argmax(dim=0)
        return pairs[:, :, 1].gather(0, winner[None])[0].long()
