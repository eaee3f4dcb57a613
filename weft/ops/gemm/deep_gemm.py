"""DeepGEMM's GEMM of fp8 blocks in place of cuBLAS's, for many rows on Hopper.

Where sgl-deep-gemm is installed. It took 0.90 to 0.91 of cuBLAS's time for 4,096 rows of four shapes of Qwen3-32B on one H200,
and 128 prompts of 128 tokens of Qwen3-8B 0.92 (docs/fp8-gemms.md). It compiles a kernel at its first call.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from weft.kernels.fp8 import COLUMNS, Fp8
from weft.runtime.arithmetic import cdiv
from weft.runtime.environment import wanted_deep_gemm
from weft.runtime.logs import logger_of

logger = logger_of(__name__)
# What DeepSeek installs under the name deep_gemm has other signatures by its date; sgl_deep_gemm's are known.
PACKAGE, DISTRIBUTION = "deep_gemm", "sgl-deep-gemm"
HOW = "pip install 'weft[deep-gemm]'"
# Rows from which it multiplies; its lead over cuBLAS is measured at 4,096 and more, and at 128 it has none.
FEWEST_ROWS = 1024
# It reads scales of a group one row after the other, each group's from 16 bytes on.
ROWS_OF_SCALES = 4
# Features that it takes a multiple of.
FEATURES = 64


@lru_cache
def is_installed() -> bool:
    """True if sgl-deep-gemm is, whether or not it can be imported."""
    try:
        importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return False
    return find_spec(PACKAGE) is not None


def is_chosen() -> bool:
    """True if plans give GEMMs to DeepGEMM: as WEFT_DEEP_GEMM says, or where it is installed."""
    wanted = wanted_deep_gemm()
    return is_installed() if wanted is None else wanted


@lru_cache
def package() -> Any | None:
    """DeepGEMM's module after one small GEMM; None where it is not chosen.

    Where it does not work, RuntimeError with WEFT_DEEP_GEMM=1, and without the variable None and one warning.
    """
    if not is_chosen():
        return None
    demanded = wanted_deep_gemm()
    if torch.cuda.is_available() and (of := torch.cuda.get_device_capability())[0] != 9:
        # On newer GPUs it keeps the exponents of scales alone.
        why = f"it is for Hopper (sm_90), and this GPU is of sm_{of[0]}{of[1]}"
        if not demanded:
            return None
    else:
        try:
            return _tried()
        except Exception as error:  # as types of the package's compiler
            why = f"{PACKAGE} cannot be used ({error}); {HOW}"
    if demanded:
        raise RuntimeError(f"WEFT_DEEP_GEMM=1, but {why}, or leave the variable out") from None
    logger.warning("cuBLAS multiplies in place of DeepGEMM: %s, or set WEFT_DEEP_GEMM=0", why)
    return None


def _tried() -> Any:
    """DeepGEMM's module after one GEMM, which compiles a kernel: a machine may lack what that needs."""
    module = importlib.import_module(PACKAGE)
    if torch.cuda.is_available():
        size = COLUMNS.value
        data = torch.zeros((size, size), dtype=torch.float8_e4m3fn, device="cuda")
        of_rows, of_blocks = (torch.ones((1, many), device="cuda") for many in (size, 1))
        module.fp8_gemm_nt((data, of_rows.t()), (data, of_blocks), torch.empty_like(data, dtype=torch.bfloat16))
    return module


def takes(M: int, N: int, K: int) -> bool:
    """True for sizes that DeepGEMM multiplies in blocks of fp8, where it is chosen."""
    return M >= FEWEST_ROWS and N % FEATURES == 0 and K % COLUMNS.value == 0 and is_chosen()


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
