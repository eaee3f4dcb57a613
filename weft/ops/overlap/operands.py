"""Operands of the overlapped GEMMs, of 16 bits or in fp8 (weft.kernels.fp8.Fp8)."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from weft.kernels.fp8 import Fp8
from weft.kernels.operands import can_describe, has_dense_rows
from weft.ops.gemm import cublas
from weft.ops.gemm.fp8_operands import quantized_for, suits_cublas
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.matmul_fp8 import multiply as multiply_fp8
from weft.ops.local import capabilities_of

Operand = torch.Tensor | Fp8


def call_of(M: int, a: Operand, b: Operand, local_first: bool = False) -> GemmCall:
    """Call of these operands. M: rows of the whole GEMM."""
    N, K = b.shape
    if isinstance(b, Fp8):
        forms = {"block_fp8": b.is_grouped, "channel_fp8": not b.is_grouped}
        return GemmCall(M, N, K, a.dtype, suits_cublas(b), local_first, **forms)
    return GemmCall(M, N, K, a.dtype, can_describe(a, b), local_first, dense=has_dense_rows(b))


def form_of(b: Operand) -> str:
    """Form of the scales that b asks of the rows, the same on all ranks; "none" of 16 bits."""
    if not isinstance(b, Fp8):
        return "none"
    return b.row_format.kind


def quantized(a: Operand, b: Operand) -> Operand:
    """``a`` as a GEMM with ``b`` takes it: in fp8 for an fp8 b."""
    return quantized_for(b, a, capabilities_of(b.device)) if isinstance(b, Fp8) else a


def grain_of(b: Operand) -> int:
    """Rows that pieces of a GEMM are multiples of: cuBLAS takes fp8 rows in fours."""
    return 4 if isinstance(b, Fp8) else 1


def rows_at(a: Operand, at: slice) -> Operand:
    """Rows of an operand."""
    if not isinstance(a, Fp8):
        return a[at]
    # A single scale is of all rows.
    return a._replace(data=a.data[at], scales=a.scales if len(a.scales) < len(a.data) else a.scales[at])


def padded_to(a: Operand, grain: int) -> Operand:
    """``a`` with rows of zeros up to a multiple of ``grain``."""
    missing = -a.shape[0] % grain
    if missing == 0 or not isinstance(a, Fp8):
        return F.pad(a, (0, 0, 0, missing)) if missing else a
    data = F.pad(a.data.view(torch.uint8), (0, 0, 0, missing)).view(a.data.dtype)
    return a._replace(data=data, scales=a.scales if a.scales.numel() == 1 else F.pad(a.scales, (0, 0, 0, missing)))


def multiply(a: Operand, b: Operand, out: torch.Tensor, *, add: bool = False) -> None:
    """Compute ``out`` = a @ b.T, or if ``add`` the previous ``out`` + a @ b.T, rounded twice."""
    if not isinstance(b, Fp8):
        cublas.matmul(a, b, out, add=add)
    elif len(out) and add:
        out.add_(multiply_fp8(a, b, torch.empty_like(out)))
    elif len(out):
        multiply_fp8(a, b, out)
