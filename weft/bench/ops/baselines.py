"""Baselines: NCCL, torch's symmetric-memory ops, cuBLAS alone and with NCCL or these ops.

Outputs are preallocated if the baseline takes one. cuBLAS runs the algorithm that weft runs for the same GEMM: a shipped
row's, one of the cache, or torch.mm's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from weft.bench.harness.provider import Prepared, Provider
from weft.bench.ops.buffers import Close, group_of, ordinary, symmetric, windowed
from weft.bench.ops.normed import add_norm, compiled_add_norm, copy_into
from weft.bench.ops.problem import OpProblem
from weft.ops.gemm.cublas import matmul

# --- collectives -----------------------------------------------------------------------------------------------------


def nccl_all_reduce(problem: OpProblem, place: Callable = ordinary) -> Prepared:
    group = group_of(problem)
    buffers, close = place(problem, [tuple(x.shape) for (x,) in problem.sets])

    def run(number: int) -> torch.Tensor:
        dist.all_reduce(buffers[number], group=group)
        return buffers[number]

    return _collective(problem, buffers, run, close, in_place=True)


def nccl(problem: OpProblem, call: str, result: Callable[[int, int], int], place: Callable = ordinary) -> Prepared:
    """``call``: of torch.distributed. result(elements, world_size): elements of its output."""
    group, (x, *_) = group_of(problem), problem.sets[0]
    (*buffers, out), close = place(
        problem, [tuple(x.shape) for (x,) in problem.sets] + [(result(x.numel(), problem.team.size),)]
    )
    out.fill_(torch.nan)

    def run(number: int) -> torch.Tensor:
        getattr(dist, call)(out, buffers[number], group=group)
        return out

    return _collective(problem, buffers, run, close)


def nccl_heads(problem: OpProblem, place: Callable = ordinary) -> Prepared:
    """All-to-all, with torch's permute before it or after it."""
    group, (x, *_), W = group_of(problem), problem.sets[0], problem.team.size
    T, heads, D = x.shape
    (*buffers, packed, out), close = place(problem, [tuple(x.shape) for (x,) in problem.sets] + [(x.numel(),)] * 2)

    def run(number: int) -> torch.Tensor:
        if problem.op.to_heads:
            packed.view(W, T, -1).copy_(buffers[number].view(T, W, -1).transpose(0, 1))
            dist.all_to_all_single(out, packed, group=group)
            return out.view(W * T, heads // W, D)
        dist.all_to_all_single(out, buffers[number].view(-1), group=group)
        return out.view(W, T // W, -1).transpose(0, 1).reshape(T // W, W * heads, D)

    return _collective(problem, buffers, run, close)


def _collective(
    problem: OpProblem, buffers: list[torch.Tensor], run: Callable, close: Close = None, in_place: bool = False
) -> Prepared:
    def prepare(number: int) -> None:
        copy_into(buffers[number], problem.sets[number][0])

    for number in reversed(range(len(buffers))):
        prepare(number)  # 0 last: the first call is checked and uses it, and buffers may be shared
    return Prepared(run=run, prepare=prepare, close=close, in_place=in_place)


def torch_all_reduce(problem: OpProblem, call: Callable) -> Prepared:
    name, (x, *_) = group_of(problem).group_name, problem.sets[0]
    buffer = symmetric(problem, tuple(x.shape))
    buffers = [buffer] * len(problem.sets)
    return _collective(problem, buffers, lambda number: call(buffer, name), in_place=call is two_shot)


def one_shot(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.ops.symm_mem.one_shot_all_reduce(x, "sum", name)


def two_shot(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", name)


def low_contention(problem: OpProblem, call: Callable) -> Prepared:
    """torch's copy-engine all-gather and reduce-scatter, on inputs in symmetric memory."""
    import torch.distributed._symmetric_memory  # noqa: F401  defines the ops

    name, (x, *_) = group_of(problem).group_name, problem.sets[0]
    buffer = symmetric(problem, tuple(x.shape))
    return _collective(
        problem,
        [buffer] * len(problem.sets),
        lambda number: torch.ops._c10d_functional.wait_tensor(call(buffer, name)),
    )


def low_contention_all_gather(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.ops.symm_mem._low_contention_all_gather(x, name)


def low_contention_reduce_scatter(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.ops.symm_mem._low_contention_reduce_scatter(x, "sum", name)


def nccl_then_norm(problem: OpProblem, norm: Callable) -> Prepared:
    group, buffers = group_of(problem), [x.clone() for x, *_ in problem.sets]

    def run(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        dist.all_reduce(buffers[number], group=group)
        return norm(buffers[number], *problem.sets[number][1:])

    return _collective(problem, buffers, run, in_place=True)


def torch_then_norm(problem: OpProblem, norm: Callable) -> Prepared:
    name, x = group_of(problem).group_name, problem.sets[0][0]
    buffer = symmetric(problem, tuple(x.shape))
    run = lambda number: norm(one_shot(buffer, name), *problem.sets[number][1:])  # noqa: E731
    return _collective(problem, [buffer] * len(problem.sets), run)


# --- GEMMs -----------------------------------------------------------------------------------------------------------


def torch_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b.T, out=out)


def gemm(problem: OpProblem, multiply: Callable = matmul) -> Prepared:
    """GEMM alone; if the op gathers A, it is gathered beforehand."""
    group_of(problem)
    pairs = problem.sets
    if problem.op.gathers:
        pairs = [(problem.gathered(number), b) for number, (_, b) in enumerate(problem.sets)]
    (out,), _ = ordinary(problem, [(pairs[0][0].shape[0], pairs[0][1].shape[0])])
    return Prepared(run=lambda number: multiply(*pairs[number], out), local=problem.op.sums)


def nccl_and_cublas(problem: OpProblem, place: Callable = ordinary) -> Prepared:
    """All-gather, then GEMM."""
    group, (m, n, k), shards = group_of(problem), problem.shape.size, problem.sets
    (*buffers, gathered), close = place(problem, [tuple(a.shape) for a, _ in shards] + [(m, k)])
    (out,), _ = ordinary(problem, [(m, n)])
    for buffer, (a, _) in zip(buffers, shards, strict=True):
        copy_into(buffer, a)

    def run(number: int) -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, buffers[number], group=group)
        return matmul(gathered, shards[number][1], out)

    return Prepared(run=run, close=close)


def cublas_and_nccl(problem: OpProblem, place: Callable = ordinary) -> Prepared:
    """GEMM, then reduce-scatter, or all-reduce where all ranks get the result."""
    group, (m, n, _) = group_of(problem), problem.shape.size
    if problem.op.replicated:
        (partial,), close = place(problem, [(m, n)])
        out = partial
    else:
        (partial, out), close = place(problem, [(m, n), (m // problem.team.size, n)])

    def run(number: int) -> torch.Tensor:
        matmul(*problem.sets[number], partial)
        return summed(partial, out, group)

    return Prepared(run=run, close=close)


def summed(partial: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the ranks in ``out``: of all rows where that is ``partial`` itself, else of this rank's."""
    if out is partial:
        dist.all_reduce(partial, group=group)
    else:
        dist.reduce_scatter_tensor(out, partial, group=group)
    return out


def cublas_and_torch(problem: OpProblem, call: Callable) -> Prepared:
    """GEMM into symmetric memory, followed by torch's all-reduce there."""
    name, (m, n, _) = group_of(problem).group_name, problem.shape.size
    product = symmetric(problem, (m, n))

    def run(number: int) -> torch.Tensor:
        return call(matmul(*problem.sets[number], product), name)

    return Prepared(run=run)


def torch_fused(problem: OpProblem, call: Callable) -> Prepared:
    import torch.distributed._symmetric_memory  # noqa: F401  defines the ops

    name = group_of(problem).group_name
    return Prepared(run=lambda number: call(*problem.sets[number], name))


def fused_all_gather_matmul(a: torch.Tensor, b: torch.Tensor, name: str) -> torch.Tensor:
    # Without the gathered A it would choose multimem instructions if the driver offers them.
    return torch.ops.symm_mem.fused_all_gather_matmul(a, [b.T], 0, name, return_A=True)[1][0]


def fused_matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, name: str) -> torch.Tensor:
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b.T, "sum", 0, name)


def _provider(name: str, op: str, make: Callable[..., Prepared], *arguments: object, role: str = "other") -> Provider:
    return Provider(name=name, ops=(op,), role=role, make=lambda problem: make(problem, *arguments))


def _alone(op: str, role: str) -> tuple[Provider, Provider]:
    """Each rank's GEMM alone, and on request by torch.mm's choice of an algorithm."""
    by_torch = replace(_provider("torch.mm", op, gemm, torch_mm, role=role), on_request=True, rare=True)
    return _provider("cublas", op, gemm, role=role), by_torch


def _with_window(name: str, op: str, make: Callable[..., Prepared], *arguments: object) -> tuple[Provider, Provider]:
    """The baseline with ordinary buffers, and with buffers in a window."""
    in_window = partial(make, place=windowed)
    return _provider(name, op, make, *arguments), _provider(f"{name}.window", op, in_window, *arguments)


def _then_norm(name: str, make: Callable[..., Prepared]) -> tuple[Provider, Provider]:
    """The baseline with torch's addition and norm, and with compiled ones."""
    return (
        _provider(f"{name}+torch", "all-reduce-rms-norm", make, add_norm),
        _provider(f"{name}+compile", "all-reduce-rms-norm", lambda problem: make(problem, compiled_add_norm())),
    )


# By the ops' names on the command line.
BASELINES = (
    *_with_window("nccl", "all-reduce", nccl_all_reduce),
    *_with_window("nccl", "all-gather", nccl, "all_gather_into_tensor", lambda elements, world: elements * world),
    *_with_window("nccl", "reduce-scatter", nccl, "reduce_scatter_tensor", lambda elements, world: elements // world),
    *_with_window("nccl", "all-to-all", nccl, "all_to_all_single", lambda elements, world: elements),
    *_with_window("nccl", "sequence-to-heads", nccl_heads),
    *_with_window("nccl", "heads-to-sequence", nccl_heads),
    _provider("torch.one_shot", "all-reduce", torch_all_reduce, one_shot),
    _provider("torch.two_shot", "all-reduce", torch_all_reduce, two_shot),
    _provider("torch.low_contention", "all-gather", low_contention, low_contention_all_gather),
    _provider("torch.low_contention", "reduce-scatter", low_contention, low_contention_reduce_scatter),
    *_then_norm("nccl", nccl_then_norm),
    *_then_norm("torch.one_shot", torch_then_norm),
    *_alone("gemm", "other"),
    *_with_window("cublas+nccl", "ag-gemm", nccl_and_cublas),
    *_with_window("cublas+nccl", "gemm-rs", cublas_and_nccl),
    *_with_window("cublas+nccl", "gemm-ar", cublas_and_nccl),
    _provider("torch.fused", "ag-gemm", torch_fused, fused_all_gather_matmul),
    _provider("torch.fused", "gemm-rs", torch_fused, fused_matmul_reduce_scatter),
    _provider("cublas+torch.one_shot", "gemm-ar", cublas_and_torch, one_shot),
    _provider("cublas+torch.two_shot", "gemm-ar", cublas_and_torch, two_shot),
    *_alone("ag-gemm", "ceiling"),
    *_alone("gemm-rs", "ceiling"),
    *_alone("gemm-ar", "ceiling"),
)
