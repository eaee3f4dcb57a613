"""Registry of the providers of each op: weft's algorithms and designs, then the baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weft import ops
from weft.bench.shapes import COLLECTIVES, NORMED, OPS
from weft.ops.gemm.gemm_op import GemmOp
from weft.ops.op import find_op
from weft.plan.planned import Planned, machine_of

if TYPE_CHECKING:
    from weft.bench.problem import Problem


class Unavailable(Exception):
    """Error: a provider cannot run a problem here. Its message is the reason in the table."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """Provider set up for one problem.

    run      (number of the set) -> the result; submits to the current stream, and is captured if the provider allows it
    prepare  (number of the set): writes the input where ``run`` reads it, as the kernel before it would; not timed
    local    the result is that of this rank's GEMM alone; for a layer, this rank's rows of it
    in_place the result replaces the input: correct once after each ``prepare``
    close    frees resources that are not freed automatically
    chosen   for a model's step: memory to which ``run`` writes the chosen tokens
    first    for a model benchmark: comparisons made before ``run`` is called, as (name, distance on this rank)
    """

    run: Callable[[int], torch.Tensor]
    prepare: Callable[[int], None] | None = None
    local: bool = False
    in_place: bool = False
    close: Callable[[], None] | None = None
    chosen: torch.Tensor | None = None
    first: Callable[[], list[tuple[str, float]]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """Way to do an op. All ranks call ``make``, which may be collective and may raise Unavailable.

    on_request  on GPUs it runs only if its name or family is given
    """

    name: str
    ops: tuple[str, ...]
    role: str
    make: Callable[[Problem], Attempt]
    on_request: bool = False


NORM_EPS = 1e-6


def providers_for(op: str) -> tuple[Provider, ...]:
    from weft.bench.baselines import BASELINES  # it imports this module

    return (*_of_weft(op), *(provider for provider in BASELINES if op in provider.ops))


def choose(op: str, words: Sequence[str], simulated: bool = False) -> tuple[Provider, ...]:
    """Providers of ``op`` that ``words`` name. "torch" also names every "torch.…".

    Without words these are all providers; on GPUs all but those on request. ValueError for a word that names no provider of
    any op, or if none is left for this one.
    """
    available = providers_for(op)
    if not words:
        return tuple(provider for provider in available if simulated or not provider.on_request)
    known = {provider.name for name in (*OPS, NORMED) for provider in providers_for(name)}
    names = ", ".join(provider.name for provider in available)
    for word in words:
        if not any(named_by(word, name) for name in known):
            raise ValueError(f"provider {word!r} is unknown; {op} has {names}")
    chosen = tuple(provider for provider in available if any(named_by(word, provider.name) for word in words))
    if not chosen:
        raise ValueError(f"{op} has no provider {', '.join(words)}; it has {names}")
    return chosen


def lacking(op: str, words: Sequence[str]) -> list[str]:
    """Members of ``words`` that name providers of other ops only."""
    names = [provider.name for provider in providers_for(op)]
    return [word for word in words if not any(named_by(word, name) for name in names)]


def named_by(word: str, name: str) -> bool:
    return name == word or name.startswith(f"{word}.")


def _of_weft(name: str) -> list[Provider]:
    """weft's plan ("weft.auto"), and each of its designs.

    A collective's design is chosen by its argument ``algorithm``, a GEMM's by its plan.
    """
    op = find_op(name)
    is_gemm = isinstance(op, GemmOp)
    designs = [design for design in op.algorithms if design != "auto"] if op.name != "matmul" else []
    return [
        Provider(name="weft.auto", ops=(name,), role="weft", make=lambda problem: _weft(problem, {})),
        *(
            Provider(
                name=f"weft.{design}",
                ops=(name,),
                role="weft",
                make=lambda problem, design=design: (
                    _designed(problem, design) if is_gemm else _weft(problem, {"algorithm": design})
                ),
                on_request=is_gemm,
            )
            for design in designs
        ),
    ]


def _weft(problem: Problem, options: dict[str, Any]) -> Attempt:
    function, team = getattr(ops, find_op(problem.op).name), problem.team
    if problem.op in COLLECTIVES:
        buffers = [x.clone() for (x,) in problem.sets]
        return Attempt(
            run=lambda number: function(buffers[number], team, **options),
            prepare=lambda number: copy_into(buffers[number], problem.sets[number][0]),
        )
    if problem.op == NORMED:
        buffers = [x.clone() for x, *_ in problem.sets]
        return Attempt(
            run=lambda number: function(buffers[number], *problem.sets[number][1:], NORM_EPS, team, **options),
            prepare=lambda number: copy_into(buffers[number], problem.sets[number][0]),
        )
    if problem.op == "gemm":
        return Attempt(run=lambda number: function(*problem.sets[number], **options))
    return Attempt(run=lambda number: function(*problem.sets[number], team, **options))


def _designed(problem: Problem, design: str) -> Attempt:
    op, team = find_op(problem.op), problem.team
    chosen = plan_of(problem, design).design
    return Attempt(run=lambda number: op.run(chosen, team, *problem.sets[number]))


def plan_of(problem: Problem, design: str = "auto") -> Planned:
    """Plan of the problem's call, or of ``design`` for it."""
    op, here = find_op(problem.op), machine_of(problem.team)
    return op.plan(op.call_of(problem.shape.size, problem.dtype, here, design), here)


def copy_into(buffer: torch.Tensor, x: torch.Tensor) -> None:
    buffer.copy_(x)
