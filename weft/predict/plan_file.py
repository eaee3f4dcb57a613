"""A serving plan as it is printed and written: decisions with predicted time, error bar and reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from weft.costs.recipes import changes
from weft.engine.config import EngineConfig
from weft.engine.followed import OPTIONS, SIZES
from weft.engine.sizes import decode_buckets
from weft.models.steps import layer_in, step_time
from weft.predict.serving import Asked, Outlook, cache_reason, decode_step
from weft.runtime.arithmetic import cdiv

# Candidates that are listed beside the best one.
LISTED = 5
RECIPES = {
    "fused_norm": "replicated tokens, sums over ranks in the next norm",
    "replicated": "replicated tokens, sums over ranks in the GEMM",
    "sequence_parallel": "tokens split over ranks, GEMMs overlapped with their transport",
}


class Decision(NamedTuple):
    """One choice of a plan. seconds, error: predicted with it; None: no time is."""

    what: str
    value: str
    reason: str
    seconds: float | None = None
    error: float | None = None


def engine_of(asked: Asked, best: Outlook) -> EngineConfig:
    """Options of each server."""
    layout, engine, load = best.candidate.layout, asked.engine, asked.load
    entry = engine.page_size * (layout.world_size if layout.spread else 1)
    affordable = (best.memory.free - best.max_batch * best.memory.slot) // best.memory.page
    pages = min(1 + best.max_batch * cdiv(engine.max_seq_len, entry), affordable)
    speculative = None
    if best.candidate.drafts:
        speculative = {"method": load.drafts.method, "num_speculative_tokens": best.candidate.drafts}
    layouts = None
    if asked.config.experts is not None and layout.world_size > 1:
        layouts = "slices" if layout.slices else "whole"
    return EngineConfig(
        mode="auto",
        expert_layout=layouts,
        max_seq_len=engine.max_seq_len,
        max_batch=best.max_batch,
        page_size=engine.page_size,
        pages=int(pages),
        kv_cache_dtype=engine.kv_cache_dtype,
        quantization=engine.quantization,
        chunk_tokens=engine.chunk_tokens,
        mixed_chunk_tokens=engine.mixed_chunk_tokens,
        context_parallel=layout.spread if layout.world_size > 1 else None,
        pipeline_parallel=layout.stages,
        speculative=speculative,
    )


def decode_steps(asked: Asked, best: Outlook) -> list[dict[str, Any]]:
    """Decode steps of all batch sizes at the load's context."""
    steps = []
    for batch in decode_buckets(best.max_batch):
        one, seconds = decode_step(asked.config, best.candidate, asked.cluster.gpu.gpu, batch, asked.load.context)
        steps.append({"batch": batch, "length": asked.load.context, "seconds": round(seconds, 7), "error": one.error})
    return steps


def recipes(asked: Asked, best: Outlook, most: int) -> list[dict[str, Any]]:
    """Recipes by the tokens of a pass, with the time of the smallest: a decode step or a prompt."""
    layout, gpu, parts = best.candidate.layout, asked.cluster.gpu, []
    of = changes(layer_in(asked.config, layout), layout.world_size, gpu)
    for begin in sorted({1, of.fused_norm + 1, of.sharded}):
        name = of.recipe(begin)
        if begin <= most and not (parts and parts[-1]["recipe"] == name):
            step = (1, asked.load.context, 1) if begin == 1 else (1, begin, begin)
            made = step_time(asked.config, step, layout, gpu.gpu)
            parts.append({
                "from_tokens": begin, "recipe": name, "reason": RECIPES[name], "seconds": round(made.seconds, 7),
                "error": made.error,
            })  # fmt: skip
    return parts


def decisions(asked: Asked, every: Sequence[Outlook]) -> Iterator[Decision]:
    """Each decision and its reason: the best candidate beside the best one with another value."""
    best, load = every[0], asked.load
    candidate, layout = best.candidate, best.candidate.layout
    times = best.token_seconds, best.error

    def beside(same: Any) -> str:
        """Text on the best candidate for which ``same(candidate)`` is False."""
        other = next((one for one in every if not same(one.candidate)), None)
        if other is None:
            return "the only one that the model and these GPUs allow"
        if other.refused:
            return f"{other.candidate} does not fit: {other.refused}"
        if load.concurrency is not None:
            return f"{best.tokens_per_second:,.0f} tokens/s, with {other.candidate} {other.tokens_per_second:,.0f}"
        late = ", which is overloaded" if other.overloaded else "" if other.meets(load) else ", which misses a target"
        return f"{_ms(best.token_seconds)} a token, with {other.candidate} {_ms(other.token_seconds)}{late}"

    reason = beside(lambda one: one.replicas == candidate.replicas)
    if idle := asked.cluster.count - candidate.replicas * candidate.ranks:
        reason += f"; {idle} of {asked.cluster.count} GPUs stay idle"
    yield Decision("servers", str(candidate.replicas), reason, *times)
    yield Decision(
        "tensor-parallel ranks", str(layout.world_size),
        beside(lambda one: one.layout.world_size == layout.world_size), *times,
    )  # fmt: skip
    yield Decision("stages", str(layout.stages), beside(lambda one: one.layout.stages == layout.stages), *times)
    if asked.config.experts is not None and layout.world_size > 1:
        value = "slices of all on each rank" if layout.slices else "whole, by ranks"
        yield Decision("experts", value, beside(lambda one: one.layout.slices == layout.slices), *times)
    if layout.world_size > 1:
        value = "spread by pages" if layout.spread else "split by heads"
        reason = beside(lambda one: one.layout.spread == layout.spread)
        yield Decision("KV cache", value, f"{reason}; {cache_reason(asked, candidate)}", *times)
    if load.drafts is not None:
        tokens = load.drafts.tokens(candidate.drafts)
        reason = f"{tokens:.2f} tokens a step; {beside(lambda one: one.drafts == candidate.drafts)}"
        yield Decision("drafts", str(candidate.drafts), reason, best.decode_seconds, best.error)
    reason = f"{best.batch} decode at once in the mean, and the cache has room"
    yield Decision("batch slots", str(best.max_batch), reason, best.decode_seconds, best.error)
    engine = engine_of(asked, best)
    share = engine.pages * best.memory.page / best.memory.total
    reason = f"{engine.max_batch} sequences of up to {engine.max_seq_len:,} tokens, or what memory allows"
    yield Decision("pages", f"{engine.pages:,} of {engine.page_size} tokens, {share:.0%} of memory", reason)


