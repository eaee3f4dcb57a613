"""Time of a model's step: the launches of its recipe, each predicted by ``weft.costs``, and their sum.

A step is (batch, length, new), as in ``weft bench model``: ``batch`` sequences that have ``length`` tokens after it, ``new`` of
which it computes; decoding has new = 1. A fourth number, queries: a decode step verifies that many tokens of each sequence. All
ranks are alike. The launches follow weft/parallel: ``FusedNorm`` for few tokens,
``Replicated`` for more, ``SequenceParallel`` from ``SHARDED_TOKENS`` on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from weft.costs.predicted import predict
from weft.models.config import DecoderConfig
from weft.ops.collectives.collective import of_world
from weft.parallel.thresholds import FUSED_NORM_TOKENS, splits_tokens
from weft.predict.step_costs import FEW_ROWS, StepCosts, fitted
from weft.runtime.arithmetic import cdiv

# Small kernels of a step with drafts: look-up, positions, acceptance, slots. An estimate.
DRAFTING = 8
# Of gated delta nets, by decode steps of Qwen3.6-27B on two H200s, 8.04 to 17.06 ms at 1 to 128 sequences: factor of the time
# of states, which the kernel reads more slowly than the memory gives them, and small launches of torch.
STATES, PARTS = 1.5, 5
# Names of quantized weights -> variant of the ops.
VARIANTS = {
    "fp8": "block_fp8", "fp8_per_block": "block_fp8", "fp8_per_channel": "channel_fp8", "mxfp4": "four_bit", "int4": "four_bit",
}  # fmt: skip


class Launch(NamedTuple):
    """Kernel, or op, of a step.

    op, shape  as ``weft.costs.predicted.predict`` takes them
    count      number of times in a step
    """

    what: str
    op: str
    shape: tuple[float, ...]
    count: float = 1


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

    @property
    def variant(self) -> str:
        return "" if self.quantization is None else f"+{VARIANTS[self.quantization]}"


def tokens_of(step: Sequence[int]) -> int:
    """Tokens that a step computes."""
    batch, _, new, *queries = step
    return batch * new * (queries[0] if queries else 1)


def recipe_of(tokens: int, world_size: int) -> str:
    """Recipe of a forward pass in mode "auto"."""
    if world_size > 1 and splits_tokens(tokens):
        return "sequence_parallel"
    return "fused_norm" if tokens <= of_world(FUSED_NORM_TOKENS, world_size) else "replicated"


def step_time(
    config: DecoderConfig, step: Sequence[int], layout: Layout, gpu: str, costs: StepCosts | None = None,
    recipe: str | None = None,
) -> StepTime:  # fmt: skip
    """Predicted time of a step (batch, length, new) in a CUDA graph.

    costs   fitted ones of whole steps; None: the shipped ones
    recipe  None: the one of mode "auto"
    """
    recipe = recipe or recipe_of(tokens_of(step), layout.world_size)
    return _step_time(config, tuple(step), layout, gpu, fitted() if costs is None else costs, recipe)


@lru_cache(4096)
def _step_time(
    config: DecoderConfig, step: tuple[int, ...], layout: Layout, gpu: str, costs: StepCosts, recipe: str
) -> StepTime:
    tokens, parts = tokens_of(step), []
    for launch in launches(config, step, layout, recipe):
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


def launches(config: DecoderConfig, step: Sequence[int], layout: Layout, recipe: str | None = None) -> Iterator[Launch]:
    """Launches of a step, in the order of a layer. recipe: None: the one of mode "auto"."""
    kinds: dict[tuple, int] = {}
    for layer in range(config.num_hidden_layers):
        linear = config.linear_attention is not None and config.linear_attention.layers[layer]
        experts = config.experts is not None and config.experts.in_layer(layer)
        kind = (config.attention.window(layer), linear, experts)
        kinds[kind] = kinds.get(kind, 0) + 1
    of = _Layer(config, step, layout, recipe or recipe_of(tokens_of(step), layout.world_size))
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
        yield Launch("drafts and acceptance", "memory", (of.batch * columns * of.item,), DRAFTING)
    if layout.world_size > 1:
        yield Launch("choice over ranks", "all_gather", (16 * layout.world_size * batch,))


class _Layer:
    """Launches of one layer of a step."""

    def __init__(self, config: DecoderConfig, step: Sequence[int], layout: Layout, recipe: str) -> None:
        self.config, self.layout = config, layout
        self.batch, self.length, self.new = step[:3]
        self.tokens, self.world = tokens_of(step), layout.world_size
        self.recipe = recipe
        self.hidden, self.item = config.hidden_size, config.dtype.itemsize
        self.heads = cdiv(config.num_attention_heads, self.world)
        self.kv_heads = max(config.num_key_value_heads // self.world, 1)
        self.w = layout.variant

    # --- norms and the sums over ranks -------------------------------------------------------------------------------

    def norm(self) -> Launch:
        """Norm of a layer's input, with the sum over ranks where the recipe has it there."""
        if self.recipe == "fused_norm" and self.world > 1:
            return Launch("all-reduce + norm", "all_reduce_rms_norm", (self.tokens, self.hidden))
        rows = cdiv(self.tokens, self.world) if self.recipe == "sequence_parallel" else self.tokens
        # Partials of split-K in fp32, two in the mean, or the sum; the residual, read and written; the normed rows.
        read = 8 if self.recipe == "fused_norm" else self.item
        return Launch("norm", "memory", (rows * self.hidden * (read + 3 * self.item),))

    def norm_before_head(self, rows: int) -> tuple[str, tuple[float, ...]]:
        if self.world > 1 and self.recipe == "fused_norm":
            return "all_reduce_rms_norm", (rows, self.hidden)
        return "memory", (4 * rows * self.hidden * self.item,)

    def columns(self, what: str, width: float) -> Launch:
        """GEMM whose weight is split by rows: all ranks have all tokens, or gather them."""
        op = "all_gather_matmul" if self.recipe == "sequence_parallel" and self.world > 1 else "matmul"
        return Launch(what, op + self.w, (self.tokens, width, self.hidden))

    def rows(self, what: str, depth: float) -> Launch:
        """GEMM whose weight is split by columns, and the sum over the ranks unless the next norm has it."""
        op = {"sequence_parallel": "matmul_reduce_scatter", "replicated": "matmul_all_reduce"}.get(
            self.recipe, "matmul"
        )
        op = "matmul" if self.world == 1 else op
        return Launch(what, op + self.w, (self.tokens, self.hidden, depth))

    # --- attention ---------------------------------------------------------------------------------------------------

    def attention(self, window: int | None, linear: bool) -> Iterator[Launch]:
        config = self.config
        yield self.norm()
        if linear:
            yield from self._delta_net()
            return
        if config.attention.latent is not None:
            yield from self._latent(window)
            return
        gates = self.heads * config.head_dim if config.attention.gated else 0
        width = (self.heads + 2 * self.kv_heads) * config.head_dim + gates
        yield self.columns("qkv", width)
        if gates:
            yield Launch("gates", "memory", (3 * self.tokens * gates * self.item,), 4)
        yield from self._attend(window, width - gates, config.head_dim)
        yield self.rows("o", self.heads * config.head_dim)

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
        # Causal, with `before` cached tokens: pairs of a token and one that it sees, as of a square of that many.
        before = self.length - self.new
        pairs = self.new * (2 * before + self.new) if window is None else 2 * self.new * seen - seen * seen
        side = max(1.0, max(pairs, 1)) ** 0.5
        yield Launch("attention", "paged_prefill_attention", (side, self.batch * self.heads, self.kv_heads, dim))

    def _latent(self, window: int | None) -> Iterator[Launch]:
        latent = self.config.attention.latent
        o = self.heads * latent.v_head_dim
        columns = latent.parameters(self.hidden, self.heads) / self.hidden - o
        yield self.columns("latent projections", columns)
        yield Launch("latent norms", "memory", (4 * self.tokens * latent.width * self.item,))
        if self.new == 1:
            yield Launch("attention", "memory", (self.batch * self.length * latent.width * self.item,))
        else:
            dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
            yield Launch(
                "attention", "paged_prefill_attention", (self.length, self.batch * self.heads, self.heads, dim)
            )
        yield self.rows("o", o)

    def _delta_net(self) -> Iterator[Launch]:
        linear, state = self.config.linear_attention, 4
        width = linear.parameters / self.world
        values = linear.value_heads * linear.value_dim / self.world
        yield self.columns("qkv and gates", width - values)
        yield Launch("convolution", "memory", (2 * self.tokens * width * self.item,))
        states = self.batch * values * linear.key_dim * state * 2
        yield Launch("delta rule", "memory", (STATES * states + 2 * self.tokens * width * self.item,))
        yield Launch("parts of projections", "memory", (2 * self.tokens * width * self.item,), PARTS)
        yield Launch("gated norm", "memory", (3 * self.tokens * values * self.item,))
        yield self.rows("o", values)

    # --- feed-forward ------------------------------------------------------------------------------------------------

    def mlp(self) -> Iterator[Launch]:
        features = cdiv(self.config.intermediate_size, self.world)
        yield self.norm()
        yield from self._dense(features)

    def _dense(self, features: int) -> Iterator[Launch]:
        if self.tokens <= FEW_ROWS:
            yield Launch("gate, up", f"matmul_silu_mul{self.w}", (self.tokens, features, self.hidden))
        else:
            yield self.columns("gate, up", 2 * features)
            yield Launch("silu", "memory", (3 * self.tokens * features * self.item,))
        yield self.rows("down", features)

    def mixture(self) -> Iterator[Launch]:
        experts = self.config.experts
        held, features = experts.num_experts, experts.intermediate_size
        if self.world > 1 and self.layout.slices:
            features //= self.world
        elif self.world > 1:
            held //= self.world
        shape = (self.tokens, experts.num_experts_per_tok, experts.num_experts, held, self.hidden, features)
        yield self.norm()
        shared = experts.shared_intermediate_size
        if shared:
            yield Launch(
                "shared gate, up", f"matmul_silu_mul{self.w}", (self.tokens, cdiv(shared, self.world), self.hidden)
            )
            yield Launch("shared down", f"matmul{self.w}", (self.tokens, self.hidden, cdiv(shared, self.world)))
        if self.recipe == "sequence_parallel":
            # Tokens of a rank in shapes of ops that move rows.
            of_rank = (cdiv(self.tokens, self.world), *shape[1:])
            yield Launch("router", "matmul_route_schedule", of_rank)
            yield Launch("experts gate, up", f"all_gather_grouped_matmul_silu_mul{self.w}", of_rank)
            yield Launch("experts down", f"grouped_matmul_reduce_scatter{self.w}", of_rank)
            return
        yield Launch("router", "matmul_route_schedule", shape)
        if self.layout.variant in ("+block_fp8", "+channel_fp8"):  # of the projections and of the experts
            yield Launch("rows in fp8", "memory", (self.tokens * self.hidden * (self.item + 1),), 2)
        yield Launch("experts gate, up", f"grouped_matmul_silu_mul{self.w}", shape)
        yield Launch("experts down", f"grouped_matmul{self.w}", shape)
        yield Launch("sum of experts", "moe_sum", shape)
        if self.recipe == "replicated" and self.world > 1:
            yield Launch("all-reduce", "all_reduce", (self.tokens * self.hidden * self.item,))
