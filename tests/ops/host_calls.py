"""A team whose driver is counted, not called: what an eager call does on the host of a GPU, measured without one.

Tensors lie in CPU memory; streams, events, copies and launches are stand-ins that count. Nothing is computed.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.jit import JITFunction

from weft.ops.gemm import cublas
from weft.runtime import capabilities, launching, streams
from weft.runtime.platforms import cuda
from weft.runtime.platforms.cuda import CudaCopyEngine
from weft.runtime.side_streams import SideStreams
from weft.runtime.team.shape import shape_of
from weft.runtime.team.team import COMPARING, Team
from weft.runtime.team.view import RECORD_WORDS

GPU = torch.device("cuda", 0)


class Stream:
    made = 0

    def __init__(self, device=None, priority=0):
        Stream.made += 1
        self.cuda_stream = self.stream_id = Stream.made
        self.device_index, self.device_type = 0, 1


class Host:
    """Counts of what was asked of the driver since ``counted`` began."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.current = Stream()

    def counted(self, call: Callable[[], object]) -> Counter[str]:
        """What one ``call`` asks of the driver, and its Python "frames"."""

        def profile(frame, kind, argument):
            if kind == "call":
                frames[0] += 1

        frames = [0]
        self.counts.clear()
        call()
        counts = Counter(self.counts)
        every, before = [], sys.getprofile()
        gc.disable()  # what a collection calls is no part of a call
        try:
            for _ in range(3):
                frames[0] = 0
                sys.setprofile(profile)
                call()
                sys.setprofile(before)
                every.append(frames[0])
        finally:
            sys.setprofile(before)
            gc.enable()
        counts["frames"] = min(every) - 1
        return counts


class Compiled:
    """Stands for a CompiledKernel."""

    function = packed_metadata = None

    def __init__(self, host: Host) -> None:
        self.host = host

    def run(self, *arguments: object) -> None:
        self.host.counts["launches"] += 1


class Event:
    host: Host

    def record(self, stream: Stream) -> None:
        self.host.counts["events"] += 1

    wait = record


def platform(world_size: int) -> SimpleNamespace:
    heap, caps = torch.empty(512 << 20, dtype=torch.uint8), capabilities.simulated(world_size, like="h200")
    made = SimpleNamespace(
        rank=0, size=world_size, shape=shape_of([0] * world_size), name=f"counted {id(heap)}", device=torch.device("cpu"),
        group=None, caps=caps, heap=heap, record=torch.zeros(RECORD_WORDS, dtype=torch.int64), deltas=[0] * world_size,
        multimem=0, exchange=lambda what, item: [item] * world_size, synchronize=lambda: None, carved=lambda *of: None,
        is_capturing=lambda: False, peer_heap=lambda peer: heap, max_programs=lambda *of: 32 * caps.sms,
        holds=lambda num_warps: 8 // num_warps * caps.sms,
    )  # fmt: skip
    made.copy_engine = CudaCopyEngine(SimpleNamespace(**{**vars(made), "device": GPU}))
    return made


def counted_team(patched: pytest.MonkeyPatch, world_size: int = 2) -> tuple[Team, Host]:
    """A team of this rank alone that plans as one of ``world_size`` H200s, and what it asks of its driver."""
    host = Host()

    def run(self, *arguments, grid, warmup, **options):
        host.counts["compilations"] += 1
        return Compiled(host)

    def switch(stream_id, device_index, device_type):
        host.counts["stream switches"] += 1

    def multiply(design, a, b, out, add):
        host.counts["GEMMs"] += 1
        return a.new_empty((a.shape[0], b.shape[0])) if out is None else out

    def scaled(a, b, dtype, out=None):
        host.counts["GEMMs"] += 1
        return a.data.new_empty((a.shape[0], b.shape[0]), dtype=dtype) if out is None else out

    def copy(target, source, nbytes, stream):
        host.counts["copies"] += 1

    Event.host = host
    patched.setattr(JITFunction, "run", run)
    patched.setattr(launching, "_TRITON_RUN", run)
    patched.setattr(launching, "CompiledKernel", Compiled)
    patched.setattr(torch.cuda, "Stream", Stream)
    patched.setattr(torch.cuda, "Event", Event)
    patched.setattr(streams, "_known", {})
    patched.setattr(torch.cuda, "current_stream", lambda index=None: host.current)
    for name, stand_in in {
        "_cuda_getCurrentRawStream": lambda index: 0, "_cuda_getDevice": lambda: 0, "_cuda_setStream": switch,
        "_cuda_isCurrentStreamCapturing": lambda: False,
    }.items():  # fmt: skip
        patched.setattr(torch._C, name, stand_in, raising=False)
    patched.setattr(cublas, "_run", multiply)
    patched.setattr(cublas, "scaled", scaled)
    patched.setattr(cuda, "copy_async", copy)
    patched.setattr(capabilities, "probe", lambda *of, **more: capabilities.simulated(world_size, like="h200"))
    team = Team(platform(world_size))
    team.is_simulated = False
    COMPARING.clear()  # also virtual ranks of earlier tests whose teams are not freed yet
    for count in (1, 2, 3, 4):
        team._workspaces["side streams", count] = SideStreams(GPU, count)
    return team, host
