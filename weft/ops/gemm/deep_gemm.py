"""DeepGEMM's GEMM of fp8 blocks in place of cuBLAS's, for many rows on Hopper.

Where sgl-deep-gemm is installed. It took 0.90 to 0.91 of cuBLAS's time for 4,096 rows of four shapes of Qwen3-32B on one H200,
and 128 prompts of 128 tokens of Qwen3-8B 0.92 (docs/fp8-gemms.md). It compiles a kernel at its first call.
"""

from __future__ import annotations

import torch

from weft.kernels.fp8 import COLUMNS, Fp8
from weft.runtime.arithmetic import cdiv
from weft.runtime.deep_gemm import is_chosen, package

# Rows and elements of the result from which it multiplies. H200s: with 4,096 rows of 5120 columns and 2,048 of 25600 it takes
# 0.9 of cuBLAS's time; AG-GEMM of 2,048 rows of 5120 columns twice took 234 us, by cuBLAS 203, and 8 prompts of 128 tokens of
# Qwen3-8B, whose projections have 4096 and 6144 columns, 24 ms in place of 18 (results/h200-x2-deep-gemm,
# lab/h200-x1-engines-deep-gemm), on other machines.
FEWEST_ROWS, FEWEST_RESULTS = 1024, 1 << 24
# It reads scales of a group one row after the other, each group's from 16 bytes on.
ROWS_OF_SCALES = 4
# Features that it takes a multiple of.
FEATURES = 64


def takes(M: int, N: int, K: int) -> bool:
    """True for sizes that DeepGEMM multiplies in blocks of fp8, where it is chosen."""
    large = M >= FEWEST_ROWS and M * N >= FEWEST_RESULTS
    return large and N % FEATURES == 0 and K % COLUMNS.value == 0 and is_chosen()


def multiplies(a: Fp8, b: Fp8, dtype: torch.dtype) -> bool:
    """True if `multiply` is to compute a[M, K] @ b[N, K].T: where it is chosen, works, and takes these."""
    (M, K), N = a.shape, len(b.data)
    if dtype != torch.bfloat16 or not takes(M, N, K) or package() is None:
        return False
    return a.is_grouped and b.scales.shape == (cdiv(N, COLUMNS.value), K // COLUMNS.value)


def multiply(a: Fp8, b: Fp8, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``out`` (None: a new tensor) = a[M, K] @ b[N, K].T in bf16.

    a  with scales of groups of 128 columns; b: of blocks of 128 x 128
    """
    into = out
    if into is None or not into.is_contiguous():
        into = torch.empty((len(a.data), len(b.data)), dtype=torch.bfloat16, device=a.device)
    operands = (a.data.contiguous(), in_groups(a.scales)), (b.data.contiguous(), b.scales.contiguous())
    package().fp8_gemm_nt(*operands, into)
    return into if out is None or into is out else out.copy_(into)


def in_groups(scales: torch.Tensor) -> torch.Tensor:
    """``scales`` [M, groups] as DeepGEMM reads them without one more kernel; a copy if they are not so."""
    M, groups = scales.shape
    room = cdiv(M, ROWS_OF_SCALES) * ROWS_OF_SCALES
    if scales.stride() == (1, room) and scales.data_ptr() % 16 == 0:
        return scales
    return scales.new_zeros((groups, room)).t()[:M].copy_(scales)
