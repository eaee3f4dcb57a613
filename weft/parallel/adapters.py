"""Low-rank adapters (LoRA) of a rank's matrices, and the recipe of a decoder that has some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from weft import ops
from weft.ops.gemm.add_adapters import by_torch
from weft.parallel.plain import norm_all_heads
from weft.parallel.quantized import gemm_operands, linear
from weft.parallel.replicated import Replicated

if TYPE_CHECKING:
    from weft.parallel.step import Step
    from weft.parallel.tensors import AttentionWeights, LayerWeights, Lora, MLPWeights

Cache = tuple[Tensor, ...]


def add_adapters(y: Tensor, x: Tensor, lora: Lora | None, adapters: Tensor | None, *, fused: bool) -> Tensor:
    """y + scale[a] * x @ A[a].T @ B[a].T, with a = adapters[row] [T] int32; rows of -1 stay as they are.

    Of a row-parallel matrix, whose A is cut by columns, this is an addition to the rank's summand.
    fused  by weft's kernels, in place
    """
    if lora is None or adapters is None:
        return y
    if fused:
        ops.add_adapters(y, x, *lora, adapters)
        return y
    return by_torch(y, x, *lora, adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted(Replicated):
    """``Replicated`` with adapters, each added to the result of a GEMM before anything else takes it.

    So no kernel computes a GEMM together with what follows it: a GEMM, adapters, and of a row-parallel one the all-reduce.
    """

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
        return self.output(self.adapted_mlp(normed, w.mlp, step), w.mlp_out_norm, w), residual

    def attention(self, x: Tensor, w: AttentionWeights, step: Step, cache: Cache) -> Tensor:
        qkv = self._adapted_matmul(x, w.qkv, w.qkv_lora, step)
        qkv, w = norm_all_heads(qkv, w, lambda squares: ops.all_reduce(squares, self.team) / self.team.size)
        attended = self.local.attend(qkv, w, step, cache)
        summand = self._adapted_matmul(attended, w.o, w.o_lora, step)
        return w.with_o_bias(ops.all_reduce(summand, self.team))

    def adapted_mlp(self, x: Tensor, w: MLPWeights, step: Step) -> Tensor:
        gate_up = self._adapted_matmul(x, w.gate_up, w.gate_up_lora, step)
        gated = self.local.silu_mul(gate_up, w.down, w.activation)
        summand = self._adapted_matmul(gated, w.down, w.down_lora, step)
        return ops.all_reduce(summand, self.team)

    def _adapted_matmul(self, x: Tensor, weight: Tensor, lora: Lora | None, step: Step) -> Tensor:
        fused = self.local.FUSED
        y = ops.matmul(*gemm_operands(x, weight)) if fused else linear(x, weight)
        return add_adapters(y, x, lora, step.adapters, fused=fused)

    def __str__(self) -> str:
        return f"{self.name} with adapters, {self.local.NAME}"
