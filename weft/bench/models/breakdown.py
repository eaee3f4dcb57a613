"""Breakdown of a step's time: kernels of one profiled replay by kind, and the gaps between them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.bench.harness.meters import Meter, finish
from weft.runtime.logs import logger_of

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

logger = logger_of(__name__)

# Kinds in the order of the tables. "gemm+communication" and "all-reduce + norm" are kernels that do both; a norm that
# torch.compile has fused into other elementwise work counts as pointwise. "routing": choices of experts, and what orders, adds
# up and rounds their rows.
KINDS = (
    "attention", "gemm", "gemm+communication", "communication", "all-reduce + norm", "norms", "pointwise", "routing", "other",
    "gap",
)  # fmt: skip
# The first that matches a kernel's name decides. Of weft by kernel; of libraries by what their names have in common:
# nvjet, cutlass and xmma are cuBLAS's, fmha and flash torch's SDPA, triton_… torch.compile's, which spells out what it fused.
NAMES = (
    ("all-reduce + norm", r"all_reduce_rms_norm"),
    ("gemm+communication", r"matmul_reduce"),
    ("routing", r"route|moe_schedule|moe_sum|sum_slabs|(order|group)_tiles|place_tokens|add_pieces|copy_chosen|quantize_rows"),
    ("communication", r"moe_dispatch|moe_combine|gather_(fp8_)?words|combine_words|(exchange|merge)_heads"),
    ("attention", r"attention|flash|fmha|\bsdpa|cudnn_generated"),
    ("communication", r"nccl|all_reduce|all_gather|reduce_scatter|all_to_all|PtoP|^(begin|wait|sum|share|copy|add)_kernel"),
    ("norms", r"^(?!triton_).*(rms_norm|layer_norm)"),
    ("pointwise", r"qk_norm_rope|silu_mul_kernel|^triton_(poi|red|per)_(?!.*_(mm|addmm|linear)(_|$))"),
    ("gemm", r"gemm|gemv|nvjet|cutlass|xmma|splitk|cublas|dot_kernel|_(mm|addmm|linear)(_|$)"),
    ("gemm", r"matmul_kernel|small_m|narrow_kernel|sum_partials"),
    ("pointwise", r"norm|elementwise|CatArray|index_put|indexSelect|gather|scatter|Memcpy DtoD|copy|rope|silu"),
)  # fmt: skip
RULES = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in NAMES)
# Of weft.ops.overlap.pipelined: waits for a peer's copies, concurrently with GEMMs of other streams.
WAITING = "wait_kernel"
START = "barrier_kernel"  # the harness's, right before each step


class Kernel(NamedTuple):
    """Name of a kernel, with start and end in microseconds."""

    name: str
    start: float
    end: float


def kind_of(name: str) -> str:
    return next((kind for kind, rule in RULES if rule.search(name)), "other")


def breakdown(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Microseconds of one step by kind, the mean of several steps; {} if ``kernels`` contain no step.

    A step is the work after a barrier of the harness. Overlapping time counts for the kernel that began first: a later one
    waits for it, or is hidden. Kernels that only wait get the time that no other kernel has. The sum is the time from the
    start of a step's first kernel to the end of its last: a profiled graph of 600 kernels begins 0.3 to 1.5 ms after its
    barrier, an unprofiled one immediately (H200).
    """
    us_of = dict.fromkeys(KINDS, 0.0)
    steps = steps_of(kernels)
    for step in steps:
        waits = [kernel for kernel in step if kernel.name == WAITING]
        reached = step[0].start
        for kernel in step:
            if kernel.name != WAITING:
                _leave(us_of, reached, kernel.start, waits)
                us_of[kind_of(kernel.name)] += max(0.0, kernel.end - max(reached, kernel.start))
                reached = max(reached, kernel.end)
        _leave(us_of, reached, max((kernel.end for kernel in waits), default=reached), waits)
    return {kind: time / len(steps) for kind, time in us_of.items()} if steps else {}


def steps_of(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Kernels of each step that has any, by their start."""
    steps: list[list[Kernel]] = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if kernel.name == START:
            steps.append([])
        elif steps:
            steps[-1].append(kernel)
    return [step for step in steps if step]


def by_name(kernels: Sequence[Kernel]) -> list[str]:
    """Line for each kernel's name, the longest sum first: microseconds and launches a step, median launch."""
    steps = steps_of(kernels)
    times: dict[str, list[float]] = {}
    for kernel in (kernel for step in steps for kernel in step):
        times.setdefault(kernel.name, []).append(kernel.end - kernel.start)
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))
    count = len(steps)
    return [
        f"{sum(each) / count:10.1f} us in {len(each) / count:g} launches, median {statistics.median(each):.1f}: {name}"
        for name, each in ordered
    ]


def _leave(us_of: dict[str, float], start: float, end: float, waits: Sequence[Kernel]) -> None:
    """Assign time from start to end without other kernels to waiting kernels and to the gap.

    ``waits``: by their start.
    """
    for kernel in waits:
        begin, last = max(start, kernel.start), min(end, kernel.end)
        if begin < last:
            us_of["gap"] += begin - start
            us_of[kind_of(kernel.name)] += last - begin
            start = last
    us_of["gap"] += max(0.0, end - start)


def profile(team: Team, meter: Meter) -> dict[str, float] | None:
    """`breakdown` of one more round of ``meter``, rank 0's on all ranks. Collective.

    None without GPUs, and with a warning if torch's profiler does not work there.
    """
    if team.device.type != "cuda":
        return None
    profiler = _started() if team.rank == 0 else None
    team.barrier()
    meter.replay()
    finish(team, "a profiled round")
    parts: dict[str, float] = {}
    if profiler is not None:
        try:
            profiler.stop()
            kernels = kernels_of(profiler)
            parts = breakdown(kernels)
            logger.info("kernels of a step:\n%s", "\n".join(by_name(kernels)))
        except RuntimeError as error:
            logger.warning("no breakdown: torch's profiler failed: %s", error)
    return team.exchange(parts)[0] or None


def _started() -> torch.profiler.profile | None:
    try:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)
        profiler.start()
    except RuntimeError as error:
        logger.warning("no breakdown: torch's profiler does not start: %s", error)
        return None
    return profiler


def kernels_of(profiler: torch.profiler.profile) -> list[Kernel]:
    """Kernels, copies and fills on the GPU."""
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
