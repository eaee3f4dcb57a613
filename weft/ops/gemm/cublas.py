"""cuBLAS GEMMs with the algorithm that a search found for the shape, else torch.mm's choice.

From 256 rows on the algorithm that was found takes about 3 % less time on H200; at 128 rows cuBLAS's own choice is the best. It
holds for one M only, because the last round of tiles decides: one H200, 1800x5120x6400 takes 170 us, by the algorithm of
M=2048 189 (lab/h200-cublas-ragged.json@cd3ccc0; benchmarks/lab/cublas.py --ragged).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from weft.kernels.fp8 import ROWS_OF_CUBLAS, Fp8
from weft.ops.gemm import deep_gemm
from weft.ops.knobs import design_type, knob, moved
from weft.ops.local import capabilities_of
from weft.plan import algorithms, table
from weft.plan.memo import once, remembered
from weft.runtime import cublaslt
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import Capabilities
from weft.runtime.cublaslt import Algorithm
from weft.runtime.recording import gemm_span

# Neighbours of an algorithm that a search tries.
CLUSTERS, CUSTOMS = (2, 3, 4, 5, 6, 8), range(10)


def algorithms_around(algorithm: Algorithm | None) -> Iterable[Algorithm]:
    """Neighbours of an algorithm of cuBLAS."""
    if algorithm is None:
        return ()
    return moved(algorithm, cluster=CLUSTERS, custom=CUSTOMS, swizzle=(0, 1))


@design_type
class Cublas:
    """GEMM by cuBLAS. algorithm: found by a search; None: torch.mm's choice."""

    algorithm: Algorithm | None = knob(None, near=algorithms_around)


def run(
    design: Cublas, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, *, add: bool = False
) -> torch.Tensor:
    """Compute ``out`` (None: a new tensor) = a[M, K] @ b[N, K].T, summed in fp32 and rounded.

    If ``add``, the previous ``out`` is added and the sum rounded again, as cuBLAS does it. On virtual ranks sums are fp64. If
    this cuBLAS lacks the algorithm, torch.mm chooses.
    """
    if a.requires_grad or b.requires_grad:
        a, b = a.detach(), b.detach()  # inside a custom op, where autograd would refuse out=
    with gemm_span(*a.shape[:1], *b.shape, a.device):
        return _run(design, a, b, out, add)


def _run(design: Cublas, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, add: bool) -> torch.Tensor:
    if a.device.type == "cpu":
        # In fp64: CPU BLAS adds in an order that depends on the operands' addresses, which fp32 sums would show.
        total = (a.double() @ b.double().T).to(a.dtype)
        return total if out is None else out.add_(total) if add else out.copy_(total)
    if design.algorithm is not None:
        into = a.new_empty((a.shape[0], b.shape[0])) if out is None else out
        if cublaslt.matmul(a, b, into, design.algorithm, add=add):
            return into
    if out is None:
        return a @ b.T
    return torch.addmm(out, a, b.T, out=out) if add else torch.mm(a, b.T, out=out)


