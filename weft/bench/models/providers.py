"""Providers of model benchmarks: weft's modes, eager torch, and torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from weft.bench.harness.provider import Prepared, Provider, Unavailable
from weft.bench.models import generate
from weft.bench.models.baseline import Functions
from weft.bench.models.compiled import compiled, pipelined, symmetric
from weft.bench.models.names import LEVELS, WEFT_MODES
from weft.bench.models.problem import StepProblem
from weft.bench.models.sessions import TorchSession, WeftSession, over_context
from weft.parallel.modes import OLD_MODES

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# In mode "auto", with a KV cache spread over the ranks by pages. Only where it is named.
CONTEXT = "context_parallel"
# (problem, rows of a step) -> functions for such steps
Compile = Callable[[StepProblem, int], Functions]


def weft(problem: StepProblem, mode: str) -> Prepared:
    model = over_context(problem.model("auto")) if mode == CONTEXT else problem.model(mode)
    prepared = problem.prepared(WeftSession(model, problem.step.batch, problem.step.length))
    if problem.teacher_forced:
        prepared.first = partial(problem.compare_first, partial(WeftSession, model))
    return prepared


def eager(problem: StepProblem) -> Prepared:
    return problem.prepared(problem.session())


def by_compile(problem: StepProblem, make: Compile) -> Prepared:
    check_compiles(problem.team)
    step = problem.step
    functions = make(problem, step.batch * step.new)
    return problem.prepared(TorchSession(problem.baseline, step.batch, step.length, functions))


def decoding_by_compile(problem: generate.AnswersProblem, make: Compile) -> Prepared:
    check_compiles(problem.team)
    return generate.decode_by(problem, make(problem.of_step, problem.batch))


def check_compiles(team: Team) -> None:
    if team.is_simulated:
        raise Unavailable("torch.compile does not run on simulated ranks: they are threads of one process")


def with_nccl(problem: StepProblem, rows: int) -> Functions:
    return compiled(problem.team, rows)


def with_symmetric_memory(problem: StepProblem, rows: int) -> Functions:
    return symmetric(problem.team, rows, rows * problem.config.hidden_size * problem.dtype.itemsize)


def with_pipelining(problem: StepProblem, rows: int) -> Functions:
    if problem.step.decodes:
        raise Unavailable("micro-pipelining is for prompts: the rows of a decode step are too few to split")
    return pipelined(problem.team, rows)


# For generate: its decoding steps are of one size, its prompts are read eagerly.
DECODING = {"torch.compile": with_nccl, "torch.compile+symm": with_symmetric_memory}
COMPILED = DECODING | {"torch.compile+async_tp": with_pipelining}


def providers_for(level: str, modes: Sequence[str], words: Sequence[str]) -> tuple[Provider, ...]:
    """Providers of a model benchmark, weft's in ``modes`` (all if empty).

    ``words``: names that were asked for. Only by its own name there is a cache spread over the ranks.
    """
    named = {OLD_MODES.get(mode, mode) for mode in modes or WEFT_MODES}
    ours, others = weft, {"torch.eager": eager}
    others |= {name: partial(by_compile, make=make) for name, make in COMPILED.items()}
    if level == "generate":
        ours, others = generate.weft, {"torch.eager": generate.eager}
        others |= {name: partial(decoding_by_compile, make=make) for name, make in DECODING.items()}
    made = {f"weft.{mode}": partial(ours, mode=mode) for mode in WEFT_MODES if mode in named} | others
    if level in ("attn", "model") and f"weft.{CONTEXT}" in words:
        made |= {f"weft.{CONTEXT}": partial(weft, mode=CONTEXT)}
    return tuple(
        Provider(name=name, ops=LEVELS, role="weft" if name.startswith("weft") else "other", make=make)
        for name, make in made.items()
    )
