"""recurrent_gated_delta_rule: the gated delta rule over few new tokens, with the state after each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs
from weft.ops.linear_attention.causal_conv1d import defined_rows, step_of
from weft.ops.linear_attention.delta_rule import (
    L2_EPS,
    DeltaSizes,
    Gates,
    Recurrence,
    check_delta_rule,
    decay_and_rate,
    kernel_gates,
    sizes_of,
)
from weft.ops.linear_attention.gated_delta_rule import delta_inputs
from weft.ops.linear_attention.sequence_chunks import Step
from weft.ops.local import capabilities_of
from weft.ops.op import Op, register
from weft.runtime.capabilities import launch_options
from weft.runtime.team.team import Team

# A program's part of a state in its registers, in elements: 32 a thread of four warps.
CELLS = 4096


@triton.jit
def recurrent_gated_delta_rule_kernel(
    qkv, stride, gates, strides, lengths, slots, after, state, out, scale, SIZES: tl.constexpr, COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """QUERIES tokens of one sequence and value head, COLUMNS elements of its values: delta_rule.py.

    grid: (sequences, value heads * V / COLUMNS). qkv [sequences * QUERIES, columns] with rows ``stride`` apart
    state fp32 [slots, value heads, K, V]: read once at slots, written at ``after`` of each token, so they may be the same
    """
    H: tl.constexpr = SIZES.value_heads
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1) // (V // COLUMNS)
    column = tl.program_id(1) % (V // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    of_key = tl.arange(0, K)
    cell = head * (K * V) + of_key[:, None] * V + column[None, :]
    first = head // (H // SIZES.key_heads) * K + of_key
    wl.follow_previous_kernel()
    place = tl.load(slots + sequence).to(tl.int64) * (H * K * V)
    kept = tl.load(lengths + sequence * QUERIES) > 1
    S = tl.load(state + place + cell, mask=kept & (cell >= 0), other=0.0)
    tl.debug_barrier()  # all threads have read the state
    for query in range(QUERIES):
        row = sequence * QUERIES + query
        if tl.load(lengths + row) > 0:
            q = tl.load(qkv + row * stride + first).to(tl.float32)
            k = tl.load(qkv + row * stride + SIZES.key_heads * K + first).to(tl.float32)
            v = tl.load(qkv + row * stride + 2 * SIZES.key_heads * K + head * V + column).to(tl.float32)
            q *= tl.rsqrt(tl.sum(q * q, 0) + L2_EPS) * scale
            k *= tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)
            g, beta = decay_and_rate(gates, strides, row, row >= 0, head)
            S *= tl.exp(g)
            delta = (v - tl.sum(S * k[:, None], 0)) * beta
            S += k[:, None] * delta[None, :]
            result = tl.sum(S * q[:, None], 0)
            tl.store(out + (row * H + head) * V + column, result.to(out.dtype.element_ty))
            tl.store(state + tl.load(after + row).to(tl.int64) * (H * K * V) + cell, S)


def recurrent_gated_delta_rule(
    qkv: torch.Tensor,
    gates: Gates,
    state: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """``gated_delta_rule`` of few new tokens of each of B sequences, [T, value heads, V]: token by token.

    qkv, gates, state  as for ``gated_delta_rule``; T is a multiple of B, tokens of a sequence in rows that follow each other
    lengths, slots, after  as for ``causal_conv1d_update``

    No backward. ValueError for shapes, dtypes or devices that do not fit.
    """
    name = "recurrent_gated_delta_rule"
    check_delta_rule(name, qkv, gates, state)
    return RECURRENT_GATED_DELTA_RULE.dispatch(qkv, gates, state, Step.checked(name, qkv, lengths, slots, after))


class RecurrentGatedDeltaRule(Op):
    name, alias = "recurrent_gated_delta_rule", "recurrent-gated-delta-rule"
    no_plan = "one kernel; the head's size decides how many programs share a state"
    mutates = ("state",)
    collective = False

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Tensors of a call. sizes: key heads, value heads, K, V, new tokens of each sequence."""
        after = step_of(case).after
        return delta_inputs(DeltaSizes(*case.sizes[:4]), len(after), int(after.max()) + 1, draw, case)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, torch.Tensor]:
        qkv, *gates, old = (x.double() for x in by_rank[rank])
        step, sizes = step_of(case), DeltaSizes(*case.sizes[:4])
        whole, state = Recurrence.of(qkv, Gates(*gates), sizes), old.clone()
        out = qkv.new_zeros(len(qkv), sizes.value_heads, sizes.V)
        for row, first, kept in step.rows(old):
            outs, states = whole.rows(first, row + 1 - first).run(kept)
            out[row], state[step.after[row]] = outs[-1], states[-1]
        return out, state

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(terms=16 * case.sizes[2])

    def call(self, case: Case, team: Team, *tensors: torch.Tensor) -> Inputs:
        qkv, *gates, state = tensors
        state, wide = state.clone(memory_format=torch.contiguous_format), torch.cat((qkv, qkv), dim=1)
        step = step_of(case).to(qkv.device)
        out = recurrent_gated_delta_rule(wide[:, : qkv.shape[1]], Gates(*gates), state, *step)
        return defined_rows(out, step.lengths), state.to(case.dtype)

    def cases(self) -> Iterator[Case]:
        for dtype in (FP32, BF16, FP16):
            for sizes, lengths in (
                ((1, 2, 16, 16, 1), (0, 7, -1, 1)),
                ((2, 2, 32, 128, 3), (5, 0)),
                ((1, 3, 128, 64, 2), (9, 0)),
                ((2, 4, 64, 16, 5), (1, -1)),
            ):
                yield self.case_of(sizes, dtype, 1, lengths=lengths)

    def forward(self, qkv: torch.Tensor, gates: Gates, state: torch.Tensor, step: Step) -> torch.Tensor:
        out, sizes = self.fake(qkv, gates, state, step), sizes_of(qkv, state)
        if out.numel() > 0:
            columns = min(sizes.V, CELLS // sizes.K)
            grid = len(step.slots), sizes.value_heads * (sizes.V // columns)
            constants = {"SIZES": sizes, "COLUMNS": columns, "QUERIES": step.queries}
            places = (x.contiguous() for x in step)
            arguments = qkv, qkv.stride(0), *kernel_gates(gates), *places, state, out, sizes.K**-0.5
            options = launch_options(capabilities_of(qkv.device))
            recurrent_gated_delta_rule_kernel[grid](*arguments, **constants, **options)
        return out

    def fake(self, qkv, gates, state, step):
        return qkv.new_empty((qkv.shape[0], state.shape[1], state.shape[3]))


RECURRENT_GATED_DELTA_RULE = RecurrentGatedDeltaRule()
register(RECURRENT_GATED_DELTA_RULE)
