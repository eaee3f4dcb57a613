"""Recipes of a decoder with low-rank adapters (LoRA), each added to the result of a GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from weft import ops
from weft.ops.gemm.add_adapters import by_torch
from weft.parallel import fused
from weft.parallel.plain import norm_all_heads
from weft.parallel.quantized import gemm_operands, linear
from weft.parallel.recipe import Recipe
from weft.parallel.replicated import FusedNorm, Replicated
from weft.parallel.tensors import PartialSum

if TYPE_CHECKING:
    from weft.parallel.step import Step
    from weft.parallel.tensors import AttentionWeights, LayerWeights, Lora, MLPWeights
    from weft.runtime.team.team import Team

Cache = tuple[Tensor, ...]


def with_adapters(recipe: Recipe, team: Team) -> AdaptedNorm | Adapted:
    """Recipe with adapters in place of one without: with the all-reduce in the norm, or by itself."""
    if isinstance(recipe, FusedNorm):
        return AdaptedNorm(team=team)
    return Adapted(team=team, local=recipe.local)


def adapted_matmul(x: Tensor, weight: Tensor, lora: Lora | None, step: Step, local: ModuleType) -> Tensor:
    """x @ weight.T + scale[a] * x @ A[a].T @ B[a].T, with a = step.adapters[row].

    A row of -1 has no second term. Of a row-parallel matrix, whose A is cut by columns, this is the rank's summand.
    """
    y = ops.matmul(*gemm_operands(x, weight)) if local.FUSED else linear(x, weight)
    if lora is None or step.adapters is None:
        return y
    if not local.FUSED:
        return by_torch(y, x, *lora, step.adapters)
    ops.add_adapters(y, x, *lora, step.adapters)
    return y


def attention_summand(
    x: Tensor, w: AttentionWeights, step: Step, cache: Cache, local: ModuleType, team: Team
) -> Tensor:
    """This rank's summand of attention, without the bias of the sum."""
    qkv = adapted_matmul(x, w.qkv, w.qkv_lora, step, local)
    qkv, w = norm_all_heads(qkv, w, lambda squares: ops.all_reduce(squares, team) / team.size)
    attended = local.attend(qkv, w, step, cache)
    return adapted_matmul(attended, w.o, w.o_lora, step, local)


def mlp_summand(x: Tensor, w: MLPWeights, step: Step, local: ModuleType) -> Tensor:
    """This rank's summand of an MLP."""
    gate_up = adapted_matmul(x, w.gate_up, w.gate_up_lora, step, local)
    gated = local.silu_mul(gate_up, w.last_matrix, w.activation)
    return adapted_matmul(gated, w.down, w.down_lora, step, local)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedNorm(FusedNorm):
    """``FusedNorm`` with adapters, without split-K partials and deferred scales: few tokens."""

    deferred_scale: bool = False
    name: ClassVar[str] = "replicated"

    def decoder_layer(
        self,
        x: PartialSum | Tensor,
        residual: Tensor | None,
        w: LayerWeights,
        step: Step,
        cache: Cache,
        inputs: list[Tensor] | None = None,
    ) -> tuple[PartialSum | Tensor, Tensor]:
        normed, residual = self.add_norm(x, residual, w.input_norm)
        if inputs is not None:
            inputs.append(residual)
        summand = attention_summand(normed, w.attention, step, cache, fused, self.team)
        x, residual = self.output(PartialSum(summand), w.attention_out_norm, w), w.attention.with_o_bias(residual)
        normed, residual = self.add_norm(x, residual, w.post_norm)
        return self.output(PartialSum(mlp_summand(normed, w.mlp, step, fused)), w.mlp_out_norm, w), residual

    def of_single_layers(self) -> Adapted:
        return Adapted(team=self.team, local=self.local)

    def __str__(self) -> str:
        return f"{self.name} with adapters, {self.local.NAME}, all-reduce with the next norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted(Replicated):
    """``Replicated`` with adapters: a GEMM, adapters, and of a row-parallel one the all-reduce."""

    def decoder_layer(
        self,
        x: Tensor,
        residual: Tensor | None,
        w: LayerWeights,
        step: Step,
        cache: Cache,
        inputs: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        normed, residual = self.local.add_norm(x, residual, w.input_norm)
        if inputs is not None:
            inputs.append(residual)
        x = self.output(self.attention(normed, w.attention, step, cache), w.attention_out_norm, w)
        normed, residual = self.local.add_norm(x, residual, w.post_norm)
        summed = ops.all_reduce(mlp_summand(normed, w.mlp, step, self.local), self.team)
        return self.output(summed, w.mlp_out_norm, w), residual

    def attention(self, x: Tensor, w: AttentionWeights, step: Step, cache: Cache) -> Tensor:
        summand = attention_summand(x, w, step, cache, self.local, self.team)
        return w.with_o_bias(ops.all_reduce(summand, self.team))

    def __str__(self) -> str:
        return f"{self.name} with adapters, {self.local.NAME}"
