"""Recipes in which a rank holds 1/W of the tokens between the halves of a layer: overlapped prefill.

Column-parallel GEMMs gather the tokens, row-parallel ones scatter the sums. A line with the name of an op after it is a
launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from torch.nn import functional as F

from weft import ops
from weft.parallel.delta_net import with_rates
from weft.parallel.plain import norm_all_heads
from weft.parallel.quantized import (
    expert_operands,
    gemm_operands,
    grouped_operands,
    overlapped_operands,
    padded,
    rows_between,
)
from weft.parallel.recipe import Cache, Recipe, wire_text
from weft.parallel.tensors import (
    AttentionWeights,
    LayerWeights,
    Matrix,
    MLPWeights,
    MoEWeights,
    NormWeights,
    SequenceShard,
    VocabWeights,
)

if TYPE_CHECKING:
    from weft.parallel.step import Step
    from weft.runtime.team.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParallel(Recipe):
    """AG-GEMM and GEMM-RS: communication under the GEMMs of other ranks' tokens.

    local  weft.parallel.fused or weft.parallel.plain
    wire   as of ``weft.ops.matmul_reduce_scatter``
    """

    team: Team
    local: ModuleType
    wire: str = "same"
    name: ClassVar[str] = "sequence_parallel"

    def output(self, x: SequenceShard, norm: NormWeights | None, w: LayerWeights) -> SequenceShard:
        return SequenceShard(self.local.output(x.rows, norm, w.residual_scale))

    def attention(self, x: SequenceShard, w: AttentionWeights, step: Step, cache: Cache) -> SequenceShard:
        qkv = ops.all_gather_matmul(*overlapped_operands(x.rows, w.qkv), self.team)
        qkv, w = norm_all_heads(qkv, w, lambda squares: ops.all_reduce(squares, self.team) / self.team.size)
        padding = len(qkv) - step.tokens
        # Of all heads, by the rank that has the rows: a hundredth of the rows' bytes, which no GEMM would hide.
        qkv = with_rates(qkv[: step.tokens], w, lambda rates: self.whole_rows(ops.matmul(x.rows, rates), step.tokens))
        attended = self.local.attend(qkv, w, step, cache)
        attended = padded(attended, padding)
        summed = ops.matmul_reduce_scatter(*overlapped_operands(attended, w.o), self.team, wire=self.wire)
        return SequenceShard(w.with_o_bias(summed))

    def mlp(self, x: SequenceShard, w: MLPWeights) -> SequenceShard:
        # All tokens are treated alike between the two GEMMs, so within a node they stay in the order in which they arrive.
        own_first = self.team.rail is None
        gate_up = ops.all_gather_matmul(*overlapped_operands(x.rows, w.gate_up), self.team, own_first=own_first)
        gated = self.local.activated(gate_up, w)
        return SequenceShard(
            ops.matmul_reduce_scatter(
                *overlapped_operands(gated, w.down), self.team, own_first=own_first, wire=self.wire
            )
        )

    def moe(self, x: SequenceShard, w: MoEWeights) -> SequenceShard:
        return self.chosen(x, w) if w.shared is None else self.with_shared(x, w, w.shared)

    def with_shared(self, x: SequenceShard, w: MoEWeights, shared: MLPWeights) -> SequenceShard:
        """A mixture with a shared expert: rows travel under its first GEMM, which needs all rows.

        Sums of all experts travel under the last GEMM.

        gemms  | shared gate_up, router | shared down | experts' gate_up | experts' down by slabs |
        copy    | rows of other ranks |                                        | sums to their ranks |
        """
        if not isinstance(shared.gate_up, Tensor):
            # The router takes rows that are not rounded to fp8, and its weight is of 16 bits.
            (logits,), rows = ops.all_gather_matmul(x.rows, [w.router], self.team, return_gathered=True)
            gate_up = ops.matmul(*gemm_operands(rows, shared.gate_up))
        else:
            both = [shared.gate_up, w.router]
            (gate_up, logits), rows = ops.all_gather_matmul(x.rows, both, self.team, return_gathered=True)
        gated = self.local.activated(gate_up, shared)
        beside = ops.matmul(*gemm_operands(gated, shared.down))
        routing, gate = self.local.choose(logits, w)
        # In the order of the tokens: all rows are here.
        schedule = ops.moe_schedule(routing.ids, w.experts, tickets=w.tickets)
        format = rows_between(w.gate_up, w.down, rows.dtype)
        h = ops.grouped_matmul_silu_mul(*grouped_operands(rows, w.gate_up), schedule, fp8=format, **w.of_first)
        dispatched, count = ops.Dispatched(rows, routing, w.experts), len(x.rows)
        options = {"shared": beside, "gate": gate, "bias": w.down_bias}
        return SequenceShard(
            ops.grouped_matmul_reduce_scatter(
                *expert_operands(h, w.down), schedule, dispatched, count, self.team, **options
            )
        )

    def chosen(self, x: SequenceShard, w: MoEWeights) -> SequenceShard:
        """A mixture without a shared expert: rows travel under the experts' first GEMM."""
        routing, count = self.local.route(x.rows, w), len(x.rows)
        (rows, gate_up), format = expert_operands(x.rows, w.gate_up), rows_between(w.gate_up, w.down, x.rows.dtype)
        h, schedule, dispatched = ops.all_gather_grouped_matmul_silu_mul(
            rows, routing, gate_up, w.experts, self.team, max_tokens=count, fp8=format, **w.of_first
        )
        return SequenceShard(
            ops.grouped_matmul_reduce_scatter(
                *expert_operands(h, w.down), schedule, dispatched, count, self.team, bias=w.down_bias
            )
        )

    def embed(self, tokens: Tensor, table: VocabWeights) -> SequenceShard:
        x = self.local.embed(tokens, table)  # vocab_embedding
        padding = -len(tokens) % self.team.size
        x = F.pad(x, (0, 0, 0, padding)) if padding else x
        return SequenceShard(ops.reduce_scatter(x, self.team))

    def whole_rows(self, x: Tensor, tokens: int) -> Tensor:
        return ops.all_gather(x, self.team)[:tokens]

    def hand_over(self, x: SequenceShard, residual: SequenceShard, w: LayerWeights) -> Tensor:
        return x.rows + residual.rows

    def take_over(self, rows: Tensor, tokens: int) -> SequenceShard:
        return SequenceShard(rows)

    def last_norm(
        self, x: SequenceShard, residual: SequenceShard, norm: NormWeights, step: Step, rows: Tensor | None
    ) -> Tensor:
        if rows is None:
            normed, _ = self.add_norm(x, residual, norm)
            whole = ops.all_gather(normed.rows, self.team)[: step.tokens]
        else:
            hidden = ops.all_reduce(self.rows_of(x, residual, rows), self.team)
            whole, _ = self.local.add_norm(hidden, None, norm)
        return whole

    def given(self, x: Tensor) -> SequenceShard:
        return SequenceShard(x)

    def rows_of(self, x: SequenceShard, residual: SequenceShard, rows: Tensor) -> Tensor:
        """Hidden states of these tokens, zero for tokens of other ranks: the sum over the ranks is exact."""
        count = len(x.rows)
        local = rows - self.team.rank * count
        at = local.clamp(0, count - 1)
        return (x.rows[at] + residual.rows[at]).masked_fill(((local < 0) | (local >= count))[:, None], 0)

    def add_norm(
        self, x: SequenceShard, residual: SequenceShard | None, norm: NormWeights, weight: Matrix | None = None
    ) -> tuple[SequenceShard, SequenceShard]:
        normed, hidden = self.local.add_norm(x.rows, None if residual is None else residual.rows, norm, weight)
        return SequenceShard(normed), SequenceShard(hidden)

    def with_wire(self, wire: str) -> SequenceParallel:
        return replace(self, wire=wire)

    def __str__(self) -> str:
        return f"{self.name}, {self.local.NAME}{wire_text(self.wire)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredMLP(SequenceParallel):
    """For tokens too few to overlap: MLPs gather them first, so that silu needs no further launch."""

    def before_mlp(self, w: LayerWeights) -> None:
        # Gathered in 16 bits: a further collective, of scales, would take as long as a kernel that puts the rows in fp8.
        return None

    def mlp(self, x: SequenceShard, w: MLPWeights) -> SequenceShard:
        whole = ops.all_gather(x.rows, self.team)
        gated = self.local.gated(whole, w)
        return SequenceShard(ops.matmul_reduce_scatter(*overlapped_operands(gated, w.down), self.team, wire=self.wire))

    def with_shared(self, x: SequenceShard, w: MoEWeights, shared: MLPWeights) -> SequenceShard:
        whole = ops.all_gather(x.rows, self.team)
        summand = self.local.experts(whole, w)
        return SequenceShard(ops.reduce_scatter(summand, self.team))

    def __str__(self) -> str:
        return f"{self.name}, {self.local.NAME}, gathered before the MLP{wire_text(self.wire)}"
