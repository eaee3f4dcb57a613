"""Run of several workloads on each rank: reports, the description of the timing, memory."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weft.bench.harness import machine, meters
from weft.bench.harness.bench import Bench, Options, silent
from weft.bench.harness.meters import Stuck, finish
from weft.bench.harness.report import Report
from weft.bench.harness.workload import OutOfStep, Workload
from weft.ops import barrier

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

Save = Callable[[list[Report]], None]

EVENTS = "[prepare, barrier of all ranks on the GPU, event, op, event] in one CUDA graph; nothing subtracted"
AROUND = "a CUDA graph of [prepare, barrier, op, op, …] minus one of [prepare, barrier], timed from outside and divided"
IN_A_ROW = (
    "[prepare all, barrier, event, op, op, …, event] in one CUDA graph, over the number of ops; calls of up to 2 ms"
)
SIMULATED = "the host's clock around simulated calls: times mean nothing"
# A weft op's workspace is a few times its largest tensor, in power-of-two capacities that are all kept.
HEAP_FACTOR = 8


def run_workloads(
    team: Team, workloads: Sequence[Workload], options: Options, save: Save | None, say: Callable[[str], None]
) -> list[Report]:
    """Measure workloads one after the other. All ranks return the same reports.

    save    called by rank 0 after every shape with the reports so far, so that a killed run leaves its results
    say     called by rank 0 with a line for each shape

    Raises Stuck or OutOfStep if a provider's kernels do not end; its ``reports`` hold the results so far and the reason.
    """
    empty_us, reports = started(team), []
    here = machine.describe(team)
    save = save if save is not None and team.rank == 0 else silent
    for workload in workloads:
        bench = Bench(team, workload, options, empty_us, say if team.rank == 0 else silent)
        report = Report(
            op=workload.name,
            world_size=team.size,
            dtype=workload.dtype,
            machine=dict(here),
            protocol=protocol(workload, options, team.is_simulated, empty_us),
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            command=options.command,
            subject=workload.subject,
        )
        if team.shape.nodes > 1:
            report.protocol["nodes"] = str(team.shape)
        reports.append(report)
        for number, shape in enumerate(workload.shapes):
            begin = time.perf_counter()
            try:
                report.rows += bench.measure(shape)
            except (Stuck, OutOfStep) as error:
                report.rows += bench.without(workload.shapes[number:], f"not measured: {error}")
                error.reports = reports
                save(reports)
                raise
            if bench.balanced and not team.is_simulated and not options.one_by_one:
                report.protocol["neighbours"] = neighbours(bench.balanced)
            save(reports)
            if team.rank == 0:
                seconds = time.perf_counter() - begin
                say(
                    f"{workload.name} W={team.size} {shape.label}: {number + 1} of {len(workload.shapes)}, {seconds:.1f} s"
                )
        if team.rank == 0 and team.device.type == "cuda":
            report.machine["afterwards"] = machine.state()
            save(reports)
    return reports


def started(team: Team) -> float | None:
    """Largest time of all ranks between two adjacent events in a CUDA graph; None if events fail there."""
    if team.device.type == "cuda":
        barrier(team)  # loaded before the first capture
        finish(team, "the first barrier")
    all_ranks = team.exchange(meters.events_in_graphs(team))
    return None if None in all_ranks else max(all_ranks)


def protocol(workload: Workload, options: Options, simulated: bool, empty_us: float | None) -> dict[str, Any]:
    """Description of the timing for the JSON. ``empty_us``: see `started`."""
    if simulated:
        return {"timing": SIMULATED, "check": workload.check_rule}
    common = {
        "timing": AROUND if empty_us is None else EVENTS,
        "in a row": IN_A_ROW,
        "empty_us": empty_us,
        "alternation": "none: all rounds of a provider, then those of the next one"
        if options.one_by_one
        else "all providers of a shape in one process, every round in another order",
        "rounds": "quick" if options.quick else "full",
        "statistic": "the maximum over the ranks of the median; p10 and p90 of that rank",
        "check": workload.check_rule,
    }
    return workload.protocol(common, options.quick)


def heap_bytes(workloads: Sequence[Workload]) -> int:
    """Symmetric memory per rank for the GEMM ops' workspaces, besides 6 GiB.

    Candidates of `weft tune` for collectives have receive buffers of 1.4 GiB at four ranks and 2.8 at eight, for each of two
    transports.
    """
    largest: dict[str, int] = {}
    for workload in workloads:
        largest[workload.name] = max(largest.get(workload.name, 0), workload.moved_bytes())
    return min((6 << 30) + HEAP_FACTOR * sum(largest.values()), 40 << 30)


def neighbours(balanced: Mapping[str, bool]) -> str:
    """Shapes, for the protocol, at which every meter came directly after every other one equally often."""
    unbalanced = [label for label, is_balanced in balanced.items() if not is_balanced]
    if not unbalanced:
        return "balanced"
    return (
        "not balanced"
        if len(unbalanced) == len(balanced)
        else f"balanced, but not at {', '.join(unbalanced)}: too few rounds"
    )
