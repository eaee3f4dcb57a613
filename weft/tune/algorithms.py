"""Search of cuBLAS's algorithms alone, for all GEMMs that the ops of a run ask of cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weft.bench.ops.workload import OpWorkload
from weft.ops import warm_up
from weft.plan.algorithms import Entry

if TYPE_CHECKING:
    from weft.runtime.team.team import Team
    from weft.tune.search import TunePlan


def search_algorithms(team: Team, plans: Sequence[TunePlan], file: Path, say: Callable[[str], None]) -> list[Entry]:
    """Add the entries that ``file`` lacks to it, and return them. Collective.

    The GEMMs of a shape are the ones of the op's plan, and each rank's as a whole, which the baselines of ``weft bench`` run.
    """
    searched: list[Entry] = []
    for plan in plans:
        workload = OpWorkload(name=plan.op, shapes=plan.shapes, dtype=plan.dtype, words=("weft",))
        for number, shape in enumerate(plan.shapes):
            problem = workload.problem(shape, team, **dict.fromkeys(plan.variants, True))
            M, N, K = shape.size
            whole = M, 2 * N if workload.op.gated else N, K
            run = partial(problem.call, problem.sets[0])
            searched += warm_up(team, [whole], problem.dtype, run=run, algorithm_cache=file)
            if team.rank == 0:
                say(f"{plan.name} {shape.label}: {number + 1} of {len(plan.shapes)}, {len(searched)} GEMMs so far")
    return searched
