"""``with weft.trace(file, team):`` of GPUs and of virtual ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Protocol

from weft.arguments import check_instance
from weft.errors import Unsupported
from weft.runtime.files import check_target, put
from weft.runtime.logs import logger_of
from weft.runtime.recording import recorder, recording
from weft.runtime.team.team import Team
from weft.trace.chrome import to_json
from weft.trace.timeline import MEASURED, Timeline

logger = logger_of(__name__)


class Tracer(Protocol):
    """Trace of one rank's team."""

    def timeline(self) -> Timeline | None:
        """Timeline of all ranks at rank 0; None on other ranks. Collective, after ``__exit__``."""


@contextmanager
def trace(file: str | PathLike[str], team: Team) -> Iterator[None]:
    """Write a timeline of the team's work to ``file``, for ui.perfetto.dev and ``weft trace summary``.

    Collective, at its start and its end, where the ranks wait for each other and for their GPUs; rank 0 writes the file, and
    makes its folder if there is none, as for every file that weft writes. CannotWrite, at the start, where it cannot. On
    GPUs the kernels of this team are compiled anew, with records (docs/trace.md), and CUDA graphs captured meanwhile contain
    them; graphs of before have none. In the simulator the times are virtual, and programs run in their order.

    Unsupported within another trace, under ``weft check``, under capture, and for a team of several nodes or of AMD GPUs.
    """
    check_instance("team", team, Team, "a Team, such as weft.init() returns")
    target = Path(fspath(file))
    check_target(target)
    if recorder() is not None:
        raise Unsupported(f"rank {team.rank}: a trace begins within another one; end that first")
    if team.shape.nodes > 1:
        raise Unsupported(
            f"rank {team.rank}: a team of {team.shape.nodes} nodes has no common clock; trace team.node, a file for each node"
        )
    tracer = _tracer(team)
    with recording(tracer), tracer:
        yield
    timeline = tracer.timeline()
    if timeline is not None:
        put(target, to_json(timeline))
        logger.info("%s: %s", described(timeline), target)


def described(timeline: Timeline) -> str:
    """Size and clock of a timeline."""
    clock = "virtual time"
    if timeline.clock == MEASURED:
        clock = (
            f"clocks of the ranks agree to {timeline.residual_ns / 1e3:.2f} us, clocks of streams to "
            f"{timeline.streams_ns / 1e3:.1f} us"
        )
    lost = f", {timeline.lost:,} records lost" if timeline.lost else ""
    return f"{len(timeline.events):,} events and {len(timeline.arrows):,} arrows of {timeline.world_size} ranks, {clock}{lost}"


def _tracer(team: Team) -> Tracer:
    if team.is_simulated:
        from weft.trace.virtual import VirtualTracer  # needs the simulator

        return VirtualTracer(team)
    from weft.trace.device import DeviceTracer  # needs a GPU

    return DeviceTracer(team)
