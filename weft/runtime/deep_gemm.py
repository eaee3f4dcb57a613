"""DeepGEMM of sgl-deep-gemm, by which weft.ops.gemm.deep_gemm multiplies: version, choice, module."""

from __future__ import annotations

import importlib
import importlib.metadata
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from weft.runtime.environment import wanted_deep_gemm
from weft.runtime.logs import logger_of

logger = logger_of(__name__)
# What DeepSeek installs under the name deep_gemm has other signatures by its date; sgl_deep_gemm's are known.
PACKAGE, DISTRIBUTION = "deep_gemm", "sgl-deep-gemm"
HOW = "pip install 'weft[deep-gemm]'"
# Rows and columns of its first GEMM: of one block.
SIZE = 128


@lru_cache
def version() -> str | None:
    """Version of sgl-deep-gemm, whether or not it can be imported; None where it is not installed."""
    try:
        installed = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    return installed if find_spec(PACKAGE) is not None else None


def is_chosen() -> bool:
    """True if plans give GEMMs to DeepGEMM: as WEFT_DEEP_GEMM says, or where it is installed."""
    wanted = wanted_deep_gemm()
    return version() is not None if wanted is None else wanted


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
        except Exception as error:  # the package's compiler has types for its errors
            why = f"{PACKAGE} cannot be used ({error}); {HOW}"
    if demanded:
        raise RuntimeError(f"WEFT_DEEP_GEMM=1, but {why}, or leave the variable out") from None
    logger.warning("cuBLAS multiplies in place of DeepGEMM: %s, or set WEFT_DEEP_GEMM=0", why)
    return None


def _tried() -> Any:
    """DeepGEMM's module after one GEMM, which compiles a kernel: a machine may lack what that needs."""
    module = importlib.import_module(PACKAGE)
    if torch.cuda.is_available():
        data = torch.zeros((SIZE, SIZE), dtype=torch.float8_e4m3fn, device="cuda")
        of_rows, of_blocks = (torch.ones((1, many), device="cuda") for many in (SIZE, 1))
        module.fp8_gemm_nt((data, of_rows.t()), (data, of_blocks), torch.empty_like(data, dtype=torch.bfloat16))
    return module
