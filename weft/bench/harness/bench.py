"""``Bench``: one workload on one rank. For each shape all providers are checked, then timed in rounds."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from weft.bench.harness import meters
from weft.bench.harness.meters import Meter, finish
from weft.bench.harness.provider import Prepared, Provider, Result, Verdict
from weft.bench.harness.report import Row
from weft.bench.harness.workload import Failed, Problem, Shape, Workload, together

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to measure, equal for all workloads.

    one_by_one  check and time a provider before the next one is made, where memory does not hold them side by side
    command     for the report
    """

    check_only: bool = False
    quick: bool = False
    eager: bool = False
    one_by_one: bool = False
    command: str = ""


@dataclass(slots=True, kw_only=True)
class Entrant:
    """Provider that gave the right answer, with its meters of single calls and of rows."""

    row: Row
    prepared: Prepared | None = None
    single: Meter | None = None
    chain: Meter | None = None
    eager: Meter | None = None
    row_of_calls: meters.EagerRow | None = None

    def meters(self) -> list[Meter]:
        every = self.single, self.chain, self.eager, self.row_of_calls
        return [meter for meter in every if meter is not None]

    def leave(self) -> None:
        """Free its graphs and buffers."""
        self.single = self.chain = self.eager = self.row_of_calls = None
        if self.prepared is not None:
            self.prepared.release()
            self.prepared = None


def silent(told: object) -> None:
    """Print nothing, write nothing."""


def free(team: Team) -> None:
    """Return the memory of problems and providers that are gone to the GPU."""
    if team.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


