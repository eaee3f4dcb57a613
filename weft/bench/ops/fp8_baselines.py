"""Baselines of overlapped GEMMs with fp8 weights: cuBLAS alone and with NCCL, torch's fused ops.

They take fp8 rows, as weft does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from weft.bench.harness.provider import Prepared, Provider, Unavailable
from weft.bench.ops.baselines import summed
from weft.bench.ops.buffers import group_of
from weft.bench.ops.problem import OpProblem
from weft.kernels.fp8 import E4M3, Fp8
from weft.ops.gemm.cublas import scaled, scaled_by_cublas
from weft.ops.gemm.fp8_operands import quantized_for, suits_cublas
from weft.ops.gemm.gemm_op import named

# What a baseline multiplies at each set: fp8 rows, and a weight.
Pairs = list[tuple[Fp8, Fp8]]
# (rows, weight, dtype, out) -> out = rows @ weight.T in that dtype: cuBLAS, or another library.
Multiply = Callable[[Fp8, Fp8, torch.dtype, torch.Tensor], torch.Tensor]


def by_cublas(a: Fp8, b: Fp8, dtype: torch.dtype, out: torch.Tensor) -> torch.Tensor:
    """cuBLAS, where DeepGEMM is installed too."""
    return (scaled if a.device.type == "cpu" else scaled_by_cublas)(a, b, dtype, out)


def pairs_of(problem: OpProblem) -> Pairs:
    group_of(problem)
    pairs = [named(problem.case, arguments)[:2] for arguments in problem.arguments]
    if not suits_cublas(pairs[0][1]):
        raise Unavailable("cuBLAS takes no weight of this shape")
    return pairs


def gemm(problem: OpProblem, multiply: Multiply = by_cublas) -> Prepared:
    """GEMM alone; if the op gathers A, it is gathered beforehand."""
    pairs = pairs_of(problem)
    if problem.op.gathers:
        caps = problem.team.caps
        pairs = [(quantized_for(b, problem.gathered(number), caps), b) for number, (_, b) in enumerate(pairs)]
    out = empty(problem, pairs[0][0].shape[0], pairs[0][1].shape[0])
    return Prepared(run=lambda number: multiply(*pairs[number], problem.dtype, out), local=problem.op.sums)


def nccl_and_cublas(problem: OpProblem, multiply: Multiply = by_cublas) -> Prepared:
    """All-gather of the rows' bytes, and of their scales by groups, then GEMM."""
    pairs, group, world, (m, n, k) = pairs_of(problem), group_of(problem), problem.team.size, problem.shape.size
    data, out = torch.empty((m, k), dtype=torch.uint8, device=problem.team.device), empty(problem, m, n)
    by_group = [rows.scales.t().contiguous() for rows, _ in pairs]
    groups = len(by_group[0])
    scales = torch.empty((world * groups, m // world), device=problem.team.device)

    def run(number: int) -> torch.Tensor:
        rows, weight = pairs[number]
        dist.all_gather_into_tensor(data, rows.data.view(torch.uint8), group=group)
        dist.all_gather_into_tensor(scales, by_group[number], group=group)
        whole = scales.view(world, groups, -1).transpose(0, 1).reshape(groups, m)
        return multiply(Fp8(data.view(E4M3), whole.t()), weight, problem.dtype, out)

    return Prepared(run=run)


def cublas_and_nccl(problem: OpProblem, multiply: Multiply = by_cublas) -> Prepared:
    """GEMM, then reduce-scatter, or all-reduce where all ranks get the result."""
    pairs, group, (m, n, _) = pairs_of(problem), group_of(problem), problem.shape.size
    partial = empty(problem, m, n)
    out = partial if problem.op.replicated else empty(problem, m // problem.team.size, n)

    def run(number: int) -> torch.Tensor:
        multiply(*pairs[number], problem.dtype, partial)
        return summed(partial, out, group)

    return Prepared(run=run)


def torch_fused(problem: OpProblem, call: Callable[[Fp8, Fp8, str], torch.Tensor]) -> Prepared:
    """torch's fused op, of scales of rows."""
    import torch.distributed._symmetric_memory  # noqa: F401  defines the ops

    pairs, name = pairs_of(problem), group_of(problem).group_name
    return Prepared(run=lambda number: call(*pairs[number], name))


def fused_all_gather_matmul(a: Fp8, b: Fp8, name: str) -> torch.Tensor:
    scales, none = b.scales.t(), [None]
    return torch.ops.symm_mem.fused_all_gather_scaled_matmul(
        a.data, [b.data.t()], a.scales, [scales], 0, name, none, none, [torch.bfloat16], [False]
    )[1][0]


def fused_matmul_reduce_scatter(a: Fp8, b: Fp8, name: str) -> torch.Tensor:
    size = [a.shape[0], b.shape[0]]
    return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
        a.data, b.data.t(), a.scales, b.scales.t(), "sum", 0, 0, name, size, out_dtype=torch.bfloat16
    )


def empty(problem: OpProblem, rows: int, columns: int) -> torch.Tensor:
    return torch.empty((rows, columns), dtype=problem.dtype, device=problem.team.device)


def _providers(
    op: str, together: Callable[[OpProblem], Prepared], fused: Callable[..., torch.Tensor] | None
) -> list[Provider]:
    block, channel = f"{op}+block_fp8", f"{op}+channel_fp8"
    made = [
        Provider(name="cublas", ops=(block, channel), role="ceiling", make=gemm),
        Provider(name="cublas+nccl", ops=(block, channel), role="other", make=together),
    ]
    if fused is not None:
        make = lambda problem: torch_fused(problem, fused)  # noqa: E731
        made.append(Provider(name="torch.fused", ops=(channel,), role="other", make=make))
    return made


FP8_BASELINES = (
    *_providers("ag-gemm", nccl_and_cublas, fused_all_gather_matmul),
    *_providers("gemm-rs", cublas_and_nccl, fused_matmul_reduce_scatter),
    *_providers("gemm-ar", cublas_and_nccl, None),
)
