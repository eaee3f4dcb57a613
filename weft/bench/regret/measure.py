"""Designs of a call, timed in turns on each rank, and the regret of the plan's choice.

The best design is the fastest one of the even rounds. Its time and the plan's are taken in the odd rounds, since of many
equal designs one always reads fastest.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any

from weft.bench.harness import meters
from weft.bench.harness.bench import Bench, Entrant, Options, free
from weft.bench.harness.compiling import compile_shares
from weft.bench.harness.provider import Provider
from weft.bench.harness.runner import started
from weft.bench.harness.workload import DTYPES, Failed, Shape, together
from weft.bench.ops.labels import label
from weft.bench.ops.providers import prepared
from weft.bench.ops.workload import OpWorkload
from weft.errors import WeftError
from weft.plan.planned import AUTO, Machine, machine_of
from weft.runtime.codec import exchangeable

if TYPE_CHECKING:
    from weft.bench.ops.problem import OpProblem
    from weft.ops.case import Case
    from weft.ops.op import Op
    from weft.runtime.team.team import Team

# Fewest rounds of each half; fewest of LONG ones, in seconds, and most of them, within few seconds.
ROUNDS = 4
FEW_ROUNDS, LONG, MOST_ROUNDS = 2, 0.04, 12
Times = Mapping[str, tuple[float, float]]


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One shape.

    auto, best  labels of the plan's design and of the fastest one; auto_us, best_us: their times in the odd rounds
    reason      of the plan, or why there is no time
    us          (even rounds, odd rounds) by label; dropped: reasons by label
    """

    op: str
    shape: tuple[int, ...]
    label: str
    world_size: int
    dtype: str
    auto: str
    reason: str
    best: str = ""
    auto_us: float | None = None
    best_us: float | None = None
    us: Times = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)

    @property
    def regret(self) -> float | None:
        """Time by the plan over that of the best design; None without times."""
        return None if self.auto_us is None or self.best_us is None else self.auto_us / self.best_us

    @property
    def key(self) -> tuple[str, int, str, tuple[int, ...]]:
        return self.op, self.world_size, self.dtype, self.shape


def candidates(op: Op, case: Case, here: Machine, search: int) -> tuple[dict[Any, str], str, dict[str, str]]:
    """({design: label}, reason of the plan, {name of a design that does not fit: why}).

    The plan's design comes first, then each design that a caller can ask for, then up to ``search`` of the op's space.
    """
    call = op.call_of_case(case, here)
    auto = op.plan(call, here)
    every, refused = {auto.design: label(op, auto.design)}, {}
    variants = [name for name, given in case.fields if given is True]
    for name in op.algorithms:
        if name == AUTO or not op.offers(name, variants):
            continue
        try:
            design = op.plan(op.call_of_case(replace(case, design=name), here), here).design
        except ValueError as error:
            refused[name] = " ".join(str(error).split())
            continue
        every.setdefault(design, label(op, design))
    more = (design for design in op.space(call, here, quick=True) if design not in every)
    every.update((design, label(op, design)) for design in islice(dict.fromkeys(more), search))
    return _apart(every), auto.reason, refused


def _apart(designs: Mapping[Any, str]) -> dict[Any, str]:
    """Designs with labels of which no two are equal: plans within a design are not part of a label."""
    seen: Counter[str] = Counter()
    made = {}
    for design, name in designs.items():
        seen[name] += 1
        made[design] = name if seen[name] == 1 else f"{name} #{seen[name]}"
    return made


def best_of(times: Times, auto: str) -> tuple[str, float, float]:
    """(label of the fastest design of the even rounds, the plan's time in the odd ones, that design's)."""
    best = min(times, key=lambda name: (times[name][0], name != auto))
    return best, times[auto][1], times[best][1]


