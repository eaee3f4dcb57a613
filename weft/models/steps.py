"""Time of a model's step: the launches of its recipe, each predicted by ``weft.costs``, and their sum.

A step is (batch, length, new), as in ``weft bench model``: ``batch`` sequences that have ``length`` tokens after it, ``new`` of
which it computes; decoding has new = 1. A fourth number, queries: a decode step verifies that many tokens of each sequence. All
ranks are alike. The launches follow weft/parallel; what recipes change is in ``weft.costs.recipes``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from weft.costs.gpu import named
from weft.costs.predicted import predict
from weft.costs.recipes import FUSED_NORM, Launch, Layer, Pass, changes, gathered, is_fp8
from weft.models.config import DecoderConfig
from weft.models.layer_sizes import layer_of, mixture_of
from weft.models.step_costs import StepCosts, fitted
from weft.runtime.arithmetic import cdiv

# A step with drafts takes 0.15 ms longer than its launches, and 5.2 us for each row: look-up, acceptance and attention to keys
# of neighbouring rows together, by seven steps of Qwen3-32B on two H200s and 8B on one, in bytes at the memory's rate
# (benchmarks/lab/h200-x2-speculation.json, h200-planned-steps.json).
DRAFTING, DRAFTED = 640 << 20, 22 << 20
# Of gated delta nets in decode steps, by gated_delta_net_step on one H200 (benchmarks/lab/h200-delta-steps.json): factor of the
# time of states, share of it for each token more, and the least that a token takes, in bytes at the memory's rate.
STATES, TOKEN, CHAIN = 1.25, 0.26, 6 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Predicted time of a launch, all of its calls in a step together. error: relative."""

    launch: Launch
    seconds: float
    error: float
    design: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Predicted time of a step.

    error  relative: about two thirds of steps are expected within seconds * (1 ± error)
    parts  the largest first
    """

    seconds: float
    error: float
    parts: tuple[Part, ...]
    recipe: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a model lies on GPUs.

    world_size    ranks of a stage
    slices        experts are split by their features, else whole
    spread        the KV cache is spread over the ranks by pages
    quantization  format of the layers' matrices as the model has it or as it is made; None: 16 bits
    cache_bytes   of an element of the KV cache
    stages        that the layers are split over
    """

    world_size: int = 1
    slices: bool = False
    spread: bool = False
    quantization: str | None = None
    cache_bytes: int = 2
    stages: int = 1


def tokens_of(step: Sequence[int]) -> int:
    """Tokens that a step computes."""
    batch, _, new, *queries = step
    return batch * new * (queries[0] if queries else 1)


@lru_cache
def layer_in(config: DecoderConfig, layout: Layout) -> Layer:
    """Layer of ``config`` on a rank."""
    quantized = config.quantized(layout.quantization)
    return layer_of(quantized, layout.world_size, layout.slices, config.dtype.itemsize)


def recipe_of(config: DecoderConfig, tokens: int, layout: Layout, gpu: str) -> str:
    """Recipe of a forward pass in mode "auto"."""
    return changes(layer_in(config, layout), layout.world_size, named(gpu)).recipe(tokens)


def step_time(
    config: DecoderConfig, step: Sequence[int], layout: Layout, gpu: str, costs: StepCosts | None = None,
    recipe: str | None = None,
) -> StepTime:  # fmt: skip
    """Predicted time of a step (batch, length, new) in a CUDA graph.

    costs   fitted ones of whole steps; None: the shipped ones
    recipe  None: the one of mode "auto"
    """
    recipe = recipe or recipe_of(config, tokens_of(step), layout, gpu)
    return _step_time(config, tuple(step), layout, gpu, fitted() if costs is None else costs, recipe)


