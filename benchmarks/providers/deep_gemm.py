"""DeepGEMM's GEMM of fp8 blocks, alone and with NCCL, where sgl-deep-gemm is installed.

Rows and weights are as weft takes them: a scale for 128 columns of a row, and for a block of 128 x 128.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.bench.harness.provider import Prepared, Provider, Unavailable
from weft.bench.ops.buffers import group_of
from weft.bench.ops.fp8_baselines import cublas_and_nccl, gemm, nccl_and_cublas
from weft.bench.ops.problem import OpProblem
from weft.kernels.fp8 import COLUMNS, Fp8
from weft.ops.gemm.deep_gemm import ROWS_OF_SCALES, in_groups

from .moe_packages import package

HOW = "`pip install sgl-deep-gemm==0.1.4.post1 apache-tvm-ffi`, beside torch 2.11"


def multiplied(of: Callable[..., Prepared], problem: OpProblem) -> Prepared:
    """The baseline ``of`` cuBLAS, by DeepGEMM."""
    group_of(problem)  # there are GPUs
    M, _, K = problem.shape.size
    if M % ROWS_OF_SCALES or K % COLUMNS.value:
        raise Unavailable(f"timed where {ROWS_OF_SCALES} divides M={M} and {COLUMNS.value} divides K={K}")
    module = package("deep_gemm", HOW)

    def multiply(rows: Fp8, weight: Fp8, dtype: torch.dtype, out: torch.Tensor) -> torch.Tensor:
        module.fp8_gemm_nt((rows.data, in_groups(rows.scales)), (weight.data, weight.scales), out)
        return out

    return of(problem, multiply)


def _providers(op: str, together: Callable[..., Prepared]) -> tuple[Provider, ...]:
    ops = (f"{op}+block_fp8",)
    return (
        Provider(name="deep_gemm", ops=ops, role="ceiling", make=lambda problem: multiplied(gemm, problem)),
        Provider(name="deep_gemm+nccl", ops=ops, role="other", make=lambda problem: multiplied(together, problem)),
    )


PROVIDERS = (
    *_providers("ag-gemm", nccl_and_cublas),
    *_providers("gemm-rs", cublas_and_nccl),
    *_providers("gemm-ar", cublas_and_nccl),
)
