"""CUDA graphs of eager calls, replayed where the same arguments come again at the same addresses.

A call of a pipelined op is 20 to 60 calls of the driver, which take the host 100 to 400 us; its replay is one call. A graph
reads and writes the addresses of the call that was captured, so a call is replayed only if all its tensors lie there. In a
loop, torch's allocator gives out the same addresses again after an iteration or two.

    first call with a key   submitted launch by launch; its key is remembered
    second                  captured, and the graph launched
    later                   the graph launched

Each rank decides alone: a replay does on the GPU what the launches do, in the same order, on the same workspaces. The host
decides two things, equally on all ranks, and a replay must follow:

    halves      calls take the halves of a buffer in turn (weft.transport.halves). A graph is replayed only at a call whose
                turn is that of the captured one, and counts as a call
    workspaces  a call uses the largest workspace that there is, so the state of the heap is part of the key

Scratch memory of captured calls lies in one pool: replays are ordered by the stream of the team's calls, as workspaces are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.runtime.graphs import capturing
from weft.runtime.logs import logger_of
from weft.runtime.streams import own_stream
from weft.runtime.team.team import COMPARING

if TYPE_CHECKING:
    from weft.runtime.team.team import Team
    from weft.transport.halves import Halves

logger = logger_of(__name__)

# Most graphs that a team keeps, and most keys that it remembers.
MOST_GRAPHS, MOST_KEYS = 512, 4096
# A capture takes about a millisecond: further ones than the first must be paid by replays, or programs whose addresses hardly
# ever return would capture at every call.
FREE_CAPTURES, REPLAYS_A_CAPTURE = 32, 2
# Failed captures after which none is tried any more.
MOST_FAILURES = 3

Submit = Callable[[], object]
Record = Callable[[Submit], Callable[[], None]]


class Replay(NamedTuple):
    """A captured call.

    launch  launches it on the current stream
    turns   buffers that it uses, their turn at its begin, and the calls that it makes with them
    """

    launch: Callable[[], None]
    turns: tuple[tuple[Halves, int, int], ...]

    @property
    def is_next(self) -> bool:
        """True if the buffers' next turns are the ones of the captured call."""
        return all(halves.turn == turn for halves, turn, _ in self.turns)


class Replays:
    """Graphs of a team's eager calls by key, the least recently used dropped first.

    record   captures what it is given, and returns the function that launches it
    all      every ``Halves`` of the team; later ones are added
    settle   waits for launched work, before graphs are dropped

    A call counts as one of ``replays``, the first launch of a graph included, or as one of ``launches``.
    """

    def __init__(self, record: Record, all: Sequence[Halves], settle: Callable[[], None]) -> None:
        self._record, self._all, self._settle = record, all, settle
        self._known: OrderedDict[Hashable, list[Replay]] = OrderedDict()
        self.replays = self.launches = self.captures = self.failures = 0
        self._kept = 0

    def submit(self, key: Hashable, run: Submit) -> None:
        """Call ``run``, or replay what it would submit: equal keys stand for equal work on equal addresses."""
        known = self._known.get(key)
        if known is None:
            self._known[key] = []
            if len(self._known) > MOST_KEYS:
                self._drop(MOST_KEYS // 4)
            self._launch(run)
            return
        self._known.move_to_end(key)  # before graphs are dropped, of which this call's must be none
        for replay in known:
            if replay.is_next:
                break
        else:
            made = self._captured(run)
            if made is None:
                self._launch(run)
                return
            replay = made
            known.append(made)
            self._kept += 1
            if self._kept > MOST_GRAPHS:
                self._drop(MOST_GRAPHS // 4)
        self.replays += 1
        replay.launch()
        for halves, _, calls in replay.turns:
            halves.calls += calls

    def _launch(self, run: Submit) -> None:
        self.launches += 1
        run()

    def _captured(self, run: Submit) -> Replay | None:
        if self.captures >= FREE_CAPTURES + self.replays // REPLAYS_A_CAPTURE or self.failures >= MOST_FAILURES:
            return None
        before = [(halves, halves.calls, halves.turn) for halves in self._all]
        self.captures += 1
        try:
            launch = self._record(run)
        except Exception as error:
            self.failures += 1
            logger.warning("an eager call could not be captured and is launched instead: %s", error)
            return None
        finally:
            used = tuple((halves, turn, halves.calls - calls) for halves, calls, turn in before if halves.calls > calls)
            for halves, calls, _ in before:
                halves.calls = calls
        return Replay(launch, used)

    def _drop(self, count: int) -> None:
        """Drop the ``count`` keys that were used longest ago, but not the one of this call."""
        self._settle()
        for _ in range(min(count, len(self._known) - 1)):
            _, replays = self._known.popitem(last=False)
            self._kept -= len(replays)


def replays_of(team: Team) -> Replays | None:
    """The team's graphs; None where calls are compared, on virtual ranks, and over nodes."""
    return team.workspace("replays", lambda: _made(team))


def _made(team: Team) -> Replays | None:
    if team.device.type != "cuda" or team.name in COMPARING or team.rail is not None or torch.version.cuda is None:
        return None
    stream, pool = own_stream(team.device), torch.cuda.graph_pool_handle()

    def record(run: Submit) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream, pool):
            run()
        return graph.replay

    return Replays(record, all_halves(team), team.synchronize)


def all_halves(team: Team) -> list[Halves]:
    """Every ``Halves`` of the team; later ones are added."""
    return team.workspace("halves", list)
