"""Providers of each op: weft's choice and designs, then baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from weft.bench.harness.baselines import baselines_for
from weft.bench.harness.provider import Prepared, Provider, Refused, Result
from weft.bench.ops.baselines import BASELINES
from weft.bench.ops.fp8_baselines import FP8_BASELINES
from weft.bench.ops.normed import copy_into
from weft.bench.ops.problem import OpProblem
from weft.bench.ops.shapes import computes, op_of
from weft.ops.op import Op, registered
from weft.plan.planned import AUTO, Planned, machine_of

T = TypeVar("T")


def providers_for(op: str, baselines: Path | None = None) -> tuple[Provider, ...]:
    """``baselines``: a folder of more baselines, by default a checkout's."""
    of_torch = [one for one in (*BASELINES, *FP8_BASELINES) if op in one.ops]
    return (*_of_weft(op_of(op), op.split("+")[1:]), *of_torch, *baselines_for(op, baselines))


def _of_weft(op: Op, variants: Sequence[str]) -> list[Provider]:
    """Providers of weft's plan ("weft.auto") and of each design.

    Designs of ops that compute run on request.
    """
    auto = Provider(name="weft.auto", ops=(op.alias,), role="weft", make=prepared)
    return [
        auto,
        *(
            replace(
                auto,
                name=f"weft.{design}",
                make=lambda problem, design=design: of_design(problem, design),
                on_request=computes(op) or design in op.rare,
                rare=design in op.rare,
            )
            for design in op.algorithms
            if design != AUTO and op.offers(design, variants)
        ),
        *([replace(auto, name="weft.16_bits", make=in_16_bits)] if "fp8_wire" in variants else ()),
    ]


def in_16_bits(problem: OpProblem) -> Prepared:
    """``prepared`` with rows that travel in their dtype, to compare with fp8."""
    other = copy(problem)
    other.case = replace(problem.case, fields=tuple(one for one in problem.case.fields if one[0] != "fp8_wire"))
    return prepared(other)


def of_design(problem: OpProblem, design: str) -> Prepared:
    """``prepared`` by the design of this name.

    Refused, here or at the first call, if the design does not take the problem's call.
    """
    made = asked(lambda: prepared(problem, plan_of(problem, design).design if problem.computes else design))
    run = made.run

    def first(number: int) -> Result:
        result = asked(lambda: run(number))
        made.run = run
        return result

    made.run = first
    return made


def asked(action: Callable[[], T]) -> T:
    """Result of ``action``; Refused for a ValueError that an op says by its name."""
    try:
        return action()
    except ValueError as error:
        if str(error).partition(":")[0] in {op.name for op in registered()}:
            raise Refused(str(error)) from error
        raise


def prepared(problem: OpProblem, design: object = AUTO) -> Prepared:
    """weft's op at ``problem`` by ``design``: a design, or the name that a caller can ask for."""
    if problem.computes:
        return Prepared(run=lambda number: problem.call(problem.arguments[number], design))
    # As the kernel before a collective would, its first tensor is written to just before.
    buffers = [x.clone() for x, *_ in problem.sets]
    return Prepared(
        run=lambda number: problem.call((buffers[number], *problem.arguments[number][1:]), design),
        prepare=lambda number: copy_into(buffers[number], problem.sets[number][0]),
    )


def plan_of(problem: OpProblem, design: str = AUTO) -> Planned:
    """The plan of the problem's call, or of ``design`` for it."""
    op, here = problem.op, machine_of(problem.team)
    return op.plan(op.call_of_case(replace(problem.case, design=design), here), here)
