"""Choice of how to serve a model: ways to split it, and their predicted steps under a load.

A request costs its prompt's passes once, and a share of every decode step. In the steady state b sequences decode, of which
b / answer are replaced in a step, and a step takes the decode step's time and that of these prompts. With arrivals b follows
from the rate; with a given concurrency b is that, as far as memory goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from weft.engine.config import EngineConfig, plan_cache
from weft.engine.sizes import decode_buckets
from weft.layers.attention import check_heads
from weft.models.config import DecoderConfig
from weft.models.steps import Layout, StepTime, step_time
from weft.predict.cluster import Cluster, Memory, memory_of
from weft.predict.load import Load
from weft.runtime.arithmetic import cdiv

# µs between two stages of a pipeline within a node.
CROSSING_US = 20.0
# Room for more sequences and tokens than the mean when requests arrive by chance.
ROOM = 2.0
# Steps after which b under arrivals is settled.
ROUNDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to serve. replicas: number of servers; drafts: of a step."""

    layout: Layout
    replicas: int = 1
    drafts: int = 0

    @property
    def ranks(self) -> int:
        """GPUs of one server."""
        return self.layout.world_size * self.layout.stages

    def __str__(self) -> str:
        layout = self.layout
        parts = [f"{self.replicas} x " * (self.replicas > 1) + f"tensor-parallel {layout.world_size}"]
        parts += [f"{layout.stages} stages"] if layout.stages > 1 else []
        parts += ["slices of experts"] if layout.slices else []
        parts += ["cache spread by pages"] if layout.spread else []
        parts += [f"{self.drafts} drafts"] if self.drafts else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Prediction for one candidate.

    batch           sequences that decode at once in a server, in the mean
    max_batch       sequences for which there are slots and pages
    decode, prompt  steps: the decode step of ``batch`` sequences, and the last pass of a mean prompt
    token_seconds   between two tokens of an answer, prompts of other requests between them included
    first_token_seconds  from a request to its first token, with the wait for other prompts
    tokens_per_second    of answers, all servers together
    error           relative, of the times
    overloaded      requests arrive faster than they are answered
    """

    candidate: Candidate
    memory: Memory
    batch: int
    max_batch: int
    decode: StepTime | None = None
    decode_seconds: float = math.inf
    prompt_seconds: float = math.inf
    token_seconds: float = math.inf
    first_token_seconds: float = math.inf
    tokens_per_second: float = 0.0
    error: float = 0.0
    overloaded: bool = False
    refused: str = ""

    def meets(self, load: Load) -> bool:
        """True if it runs and is within the targets."""
        return (
            not self.refused
            and not self.overloaded
            and (load.token_seconds is None or self.token_seconds <= load.token_seconds)
            and (load.first_token_seconds is None or self.first_token_seconds <= load.first_token_seconds)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Question of a plan. engine: options that are given, with max_seq_len known."""

    config: DecoderConfig
    cluster: Cluster
    load: Load
    engine: EngineConfig

    @property
    def cache_bytes(self) -> int:
        return 1 if self.engine.kv_cache_dtype == "fp8" else self.config.dtype.itemsize


