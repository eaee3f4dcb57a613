"""Recipes in which every rank holds all tokens, [T, H]: decode and batches too small to split.

``FusedNorm`` adds up over the ranks in the kernel of the norm that follows, ``Replicated`` in the GEMM before it. A line with
the name of an op after it is a launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from weft import ops
from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.four_bit import FourBit
from weft.kernels.fp8 import Fp8, RowsBeside
from weft.ops.gemm.small_m_rule import is_small
from weft.parallel import fused
from weft.parallel.plain import UNGATED, norm_all_heads
from weft.parallel.quantized import expert_operands, overlapped_operands, rows_for
from weft.parallel.recipe import Cache, Recipe, wire_text
from weft.parallel.tensors import (
    AttentionWeights,
    ExpertRows,
    LayerWeights,
    MLPWeights,
    MoEWeights,
    NextWeights,
    NormWeights,
    PartialSum,
    VocabWeights,
    own_rows,
    tensor_of,
)

if TYPE_CHECKING:
    from weft.parallel.step import Step
    from weft.runtime.team.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedNorm(Recipe):
    """Fused all-reduce + norm: seven launches a decoder layer.

    With norms after attention and MLP these come with the all-reduce, and the next norm is a launch more.
    deferred_scale  the GEMM after a norm divides its accumulator by the rows' root mean squares, so that the programs of the
                    all-reduce need not wait for a whole row (weft.kernels.deferred_norm)
    wire            as of ``weft.ops.all_reduce``; the first layer's input, which is added up exactly, travels in its dtype
    """

    team: Team
    deferred_scale: bool
    wire: str = "same"
    local: ClassVar[ModuleType] = fused
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
        dtype = tensor_of(x).dtype if residual is None else residual.dtype
        whole = fused.projects_whole(w.attention, step, dtype)
        before_attention = self.before_whole_gemm(step.tokens) if whole else self
        given_to = w.attention_matrix if before_attention.deferred_scale else w.before_attention
        normed, residual = before_attention.add_norm(x, residual, w.input_norm, given_to)
        if inputs is not None:
            inputs.append(residual)
        x, residual = self.attention(normed, w.attention, step, cache), w.attention.with_o_bias(residual)
        x = self.summand(x, w.attention_out_norm, w, residual)
        normed, residual = self.before_mlp(w.mlp, step.tokens).add_norm(x, residual, w.post_norm, w.before_mlp)
        if isinstance(w.mlp, MoEWeights):
            if w.mlp_out_norm is not None:
                return self.summand(self.moe(normed, w.mlp), w.mlp_out_norm, w, residual), residual
            # matmul_route_schedule, grouped_matmul_silu_mul; the second GEMM comes with the next norm
            return PartialSum(fused.expert_rows(normed, w.mlp)), residual
        return self.summand(self.mlp(normed, w.mlp), w.mlp_out_norm, w, residual), residual

    def summand(
        self, x: PartialSum, norm: NormWeights | None, w: LayerWeights, residual: Tensor
    ) -> PartialSum | Tensor:
        """The summand; with a norm the normed sum over the ranks, in the shape and dtype of ``residual``."""
        assert w.residual_scale is None  # ``Replicated`` runs models with one
        if norm is None:
            return x
        return self.without_deferred_scale().all_reduce_norm(x, torch.zeros_like(residual), norm)[0]

    def attention(
        self, x: Tensor | RowsBeside | DeferredNorm, w: AttentionWeights, step: Step, cache: Cache
    ) -> PartialSum:
        qkv = fused.project(x, w, step)
        qkv, w = norm_all_heads(qkv, w, lambda squares: ops.all_reduce(squares, self.team) / self.team.size)
        attended = fused.attend(qkv, w, step, cache)
        return PartialSum(fused.matmul_split(attended, w.o))

    def mlp(self, x: Tensor | DeferredNorm, w: MLPWeights) -> PartialSum:
        gated = fused.gated(x, w)
        return PartialSum(fused.matmul_split(gated, w.down))

    def moe(self, x: Tensor | RowsBeside, w: MoEWeights) -> PartialSum:
        return PartialSum(fused.experts(x, w))

    def embed(self, tokens: Tensor, table: VocabWeights) -> PartialSum:
        return PartialSum(fused.embed(tokens, table))  # vocab_embedding

    def hand_over(self, x: PartialSum | Tensor, residual: Tensor, w: LayerWeights) -> Tensor:
        # all_reduce_rms_norm or add_rms_norm; the normed rows are not used.
        _, hidden = self.add_norm(x, residual, w.post_norm)
        return own_rows(hidden, self.team)

    def take_over(self, rows: Tensor, tokens: int) -> PartialSum:
        # A row comes from one rank and is zero on all other ranks, as in the embedding: the next norm adds them up.
        first = self.team.rank * len(rows)
        whole = rows.new_zeros(len(rows) * self.team.size, rows.shape[1])
        whole[first : first + len(rows)] = rows
        return PartialSum(whole[:tokens])

    def last_norm(
        self, x: PartialSum | Tensor, residual: Tensor, norm: NormWeights, step: Step, rows: Tensor | None
    ) -> Tensor:
        if rows is not None and isinstance(x, PartialSum) and isinstance(x.summand, ExpertRows):
            x = PartialSum(fused.summand_of(x.summand))
        return Recipe.last_norm(self, x, residual, norm, step, rows)

    def of_single_layers(self) -> Replicated:
        return Replicated(team=self.team, local=self.local, wire=self.wire)

    def without_deferred_scale(self) -> FusedNorm:
        return replace(self, deferred_scale=False)

    def with_wire(self, wire: str) -> FusedNorm:
        return replace(self, wire=wire)

    def of_head(self, rows: int) -> FusedNorm:
        return self.before_whole_gemm(rows)

    def before_mlp(self, w: MLPWeights | MoEWeights, rows: int) -> FusedNorm:
        """The recipe of the norm before an MLP or experts."""
        if isinstance(w, MoEWeights):  # a router needs normed rows, and so do grouped GEMMs, which gather them
            return self.without_deferred_scale()
        return self.before_whole_gemm(rows) if w.activation in UNGATED else self

    def before_whole_gemm(self, rows: int) -> FusedNorm:
        """The recipe of a norm before a GEMM whose result no kernel would divide by root mean squares."""
        return self if is_small(rows) else self.without_deferred_scale()

    def add_norm(
        self, x: PartialSum | Tensor, residual: Tensor | None, norm: NormWeights | None, weight: NextWeights = None
    ) -> tuple[Tensor | Fp8 | RowsBeside | DeferredNorm, Tensor]:
        """``all_reduce_norm``, also of rows that are whole, and without a norm."""
        if not isinstance(x, PartialSum):
            return fused.add_norm(x, residual, norm, weight)
        if norm is None:
            wire = "same" if residual is None else self.wire
            return fused.add_norm(ops.all_reduce(tensor_of(x), self.team, wire=wire), residual, None)
        return self.all_reduce_norm(x, residual, norm, weight)

    def all_reduce_norm(
        self, x: PartialSum, residual: Tensor | None, norm: NormWeights, weight: NextWeights = None
    ) -> tuple[Tensor | Fp8 | RowsBeside | DeferredNorm, Tensor]:
        """(normed, hidden): hidden = the sum of x over the ranks + residual.

        weight  of the GEMM that takes the normed rows, in the form that it asks for; None: of 16 bits
        """
        if isinstance(x.summand, ExpertRows) and isinstance(x.summand.down, FourBit):
            # grouped_matmul, moe_sum, then all_reduce_rms_norm
            x = PartialSum(self.local.summand_of(x.summand))
        if isinstance(x.summand, ExpertRows):
            # grouped_matmul, all_reduce_rms_norm, and moe_sum between them by that op's plan
            rows = x.summand
            beside = {"shared": rows.shared, "gate": rows.gate, "bias": rows.bias}
            given = *expert_operands(rows.h, rows.down), rows.schedule, rows.routing, rows.experts
            format = rows_for(weight, residual.dtype)
            if format is not None and format.beside:
                format = None  # that op writes rows in one form
            beside |= {"factored": self.deferred_scale, "fp8": format}
            of_norm = residual, norm.weight, norm.eps
            return ops.grouped_matmul_all_reduce_rms_norm(*given, *of_norm, self.team, **beside)
        summand, wire = tensor_of(x), self.wire
        if residual is None:  # of an embedding, before the first layer
            residual, wire = torch.zeros_like(summand), "same"
        options = {"factored": self.deferred_scale, "fp8": rows_for(weight, residual.dtype), "wire": wire}
        return ops.all_reduce_rms_norm(summand, residual, norm.weight, norm.eps, self.team, **options)

    def __str__(self) -> str:
        scale = ", deferred RMS scale" if self.deferred_scale else ""
        return f"{self.name}, {self.local.NAME}, all-reduce with the next norm{scale}{wire_text(self.wire)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated(Recipe):
    """GEMM-AR, then the norm: for more tokens, and where a layer's result must be whole.

    local  weft.parallel.fused or weft.parallel.plain
    wire   as of ``weft.ops.all_reduce``
    """

    team: Team
    local: ModuleType
    wire: str = "same"
    name: ClassVar[str] = "replicated"

    def attention(self, x: Tensor, w: AttentionWeights, step: Step, cache: Cache) -> Tensor:
        qkv = self.local.project(x, w, step)
        qkv, w = norm_all_heads(qkv, w, lambda squares: ops.all_reduce(squares, self.team) / self.team.size)
        attended = self.local.attend(qkv, w, step, cache)
        return w.with_o_bias(ops.matmul_all_reduce(*overlapped_operands(attended, w.o), self.team, wire=self.wire))

    def mlp(self, x: Tensor, w: MLPWeights) -> Tensor:
        gated = self.local.gated(x, w)
        return ops.matmul_all_reduce(*overlapped_operands(gated, w.down), self.team, wire=self.wire)

    def before_attention(self, w: LayerWeights) -> NextWeights:
        return w.before_attention

    def before_mlp(self, w: LayerWeights) -> NextWeights:
        return w.before_mlp

    def moe(self, x: Tensor | RowsBeside, w: MoEWeights) -> Tensor:
        summand = self.local.experts(x, w)
        return ops.all_reduce(summand, self.team)

    def embed(self, tokens: Tensor, table: VocabWeights) -> Tensor:
        x = self.local.embed(tokens, table)  # vocab_embedding
        return ops.all_reduce(x, self.team)

    def take_over(self, rows: Tensor, tokens: int) -> Tensor:
        return ops.all_gather(rows, self.team)[:tokens]

    def with_wire(self, wire: str) -> Replicated:
        return replace(self, wire=wire)

    def __str__(self) -> str:
        return f"{self.name}, {self.local.NAME}{wire_text(self.wire)}"
