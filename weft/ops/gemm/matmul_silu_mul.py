"""matmul_silu_mul, the first half of a gated MLP: one kernel for small M, else cuBLAS and silu_mul."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from weft.kernels.activations import ACTIVATIONS
from weft.kernels.deferred_norm import DeferredNorm, check_scales, operand_of
from weft.kernels.four_bit import FourBit
from weft.kernels.fp8 import Fp8, RowFormat, quantized_rows
from weft.kernels.operands import ScaledMatrix, can_describe, rows_contiguous
from weft.ops.case import BF16, Accuracy, Case, gated_terms
from weft.ops.elementwise.silu_mul import MAX_TOKEN, silu_mul
from weft.ops.gemm import cublas, gemm_cases, matmul_deferred_norm, sliced, small_m
from weft.ops.gemm.cublas import Cublas
from weft.ops.gemm.gemm_op import COLUMN_PARALLEL, GEMM_BITS, GemmCall, named
from weft.ops.gemm.local_gemm import LocalGemm
from weft.ops.gemm.matmul import matmul
from weft.ops.gemm.matmul_four_bit import matmul_four_bit
from weft.ops.gemm.matmul_fp8 import matmul_fp8
from weft.ops.gemm.sliced import Sliced
from weft.ops.gemm.small_m_rule import SmallM
from weft.ops.local import capabilities_of, check_like, check_row_format
from weft.ops.op import INVARIANT, register
from weft.ops.registration import FLOATS, check_choice, check_flag, check_is_tensor
from weft.plan.planned import AUTO, machine

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


def matmul_silu_mul(
    x: torch.Tensor | Fp8 | DeferredNorm,
    weight: torch.Tensor | Fp8 | FourBit,
    *,
    fp8: RowFormat | None = None,
    activation: str = "silu",
    invariant: bool = False,
) -> torch.Tensor | Fp8:
    """Compute silu(x @ gate.T) * (x @ up.T) -> [M, N], contiguous, in the dtype of both.

    x       [M, K], fp16, bf16 or fp32; or rows with a deferred RMS scale, which is applied to the result (``matmul``)
    weight  [2 N, K] of x's dtype: gate's N rows, then up's; or ``Fp8`` or ``FourBit``, with x as of ``matmul``
    fp8     with an ``Fp8`` weight: the result is put in fp8 so, after it is rounded to 16 bits; ``row_format`` of the weight
            that follows
    activation  of the gate, as of ``silu_mul``; of a quantized weight any but silu is a launch more
    invariant   as of ``matmul``, of a weight in 16 bits; both GEMMs are rounded before silu

    Rows may be strided; other layouts are copied first. The small-M kernel computes in fp32 and rounds once; with cuBLAS the
    two GEMMs are rounded before silu is computed in fp32. The same bits from run to run; a row's bits may change with the
    design, which depends on M (``weft.ops.explain``). No backward. ValueError for shapes, dtypes or devices that do not fit.
    """
    check_choice("matmul_silu_mul", "activation", activation, ACTIVATIONS)
    check_flag("matmul_silu_mul", "invariant", invariant)
    if invariant:
        if isinstance(weight, Fp8):
            raise ValueError("matmul_silu_mul: invariant=True with an fp8 weight; call matmul and silu_mul")
        sliced.check("matmul_silu_mul", operand_of(x), weight)
    operand = operand_of(x)
    if isinstance(weight, Fp8):
        check_row_format("matmul_silu_mul", fp8, weight.device)
    elif fp8 is not None:
        raise ValueError("matmul_silu_mul: fp8 with a weight that is no Fp8; leave fp8 out")
    if activation != "silu" and isinstance(weight, Fp8 | FourBit):
        return _by_two_launches(x, weight, fp8, activation)
    if isinstance(weight, Fp8):
        return matmul_fp8("matmul_silu_mul", operand, weight, gated=True, format=fp8)
    if isinstance(weight, FourBit):
        return matmul_four_bit("matmul_silu_mul", operand, weight, gated=True)
    rows = operand.data
    check_is_tensor("matmul_silu_mul", "x", rows)
    for name, matrix, dtypes in (("x", rows, FLOATS), ("weight", weight, (rows.dtype,))):
        check_like("matmul_silu_mul", name, matrix, rows.device, dtypes)
        if matrix.dim() != 2 or 0 in matrix.shape:
            raise ValueError(
                f"matmul_silu_mul: {name} has shape {tuple(matrix.shape)}; pass a matrix with at least one row and column"
            )
    if rows.shape[1] != weight.shape[1]:
        raise ValueError(
            f"matmul_silu_mul: x has K={rows.shape[1]} columns and weight has {weight.shape[1]}; weight is [2 N, K]"
        )
    _check_halves(weight)
    check_scales("matmul_silu_mul", operand, weight)
    if operand.scales is None:
        return MATMUL_SILU_MUL.dispatch(rows, weight, activation, invariant)
    return matmul_deferred_norm.product(operand, weight, activation=activation)


def _check_halves(weight: torch.Tensor | Fp8 | FourBit) -> None:
    if weight.shape[0] % 2 != 0:
        raise ValueError(
            f"matmul_silu_mul: weight has {weight.shape[0]} rows, an odd number; pass gate's N rows, then up's N"
        )


def _by_two_launches(
    x: torch.Tensor | Fp8 | DeferredNorm, weight: Fp8 | FourBit, fp8: RowFormat | None, activation: str
) -> torch.Tensor | Fp8:
    """``matmul_silu_mul`` with a quantized weight, by ``matmul`` and ``silu_mul``."""
    _check_halves(weight)
    product = matmul(x, weight)
    if fp8 is not None and fp8.kind == "token" and product.shape[1] > 2 * MAX_TOKEN:
        rows = silu_mul(product, activation=activation)
        return quantized_rows(rows, fp8, capabilities_of(rows.device))
    return silu_mul(product, fp8=fp8, activation=activation)


class MatmulSiluMul(LocalGemm):
    name, alias = "matmul_silu_mul", "gemm-silu"
    bits = {"cublas": GEMM_BITS, "small_m": GEMM_BITS, "sliced": INVARIANT}
    designs = {"cublas": Cublas, "small_m": SmallM, "sliced": Sliced}
    gated = True
    operands = ("x", "weight")
    projections = COLUMN_PARALLEL[1:]
    variants = ("deferred_norm", "block_fp8", "channel_fp8", "fp8_rows", "four_bit", "invariant")

    def accuracy(self, case: Case) -> Accuracy:
        # cuBLAS rounds both results before silu: of 50 million elements some are so large that the third rounding shows.
        return Accuracy(terms=gated_terms(case.sizes[2]), partials=2, roundings=3)

    def call(self, case: Case, team: Team | None, *tensors: torch.Tensor) -> torch.Tensor:
        if case.design != AUTO:
            return self.run_case(case, tensors)
        a, b, _ = named(case, tensors)
        options = {"activation": case.field("activation") or "silu", "invariant": bool(case.field("invariant"))}
        return matmul_silu_mul(a, b, **options)

    def cases(self) -> Iterator[Case]:
        yield from gemm_cases.silu_cases(self)
        yield from gemm_cases.fp8_rows_cases(self)

    def large_cases(self) -> Iterator[Case]:
        yield from gemm_cases.large_quantized_cases(self)
        for rows, design in ((16, "small_m"), (2048, "cublas")):
            yield self.case(1, BF16, (rows, 6400, 2560), design, block_fp8=True, fp8_rows=True)

    def run(
        self, design: Any, team: None, x: torch.Tensor, weight: torch.Tensor, activation: str = "silu"
    ) -> torch.Tensor:
        """``matmul_silu_mul`` with checked arguments, of dense rows, by ``design``."""
        self.check_design(design)
        if isinstance(design, Sliced):
            return sliced.product(self.name, design, x, weight, activation=activation)
        if isinstance(design, SmallM):
            return small_m.run(ScaledMatrix(x), weight, design, activation=activation)
        return torch.ops.weft.silu_mul.default(cublas.run(design, x, weight), None, 0.0, activation)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, activation: str = "silu", invariant: bool = False
    ) -> torch.Tensor:
        x, weight = rows_contiguous(x), rows_contiguous(weight)
        sizes = x.shape[0], weight.shape[0] // 2, x.shape[1]
        call = GemmCall(*sizes, x.dtype, can_describe(x, weight), invariant=invariant)
        return self.run(self.plan(call, machine(capabilities_of(x.device), 1)).design, None, x, weight, activation)

    def fake(self, x, weight, activation="silu", invariant=False):
        return x.new_empty((x.shape[0], weight.shape[0] // 2))


MATMUL_SILU_MUL = register(MatmulSiluMul())
