"""Measurement on each rank: for each shape, set up and check all providers, then time them in rounds."""

from __future__ import annotations

import contextlib
import datetime
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from weft.bench.harness import machine, meters
from weft.bench.harness.meters import Meter, Stuck, finish
from weft.bench.harness.report import Report, Row
from weft.bench.ops.baselines import close_quietly
from weft.bench.ops.problem import Problem, Verdict, poison
from weft.bench.ops.providers import Attempt, Provider, Unavailable
from weft.bench.ops.shapes import Shape
from weft.bench.ops.workload import Plan
from weft.errors import CallMismatch, PeerFailed, PeerSilent, WeftError
from weft.ops import barrier

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

T = TypeVar("T")
Save = Callable[[list[Report]], None]
# Errors that end the run.
FATAL = (Stuck, CallMismatch, PeerFailed, PeerSilent)


class OutOfStep(WeftError):
    """Error: a provider started its kernels on some ranks only, so they wait for peers that will not come."""

    def __init__(self, rank: int, what: str, reason: str) -> None:
        super().__init__(f"rank {rank}: {what} failed on some ranks only ({reason}), so nothing after it was measured")
        self.rank, self.what, self.reason = rank, what, reason
        self.reports: list[Report] = []  # results so far


@dataclass(slots=True, kw_only=True)
class Entrant:
    """Provider that gave the right answer, with its meters: single calls, calls in a row, without a graph."""

    row: Row
    attempt: Attempt
    single: Meter | None = None
    chain: Meter | None = None
    eager: Meter | None = None

    def meters(self) -> list[Meter]:
        return [meter for meter in (self.single, self.chain, self.eager) if meter is not None]


def run_plans(team: Team, plans: Sequence[Plan], save: Save | None, say: Callable[[str], None]) -> list[Report]:
    """Measure ``plans`` one after the other. All ranks return the same reports.

    save    called by rank 0 after every shape with the reports so far, so that a killed run leaves its results
    say     called by rank 0 with a line for each shape

    Raises Stuck or OutOfStep if a provider's kernels do not end; its ``reports`` hold the results so far and the reason.
    """
    if team.device.type == "cuda":
        barrier(team)  # loaded before the first capture
        finish(team, "the first barrier")
    empty_us = meters.events_in_graphs(team)
    empty_us = None if None in (all_ranks := team.exchange(empty_us)) else max(all_ranks)
    here, reports = machine.describe(team), []
    save = save if save is not None and team.rank == 0 else silent
    for plan in plans:
        bench = plan.bench(team, empty_us, say if team.rank == 0 else silent)
        report = Report(
            op=plan.op,
            world_size=team.size,
            dtype=plan.dtype,
            machine=dict(here),
            protocol=plan.protocol(team.is_simulated, empty_us),
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            command=plan.command,
            subject=plan.subject,
        )
        reports.append(report)
        for number, shape in enumerate(plan.shapes):
            started = time.perf_counter()
            try:
                report.rows += bench.measure(shape)
            except (Stuck, OutOfStep) as error:
                report.rows += bench.without(plan.shapes[number:], f"not measured: {error}")
                error.reports = reports
                save(reports)
                raise
            if bench.balanced and not team.is_simulated:
                report.protocol["neighbours"] = neighbours(bench.balanced)
            save(reports)
            if team.rank == 0:
                seconds = time.perf_counter() - started
                say(f"{plan.op} W={team.size} {shape.label}: {number + 1} of {len(plan.shapes)}, {seconds:.1f} s")
        if team.rank == 0 and team.device.type == "cuda":
            report.machine["afterwards"] = machine.state()
            save(reports)
    return reports


def neighbours(balanced: Mapping[str, bool]) -> str:
    """Shapes, for the protocol, at which every meter came directly after every other one equally often."""
    others = [label for label, is_balanced in balanced.items() if not is_balanced]
    if not others:
        return "balanced"
    return (
        "not balanced" if len(others) == len(balanced) else f"balanced, but not at {', '.join(others)}: too few rounds"
    )


def silent(told: Any) -> None:
    """Print nothing, write nothing."""


