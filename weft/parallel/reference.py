"""Recipe in torch's operations and torch.distributed: the baseline of tests and benchmarks.

Every rank holds all tokens, [T, H]. The functions take tensors and functions alone, so that torch.compile can take them:
``attend`` is attention over some kind of cache, ``all_reduce`` the sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from weft.parallel import plain
from weft.parallel.tensors import AttentionWeights, LayerWeights, MLPWeights, NormWeights, VocabWeights

if TYPE_CHECKING:
    from weft.parallel.step import Step
    from weft.runtime.team import Team

AllReduce = Callable[[Tensor], Tensor]
# (qkv [T, (heads + 2 kv_heads) * head_dim], weights, tokens of the step, keys and values of the layer) -> [T, heads * head_dim]
Attend = Callable[[Tensor, AttentionWeights, Any, Any], Tensor]


def decoder_layer(
    x: Tensor, residual: Tensor | None, w: LayerWeights, step: Any, cache: Any, attend: Attend, all_reduce: AllReduce
) -> tuple[Tensor, Tensor]:
    normed, residual = plain.add_norm(x, residual, w.input_norm)
    x = attention(normed, w.attention, step, cache, attend, all_reduce)
    normed, residual = plain.add_norm(x, residual, w.post_norm)
    return mlp(normed, w.mlp, all_reduce), residual


def attention(x: Tensor, w: AttentionWeights, step: Any, cache: Any, attend: Attend, all_reduce: AllReduce) -> Tensor:
    qkv = F.linear(x, w.qkv)
    attended = attend(qkv, w, step, cache)
    return all_reduce(F.linear(attended, w.o))


def mlp(x: Tensor, w: MLPWeights, all_reduce: AllReduce) -> Tensor:
    gated = plain.gated(x, w)
    return all_reduce(F.linear(gated, w.down))


def embed(tokens: Tensor, table: VocabWeights, all_reduce: AllReduce) -> Tensor:
    return all_reduce(plain.embed(tokens, table))


def logits(x: Tensor, residual: Tensor, norm: NormWeights, head: VocabWeights) -> Tensor:
    normed, _ = plain.add_norm(x, residual, norm)
    return plain.logits(normed, head)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The functions of this file over a paged cache, their sums by torch.distributed."""

    team: Team
    local: ClassVar[ModuleType] = plain
    name: ClassVar[str] = "reference"

    def decoder_layer(
        self, x: Tensor, residual: Tensor | None, w: LayerWeights, step: Step, cache: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        return decoder_layer(x, residual, w, step, cache, plain.attend, self.team.library.all_reduce)

    def attention(self, x: Tensor, w: AttentionWeights, step: Step, cache: tuple[Tensor, Tensor]) -> Tensor:
        return attention(x, w, step, cache, plain.attend, self.team.library.all_reduce)

    def mlp(self, x: Tensor, w: MLPWeights) -> Tensor:
        return mlp(x, w, self.team.library.all_reduce)

    def embed(self, tokens: Tensor, table: VocabWeights) -> Tensor:
        return embed(tokens, table, self.team.library.all_reduce)

    def logits(
        self, x: Tensor, residual: Tensor, norm: NormWeights, head: VocabWeights, step: Step, rows: Tensor | None
    ) -> Tensor:
        if rows is not None:
            x, residual = x[rows], residual[rows]
        return logits(x, residual, norm, head)

    def __str__(self) -> str:
        return f"{self.name}, cuBLAS and torch.distributed"