@lru_cache(4096)
def _step_time(
    config: DecoderConfig, step: tuple[int, ...], layout: Layout, gpu: str, costs: StepCosts, recipe: str
) -> StepTime:
    tokens, parts = tokens_of(step), []
    gathers = tokens <= gathered(layer_in(config, layout), layout.world_size, named(gpu))
    for launch in launches(config, step, layout, recipe, gathers):
        op, world = launch.op, layout.world_size
        made = predict(op, tuple(max(1, int(size)) for size in launch.shape), config.dtype, world, gpu)
        seconds = launch.count * costs.seconds(op, made.seconds, tokens)
        parts.append(Part(launch=launch, seconds=seconds, error=made.error, design=made.design))
    total = sum(part.seconds for part in parts)
    parts.sort(key=lambda part: part.seconds, reverse=True)
    return StepTime(seconds=total, error=costs.error(kind_of(config, step)), parts=tuple(parts), recipe=recipe)


def kind_of(config: DecoderConfig, step: Sequence[int]) -> str:
    """Kind of a step by which error bars are kept."""
    return ("decode" if step[2] == 1 else "prompt") + ("" if config.experts is None else " of experts")


def launches(
    config: DecoderConfig, step: Sequence[int], layout: Layout, recipe: str, gathers: bool = False
) -> Iterator[Launch]:
    """Launches of a step, in the order of a layer. gathers: as of ``Pass``."""
    kinds = Counter(
        (config.attention.window(layer), config.has_state(layer), config.has_experts(layer))
        for layer in range(config.num_hidden_layers)
    )
    of = _Layer(config, step, layout, recipe, gathers)
    batch = of.tokens if step[2] == 1 else of.batch  # rows of logits
    for (window, linear, experts), count in kinds.items():
        for one in (*of.attention(window, linear), *(of.mixture() if experts else of.mlp())):
            yield one._replace(count=one.count * count)
    yield Launch("embedding", "memory", (2 * of.tokens * of.hidden * of.item,))
    yield Launch("last norm", *of.norm_before_head(batch))
    columns = cdiv(config.vocab_size, layout.world_size)
    yield Launch("head", "matmul", (batch, columns, of.hidden))
    yield Launch("choice", "memory", (batch * columns * of.item,))
    if len(step) > 3:
        yield Launch("drafts and acceptance", "memory", (DRAFTING + DRAFTED * of.tokens,))
    if layout.world_size > 1:
        yield Launch("choice over ranks", "all_gather", (16 * layout.world_size * batch,))