def candidates(asked: Asked) -> Iterator[Candidate]:
    """Ways that the model allows on these GPUs."""
    config, count = asked.config, asked.cluster.count
    quantization = asked.engine.quantization
    if quantization is None and config.quantization is not None:
        quantization = config.quantization.format.name
    lengths = [0]
    if asked.load.drafts is not None:
        lengths += [k for k in (1, 2, 4, 8) if k <= asked.load.drafts.most]
    for world_size in (one for one in range(1, count + 1) if _divides(config, one)):
        for stages in (one for one in (1, 2, 4, 8) if world_size * one <= count and one <= config.num_hidden_layers):
            if stages > 1 and config.linear_attention is not None:
                continue
            for slices, spread in _splits(config, world_size, stages):
                layout = Layout(
                    world_size=world_size, stages=stages, slices=slices, spread=spread, quantization=quantization,
                    cache_bytes=asked.cache_bytes,
                )  # fmt: skip
                for drafts in lengths if stages == 1 else [0]:
                    yield Candidate(layout=layout, replicas=count // (world_size * stages), drafts=drafts)


def _divides(config: DecoderConfig, world_size: int) -> bool:
    """True if the ranks can have equal shares of heads, features or experts, and of the vocabulary."""
    try:
        check_heads(config.num_attention_heads, config.num_key_value_heads, world_size)
    except ValueError:
        return False
    sizes = [config.intermediate_size]
    if config.experts is not None:
        sizes = [config.experts.num_experts, config.experts.intermediate_size]
    return any(size % world_size == 0 for size in sizes)


def _splits(config: DecoderConfig, world_size: int, stages: int) -> Iterator[tuple[bool, bool]]:
    """(slices of experts, cache spread by pages) that a world size allows."""
    if world_size == 1:
        yield False, False
        return
    slices = [False]
    if config.experts is not None:
        whole = config.experts.num_experts % world_size == 0
        sliced = config.experts.intermediate_size % world_size == 0
        slices = [False] * whole + [True] * sliced
    for one in slices:
        for spread in (False, True) if stages == 1 else (False,):
            yield one, spread


def outlook(asked: Asked, candidate: Candidate) -> Outlook:
    """Prediction of a candidate under the load."""
    config, load, engine, layout = asked.config, asked.load, asked.engine, candidate.layout
    memory = memory_of(
        config, layout, asked.cluster, page_size=engine.page_size, chunk_tokens=engine.chunk_tokens,
        fraction=engine.memory_fraction,
    )  # fmt: skip
    entry = engine.page_size * (layout.world_size if layout.spread else 1)
    pages = memory.free // memory.page
    # Memory is planned for twice the mean request: longer ones wait, or give their pages away.
    typical = cdiv(round(ROOM * (load.prompt.mean + load.answer.mean)), entry)
    most = min(engine.max_batch, (memory.free - memory.page) // (max(1, typical) * memory.page + memory.slot))
    if pages - 1 < cdiv(load.longest, entry) or most < 1:
        room = max(0, pages - 1) * entry
        why = f"weights take {memory.weights / 1e9:.1f} GB of {memory.total / 1e9:.1f}, and {room:,} tokens of cache are left"
        return Outlook(candidate=candidate, memory=memory, batch=0, max_batch=0, refused=why)
    prompt = _prompt_seconds(asked, candidate)
    batch, overloaded = _batch(asked, candidate, prompt, most)
    decode, seconds = _decode(asked, candidate, batch)
    tokens = 1.0 if load.drafts is None else load.drafts.tokens(candidate.drafts)
    per_step = seconds + batch * tokens / load.answer.mean * prompt
    token_seconds = per_step / tokens
    busy = batch * tokens / load.answer.mean * prompt / per_step
    # A prompt waits for half a step, and for prompts before it as in a queue of one server.
    first = prompt + seconds / 2 + min(busy, 0.99) * prompt / (2 * (1 - min(busy, 0.99)))
    return Outlook(
        candidate=candidate,
        memory=memory,
        batch=batch,
        max_batch=_slots(engine, batch, most, load),
        decode=decode,
        decode_seconds=seconds,
        prompt_seconds=prompt,
        token_seconds=token_seconds,
        first_token_seconds=first,
        tokens_per_second=_tokens_per_second(load, candidate, batch, token_seconds, overloaded),
        error=decode.error,
        overloaded=overloaded,
    )


def _tokens_per_second(load: Load, candidate: Candidate, batch: int, token_seconds: float, overloaded: bool) -> float:
    """Tokens a second of all servers: as many as requests ask for, or as the servers can."""
    if load.concurrency is not None:
        return min(load.concurrency, candidate.replicas * batch) / token_seconds
    return candidate.replicas * batch / token_seconds if overloaded else load.arrivals_per_second * load.answer.mean


def _slots(engine: EngineConfig, batch: int, most: int, load: Load) -> int:
    """Bucket of decode steps with room for more than the mean, as far as memory goes."""
    wanted = batch if load.concurrency is not None else math.ceil(ROOM * batch)
    return min(most, next((size for size in decode_buckets(engine.max_batch) if size >= wanted), engine.max_batch))


def _batch(asked: Asked, candidate: Candidate, prompt: float, most: int) -> tuple[int, bool]:
    """(sequences that decode at once in a server, True if requests come faster than they are answered)."""
    load = asked.load
    if load.concurrency is not None:
        return max(1, min(most, cdiv(load.concurrency, candidate.replicas))), False
    tokens = 1.0 if load.drafts is None else load.drafts.tokens(candidate.drafts)
    rate = load.arrivals_per_second / candidate.replicas
    batch = 1.0
    for _ in range(ROUNDS):
        step = _decode(asked, candidate, max(1, round(batch)))[1]
        per_step = step + batch * tokens / load.answer.mean * prompt
        wanted = rate * load.answer.mean * per_step / tokens
        if wanted > most:
            return most, True
        batch = (batch + wanted) / 2
    return max(1, round(batch)), False


def _decode(asked: Asked, candidate: Candidate, batch: int) -> tuple[StepTime, float]:
    """A decode step of ``batch`` sequences, and its time with all stages."""
    return decode_step(asked.config, candidate, asked.cluster.gpu.gpu, batch, asked.load.context)


def decode_step(
    config: DecoderConfig, candidate: Candidate, gpu: str, batch: int, context: int
) -> tuple[StepTime, float]:
    """A decode step of ``batch`` sequences at a mean context, of one stage, and its time with all stages."""
    stages = candidate.layout.stages
    of_stage = replace(config, num_hidden_layers=cdiv(config.num_hidden_layers, stages))
    step = (cdiv(batch, stages), context, 1)
    if candidate.drafts:
        step = (*step, candidate.drafts + 1)
    one = step_time(of_stage, step, candidate.layout, gpu)
    return one, stages * (one.seconds + (CROSSING_US * 1e-6 if stages > 1 else 0.0))


def _prompt_seconds(asked: Asked, candidate: Candidate) -> float:
    """Passes of a mean prompt, in chunks, after its shared tokens."""
    config, load, engine = asked.config, asked.load, asked.engine
    before = round(load.prompt.mean - load.new_tokens)
    return prompt_seconds(
        config, candidate, asked.cluster.gpu.gpu, max(1, round(load.new_tokens)), before, engine.mixed_chunk_tokens
    )


def prompt_seconds(
    config: DecoderConfig, candidate: Candidate, gpu: str, new: int, before: int, chunk_tokens: int
) -> float:
    """Passes of ``new`` tokens of one prompt after ``before`` cached ones, in chunks."""
    total, at = 0.0, before
    while new > 0:
        chunk = min(new, chunk_tokens)
        at, new = at + chunk, new - chunk
        total += step_time(config, (1, at, chunk), candidate.layout, gpu).seconds
    return total


def ranked(asked: Asked) -> list[Outlook]:
    """Outlooks of all candidates, the best first: within the targets, then by speed.

    Of arrivals the time of a token decides, of a given concurrency the tokens a second.
    """
    every = [outlook(asked, candidate) for candidate in candidates(asked)]

    def rank(one: Outlook) -> tuple:
        speed = -one.tokens_per_second if asked.load.concurrency is not None else one.token_seconds
        simple = one.candidate.layout.spread, one.candidate.layout.slices, one.candidate.layout.stages
        return bool(one.refused), one.overloaded, not one.meets(asked.load), round(speed, 9), simple

    return sorted(every, key=rank)


def cache_reason(asked: Asked, candidate: Candidate) -> str:
    """Reason of the engine's own rule for where the cache lies."""
    ranks = candidate.layout.world_size
    return plan_cache(asked.engine, asked.config, ranks).reason
