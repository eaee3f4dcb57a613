"""Embedding and head split by token id: rank r has ids from r * V'/W on, V' = V padded to a multiple."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from weft import ops
from weft.kernels.slices import SLICES
from weft.ops.vocab.sample_argmax import EXCLUDED, NOT_FINITE
from weft.parallel.linear import empty_parameter
from weft.parallel.modes import Mode, mode_named
from weft.parallel.sharding import Shard
from weft.parallel.step_plan import plan_layer
from weft.parallel.tensors import VocabWeights, tensor_of

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


def all_gather(x: Tensor, team: Team, mode: Mode) -> Tensor:
    """x[n, ...] of every rank, one below another: [W * n, ...]; in mode "reference" by torch.distributed.

    Of one rank x itself, without a copy.
    """
    if team.size == 1:
        return x
    return team.library.all_gather(x) if mode == "reference" else ops.all_gather(x, team)


class VocabParallel(nn.Module):
    """This rank's rows of a [V, hidden] weight. Rows past V are zero, and no checkpoint has them."""

    def __init__(self, vocab_size: int, hidden_size: int, *, team: Team, mode: Mode, dtype: torch.dtype) -> None:
        super().__init__()
        self.team, self.mode, self.vocab_size = team, mode_named(mode), vocab_size
        # In mode "invariant" a rank's rows are whole eighths, whose sums a softmax over the vocabulary adds up in a tree.
        self.local_size = -(-vocab_size // team.size)
        if self.mode == "invariant":
            self.local_size = -(-vocab_size // SLICES) * (SLICES // team.size)
        self.start = team.rank * self.local_size
        self.real_size = max(min(self.local_size, vocab_size - self.start), 0)
        self.weight = empty_parameter(self.local_size, hidden_size, team=team, dtype=dtype)
        self.weight.data[self.real_size :].zero_()

    @property
    def weights(self) -> VocabWeights:
        return VocabWeights(self.weight, self.start, self.real_size)

    def shards(self) -> dict[str, Shard]:
        shape = (self.vocab_size, self.weight.shape[1])
        return {"weight": Shard(target=self.weight.data[: self.real_size], shape=shape, start=self.start)}


class VocabParallelEmbedding(VocabParallel):
    """x = weight[tokens]          tokens: [n]; x: [n, hidden], or this rank's [n'/W, hidden] of it

    scale  factor of x; None: 1
    """

    scale: float | None = None

    @property
    def weights(self) -> VocabWeights:
        return super().weights._replace(scale=self.scale)

    def forward(self, tokens: Tensor) -> Tensor:
        # Every row comes from one rank and is zero on all other ranks, so the sum over ranks is exact.
        recipe = plan_layer(len(tokens), mode=self.mode, team=self.team).recipe
        return tensor_of(recipe.embed(tokens, self.weights))


class VocabParallelHead(VocabParallel):
    """x[n, hidden], the same on every rank → this rank's logits [n, V'/W], -inf for token ids past V.

    divisor, softcap  logits are softcap * tanh(x @ weight.T / divisor / softcap); None: without
    """

    divisor: float | None = None
    softcap: float | None = None

    @property
    def weights(self) -> VocabWeights:
        return super().weights._replace(divisor=self.divisor, softcap=self.softcap)

    def forward(self, x: Tensor) -> Tensor:
        return plan_layer(len(x), mode=self.mode, team=self.team).recipe.local.logits(x, self.weights)

    def gather(self, logits: Tensor) -> Tensor:
        """Concatenate every rank's logits [n, V'/W] to [n, V], the same on every rank."""
        n, local = logits.shape
        by_rank = all_gather(logits[None], self.team, self.mode).view(self.team.size, n, local)
        return by_rank.transpose(0, 1).reshape(n, -1)[:, : self.vocab_size]

    def argmax(self, logits: Tensor, *, fused: bool | None = None) -> Tensor:
        """Token id [n] of the largest logit of all ranks. Ranks exchange pairs of value and id, no logits.

        Of equal values the lowest id wins. -1 for a row of -inf, -2 for one with NaN or +inf (weft.ops.sample_argmax).
        Ids travel as fp32, exact up to 2**24. fused: by weft's kernels; None: where the
        team is on GPUs, but not in mode "reference".
        """
        assert self.vocab_size <= 1 << 24
        if plan_layer(1, mode=self.mode, team=self.team).fused if fused is None else fused:
            return ops.join_argmax(all_gather(ops.sample_argmax(logits, self.start)[None], self.team, self.mode))
        pairs = all_gather(best_pairs(logits, self.start)[None], self.team, self.mode)
        return best_of(pairs.view(self.team.size, -1, 2))


def best_pairs(logits: Tensor, start: int) -> Tensor:
    """Pairs [n, 2] fp32: each row's largest logit here and its token id, as of ``ops.sample_argmax``."""
    value, index = logits.max(dim=-1)  # NaN counts as the largest
    finite = value < torch.inf
    pair = torch.where(finite, value.float(), torch.inf), torch.where(finite, (index + start).float(), NOT_FINITE.value)
    return torch.stack(pair, dim=-1)


def best_of(pairs: Tensor) -> Tensor:
    """Token id [n] of the largest logit in the ranks' pairs [W, n, 2], as of ``ops.join_argmax``."""
    winner = pairs[:, :, 0].argmax(dim=0)
    token = pairs[:, :, 1].gather(0, winner[None])[0].long()
    return torch.where(pairs[:, :, 0].amax(dim=0) > -torch.inf, token, EXCLUDED.value)