def _in_fours(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` with rows up to a multiple of four, as cuBLAS takes rows with scales of groups.

    The further rows are the memory after it, if there is such (``weft.kernels.fp8.empty_rows``), else zeros.
    """
    (M, K), strides = matrix.shape, matrix.stride()
    room = cdiv(M, ROWS_OF_CUBLAS) * ROWS_OF_CUBLAS
    if room == M:
        return matrix
    end = matrix.storage_offset() + (room - 1) * strides[0] + (K - 1) * strides[1] + 1
    if strides[1] in (1, room) and end * matrix.itemsize <= matrix.untyped_storage().nbytes():
        return matrix.as_strided((room, K), strides)
    bits = matrix.view(torch.uint8) if matrix.itemsize == 1 else matrix
    return F.pad(bits, (0, 0, 0, room - M)).view(matrix.dtype)


def _on_16_bytes(scales: torch.Tensor) -> torch.Tensor:
    """``scales`` at an address that cuBLAS takes; a copy of what begins amid a larger tensor."""
    return scales if scales.data_ptr() % 16 == 0 else scales.clone()


def scaled(a: Fp8, b: Fp8, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``out`` (None: a new tensor) = a[M, K] @ b[N, K].T of fp8 operands.

    By torch.mm's choice, or by DeepGEMM where that is asked for. The result is in bf16 on GPUs. Scales are of groups of 128
    columns and blocks of 128 x 128, or of rows and all of a matrix. On virtual ranks sums are fp64.
    """
    with gemm_span(*a.shape[:1], *b.shape, a.device):
        if a.device.type == "cpu":
            total = (a.dequantized(torch.float64) @ b.dequantized(torch.float64).T).to(dtype)
            return total if out is None else out.copy_(total)
        if deep_gemm.multiplies(a, b, dtype):
            return deep_gemm.multiply(a, b, out)
        return scaled_by_cublas(a, b, dtype, out)


def scaled_by_cublas(a: Fp8, b: Fp8, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """``scaled`` on a GPU by cuBLAS, whatever is installed."""
    if b.scales.shape[1] > 1:
        return _scaled_by_blocks(a, b, dtype, out)
    of_rows, of_columns = a.scales, b.scales.t()
    if of_rows.numel() > 1 or of_columns.numel() > 1:
        of_rows, of_columns = of_rows.expand(a.shape[0], 1), of_columns.expand(1, b.shape[0])
    scales = {"scale_a": _on_16_bytes(of_rows.contiguous()), "scale_b": _on_16_bytes(of_columns.contiguous())}
    return torch._scaled_mm(a.data, b.data.t(), **scales, out_dtype=dtype, out=out)


def _scaled_by_blocks(a: Fp8, b: Fp8, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    M = len(a.data)
    rows, of_rows = _in_fours(a.data), _in_fours(a.scales)
    of_rows = _on_16_bytes(of_rows.t().contiguous()).t()  # one after the other along M
    of_weight = b.scales.contiguous()  # a rank's share of the columns is a slice
    if missing := -of_weight.shape[1] % 4:  # cuBLAS reads their rows in fours
        of_weight = F.pad(of_weight, (0, missing))
    into = out if len(rows) == M else None
    forms = ScalingType.BlockWise1x128.value, ScalingType.BlockWise128x128.value
    # torch.nn.functional.scaled_mm calls the same function, without ``out``.
    result = torch._scaled_mm_v2(
        rows, b.data.t(), [of_rows], [forms[0]], [], [of_weight.t()], [forms[1]], [], None, dtype, out=into
    )[:M]
    return result if out is None or into is not None else out.copy_(result)


def widened(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, total: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a[M, K] @ b[N, K].T in fp32, the ``dtype``; by torch.mm's choice.

    total  of that dtype: the result is added to it, and it is returned
    """
    a, b = a.detach(), b.detach()
    if a.device.type == "cpu":
        result = (a.double() @ b.double().T).to(dtype)
        return result if total is None else total.add_(result)
    if total is None:
        return torch.mm(a, b.T, out_dtype=dtype)
    if a.dtype == dtype:
        return torch.addmm(total, a, b.T, out=total)
    return torch.ops.aten.addmm.dtype_out(total, a, b.T, dtype, out=total)


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, *, add: bool = False) -> torch.Tensor:
    """``run`` with the tuned design of the operands' shape."""
    if a.device.type == "cpu":
        return run(_TORCH, a, b, out, add=add)
    key = "cublas", a.shape, b.shape[0], a.dtype, a.device
    design = once(key, lambda: tuned(a.shape[0], *b.shape, a.dtype, capabilities_of(a.device)))
    return run(design, a, b, out, add=add)


_TORCH = Cublas()


@remembered
def tuned(M: int, N: int, K: int, dtype: torch.dtype, caps: Capabilities) -> Cublas:
    """Design of ``chosen``."""
    return chosen(M, N, K, dtype, caps)[0]


def chosen(M: int, N: int, K: int, dtype: torch.dtype, caps: Capabilities) -> tuple[Cublas, str]:
    """Design of a shape with the reason: from the shipped row of exactly this shape, else from the cache's
    entry, else torch.mm's choice, without a reason.
    """
    best = table.find("matmul", (M, N, K), dtype, 1, caps)
    if best is not None and best.row.design == table.EXACT:
        return best.row.as_design({table.EXACT: Cublas}), best.reason
    entry = algorithms.find(M, N, K, dtype, caps)
    return (_TORCH, "") if entry is None else (Cublas(algorithm=entry.algorithm), entry.reason)
