"""Times of calls in a row with and without weft, their table and their file, for the scripts of the doors."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from weft.bench.harness import machine, meters
from weft.runtime.files import put
from weft.runtime.team.team import Team
from weft.transport.replays import replays_of

# Calls in a row, and rounds of them; the first rounds are not counted: workspaces, graphs and compilations are made there.
CALLS, ROUNDS, WARM_UP = 8, 7, 4
# Microseconds by "us" and "host_us", and by other names the counts of each rank.
Times = dict[str, Any]


def counts_of(team: Team) -> dict[str, int]:
    """Eager calls of overlapped ops until now, by what became of them; none where calls are not replayed."""
    graphs = replays_of(team)
    if graphs is None:
        return {}
    return {name: getattr(graphs, name) for name in ("replays", "launches", "captures", "failures")}


def counted_since(team: Team, before: dict[str, int]) -> dict[str, list[int]]:
    """Counts since ``before``, of each rank. Collective."""
    by_rank = team.exchange({name: count - before[name] for name, count in counts_of(team).items()})
    return {name: [of[name] for of in by_rank] for name in before}


def in_a_row(team: Any, call: Callable[[], object], calls: int = CALLS, rounds: int = ROUNDS) -> Times:
    """Time of an eager call and of the host in it, medians over rounds of the slowest rank; and counts of the timed calls."""
    on_gpu = team.device.type == "cuda"
    start, end = (meters.event(False), meters.event(False)) if on_gpu else (None, None)
    us, host_us = [], []
    before: dict[str, int] = {}
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            before = counts_of(team)
        team.barrier()
        if start is not None:
            start.record()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        host = time.perf_counter() - begin
        if end is not None:
            end.record()
            end.synchronize()
        if number >= WARM_UP:
            host_us.append(host * 1e6 / calls)
            us.append(start.elapsed_time(end) * 1e3 / calls if start is not None else host_us[-1])
    slowest = team.exchange((statistics.median(us), statistics.median(host_us)))
    times = {"us": max(us for us, _ in slowest), "host_us": max(host for _, host in slowest)}
    return times | counted_since(team, before)


def captured(team: Any, call: Callable[[], object], calls: int = CALLS) -> Times | None:
    """Microseconds of a call in a CUDA graph of several; None without GPUs."""
    if team.device.type != "cuda":
        return None
    graph = torch.cuda.CUDAGraph()
    for _ in range(2):
        call()
    with meters.capturing(graph):
        for _ in range(calls):
            call()
    times = in_a_row(team, graph.replay, calls=1)
    return {"us": times["us"] / calls, "host_us": times["host_us"] / calls}


def distance(x: torch.Tensor, of: torch.Tensor) -> float:
    """RMS of the difference over the RMS of ``of``."""
    return float((x.double() - of.double()).square().mean().sqrt() / of.double().square().mean().sqrt())


def cell(times: Times | None) -> str:
    return "–" if times is None else f"{times['us']:.0f} [{times['host_us']:.0f}]"


def tell(title: str, rows: Sequence[dict[str, Any]], ways: Sequence[str]) -> str:
    """Table of rows as Markdown: µs a call [of the host] by way, and the gain of the last way over the first."""
    lines = [title, "", "| what | " + " | ".join(ways) + " | gain |", "|---|" + "---|" * (len(ways) + 1)]
    for row in rows:
        first, last = row[ways[0]], row[ways[-1]]
        gain = f"{first['us'] / last['us']:.2f}" if first and last else "–"
        lines.append(f"| {row['what']} | " + " | ".join(cell(row[way]) for way in ways) + f" | {gain} |")
    return "\n".join(lines)


def write(file: Path | None, team: Any, door: str, rows: Sequence[dict[str, Any]], **facts: Any) -> None:
    """Write the rows with what they were measured on, by rank 0."""
    if file is not None and team.rank == 0:
        put(
            file,
            json.dumps({"door": door, "where": machine.describe(team), **facts, "rows": list(rows)}, indent=1) + "\n",
        )
