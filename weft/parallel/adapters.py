"""Recipes of a decoder with low-rank adapters (LoRA), each added to the result of a GEMM."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from weft import ops
from weft.ops.gemm.add_adapters import by_torch
from weft.parallel import fused
from weft.parallel.plain import norm_all_heads
from weft.parallel.quantized import gemm_operands, linear
from weft.parallel.recipe import Cache, Hidden, Recipe
from weft.parallel.replicated import FusedNorm, Replicated
from weft.parallel.tensors import AttentionWeights, PartialSum

if TYPE_CHECKING:
    from weft.kernels.fp8 import Fp8
    from weft.parallel.step import Step
    from weft.parallel.tensors import LayerWeights, Lora, Matrix, MLPWeights
    from weft.runtime.team.team import Team


def with_adapters(recipe: Recipe, team: Team) -> AdaptedNorm | Adapted:
    """Recipe with adapters in place of one without: with the all-reduce in the norm, or by itself."""
    if isinstance(recipe, FusedNorm):
        return AdaptedNorm(team=team)
    return Adapted(team=team, local=recipe.local)


def adapted_matmul(
    x: Tensor | Fp8, weight: Matrix, lora: Lora | None, adapters: Tensor | None, local: ModuleType
) -> Tensor:
    """x @ weight.T + scale[a] * x @ A[a].T @ B[a].T, with a = adapters[row].

    A row of -1 has no second term. Of a row-parallel matrix, whose A is cut by columns, this is the rank's summand.
    """
    y = ops.matmul(*gemm_operands(x, weight)) if local.FUSED else linear(x, weight)
    if lora is None or adapters is None:
        return y
    if not local.FUSED:
        return by_torch(y, x, *lora, adapters)
    ops.add_adapters(y, x, *lora, adapters)
    return y


def attention_summand(
    x: Tensor | Fp8, w: AttentionWeights, step: Step, cache: Cache, local: ModuleType, team: Team
) -> Tensor:
    """This rank's summand of attention, without the bias of the sum."""
    qkv = adapted_matmul(x, w.qkv, w.qkv_lora, step.adapters, local)
    qkv, w = norm_all_heads(qkv, w, lambda squares: ops.all_reduce(squares, team) / team.size)
    attended = local.attend(qkv, w, step, cache)
    return adapted_matmul(attended, w.o, w.o_lora, step.adapters, local)


def mlp_summand(x: Tensor | Fp8, w: MLPWeights, adapters: Tensor | None, local: ModuleType) -> Tensor:
    """This rank's summand of an MLP."""
    gate_up = adapted_matmul(x, w.gate_up, w.gate_up_lora, adapters, local)
    gated = local.activated(gate_up, w)
    return adapted_matmul(gated, w.down, w.down_lora, adapters, local)


class WithAdapters(Recipe):
    """Part of both recipes. rows: adapter of each row, of the step that runs."""

    __slots__ = ()
    rows: Tensor | None

    def decoder_layer(
        self, x: Hidden, residual: Hidden, w: LayerWeights, step: Step, *more: Any
    ) -> tuple[Hidden, Hidden]:
        of_step = replace(self, rows=step.adapters)  # type: ignore[type-var]  # subclasses are dataclasses
        return super(WithAdapters, of_step).decoder_layer(x, residual, w, step, *more)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedNorm(WithAdapters, FusedNorm):
    """``FusedNorm`` with adapters, without split-K partials and deferred scales: few tokens."""

    deferred_scale: bool = False
    rows: Tensor | None = field(default=None, compare=False)
    name: ClassVar[str] = "replicated"

    def attention(self, x: Tensor | Fp8, w: AttentionWeights, step: Step, cache: Cache) -> PartialSum:
        if not isinstance(w, AttentionWeights):  # latents and delta nets have no adapters
            return FusedNorm.attention(self, x, w, step, cache)
        return PartialSum(attention_summand(x, w, step, cache, fused, self.team))

    def mlp(self, x: Tensor | Fp8, w: MLPWeights) -> PartialSum:
        return PartialSum(mlp_summand(x, w, self.rows, fused))

    def of_single_layers(self) -> Adapted:
        return Adapted(team=self.team, local=self.local)

    def __str__(self) -> str:
        return f"{self.name} with adapters, {self.local.NAME}, all-reduce with the next norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted(WithAdapters, Replicated):
    """``Replicated`` with adapters: a GEMM, adapters, and of a row-parallel one the all-reduce."""

    rows: Tensor | None = field(default=None, compare=False)

    def attention(self, x: Tensor | Fp8, w: AttentionWeights, step: Step, cache: Cache) -> Tensor:
        if not isinstance(w, AttentionWeights):
            return Replicated.attention(self, x, w, step, cache)
        summand = attention_summand(x, w, step, cache, self.local, self.team)
        return w.with_o_bias(ops.all_reduce(summand, self.team))

    def mlp(self, x: Tensor | Fp8, w: MLPWeights) -> Tensor:
        return ops.all_reduce(mlp_summand(x, w, self.rows, self.local), self.team)

    def __str__(self) -> str:
        return f"{self.name} with adapters, {self.local.NAME}"
