"""Every way to do an op, in one registry: weft's algorithms as its modules list them, then the baselines."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weft import ops
from weft.bench.shapes import COLLECTIVES, NORMED, OPS

if TYPE_CHECKING:
    from weft.bench.problem import Problem


class Unavailable(Exception):
    """This provider cannot run this problem here; the message is the reason in the table."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A provider set up for one problem.

    run      (number of the set) -> the result; given to the current stream, captured if the provider can be
    prepare  (number of the set): writes the input where ``run`` reads it, as the kernel before it would; not timed
    local    the result is that of this rank's GEMM alone; of a layer, this rank's rows of it
    close    gives back what does not go by itself
    chosen   of a model's step: where ``run`` leaves the tokens that it chooses
    first    of a level: answers that are compared before ``run`` is called, as (where, distance on this rank)
    """

    run: Callable[[int], torch.Tensor]
    prepare: Callable[[int], None] | None = None
    local: bool = False
    close: Callable[[], None] | None = None
    chosen: torch.Tensor | None = None
    first: Callable[[], list[tuple[str, float]]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """``make`` may raise Unavailable; it is called by all ranks, and may take part in collective calls."""

    name: str
    ops: tuple[str, ...]
    role: str
    make: Callable[[Problem], Attempt]


NORM_EPS = 1e-6
# The op of the command line -> its function and module in weft.ops. A module that has several ways to do it lists them
# in ALGORITHMS, and its function takes one as ``algorithm``.
WEFT = {
    "all-reduce": "all_reduce",
    NORMED: "all_reduce_rms_norm",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "gemm": "matmul",
    "ag-gemm": "all_gather_matmul",
    "gemm-rs": "matmul_reduce_scatter",
    "gemm-ar": "matmul_all_reduce",
}


def providers_for(op: str) -> tuple[Provider, ...]:
    from weft.bench.baselines import BASELINES  # it imports this module

    return (*_of_weft(op), *(provider for provider in BASELINES if op in provider.ops))


def choose(op: str, words: Sequence[str]) -> tuple[Provider, ...]:
    """The providers of ``op`` that ``words`` name, all if there are none. "torch" also names every "torch.…".

    ValueError for a word that names none of any op, or where none is left for this one.
    """
    available = providers_for(op)
    if not words:
        return available
    known = sorted({provider.name for name in (*OPS, NORMED) for provider in providers_for(name)})
    for word in words:
        if not any(named_by(word, name) for name in known):
            raise ValueError(f"provider {word!r} is unknown; choose from {', '.join(known)}")
    chosen = tuple(provider for provider in available if any(named_by(word, provider.name) for word in words))
    if not chosen:
        raise ValueError(f"{op} has no provider {', '.join(words)}; it has {', '.join(p.name for p in available)}")
    return chosen


def named_by(word: str, name: str) -> bool:
    return name == word or name.startswith(f"{word}.")


def _of_weft(op: str) -> list[Provider]:
    module = importlib.import_module(f"weft.ops.{WEFT[op]}")
    named = [algorithm for algorithm in getattr(module, "ALGORITHMS", ()) if algorithm != "auto"]
    return [
        Provider(
            name=f"weft.{algorithm}",
            ops=(op,),
            role="weft",
            make=lambda problem, algorithm=algorithm: _weft(
                problem, {} if algorithm == "auto" else {"algorithm": algorithm}
            ),
        )
        for algorithm in ("auto", *named)
    ]


def _weft(problem: Problem, options: dict[str, Any]) -> Attempt:
    function, team = getattr(ops, WEFT[problem.op]), problem.team
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


def copy_into(buffer: torch.Tensor, x: torch.Tensor) -> None:
    buffer.copy_(x)
