"""Check of a program on real GPUs, joined with the simulator's report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import triton

from weft.check.detector.findings import Finding
from weft.check.gpu.assertions import findings, limits
from weft.check.gpu.comparison import Comparison, compare, confirmed
from weft.check.gpu.runs import Program, Run, device_name, run, slowdown
from weft.check.report import ON_GPUS, Found, Report, Schedule
from weft.errors import Unsupported

Runs = Callable[[Program, int], tuple[Run, Run | None]]


def check_on_gpus(program: Program, world_sizes: Sequence[int], simulated: Report, *, seconds: float) -> Report:
    """The simulator's report, joined with what GSan has shown on these GPUs.

    seconds  of a run, after which its ranks are killed

    Unsupported from a rank is raised: the program uses what GSan cannot follow.
    """
    name = device_name()

    def runs(program: Program, size: int) -> tuple[Run, Run | None]:
        sanitized = run(program, size, sanitized=True, seconds=seconds, twice=True)
        plain = run(program, size, sanitized=False, seconds=seconds, twice=True) if sanitized.seconds else None
        return sanitized, plain

    return joined(program, world_sizes, simulated, runs, name)


def joined(program: Program, world_sizes: Sequence[int], simulated: Report, runs: Runs, device: str) -> Report:
    """The simulator's report joined with ``runs`` of each world size: under GSan, and without it."""
    entries, notes = list(simulated.findings), []
    unshown: dict[tuple, str] = {}
    shown: set[tuple] = set()
    for size in world_sizes:
        sanitized, plain = runs(program, size)
        if isinstance(sanitized.error, Unsupported):
            raise sanitized.error
        on_gpus = found_by(sanitized)
        compared = compare(entries, on_gpus)
        where = f"{size} ranks of {device}"
        for finding, same in compared.both:
            at = next(index for index, entry in enumerate(entries) if entry.finding.cause == same.finding.cause)
            entries[at] = confirmed(entries[at], finding, where)
            shown.add(same.finding.cause)
        for finding in compared.only_gpu:
            schedule = Schedule(world_size=size, strategy=ON_GPUS, seed=0)
            entries.append(Found(finding=finding, count=1, schedules=1, replay=schedule))
        for entry, why in compared.only_sim:
            unshown[entry.finding.cause] = f"not shown by GSan: {_named(entry)}: {why}"
        notes.append(f"GSan (Triton {triton.__version__}), {where}: {_ended(sanitized, plain, compared)}")
        notes += limits(sanitized.said)
    notes += [line for cause, line in unshown.items() if cause not in shown]
    return replace(simulated, findings=tuple(entries), notes=tuple(notes))


def found_by(sanitized: Run) -> list[Finding]:
    """Findings of a run: GSan's, else the end that it came to."""
    listed = findings(sanitized.said)
    if listed or sanitized.error is None or limits(sanitized.said):
        return listed
    kind = "deadlock" if sanitized.is_hung else "error"
    text = f"{type(sanitized.error).__name__}: {sanitized.error}".splitlines()[0]
    return [Finding(kind=kind, message=f"on the GPU: {text}")]


def _ended(sanitized: Run, plain: Run | None, compared: Comparison) -> str:
    total = len(compared.both) + len(compared.only_gpu)
    if total:
        alone = f", {len(compared.only_gpu)} of which the simulator lacks" if compared.only_gpu else ""
        said = "all of which the simulator has" if not alone else alone[2:]
        ends = "; GSan ends a program at the first race" if any(one.is_race for one in sanitized.said) else ""
        return f"{total} finding(s), {said}{ends}"
    factor = slowdown(sanitized, plain) if plain is not None else None
    return "no race" + (f"; main takes {factor:.3g} times as long as without GSan" if factor is not None else "")


def _named(entry: Found) -> str:
    places = ", ".join(dict.fromkeys(str(side.place) for side in entry.finding.sides if side.place is not None))
    return f"{entry.finding.kind} {entry.finding.tensor}".rstrip() + (f" ({places})" if places else "")