def run(
    team: Team, workloads: Sequence[OpWorkload], options: Options, search: int, seconds: float | None,
    save: Callable[[Row], None], say: Callable[[str], None],
) -> list[Row]:  # fmt: skip
    """Rows of all shapes, of the ops in turns. Collective.

    seconds  after which no further shape is begun
    save     called by rank 0 with each row; a shape whose kernels do not end gets a row before the error is raised
    """
    empty_us, rows, begin = started(team), [], time.perf_counter()
    benches = [Bench(team, workload, options, empty_us) for workload in workloads]
    turns = [[(bench, shape) for shape in bench.workload.shapes] for bench in benches]
    every = [one for turn in zip_longest(*turns) for one in turn if one is not None]
    for number, (bench, shape) in enumerate(every):
        if seconds is not None and team.exchange(time.perf_counter() - begin)[0] > seconds:
            return rows
        row = blank(bench.workload, shape, team.size)
        try:
            row = measured(bench, shape, search, row)
        except WeftError as error:
            if team.rank == 0:
                save(replace(row, reason=f"not measured: {error}"))
            raise
        rows.append(row)
        if team.rank == 0:
            save(row)
            took = time.perf_counter() - begin
            say(f"{bench.workload.name} W={team.size} {told(row)}: {number + 1} of {len(every)}, {took:.0f} s")
    return rows


def blank(workload: OpWorkload, shape: Shape, world_size: int) -> Row:
    """Row of a shape before it is measured."""
    return Row(
        op=workload.name, shape=shape.size, label=shape.label, world_size=world_size, dtype=workload.dtype, auto="",
        reason="",
    )  # fmt: skip


def planned(
    workload: OpWorkload, here: Machine, search: int
) -> Iterator[tuple[Shape, dict[Any, str], str, dict[str, str]]]:
    """Each shape with its ``candidates``, for a machine without GPUs too."""
    op = workload.op
    for shape in workload.shapes:
        case = op.case_of(shape.size, DTYPES[workload.dtype], here.world_size, **workload.fields)
        yield shape, *candidates(op, case, here, search)


def measured(bench: Bench, shape: Shape, search: int, row: Row) -> Row:
    """``row`` with the times of all designs."""
    row, entrants = entered(bench, shape, search, row)
    if row.auto in entrants:
        row = with_times(row, halves(bench, entrants))
    leave(bench.team, entrants)
    return row


def entered(bench: Bench, shape: Shape, search: int, row: Row) -> tuple[Row, dict[str, Entrant]]:
    """``row`` with the plan and dropped designs, and the checked designs by label. Collective."""
    team, workload = bench.team, bench.workload
    try:
        problem: OpProblem = together(team, lambda: workload.problem(shape, team))
        problem.expect()
        op, case = problem.op, problem.case
        designs, reason, refused = together(team, lambda: candidates(op, case, machine_of(team), search))
    except Failed as error:
        return replace(row, reason=str(error)), {}
    compile_shares([partial(run_once, problem, design) for design in designs], team)
    entrants, dropped = {}, dict(refused)
    for design, name in designs.items():
        entrant = entrant_of(bench, problem, design, name)
        if entrant.single is None:
            dropped[name] = entrant.row.reason
        else:
            entrants[name] = entrant
    problem.forget()
    return replace(row, auto=next(iter(designs.values())), reason=reason, dropped=dropped), entrants


def with_times(row: Row, times: Times) -> Row:
    """``row`` with these times of its designs."""
    best, auto_us, best_us = best_of(times, row.auto)
    return replace(row, best=best, auto_us=auto_us, best_us=best_us, us=times)


def leave(team: Team, entrants: dict[str, Entrant]) -> None:
    """Free all memory of the designs of a shape."""
    for entrant in entrants.values():
        entrant.leave()
    entrants.clear()
    free(team)