class Bench:
    """One plan at one rank. Every method is collective: all ranks take the same path through it."""

    def __init__(self, team: Team, plan: Plan, empty_us: float | None, say: Callable[[str], None] = silent) -> None:
        self.team, self.plan, self.empty_us, self.say = team, plan, empty_us, say
        self.providers = plan.chosen(team.is_simulated)
        self.balanced: dict[str, bool] = {}  # by label of the shape: True if neighbours were balanced

    def measure(self, shape: Shape) -> list[Row]:
        problem, reason = self.problem(shape)
        if problem is None or reason:
            return list(self.without([shape], reason))
        rows: dict[str, Row] = {}
        entrants: list[Entrant] = []
        for provider in self.providers:
            with self.told(f"{shape.label}: {provider.name} checked"):
                entrant = self.enter(problem, provider)
            rows[provider.name] = entrant.row
            if entrant.row.reason is None:
                entrants.append(entrant)
            else:
                close_quietly(entrant.attempt)
        if not self.plan.check_only:
            for entrant in list(entrants):
                with self.told(f"{shape.label}: {entrant.row.provider} captured"):
                    self.set_up(problem, entrant)
                if entrant.single is None:
                    entrants.remove(entrant)
                    close_quietly(entrant.attempt)
                rows[entrant.row.provider] = entrant.row
            problem.forget()
            with self.told(f"{shape.label}: timed"):
                rows |= {row.provider: row for row in self.time(entrants)}
            for entrant in entrants:
                row = rows[entrant.row.provider]
                rows[row.provider] = replace(row, parts_us=self.plan.parts(self.team, entrant.single))
        for entrant in entrants:
            entrant.single = entrant.chain = entrant.eager = None
            close_quietly(entrant.attempt)
        entrants.clear()
        if self.team.device.type == "cuda":
            del problem
            gc.collect()
            torch.cuda.empty_cache()
        return list(rows.values())

    def problem(self, shape: Shape) -> tuple[Any, str | None]:
        """(problem of the shape, None), or (None, reason why it cannot be set up)."""
        return self.together(lambda: self.plan.problem(shape, self.team))

    @contextlib.contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Scope that reports its duration, for slow operations: whole steps of models."""
        started = time.perf_counter()
        yield
        if self.plan.subject:
            self.say(f"  {what}, {time.perf_counter() - started:.1f} s")

    # --- one provider -----------------------------------------------------------------------------------------------

    def enter(self, problem: Problem, provider: Provider) -> Entrant:
        """Entrant of a provider whose answer was checked. Its row has a reason if it is excluded."""
        row = self.row(problem.shape, provider)
        what = f"{provider.name} at {problem.shape.label}"
        attempt, reason = self.together(lambda: provider.make(problem))
        if attempt is None or reason:
            return Entrant(row=replace(row, reason=reason), attempt=Attempt(run=lambda number: torch.empty(0)))
        reason = self.rehearsed(problem, attempt, what)
        if not reason:
            _, reason = self.together(lambda: poison(problem, attempt.local))
        if not reason:
            out, reason = self.together(lambda: attempt.run(0), launches=what)
        if reason:
            return Entrant(row=replace(row, reason=reason), attempt=attempt)
        finish(self.team, what)
        return Entrant(row=self.judged(row, problem, attempt, out, "wrong answer"), attempt=attempt)

    def rehearsed(self, problem: Problem, attempt: Attempt, what: str) -> str | None:
        """Reason to exclude the attempt before its first call; None if there is none."""
        return None

    def judged(self, row: Row, problem: Problem, attempt: Attempt, out: Any, complaint: str) -> Row:
        verdict, reason = self.together(lambda: problem.verdict(attempt, out))
        if reason:
            return replace(row, reason=f"could not be checked: {reason}")
        verdicts: list[Verdict] = self.team.exchange(verdict)
        wrong = next((f"{complaint}: rank {rank}: {v.wrong}" for rank, v in enumerate(verdicts) if v.wrong), None)
        # JSON has no NaN, and a maximum would lose it.
        worst = max((v.max_abs_error for v in verdicts if math.isfinite(v.max_abs_error)), default=None)
        rms = max((v.rms_error for v in verdicts if math.isfinite(v.rms_error)), default=None)
        return replace(row, max_abs_error=worst, rms_error=rms, reason=wrong)

    def set_up(self, problem: Problem, entrant: Entrant) -> None:
        """Entrant with its meters, whose answers are checked again. No ``single`` if it is excluded."""
        team, attempt = self.team, entrant.attempt
        numbers = meters.order(len(problem.sets), problem.replicas)
        if team.is_simulated:
            meter: Any = meters.HostMeter(team, attempt, numbers[-1:])
            mode, reason = "host", None
        else:
            make = meters.AroundMeter if self.empty_us is None else meters.GraphMeter
            mode = "around" if self.empty_us is None else "graph"
            meter, reason = self.together(lambda: make(team, attempt, numbers))
            if reason:
                meter, mode, reason = meters.EagerMeter(team, attempt, numbers), "eager", f"not captured: {reason}"
        row = self.replayed(problem, entrant, meter, "wrong answer when timed")
        entrant.row = replace(row, mode=mode, reason=row.reason or reason)
        if row.reason:
            return
        chain = None
        if mode == "graph":
            one = max(team.exchange(meters.spread(meter.samples()).median))
            if one < meters.LONG_US:
                in_a_row = meters.order(len(problem.sets), meters.calls_in_a_row(one))
                chain, _ = self.together(lambda: meters.ChainMeter(team, attempt, in_a_row))
        if chain is not None:
            entrant.row = self.replayed(problem, entrant, chain, "wrong answer in a row")
            if entrant.row.reason:
                return
        entrant.single, entrant.chain = meter, chain
        if self.plan.eager and mode in ("graph", "around"):
            entrant.eager = meters.EagerMeter(team, attempt, numbers)

    def replayed(self, problem: Problem, entrant: Entrant, meter: Meter, complaint: str) -> Row:
        """Row after a round of ``meter`` and a check of its last answer.

        It has a reason if the entrant is excluded.
        """
        attempt, what = entrant.attempt, f"{entrant.row.provider} at {problem.shape.label}"
        for tensor in () if meter.out is None else meter.out if isinstance(meter.out, tuple) else (meter.out,):
            tensor.fill_(math.nan)
        _, failure = self.together(meter.replay, launches=what)
        if failure:
            return replace(entrant.row, reason=failure)
        finish(self.team, what)
        if attempt.in_place and isinstance(meter, (meters.ChainMeter, meters.AroundMeter)):
            return entrant.row  # it continued with its own sums, for which there is no answer
        return self.judged(entrant.row, problem, attempt, meter.out, complaint)

    # --- all providers ----------------------------------------------------------------------------------------------

    def time(self, entrants: Sequence[Entrant]) -> Iterator[Row]:
        """Rounds of all meters in turn. Returns each row with the median of the rank whose median is largest."""
        if not entrants:
            return
        timed = [meter for entrant in entrants for meter in entrant.meters()]
        started = time.perf_counter()
        self.round(timed)
        seconds = max(self.team.exchange(time.perf_counter() - started))
        rounds = 2 if self.team.is_simulated else meters.rounds_for(seconds, self.plan.quick, len(timed))
        self.balanced[entrants[0].row.label] = rounds % meters.balanced_rounds(len(timed)) == 0
        samples: list[list[float]] = [[] for _ in timed]
        for number in range(rounds):
            # Neighbours alternate, since the previous meter affects clocks and caches. Equal on all ranks.
            self.round([timed[place] for place in meters.in_turn(len(timed), number)])
            for meter, found in zip(timed, samples, strict=True):
                found += meter.samples()
        mine = {id(meter): meters.spread(found) for meter, found in zip(timed, samples, strict=True)}
        for entrant in entrants:
            all_ranks = self.team.exchange([mine[id(meter)] for meter in entrant.meters()])
            single, *others = [max(ranks, key=lambda s: s.median) for ranks in zip(*all_ranks, strict=True)]
            chain = others.pop(0).median if entrant.chain is not None else None
            eager = others.pop(0).median if entrant.eager is not None else None
            if entrant.row.mode == "eager":
                eager = single.median
            yield replace(
                entrant.row, median_us=single.median, p10_us=single.p10, p90_us=single.p90, samples=single.samples,
                chain_us=chain, eager_us=eager,
            )  # fmt: skip

    def round(self, meters: Sequence[Meter]) -> None:
        for meter in meters:
            meter.replay()
        finish(self.team, "a round of all providers")

    # --- agreement --------------------------------------------------------------------------------------------------

    def together(self, action: Callable[[], T], launches: str | None = None) -> tuple[T | None, str | None]:
        """(result of ``action``, None), or (None, the first rank's reason) on all ranks if it raised on any.

        ``action`` must not be collective, since a rank that raises would leave the others in it. A provider's may be, if it
        fails on all ranks alike.
        ``launches``: description of its GPU work with waits between ranks. OutOfStep if it raised on some ranks only.
        """
        made, reason = None, None
        try:
            made = action()
        except FATAL:
            raise
        except Exception as error:  # any failure of a provider becomes a row with its reason
            reason = _one_line(error)
        reasons = self.team.exchange(reason)
        first = next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), None)
        if first is not None and len(set(reasons)) == 1:
            first = reasons[0]
        if first is not None and launches and None in reasons:
            raise OutOfStep(self.team.rank, launches, first)
        return (made, None) if first is None else (None, first)

    def row(self, shape: Shape, provider: Provider) -> Row:
        return Row(
            shape=shape.size, label=shape.label, provider=provider.name, role=provider.role, reason="not measured"
        )

    def without(self, shapes: Sequence[Shape], reason: str | None) -> list[Row]:
        return [replace(self.row(shape, p), reason=reason) for shape in shapes for p in self.providers]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    spoken = isinstance(error, (WeftError, ValueError, Unavailable))
    return (text if spoken else f"{type(error).__name__}: {text}")[:300]
