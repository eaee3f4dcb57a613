"""Providers of a step: weft's modes, eager torch, and torch.compile, the latter two with NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from weft.bench.models import generate
from weft.bench.models.baseline import compiled
from weft.bench.models.names import LEVELS
from weft.bench.models.problem import StepProblem
from weft.bench.models.sessions import TorchSession, WeftSession
from weft.bench.models.step import compare_first, step
from weft.bench.ops.providers import Attempt, Provider, Unavailable, named_by
from weft.parallel.step_plan import OLD_MODES

# Providers have the old names of modes, as in the results that are committed.
WEFT_MODES = ("auto", "ag_rs", "gemm_ar")
OLD_NAMES = {new: old for old, new in OLD_MODES.items()}


def weft(problem: StepProblem, mode: str) -> Attempt:
    model = problem.model(mode)
    attempt = step(problem, WeftSession(model, problem.batch, problem.length))
    if problem.plan.teacher_forced:
        attempt.first = partial(compare_first, problem, partial(WeftSession, model))
    return attempt


def eager(problem: StepProblem) -> Attempt:
    return step(problem, TorchSession(problem.baseline, problem.batch, problem.length))


def compile_all(problem: StepProblem) -> Attempt:
    if problem.team.is_simulated:
        raise Unavailable("torch.compile does not run on simulated ranks: they are threads of one process")
    torch.compiler.reset()  # of the last shape: compiled code is not reused for another shape
    functions = compiled(problem.batch * problem.new)
    return step(problem, TorchSession(problem.baseline, problem.batch, problem.length, functions))


def providers_for(level: str, modes: Sequence[str] = ()) -> tuple[Provider, ...]:
    """Providers of a model benchmark; of weft's modes the given ones, all if none are given."""
    named = {OLD_NAMES.get(mode, mode) for mode in modes or WEFT_MODES}
    modes = [mode for mode in WEFT_MODES if mode in named]
    if level == "generate":
        return generate.providers(modes)
    return (
        *(Provider(name=f"weft.{mode}", ops=LEVELS, role="weft", make=partial(weft, mode=mode)) for mode in modes),
        Provider(name="torch.eager", ops=LEVELS, role="other", make=eager),
        Provider(name="torch.compile", ops=LEVELS, role="other", make=compile_all),
    )


def choose(level: str, modes: Sequence[str], words: Sequence[str]) -> tuple[Provider, ...]:
    """Members of `providers_for` that ``words`` name, all without words. ValueError for an unknown word."""
    available = providers_for(level, modes)
    names = [provider.name for provider in available]
    for word in words:
        if not any(named_by(word, name) for name in names):
            raise ValueError(f"provider {word!r} is unknown here; {level} has {', '.join(names)}")
    return tuple(p for p in available if not words or any(named_by(word, p.name) for word in words))
