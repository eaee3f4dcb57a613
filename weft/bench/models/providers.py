"""Providers of model benchmarks: weft's modes, eager torch, and baselines of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from weft.bench.harness.baselines import baselines_for
from weft.bench.harness.provider import Prepared, Provider, Unavailable
from weft.bench.harness.workload import Problem
from weft.bench.models import generate
from weft.bench.models.names import LEVELS, WEFT_MODES
from weft.bench.models.problem import StepProblem
from weft.bench.models.sessions import WeftSession, in_fp8_wire, over_context
from weft.parallel.modes import OLD_MODES

# In mode "auto", with a KV cache spread over the ranks by pages, and with sums that travel in fp8. Only where they are named.
CONTEXT, WIRE = "context_parallel", "fp8_wire"


def weft(problem: StepProblem, mode: str) -> Prepared:
    changed = {CONTEXT: over_context, WIRE: in_fp8_wire}.get(mode)
    model = problem.model(mode) if changed is None else changed(problem.model("auto"))
    prepared = problem.prepared(WeftSession(model, problem.step.batch, problem.step.length))
    if problem.teacher_forced:
        prepared.first = partial(problem.compare_first, partial(WeftSession, model))
    return prepared


def eager(problem: StepProblem) -> Prepared:
    return problem.prepared(problem.session())


def unavailable(problem: Problem, reason: str) -> Prepared:
    """Leave out a provider for ``reason``."""
    raise Unavailable(reason)


def providers_for(
    level: str, modes: Sequence[str], words: Sequence[str], baselines: Path | None = None
) -> tuple[Provider, ...]:
    """Providers of a model benchmark, weft's in ``modes`` (all if empty).

    words      names that were asked for. Only an exact name gives a cache spread over the ranks, or sums in fp8
    baselines  folder of more baselines, by default a checkout's
    """
    named = {OLD_MODES.get(mode, mode) for mode in modes or WEFT_MODES}
    ours, by_torch = (generate.weft, generate.eager) if level == "generate" else (weft, eager)

    def one(mode: str) -> Provider:
        return Provider(name=f"weft.{mode}", ops=LEVELS, role="weft", make=partial(ours, mode=mode))

    torch_eager = Provider(name="torch.eager", ops=LEVELS, role="other", make=by_torch)
    named_alone = [
        one(name)
        for name, levels in ((CONTEXT, ("attn", "model")), (WIRE, ("model",)))
        if level in levels and f"weft.{name}" in words
    ]
    return (
        *(one(mode) for mode in WEFT_MODES if mode in named),
        torch_eager,
        *baselines_for(level, baselines),
        *named_alone,
    )
