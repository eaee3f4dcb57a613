"""Buffers of the baselines: in ordinary memory, in an NCCL window, in torch's symmetric memory.

NVLink multicast is never requested.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from weft.bench.harness.provider import Unavailable
from weft.bench.ops.problem import OpProblem

Close = Callable[[], None] | None
WINDOW_STEP = 256  # elements: buffers in a window are aligned to at least 512 bytes


def group_of(problem: OpProblem) -> Any:
    if problem.team.group is None:
        raise Unavailable("needs GPUs; these are simulated ranks")
    return problem.team.group


def ordinary(problem: OpProblem, sizes: list[tuple[int, ...]]) -> tuple[list[torch.Tensor], Close]:
    return [torch.empty(size, dtype=problem.dtype, device=problem.team.device) for size in sizes], None


def windowed(problem: OpProblem, sizes: list[tuple[int, ...]]) -> tuple[list[torch.Tensor], Close]:
    """Buffers registered as a symmetric window, so that NCCL may use its symmetric kernels."""
    group = group_of(problem)
    backend = group._get_backend(problem.team.device)
    if not hasattr(backend, "register_mem_pool"):
        raise Unavailable(f"torch {torch.__version__} has no register_mem_pool")
    # It makes the communicator that a window needs.
    dist.all_reduce(torch.zeros(1, device=problem.team.device), group=group)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    lengths = [-(-math.prod(size) // WINDOW_STEP) * WINDOW_STEP for size in sizes]
    with torch.cuda.use_mem_pool(pool):
        # One allocation, so one window: several would be registered by address, in another order on each rank.
        (whole,), _ = ordinary(problem, [(sum(lengths),)])
    # After the allocation: newer torch does not make windows of later ones.
    try:
        backend.register_mem_pool(pool, symm=True)
    except TypeError:
        raise Unavailable(f"register_mem_pool of torch {torch.__version__} has no symmetric windows") from None
    parts = whole.split(lengths)
    tensors = [part[: math.prod(size)].view(size) for part, size in zip(parts, sizes, strict=True)]
    return tensors, lambda: backend.deregister_mem_pool(pool)


def symmetric(problem: OpProblem, size: tuple[int, ...]) -> torch.Tensor:
    """Start of an allocation in torch's symmetric memory, shared by all of torch's ops here in turn.

    They read it from its beginning, since some do not support tensors that start later in an allocation.
    """
    import torch.distributed._symmetric_memory as symm_mem

    group, team = group_of(problem), problem.team
    by_capacity: dict[int, torch.Tensor] = team.workspace(("bench", "symmetric"), dict)
    wanted = math.prod(size) * problem.dtype.itemsize
    capacity = max(by_capacity, default=0)
    if capacity < wanted:
        capacity = max(32 << 20, 1 << (wanted - 1).bit_length())
        by_capacity[capacity] = symm_mem.empty((capacity,), dtype=torch.uint8, device=team.device)
        symm_mem.rendezvous(by_capacity[capacity], group.group_name)
    return by_capacity[capacity].view(problem.dtype)[: math.prod(size)].view(size)
