"""add_rms_norm: residual addition and RMSNorm in one kernel, for tokens that this rank holds whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.rms_norm import norm, squares_of
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_like, check_shape
from weft.ops.op import Op, register
from weft.ops.registration import FLOATS, check_has_rows, check_scalar
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on
from weft.runtime.team.team import Team

MAX_ROW_BYTES = 65536
CASES_EPS = 1e-6


@triton.jit
def add_rms_norm_kernel(x, residual, weight, normed, hidden, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """hidden[t, :] = round(x[t, :] + residual[t, :])
    normed[t, :] = round(hidden[t, :] / sqrt(mean(hidden[t, :]^2) + eps) * weight)        grid: (rows,)

    All [rows, WIDTH], contiguous. Computed in fp32; the norm is of the rounded ``hidden``.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + columns
    wl.follow_previous_kernel()
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    before = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    total = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + before).to(dtype)[None, :]
    tl.store(hidden + place[None, :], total, mask=inside[None, :])
    result = norm(total, squares_of(total), scale, eps, WIDTH)
    tl.store(normed + place[None, :], result.to(dtype), mask=inside[None, :])


def warps_of(row_bytes: int) -> int:
    """Number of warps: 32 bytes of a row a thread, 16 warps at most."""
    return min(16, next_power_of_2(cdiv(row_bytes, 1024)))


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(normed, hidden)``: hidden = ``x`` + ``residual``, normed = RMSNorm(hidden) * ``weight``.

    x         [..., H], any strides, fp16, bf16 or fp32, H at most 64 KiB
    residual  of x's shape and dtype
    weight    [H] of x's dtype

    Both are new contiguous tensors of x's shape and dtype. ``hidden`` is rounded once and normed computed from the rounded
    one, as by ``all_reduce_rms_norm``. No backward. ValueError for wrong arguments.
    """
    check_like("add_rms_norm", "x", x, None, FLOATS)
    check_scalar("add_rms_norm", "eps", eps)
    check_has_rows("add_rms_norm", "x", x)
    for name, tensor, shape in (("x", x, x.shape), ("residual", residual, x.shape), ("weight", weight, x.shape[-1:])):
        check_like("add_rms_norm", name, tensor, x.device, (x.dtype,))
        check_shape("add_rms_norm", name, tensor, shape)
    if not 0 < x.shape[-1] * x.itemsize <= MAX_ROW_BYTES:
        raise ValueError(
            f"add_rms_norm: rows of {x.shape[-1]} elements have {x.shape[-1] * x.itemsize} bytes, not 1 to "
            f"{MAX_ROW_BYTES}; use torch's rms_norm"
        )
    return ADD_RMS_NORM.dispatch(x, residual, weight, eps)


class AddRMSNorm(Op):
    name, alias = "add_rms_norm", "add-rms-norm"
    no_plan = "one kernel; a program takes a row, and the row's bytes decide its warps"

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        x, residual = draw.own("x", case.sizes), draw.own("residual", case.sizes)
        return x, residual, 1 + draw.own("weight", case.sizes[-1:]) / 8

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, weight = (x.double() for x in by_rank[rank])
        hidden = x + residual
        rounded = hidden.float().to(case.dtype).double()
        return rounded * (rounded.square().mean(-1, keepdim=True) + CASES_EPS).rsqrt() * weight, hidden

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(terms=case.sizes[-1])

    def call(self, case: Case, team: Team, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(*tensors, CASES_EPS)

    def cases(self) -> Iterator[Case]:
        for dtype in (FP16, BF16, FP32):
            for sizes in ((1,), (7, 1), (1, 96), (3, 5, 640), (130, 33), (2, 5120), (0, 16)):
                yield Case(op=self.name, world_size=1, dtype=dtype, sizes=sizes)
            yield Case(op=self.name, world_size=1, dtype=dtype, sizes=(3, 5, 640), layout="transposed")

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, hidden = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        width = x.shape[-1]
        if x.numel() > 0:
            row_bytes, caps = width * x.itemsize, capabilities_of(x.device)

            def constants() -> dict[str, Any]:
                sizes = {"WIDTH": width, "BLOCK": next_power_of_2(width), "num_warps": warps_of(row_bytes)}
                return {**sizes, **launch_options(caps)}

            launch = launch_on(x.device, add_rms_norm_kernel, (width, row_bytes), constants)
            rows = x.numel() // width
            launch(rows, x.contiguous(), residual.contiguous(), weight.contiguous(), normed, hidden, eps)
        return normed, hidden

    def fake(self, x, residual, weight, eps):
        return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))


ADD_RMS_NORM = AddRMSNorm()
register(ADD_RMS_NORM)
