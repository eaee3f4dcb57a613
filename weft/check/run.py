"""Runs of a main under schedules, each with a watcher; findings merged over all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.arguments import (
    check_args,
    check_bool,
    check_callable,
    check_choice,
    check_heap_bytes,
    check_instance,
    check_optional,
    check_seed,
    check_sequence,
    check_virtual_ranks,
    is_integer,
    positive,
)
from weft.check.digests import Digest, digest_of, first_difference
from weft.check.report import Found, Report, Schedule
from weft.check.shrinking import Shrinking
from weft.errors import Deadlock, InvalidAccess, Misaligned, WeftError, WrongMain
from weft.runtime.mains import check_main
from weft.runtime.simulate import simulate
from weft.simulator.findings import Finding, Side, allowed_by
from weft.simulator.hosts import host_line_of
from weft.simulator.strategies import STRATEGIES, make, strategy_of

DEFAULT_SCHEDULES = 20
Progress = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run gave. ``digest``: of the ranks' ``results``; None if it ended early. ``programs``: a rank's, at once."""

    findings: tuple[tuple[Finding, int], ...]
    digest: Digest | None
    results: Any
    programs: int


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
    check_callable("main", main, "main(team, *args)")
    check_main(main)
    sizes = check_sizes("world_size", world_size)
    schedules, sms, depth = positive("schedules", schedules), positive("sms", sms), positive("depth", depth)
    check_choice("strategy", strategy, STRATEGIES)
    seed = check_seed(seed)
    check_bool("deterministic", deterministic)
    check_instance("script", script, str, "a string")
    check_optional(check_callable, "progress", progress, "progress(runs, total, findings)")
    check_optional(check_callable, "on_results", on_results, "on_results(results)")
    runner = Runner(main, check_heap_bytes(heap_bytes), check_args(args))
    gathered = Gathered(strategy, deterministic, on_results)
    total, exhaustive = schedules * len(sizes), ""
    for size in sizes:
        if strategy == "exhaustive":
            from weft.check.exhaustive import explore

            exhausted = explore(runner, size, sms, schedules, gathered, lambda: _tell(progress, gathered, total))
            exhaustive = "bounded" if not exhausted or exhaustive == "bounded" else "exhausted"
            continue
        for number in range(seed, seed + schedules):
            schedule = Schedule(
                world_size=size, strategy=strategy_of(strategy, number), seed=number, depth=depth, sms=sms
            )
            gathered.add(schedule, runner.run(schedule))
            _tell(progress, gathered, total)
    found = gathered.found()
    if strategy != "exhaustive":
        shrinking = Shrinking(runner)
        found = [replace(f, replay=shrinking.shrunk(f)) for f in found]
    return Report(
        findings=tuple(found), schedules=gathered.runs, world_sizes=sizes, exhaustive=exhaustive, script=script
    )


def check_sizes(name: str, world_size: Any) -> tuple[int, ...]:
    """The world sizes as a tuple. ValueError unless they are one or several numbers of virtual ranks."""
    if is_integer(world_size):
        return (check_virtual_ranks(name, world_size),)
    sizes = check_sequence(name, world_size, "an integer or a list of integers")
    if not sizes:
        raise ValueError(f"{name}={world_size!r} is empty; name at least one world size")
    return tuple(check_virtual_ranks(f"{name}[{index}]", size) for index, size in enumerate(sizes))


class Runner:
    """Runs a main under one schedule at a time."""

    def __init__(self, main: Callable[..., Any], heap_bytes: int | None, args: tuple) -> None:
        self._main, self._heap_bytes, self._args = main, heap_bytes, args

    def run(self, schedule: Schedule, strategy: Any = None) -> Outcome:
        from weft.simulator.delays import Delays
        from weft.simulator.watcher import Watcher

        kept = []

        def prepare(machine: Any) -> None:
            machine.watcher = Watcher(machine)
            chosen = strategy or make(
                schedule.strategy, schedule.seed, schedule.world_size, schedule.sms, schedule.depth
            )
            machine.scheduler.strategy = chosen
            if strategy is not None:
                strategy.place = machine.memory.place
            if schedule.strategy in ("delay", "exhaustive"):
                machine.delays = Delays(machine, schedule.seed, tasks=schedule.strategy == "exhaustive")
            late = machine.delays
            machine.scheduler.when_stuck = lambda: late is not None and late.time_passes() or machine.let_hosts_go()
            kept.append(machine)

        digest = results = error = None
        try:
            results = simulate(
                self._main, schedule.world_size, seed=schedule.seed, sms=schedule.sms, heap_bytes=self._heap_bytes,
                args=self._args, prepare=prepare,
            )  # fmt: skip
            digest = digest_of(results)
        except (Exception, SystemExit) as caught:  # a main that leaves early has not shown that it is right
            error = caught
        if not kept or isinstance(error, WrongMain):
            raise error  # it did not even begin
        machine = kept[0]
        watcher = machine.watcher
        if error is None:
            watcher.words.finish()
        races = watcher.races
        findings = [(finding, races.counts[cause]) for cause, finding in races.findings.items()]
        if error is not None and not isinstance(error, Deadlock):
            findings.append((_of_error(error, machine), 1))
        return Outcome(findings=tuple(findings), digest=digest, results=results, programs=machine.most_at_once)


