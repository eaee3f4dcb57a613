"""Candidates timed side by side: each checked first, all in turn, the fastest once more beside the default."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from weft.bench.baselines import close_quietly
from weft.bench.providers import Attempt, Provider
from weft.bench.shapes import COLLECTIVES
from weft.tune import compiling, spaces
from weft.tune.spaces import Config

if TYPE_CHECKING:
    from weft.bench.problem import Problem
    from weft.bench.report import Row
    from weft.bench.runner import Bench, Entrant

# Candidates timed together, and how much memory all their CUDA graphs may hold: a result for each call in one.
TOGETHER, GRAPHS_BYTES = 24, 32e9
# Of those, how many are timed once more.
FINALISTS = 2


def timed(
    bench: Bench, problem: Problem, configs: Sequence[Config], reference: float | None = None
) -> tuple[dict[Config, float], list[tuple[str, str]]]:
    """({config: its time, see `deciding`}, [(candidate, why it was dropped)]). Collective.

    reference  what the first config, the default, took in an earlier round

    More than TOGETHER are timed in groups, the first two configs in each of them. The first one and a group's FINALISTS are
    timed once more. GPUs become slower as they get warm, so all times are as of the first pass: by the factor that the
    default's differ by.
    """
    times: dict[Config, float] = {}
    failed: list[tuple[str, str]] = []
    made = [partial(spaces.attempt(problem, config).run, 0) for config in configs]
    compiling.compile_shares(made, bench.team)
    anchors, rest = list(configs[:2]), list(configs[2:])
    together = most_together(problem)
    groups = [rest[at : at + together] for at in range(0, len(rest), together)] or [[]]
    for group in groups:
        entrants: dict[Config, Entrant] = {}
        for config in [*anchors, *group]:
            entrant = enter(bench, problem, config)
            if entrant.single is not None:
                entrants[config] = entrant
            else:
                failed.append((spaces.label(config), entrant.row.reason or "it has no time"))
                close_quietly(entrant.attempt)
        found = measured(bench, entrants)
        ordered = [config for config in sorted(found, key=lambda config: found[config]) if config != configs[0]]
        # The same on all ranks, which have the same times.
        last = [config for config in (configs[0], *ordered[:FINALISTS]) if config in found]
        passes = [found]
        if len(found) > len(last) > 1:
            passes.append(measured(bench, {config: entrants[config] for config in last}))
        reference = reference or found.get(configs[0])
        for one in passes:
            times |= scaled(one, configs[0], reference)
        for entrant in entrants.values():
            entrant.single = entrant.chain = entrant.eager = None
            close_quietly(entrant.attempt)
    return times, list(dict.fromkeys(failed))


def measured(bench: Bench, entrants: Mapping[Config, Entrant]) -> dict[Config, float]:
    """What candidates are compared by."""
    return dict(zip(entrants, deciding(list(bench.time(list(entrants.values())))), strict=True))


def scaled(times: dict[Config, float], default: Config, reference: float | None) -> dict[Config, float]:
    """What ``times`` would be if the default took ``reference``."""
    factor = reference / times[default] if reference and default in times else 1.0
    return {config: us * factor for config, us in times.items()}


def deciding(rows: Sequence[Row]) -> list[float]:
    """µs of a call alone; where calls in a row were timed of all of them (collectives), the geometric mean of both: alone a
    call pays for its launch, in a row for what it leaves to the next one, and in a model it may be either."""
    in_a_row = all(row.chain_us is not None for row in rows)
    return [math.sqrt(row.median_us * row.chain_us) if in_a_row else row.median_us for row in rows]


def most_together(problem: Problem) -> int:
    """Of the candidates at one shape, besides two more in every group."""
    if problem.op in COLLECTIVES:
        nbytes = problem.shape.size[0]
    else:
        nbytes = problem.shape.size[0] * problem.shape.size[1] * problem.dtype.itemsize
    return max(1, min(TOGETHER, int(GRAPHS_BYTES / (nbytes * problem.replicas)) - 2))


def enter(bench: Bench, problem: Problem, config: Config) -> Entrant:
    """A candidate through all steps but the last; no ``single`` where it fell out. Collective."""

    def make(problem: Problem) -> Attempt:
        made = spaces.attempt(problem, config)
        # All ranks exchange how this went before any of them launches.
        compiling.compile_only(lambda: made.run(0), problem.team)
        return made

    provider = Provider(name=spaces.label(config), ops=(problem.op,), role="weft", make=make)
    entrant = bench.enter(problem, provider)
    if entrant.row.reason is None:
        bench.set_up(problem, entrant)
        if problem.op not in COLLECTIVES:
            entrant.chain = None  # calls in a row would double the time for a number that decides nothing
    return entrant
