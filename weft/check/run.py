"""Runs of a main under schedules, each with a watcher; findings merged over all of them."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.check.report import Found, Report, Schedule
from weft.errors import Deadlock, InvalidAccess, WeftError
from weft.runtime.simulate import simulate
from weft.simulator.findings import Finding, allowed_by
from weft.simulator.strategies import STRATEGIES, make, strategy_of

DEFAULT_SCHEDULES = 20
Progress = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run gave. ``digest``: of the ranks' ``results``, bit for bit; None if the run ended early."""

    findings: tuple[tuple[Finding, int], ...]
    digest: str | None
    results: Any


def check(
    main: Callable[..., Any],
    world_size: int | Sequence[int] = 4,
    *,
    schedules: int = DEFAULT_SCHEDULES,
    strategy: str = "mix",
    seed: int = 0,
    depth: int = 3,
    sms: int = 8,
    heap_bytes: int | None = 8 << 20,
    args: Sequence[Any] = (),
    deterministic: bool = True,
    script: str = "",
    progress: Progress | None = None,
    on_results: Callable[[list[Any]], None] | None = None,
) -> Report:
    """Run ``main(team, *args)`` under ``schedules`` schedules for each world size, and report what is wrong.

    world_size     one or several
    strategy       "mix" (all in turn), "uniform", "pct", "slow", "delay" or "exhaustive" (at most ``schedules`` runs; the
                   report says "exhausted" or "bounded")
    seed           of the first schedule; the i-th has seed + i
    depth          of pct
    sms            programs of a rank that can be resident at once
    deterministic  main's results must be bitwise the same under all schedules
    script         how replay commands name what is checked; a Python call if empty
    progress       called with (runs made, runs in all, findings so far)
    on_results     called with main's results, in rank order, of every run that came to its end

    An error that main raises is a finding too. ValueError for arguments that make no sense.
    """
    sizes = (world_size,) if isinstance(world_size, int) else tuple(world_size)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"world_size={world_size} must name world sizes of at least 1")
    if schedules < 1:
        raise ValueError(f"schedules={schedules} must be at least 1")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is not one of {', '.join(STRATEGIES)}")
    runner = Runner(main, sms, heap_bytes, tuple(args))
    gathered = Gathered(deterministic, on_results)
    total, exhaustive = schedules * len(sizes), ""
    for size in sizes:
        if strategy == "exhaustive":
            from weft.check.exhaustive import explore

            exhausted = explore(runner, size, schedules, gathered, lambda: _tell(progress, gathered, total))
            exhaustive = "bounded" if not exhausted or exhaustive == "bounded" else "exhausted"
            continue
        for number in range(seed, seed + schedules):
            schedule = Schedule(world_size=size, strategy=strategy_of(strategy, number), seed=number, depth=depth)
            gathered.add(schedule, runner.run(schedule))
            _tell(progress, gathered, total)
    found = gathered.found()
    if strategy != "exhaustive":
        found = [replace(f, replay=shrunk(runner, f)) for f in found]
    return Report(
        findings=tuple(found), schedules=gathered.runs, world_sizes=sizes, exhaustive=exhaustive, script=script
    )


class Runner:
    """Runs a main under one schedule at a time."""

    def __init__(self, main: Callable[..., Any], sms: int, heap_bytes: int | None, args: tuple) -> None:
        self._main, self._sms, self._heap_bytes, self._args = main, sms, heap_bytes, args

    def run(self, schedule: Schedule, strategy: Any = None) -> Outcome:
        from weft.simulator.delays import Delays
        from weft.simulator.watcher import Watcher

        kept = []

        def prepare(machine: Any) -> None:
            machine.watcher = Watcher(machine)
            chosen = strategy or make(schedule.strategy, schedule.seed, schedule.world_size, self._sms, schedule.depth)
            machine.scheduler.strategy = chosen
            if strategy is not None:
                strategy.place = machine.memory.place
            if schedule.strategy in ("delay", "exhaustive"):
                machine.delays = Delays(machine, schedule.seed, tasks=schedule.strategy == "exhaustive")
                machine.scheduler.when_stuck = machine.delays.all_out
            kept.append(machine)

        digest = results = error = None
        try:
            results = simulate(
                self._main, schedule.world_size, seed=schedule.seed, sms=self._sms, heap_bytes=self._heap_bytes,
                args=self._args, prepare=prepare,
            )  # fmt: skip
            digest = digest_of(results)
        except Exception as caught:
            error = caught
        if not kept:
            raise error  # it did not even begin
        machine = kept[0]
        watcher = machine.watcher
        if error is None:
            watcher.words.finish()
        races = watcher.races
        findings = [(finding, races.counts[cause]) for cause, finding in races.findings.items()]
        if error is not None and not isinstance(error, Deadlock):
            findings.append((_of_error(error, watcher), 1))
        return Outcome(findings=tuple(findings), digest=digest, results=results)