class Gathered:
    """Findings of all runs so far, by cause."""

    def __init__(self, strategy: str, deterministic: bool, on_results: Callable[[list[Any]], None] | None) -> None:
        self.runs, self._strategy, self._deterministic, self._on_results = 0, strategy, deterministic, on_results
        self._found: dict[tuple, Found] = {}
        self._digests: dict[int, tuple[Digest, Schedule]] = {}

    def add(self, schedule: Schedule, outcome: Outcome) -> None:
        self.runs += 1
        for finding, count in outcome.findings:
            self._merge(finding, count, schedule)
        if outcome.digest is not None and self._on_results is not None:
            self._on_results(outcome.results)
        if outcome.digest is not None and self._deterministic:
            first, other = self._digests.setdefault(schedule.world_size, (outcome.digest, schedule))
            where = first_difference(first, outcome.digest)
            if where:
                text = (
                    f"{where} differs bitwise between strategy {other.strategy}, seed {other.seed} and strategy "
                    f"{schedule.strategy}, seed {schedule.seed} at world size {schedule.world_size}"
                )
                both = self._range(other, schedule)
                self._merge(Finding(kind="divergence", message=text), 1, both, ("divergence", schedule.world_size))

    def _range(self, first: Schedule, last: Schedule) -> Schedule:
        """What runs both again."""
        if last.strategy == "exhaustive":
            return last
        strategy = last.strategy if self._strategy != "mix" else "mix"
        return replace(last, strategy=strategy, seed=first.seed, runs=last.seed - first.seed + 1)

    def _merge(self, finding: Finding, count: int, schedule: Schedule, cause: tuple | None = None) -> None:
        cause = cause or finding.cause
        old = self._found.get(cause)
        if old is None:
            self._found[cause] = Found(finding=finding, count=count, schedules=1, replay=schedule)
        else:
            self._found[cause] = replace(old, count=old.count + count, schedules=old.schedules + 1)

    def found(self) -> list[Found]:
        return list(self._found.values())


_PLACE = re.compile(r"(?:in no tensor; nearest: )?(.*?)(?:\[(-?\d+)\])? of rank (\d+)")


def _of_error(error: Exception, machine: Any) -> Finding:
    """A finding that an exception stands for."""
    races, failed = machine.watcher.races, machine.scheduler.failed
    kind, tensor, rank, index = "error", "", 0, 0
    message = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
    sides: tuple[Side, ...] = ()
    if isinstance(error, InvalidAccess):
        misaligned, gone = "misaligned" in error.verb, "freed" in error.nearest
        kind = "misaligned" if misaligned else "use-after-free" if gone else "out-of-bounds"
        place = _PLACE.match(error.nearest)
        if place is not None:
            tensor, index, rank = place[1], int(place[2] or 0), int(place[3])
        asked = machine.watcher.asked.get(error.who)
        sides = (races.side(replace(asked, verb=error.verb)),) if asked is not None else ()
    elif failed is not None:
        kind = "misaligned" if isinstance(error, Misaligned) else kind
        code = machine.interpreter.line_of(error) or host_line_of(error)
        verb = type(error).__name__
        sides = (Side(rank=failed.rank, task=failed.label, verb=verb, place=races.place(code), sync=""),)
    if isinstance(error, WeftError) and "programs that wait for each other" in str(error):
        kind = "residency"
    return Finding(
        kind=kind, message=message.splitlines()[0] if message else kind, tensor=tensor, rank=rank, first=index, last=index,
        sides=sides, allowed=allowed_by(kind, sides),
    )  # fmt: skip


def _tell(progress: Progress | None, gathered: Gathered, total: int) -> None:
    if progress is not None:
        progress(gathered.runs, total, len(gathered.found()))
