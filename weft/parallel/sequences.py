"""Sequences of a pass without a paged cache: for training, and in models of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from weft.parallel.recipe import StepPlan
from weft.parallel.rotary import Angles
from weft.parallel.tensors import AttentionWeights

# (q [batch, heads, length, head_dim], k and v [batch, kv_heads, length, head_dim]) -> [batch, length, heads, head_dim]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """`batch` sequences of `length` tokens, in place of a ``Step``. Differentiable.

    angles  [batch or 1, length, head_dim]: rotary_angles at the tokens' positions, or several tables, as of a Step
    attend  attention of queries and keys after their rotary embedding, over a cache of the caller's perhaps; None: causal, of
            these tokens, in the weights' window
    plan    the recipe, and why

    In mode "sequence_parallel" a rank has length / W tokens of each sequence: x[:, rank * length / W :][:, : length / W].
    """

    plan: StepPlan
    batch: int
    length: int
    angles: Angles
    attend: Attend | None = None

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def shards(self) -> int:
        """Number of ranks that the tokens between two layers are split over."""
        return self.plan.recipe.team.size if self.plan.mode == "sequence_parallel" else 1

    def by_cudnn(self, w: AttentionWeights) -> bool:
        """True: torch's attention takes queries, keys and values as they are."""
        return True
