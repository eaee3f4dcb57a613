"""Recipe in torch's operations and torch.distributed: the baseline of tests and benchmarks.

Every rank holds all tokens, [T, H]. Shapes do not depend on values, and torch.compile can trace the methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from weft.parallel import plain
from weft.parallel.quantized import linear
from weft.parallel.recipe import Cache, Recipe
from weft.parallel.tensors import AttentionWeights, MLPWeights, MoEWeights, VocabWeights

if TYPE_CHECKING:
    from weft.parallel.sequences import Sequences
    from weft.parallel.step import Step
    from weft.runtime.team.team import Team

AllReduce = Callable[[Tensor], Tensor]
Experts = Callable[[Tensor, MoEWeights], Tensor]
# (qkv [T, (heads + 2 kv_heads) * head_dim], weights, tokens of the step, keys and values of the layer) -> [T, heads * head_dim]
Attend = Callable[[Tensor, AttentionWeights, Any, Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference(Recipe):
    """cuBLAS, torch's operations, and an all-reduce after every row-parallel GEMM.

    attend      attention over some kind of cache; that over a paged one if not given
    all_reduce  sum over the ranks; None: torch.distributed's
    experts     this rank's summand of a mixture of experts
    """

    team: Team
    attend: Attend = plain.attend
    all_reduce: AllReduce | None = None
    experts: Experts = plain.experts
    local: ClassVar[ModuleType] = plain
    name: ClassVar[str] = "reference"

    def attention(self, x: Tensor, w: AttentionWeights, step: Step | Sequences, cache: Cache) -> Tensor:
        qkv = plain.project(x, w, step)
        qkv, w = plain.norm_all_heads(qkv, w, lambda squares: self.sum(squares) / self.team.size)
        attended = self.attend(qkv, w, step, cache)
        return w.with_o_bias(self.sum(linear(attended, w.o)))

    def mlp(self, x: Tensor, w: MLPWeights) -> Tensor:
        gated = plain.gated(x, w)
        return self.sum(linear(gated, w.down))

    def moe(self, x: Tensor, w: MoEWeights) -> Tensor:
        return self.sum(self.experts(x, w))

    def embed(self, tokens: Tensor, table: VocabWeights) -> Tensor:
        return self.sum(plain.embed(tokens, table))

    def take_over(self, rows: Tensor, tokens: int) -> Tensor:
        return self.team.library.all_gather(rows)[:tokens]

    def sum(self, x: Tensor) -> Tensor:
        return self.team.library.all_reduce(x) if self.all_reduce is None else self.all_reduce(x)

    def __str__(self) -> str:
        return f"{self.name}, cuBLAS and torch.distributed"
