"""Run of a main under one schedule, with the detector, and its outcome."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import triton

from weft.check.detector.findings import Arrivals, Finding, Place, Side, allowed_by, in_words_of_torch
from weft.check.detector.host_lines import host_line_of
from weft.check.digests import Digest, digest_of
from weft.check.folding import Seen, causes_of
from weft.check.report import Schedule
from weft.check.strategies import make
from weft.check.torch_programs.program import TorchProgram
from weft.errors import ArgumentMismatch, CallMismatch, Deadlock, InvalidAccess, Misaligned, WeftError, WrongMain
from weft.runtime.simulate import simulate
from weft.simulator.machine.strategy import Strategy

if TYPE_CHECKING:
    from weft.check.detector.detector import Detector
    from weft.simulator.front_end import Refusal, Source
    from weft.simulator.machine.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of one run.

    digest     of the ranks' ``results``; None if the run ended early
    arrivals   lines whose values depend on the order of arrival, with these values
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
    arrivals: Arrivals = field(default_factory=dict)

    @property
    def needs_more_sms(self) -> bool:
        """True if the run failed for lack of SMs, or by an error that this lack may have caused."""
        kinds = ("residency", "error")
        return any(f.kind in kinds and not f.message.startswith("AssertionError") for f, _ in self.findings)

    @property
    def causes(self) -> list[Finding]:
        """Findings that follow from no other finding of this run."""
        seen = [Seen(finding=finding, runs=frozenset((0,))) for finding, _ in self.findings]
        return [one.finding for i, (one, cause) in enumerate(zip(seen, causes_of(seen), strict=True)) if i == cause]


class Runner:
    """Runner of a main under one schedule at a time."""

    def __init__(self, main: Callable[..., Any], heap_bytes: int | None, args: tuple, compile: bool = True) -> None:
        self._main, self._heap_bytes, self._args, self._compile = main, heap_bytes, args, compile
        self._compiled: dict[Source, Refusal | None] = {}

    def run(self, schedule: Schedule, strategy: Callable[[Machine], Strategy] | None = None) -> Outcome:
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

    def _run(self, schedule: Schedule, strategy: Callable[[Machine], Strategy] | None = None) -> Outcome:
        kept: list[tuple[Machine, Detector]] = []
        digest = results = error = None
        try:
            results = simulate(
                self._main, schedule.world_size, seed=schedule.seed, sms=schedule.sms, like=schedule.like,
                heap_bytes=self._heap_bytes, node_size=schedule.node_size, link=schedule.link, args=self._args,
                prepare=lambda machine: kept.append((machine, self._prepared(machine, schedule, strategy))),
            )  # fmt: skip
            digest = digest_of(results)
        except (Exception, SystemExit) as caught:  # a main that exits early has proved nothing
            error = caught
        if not kept or isinstance(error, WrongMain):
            raise error  # the run did not begin
        machine, detector = kept[0]
        return Outcome(
            findings=tuple(_findings(machine, detector, error)), digest=digest, results=results,
            programs=machine.most_at_once, is_sized=machine.is_sized, unstarted=detector.unstarted,
            arrivals=detector.arrivals.by_line(),
        )  # fmt: skip

    def _prepared(
        self, machine: Machine, schedule: Schedule, strategy: Callable[[Machine], Strategy] | None
    ) -> Detector:
        """Detector of a machine, which is set up for the schedule."""
        # Only here: where the simulator's packages are missing, ``simulate`` says so.
        from weft.check.detector.detector import Detector
        from weft.simulator.front_end import FrontEnd
        from weft.simulator.machine.store_buffers import StoreBuffers

        machine.observer = detector = Detector(machine)
        machine.front_end = FrontEnd(self._compiled) if self._compile else None
        if isinstance(self._main, TorchProgram):
            self._main.prepare(machine)
        scheduler = machine.scheduler
        scheduler.strategy = strategy(machine) if strategy is not None else make(schedule)
        if schedule.strategy in ("delay", "exhaustive"):
            line, tasks = machine.interpreter.kernel_line, schedule.strategy == "exhaustive"
            machine.stores = StoreBuffers(scheduler, machine.memory, line, schedule.seed, tasks)
        scheduler.when_stuck = lambda: machine.stores.time_passes() or machine.return_launches()
        return detector


def _findings(machine: Machine, detector: Detector, error: BaseException | None) -> list[tuple[Finding, int]]:
    """Findings of a run that has ended, with ``error`` if it failed, and how often each occurred."""
    if error is None:
        detector.signals.finish()
    elif not isinstance(error, Deadlock):
        detector.signals.failed()
    races = detector.races
    findings = [(finding, races.counts[cause]) for cause, finding in races.findings.items()]
    differing_call = isinstance(error, (CallMismatch, ArgumentMismatch))
    is_told = isinstance(error, Deadlock) or (
        differing_call and any(finding.kind == "call-mismatch" for finding, _ in findings)
    )
    if error is not None and not is_told:
        findings.append((_of_error(error, machine, detector), 1))
    if machine.front_end is not None:
        findings += [(_of_refusal(refusal), 1) for refusal in machine.front_end.refusals()]
    named = [(detector.arguments.named(finding), count) for finding, count in findings]
    return [(in_words_of_torch(finding), count) for finding, count in named] if machine.has_tables else named


def _of_refusal(refusal: Refusal) -> Finding:
    """Finding for a kernel that Triton does not compile."""
    place = Place(file=refusal.file, line=refusal.line, function=refusal.function, text=refusal.text)
    sides = (Side(rank=0, task=f"Triton {triton.__version__}", verb="refused", place=place, sync=""),)
    message = f"Triton does not compile kernel {refusal.kernel}: {refusal.message}"
    return Finding(kind="compile-error", message=message, sides=sides, allowed=allowed_by("compile-error", sides))


_DETAIL, _LINE = 12, 160  # most further lines kept of an error's message, and characters of each
_OF_VALUES = (
    "no other finding explains it, so values are wrong and not their order: look at indices, counts, the reference"
)
_OF_ASSUMPTIONS = (
    "weaken the assumption until it holds in every program: the compiler may use it for any code of the kernel"
)
_PLACE = re.compile(r"(?:in no tensor; nearest: )?(.*?)(?:\[(-?\d+)\])? of rank (\d+)")


def _of_error(error: BaseException, machine: Machine, detector: Detector) -> Finding:
    """Finding for an exception."""
    if isinstance(error, InvalidAccess):
        finding = _of_access(error, detector)
    else:
        finding = Finding(kind="error", message=_text(error))
        if machine.scheduler.failed is not None:
            finding = _of_task(error, machine, detector)
    if isinstance(error, WeftError) and "programs that wait for each other" in str(error):
        finding = replace(finding, kind="residency")
    advice = _OF_VALUES if isinstance(error, AssertionError) else ""
    advice = _OF_ASSUMPTIONS if "tl.assume() of a condition" in finding.message else advice
    first, *rest = [line for line in finding.message.splitlines() if line.strip()] or [finding.kind]
    return replace(
        finding, message=first, detail=tuple(_cut(line) for line in rest[:_DETAIL]),
        allowed=allowed_by(finding.kind, finding.sides), advice=advice,
    )  # fmt: skip


def _of_access(error: InvalidAccess, detector: Detector) -> Finding:
    kind = "misaligned" if "misaligned" in error.verb else "out-of-bounds"
    if kind == "out-of-bounds" and "freed" in error.nearest:
        kind = "use-after-free"
    tensor, index, rank, message = "", 0, 0, _text(error)
    place = _PLACE.match(error.nearest)
    if place is not None:
        tensor, index, rank = place[1], int(place[2] or 0), int(place[3])
    named = detector.named.get(error.who)
    sides = () if named is None else (detector.races.side(replace(named, verb=error.verb)),)
    if named is not None and kind == "out-of-bounds":
        of_tile = detector.tiles.left_rows(named.thread, tensor, rank)
        kind, message = ("tile-read", of_tile) if of_tile else (kind, message)
    return Finding(kind=kind, message=message, tensor=tensor, rank=rank, first=index, last=index, sides=sides)


def _of_task(error: BaseException, machine: Machine, detector: Detector) -> Finding:
    """Finding for the exception of a task, the first that failed."""
    kind = "error"
    if isinstance(error, (CallMismatch, ArgumentMismatch)):
        kind = "call-mismatch"
    elif isinstance(error, Misaligned):
        kind = "misaligned"
    failed, code = machine.scheduler.failed, machine.interpreter.frames.line_of(error) or host_line_of(error)
    verb, place = type(error).__name__, detector.races.place(code)
    return Finding(
        kind=kind, message=_text(error), sides=(Side(rank=failed.rank, task=failed.label, verb=verb, place=place, sync=""),)
    )  # fmt: skip


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"


def _cut(line: str) -> str:
    return line if len(line) <= _LINE else f"{line[:_LINE]} ..."