def without_slow(bench: Bench, row: Row, entrants: dict[str, Entrant], times: float) -> Row:
    """Drop designs that take this many times the fastest one's time in one round. Collective.

    They leave ``entrants``; the result is ``row`` with their reasons.
    """
    bench.round([entrant.single for entrant in entrants.values()])
    here = {name: meters.spread(entrant.single.samples()).median for name, entrant in entrants.items()}
    of_ranks = bench.team.exchange(here)
    us = {name: max(one[name] for one in of_ranks) for name in here}
    least, dropped = min(us.values()), dict(row.dropped)
    for name in [name for name in us if name != row.auto and us[name] > times * least]:
        dropped[name] = (
            f"{us[name]:.4g} µs in the first round, more than {times:g} times the fastest design's {least:.4g}"
        )
        entrants.pop(name).leave()
    return replace(row, dropped=dropped)


def run_once(problem: OpProblem, design: Any) -> None:
    """Run the op by ``design`` on the first set of inputs."""
    prepared(problem, design).run(0)


def entrant_of(bench: Bench, problem: OpProblem, design: Any, name: str) -> Entrant:
    """Entrant of a checked design, with its meters; no ``single`` if it was dropped. Collective."""
    provider = Provider(name=name, ops=(problem.op.alias,), role="weft", make=lambda problem: prepared(problem, design))
    return bench.enter_one_design(problem, provider, rows=not problem.computes)


def halves(
    bench: Bench, entrants: Mapping[str, Entrant], seconds: float | None = None
) -> dict[str, tuple[float, float]]:
    """µs of each entrant in the even and in the odd rounds: the maximum over the ranks of the median.

    Where calls were timed in a row too, the geometric mean of a call alone and one in a row, as in ``weft tune``.

    seconds  of all rounds, about; None: as of ``weft bench``
    """
    timed = [meter for entrant in entrants.values() for meter in entrant.meters()]
    rounds = 2 if bench.team.is_simulated else 2 * _half(bench, timed, seconds)
    samples: list[tuple[list[float], list[float]]] = [([], []) for _ in timed]
    for number in range(rounds):
        # Both halves see the same neighbours.
        bench.round([timed[place] for place in meters.in_turn(len(timed), number // 2)])
        for meter, taken in zip(timed, samples, strict=True):
            taken[number % 2].extend(meter.samples())
    medians = [tuple(meters.spread(half).median for half in taken) for taken in samples]
    slowest = [tuple(map(max, zip(*ranks, strict=True))) for ranks in zip(*bench.team.exchange(medians), strict=True)]
    by_meter = dict(zip(map(id, timed), slowest, strict=True))
    in_a_row = all(entrant.chain is not None for entrant in entrants.values())
    return {name: _deciding(entrant, by_meter, in_a_row) for name, entrant in entrants.items()}


def _half(bench: Bench, timed: Sequence[meters.Meter], seconds: float | None) -> int:
    """Number of rounds of each half.

    Of LONG rounds in few ``seconds`` FEW_ROUNDS are enough: their times differ little.
    """
    if seconds is None:
        return max(ROUNDS, math.ceil(bench.rounds(timed) / 2))
    begin = time.perf_counter()
    bench.round(timed)
    one = max(bench.team.exchange(time.perf_counter() - begin))
    return max(FEW_ROUNDS if one > LONG else ROUNDS, min(MOST_ROUNDS, math.ceil(seconds / one / 2)))


def _deciding(entrant: Entrant, by_meter: Mapping[int, tuple], in_a_row: bool) -> tuple[float, float]:
    single = by_meter[id(entrant.single)]
    if not in_a_row:
        return single
    return tuple(math.sqrt(one * two) for one, two in zip(single, by_meter[id(entrant.chain)], strict=True))


def told(row: Row) -> str:
    """One line on a row."""
    if row.regret is None:
        return f"{row.label}: {row.reason}"
    same = row.best == row.auto
    best = "the best" if same else f"{row.best} {row.best_us:.4g}"
    return f"{row.label}: {row.auto} {row.auto_us:.4g} µs, {best}: {row.regret:.3f}"
