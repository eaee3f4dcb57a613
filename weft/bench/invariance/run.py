"""The proof on a rank: one model, an engine for each configuration, and the cost of the mode."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.bench.invariance.answers import (
    Answered,
    Bits,
    Difference,
    Request,
    bits_of,
    compare,
    finished,
    requests_of,
    scored,
)
from weft.bench.invariance.configurations import Configuration
from weft.bench.models.sessions import WeftSession, in_mode
from weft.engine.batch import Batch
from weft.engine.engine import Engine
from weft.engine.runner import Runner
from weft.runtime.graphs import recording

if TYPE_CHECKING:
    from weft.engine.config import EngineConfig
    from weft.models import Decoder, DecoderConfig
    from weft.runtime.team.team import Team

COST_BATCHES, COST_TOKENS, REPLAYS = (1, 32, 128), 1024, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Work of every rank.

    requests, longest, new_tokens, seed  as of ``requests_of``
    cost  a decode step is timed against the default mode
    """

    model: Path | DecoderConfig | None
    engine: EngineConfig
    configurations: tuple[Configuration, ...]
    requests: int
    longest: int
    new_tokens: int
    seed: int = 0
    cost: bool = False


class Outcome(NamedTuple):
    """Result of a configuration: places compared with the first configuration, and differing ones."""

    configuration: str
    compared: int
    differing: int
    first: Difference | None
    seconds: float


class Result(NamedTuple):
    """Result of a world size.

    answers  of the first configuration
    cost     by batch, (default ms, invariant ms)
    """

    outcomes: list[Outcome]
    answers: list[Answered]
    cost: dict[int, tuple[float, float]]


def on_rank(team: Team, asked: Asked) -> Result:
    """Answer the requests in each configuration and compare. Collective; all ranks have the result."""
    first = asked.configurations[0]
    longest = asked.longest + asked.new_tokens + 1
    engine = Engine(asked.model, team, config=first.engine(asked.engine, longest), warn=False)
    requests = requests_of(asked.requests, engine.model.config.vocab_size, asked.longest, asked.new_tokens, asked.seed)
    reference: list[Answered] = []
    outcomes = []
    for index, configuration in enumerate(asked.configurations):
        if index > 0:
            restart(engine, configuration.engine(asked.engine, longest))
        begin, some = time.perf_counter(), requests[: max(1, round(len(requests) * configuration.share))]
        if configuration.finished:
            given = one_pass(engine, some, reference)
        else:
            given = answered(engine, [scored(one) for one in some] if configuration.scored else some)
        if index == 0:
            reference = given
        compared, differing, difference = compare(reference[: len(given)], given)
        outcomes.append(
            Outcome(str(configuration), compared, differing, difference, round(time.perf_counter() - begin, 2))
        )
    cost = {}
    if asked.cost:
        release(engine)
        cost = costs(engine.model)
    return Result(outcomes, reference, cost)


def restart(engine: Engine, config: EngineConfig) -> None:
    """Give the engine a new batch, cache and graphs by another configuration; the model stays."""
    release(engine)
    engine.config = replace(config, max_seq_len=engine.config.max_seq_len)
    engine.batch = Batch(Runner(engine.model, engine.config), engine.config)


def release(engine: Engine) -> None:
    """Free the engine's cache and graphs."""
    engine.settle()
    engine.team.synchronize()
    engine.batch = None
    gc.collect()
    if engine.team.device.type == "cuda":
        torch.cuda.empty_cache()


def answered(engine: Engine, requests: list[Request]) -> list[Answered]:
    """Answers to the requests as bits."""
    from weft.engine.answers import join_pieces

    pieces = engine.answer([one.prompt for one in requests], [one.params for one in requests])
    completions = join_pieces(pieces, len(requests))
    return [bits_of(one, request) for one, request in zip(completions, requests, strict=True)]


def one_pass(engine: Engine, requests: list[Request], reference: list[Answered]) -> list[Answered]:
    """Log-probabilities of the answers by one forward pass over prompt and answer."""
    whole = [finished(one, expected.answer) for one, expected in zip(requests, reference, strict=False)]
    given = []
    for request, one, expected in zip(requests, answered(engine, whole), reference, strict=False):
        begin = len(request.prompt) - 1
        answer = Bits(one.prompt.tokens[begin:], one.prompt.logprobs[begin:], expected.answer.top)
        given.append(Answered(answer, Bits(one.prompt.tokens[:begin], one.prompt.logprobs[:begin])))
    return given


def costs(model: Decoder) -> dict[int, tuple[float, float]]:
    """Milliseconds of a decode step by batch: (in mode "auto", in this mode). Collective."""
    default = in_mode(model, "auto")
    return {batch: (step_ms(default, batch), step_ms(model, batch)) for batch in COST_BATCHES}


def step_ms(model: Decoder, batch: int) -> float:
    """Milliseconds of a decode step as a CUDA graph, the maximum over ranks."""
    session, team = WeftSession(model, batch, COST_TOKENS + 1), model.team
    session.fill_at_random()
    tokens = torch.zeros(batch, dtype=torch.int64, device=team.device)
    positions = torch.full((batch,), COST_TOKENS, dtype=torch.int64, device=team.device)

    def step() -> torch.Tensor:
        return session.choose(session.decode(tokens, positions))

    with torch.inference_mode():
        for _ in range(2):
            step()
        team.synchronize()
        team.barrier()
        graph = torch.cuda.CUDAGraph()
        with recording(graph):
            step()
        graph.replay()
        team.synchronize()
        team.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        team.synchronize()
    milliseconds = max(team.exchange(begin.elapsed_time(end) / REPLAYS))
    del graph
    return round(milliseconds, 4)
