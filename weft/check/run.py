"""Runs of a main under many schedules, each with an observer, and their merged findings."""

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
from weft.check.detector.findings import Finding, Side, allowed_by
from weft.check.detector.host_operations import host_line_of
from weft.check.digests import Digest, digest_of, first_difference
from weft.check.folding import Seen, causes_of
from weft.check.report import DEFAULT_SMS, Found, Report, Schedule
from weft.check.shrinking import Shrinking
from weft.check.strategies import STRATEGIES, make, strategy_of
from weft.errors import Deadlock, InvalidAccess, Misaligned, WeftError, WrongMain
from weft.runtime.mains import check_main
from weft.runtime.simulate import simulate

DEFAULT_SCHEDULES = 20
# Resident programs of a rank, for mains that size kernels by them; each for as many runs as "mix" has strategies.
_SMS_IN_TURN = (DEFAULT_SMS, 2, 4, 1)
_RUNS_OF_ONE = 4
Progress = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of one run.

    digest     of the ranks' ``results``; None if the run ended early
    programs   most programs of a rank resident at once
    is_sized   main has asked how many programs can be resident
    unstarted  size of the largest grid that had unstarted programs in a deadlock, 0 if there was none
    """

    findings: tuple[tuple[Finding, int], ...]
    digest: Digest | None
    results: Any
    programs: int
    is_sized: bool = False
    unstarted: int = 0

    @property
    def needs_more_sms(self) -> bool:
        """True if the run failed for lack of SMs, or by an error that this lack may have caused."""
        kinds = ("residency", "error")
        return any(f.kind in kinds and not f.message.startswith("AssertionError") for f, _ in self.findings)

    @property
    def causes(self) -> list[Finding]:
        """Findings that are not consequences of others of this run."""
        seen = [Seen(finding=finding, runs=frozenset((0,))) for finding, _ in self.findings]
        return [one.finding for i, (one, cause) in enumerate(zip(seen, causes_of(seen), strict=True)) if i == cause]


def check(
    main: Callable[..., Any],
    world_size: int | Sequence[int] = 4,
    *,
    schedules: int = DEFAULT_SCHEDULES,
    strategy: str = "mix",
    seed: int = 0,
    depth: int = 3,
    sms: int | None = None,
    heap_bytes: int | None = 8 << 20,
    args: Sequence[Any] = (),
    deterministic: bool = True,
    script: str = "",
    progress: Progress | None = None,
    on_results: Callable[[list[Any]], None] | None = None,
) -> Report:
    """Run ``main(team, *args)`` under ``schedules`` schedules for each world size, and report errors.

    world_size     one or several
    strategy       "mix" (all in turn), "uniform", "pct", "slow", "delay" or "exhaustive" (at most ``schedules`` runs; the
                   report says "exhausted" or "bounded")
    seed           of the first schedule; the i-th has seed + i
    depth          number of ordering constraints for pct
    sms            programs of a rank that can be resident at once. None: 8, or for a main that asks (``team.max_programs``)
                   8, 2, 4 and 1 in turn, each for four schedules
    deterministic  require bitwise equal results of main under all schedules
    script         name of the checked script in replay commands; these are Python calls if it is empty
    progress       called with (finished runs, total runs, findings so far)
    on_results     called with main's results, in rank order, after every run that completes

    An error that main raises is a finding too. ValueError for invalid arguments.
    """
    check_callable("main", main, "main(team, *args)")
    check_main(main)
    sizes = check_sizes("world_size", world_size)
    schedules, depth = positive("schedules", schedules), positive("depth", depth)
    sms = check_optional(positive, "sms", sms)
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

            exhausted = explore(
                runner, size, sms or DEFAULT_SMS, schedules, gathered, lambda: _tell(progress, gathered, total)
            )
            exhaustive = "bounded" if not exhausted or exhaustive == "bounded" else "exhausted"
            continue
        varies = False
        for number in range(seed, seed + schedules):
            schedule = Schedule(
                world_size=size,
                strategy=strategy_of(strategy, number),
                seed=number,
                depth=depth,
                sms=sms or DEFAULT_SMS,
            )
            turn = _SMS_IN_TURN[(number - seed) // _RUNS_OF_ONE % len(_SMS_IN_TURN)]
            chosen = replace(schedule, sms=turn) if varies else schedule
            outcome = runner.run(chosen)
            if chosen.sms < schedule.sms and outcome.needs_more_sms:
                # Kernels of a fixed size wait for each other here, so smaller GPUs do not count.
                varies, chosen = False, schedule
                outcome = runner.run(schedule)
            elif number == seed:
                varies = sms is None and outcome.is_sized
            gathered.add(chosen, outcome)
            _tell(progress, gathered, total)
    found = gathered.found()
    if strategy != "exhaustive":
        shrinking = Shrinking(runner, {f.finding.cause for f in found})
        found = [replace(f, replay=shrinking.shrunk(f)) for f in found]
    return Report(
        findings=tuple(found), schedules=gathered.runs, world_sizes=sizes, exhaustive=exhaustive, script=script
    )


def check_sizes(name: str, world_size: Any) -> tuple[int, ...]:
    """World sizes as a tuple. ValueError unless they are one or several numbers of virtual ranks."""
    if is_integer(world_size):
        return (check_virtual_ranks(name, world_size),)
    sizes = check_sequence(name, world_size, "an integer or a list of integers")
    if not sizes:
        raise ValueError(f"{name}={world_size!r} is empty; name at least one world size")
    return tuple(check_virtual_ranks(f"{name}[{index}]", size) for index, size in enumerate(sizes))


class Runner:
    """Runner of a main under one schedule at a time."""

    def __init__(self, main: Callable[..., Any], heap_bytes: int | None, args: tuple) -> None:
        self._main, self._heap_bytes, self._args = main, heap_bytes, args

    def run(self, schedule: Schedule, strategy: Any = None) -> Outcome:
        """Run once. If programs find no free SM, run again with enough SMs: a hang there has another cause."""
        outcome = self._run(schedule, strategy)
        if strategy is not None or outcome.unstarted <= schedule.sms:
            return outcome
        larger = self._run(replace(schedule, sms=outcome.unstarted))
        hangs = tuple((f, count) for f, count in larger.findings if f.kind in ("deadlock", "launch-mismatch"))
        if not hangs:
            return outcome
        kept = tuple((f, count) for f, count in outcome.findings if f.kind != "residency")
        return replace(outcome, findings=kept + hangs)

    def _run(self, schedule: Schedule, strategy: Any = None) -> Outcome:
        from weft.check.detector.detector import Observer
        from weft.simulator.machine.store_buffers import StoreBuffers

        kept = []

        def prepare(machine: Any) -> None:
            machine.observer = Observer(machine)
            chosen = strategy or make(
                schedule.strategy, schedule.seed, schedule.world_size, schedule.sms, schedule.depth
            )
            machine.scheduler.strategy = chosen
            if strategy is not None:
                strategy.place = machine.memory.place
            if schedule.strategy in ("delay", "exhaustive"):
                machine.store_buffers = StoreBuffers(machine, schedule.seed, tasks=schedule.strategy == "exhaustive")
            late = machine.store_buffers
            machine.scheduler.when_stuck = lambda: late is not None and late.time_passes() or machine.return_launches()
            kept.append(machine)

        digest = results = error = None
        try:
            results = simulate(
                self._main, schedule.world_size, seed=schedule.seed, sms=schedule.sms, heap_bytes=self._heap_bytes,
                args=self._args, prepare=prepare,
            )  # fmt: skip
            digest = digest_of(results)
        except (Exception, SystemExit) as caught:  # a main that exits early has proved nothing
            error = caught
        if not kept or isinstance(error, WrongMain):
            raise error  # the run did not begin
        machine = kept[0]
        observer = machine.observer
        if error is None:
            observer.signals.finish()
        races = observer.races
        findings = [(finding, races.counts[cause]) for cause, finding in races.findings.items()]
        if error is not None and not isinstance(error, Deadlock):
            findings.append((_of_error(error, machine), 1))
        return Outcome(
            findings=tuple(findings), digest=digest, results=results, programs=machine.most_at_once,
            is_sized=machine.is_sized, unstarted=observer.unstarted,
        )  # fmt: skip


class Gathered:
    """Findings of all runs so far, by cause."""

    def __init__(self, strategy: str, deterministic: bool, on_results: Callable[[list[Any]], None] | None) -> None:
        self.runs, self._strategy, self._deterministic, self._on_results = 0, strategy, deterministic, on_results
        self._found: dict[tuple, Found] = {}
        self._seen: dict[tuple, set[int]] = {}
        self._digests: dict[tuple[int, int], tuple[Digest, Schedule]] = {}  # by world size and SMs
        self._runs_of: dict[int, set[int]] = {}  # by world size

    def add(self, schedule: Schedule, outcome: Outcome) -> None:
        self.runs += 1
        self._runs_of.setdefault(schedule.world_size, set()).add(self.runs)
        for finding, count in outcome.findings:
            self._merge(finding, count, schedule)
        if outcome.digest is not None and self._on_results is not None:
            self._on_results(outcome.results)
        if outcome.digest is not None and self._deterministic:
            size = schedule.world_size
            first, other = self._digests.setdefault((size, schedule.sms), (outcome.digest, schedule))
            where = first_difference(first, outcome.digest)
            if where:
                text = (
                    f"{where} differs bitwise between strategy {other.strategy}, seed {other.seed} and strategy "
                    f"{schedule.strategy}, seed {schedule.seed} at world size {size}"
                )
                both = self._range(other, schedule)
                self._merge(Finding(kind="divergence", message=text), 1, both, ("divergence", size))

    def _range(self, first: Schedule, last: Schedule) -> Schedule:
        """Schedule that repeats both."""
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
        # A wait that sees a later value orders more than it asks for, which may hide a race in a run with wrong results. So
        # findings of all runs of the world size may explain a divergence.
        runs = self._runs_of[schedule.world_size] if finding.kind == "divergence" else (self.runs,)
        self._seen.setdefault(cause, set()).update(runs)

    def found(self) -> list[Found]:
        """Findings, each with its consequences."""
        every = [(self._found[cause], self._seen[cause]) for cause in self._found]
        causes = causes_of([Seen(finding=found.finding, runs=frozenset(runs)) for found, runs in every])
        kept = []
        for index, (found, _) in enumerate(every):
            if causes[index] == index:
                also = tuple(every[i][0].finding for i, cause in enumerate(causes) if cause == index != i)
                kept.append(replace(found, also=also))
        return kept


_PLACE = re.compile(r"(?:in no tensor; nearest: )?(.*?)(?:\[(-?\d+)\])? of rank (\d+)")


def _of_error(error: Exception, machine: Any) -> Finding:
    """Finding for an exception."""
    races, failed = machine.observer.races, machine.scheduler.failed
    kind, tensor, rank, index = "error", "", 0, 0
    message = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
    sides: tuple[Side, ...] = ()
    if isinstance(error, InvalidAccess):
        misaligned, gone = "misaligned" in error.verb, "freed" in error.nearest
        kind = "misaligned" if misaligned else "use-after-free" if gone else "out-of-bounds"
        place = _PLACE.match(error.nearest)
        if place is not None:
            tensor, index, rank = place[1], int(place[2] or 0), int(place[3])
        named = machine.observer.named.get(error.who)
        sides = (races.side(replace(named, verb=error.verb)),) if named is not None else ()
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
