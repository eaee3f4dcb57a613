"""The zoo on real GPUs under GSan: ``python -m tests.zoo.on_gpus --jobs 8 --shard 1/2 --json FILE``.

Runs each planted bug and its twin, and compares what GSan says with the finding that the exhibit declares, which the simulator
shows (`test_zoo`). A table of the results, with the reason of each difference, goes to standard output.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import linecache
import pkgutil
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import tests.zoo
from tests.zoo.exhibit import EXHIBITS, Exhibit
from weft.check.detector.findings import RACES, Finding, Place, Side
from weft.check.gpu.check import found_by
from weft.check.gpu.comparison import compare
from weft.check.gpu.runs import Program, Run, check_available, device_name, run, slowdown
from weft.check.report import Found, Schedule
from weft.runtime.team.team import Team

HEAP_BYTES = 16 << 20
# Modules of the zoo that are left out, and why. Not imported: the first needs the simulator.
SKIPPED = {
    "railing": "teams of several nodes, which GSan does not follow",
    "sticking": "deadlocks, which GSan does not look for",
}
_NO_EXHIBITS = ("catalogue", "exhibit", "on_gpus", "table", "test_zoo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Result of an exhibit. bug, twin: what GSan says; ``alike``: nothing that the simulator lacks."""

    name: str
    kind: str
    bug: str
    twin: str
    alike: bool
    seconds: float


def exhibits() -> list[Exhibit]:
    """Exhibits that run on GPUs, those of races first."""
    for module in pkgutil.iter_modules(tests.zoo.__path__):
        if module.name not in (*SKIPPED, *_NO_EXHIBITS):
            importlib.import_module(f"tests.zoo.{module.name}")
    here = [case for case in EXHIBITS if case.main.__module__.rpartition(".")[2] not in SKIPPED]
    return sorted(here, key=lambda case: (case.kind not in RACES, case.main.__module__, case.name))


def declared(case: Exhibit) -> Found:
    """The simulator's finding of an exhibit."""
    file = case.main.__code__.co_filename
    places = [
        Place(file=file, line=line, function="", text=linecache.getline(file, line).strip())
        for line in sorted(case.lines)
    ]
    host, start = inspect.getsourcelines(case.main)
    sides = tuple(
        Side(rank=0, task="the host or the copy engine", verb="copy", place=place, sync="")
        if start <= place.line < start + len(host) or "copy_engine" in place.text
        else Side(rank=0, task="rank 0 kernel any program 0", verb=_verb(place), place=place, sync="")
        for place in places
    )
    finding = Finding(kind=case.kind, message=case.what, tensor=case.tensor, sides=sides)
    also = tuple(Finding(kind=kind, message="", sides=sides) for kind in case.also)
    if case.kind == "unadvanced":  # its consequences are races of the same kernel
        also += (Finding(kind="race", message="", sides=tuple(_sides_of(case))),)
    schedule = Schedule(world_size=case.world_size, strategy="mix", seed=0)
    return Found(finding=finding, count=1, schedules=1, replay=schedule, also=also)


def _verb(place: Place) -> str:
    return "lamport store" if "lamport_" in place.text else ""


def _sides_of(case: Exhibit) -> Iterator[Side]:
    """An access at each line of the exhibit's kernels."""
    for kernel in case.kernels:
        lines, first = inspect.getsourcelines(kernel.fn)
        for number, text in enumerate(lines, first):
            place = Place(file=case.main.__code__.co_filename, line=number, function=kernel.__name__, text=text.strip())
            yield Side(rank=0, task="rank 0 kernel any program 0", verb="", place=place, sync="")


def on_device(team: Team, module: str, name: str, bug: bool) -> None:
    """Main of an exhibit, whose tensors are made on the team's device."""
    with torch.device(team.device):
        getattr(importlib.import_module(module), name)(team, bug)


