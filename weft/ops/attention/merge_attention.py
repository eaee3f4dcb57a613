"""merge_attention: attention to all tokens, merged from attentions to parts by their log-sum-exp.

lse = log(sum over parts of exp(lses[p]));  out = sum over parts of exp(lses[p] - lse) * outs[p]      parts in order, in fp32
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.merged_parts import EMPTY, fold, merged, no_parts
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_like
from weft.ops.op import Op, register
from weft.ops.registration import FLOATS
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on
from weft.runtime.team.team import Team

# Elements of a program's tile.
TILE = 1024
LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))


@triton.jit(do_not_specialize=["parts", "rows"])
def merge_attention_kernel(outs, lses, out, lse, parts, rows, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out[r, :] and lse[r] of row r of all parts    grid: (cdiv(rows, ROWS),)

    outs [parts, rows, D], lses [parts, rows] fp32, out [rows, D], lse [rows]
    """
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    exists, inside = row < rows, (row < rows)[:, None] & (column < D)
    wl.follow_previous_kernel()
    state = no_parts(ROWS, BLOCK)
    for part in range(parts):
        at = part * rows.to(tl.int64) + row
        log_sum = tl.load(lses + at, mask=exists, other=EMPTY)
        there = inside & (log_sum > EMPTY)[:, None]
        mean = tl.load(outs + at[:, None] * D + column, mask=there, other=0.0).to(tl.float32)
        state = fold(state, mean, log_sum, LOG2_E)
    largest, total, _ = state
    at = row.to(tl.int64)
    tl.store(out + at[:, None] * D + column, merged(state).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + at, tl.where(total == 0, float("-inf"), largest + tl.log(total)), mask=exists)


def merge_attention(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, H, D] in the dtype of ``outs``, lse [B, H] fp32) of attentions to parts of the same tokens.

    outs  [P, B, H, D], fp16, bf16 or fp32, P at least 1, D at most 1024: softmax of each part by itself, times its values
    lses  [P, B, H] fp32: natural log of the sum of exp(score) of each part; -inf: it has no token, and its row of ``outs``
          does not count, NaN included

    Where all parts are empty out is 0 and lse is -inf. Parts are merged in order, in fp32: a row's bits depend on its
    parts alone. No backward. ValueError for shapes, dtypes or devices that do not fit.
    """
    op = "merge_attention"
    check_like(op, "outs", outs, None, FLOATS, ("P", "B", "H", "D"))
    check_like(op, "lses", lses, outs.device, (torch.float32,), outs.shape[:3])
    if outs.shape[0] == 0 or not 1 <= outs.shape[3] <= TILE:
        raise ValueError(
            f"{op}: outs has shape {tuple(outs.shape)}; it has 1 or more parts, and heads of 1 to {TILE} elements"
        )
    return MERGE_ATTENTION.dispatch(outs, lses)


def merge_into(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Launch the kernel on contiguous ``outs`` [P, B, H, D] and ``lses``; ``out`` may be of another dtype."""
    parts, B, H, D = outs.shape
    block = next_power_of_2(D)
    rows = TILE // block
    constants = {"D": D, "ROWS": rows, "BLOCK": block, **launch_options(capabilities_of(outs.device))}
    launch = launch_on(outs.device, merge_attention_kernel, D, lambda: constants)
    launch(cdiv(B * H, rows), outs, lses, out, lse, parts, B * H)


class MergeAttention(Op):
    """sizes of a case: P, B, H, D. Its field ``empty``: (part, sequence) without tokens."""

    name, alias = "merge_attention", "merge-attention"
    bits = "depend on the number of parts, which are merged in order, and on nothing else"
    no_plan = "one kernel; a program takes as many rows of a head as its registers hold"

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        outs, lses = draw.own("outs", case.sizes), draw.own("lses", case.sizes[:3], 3.0, FP32)
        for part, sequence in case.field("empty") or ():
            outs[part, sequence], lses[part, sequence] = torch.nan, -torch.inf
        return outs, lses

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, torch.Tensor]:
        outs, lses = (x.double() for x in by_rank[rank])
        lse = lses.logsumexp(0)
        weights = torch.where(lses == -torch.inf, 0.0, (lses - lse).exp())[..., None]
        return torch.where(weights == 0, 0.0, outs * weights).sum(0), lse

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(terms=case.sizes[0])

    def call(self, case: Case, team: Team, outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = merge_attention(outs, lses)
        return out, lse.to(case.dtype)

    def cases(self) -> Iterator[Case]:
        for dtype, sizes, empty in (
            (FP32, (1, 2, 3, 16), ((0, 1),)),
            (FP32, (8, 3, 5, 64), ((0, 0), (7, 0), (3, 1), *((part, 2) for part in range(8)))),
            (BF16, (2, 4, 3, 128), ((1, 2), (0, 0), (1, 0))),
            (FP16, (3, 1, 7, 80), ()),
            (BF16, (2, 0, 4, 32), ()),
        ):
            yield self.case(1, dtype, sizes, empty=empty)

    def large_cases(self) -> Iterator[Case]:
        yield self.case(1, BF16, (8, 128, 64, 128), empty=((0, 3),))

    def forward(self, outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.fake(outs, lses)
        if lse.numel() > 0:
            merge_into(outs.contiguous(), lses.contiguous(), out, lse)
        return out, lse

    def fake(self, outs, lses):
        _, B, H, D = outs.shape
        return outs.new_empty((B, H, D)), lses.new_empty((B, H))


MERGE_ATTENTION = register(MergeAttention())
