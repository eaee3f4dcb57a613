"""Recipe in torch's operations and torch.distributed: the baseline of tests and benchmarks.

Every rank holds all tokens, [T, H]. The functions take tensors and functions alone, so that torch.compile can take them:
``attend`` is attention over some kind of cache, ``all_reduce`` the sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional as F

from weft.parallel import plain
from weft.parallel.tensors import AttentionWeights, LayerWeights, MLPWeights, NormWeights, VocabWeights

if TYPE_CHECKING:
    from weft.parallel.step import Step
    from weft.runtime.team import Team

AllReduce = Callable[[torch.Tensor], torch.Tensor]
# (qkv [T, (heads + 2 kv_heads) * head_dim], weights, tokens of the step, keys and values of the layer) -> [T, heads * head_dim]
Attend = Callable[[torch.Tensor, AttentionWeights, Any, Any], torch.Tensor]


def decoder_layer(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    w: LayerWeights,
    step: Any,
    cache: Any,
    attend: Attend,
    all_reduce: AllReduce,
) -> tuple[torch.Tensor, torch.Tensor]:
    normed, residual = plain.add_norm(x, residual, w.input_norm)
    x = attention(normed, w.attention, step, cache, attend, all_reduce)
    normed, residual = plain.add_norm(x, residual, w.post_norm)
    return mlp(normed, w.mlp, all_reduce), residual


def attention(
    x: torch.Tensor, w: AttentionWeights, step: Any, cache: Any, attend: Attend, all_reduce: AllReduce
) -> torch.Tensor:
    qkv = F.linear(x, w.qkv)
    attended = attend(qkv, w, step, cache)
    return all_reduce(F.linear(attended, w.o))


def mlp(x: torch.Tensor, w: MLPWeights, all_reduce: AllReduce) -> torch.Tensor:
    gated = plain.gated(x, w)
    return all_reduce(F.linear(gated, w.down))


def embed(tokens: torch.Tensor, table: VocabWeights, all_reduce: AllReduce) -> torch.Tensor:
    return all_reduce(plain.embed(tokens, table))


def logits(x: torch.Tensor, residual: torch.Tensor, norm: NormWeights, head: VocabWeights) -> torch.Tensor:
    normed, _ = plain.add_norm(x, residual, norm)
    return plain.logits(normed, head)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The functions of this file over a paged cache, their sums by torch.distributed."""

    team: Team
    local: ClassVar[ModuleType] = plain
    name: ClassVar[str] = "reference"

    def decoder_layer(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        w: LayerWeights,
        step: Step,
        cache: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return decoder_layer(x, residual, w, step, cache, plain.attend, self.team.library.all_reduce)

    def attention(
        self, x: torch.Tensor, w: AttentionWeights, step: Step, cache: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        return attention(x, w, step, cache, plain.attend, self.team.library.all_reduce)

    def mlp(self, x: torch.Tensor, w: MLPWeights) -> torch.Tensor:
        return mlp(x, w, self.team.library.all_reduce)

    def embed(self, tokens: torch.Tensor, table: VocabWeights) -> torch.Tensor:
        return embed(tokens, table, self.team.library.all_reduce)

    def logits(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: NormWeights,
        head: VocabWeights,
        step: Step,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        if rows is not None:
            x, residual = x[rows], residual[rows]
        return logits(x, residual, norm, head)

    def given(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def __str__(self) -> str:
        return f"{self.name}, cuBLAS and torch.distributed"
