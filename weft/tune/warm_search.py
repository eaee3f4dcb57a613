"""Search of the calls that a model makes, in an engine's warm-up: collective, within seconds, kept.

``passes`` run the model once at each size of its steps; the plans that they ask for name the calls. Calls that neither the file
nor a table of this GPU knows are searched as by ``weft tune --quick``, the largest call of each pass first, then the second of
each pass, until the budget is spent. All ranks search the same calls in the same order: rank 0 reads the file, looks at the
clock and decides; times are the maximum over the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import weft
from weft.bench.harness import machine as sources
from weft.bench.harness.bench import Bench, Options
from weft.bench.harness.runner import started
from weft.bench.harness.workload import DTYPES, Shape
from weft.bench.ops.workload import OpWorkload
from weft.ops.moe.moe_op import MoeShape
from weft.ops.op import Op, find_op
from weft.plan import searched, table
from weft.plan.asked import Asked, recorded
from weft.plan.planned import AUTO
from weft.plan.searched import Entry
from weft.runtime.arithmetic import cdiv
from weft.runtime.codec import exchangeable
from weft.runtime.logs import logger_of
from weft.tune.search import Outcome, TunePlan, reconciled, tune_shape, world_of

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities
    from weft.runtime.team.team import Team

logger = logger_of(__name__)
# Largest inputs of a call that is searched: decode attention reads the whole cache.
MOST_BYTES = 2 << 30


class Pass(NamedTuple):
    """Forward pass of ``tokens`` tokens, which ``run()`` computes on padding."""

    name: str
    tokens: int
    run: Callable[[], Any]


class Mixture(NamedTuple):
    """Sizes of a mixture of experts as ``MoeShape`` has them."""

    k: int
    experts: int
    held: int
    hidden: int
    features: int


class Wanted(NamedTuple):
    """Call to search.

    op     name with variants
    size   as ``weft bench`` has it
    shape, world_size  as rows of tables have them
    """

    op: str
    dtype: str
    size: tuple[int, ...]
    shape: tuple[int, ...]
    world_size: int

    @property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        return self[:3]

    @property
    def name(self) -> str:
        return self.op.partition("+")[0]

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(self.op.split("+")[1:])

    @property
    def nbytes(self) -> int:
        """Bytes that the call reads and writes, or moves between ranks."""
        op, dtype = find_op(self.name), getattr(torch, self.dtype)
        return max(op.memory_bytes(self.size, dtype), op.moved_bytes(self.size, dtype))

    def is_known(self, file: Path, caps: Capabilities) -> bool:
        """True if a row of this GPU's own table, or of an earlier search, is exact."""
        dtype, differ = getattr(torch, self.dtype), find_op(self.name).ranks_differ_in_k
        hit = table.find(self.op, self.shape, dtype, self.world_size, caps, differ)
        return hit is not None and hit.exact and hit.file in (file, table.file_for(caps.device_name, self.world_size))

    def __str__(self) -> str:
        return f"{self.op} {'x'.join(map(str, self.size))}"


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """Result of ``warm_search``, the same on all ranks.

    calls    that the passes make and that can be searched
    known    calls that the file or a table knew
    left     calls for which there was no time
    entries  of this search
    seconds  that the search took
    """

    calls: int
    known: int
    left: int
    entries: tuple[Entry, ...]
    seconds: float

    def __str__(self) -> str:
        later = f"; {self.left} are left to the next start" if self.left else ""
        return f"{self.calls} calls: {self.known} known, {len(self.entries)} searched in {self.seconds:.0f} s{later}"


def warm_search(
    team: Team,
    passes: Sequence[Pass],
    mixture: Mixture | None,
    *,
    seconds: float,
    folder: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = logger.info,
) -> Searched:
    """Search the calls of ``passes`` and let plans read the results. Collective.

    mixture  of the model; None: it is dense
    folder   of the cache; None: ~/.cache/weft
    say      called by rank 0 with a line for each call
    """
    place = team.exchange(searched.place_of(team, sources.tree(Path(weft.__file__).parent)[:12]))[0]
    file = searched.file_in(folder or searched.default_folder(), place)
    kept = team.exchange(searched.load(file, place, check_row) if team.rank == 0 else [])[0]
    use(team, kept, file)
    without = {entry.key for entry in kept if entry.row is None}
    calls = _wanted(team, passes, mixture)
    begin = clock()  # the passes compile what the first requests would

    def unknown(group: Sequence[Wanted]) -> bool:
        return not all(one.key in without or one.is_known(file, team.caps) for one in group)

    def go_on() -> bool:
        return team.exchange(clock() - begin < seconds)[0]

    groups = list(filter(unknown, _grouped(calls)))
    known, keeps = len(calls) - sum(map(len, groups)), team.rank == 0
    empty_us, versions = (started(team), sources.versions()) if groups else (None, "")
    entries: list[Entry] = []
    while groups and go_on():
        fresh = _search_group(team, groups[0], empty_us, versions, go_on)
        use(team, fresh, file)
        entries += fresh
        # An error for each call would say the same.
        keeps = keeps and searched.save(file, place, fresh, check_row)
        without |= {entry.key for entry in fresh if entry.row is None}
        groups = list(filter(unknown, groups[1:]))  # a row may stand for further calls
        if team.rank == 0:
            say(f"search: {', '.join(map(_told, fresh))}; {len(groups)} left, {clock() - begin:.1f} s")
    took, left = team.exchange(clock() - begin)[0], sum(map(len, groups))
    return Searched(calls=len(calls), known=known, left=left, entries=tuple(entries), seconds=took)


