"""Trace of GPUs: rings that kernels write, and CUDA events around copies and cuBLAS GEMMs.

CUDA events, not kernels that read the clock: a kernel after a copy might wait for an SM that programs hold which wait for the
copy's flag.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch

from weft.errors import Unsupported
from weft.runtime.streams import current_stream
from weft.runtime.team.team import Team
from weft.runtime.team.trace_rings import KINDS, RING_BYTES, RINGS, Record, records_of
from weft.runtime.team.view import TeamView
from weft.trace.clocks import Offset, aligned, measure, reference
from weft.trace.timeline import MEASURED, Event, Signal, Timeline, make_timeline, span_name
from weft.transport.exchange import Body
from weft.triton_api import JITFunction

_KIND_OF = {number: kind for kind, number in KINDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Work of a stream between two CUDA events; ``event`` has all but its times."""

    event: Event
    begin: torch.cuda.Event
    end: torch.cuda.Event


class DeviceTracer:
    """Tracer of one rank's GPU."""

    def __init__(self, team: Team) -> None:
        if not team.caps.arch.startswith("sm_"):
            raise Unsupported(
                f"rank {team.rank}: weft.trace records on NVIDIA GPUs and virtual ranks, not on {team.caps.arch}"
            )
        if team._platform.is_capturing():
            raise Unsupported(
                f"rank {team.rank}: a trace begins while a CUDA graph is captured; begin it before, and capture within it"
            )
        self._team = team
        # Of the team, not of this trace: a graph that was captured meanwhile writes there whenever it is replayed.
        self._rings = team.workspace("trace rings", lambda: team.local((RINGS, RING_BYTES), torch.uint8))
        self._captured: list[_Span] = team.workspace("trace events of graphs", list)
        self._spans: list[_Span] = []
        self._streams: dict[int, str] = {}

    def __enter__(self) -> DeviceTracer:
        team = self._team
        team.barrier()
        self._rings[:, :8].zero_()
        self._before, self._reference = measure(team), reference(team.device)
        team.record_into(self._rings)
        team.barrier()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._team.record_into(None)
        if kind is None:
            self._team.barrier()
            self._after = measure(self._team)

    @property
    def view(self) -> TeamView:
        return self._team.view

    def timeline(self) -> Timeline | None:
        team = self._team
        records, lost = records_of(self._rings)
        events = [*self._of_records(records), *self._of_spans()]
        on_one_clock = [_moved(event, self._before, self._after) for event in events]
        residual = max(self._before.residual, self._after.residual)
        by_rank = team.exchange((on_one_clock, residual, self._reference.residual, lost))
        if team.rank != 0:
            return None
        return make_timeline(
            team.size, MEASURED, [event for of_rank, *_ in by_rank for event in of_rank],
            residual_ns=round(max(one[1] for one in by_rank)), streams_ns=max(one[2] for one in by_rank),
            lost=sum(one[3] for one in by_rank),
        )  # fmt: skip

    # --- work of streams ---------------------------------------------------------------------------------------------

    def gemm(self, M: int, N: int, K: int, device: torch.device) -> AbstractContextManager[object]:
        stream = current_stream(device)
        track = self._streams.setdefault(stream.cuda_stream, f"stream {len(self._streams)}")
        return self._timed(stream, Event(**self._blank(track, "gemm", f"GEMM {M}x{N}x{K}")))

    def copy(self, stream: torch.cuda.Stream, nbytes: int, peer: int) -> AbstractContextManager[object]:
        return self._timed(stream, Event(**self._blank("copy engine", "copy", f"copy, rank {peer}"), nbytes=nbytes))

    def signal(self, stream: torch.cuda.Stream, address: int, peer: int) -> AbstractContextManager[object]:
        name = self._name_of(address)
        event = Event(
            **self._blank("copy engine", "notify", f"notify {name} of rank {peer}"), cause=name.partition("[")[0],
            signal=Signal(place=(peer, self._offset(address)), value=None),
        )  # fmt: skip
        return self._timed(stream, event)

    def _blank(self, track: str, kind: str, name: str) -> dict[str, object]:
        return {"rank": self._team.rank, "track": track, "kind": kind, "name": name, "start": 0, "end": 0}

    @contextmanager
    def _timed(self, stream: torch.cuda.Stream, event: Event) -> Iterator[None]:
        # External: they become nodes of the graph, which every replay records anew.
        captures = self._team._platform.is_capturing()
        begin, end = (torch.cuda.Event(enable_timing=True, external=captures) for _ in range(2))
        begin.record(stream)
        yield
        end.record(stream)
        span = _Span(event=event, begin=begin, end=end)
        (self._captured if captures else self._spans).append(span)

    # --- reading out -------------------------------------------------------------------------------------------------

    def _of_spans(self) -> Iterator[Event]:
        for span in (*self._spans, *self._captured):
            if not (span.begin.query() and span.end.query()):
                continue
            try:
                start, end = self._reference.time_of(span.begin), self._reference.time_of(span.end)
            except (RuntimeError, ValueError):  # of a graph that has not been replayed
                continue
            if start >= self._reference.time:
                yield replace(span.event, start=start, end=end)

    def _of_records(self, records: Iterable[Record]) -> Iterator[Event]:
        kernels = kernel_names()
        for record in records:
            yield event_of(record, self._team.rank, kernels, self._name_of, self._offset)

    def _name_of(self, address: int) -> str:
        return self._team._platform.signal_name(address)

    def _offset(self, address: int) -> int:
        return address - self._team._platform.heap.data_ptr()


def event_of(
    record: Record, rank: int, kernels: dict[int, str], name_of: Callable[[int], str], offset: Callable[[int], int]
) -> Event:
    """Event of a record, on this rank's clock. ``offset``: place in the heap of an address of this rank."""
    kind, details = _KIND_OF[record.kind], {}
    name = span_name(kind, record.address, record.peer, rank)
    if kind == "put":
        place = None if record.peer == rank else record.peer, offset(record.address)
        cause = name_of(record.address).partition("[")[0]
        details = {"nbytes": record.value, "cause": cause, "signal": Signal(place=place, value=None)}
    elif kind != "tile":
        signal = name_of(record.address)
        value = None if kind in ("add", "words") else record.value - ((record.value & 1 << 31) << 1)
        details = {
            "cause": signal.partition("[")[0],
            "signal": Signal(place=(record.peer, offset(record.address)), value=value),
        }
        name = f"notify {signal} of rank {record.peer}"
        if kind in ("wait", "words"):
            kind, name = "wait", f"wait for {signal}"
    kernel = kernels.get(record.kernel, f"kernel {record.kernel:08x}")
    return Event(
        rank=rank, track=f"SM {record.sm}", kind="notify" if kind == "add" else kind, name=name,
        start=record.end - record.duration, end=record.end, program=record.program, kernel=f"{kernel}:{record.line}",
        **details,
    )  # fmt: skip


def kernel_names() -> dict[int, str]:
    """Names of this process's kernels by their CRC-32; a kernel that has run is alive."""
    # Not isinstance, which asks objects that warn when they are looked at.
    live = gc.get_objects()
    names = {one.__name__ for one in live if issubclass(type(one), JITFunction)}
    names |= {one.name for one in live if type(one) is Body}  # kernels that go by their body's name
    return {zlib.crc32(name.encode()): name for name in names}


def _moved(event: Event, before: Offset, after: Offset) -> Event:
    return replace(event, start=aligned(event.start, before, after), end=aligned(event.end, before, after))
