"""Candidates of a search: designs of an op at a problem, in rounds.

``first`` are designs far apart (``Op.space``), ``around`` the neighbours of the best so far (``Op.around``). The design by
the op's rule, and the one that calls get now, are among the first.
"""

from __future__ import annotations

from typing import Any

from weft.bench.ops.labels import label
from weft.bench.ops.problem import OpProblem
from weft.bench.ops.shapes import op_of
from weft.ops.op import Op
from weft.plan.planned import Machine, machine_of

__all__ = ["around", "call_of", "default", "first", "label", "parse"]

# Former names of variants.
RENAMED = {"own_first": "local_first"}


def parse(word: str) -> tuple[str, tuple[str, ...]]:
    """(op's alias, variants) of OP+VARIANT+…, as in ag-gemm+local_first. ValueError for any other word."""
    name, *given = word.split("+")
    op = op_of(name)
    if type(op).space is Op.space:
        raise ValueError(f"op {word!r}: {op.alias} has one design, so there is nothing to search; leave it out")
    variants = [RENAMED.get(variant, variant) for variant in given]
    for variant in variants:
        if variant not in op.variants:
            known = ", ".join(op.variants) or "none"
            raise ValueError(f"op {word!r} is unknown: {op.alias} has the variants {known}, not {variant!r}")
    return op.alias, tuple(name for name in op.variants if name in variants)


def call_of(problem: OpProblem) -> tuple[Any, Machine]:
    """The problem's call, and its machine."""
    here = machine_of(problem.team)
    return problem.op.call_of_case(problem.case, here), here


def default(problem: OpProblem) -> Any:
    """The op's choice without rows."""
    return problem.op.by_rule(*call_of(problem))


def first(problem: OpProblem, quick: bool) -> list[Any]:
    """The rule's design, the one that calls get now, then candidates far apart, without duplicates."""
    op, (call, here) = problem.op, call_of(problem)
    return list(dict.fromkeys([op.by_rule(call, here), op.plan(call, here).design, *op.space(call, here, quick)]))


def around(problem: OpProblem, best: object, quick: bool) -> list[Any]:
    """Neighbours of ``best``: one field moved."""
    return list(dict.fromkeys(problem.op.around(best, machine_of(problem.team), quick)))