def content_of(asked: Asked, every: Sequence[Outlook], model: str, load: dict[str, Any]) -> dict[str, Any]:
    """Content of a plan's file."""
    best, config = every[0], asked.config
    engine = engine_of(asked, best)
    options = {name: getattr(engine, name) for name in OPTIONS}
    if engine.speculative is not None:
        options["speculative"] = {
            "method": engine.speculative.method, "num_speculative_tokens": engine.speculative.num_speculative_tokens,
        }  # fmt: skip
    return {
        "model": {"name": model, **{name: getattr(config, name) for name in SIZES}},
        "gpus": {"gpu": asked.cluster.gpu.gpu, "count": asked.cluster.count},
        "load": load,
        "servers": best.candidate.replicas,
        "server": {"world_size": best.candidate.ranks, "engine": options},
        "predicted": predicted(best),
        "decode_steps": decode_steps(asked, best),
        "recipes": recipes(asked, best, engine.chunk_tokens),
        "decode_parts": [
            {"what": part.launch.what, "op": part.launch.op, "seconds": round(part.seconds, 7), "error": part.error}
            for part in best.decode.parts
        ],
        "decisions": [decision._asdict() for decision in decisions(asked, every)],
        "memory": {
            "total": best.memory.total,
            "weights": best.memory.weights,
            "activations": best.memory.activations,
            "cache": engine.pages * best.memory.page,
        },
        "candidates": [{"candidate": str(one.candidate), **predicted(one)} for one in every[:LISTED]],
    }


def predicted(one: Outlook) -> dict[str, Any]:
    """Predicted times of a candidate."""
    if one.refused:
        return {"refused": one.refused}
    return {
        "batch": one.batch,
        "decode_seconds": round(one.decode_seconds, 7),
        "token_seconds": round(one.token_seconds, 7),
        "first_token_seconds": round(one.first_token_seconds, 6),
        "tokens_per_second": round(one.tokens_per_second, 1),
        "error": one.error,
        "overloaded": one.overloaded,
    }


def lines(asked: Asked, every: Sequence[Outlook], model: str) -> Iterator[str]:
    """A plan as text."""
    best, load = every[0], asked.load
    yield f"{model} on {asked.cluster}: {best.candidate}"
    yield (
        f"predicted: {_ms(best.token_seconds)} a token ± {best.error:.0%}, first token after {_ms(best.first_token_seconds)}, "
        f"{best.tokens_per_second:,.0f} tokens/s in all"
    )
    for name, value, target in (
        ("a token", best.token_seconds, load.token_seconds),
        ("the first token", best.first_token_seconds, load.first_token_seconds),
    ):
        if target is not None:
            yield f"target:    {_ms(target)} for {name}: {'met' if value <= target else 'missed by every candidate'}"
    if best.overloaded:
        yield "overloaded: requests arrive faster than any candidate answers them; more GPUs are needed"
    memory, engine = best.memory, engine_of(asked, best)
    yield (
        f"memory:    {memory.weights / 1e9:.1f} GB weights, {memory.activations / 1e9:.1f} activations, "
        f"{engine.pages * memory.page / 1e9:.1f} cache, of {memory.total / 1e9:.1f} GB a GPU"
    )
    for decision in decisions(asked, every):
        yield f"  {decision.what}: {decision.value} ({decision.reason})"
    for part in recipes(asked, best, engine.chunk_tokens):
        time = f"{_ms(part['seconds'])} ± {part['error']:.0%}"
        yield f"  from {part['from_tokens']} tokens: {part['recipe']}, {time} ({part['reason']})"
    if best.decode is not None:
        shares = ", ".join(
            f"{part.launch.what} {part.seconds / best.decode.seconds:.0%}" for part in best.decode.parts[:4]
        )
        yield f"  a decode step of {best.batch} takes {_ms(best.decode_seconds)}: {shares}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
