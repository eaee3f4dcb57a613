"""Registry of the providers of each op: weft's algorithms and designs, then the baselines."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

import weft.ops
from weft import ops
from weft.bench.shapes import COLLECTIVES, NORMED, OPS
from weft.ops.gemm import config
from weft.ops.gemm.config import GemmConfig

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
# Command-line name of an op -> its function and module in weft.ops. A module with several algorithms lists them in ALGORITHMS,
# and its function takes one as ``algorithm``.
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
# Ops whose module takes a GemmConfig; each design is a provider.
DESIGNED = ("ag-gemm", "gemm-rs", "gemm-ar")


def providers_for(op: str) -> tuple[Provider, ...]:
    from weft.bench.baselines import BASELINES  # it imports this module

    return (*_of_weft(op), *(provider for provider in BASELINES if op in provider.ops))


def choose(op: str, words: Sequence[str], simulated: bool = False) -> tuple[Provider, ...]:
    """Providers of ``op`` that ``words`` name. "torch" also names every "torch.…".

    Without words these are all providers; on GPUs all but those on request. ValueError for a word that names no provider of any
    op, or if none is left for this one.
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


def _of_weft(op: str) -> list[Provider]:
    module = importlib.import_module(getattr(weft.ops, WEFT[op]).__module__)
    named = [algorithm for algorithm in getattr(module, "ALGORITHMS", ()) if algorithm != "auto"]
    designs = [
        Provider(
            name=f"weft.{design}",
            ops=(op,),
            role="weft",
            make=lambda problem, design=design: _designed(problem, design),
            on_request=True,
        )
        for design in (config.DESIGNS if op in DESIGNED else ())
    ]
    algorithms = [
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
    return algorithms + designs


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


def _designed(problem: Problem, design: str) -> Attempt:
    run, team = importlib.import_module(getattr(weft.ops, WEFT[problem.op]).__module__).run, problem.team
    config = config_of(problem, design)
    return Attempt(run=lambda number: run(*problem.sets[number], team, config))


def config_of(problem: Problem, design: str) -> GemmConfig:
    """Config of ``weft.auto`` if it has this design, else the default with the rules' fields for it."""
    op, team = WEFT[problem.op], problem.team
    call = (op, *problem.shape.size, problem.dtype, team.size, team.caps)
    found = config.configured(*call)
    if found.design == design:
        return found
    default = config.default_config(*call)
    if default.design == design:
        return default
    if team.size == 1 and design == "segments":
        design = "library"  # all rows are this rank's: one cuBLAS GEMM
    unset = {field.name: field.default for field in fields(GemmConfig) if field.name in config.OF_SEGMENTS}
    cut = config.segments_for(op, *problem.shape.size, team.size) if design == "segments" else {}
    return replace(default, **{**unset, **cut, "design": design})


def copy_into(buffer: torch.Tensor, x: torch.Tensor) -> None:
    buffer.copy_(x)