class Bench:
    """One workload at one rank. Every method is collective: all ranks take the same path through it."""

    def __init__(
        self,
        team: Team,
        workload: Workload,
        options: Options,
        empty_us: float | None,
        say: Callable[[str], None] = silent,
    ) -> None:
        self.team, self.workload, self.options, self.empty_us, self.say = team, workload, options, empty_us, say
        self.providers = workload.providers(team.is_simulated)
        self.balanced: dict[str, bool] = {}  # by label of the shape: True if neighbours were balanced

    def measure(self, shape: Shape) -> list[Row]:
        try:
            problem = together(self.team, lambda: self.workload.problem(shape, self.team))
            problem.expect()
            figures = problem.figures() or None
        except Failed as error:
            return self.without([shape], str(error))
        rows: list[Row] = []
        apart = problem.alone or self.options.one_by_one
        for providers in [[one] for one in self.providers] if apart else [self.providers]:
            entrants = []
            for provider in providers:
                begin = time.perf_counter()
                entrant = self.enter(problem, provider)
                entrant.row = replace(entrant.row, figures=figures)
                entrants.append(entrant)
                outcome = "checked" if entrant.row.reason is None else "excluded"
                self.tell(f"{shape.label}: {provider.name} {outcome}", begin)
            if not self.options.check_only:
                self.measure_together(problem, [entrant for entrant in entrants if entrant.row.reason is None])
            for entrant in entrants:
                rows.append(entrant.row)
                entrant.leave()
            del entrants
            if apart:
                self.free()
        del problem
        self.free()
        return rows

    def free(self) -> None:
        """Free what providers that have left held."""
        free(self.team)
        if self.team.device.type == "cuda":
            torch.compiler.reset()  # compiled code is not used at another shape, and its number is limited

    def measure_together(self, problem: Problem, entrants: list[Entrant]) -> None:
        """Fill in the times of entrants that passed the check."""
        label = problem.shape.label
        if problem.alone:
            for entrant in entrants:
                with self.told(f"{label}: {entrant.row.provider} timed"):
                    self.time_alone(problem, entrant)
            return
        for entrant in entrants:
            begin = time.perf_counter()
            self.set_up(problem, entrant)
            outcome = "captured" if entrant.row.mode == "graph" else "set up"
            if entrant.single is None:
                outcome = "excluded"
                entrant.leave()
            self.tell(f"{label}: {entrant.row.provider} {outcome}", begin)
        if not self.options.one_by_one:  # else the next provider is checked against the answers too
            problem.forget()
        with self.told(f"{label}: timed"):
            self.time([entrant for entrant in entrants if entrant.single is not None])
        for entrant in entrants:
            if entrant.single is not None:
                entrant.row = replace(entrant.row, parts_us=self.workload.parts(self.team, entrant.single))

    @contextlib.contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Scope that reports its duration, as ``tell``."""
        begin = time.perf_counter()
        yield
        self.tell(what, begin)

    def tell(self, what: str, begin: float) -> None:
        """Report the time since ``begin``, for slow operations: whole steps of models."""
        if self.workload.subject:
            self.say(f"  {what}, {time.perf_counter() - begin:.1f} s")

    # --- one provider -----------------------------------------------------------------------------------------------

    def enter(self, problem: Problem, provider: Provider) -> Entrant:
        """Entrant of a provider whose answer was checked. Its row has a reason if it is excluded."""
        entrant = Entrant(row=self.row(problem.shape, provider))
        what = f"{provider.name} at {problem.shape.label}"
        try:
            prepared = together(self.team, lambda: provider.make(problem), launches=what if problem.alone else None)
            entrant.prepared = prepared
            reason = problem.rehearse(prepared, what)
            if not reason:
                together(self.team, lambda: problem.poison(prepared))
                out = together(self.team, lambda: prepared.run(0), launches=what)
        except Failed as error:
            reason = str(error)
        if reason:
            entrant.row = replace(entrant.row, reason=reason)
        else:
            finish(self.team, what)
            entrant.row = self.judged(problem, entrant, out, "wrong answer")
        if entrant.row.reason:
            entrant.leave()
        return entrant

    def enter_one_design(self, problem: Problem, provider: Provider, rows: bool) -> Entrant:
        """Entrant after all steps but timing, with its reason if it is dropped; then it has no ``single``.

        rows  False: not in a row, which would double the time without affecting a choice
        """
        entrant = self.enter(problem, provider)
        if entrant.row.reason is None:
            self.set_up(problem, entrant)
            entrant.chain = entrant.chain if rows else None
        if entrant.single is None:
            entrant.row = replace(entrant.row, reason=entrant.row.reason or "it has no time")
            entrant.leave()
        return entrant

    def judged(self, problem: Problem, entrant: Entrant, out: Result, complaint: str) -> Row:
        """Row of the entrant after a check of ``out``. It has a reason if the answer is wrong."""
        row = entrant.row
        try:
            verdict: Verdict = problem.check(entrant.prepared, out, f"{row.provider} at {row.label}")
        except Failed as error:
            return replace(row, reason=f"could not be checked: {error}")
        worst, rms = (error if math.isfinite(error) else None for error in (verdict.max_abs_error, verdict.rms_error))
        wrong = f"{complaint}: {verdict.wrong}" if verdict.wrong else None
        return replace(row, max_abs_error=worst, rms_error=rms, reason=wrong)

    def set_up(self, problem: Problem, entrant: Entrant) -> None:
        """Give the entrant its meters, whose answers are checked again; no ``single`` if it is excluded."""
        team, prepared = self.team, entrant.prepared
        numbers = meters.order(len(problem.sets), problem.replicas)
        reason = None
        if team.is_simulated:
            meter: Meter = meters.HostMeter(team, prepared, numbers[-1:])
            mode = "host"
        else:
            make = meters.AroundMeter if self.empty_us is None else meters.GraphMeter
            mode = "around" if self.empty_us is None else "graph"
            try:
                meter = together(team, lambda: make(team, prepared, numbers))
            except Failed as error:
                meter, mode, reason = meters.EagerMeter(team, prepared, numbers), "eager", f"not captured: {error}"
        row = self.replayed(problem, entrant, meter, "wrong answer when timed")
        entrant.row = replace(row, mode=mode, reason=row.reason or reason)
        if row.reason:
            return
        chain = None
        if mode == "graph":
            one = max(team.exchange(meters.spread(meter.samples()).median))
            if one < meters.LONG_US:
                in_a_row = meters.order(len(problem.sets), meters.calls_in_a_row(one))
                with contextlib.suppress(Failed):
                    chain = together(team, lambda: meters.ChainMeter(team, prepared, in_a_row))
        if chain is not None:
            entrant.row = self.replayed(problem, entrant, chain, "wrong answer in a row")
            if entrant.row.reason:
                return
        entrant.single, entrant.chain = meter, chain
        if self.options.eager and mode in ("graph", "around"):
            entrant.eager = meters.EagerMeter(team, prepared, numbers)
            if entrant.chain is not None:
                in_a_row = meters.order(len(problem.sets), meters.EAGER_CALLS)
                entrant.row_of_calls = meters.EagerRow(team, prepared, in_a_row)
                together(team, entrant.row_of_calls.warm_up)

    def replayed(self, problem: Problem, entrant: Entrant, meter: Meter, complaint: str) -> Row:
        """Row after a round of ``meter`` and a check of its last answer; with a reason if it is excluded."""
        what = f"{entrant.row.provider} at {problem.shape.label}"
        for tensor in () if meter.out is None else meter.out if isinstance(meter.out, tuple) else (meter.out,):
            meters.spoil(tensor)
        try:
            together(self.team, meter.replay, launches=what)
        except Failed as error:
            return replace(entrant.row, reason=str(error))
        finish(self.team, what)
        if entrant.prepared.in_place and isinstance(meter, (meters.ChainMeter, meters.AroundMeter)):
            return entrant.row  # it added to earlier sums, for which there is no answer
        return self.judged(problem, entrant, meter.out, complaint)

    def time_alone(self, problem: Problem, entrant: Entrant) -> None:
        """Fill in the times that the problem itself takes."""
        what = f"{entrant.row.provider} at {problem.shape.label}"
        mode = "host" if self.team.is_simulated else "wall"
        try:
            entrant.row = replace(entrant.row, mode=mode, **problem.time(entrant.prepared, what, self.options.quick))
        except Failed as error:
            entrant.row = replace(entrant.row, reason=str(error))

    # --- all providers ----------------------------------------------------------------------------------------------

    def time(self, entrants: Sequence[Entrant]) -> None:
        """Rounds of all meters in turn. Each row gets the median of the rank whose median is largest."""
        if not entrants:
            return
        timed = [meter for entrant in entrants for meter in entrant.meters()]
        rounds = self.rounds(timed)
        self.balanced[entrants[0].row.label] = rounds % meters.balanced_rounds(len(timed)) == 0
        samples: list[list[float]] = [[] for _ in timed]
        for number in range(rounds):
            # Neighbours alternate, since the previous meter affects clocks and caches. Equal on all ranks.
            self.round([timed[place] for place in meters.in_turn(len(timed), number)])
            for meter, taken in zip(timed, samples, strict=True):
                taken += meter.samples()
        spreads = {id(meter): meters.spread(taken) for meter, taken in zip(timed, samples, strict=True)}
        for entrant in entrants:
            self.fill_in(entrant, spreads)

    def fill_in(self, entrant: Entrant, spreads: dict[int, meters.Spread]) -> None:
        """Fill in the entrant's times, of ``spreads`` by the ids of this rank's meters."""
        all_ranks = self.team.exchange([spreads[id(meter)] for meter in entrant.meters()])
        single, *more = [max(ranks, key=lambda s: s.median) for ranks in zip(*all_ranks, strict=True)]
        chain = more.pop(0).median if entrant.chain is not None else None
        eager = more.pop(0).median if entrant.eager is not None else None
        in_a_row = more.pop(0).median if entrant.row_of_calls is not None else None
        host = None
        if entrant.row_of_calls is not None:
            host = max(self.team.exchange(entrant.row_of_calls.host_us()))
        if entrant.row.mode == "eager":
            eager = single.median
        entrant.row = replace(
            entrant.row, median_us=single.median, p10_us=single.p10, p90_us=single.p90, samples=single.samples,
            chain_us=chain, eager_us=eager, eager_row_us=in_a_row, host_us=host,
        )  # fmt: skip

    def rounds(self, timed: Sequence[Meter]) -> int:
        """Number of rounds, by the time of one; one on simulated ranks, whose times mean nothing."""
        if self.team.is_simulated:
            return 1
        begin = time.perf_counter()
        self.round(timed)
        seconds = max(self.team.exchange(time.perf_counter() - begin))
        return meters.rounds_for(seconds, self.options.quick, len(timed))

    def round(self, timed: Sequence[Meter]) -> None:
        for meter in timed:
            meter.replay()
        finish(self.team, "a round of all providers")

    def row(self, shape: Shape, provider: Provider) -> Row:
        return Row(
            shape=shape.size, label=shape.label, provider=provider.name, role=provider.role, reason="not measured"
        )

    def without(self, shapes: Sequence[Shape], reason: str) -> list[Row]:
        return [replace(self.row(shape, p), reason=reason) for shape in shapes for p in self.providers]
