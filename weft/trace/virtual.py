"""Trace of virtual ranks: the machine's observer gives times to what they do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from weft.errors import Unsupported
from weft.runtime.team.team import Team
from weft.runtime.team.view import TeamView
from weft.simulator.machine.machine import Machine
from weft.simulator.observer import Observer
from weft.trace.timeline import VIRTUAL, Timeline, make_timeline
from weft.trace.virtual_time import Earliest, VirtualTime


class VirtualTracer:
    """Tracer of one virtual rank. The first rank installs the observer of all, and removes it."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._machine: Machine = team._platform._machine
        if not (type(self._machine.observer) is Observer or isinstance(self._machine.observer, VirtualTime)):
            raise Unsupported(f"rank {team.rank}: weft.trace under weft check, which decides the order of events; "
                              f"check a main without it")  # fmt: skip

    def __enter__(self) -> VirtualTracer:
        self._team.barrier()
        machine = self._machine
        if not isinstance(machine.observer, VirtualTime):
            observer = VirtualTime(machine, machine.scheduler.strategy)
            machine.observer, machine.scheduler.strategy = observer, Earliest(observer.time_of)
        self._observer: VirtualTime = machine.observer
        self._team.exchange(None)  # no rank begins before all are observed
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._team.barrier()
        if self._machine.observer is self._observer:
            self._machine.observer, self._machine.scheduler.strategy = Observer(), self._observer.strategy_before

    @property
    def view(self) -> TeamView:
        return self._team.view

    def timeline(self) -> Timeline | None:
        if self._team.rank != 0:
            return None
        return make_timeline(self._machine.world_size, VIRTUAL, self._observer.events())

    def gemm(self, M: int, N: int, K: int, device: torch.device) -> AbstractContextManager[object]:
        self._observer.library_gemm(self._machine.rank, f"GEMM {M}x{N}x{K}", 2 * M * N * K)
        return nullcontext()

    def copy(self, *_: object) -> AbstractContextManager[object]:
        return nullcontext()  # the observer sees them

    signal = copy
