"""sigmoid_mul: rows of attention times the sigmoid of their gates, before the projection that follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fp8 import Fp8, Fp8Rows, RowFormat, check_e4m3, empty_rows, fp8_of, rows_argument, store_rows
from weft.kernels.operands import rows_contiguous
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs, agreed, format_of
from weft.ops.elementwise.silu_mul import check_token, tile_of
from weft.ops.local import capabilities_of, check_like, check_rounds
from weft.ops.op import INVARIANT, Op, define, register
from weft.ops.registration import FLOATS
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on
from weft.runtime.team.team import Team


@triton.jit(do_not_specialize=["M"])
def sigmoid_mul_kernel(x, stride, gate, gate_stride, out, M, N, fp8, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out[M, N] = x * sigmoid(gate)        grid: (tiles,), along N first

    x, gate  [M, N], rows ``stride`` and ``gate_stride`` apart. Computed in fp32, rounded once
    fp8      ``Fp8Rows``: out is then in fp8; else None
    """
    across = tl.cdiv(N, BLOCK)
    rows = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0) % across * BLOCK
    columns = first + tl.arange(0, BLOCK)[None, :]
    inside = (rows < M)[:, None] & (columns < N)
    row = rows.to(tl.int64)[:, None]
    wl.follow_previous_kernel()
    value = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    result = (value * tl.sigmoid(gates)).to(x.dtype.element_ty)
    store_rows(result, out, row * N + columns, inside, fp8, rows, rows < M, first, N)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor, *, fp8: RowFormat | None = None) -> torch.Tensor | Fp8:
    """x * sigmoid(gate) -> [M, N], contiguous, in the dtype of ``x``; computed in fp32, rounded once.

    x, gate  [M, N] of one dtype, fp16, bf16 or fp32. Rows of both may be columns of a wider tensor; any other layout is copied
             first
    fp8      the result is put in fp8 so, after it is rounded to 16 bits; ``row_format`` of a weight in fp8

    A row's bits depend on the row alone. No backward. ValueError for another shape or dtype.
    """
    check_like("sigmoid_mul", "x", x, None, FLOATS, ("M", "N"))
    check_like("sigmoid_mul", "gate", gate, x.device, (x.dtype,), x.shape)
    check_rounds("sigmoid_mul", fp8, "x", x)
    if fp8 is None:
        return SIGMOID_MUL.dispatch(x, gate)
    check_token("sigmoid_mul", x.shape[1], fp8)
    return fp8_of(*_FP8.dispatch(x, gate, fp8), fp8)


class SigmoidMul(Op):
    name, alias = "sigmoid_mul", "sigmoid-mul"
    bits = INVARIANT
    no_plan = "one kernel; a program takes one number of elements, of as many rows as there are"
    collective = False

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        return draw.own("x", case.sizes), draw.own("gate", case.sizes, 3.0)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        x, gate = (x.double() for x in by_rank[rank])
        return x * gate.sigmoid()

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(terms=4)  # exponential, quotient and product are rounded one after the other

    def call(self, case: Case, team: Team, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        wide = torch.cat((gate, x, x), dim=1)[:, : gate.shape[1]]
        out = sigmoid_mul(x, wide)
        format = format_of(case, out)
        return agreed(out, sigmoid_mul(x, wide, fp8=format), format) if format else out

    def cases(self) -> Iterator[Case]:
        for dtype in (FP16, BF16, FP32):
            for sizes in ((1, 1), (1, 1024), (2, 513), (3, 300), (130, 257), (0, 8), (5, 0)):
                yield self.case_of(sizes, dtype, 1)
            for layout in ("transposed", "strided"):
                yield self.case(1, dtype, (3, 600), layout=layout)
        for sizes, kind in (((7, 520), "group"), ((1, 1300), "group"), ((2, 1300), "token"), ((3, 520), "static")):
            yield self.case(1, BF16, sizes, fp8_rows=kind)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        out = self.fake(x, gate)
        _launch(x, gate, out, None, tile_of(*x.shape))
        return out

    def fake(self, x, gate):
        return x.new_empty(x.shape)


class SigmoidMulFp8(Op):
    """SigmoidMul with rows in fp8: a torch op by itself, since it has two results."""

    name = alias = "sigmoid_mul_fp8"

    def forward(self, x: torch.Tensor, gate: torch.Tensor, format: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
        check_e4m3("sigmoid_mul", capabilities_of(x.device))
        (out, scales), tile = self.fake(x, gate, format), tile_of(*x.shape, format)
        _launch(x, gate, out, rows_argument(scales, format, x.dtype, tile[1]), tile)
        return out, scales

    def fake(self, x, gate, format):
        return empty_rows(x, *x.shape, format)


def _launch(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor, fp8: Fp8Rows | None, tile: tuple[int, int]) -> None:
    """Write sigmoid_mul of checked arguments into ``out``."""
    if out.numel() == 0:
        return
    (M, N), (rows, block) = out.shape, tile
    x, gate = rows_contiguous(x), rows_contiguous(gate)

    def constants() -> dict[str, Any]:
        warps = max(4, min(16, rows * block // 512))
        return {"ROWS": rows, "BLOCK": block, "num_warps": warps, **launch_options(capabilities_of(out.device))}

    launch = launch_on(out.device, sigmoid_mul_kernel, tile, constants)
    launch(cdiv(N, block) * cdiv(M, rows), x, x.stride(0), gate, gate.stride(0), out, M, N, fp8)


SIGMOID_MUL = register(SigmoidMul())
_FP8 = define(SigmoidMulFp8())
