"""Providers of ``weft bench train``: weft, and by name its designs; baselines come from a folder."""

from __future__ import annotations

from collections.abc import Callable

from weft.bench.harness.provider import Prepared, Provider, Unavailable
from weft.bench.names import TRAIN
from weft.bench.training.problem import TrainProblem
from weft.bench.training.recipe import DESIGNS, ByDesign
from weft.parallel import plain
from weft.parallel.sequence_parallel import SequenceParallel


def weft(problem: TrainProblem) -> Prepared:
    return problem.prepared(SequenceParallel(team=problem.team, local=plain))


def by_design(design: str) -> Callable[[TrainProblem], Prepared]:
    """Provider that is weft with this design of AG-GEMM's backward."""

    def make(problem: TrainProblem) -> Prepared:
        if problem.team.size == 1 or problem.team.rail is not None:
            raise Unavailable("needs several ranks of one node")
        return problem.prepared(ByDesign(team=problem.team, local=plain, design=design))

    return make


PROVIDERS = (
    Provider(name="weft.auto", ops=(TRAIN,), role="weft", make=weft),
    # Measured only by name, on simulated ranks too.
    *(
        Provider(name=f"weft.{design}", ops=(TRAIN,), role="weft", make=by_design(design), on_request=True, rare=True)
        for design in DESIGNS
    ),
)