def check_row(row: table.Row) -> None:
    """ValueError unless the row's op makes a design of it."""
    find_op(row.op.partition("+")[0]).check_row(row)


def _search_group(
    team: Team, group: Sequence[Wanted], empty_us: float | None, versions: str, go_on: Callable[[], bool]
) -> list[Entry]:
    """Entries of calls; of several, with one M and N and several K, on which ranks must agree."""
    outcomes = [_search(team, one, empty_us, versions, go_on) for one in group]
    outcomes = reconciled(outcomes) if len(group) > 1 else outcomes
    return [
        Entry(op=one.op, dtype=one.dtype, size=one.size, row=outcome.row, reason=outcome.reason)
        for one, outcome in zip(group, outcomes, strict=True)
    ]


def _told(entry: Entry) -> str:
    call, row = f"{entry.op} {'x'.join(map(str, entry.size))}", entry.row
    return f"{call}: {entry.reason}" if row is None else f"{call}: {row.design}, {row.us:.4g} µs"


def use(team: Team, entries: Sequence[Entry], file: Path) -> None:
    """Let plans read the rows of ``entries``."""
    by_world: dict[int, list[table.Row]] = {}
    for entry in entries:
        if entry.row is not None:
            by_world.setdefault(world_of(entry.row.op.partition("+")[0], team.size), []).append(entry.row)
    for world, rows in by_world.items():
        table.use(rows, file, world, team.caps)


def _search(team: Team, one: Wanted, empty_us: float | None, versions: str, go_on: Callable[[], bool]) -> Outcome:
    shape = Shape(size=one.size, label=str(one))
    dtype = next(name for name, kind in DTYPES.items() if table.name_of(kind) == one.dtype)
    alias = find_op(one.name).alias
    plan = TunePlan(op=alias, shapes=(shape,), dtype=dtype, quick=True, variants=one.variants)
    workload = OpWorkload(name=alias, shapes=(shape,), dtype=dtype, words=("weft",))
    bench = Bench(team, workload, Options(quick=True), empty_us)
    return tune_shape(bench, shape, plan, versions, go_on)


def _wanted(team: Team, passes: Sequence[Pass], mixture: Mixture | None) -> list[Wanted]:
    """Calls of the passes that can be searched, in the order of the search. Collective."""
    of_passes: list[dict[Wanted, None]] = []
    for one in passes:
        with recorded() as calls:
            one.run()
        named = (_as_wanted(asked, one.tokens, mixture, team.size) for asked in calls)
        here = sorted(filter(None, named), key=lambda wanted: wanted.nbytes, reverse=True)
        # Ranks with other shares of K or N make other calls.
        of_ranks = team.exchange(list(map(tuple, dict.fromkeys(here))))
        of_passes.append(dict.fromkeys(Wanted(*call) for of_rank in of_ranks for call in of_rank))
    ordered = (call for calls in zip_longest(*of_passes) for call in calls if call is not None)
    return list(dict.fromkeys(ordered))


def _as_wanted(asked: Asked, tokens: int, mixture: Mixture | None, ranks: int) -> Wanted | None:
    """The call as a case of ``weft bench``; None if it has one design, is too large, or has no case."""
    name, call, here = asked
    op = find_op(name)
    # One rank's calls are the ones of their local ops, which are asked for too.
    left_out = op.collective and (here.nodes > 1 or here.world_size != ranks or ranks == 1)
    if type(op).space is Op.space or not op.form or call.design != AUTO or left_out:
        return None
    row_op, key, world = op.table_key(call, here)
    sizes = [key]
    if op.form == "moe":
        counts = (tokens, cdiv(tokens, here.world_size)) if mixture is not None else ()
        sizes = [tuple(MoeShape(count, *mixture)) for count in counts]
    for size in sizes:
        wanted = Wanted(row_op, table.name_of(call.dtype), size, key, world)
        try:
            case = op.case_of(size, call.dtype, here.world_size, **dict.fromkeys(wanted.variants, True))
            same = op.call_of_case(case, here)
            if op.table_key(same, here)[:2] != (row_op, key) or wanted.nbytes > MOST_BYTES:
                continue
            if set(op.space(same, here, True)) - {op.by_rule(same, here)}:
                return wanted
        except (ValueError, TypeError):  # a case with other fields than this call's
            continue
    return None


def _grouped(calls: Sequence[Wanted]) -> list[list[Wanted]]:
    """The calls, one by one; together where ranks with several K must take one row."""
    groups: dict[Any, list[Wanted]] = {}
    for one in calls:
        together = find_op(one.name).ranks_differ_in_k
        groups.setdefault((one.op, one.dtype, one.size[:2] if together else one.size), []).append(one)
    return list(groups.values())
