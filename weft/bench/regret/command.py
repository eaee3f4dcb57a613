"""``weft bench --regret``: its flags, the shapes of each op, the run on all ranks, the tables."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from weft.arguments import check_int
from weft.bench.names import MEASURED
from weft.console import TypedFlags, notices, option, progress, talks

if TYPE_CHECKING:
    from weft.bench.ops.workload import OpWorkload
    from weft.bench.regret.measure import Row
    from weft.plan.planned import Machine
    from weft.runtime.team.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class RegretFlags(TypedFlags):
    """Flags of ``weft bench --regret`` as typed."""

    regret: bool = option(
        False,
        "Time weft's choice and all designs, at shapes of published models that no row has, and print the choice's "
        "time over the best design's. With --json FILE it goes on where the file ends; with --check-only it lists "
        "plans",
    )
    seed: int = option(0, "Seed of the drawn shapes [with --regret]")
    listed: int = option(30, "Number of listed shapes of an op, at most 30 [with --regret]")
    drawn: int = option(30, "Number of drawn shapes of an op [with --regret]")
    search: int = option(4, "Number of designs of an op's search space besides the named ones [with --regret]")
    seconds: float | None = option(
        None, "Begin no further shape after these seconds [with --regret; default: no limit]"
    )

    def check(self, ops: Sequence[str]) -> None:
        """ValueError for numbers out of range, and for ops without designs to choose from."""
        check_int("--seed", self.seed, 0)
        check_int("--listed", self.listed, 0, 30)
        check_int("--drawn", self.drawn, 0, 1000)
        check_int("--search", self.search, 0, 100)
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"--seconds {self.seconds} is not positive; pass a time such as 120")
        if not self.regret:
            for flag, value in self.given().items():
                raise ValueError(f"{flag} {value} is of --regret; pass both")
            return
        from weft.bench.regret.published import planned_ops

        planned = list(planned_ops())
        for op in ops:
            if op.partition("+")[0] not in planned:
                known = ", ".join(one for one in planned if one in MEASURED)
                raise ValueError(f"op {op!r} has no designs to choose from; --regret takes {known}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Flags of ``weft bench`` that a run of regrets takes. file: of the rows."""

    file: Path | None = None
    algorithm_cache: Path | None = None
    quick: bool = False


def workloads(
    flags: RegretFlags, shapes_by_op: dict[str, tuple[str, ...]], dtype: str, here: Machine, every: bool = False
) -> tuple[OpWorkload, ...]:
    """Workload of each op, with the shapes that its word names, or the listed and drawn ones.

    every  of several ranks only collective ops, of one rank only all other ones
    """
    from weft.bench.ops.shapes import parse_shapes
    from weft.bench.ops.workload import OpWorkload
    from weft.bench.regret.published import drawn, listed

    made = []
    for op, words in shapes_by_op.items():
        workload = OpWorkload(name=op, shapes=(), dtype=dtype, words=("weft",))
        if every and workload.op.collective != (here.world_size > 1):
            continue
        if words:
            shapes = parse_shapes(op, words, here.world_size, dtype=dtype)
        else:
            first = listed(workload.op, here, dtype, workload.fields, flags.listed)
            more = drawn(workload.op, here, dtype, workload.fields, flags.seed, flags.drawn, first)
            shapes = (*first, *more)
        made.append(replace(workload, shapes=shapes))
    return tuple(made)


def machine_here(world_size: int, simulated: bool) -> Machine:
    """Machine whose plans are listed: this one's GPU, or an H200 where there is none."""
    from weft.plan.planned import machine
    from weft.runtime import capabilities

    caps = capabilities.simulated(world_size) if simulated else capabilities.probe(0, range(world_size))
    return machine(caps, world_size)


def listing(flags: RegretFlags, made: Sequence[OpWorkload], here: Machine) -> Iterator[str]:
    """Lines with each shape's plan, its reason, and all designs that would be timed."""
    from weft.bench.regret.measure import planned

    for workload in made:
        yield f"{workload.name} W={here.world_size} {workload.dtype}, {here.caps.device_name}: {len(workload.shapes)} shapes"
        for shape, designs, reason, refused in planned(workload, here, flags.search):
            auto, *more = designs.values()
            yield f"  {shape.label}: {auto} ({reason})"
            yield f"    against {'; '.join(more) or 'no other design'}"
            yield from (f"    without {name}: {why}" for name, why in refused.items())


def measure(
    flags: RegretFlags,
    runs: Sequence[tuple[int, tuple[OpWorkload, ...]]],
    simulated: bool,
    asked: Asked,
) -> None:
    """Time shapes that the file lacks, and print all rows. After a WeftError the file has the rows so far."""
    from weft.bench.regret.file import read, summary
    from weft.bench.regret.measure import told

    before = [] if asked.file is None else read(asked.file)
    console = Console(highlight=False)
    for size, made in runs:
        gpu = "simulated" if simulated else machine_here(size, simulated).caps.device_name
        known = {kept.row.key: kept.row for kept in before if kept.gpu == gpu}
        wanted = [(one.name, size, one.dtype, shape.size) for one in made for shape in one.shapes]
        left = [_without(known, one, size) for one in made]
        if talks() and (done := sum(key in known for key in wanted)):
            notices.info("weft: %d of %d shapes are in %s", done, len(wanted), asked.file)
        every = [row for key, row in known.items() if key in wanted] + _rows(left, size, simulated, flags, asked, gpu)
        lines = [f"{row.op} W={row.world_size} {told(row)}" for row in every]
        for line in (*lines, *summary(every)):
            console.print(line, soft_wrap=True)


def _without(known: Container[tuple], workload: OpWorkload, world_size: int) -> OpWorkload:
    """``workload`` without the shapes of ``known`` keys of rows."""
    key = workload.name, world_size, workload.dtype
    return replace(workload, shapes=tuple(shape for shape in workload.shapes if (*key, shape.size) not in known))


def _rows(
    left: Sequence[OpWorkload], size: int, simulated: bool, flags: RegretFlags, asked: Asked, gpu: str
) -> list[Row]:
    """Rows of the shapes that are left, measured on ``size`` ranks."""
    from weft.bench.harness.runner import heap_bytes
    from weft.runtime.launch import launch

    if not any(one.shapes for one in left):
        return []
    device, heap = ("sim", None) if simulated else ("cuda", heap_bytes(left))
    return launch(on_rank, size, device, args=(tuple(left), flags, asked, gpu), heap_bytes=heap)[0]


def on_rank(team: Team, made: tuple[OpWorkload, ...], flags: RegretFlags, asked: Asked, gpu: str) -> list[Row]:
    """Measure on one rank. Rank 0 writes the file after each shape."""
    from weft.bench.harness import machine
    from weft.bench.harness.bench import Options
    from weft.bench.regret.file import Kept, read, write
    from weft.bench.regret.measure import run
    from weft.ops import warm_up

    warm_up(team, algorithm_cache=asked.algorithm_cache)
    versions = machine.versions()

    def save(row: Row) -> None:
        if asked.file is not None:
            write(asked.file, [*read(asked.file), Kept(gpu=gpu, versions=versions, row=row)])

    with progress(team.rank == 0) as say:
        return run(team, made, Options(quick=asked.quick), flags.search, flags.seconds, save, say)
