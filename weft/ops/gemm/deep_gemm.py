"""DeepGEMM's GEMM of fp8 blocks in place of cuBLAS's, for many rows, where the user asks for it.

sgl-deep-gemm 0.1.4.post1 took 0.90 to 0.91 of cuBLAS's time for 4,096 rows of four shapes of Qwen3-32B on one H200
(docs/fp8-gemms.md). It compiles a kernel for a shape at its first call. No GPU has run it inside weft's ops.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch

from weft.kernels.fp8 import COLUMNS, Fp8
from weft.runtime.arithmetic import cdiv
from weft.runtime.environment import deep_gemm_is_asked_for

# Rows from which it multiplies; its lead over cuBLAS is measured at 4,096, and at 128 it has none.
FEWEST_ROWS = 1024
# It reads scales of a group one row after the other, each group's from 16 bytes on.
ROWS_OF_SCALES = 4
# Features that it takes a multiple of.
FEATURES = 64


@lru_cache
def package() -> Any | None:
    """DeepGEMM's module; None without WEFT_DEEP_GEMM=1. RuntimeError where it cannot be imported."""
    if not deep_gemm_is_asked_for():
        return None
    if torch.cuda.is_available() and (of := torch.cuda.get_device_capability())[0] != 9:
        # On others it keeps the exponents of scales alone.
        raise RuntimeError(
            f"WEFT_DEEP_GEMM=1 is for Hopper (sm_90), and this GPU is of sm_{of[0]}{of[1]}; leave it out"
        )
    try:
        return importlib.import_module("deep_gemm")
    except ImportError as error:
        raise RuntimeError(
            f"WEFT_DEEP_GEMM=1, but deep_gemm cannot be imported ({error}); pip install sgl-deep-gemm apache-tvm-ffi, or leave "
            f"the variable out"
        ) from None


def takes(M: int, N: int, K: int) -> bool:
    """True for sizes that DeepGEMM multiplies in blocks of fp8, where it is asked for."""
    return deep_gemm_is_asked_for() and M >= FEWEST_ROWS and N % FEATURES == 0 and K % COLUMNS.value == 0


def multiplies(a: Fp8, b: Fp8, dtype: torch.dtype) -> bool:
    """True if `multiply` is to compute a[M, K] @ b[N, K].T, as the user asks for it and it takes these."""
    (M, K), N = a.shape, len(b.data)
    if package() is None or dtype != torch.bfloat16 or not takes(M, N, K):
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
