"""Search on each rank: rounds of the same candidates on all ranks, until they agree on the winner.

A candidate passes these steps. After each step all ranks exchange results; a candidate that failed on any rank is dropped on
all:

    compile   on every rank, with nothing launched (compiling.py)
    run       one call; an answer within the tolerance of fp32 on every rank
    capture   in a CUDA graph, with the same answer
    time      alternating with the round's other candidates; the maximum over the ranks of the median
    confirm   the fastest ones once more, together with the default alone: of many, a lucky one reads fastest

Nothing hangs: every wait of the host is bounded. If a kernel does not end, or a rank is lost, the search ends, and the results
of earlier shapes are already in the file.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench.harness import machine
from weft.bench.harness.bench import Bench, Options, free
from weft.bench.harness.runner import started
from weft.bench.harness.workload import Failed, Shape, together
from weft.bench.ops.shapes import op_of
from weft.bench.ops.workload import OpWorkload
from weft.errors import WeftError
from weft.plan import table as tuned
from weft.runtime.codec import exchangeable
from weft.runtime.files import put
from weft.tune import spaces, timing

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Rounds after the first, each around the best of the previous one; if quick, only if neighbours compile fast.
MOVES, QUICK_MOVES = 3, 1
# Candidates between two looks at the clock, where the search has a budget: they are compiled together.
AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TunePlan:
    """Plan of one op at one world size.

    out       file that rank 0 writes after every shape; None: no file
    variants  fields of the calls (Op.variants), which have rows of their own
    """

    op: str
    shapes: tuple[Shape, ...]
    dtype: str = "bf16"
    quick: bool = False
    out: Path | None = None
    variants: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name on the command line."""
        return "+".join([self.op, *self.variants])

    @property
    def row_op(self) -> str:
        """Name in rows of the table."""
        return "+".join([op_of(self.op).name, *self.variants])


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one shape: its row, or the reason why there is none.

    ``dropped``: (candidate, reason). ``times``: µs of all that ran.
    """

    label: str
    row: tuned.Row | None
    winner: str = ""
    default: str = ""
    tried: int = 0
    dropped: tuple[tuple[str, str], ...] = ()
    reason: str = ""
    times: Mapping[Any, float] = field(default_factory=dict)


class Broken(WeftError):
    """Error: the GPU or its driver failed under a candidate, and nothing more can run in these processes."""

    def __init__(self, rank: int, what: str, reason: str) -> None:
        super().__init__(
            f"rank {rank}: the GPU failed while {what} was tuned ({reason}), so nothing after it was tuned"
        )
        self.rank, self.what, self.reason = rank, what, reason


def search(
    team: Team, plans: Sequence[TunePlan], say: Callable[[str], None], tried: Path | None = None
) -> list[list[Outcome]]:
    """Tune every shape of every plan. All ranks return the same outcomes, by plan.

    say    called by rank 0 with a line for each shape
    tried  file to which rank 0 writes the times of all candidates, after every shape

    Any WeftError ends the search: a kernel that does not end (Stuck), ranks out of step (OutOfStep, PeerFailed).
    """
    empty_us = started(team)
    of_plans: list[list[Outcome]] = []
    for plan in plans:
        of_plans.append([])
        for outcomes in search_one(team, plan, empty_us, say):
            of_plans[-1] = outcomes
            if tried is not None and team.rank == 0:
                write_tried(tried, team, list(zip(plans, of_plans, strict=False)))
    return of_plans


def search_one(
    team: Team, plan: TunePlan, empty_us: float | None, say: Callable[[str], None]
) -> Iterator[list[Outcome]]:
    """Outcomes so far, after every shape; the last ones are `reconciled`."""
    workload = OpWorkload(name=plan.op, shapes=plan.shapes, dtype=plan.dtype, words=("weft",))
    bench, versions = Bench(team, workload, Options(quick=plan.quick), empty_us), machine.versions()
    outcomes: list[Outcome] = []
    for number, shape in enumerate(plan.shapes):
        begin = time.perf_counter()
        try:
            outcome = tune_shape(bench, shape, plan, versions)
        except WeftError:
            raise
        except RuntimeError as error:  # a CUDA error: pending work is lost, differently on each rank
            raise Broken(team.rank, shape.label, " ".join(str(error).split())[:200]) from error
        outcomes.append(outcome)
        if team.rank == 0:
            if plan.out is not None and outcome.row is not None:
                save(plan.out, team, outcome.row)
            seconds = time.perf_counter() - begin
            say(f"{plan.name} {told(outcome)}: {number + 1} of {len(plan.shapes)}, {seconds:.1f} s")
        yield outcomes
    outcomes = reconciled(outcomes)
    if team.rank == 0 and plan.out is not None:
        for outcome in outcomes:
            if outcome.row is not None:
                save(plan.out, team, outcome.row)
    yield outcomes


def reconciled(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes whose rows of one M and N agree (tuned.agreed_of), for ranks with other K.

    The common values are the ones with the least total time.
    """
    groups: dict[tuple[int, ...], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.row is not None and op_of(outcome.row.op.partition("+")[0]).ranks_differ_in_k:
            groups.setdefault(tuned.bucket(outcome.row.shape)[:2], []).append(outcome)
    chosen: dict[str, Outcome] = {}
    for group in groups.values():
        best: list[dict[tuple, Any]] = []
        for outcome in group:
            ordered = sorted(outcome.times, key=lambda design: outcome.times[design], reverse=True)
            best.append({tuned.agreed_of(with_design(outcome.row, design)): design for design in ordered})
        common = set.intersection(*(set(settings) for settings in best))

        def cost(setting: tuple, group: list[Outcome] = group, best: list[dict[tuple, Any]] = best) -> float:
            return sum(o.times[settings[setting]] / o.row.us for o, settings in zip(group, best, strict=True))

        if len(group) > 1 and common:
            setting = min(sorted(common, key=str), key=cost)
            for outcome, settings in zip(group, best, strict=True):
                design = settings[setting]
                row = replace(with_design(outcome.row, design), us=round(outcome.times[design], 2))
                winner = spaces.label(op_of(row.op), design)
                chosen[outcome.label] = replace(outcome, row=row, winner=winner)
    return [chosen.get(outcome.label, outcome) for outcome in outcomes]


def with_design(row: tuned.Row, design: object) -> tuned.Row:
    """``row`` for another design of its op."""
    op = op_of(row.op.partition("+")[0])
    return replace(row, design=op.name_of(design), config=op.config_of(design))


def tune_shape(
    bench: Bench, shape: Shape, plan: TunePlan, versions: str, go_on: Callable[[], bool] | None = None
) -> Outcome:
    """Search one shape in rounds of candidates. Collective.

    go_on  asked before every AT_ONCE candidates but the first; False ends the search with the best so far. Collective
    """
    team, op, quick = bench.team, op_of(plan.op), plan.quick or bench.team.is_simulated
    fields = dict.fromkeys(plan.variants, True)
    try:
        problem = together(team, lambda: bench.workload.problem(shape, team, **fields))
    except Failed as error:
        return Outcome(label=shape.label, row=None, reason=str(error))
    _, key, _ = op.table_key(*spaces.call_of(problem))
    default = spaces.default(problem)
    candidates: list[Any] = team.exchange(spaces.first(problem, quick))[0]
    seen: set[Any] = set()
    dropped: list[tuple[str, str]] = []
    best, us, default_us = default, None, None
    known: dict[Any, float] = {}
    moves = QUICK_MOVES if quick else MOVES
    for _ in range(1 + moves):
        fresh = [design for design in candidates if design not in seen]
        before, any_ran, ended = best, False, False
        for part in parted(fresh, AT_ONCE if go_on is not None else len(fresh)):
            if ended := go_on is not None and us is not None and not go_on():
                break
            seen.update(part)
            # Together with the designs that it must beat, at the same clocks.
            times, failed = timing.timed(bench, problem, list(dict.fromkeys([default, best, *part])), default_us)
            dropped += [(name, why) for name, why in failed if (name, why) not in dropped]
            if times:
                any_ran, (best, us) = True, agreed(team, times, default)
                known |= times
                default_us = times.get(default, default_us)
        if ended or not any_ran or (best == before and best != default):
            break
        candidates = team.exchange(spaces.around(problem, best, quick))[0]
    dtype = tuned.name_of(problem.dtype)
    problem.forget()
    del problem
    free(team)
    common = {"label": shape.label, "tried": len(seen), "dropped": tuple(dropped), "default": spaces.label(op, default)}
    if us is None:
        return Outcome(row=None, reason=f"no candidate ran: {dropped[0][1] if dropped else 'there is none'}", **common)
    name = op.name_of(best)
    row = tuned.Row(
        op=plan.row_op, dtype=dtype, shape=tuned.row_shape(name, key), design=name, config=op.config_of(best),
        us=round(us, 2), default_us=None if default_us is None else round(default_us, 2),
        candidates=len(seen) - len(dropped), date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        versions=versions,
    )  # fmt: skip
    return Outcome(row=row, winner=spaces.label(op, best), times=known, **common)


def parted(designs: Sequence[Any], most: int) -> list[Sequence[Any]]:
    """``designs`` in parts of at most ``most``."""
    return [designs[at : at + most] for at in range(0, len(designs), most)] if designs else []


def agreed(team: Team, times: dict[Any, float], default: object) -> tuple[Any, float]:
    """Fastest candidate with its time, as rank 0 sees it; the default if it loses less than LEAST_GAIN."""
    best = min(times, key=lambda config: times[config])
    if default in times and times[best] > times[default] * (1 - tuned.LEAST_GAIN):
        best = default
    return team.exchange((best, times[best]))[0]


def save(path: Path, team: Team, row: tuned.Row) -> None:
    """Write ``row`` to the file, replacing one of the same bucket."""
    size = world_of(row.op.partition("+")[0], team.size)
    table = tuned.Table(
        gpu="simulated" if team.is_simulated else team.caps.device_name, world_size=size, simulated=team.is_simulated
    )
    if path.is_file():
        table = tuned.read(path)
    tuned.write(path, table.with_rows([row]))


def write_tried(path: Path, team: Team, tried: Sequence[tuple[TunePlan, Sequence[Outcome]]]) -> None:
    """Write all candidates at each shape by label: the compared times, and reasons of dropped ones."""
    shapes = [
        {
            "op": plan.name, "shape": shape.size, "label": shape.label, "dtype": plan.dtype, "chosen": outcome.winner,
            "default": outcome.default,
            "us": {spaces.label(op_of(plan.op), design): round(us, 2) for design, us in outcome.times.items()},
            "dropped": dict(outcome.dropped),
        }
        for plan, outcomes in tried
        for shape, outcome in zip(plan.shapes, outcomes, strict=False)
    ]  # fmt: skip
    head = {
        "gpu": team.caps.device_name,
        "world_size": team.size,
        "simulated": team.is_simulated,
        "versions": machine.versions(),
    }
    put(path, json.dumps(head | {"shapes": shapes}, indent=1, ensure_ascii=False) + "\n")


def world_of(op: str, world_size: int) -> int:
    """World size under which a row is kept: 1 for an op that knows of no other ranks."""
    return world_size if op_of(op).collective else 1


def told(outcome: Outcome) -> str:
    if outcome.row is None:
        return f"{outcome.label}: {outcome.reason}"
    lost = f", {len(outcome.dropped)} dropped" if outcome.dropped else ""
    return f"{outcome.label}: {outcome.winner}, {outcome.row.us:.4g} µs, {outcome.tried} tried{lost}"