class Gathered:
    """Findings of all runs so far, by cause."""

    def __init__(self, deterministic: bool, on_results: Callable[[list[Any]], None] | None) -> None:
        self.runs, self._deterministic, self._on_results = 0, deterministic, on_results
        self._found: dict[tuple, Found] = {}
        self._digests: dict[int, tuple[str, Schedule]] = {}

    def add(self, schedule: Schedule, outcome: Outcome) -> None:
        self.runs += 1
        for finding, count in outcome.findings:
            self._merge(finding, count, schedule)
        if outcome.digest is not None and self._on_results is not None:
            self._on_results(outcome.results)
        if outcome.digest is not None and self._deterministic:
            first, other = self._digests.setdefault(schedule.world_size, (outcome.digest, schedule))
            if first != outcome.digest:
                text = (
                    f"results differ bitwise from those of strategy {other.strategy}, seed {other.seed} at world size "
                    f"{schedule.world_size}"
                )
                self._merge(Finding(kind="divergence", message=text), 1, schedule, ("divergence", schedule.world_size))

    def _merge(self, finding: Finding, count: int, schedule: Schedule, cause: tuple | None = None) -> None:
        cause = cause or finding.cause
        old = self._found.get(cause)
        if old is None:
            self._found[cause] = Found(finding=finding, count=count, schedules=1, replay=schedule)
        else:
            self._found[cause] = replace(old, count=old.count + count, schedules=old.schedules + 1)

    def found(self) -> list[Found]:
        return list(self._found.values())


def shrunk(runner: Runner, found: Found) -> Schedule:
    """The simplest schedule that shows the same: the fewest preemptions (pct of depth 1, then 2), else the one it came from."""
    cause = found.finding.cause
    if found.finding.kind == "divergence":
        return found.replay
    for depth, seeds in ((1, 3), (2, 3)):
        for seed in range(seeds):
            simple = replace(found.replay, strategy="pct", seed=seed, depth=depth)
            if any(finding.cause == cause for finding, _ in runner.run(simple).findings):
                return simple
    return found.replay


def digest_of(results: Any) -> str:
    """Of tensors their dtype, shape and bits, of containers their members, of anything else its pickle."""
    digest = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().view(-1)
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        elif isinstance(value, (list, tuple)):
            digest.update(f"[{len(value)}".encode())
            for member in value:
                take(member)
        elif isinstance(value, dict):
            take([item for pair in value.items() for item in pair])
        else:
            try:
                digest.update(pickle.dumps(value))
            except Exception:  # what cannot be pickled cannot be compared
                digest.update(type(value).__name__.encode())

    take(results)
    return digest.hexdigest()


def _of_error(error: Exception, watcher: Any) -> Finding:
    """A finding that an exception stands for."""
    kind, sides, tensor = "error", (), ""
    if isinstance(error, InvalidAccess):
        kind = "misaligned" if "misaligned" in error.verb else "out-of-bounds"
        if "freed" in error.nearest:
            kind = "use-after-free"
        tensor = error.nearest.split("[")[0].split(" of rank")[0]
        if watcher.last is not None:
            sides = (watcher.races.side(watcher.last),)
    elif isinstance(error, WeftError) and "programs that wait for each other" in str(error):
        kind = "residency"
    message = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
    return Finding(
        kind=kind,
        message=message.splitlines()[0] if message else kind,
        tensor=tensor,
        sides=sides,
        allowed=allowed_by(kind, sides),
    )


def _tell(progress: Progress | None, gathered: Gathered, total: int) -> None:
    if progress is not None:
        progress(gathered.runs, total, len(gathered.found()))
