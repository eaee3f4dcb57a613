"""add_rms_norm: residual addition and RMSNorm in one kernel, for tokens that this rank holds whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fp8 import (
    Fp8,
    Fp8Rows,
    RowFormat,
    RowsBeside,
    check_e4m3,
    empty_rows,
    rows_argument,
    store_row,
    written_of,
)
from weft.kernels.rms_norm import inverse_rms, squares_of, sum_of_rows
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs, agreed, format_of, norm_dtype
from weft.ops.local import capabilities_of, check_like, check_rounds, norm_dtypes
from weft.ops.op import INVARIANT, Op, define, register
from weft.ops.registration import FLOATS, HALVES, check_flag, check_has_rows, check_scalar
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on
from weft.runtime.team.team import Team

MAX_ROW_BYTES = 65536


@triton.jit
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    normed,
    hidden,
    eps,
    fp8,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    INVARIANT: tl.constexpr = False,
):
    """hidden[t, :] = round(x[t, :] + residual[t, :])
    normed[t, :] = round(hidden[t, :] / sqrt(mean(hidden[t, :]^2) + eps) * weight)        grid: (rows,)

    All [rows, WIDTH], contiguous. Computed in fp32; the norm is of the rounded ``hidden``. residual: None for zeros.
    fp8  ``Fp8Rows``: normed is then put in fp8, and written in 16 bits beside if it says so; else None
    INVARIANT  squares are added in pairs (weft.kernels.rms_norm), whatever the warps and the layout
    """
    dtype: tl.constexpr = x.dtype.element_ty
    # A line of the tile is a group of columns under one scale, in 16 bits too: so sums have one order with and without fp8.
    GROUP: tl.constexpr = BLOCK if BLOCK < 128 else 128
    columns = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = columns < WIDTH
    row = tl.program_id(0).to(tl.int64)
    place = row * WIDTH + columns
    wl.follow_previous_kernel()
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(x + place, mask=inside, other=0.0)
    if residual is not None:
        total = (total.to(tl.float32) + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)).to(dtype)
    tl.store(hidden + place, total, mask=inside)
    if INVARIANT:
        squares = sum_of_rows(squares_of(total, True)[None, :], True)[:, None]
    else:
        squares = tl.sum(squares_of(total), axis=0)
    result = total.to(tl.float32) * inverse_rms(squares, eps, WIDTH, INVARIANT) * scale
    store_row(result.to(dtype), normed, place, inside, fp8, row, WIDTH)


def warps_of(row_bytes: int) -> int:
    """Number of warps: 32 bytes of a row a thread, 16 warps at most."""
    return min(16, next_power_of_2(cdiv(row_bytes, 1024)))


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    fp8: RowFormat | None = None,
    invariant: bool = False,
) -> tuple[torch.Tensor | Fp8 | RowsBeside, torch.Tensor]:
    """``(normed, hidden)``: hidden = ``x`` + ``residual``, normed = RMSNorm(hidden) * ``weight``.

    x         [..., H], any strides, fp16, bf16 or fp32, H at most 64 KiB
    residual  of x's shape and dtype; None: zeros
    weight    [H] of x's dtype, or fp32
    fp8       the normed rows of x [T, H] are rounded to its dtype, then put in fp8 so; ``row_format`` of a weight in fp8.
              With ``beside`` a ``RowsBeside`` of both is returned
    invariant the bits of ``all_reduce_rms_norm(invariant=True)`` of whole sums, for x of 16 bits: squares are added in pairs of
              neighbours, the mean and eps by one multiply-add. Without it their order is this kernel's alone

    Both are new contiguous tensors of x's shape and dtype. ``hidden`` is rounded once and normed computed from the rounded
    one, as by ``all_reduce_rms_norm``. A row's bits depend on the row alone. No backward. ValueError for wrong arguments.
    """
    check_like("add_rms_norm", "x", x, None, FLOATS)
    check_scalar("add_rms_norm", "eps", eps)
    check_has_rows("add_rms_norm", "x", x)
    check_flag("add_rms_norm", "invariant", invariant)
    if invariant and x.dtype not in HALVES:
        raise ValueError(f"add_rms_norm: invariant=True with x of {x.dtype}; pass bfloat16 or float16")
    for name, tensor, shape, dtypes in (
        ("x", x, x.shape, (x.dtype,)),
        ("residual", residual, x.shape, (x.dtype,)),
        ("weight", weight, x.shape[-1:], norm_dtypes(x.dtype)),
    ):
        if tensor is not None or name != "residual":
            check_like("add_rms_norm", name, tensor, x.device, dtypes, shape)
    if not 0 < x.shape[-1] * x.itemsize <= MAX_ROW_BYTES:
        raise ValueError(
            f"add_rms_norm: rows of {x.shape[-1]} elements have {x.shape[-1] * x.itemsize} bytes, not 1 to "
            f"{MAX_ROW_BYTES}; use torch's rms_norm"
        )
    check_rounds("add_rms_norm", fp8, "x", x, beside=True)
    if fp8 is None:
        return ADD_RMS_NORM.dispatch(x, residual, weight, eps, invariant)
    rows, scales, hidden, *beside = ADD_RMS_NORM_FP8.dispatch(x, residual, weight, eps, fp8, invariant)
    return written_of(rows, scales, fp8, beside), hidden


class AddRMSNorm(Op):
    name, alias = "add_rms_norm", "add-rms-norm"
    bits = INVARIANT
    no_plan = "one kernel; a program takes a row, and the row's bytes decide its warps"

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        x, residual = draw.own("x", case.sizes), draw.own("residual", case.sizes)
        residual = torch.zeros_like(residual) if case.field("alone") else residual
        return x, residual, 1 + draw.own("weight", case.sizes[-1:], dtype=norm_dtype(case)) / 8

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, weight = (x.double() for x in by_rank[rank])
        hidden = x + residual
        return case.exact_norm(hidden.float().to(case.dtype), weight), hidden

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(terms=case.sizes[-1])

    def call(self, case: Case, team: Team, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = (given[0], None, given[2]) if case.field("alone") else given
        invariant = bool(case.field("invariant"))
        normed, hidden = add_rms_norm(*tensors, case.eps, invariant=invariant)
        if format := format_of(case, normed):
            rows, hidden = add_rms_norm(*tensors, case.eps, fp8=format, invariant=invariant)
            normed = agreed(normed, rows, format)
        return normed, hidden

    def cases(self) -> Iterator[Case]:
        for dtype in (FP16, BF16, FP32):
            for sizes in ((1,), (7, 1), (1, 96), (3, 5, 640), (130, 33), (2, 5120), (0, 16)):
                yield self.case(1, dtype, sizes)
            yield self.case(1, dtype, (3, 5, 640), layout="transposed")
            yield self.case(1, dtype, (3, 640), alone=True)
        for kind, sizes in (("group", (5, 1200)), ("token", (3, 640)), ("static", (6, 96)), ("group", (0, 16))):
            for beside in ({}, {"beside": True}):
                yield self.case(1, BF16, sizes, fp8_rows=kind, **beside)
        for dtype, fields in ((FP16, {}), (BF16, {}), (BF16, {"fp8_rows": "group"})):
            yield self.case(1, dtype, (3, 640), **fields, wide_norm=True)
        for dtype, sizes, fields in (
            (BF16, (3, 5, 640), {}), (FP16, (7, 1), {}), (BF16, (5, 1200), {"fp8_rows": "group"}),
        ):  # fmt: skip
            yield self.case(1, dtype, sizes, **fields, invariant=True)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, invariant: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, hidden = self.fake(x, residual, weight, eps)
        _launch(x, residual, weight, (normed, hidden), eps, None, invariant)
        return normed, hidden

    def fake(self, x, residual, weight, eps, invariant=False):
        return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))


class AddRMSNormFp8(Op):
    """AddRMSNorm with normed rows in fp8: a torch op by itself, since it has results more.

    Results are rows, scales, hidden, and if the format has rows of 16 bits beside these.
    """

    name = alias = "add_rms_norm_fp8"

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        format: RowFormat,
        invariant: bool = False,
    ) -> list[torch.Tensor]:
        check_e4m3("add_rms_norm", capabilities_of(x.device))
        rows, scales, hidden, *beside = results = self.fake(x, residual, weight, eps, format)
        fp8 = rows_argument(scales, format, x.dtype, next_power_of_2(x.shape[1]), *beside)
        _launch(x, residual, weight, (rows, hidden), eps, fp8, invariant)
        return results

    def fake(self, x, residual, weight, eps, format, invariant=False):
        like = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(1 + format.beside))
        return [*empty_rows(x, *x.shape, format), *like]


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    fp8: Fp8Rows | None,
    invariant: bool,
) -> None:
    """Write (normed, hidden) of checked arguments into ``results``."""
    width = x.shape[-1]
    if x.numel() == 0:
        return
    row_bytes, caps = width * x.itemsize, capabilities_of(x.device)

    def constants() -> dict[str, Any]:
        sizes = {"WIDTH": width, "BLOCK": next_power_of_2(width), "num_warps": warps_of(row_bytes)}
        return {**sizes, "INVARIANT": invariant, **launch_options(caps)}

    launch = launch_on(x.device, add_rms_norm_kernel, (width, row_bytes, invariant), constants)
    residual = None if residual is None else residual.contiguous()
    tensors = x.contiguous(), residual, weight.contiguous(), *results
    launch(x.numel() // width, *tensors, eps, fp8)


ADD_RMS_NORM = register(AddRMSNorm())
ADD_RMS_NORM_FP8 = define(AddRMSNormFp8())
