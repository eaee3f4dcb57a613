"""Steps of a model as attempts that the harness can run, capture and check."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from weft.bench.models.baseline import Cache
from weft.bench.models.sessions import Session, TorchSession, shard_of
from weft.bench.ops.providers import Attempt

if TYPE_CHECKING:
    from weft.bench.models.problem import StepProblem

FORCED_PROMPT, FORCED_STEPS = 24, 8


def step(problem: StepProblem, session: Session) -> Attempt:
    """Run the session's timed step. Its caches hold the step's history, which all sessions share or copy."""
    if problem.op == "model":
        if problem.decodes:
            session.recall(problem.history(), problem.length - 1)
        return model_step(problem, session)
    tokens = problem.batch * problem.new
    sharded = session.is_sharded(tokens)
    x = shard_of(problem.x, problem.team) if sharded else problem.x
    if problem.op == "mlp":
        return Attempt(run=lambda number: session.mlp(number, x, tokens), local=sharded)
    if problem.decodes:
        session.recall(problem.history(), problem.length - 1)
    at = session.one_each(problem.positions) if problem.decodes else session.prompts(problem.length)
    return Attempt(run=lambda number: session.attend(number, x, at), local=sharded)


def step_alone(problem: StepProblem, session: Session) -> torch.Tensor:
    """Logits of a model's step after the session's own history.

    The session may have only the first sequences.
    """
    if problem.decodes and problem.length > 1:
        session.prefill(problem.tokens[: session.batch, :-1], session.prompts(problem.length - 1))
    return model_step(problem, session).run(0)


def model_step(problem: StepProblem, session: Session) -> Attempt:
    """`step` of a model whose session's caches hold the history."""
    tokens, positions = problem.tokens[: session.batch], problem.positions[: session.batch]
    chosen = torch.empty(session.batch, dtype=torch.int64, device=problem.team.device)
    last = tokens[:, -1].contiguous()
    at = None if problem.decodes else session.prompts(problem.length)

    def run(number: int) -> torch.Tensor:
        logits = session.decode(last, positions) if problem.decodes else session.prefill(tokens, at)
        chosen.copy_(session.choose(logits))
        return logits

    return Attempt(run=run, prepare=lambda number: chosen.fill_(-1), chosen=chosen)


def remember(problem: StepProblem, session: TorchSession) -> Cache:
    """Session whose caches are filled with all tokens of the sequences but the last ones."""
    before = problem.length - 1
    if before and problem.op == "model":
        session.prefill(problem.tokens[:, :-1], session.prompts(before))
    elif before:
        at = session.prompts(before)
        for number in problem.sets:
            session.attend(number, problem.earlier, at)
    return session.cache


def compare_first(problem: StepProblem, make: Callable[[int, int], Session]) -> list[tuple[str, float]]:
    """(name, `StepProblem.distance` on this rank) between a session's answers and the eager baseline's.

    For a model the logits after given tokens; for layers the output of each that the timing rotates through. ``make``:
    (batch, max_len) -> the session.
    """
    if problem.op == "model":
        return compare_forced(problem, make)
    distances = []
    size = problem.batch, problem.length
    found, expected = (step(problem, session) for session in (make(*size), TorchSession(problem.baseline, *size)))
    for number in problem.sets:
        right = expected.run(number)
        right = shard_of(right, problem.team) if found.local else right
        distances.append((f"of layer {number}", _distance(problem, found.run(number), right)))
    return distances


def compare_forced(problem: StepProblem, make: Callable[[int, int], Session]) -> list[tuple[str, float]]:
    """`compare_first` of logits after a prompt, and after each of FORCED_STEPS given tokens."""
    size = problem.batch, FORCED_PROMPT + FORCED_STEPS
    if not problem.forced:
        problem.forced = list(forced(problem, TorchSession(problem.baseline, *size)))
    return [
        (f"after given token {number}" if number else "after the prompt", _distance(problem, actual, expected))
        for number, (actual, expected) in enumerate(zip(forced(problem, make(*size)), problem.forced, strict=True))
    ]


def _distance(problem: StepProblem, actual: torch.Tensor, expected: torch.Tensor) -> float:
    return problem.distance(actual, expected)[1] if actual.shape == expected.shape else math.inf


def forced(problem: StepProblem, session: Session) -> Iterator[torch.Tensor]:
    """Logits after a prompt, and after each of FORCED_STEPS tokens that are given, not chosen."""
    generator = torch.Generator().manual_seed(9)
    size = problem.batch, FORCED_PROMPT + FORCED_STEPS
    tokens = torch.randint(problem.config.vocab_size, size, generator=generator).to(problem.team.device)
    yield session.prefill(tokens[:, :FORCED_PROMPT], session.prompts(FORCED_PROMPT)).clone()
    for place in range(FORCED_PROMPT, size[1]):
        positions = torch.full((problem.batch,), place, device=tokens.device)
        yield session.decode(tokens[:, place].contiguous(), positions).clone()
