"""Measurement of a GPU's constants for the cost model: ``weft doctor --measure``.

memory, flops, launch       on one GPU
hop, stores, link, copy     between two ranks; of the nearest GPU with a file where there is one GPU, or no peer access
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import triton

import weft.language as wl
from weft.costs import fitted
from weft.costs.gpu import Gpu, default_file, named, nearest, write
from weft.runtime import capabilities
from weft.runtime.capabilities import launch_options
from weft.runtime.graphs import recording
from weft.runtime.platforms.driver import copy_async

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Bytes of a copy that the L2 does not hold, and of the messages that fill a link.
COPIED, SENT = 1 << 30, 64 << 20
# M, N and K of the GEMM, and seconds that it runs, by which the clocks have settled.
SIDE, GEMM_SECONDS = 8192, 1.0
SMALL_BYTES, IN_A_ROW, ROUNDS = 1024, 64, 7
# µs of the flag after a copy, which is another kind of command (benchmarks/lab, H200s).
FLAG = 2.3
PURPOSE = {
    "memory": "a copy of 1 GiB", "flops": f"torch.mm of {SIDE} x {SIDE} x {SIDE} in bf16, for a second",
    "launch": "an empty kernel in a row of a CUDA graph", "hop": "all_gather of 1 KiB by two ranks, in a row",
    "stores": "all_gather of 64 MiB by two ranks", "one_link": "all_gather of 64 MiB by two ranks",
    "link": "a copy of 64 MiB to a peer", "copy": f"a copy of 1 KiB to a peer, and {FLAG} us for the flag", "sms": "the driver",
}  # fmt: skip


@triton.jit
def empty_kernel():
    """Nothing, after the kernel before."""
    wl.follow_previous_kernel()


def measure(file: Path | None = None, say: Callable[[str], None] = lambda line: None) -> tuple[Gpu, Path]:
    """Measure the first GPU and its link to the second, and write the file: by default the one plans read.

    ValueError without a GPU.
    """
    if torch.cuda.device_count() == 0:
        raise ValueError("--measure: there is no GPU; constants of shipped GPUs are in weft/costs/gpus")
    caps = capabilities.probe(0, [0])
    measured = on_one_gpu(caps)
    for name, value in measured.items():
        say(f"{name} {value:.4g}")
    if torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1):
        from weft.runtime.launch import launch

        links = launch(between_two, 2, "cuda")[0] | of_copies()
        for name, value in links.items():
            say(f"{name} {value:.4g}")
        measured |= links
    gpu, sources = assembled(caps.device_name, caps.arch, caps.sms, measured)
    path = file or default_file(caps.device_name)
    write(path, gpu, sources)
    return gpu, path


def assembled(device_name: str, arch: str, sms: int, measured: Mapping[str, float]) -> tuple[Gpu, dict[str, str]]:
    """(constants with the measured ones, source of each); the rest is of the nearest GPU with a file.

    ValueError for a measured value that is not positive.
    """
    for name, value in measured.items():
        if not value > 0:
            raise ValueError(f"--measure: {name}={value} is not positive; is the GPU shared with other programs?")
    base = named(device_name, arch) if device_name == named(device_name, arch).gpu else nearest(arch)
    gpu = replace(base, gpu=device_name, arch=arch, sms=sms, measured=True, **measured)
    rest = f"of {base.gpu}: not measured here"
    sources = {name: PURPOSE[name] if name in measured or name == "sms" else rest for name in PURPOSE}
    return gpu, sources


def on_one_gpu(caps: capabilities.Capabilities) -> dict[str, float]:
    """memory, flops, launch."""
    memory = 2 * COPIED / copied("cuda:0", "cuda:0", COPIED)
    a, b = (torch.randn(SIDE, SIDE, device="cuda:0").bfloat16() for _ in range(2))
    product = 2 * SIDE**3
    first = microseconds(lambda: a @ b, 3)
    settled = microseconds(lambda: a @ b, max(3, int(GEMM_SECONDS * 1e6 / first)), rounds=1)
    options = launch_options(caps)
    launch = in_a_row(lambda: empty_kernel[(1,)](num_warps=1, **options))
    torch.cuda.empty_cache()
    return {"memory": memory, "flops": product / settled, "launch": launch}


def of_copies() -> dict[str, float]:
    """link, copy: of a copy engine from GPU 0 to GPU 1."""
    small, whole = (copied("cuda:0", "cuda:1", nbytes) for nbytes in (SMALL_BYTES, SENT))
    return {"link": SENT / max(whole - small, 1e-3), "copy": min(small, whole / 2) + FLAG}


def copied(source: str, target: str, nbytes: int) -> float:
    """µs of a copy from one device, the current one, to another."""
    x, y = (torch.empty(nbytes, dtype=torch.uint8, device=device) for device in (source, target))
    y.copy_(x)  # torch lets the devices reach each other
    # Not by torch, which takes the host 20 us for a copy between devices: 1 KiB read 20.1 us on H200s in place of 2.2.
    stream = torch.cuda.current_stream(x.device).cuda_stream
    return microseconds(
        lambda: copy_async(y.data_ptr(), x.data_ptr(), nbytes, stream), IN_A_ROW if nbytes <= SMALL_BYTES else 10
    )


def between_two(team: Team) -> dict[str, float]:
    """hop, stores, one_link: of weft's own all-gather. Collective."""
    from weft import ops

    times = {}
    for nbytes in (SMALL_BYTES, SENT):
        x = torch.zeros(nbytes // team.size, dtype=torch.uint8, device=team.device)
        ops.all_gather(x, team, algorithm="push")
        times[nbytes] = in_a_row(
            lambda x=x: ops.all_gather(x, team, algorithm="push"), 64 if nbytes == SMALL_BYTES else 8
        )
    slowest = [max(ranks) for ranks in zip(*team.exchange(tuple(times.values())), strict=True)]
    hop, whole = slowest
    rate = SENT / team.size / max(whole - hop - fitted.read().pushes.ramp, 1e-3)
    return {"hop": hop, "stores": rate, "one_link": rate}


def microseconds(call: Callable[[], object], count: int, rounds: int = ROUNDS) -> float:
    """Median µs of a call among ``count`` after each other on the stream."""
    call()
    taken = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(taken)


def in_a_row(call: Callable[[], object], count: int = IN_A_ROW) -> float:
    """Median µs of a call among ``count`` in a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with recording(graph):
        for _ in range(count):
            call()
    return microseconds(graph.replay, 1) / count
