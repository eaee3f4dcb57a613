"""Registry of the providers of each op: weft's choice and designs, then the baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from weft.bench.ops.shapes import OPS, op_of
from weft.ops.op import Op
from weft.plan.planned import AUTO, Planned, machine_of

if TYPE_CHECKING:
    from weft.bench.ops.problem import Problem


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
    rare        on simulated ranks too
    """

    name: str
    ops: tuple[str, ...]
    role: str
    make: Callable[[Problem], Attempt]
    on_request: bool = False
    rare: bool = False


# Former names, which commands and results name.
RENAMED = {"weft.segments": "weft.pipelined", "weft.library": "weft.sequential"}


def providers_for(op: str) -> tuple[Provider, ...]:
    from weft.bench.ops.baselines import BASELINES  # it imports this module

    return (*_of_weft(op_of(op)), *(provider for provider in BASELINES if op in provider.ops))


def choose(op: str, words: Sequence[str], simulated: bool = False) -> tuple[Provider, ...]:
    """Providers of ``op`` that ``words`` name. "torch" also names every "torch.…".

    Without words these are all providers; on GPUs all but those on request. ValueError for a word that names no provider of
    any op, or if none is left for this one.
    """
    available = providers_for(op)
    if not words:
        return tuple(provider for provider in available if not provider.on_request or (simulated and not provider.rare))
    known = {provider.name for name in OPS for provider in providers_for(name)}
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
    """True if ``word`` is the provider's name, a former one, or its family's."""
    word = RENAMED.get(word, word)
    return name == word or name.startswith(f"{word}.")


def _of_weft(op: Op) -> list[Provider]:
    """Providers of weft's plan ("weft.auto") and of each design; designs of GEMMs run on request."""
    gemm = op.form == "gemm"
    auto = Provider(name="weft.auto", ops=(op.alias,), role="weft", make=attempt)
    return [
        auto,
        *(
            replace(
                auto,
                name=f"weft.{design}",
                make=lambda problem, design=design: attempt(
                    problem, plan_of(problem, design).design if gemm else design
                ),
                on_request=gemm,
                rare=design in op.rare,
            )
            for design in op.algorithms
            if design != AUTO
        ),
    ]


def attempt(problem: Problem, design: Any = AUTO) -> Attempt:
    """weft's op at ``problem`` by ``design``: a design, or the name that a caller can ask for."""
    if problem.is_gemm:
        return Attempt(run=lambda number: problem.call(problem.sets[number], design))
    # As the kernel before a collective would, its first tensor is written to just before.
    buffers = [x.clone() for x, *_ in problem.sets]
    return Attempt(
        run=lambda number: problem.call((buffers[number], *problem.sets[number][1:]), design),
        prepare=lambda number: copy_into(buffers[number], problem.sets[number][0]),
    )


def plan_of(problem: Problem, design: str = AUTO) -> Planned:
    """The plan of the problem's call, or of ``design`` for it."""
    op, here = problem.op, machine_of(problem.team)
    return op.plan(op.call_of_case(replace(problem.case, design=design), here), here)


def copy_into(buffer: torch.Tensor, x: torch.Tensor) -> None:
    buffer.copy_(x)