class _Layer:
    """Launches of one layer of a step."""

    def __init__(
        self, config: DecoderConfig, step: Sequence[int], layout: Layout, recipe: str, gathers: bool = False
    ) -> None:
        self.config, self.layout = config.quantized(layout.quantization), layout
        self.batch, self.length, self.new = step[:3]
        self.tokens, self.world = tokens_of(step), layout.world_size
        self.hidden, self.item = config.hidden_size, config.dtype.itemsize
        self.heads = cdiv(config.num_attention_heads, self.world)
        self.kv_heads = max(config.num_key_value_heads // self.world, 1)
        layer = layer_in(config, layout)
        self.of = Pass(recipe=recipe, tokens=self.tokens, world_size=self.world, layer=layer, gathers=gathers)
        # Of projections of gated delta nets and gated attention, which no 4 bits are made for.
        first = layer if is_fp8(layer.variant) else layer._replace(variant="")
        self.first_of = replace(self.of, layer=first)

    def norm_before_head(self, rows: int) -> tuple[str, tuple[float, ...]]:
        if self.world > 1 and self.of.recipe == FUSED_NORM:
            return "all_reduce_rms_norm", (rows, self.hidden)
        return "memory", (4 * rows * self.hidden * self.item,)

    # --- attention ---------------------------------------------------------------------------------------------------

    def attention(self, window: int | None, linear: bool) -> Iterator[Launch]:
        config = self.config
        yield self.of.norm()
        if linear:
            yield from self._delta_net()
            return
        if config.attention.latent is not None:
            yield from self._latent(window)
            return
        gates = self.heads * config.head_dim if config.attention.gated else 0
        width = (self.heads + 2 * self.kv_heads) * config.head_dim + gates
        yield (self.first_of if gates else self.of).columns("qkv", width)
        # A decode step of one token of a sequence multiplies by them as it attends.
        if gates and (self.tokens > self.batch or (self.layout.spread and self.world > 1)):
            yield Launch("gates", "memory", (3 * self.tokens * gates * self.item,))
        yield from self._attend(window, width - gates, config.head_dim)
        yield self.of.rows("o", self.heads * config.head_dim)

    def _attend(self, window: int | None, width: float, dim: int) -> Iterator[Launch]:
        seen = min(window or self.length, self.length)
        if self.new == 1:
            share = self.layout.cache_bytes / self.item
            if self.layout.spread and self.world > 1:
                heads = self.config.num_attention_heads, self.config.num_key_value_heads
                yield Launch("queries", "memory", (2 * self.tokens * width * self.item,))
                yield Launch("all queries", "all_gather", (self.tokens * heads[0] * dim * self.item,))
                yield Launch("attention", "sharded_decode_attention", (self.batch, *heads, dim, max(1, seen * share)))
                return
            if self.tokens > self.batch:  # rows that attend to keys of neighbouring rows
                yield Launch("queries and keys", "memory", (2 * self.tokens * width * self.item,))
            yield Launch("attention", "decode_attention", (self.batch * self.kv_heads, max(1, seen * share), dim))
            return
        yield Launch("queries and keys", "memory", (2 * self.tokens * width * self.item,))
        shape = self._side(window), self.batch * self.heads, self.kv_heads, dim
        yield Launch("attention", "paged_prefill_attention", shape)

    def _side(self, window: int | None) -> float:
        """Tokens of a prompt by itself with as many pairs of a token and one that it sees, after cached ones."""
        before, window = self.length - self.new, window or self.length
        full = max(0, self.length - max(window, before))  # new tokens that see a whole window
        growing = self.new - full
        return max(1, growing * (2 * before + growing) + 2 * full * window) ** 0.5

    def _latent(self, window: int | None) -> Iterator[Launch]:
        latent = self.config.attention.latent
        o = self.heads * latent.v_head_dim
        columns = latent.parameters(self.hidden, self.heads) / self.hidden - o
        yield self.of.columns("latent projections", columns)
        yield Launch("latent norms", "memory", (4 * self.tokens * latent.width * self.item,))
        if self.new == 1:
            yield Launch("attention", "memory", (self.batch * self.length * latent.width * self.item,))
        else:
            dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
            shape = self._side(window), self.batch * self.heads, self.heads, dim
            yield Launch("attention", "paged_prefill_attention", shape)
        yield self.of.rows("o", o)

    def _delta_net(self) -> Iterator[Launch]:
        linear, state = self.config.linear_attention, 4
        width = linear.parameters / self.world
        values = linear.value_heads * linear.value_dim / self.world
        if is_fp8(self.of.layer.variant):  # gates of all heads stay in 16 bits, and so do the norm's rows
            heads = 2 * linear.value_heads
            width -= heads / self.world
            yield Launch("rows in fp8", "memory", (self.tokens * self.hidden * (self.item + 1),))
            yield Launch("gates", "matmul", (self.tokens, heads, self.hidden))
        yield self.first_of.columns("qkv and gates", width - values)
        states = self.batch * values * linear.key_dim * state * 2
        inputs = 2 * self.tokens * width * self.item
        if self.new == 1:
            # Of drafts half are right on average, and pending in the next step.
            more = 1.5 * (self.tokens / self.batch - 1)
            moved = CHAIN + STATES * states + more * max(CHAIN, TOKEN * states)
            yield Launch("gated delta net", "memory", (moved + inputs,))
        else:
            yield Launch("convolution", "memory", (inputs,))
            yield Launch("delta rule", "memory", (STATES * states + inputs,))
            yield Launch("parts of projections", "memory", (inputs,), 2)
            yield Launch("gated norm", "memory", (3 * self.tokens * values * self.item,))
        yield self.of.rows("o", values)

    # --- feed-forward ------------------------------------------------------------------------------------------------

    def mlp(self) -> Iterator[Launch]:
        yield self.of.norm()
        yield from self.of.dense(cdiv(self.config.intermediate_size, self.world))

    def mixture(self) -> Iterator[Launch]:
        yield self.of.norm()
        yield from self.of.experts(mixture_of(self.config, self.world, self.layout.slices, self.item))
