"""matmul_parts: a GEMM whose split-K partials are left to the kernel that reads them.

Where few rows meet a weight of few rows, the small-M kernel splits K, so that all SMs read the weight, and a kernel of
its own adds the partials up: 1.3 us a call with its start, for a few KiB (H200). A kernel that reads them anyway may do it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from weft.kernels.deferred_norm import DeferredNorm, check_scales, operand_of
from weft.kernels.four_bit import FourBit
from weft.kernels.fp8 import Fp8
from weft.kernels.operands import RowScales, ScaledMatrix, can_describe, rows_contiguous
from weft.ops.case import BF16, FP16, Accuracy, Case, Draw, Inputs
from weft.ops.gemm import small_m
from weft.ops.gemm.fp8_operands import check_fp8
from weft.ops.gemm.gemm_cases import large_quantized_cases
from weft.ops.gemm.gemm_op import GEMM_BITS, GemmCall, check_operands, fp8_scheme, in_form, named, product
from weft.ops.gemm.matmul import MATMUL
from weft.ops.gemm.matmul_fp8 import matmul_fp8, plan_of
from weft.ops.gemm.matmul_quantized import QUANTIZED, matmul_quantized
from weft.ops.gemm.small_m_rule import SmallM, empty_partials, partials_left
from weft.ops.local import capabilities_of
from weft.ops.op import Op, register
from weft.plan.planned import AUTO, machine

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


def matmul_parts(
    x: torch.Tensor | Fp8 | DeferredNorm, weight: torch.Tensor | Fp8 | FourBit
) -> torch.Tensor | DeferredNorm:
    """``matmul(x, weight)``, finished by the kernel that reads it.

    x       [M, K], fp16, bf16 or fp32, or rows with a deferred RMS scale
    weight  [N, K] of x's dtype; or ``Fp8`` or ``FourBit``, with x as of ``matmul``; 4 bits always apply a deferred scale

    Returns split-K partials fp32 [partials, M, N] where K is split, which the reader adds up in this order and rounds; else the
    result [M, N] in x's dtype; or, of rows with a deferred scale that cuBLAS multiplies, a DeferredNorm of the result. Shapes,
    dtype and device alone decide among the three. No backward. ValueError as of ``matmul``.
    """
    operand = operand_of(x)
    if isinstance(weight, Fp8) and operand.scales is not None:
        return _deferred_fp8(operand, weight)
    if isinstance(weight, QUANTIZED):
        return matmul_quantized("matmul_parts", operand, weight, parts=True)
    check_operands("matmul_parts", operand.data, weight, None)
    check_scales("matmul_parts", operand, weight)
    if operand.scales is None:
        return _MATMUL_PARTS.dispatch(x, weight, None, 0.0)
    if _plan(operand.data, weight, deferred_norm=True) is None:
        return DeferredNorm(torch.ops.weft.matmul.default(operand.data, weight), *operand.scales)
    return _MATMUL_PARTS.dispatch(operand.data, weight, *operand.scales)


def _deferred_fp8(x: ScaledMatrix, weight: Fp8) -> torch.Tensor | DeferredNorm:
    """``matmul_parts`` of rows with a deferred scale, which the reader of cuBLAS's result applies."""
    check_fp8("matmul_parts", x, weight, gated=False)
    check_scales("matmul_parts", x, weight.data)
    data = x.data.data if isinstance(x.data, Fp8) else x.data
    if isinstance(plan_of(data, weight, True, False, True), SmallM):
        return matmul_fp8("matmul_parts", x, weight, parts=True)
    return DeferredNorm(matmul_fp8("matmul_parts", ScaledMatrix(x.data), weight), *x.scales)


def _plan(x: torch.Tensor, weight: torch.Tensor, deferred_norm: bool) -> SmallM | None:
    """Small-M design of these shapes, or None for another one.

    Addresses decide nothing: fakes have none, and rows that descriptors do not reach go to ``matmul``.
    """
    call = GemmCall(x.shape[0], *weight.shape, x.dtype, deferred_norm=deferred_norm, partials=True)
    design = MATMUL.plan(call, machine(capabilities_of(x.device), 1)).design
    return design if isinstance(design, SmallM) else None


def _partials(design: SmallM | None, x: torch.Tensor) -> int:
    """Number of split-K partials of ``x`` that the design leaves; 1: none."""
    return partials_left(design, x.shape[1]) if x.shape[1] * x.element_size() % 16 == 0 else 1


def _described(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix``, copied where no descriptor reaches it: a result's shape does not depend on addresses."""
    matrix = rows_contiguous(matrix)
    return matrix if can_describe(matrix) else matrix.clone(memory_format=torch.contiguous_format)


class MatmulParts(Op):
    name, alias = "matmul_parts", "matmul-parts"
    bits = GEMM_BITS
    no_plan = "the plan of matmul decides: small_m leaves its partials where it splits K, other designs leave none"

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        M, N, K = case.sizes
        return draw.own("x", (M, K)), *in_form(case, draw.own("weight", (N, K), K**-0.5))

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        x, weight, _ = named(case, by_rank[rank])
        return product(x, weight)

    def accuracy(self, case: Case) -> Accuracy:
        # The tensor cores add fp8 terms in an accumulator of some 14 bits.
        fp8 = {"partials": 1, "levels": 1} if fp8_scheme(case) else {}
        return Accuracy(terms=case.sizes[2], **fp8)

    def call(self, case: Case, team: Team | None, *tensors: torch.Tensor) -> torch.Tensor:
        """The result, or the sum of its split-K partials, rounded."""
        x, weight, _ = named(case, tensors)
        out = matmul_parts(x, weight)
        return out if out.dim() == 2 else out.sum(0).to(x.dtype)

    def cases(self) -> Iterator[Case]:
        for dtype in (FP16, BF16):
            for sizes in ((1, 48, 96), (7, 64, 512), (6, 24, 264), (40, 96, 136)):
                yield self.case(1, dtype, sizes)
        for dtype, sizes, field in (
            (BF16, (5, 48, 4224), {"block_fp8": True}), (BF16, (7, 80, 264), {"channel_fp8": True}),
            (BF16, (5, 48, 4224), {"four_bit": "mxfp4"}), (FP16, (3, 40, 280), {"four_bit": "int4"}),
        ):  # fmt: skip
            yield self.case(1, dtype, sizes, **field)

    def large_cases(self) -> Iterator[Case]:
        return (case for case in large_quantized_cases(self) if case.design == AUTO)

    def forward(self, x: torch.Tensor, weight: torch.Tensor, squares: torch.Tensor | None, eps: float) -> torch.Tensor:
        design = _plan(x, weight, squares is not None)
        if _partials(design, x) > 1:
            x, weight = map(_described, (x, weight))
            scales = None if squares is None else RowScales(squares.contiguous(), eps)
            return small_m.run(ScaledMatrix(x, scales), weight, design, summed=False)
        if squares is None:
            return torch.ops.weft.matmul.default(x, weight)
        return torch.ops.weft.matmul_deferred_norm.default(x, squares, eps, weight, None)

    def fake(self, x, weight, squares, eps):
        return empty_partials(x, weight.shape[0], _partials(_plan(x, weight, squares is not None), x), x.dtype)


_MATMUL_PARTS = register(MatmulParts())
