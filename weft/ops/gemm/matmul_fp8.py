"""fp8 weights (weft.kernels.fp8.Fp8) of ``matmul``, ``matmul_silu_mul`` and ``matmul_parts``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft.kernels.deferred_norm import check_scales
from weft.kernels.fp8 import E4M3, Fp8, RowFormat, check_e4m3, empty_rows, fp8_of
from weft.kernels.operands import RowScales, ScaledMatrix
from weft.ops.gemm.cublas import Cublas
from weft.ops.gemm.fp8_operands import by_design, check_fp8, suits_cublas
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.local_gemm import local_gemm
from weft.ops.gemm.small_m_rule import SmallM, empty_partials, partials_left
from weft.ops.local import capabilities_of
from weft.ops.op import Op, define
from weft.plan.planned import machine


def matmul_fp8(
    op: str,
    x: ScaledMatrix,
    weight: Fp8,
    *,
    gated: bool = False,
    parts: bool = False,
    format: RowFormat | None = None,
    invariant: bool = False,
) -> torch.Tensor | Fp8:
    """``op`` of unchecked arguments.

    parts: split-K partials where the plan leaves them. format: of a ``gated`` result in fp8.
    """
    check_fp8(op, x, weight, gated)
    check_scales(op, x, weight.data)
    data, scales = (x.data.data, x.data.scales) if isinstance(x.data, Fp8) else (x.data, None)
    given = Fp8Arguments(data, scales, weight, *(x.scales or (None, 0.0)))
    if format is None:
        return _MATMUL_FP8.dispatch(given, gated, parts, invariant)
    return fp8_of(*_GATED_ROWS.dispatch(given, format), format)


class Fp8Arguments(NamedTuple):
    """Operands of a GEMM with an fp8 weight. squares, eps: of a deferred RMS scale of the rows."""

    x: torch.Tensor
    x_scales: torch.Tensor | None
    weight: Fp8
    squares: torch.Tensor | None
    eps: float

    @property
    def operand(self) -> ScaledMatrix:
        """The rows as a GEMM takes them."""
        rows = self.x if self.x_scales is None else Fp8(self.x, self.x_scales)
        return ScaledMatrix(rows, None if self.squares is None else RowScales(self.squares.contiguous(), self.eps))

    def planned(self, gated: bool, parts: bool, format: RowFormat | None = None) -> Cublas | SmallM:
        return plan_of(self.x, self.weight, self.squares is not None, gated, parts, format)


class MatmulFp8(Op):
    name = alias = "matmul_fp8"

    def forward(self, given: Fp8Arguments, gated: bool, parts: bool, invariant: bool = False) -> torch.Tensor:
        (M, K), N, caps, operand = given.x.shape, given.weight.shape[0], capabilities_of(given.x.device), given.operand
        check_e4m3("matmul_silu_mul" if gated else "matmul", caps)
        if invariant:
            op, call = local_gemm(gated), GemmCall(M, N, K, operand.data.dtype, block_fp8=True, invariant=True)
            return op.run(op.plan(call, machine(caps, 1)).design, None, operand.data, given.weight)
        return by_design(given.planned(gated, parts), operand, given.weight, gated=gated, summed=not parts)

    def fake(self, given, gated, parts, invariant=False):
        left = partials_left(given.planned(gated, parts), given.x.shape[1]) if parts else 1
        N, dtype = given.weight.shape[0] // (2 if gated else 1), given.operand.data.dtype
        return empty_partials(given.x, N, left, dtype)


def multiply(x: Fp8, weight: Fp8, out: torch.Tensor) -> torch.Tensor:
    """Compute ``out`` [M, N] = x @ weight.T of checked operands, by the plan of their shapes."""
    design = plan_of(x.data, weight, False, False, False, dtype=out.dtype)
    return by_design(design, ScaledMatrix(x), weight, out=out)


class GatedRowsFp8(Op):
    """MatmulFp8, gated, with results in fp8."""

    name = alias = "matmul_silu_mul_fp8"

    def forward(self, given: Fp8Arguments, format: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
        check_e4m3("matmul_silu_mul", capabilities_of(given.x.device))
        design = given.planned(True, False, format)
        rows = by_design(design, given.operand, given.weight, gated=True, format=format)
        if format.static_scale is None:
            return rows.data, rows.scales
        return rows.data, given.x.new_empty((len(given.x), 0), dtype=torch.float32)

    def fake(self, given, format):
        return empty_rows(given.x, given.x.shape[0], given.weight.shape[0] // 2, format)


def plan_of(
    x: torch.Tensor,
    weight: Fp8,
    deferred_norm: bool,
    gated: bool,
    parts: bool,
    format: RowFormat | None = None,
    dtype: torch.dtype | None = None,
) -> Cublas | SmallM:
    """Design of a call, from shapes and dtypes alone. dtype: of the result; None: the op's."""
    (M, K), N = x.shape, weight.shape[0] // (2 if gated else 1)
    dtype = dtype or (torch.bfloat16 if x.dtype == E4M3 else x.dtype)
    formats = {"block_fp8": weight.is_grouped, "channel_fp8": not weight.is_grouped}
    formats["fp8_rows"] = format is not None and format.kind == "group"
    call = GemmCall(M, N, K, dtype, suits_cublas(weight), deferred_norm=deferred_norm, partials=parts, **formats)
    return local_gemm(gated).plan(call, machine(capabilities_of(x.device), 1)).design


_MATMUL_FP8 = define(MatmulFp8())
_GATED_ROWS = define(GatedRowsFp8())
