"""Check of all ops: ``python -m tests.check.sweep --schedules 500 --world-size 2,3,4 [--op NAME,NAME]``.

``--table`` runs the ops' cases, with each design, instead of the list in tests/check/calls.py; ``--node-size L`` the ops
over nodes of L ranks; ``--goals`` all that tests/check/goals.py asks for. ``--jobs`` spreads the schedules over processes.
``--json FILE`` writes the runs and findings again and again; with ``--resume`` the file's rows stay, calls that it has clean
with as many schedules are left out, and those that the same sources began go on. ``--seconds N`` begins nothing later.

Prints findings and times. tests/check/test_ops.py runs a few schedules of the same calls.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import multiprocessing
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import torch
import triton

import weft
import weft.check
from tests.check.calls import OPS, OVER_NODES, SLOW, Call, table
from tests.check.goals import GOALS, Goal
from weft.bench.harness.machine import revision
from weft.runtime.files import put

# Schedules that one process runs at a time.
SHARE = 10
# Seconds between two writes of the file.
WRITE_EVERY = 5.0
# Op, world size and ranks of a node.
Key = tuple[str, int, int | None]


@dataclass(frozen=True, slots=True)
class Share:
    """``schedules`` of those of one call, from ``seed`` on. ``wanted``: the last seed of the call, and one."""

    table: bool
    node_size: int | None
    index: int
    world_size: int
    seed: int
    schedules: int
    wanted: int

    @property
    def call(self) -> Call:
        return calls(self.table, self.world_size, self.node_size)[self.index]

    @property
    def key(self) -> Key:
        return self.call.name, self.world_size, self.node_size


@dataclass(slots=True)
class Swept:
    """Results of one call's schedules. ``seconds``: of one core. ``revision``: the checked sources."""

    op: str
    world_size: int
    node_size: int | None
    revision: str
    schedules: int = 0
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return self.op, self.world_size, self.node_size

    @property
    def sources(self) -> str:
        """Name of the checked sources, the same with and without git."""
        return self.revision.rpartition("(")[2].rstrip(")")

    def add(self, schedules: int, seconds: float, findings: list[str]) -> None:
        self.schedules += schedules
        self.seconds += seconds
        self.findings += [new for new in findings if new not in self.findings]


@functools.cache
def calls(from_table: bool, world_size: int, node_size: int | None = None) -> list[Call]:
    if node_size is not None:
        return OVER_NODES
    return table(world_size) if from_table else [*OPS, *SLOW]


def chosen_goals(chosen: argparse.Namespace) -> list[Goal]:
    """Goals of the command, in the order in which they are run."""
    if chosen.goals:
        return list(GOALS)
    sizes = sorted((int(size) for size in chosen.world_size.split(",")), reverse=True)
    return [Goal(chosen.schedules, size, chosen.node_size) for size in sizes]


def shares(chosen: argparse.Namespace, begun: Mapping[Key, Swept]) -> Iterator[Share]:
    """Shares of the chosen calls, without the schedules that rows of ``begun`` have.

    All calls of a goal advance together.
    """
    taken: set[Key] = set()
    for goal in chosen_goals(chosen):
        found: list[Share] = []
        for index, call in enumerate(calls(chosen.table, goal.world_size, goal.node_size)):
            key = (call.name, goal.world_size, goal.node_size)
            if key in taken or not goal.covers(*key) or not call.name.startswith(tuple(chosen.op.split(","))):
                continue
            taken.add(key)
            first = begun[key].schedules if key in begun else 0
            for at in range(first, goal.schedules, SHARE):
                count, seed = min(SHARE, goal.schedules - at), chosen.seed + at
                last = chosen.seed + goal.schedules
                found.append(Share(chosen.table, goal.node_size, index, goal.world_size, seed, count, last))
        yield from sorted(found, key=lambda share: share.seed)


def sweep(share: Share, until: float) -> tuple[float, list[str]] | None:
    """Seconds and findings of a share; None if the time is over before it begins."""
    if time.time() >= until:
        return None
    torch.set_num_threads(1)
    call = share.call

    def main(team: Any) -> list[Any]:
        return call(team if share.node_size is None else weft.init(node_size=share.node_size))

    started = time.perf_counter()
    report = weft.check.check(
        main, share.world_size, schedules=share.schedules, seed=share.seed, sms=call.sms, heap_bytes=None, compile=False
    )
    return time.perf_counter() - started, [] if report.ok else [str(report)]


