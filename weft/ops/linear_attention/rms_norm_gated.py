"""rms_norm_gated: RMSNorm of each head times SiLU of its gate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs
from weft.ops.linear_attention.sequence_chunks import check_columns
from weft.ops.local import capabilities_of, check_like
from weft.ops.op import INVARIANT, Op, register
from weft.ops.registration import FLOATS, check_scalar
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.team.team import Team

MAX_HEAD_DIM = 1024
CELLS = 2048  # elements of a program


@triton.jit(do_not_specialize=["rows"])
def rms_norm_gated_kernel(
    x,
    gate,
    stride,
    weight,
    out,
    rows,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t, h, :] = x[t, h, :] / sqrt(mean(x[t, h, :]^2) + eps) * weight * silu(gate[t, h, :])

    grid: (cdiv(rows, ROWS),), rows: T * HEADS. x and out [T, HEADS, D] contiguous, in fp32; rows of ``gate``
    [T, HEADS * D] are ``stride`` apart.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    exists = (row < rows)[:, None] & (column < D)[None, :]
    cell = row[:, None] * D + column[None, :]
    wl.follow_previous_kernel()
    scale = tl.load(weight + column, mask=column < D, other=0).to(tl.float32)
    value = tl.load(x + cell, mask=exists, other=0).to(tl.float32)
    place = (row // HEADS * stride + row % HEADS * D)[:, None] + column[None, :]
    gates = tl.load(gate + place, mask=exists, other=0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None] * scale[None, :]
    tl.store(out + cell, (normed * gates * tl.sigmoid(gates)).to(out.dtype.element_ty), mask=exists)


def rms_norm_gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm(x) * ``weight`` * silu(``gate``) of each head, [T, heads, D] of x's dtype.

    x       [T, heads, D], any strides, fp16, bf16 or fp32, D at most 1024
    gate    [T, heads * D] of x's dtype; it may be columns of a wider tensor
    weight  [D] of x's dtype

    A row's bits depend on the row alone. No backward. ValueError for wrong arguments.
    """
    check_like("rms_norm_gated", "x", x, None, FLOATS, ("T", "heads", "D"))
    check_scalar("rms_norm_gated", "eps", eps)
    tokens, heads, D = x.shape
    if not 0 < D <= MAX_HEAD_DIM:
        raise ValueError(
            f"rms_norm_gated: x has heads of D={D} elements, not 1 to {MAX_HEAD_DIM}; use torch's rms_norm"
        )
    for name, tensor, shape in (("gate", gate, (tokens, heads * D)), ("weight", weight, (D,))):
        check_like("rms_norm_gated", name, tensor, x.device, (x.dtype,), shape)
    check_columns("rms_norm_gated", "gate", gate)
    return RMS_NORM_GATED.dispatch(x, gate, weight, eps)


class RMSNormGated(Op):
    name, alias = "rms_norm_gated", "rms-norm-gated"
    bits = INVARIANT
    no_plan = "one kernel; a head's size decides how many heads a program takes"
    collective = False

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        tokens, heads, D = case.sizes
        return draw.own("x", case.sizes), draw.own("gate", (tokens, heads * D)), 1 + draw.own("weight", (D,)) / 8

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        x, gate, weight = (x.double() for x in by_rank[rank])
        gate = gate.view(x.shape)
        return case.exact_norm(x, weight) * gate * gate.sigmoid()

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(terms=16 * case.sizes[-1])

    def call(self, case: Case, team: Team, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = torch.cat((gate, gate), dim=1)[:, : gate.shape[1]]
        return rms_norm_gated(x, wide, weight, case.eps)

    def cases(self) -> Iterator[Case]:
        for dtype in (FP16, BF16, FP32):
            for sizes in ((1, 1, 1), (7, 3, 128), (130, 2, 33), (2, 4, 1024), (0, 2, 16)):
                yield self.case_of(sizes, dtype, 1)
            yield self.case(1, dtype, (3, 5, 64), layout="transposed")

    def forward(self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out, (tokens, heads, D) = self.fake(x, gate, weight, eps), x.shape
        if out.numel() > 0:
            block = next_power_of_2(D)
            rows = max(1, CELLS // block)
            constants = {"HEADS": heads, "D": D, "ROWS": rows, "BLOCK": block}
            arguments = x.contiguous(), gate, gate.stride(0), weight.contiguous(), out, tokens * heads, eps
            options = launch_options(capabilities_of(x.device))
            rms_norm_gated_kernel[cdiv(tokens * heads, rows),](*arguments, **constants, **options)
        return out

    def fake(self, x, gate, weight, eps):
        return torch.empty_like(x, memory_format=torch.contiguous_format)


RMS_NORM_GATED = register(RMSNormGated())