def ended(case: Exhibit, done: Run, bug: bool) -> tuple[str, bool]:
    """What GSan says of a run, and whether that is no more than the simulator says."""
    listed = found_by(done)
    compared = compare([declared(case)] if bug else [], listed)
    if races := [finding for finding in listed if finding.kind in RACES]:
        where = ", ".join(f"{finding.sides[-1].place} {finding.sides[-1].verb}" for finding in races)
        alike = "race" in case.also or all(finding.kind not in RACES for finding in compared.only_gpu)
        return f"race at {where}", alike
    if listed:
        return f"{listed[0].kind}: {listed[0].message}"[:160], True
    if done.said:
        return done.said[0].message, True
    reasons = [reason for _, reason in compared.only_sim]
    return ("clean" if not reasons else f"no race: {reasons[0]}"), True


def name_of(case: Exhibit) -> str:
    return f"{case.main.__module__.rpartition('.')[2]}.{case.name}"


def row_of(case: Exhibit, seconds: float) -> Row:
    began = time.monotonic()
    ends = {}
    for bug in (True, False):
        program = Program(module="tests.zoo.on_gpus", function="on_device", args=(case.main.__module__, case.name, bug))
        done = run(program, case.world_size, sanitized=True, seconds=seconds, twice=False, heap_bytes=HEAP_BYTES)
        ends[bug] = ended(case, done, bug)
    (said, alike), (twin, _) = ends[True], ends[False]
    row = Row(
        name=name_of(case),
        kind=case.kind,
        bug=said,
        twin=twin,
        alike=alike,
        seconds=time.monotonic() - began,
    )
    mark = "" if row.alike else "  <- the simulator lacks it"
    print(f"{row.name}: {row.kind}: {row.bug}{mark}; twin {row.twin} ({row.seconds:.0f} s)", flush=True)
    return row


def summary(rows: list[Row]) -> str:
    races = [row for row in rows if row.bug.startswith("race")]
    lines = [
        f"{len(rows)} exhibits on {device_name()}: GSan shows {len(races)} races, "
        f"{sum(not row.alike for row in races)} of which the simulator lacks; "
        f"{sum(row.twin == 'clean' for row in rows)} twins clean"
    ]
    lines += [f"twin not clean: {row.name}: {row.twin}" for row in rows if row.twin != "clean"]
    missed = Counter(row.bug for row in rows if row.kind in RACES and not row.bug.startswith("race"))
    return "\n".join([*lines, *(f"{count} x {why}" for why, count in missed.most_common())])


def slowdowns(scripts: list[Path], seconds: float) -> None:
    """Print how many times as long each script's main(team) takes on two ranks as without GSan."""
    for script in scripts:
        program = Program(script=script.resolve(), function="main")
        sanitized, plain = (run(program, 2, sanitized=under, seconds=seconds, twice=True) for under in (True, False))
        factor = slowdown(sanitized, plain)
        ends = [f"{one.seconds:.4f} s" if one.seconds else f"{found_by(one)}" for one in (sanitized, plain)]
        print(
            f"{script}: {f'{factor:.3g} x' if factor else 'unknown'}: {ends[0]} under GSan, {ends[1]} without",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="the zoo under GSan")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--shard", default="1/1", help="part I of N, as in 1/2")
    parser.add_argument("--only", default="", help="part of an exhibit's name or kind")
    parser.add_argument("--seconds", type=float, default=60.0, help="most seconds of a run")
    parser.add_argument("--json", type=Path, help="file of the rows, written after each")
    parser.add_argument("--without", type=Path, help="leave out the exhibits that ended in this file of rows")
    parser.add_argument("--slowdown", type=Path, nargs="+", default=[], help="time these scripts in place of the zoo")
    flags = parser.parse_args()
    check_available()
    if flags.slowdown:
        return slowdowns(flags.slowdown, flags.seconds)
    part, parts = map(int, flags.shard.split("/"))
    done = json.loads(flags.without.read_text())["rows"] if flags.without else []
    known = {row["name"] for row in done if not row["bug"].startswith("error")}
    cases = [case for case in exhibits() if flags.only in f"{case.name} {case.kind}" and name_of(case) not in known]
    rows: list[Row] = []
    with ThreadPoolExecutor(flags.jobs) as pool:
        for row in pool.map(lambda case: row_of(case, flags.seconds), cases[part - 1 :: parts]):
            rows.append(row)
            if flags.json is not None:
                flags.json.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    print(summary(rows))


if __name__ == "__main__":
    main()