def outcomes(todo: Iterable[Share], jobs: int, until: float) -> Iterator[tuple[Share, float, list[str]]]:
    """Shares with the results of ``sweep``, in the order of ``todo``, up to the first one that the time leaves out.

    One job runs in this process.
    """
    if jobs == 1:
        for share in todo:
            found = sweep(share, until)
            if found is None:
                return
            yield share, *found
        return
    left, under_way = iter(todo), deque()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        while True:
            while len(under_way) < 4 * jobs and (share := next(left, None)) is not None:
                under_way.append((share, pool.submit(sweep, share, until)))
            if not under_way:
                return
            share, future = under_way.popleft()
            found = future.result()
            if found is None:
                return
            yield share, *found


def read(file: Path) -> dict[Key, Swept]:
    """Rows that ``write`` has left in ``file``; none if there is no such file."""
    rows = json.loads(file.read_text())["swept"] if file.exists() else []
    return {one.key: one for one in (Swept(**row) for row in rows)}


def joined(earlier: Mapping[Key, Swept], swept: Mapping[Key, Swept]) -> list[Swept]:
    """Rows of both; of those of one call the new one, unless it is clean and has fewer schedules."""
    kept = dict(earlier)
    for key, new in swept.items():
        old = earlier.get(key)
        if old is None or old.findings or new.findings or new.schedules >= old.schedules:
            kept[key] = new
    return list(kept.values())


def write(file: Path, swept: Iterable[Swept]) -> None:
    """Write the command, the revision and the results, one line per call."""
    head = {
        "command": " ".join(["python -m tests.check.sweep", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "revision": running(),
        "versions": {module.__name__: module.__version__ for module in (torch, triton, numpy)},
    }
    rows = [json.dumps(asdict(one) | {"seconds": round(one.seconds, 1)}) for one in swept]
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    put(file, "\n".join(["{", *lines, ' "swept": [', ",\n".join(f"  {row}" for row in rows), " ]", "}"]) + "\n")


@functools.cache
def running() -> str:
    """Revision of the sources when the sweep began."""
    return revision(Path(weft.__file__).parent)


def command() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", default="2,3,4")
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--op", default="", help="run only the ops whose name has one of these prefixes")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--node-size", type=int)
    parser.add_argument("--goals", action="store_true", help="world sizes, nodes and schedules of tests/check/goals.py")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no schedules after so long")
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--resume", action="store_true", help="go on where the --json FILE ends")
    chosen = parser.parse_args()
    if chosen.resume and not chosen.json:
        parser.error("--resume goes on where a file ends; name it with --json FILE")
    until, written = time.time() + chosen.seconds, time.monotonic()
    earlier = read(chosen.json) if chosen.resume else {}
    goals = chosen_goals(chosen)
    # Rows without findings that have enough schedules, or began with these sources.
    sources = Swept("", 0, None, running()).sources
    begun = {
        key: one
        for key, one in earlier.items()
        if not one.findings and (one.sources == sources or one.schedules >= wanted_of(goals, key))
    }
    swept: dict[Key, Swept] = {}
    for share, seconds, findings in outcomes(shares(chosen, begun), chosen.jobs, until):
        if share.key not in swept:
            fresh = Swept(*share.key, running())
            swept[share.key] = replace(begun[share.key], findings=[]) if share.key in begun else fresh
        found = swept[share.key]
        found.add(share.schedules, seconds, findings)
        if share.seed + share.schedules == share.wanted:
            nodes = f" nodes of {found.node_size}" if found.node_size else ""
            print(
                f"{found.op:40} W={found.world_size}{nodes} {found.schedules} schedules {found.seconds:7.1f} s"
                f"  {len(found.findings)} findings",
                flush=True,
            )
            for report in found.findings:
                print(report, flush=True)
        if chosen.json and time.monotonic() > written + WRITE_EVERY:
            write(chosen.json, joined(earlier, swept))
            written = time.monotonic()
    if chosen.json and swept:
        write(chosen.json, joined(earlier, swept))
    failed = sum(bool(one.findings) for one in swept.values())
    short = sum(one.schedules < wanted_of(goals, key) for key, one in swept.items())
    total = sum(one.schedules for one in swept.values())
    print(f"{len(swept)} calls, {total} schedules, {failed} with findings, {short} not complete")
    return 1 if failed or not (swept or begun) else 0


def wanted_of(goals: Iterable[Goal], key: Key) -> int:
    """Schedules that the first goal for a call asks for, 0 without one."""
    return next((goal.schedules for goal in goals if goal.covers(*key)), 0)


if __name__ == "__main__":
    sys.exit(command())
