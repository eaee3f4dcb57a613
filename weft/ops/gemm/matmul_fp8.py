"""fp8 weights (weft.kernels.fp8.Fp8) of ``matmul``, ``matmul_silu_mul`` and ``matmul_parts``."""

from __future__ import annotations

import torch

from weft.kernels.deferred_norm import check_scales
from weft.kernels.fp8 import E4M3, Fp8, RowFormat, check_e4m3, empty_rows, fp8_of
from weft.kernels.operands import RowScales, ScaledMatrix
from weft.ops.gemm.cublas import Cublas
from weft.ops.gemm.fp8_operands import by_design, check_fp8, suits_cublas
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.local_gemm import local_gemm
from weft.ops.gemm.small_m_rule import SmallM
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
    squares, eps = x.scales or (None, 0.0)
    if format is None:
        return _MATMUL_FP8.dispatch(data, scales, weight, squares, eps, gated, parts, invariant)
    return fp8_of(*_GATED_ROWS.dispatch(data, scales, weight, squares, eps, format), format)


class MatmulFp8(Op):
    name = alias = "matmul_fp8"

    def forward(
        self,
        x: torch.Tensor,
        x_scales: torch.Tensor | None,
        weight: Fp8,
        squares: torch.Tensor | None,
        eps: float,
        gated: bool,
        parts: bool,
        invariant: bool = False,
    ) -> torch.Tensor:
        check_e4m3("matmul_silu_mul" if gated else "matmul", capabilities_of(x.device))
        if invariant:
            M, (N, K), dtype = x.shape[0], weight.shape, x.dtype if x_scales is None else torch.bfloat16
            call = GemmCall(M, N, K, dtype, block_fp8=True, invariant=True)
            op = local_gemm(gated)
            design = op.plan(call, machine(capabilities_of(x.device), 1)).design
            return op.run(design, None, x if x_scales is None else Fp8(x, x_scales), weight)
        design = plan_of(x, weight, squares is not None, gated, parts)
        return by_design(design, _operand(x, x_scales, squares, eps), weight, gated=gated, summed=not parts)

    def fake(self, x, x_scales, weight, squares, eps, gated, parts, invariant=False):
        M, N = x.shape[0], weight.shape[0] // (2 if gated else 1)
        dtype = x.dtype if x_scales is None else torch.bfloat16
        design = plan_of(x, weight, squares is not None, gated, parts) if parts else None
        partials = design.partials_of(x.shape[1]) if isinstance(design, SmallM) else 1
        return x.new_empty((M, N), dtype=dtype) if partials == 1 else x.new_empty((partials, M, N), dtype=torch.float32)


def multiply(x: Fp8, weight: Fp8, out: torch.Tensor) -> torch.Tensor:
    """Compute ``out`` [M, N] = x @ weight.T of checked operands, by the plan of their shapes."""
    design = plan_of(x.data, weight, False, False, False, dtype=out.dtype)
    return by_design(design, ScaledMatrix(x), weight, out=out)


class GatedRowsFp8(Op):
    """MatmulFp8, gated, with results in fp8."""

    name = alias = "matmul_silu_mul_fp8"

    def forward(
        self,
        x: torch.Tensor,
        x_scales: torch.Tensor | None,
        weight: Fp8,
        squares: torch.Tensor | None,
        eps: float,
        format: RowFormat,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_e4m3("matmul_silu_mul", capabilities_of(x.device))
        design = plan_of(x, weight, squares is not None, True, False, format)
        rows = by_design(design, _operand(x, x_scales, squares, eps), weight, gated=True, format=format)
        return rows.data, rows.scales if format.static_scale is None else x.new_empty(
            (x.shape[0], 0), dtype=torch.float32
        )

    def fake(self, x, x_scales, weight, squares, eps, format):
        return empty_rows(x, x.shape[0], weight.shape[0] // 2, format)


def _operand(x: torch.Tensor, x_scales: torch.Tensor | None, squares: torch.Tensor | None, eps: float) -> ScaledMatrix:
    scales = None if squares is None else RowScales(squares.contiguous(), eps)
    return ScaledMatrix(x if x_scales is None else Fp8(x, x_scales), scales)


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


_MATMUL_FP8 = MatmulFp8()
define(_MATMUL_FP8)
_GATED_ROWS = GatedRowsFp8()
define(_GATED_ROWS)
