"""Providers of model benchmarks: weft's modes; eager torch and torch.compile, both with NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from weft.bench.harness.provider import Prepared, Provider, Unavailable, named_by
from weft.bench.models import generate
from weft.bench.models.baseline import compiled
from weft.bench.models.names import LEVELS
from weft.bench.models.problem import StepProblem
from weft.bench.models.sessions import TorchSession, WeftSession
from weft.parallel.step_plan import OLD_MODES

# Providers have the old names of modes, as in the results that are committed.
WEFT_MODES = ("auto", "ag_rs", "gemm_ar")
OLD_NAMES = {new: old for old, new in OLD_MODES.items()}


def weft(problem: StepProblem, mode: str) -> Prepared:
    model = problem.model(mode)
    prepared = problem.prepared(WeftSession(model, problem.step.batch, problem.step.length))
    if problem.teacher_forced:
        prepared.first = partial(problem.compare_first, partial(WeftSession, model))
    return prepared


def eager(problem: StepProblem) -> Prepared:
    return problem.prepared(problem.session())


def compile_all(problem: StepProblem) -> Prepared:
    if problem.team.is_simulated:
        raise Unavailable("torch.compile does not run on simulated ranks: they are threads of one process")
    step = problem.step
    functions = compiled(step.batch * step.new)
    return problem.prepared(TorchSession(problem.baseline, step.batch, step.length, functions))


def choose(level: str, modes: Sequence[str], words: Sequence[str]) -> tuple[Provider, ...]:
    """Providers of a model benchmark that ``words`` name, in weft's ``modes``; all by default.

    ValueError for an unknown word.
    """
    named = {OLD_NAMES.get(mode, mode) for mode in modes or WEFT_MODES}
    whole = level == "generate"
    ours, others = (
        (generate.weft, (generate.eager, generate.compile_decoding)) if whole else (weft, (eager, compile_all))
    )
    made = {f"weft.{mode}": partial(ours, mode=mode) for mode in WEFT_MODES if mode in named}
    made |= dict(zip(("torch.eager", "torch.compile"), others, strict=True))
    for word in words:
        if not any(named_by(word, name) for name in made):
            raise ValueError(f"provider {word!r} is unknown here; {level} has {', '.join(made)}")
    return tuple(
        Provider(name=name, ops=LEVELS, role="weft" if name.startswith("weft") else "other", make=make)
        for name, make in made.items()
        if not words or any(named_by(word, name) for word in words)
    )
