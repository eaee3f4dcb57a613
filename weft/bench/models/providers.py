"""Providers of model benchmarks: weft's modes, eager torch, and torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from weft.bench.harness.provider import Prepared, Provider, Unavailable, named_by
from weft.bench.models import generate
from weft.bench.models.baseline import Functions
from weft.bench.models.compiled import compiled, pipelined, symmetric
from weft.bench.models.names import LEVELS
from weft.bench.models.problem import StepProblem
from weft.bench.models.sessions import TorchSession, WeftSession, over_context
from weft.parallel.step_plan import OLD_MODES

# Providers have the old names of modes, as in the results that are committed.
WEFT_MODES = ("auto", "ag_rs", "gemm_ar")
# In mode "auto", with a KV cache spread over the ranks by pages. Only where it is named.
CONTEXT = "context_parallel"
OLD_NAMES = {new: old for old, new in OLD_MODES.items()}


def weft(problem: StepProblem, mode: str) -> Prepared:
    model = over_context(problem.model("auto")) if mode == CONTEXT else problem.model(mode)
    prepared = problem.prepared(WeftSession(model, problem.step.batch, problem.step.length))
    if problem.teacher_forced:
        prepared.first = partial(problem.compare_first, partial(WeftSession, model))
    return prepared


def eager(problem: StepProblem) -> Prepared:
    return problem.prepared(problem.session())


def by_compile(problem: StepProblem, make: Callable[[StepProblem], Functions]) -> Prepared:
    if problem.team.is_simulated:
        raise Unavailable("torch.compile does not run on simulated ranks: they are threads of one process")
    return problem.prepared(TorchSession(problem.baseline, problem.step.batch, problem.step.length, make(problem)))


def with_nccl(problem: StepProblem) -> Functions:
    return compiled(problem.team, problem.step.batch * problem.step.new)


def with_symmetric_memory(problem: StepProblem) -> Functions:
    rows = problem.step.batch * problem.step.new
    return symmetric(problem.team, rows, rows * problem.config.hidden_size * problem.dtype.itemsize)


def with_pipelining(problem: StepProblem) -> Functions:
    if problem.step.decodes:
        raise Unavailable("micro-pipelining is for prompts: the rows of a decode step are too few to split")
    return pipelined(problem.team, problem.step.batch * problem.step.new)


COMPILED = {
    "torch.compile": with_nccl,
    "torch.compile+symm": with_symmetric_memory,
    "torch.compile+async_tp": with_pipelining,
}


def choose(level: str, modes: Sequence[str], words: Sequence[str]) -> tuple[Provider, ...]:
    """Providers of a model benchmark that ``words`` name, in weft's ``modes``; all by default.

    ValueError for an unknown word.
    """
    named = {OLD_NAMES.get(mode, mode) for mode in modes or WEFT_MODES}
    ours, others = weft, {"torch.eager": eager}
    others |= {name: partial(by_compile, make=make) for name, make in COMPILED.items()}
    if level == "generate":
        ours, others = generate.weft, {"torch.eager": generate.eager, "torch.compile": generate.compile_decoding}
    made = {f"weft.{mode}": partial(ours, mode=mode) for mode in WEFT_MODES if mode in named} | others
    if level in ("attn", "model") and f"weft.{CONTEXT}" in words:
        made |= {f"weft.{CONTEXT}": partial(weft, mode=CONTEXT)}
    for word in words:
        if not any(named_by(word, name) for name in made):
            raise ValueError(f"provider {word!r} is unknown here; {level} has {', '.join(made)}")
    return tuple(
        Provider(name=name, ops=LEVELS, role="weft" if name.startswith("weft") else "other", make=make)
        for name, make in made.items()
        if not words or any(named_by(word, name) for word in words)
    )
