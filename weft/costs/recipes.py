"""Recipes of a forward pass: a layer's launches, their times, and the tokens at which recipes change.

fused_norm         every rank has all tokens, and the next norm adds up over the ranks
replicated         every rank has all tokens, and GEMMs add up over the ranks
sequence_parallel  a rank has 1/W of the tokens between GEMMs, which gather and scatter them
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from weft.costs.fitted import FP8_VARIANTS
from weft.costs.gemms import FEW_ROWS
from weft.costs.gpu import Gpu
from weft.costs.predicted import LOCAL_FIRST, times_of
from weft.plan.memo import remembered
from weft.plan.table import SMALL_M_ROWS
from weft.runtime.arithmetic import cdiv

# Times over the least one up to which no model tells recipes apart.
CLOSE = 1.01
FUSED_NORM, REPLICATED, SEQUENCE_PARALLEL = RECIPES = "fused_norm", "replicated", "sequence_parallel"
# Numbers of tokens at which recipes are compared: steps of decoding, and of prompts as graphs are captured for them.
TOKENS = (1, 32, 128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 8192)
# Most rows of a GEMM that leaves split-K partials, which on one rank a norm may add up.
PARTIAL_ROWS = max(most for _, most in SMALL_M_ROWS.values())


class Launch(NamedTuple):
    """Kernel, or op, of a step.

    op, shape  as ``weft.costs.predicted.predict`` takes them
    count      number of times in a step
    """

    what: str
    op: str
    shape: tuple[float, ...]
    count: float = 1


def is_fp8(variant: str) -> bool:
    """True for the variant of weights, and of rows of their GEMMs, in fp8."""
    return variant.removeprefix("+") in FP8_VARIANTS


class Mixture(NamedTuple):
    """Experts of a rank.

    choices   of a token, of ``experts`` in all
    features  of one of the ``held`` experts on this rank, and of its part of a ``shared`` one
    variant   as of ``Layer``: gpt-oss has quantized experts beside projections of 16 bits
    """

    choices: int
    experts: int
    held: int
    features: int
    shared: int = 0
    variant: str = ""


class Layer(NamedTuple):
    """Sizes of a rank's part of a layer, in most layers of a model.

    qkv       columns of the first projections; o: depth of the last
    features  of a dense MLP; mixture: in its place; gated: the MLP has a gate
    variant   of quantized weights, but of experts, as ``predict`` has it: "+block_fp8"
    """

    hidden: int
    qkv: int
    o: int
    features: int
    mixture: Mixture | None = None
    item: int = 2
    variant: str = ""
    gated: bool = True

    @classmethod
    def dense(cls, hidden: int, world_size: int, item: int = 2) -> Layer:
        """Layer of which only the width is known: the rest as in Llama 3."""
        qkv, features = 3 * hidden // 2, 7 * hidden // 2
        return cls(hidden, cdiv(qkv, world_size), cdiv(hidden, world_size), cdiv(features, world_size), item=item)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Launches of ``tokens`` tokens by a recipe on a rank.

    gathers  "sequence_parallel" gathers rows before an MLP; else its rows stay in the order of their arrival
    """

    recipe: str
    tokens: int
    world_size: int
    layer: Layer
    gathers: bool = False

    def norm(self) -> Launch:
        """Norm of a layer's input, with the sum over ranks where the recipe has it there."""
        hidden, item = self.layer.hidden, self.layer.item
        # Rows of experts stay in 16 bits, for their router.
        in_fp8 = is_fp8(self.layer.variant) and self.layer.mixture is None
        if self.recipe == FUSED_NORM and self.world_size > 1:
            op = "all_reduce_rms_norm+fp8" if in_fp8 else "all_reduce_rms_norm"
            return Launch("all-reduce + norm", op, (self.tokens, hidden))
        rows = cdiv(self.tokens, self.world_size) if self.recipe == SEQUENCE_PARALLEL else self.tokens
        # Partials of split-K in fp32, two in the mean, or the sum; the residual, read and written; the normed rows.
        read = 8 if self.recipe == FUSED_NORM else item
        return Launch("norm", "memory+fp8" if in_fp8 else "memory", (rows * hidden * (read + 3 * item),))

    @property
    def shards(self) -> bool:
        """True if a rank has a part of the tokens between GEMMs."""
        return self.recipe == SEQUENCE_PARALLEL and self.world_size > 1

    def columns(self, what: str, width: float, order: str = "") -> Launch:
        """GEMM whose weight is split by rows: all ranks have all tokens, or gather them.

        order  suffix of the op
        """
        op = "all_gather_matmul" if self.shards else "matmul"
        return Launch(what, op + self.layer.variant + order, (self.tokens, width, self.layer.hidden))

    def rows(self, what: str, depth: float, order: str = "") -> Launch:
        """GEMM whose weight is split by columns, and the sum over the ranks unless the next norm has it.

        order  as of ``columns``
        """
        op = {SEQUENCE_PARALLEL: "matmul_reduce_scatter", REPLICATED: "matmul_all_reduce"}.get(self.recipe, "matmul")
        op = "matmul" if self.world_size == 1 else op
        return Launch(what, op + self.layer.variant + order, (self.tokens, self.layer.hidden, depth))

    def dense(self, features: int) -> Iterator[Launch]:
        """MLP between its norm and the next."""
        hidden, item, variant = self.layer.hidden, self.layer.item, self.layer.variant
        few, fp8, matrices = self.tokens <= FEW_ROWS, is_fp8(variant), 1 + self.layer.gated
        # In other formats a gather and a GEMM take as long as an AG-GEMM in sequence: plans take them, and turn no rows.
        gathers = self.shards and (few or (fp8 and self.gathers))
        order = f"+{LOCAL_FIRST}" if self.shards and fp8 and not gathers else ""
        if gathers:
            yield Launch("all rows", "all_gather", (self.tokens * hidden * item,))
        if gathers and fp8:
            yield Launch("rows in fp8", "memory", (self.tokens * hidden * (item + 1),))
        if few and self.layer.gated:
            yield Launch("gate, up", f"matmul_silu_mul{variant}", (self.tokens, features, hidden))
        else:
            whole = Launch("gate, up", f"matmul{variant}", (self.tokens, matrices * features, hidden))
            yield whole if gathers else self.columns(whole.what, matrices * features, order)
            # Without a gate torch's operations, two of ReLU².
            yield Launch("silu", "memory", ((matrices + 1) * self.tokens * features * item,), 3 - matrices)
        yield self.rows("down", features, order)

    def experts(self, of: Mixture) -> Iterator[Launch]:
        """Mixture of experts between its norm and the next."""
        hidden, item, w = self.layer.hidden, self.layer.item, of.variant
        shape = (self.tokens, of.choices, of.experts, of.held, hidden, of.features)
        if of.shared:
            yield Launch("shared gate, up", f"matmul_silu_mul{w}", (self.tokens, of.shared, hidden))
            yield Launch("shared down", f"matmul{w}", (self.tokens, hidden, of.shared))
        if self.recipe == SEQUENCE_PARALLEL:
            # Tokens of a rank in shapes of ops that move rows.
            of_rank = (cdiv(self.tokens, self.world_size), *shape[1:])
            yield Launch("router", "matmul_route_schedule", of_rank)
            yield Launch("experts gate, up", f"all_gather_grouped_matmul_silu_mul{w}", of_rank)
            yield Launch("experts down", f"grouped_matmul_reduce_scatter{w}", of_rank)
            return
        yield Launch("router", "matmul_route_schedule", shape)
        # Norms write rows in fp8 for the projections and for experts, unless there is a scale for each token.
        if count := (self.layer.variant, w).count("+channel_fp8"):
            yield Launch("rows in fp8", "memory", (self.tokens * hidden * (item + 1),), count)
        yield Launch("experts gate, up", f"grouped_matmul_silu_mul{w}", shape)
        yield Launch("experts down", f"grouped_matmul{w}", shape)
        yield Launch("sum of experts", "moe_sum", shape)
        if self.recipe == REPLICATED and self.world_size > 1:
            yield Launch("all-reduce", "all_reduce", (self.tokens * hidden * item,))

    def launches(self) -> Iterator[Launch]:
        """All of a layer but its attention, which is the same in all recipes."""
        yield self.norm()
        yield self.columns("qkv", self.layer.qkv)
        yield self.rows("o", self.layer.o)
        yield self.norm()
        yield from self.dense(self.layer.features) if self.layer.mixture is None else self.experts(self.layer.mixture)


class Changes(NamedTuple):
    """Numbers of tokens at which recipes change, one for each change.

    fused_norm  most tokens of "fused_norm" in place of "replicated"
    sharded     least tokens of "sequence_parallel"
    gathered    most tokens that "sequence_parallel" gathers before an MLP, not under its first GEMM
    """

    fused_norm: float
    sharded: float
    gathered: float

    def recipe(self, tokens: int) -> str:
        """Recipe of a pass in mode "auto"."""
        return SEQUENCE_PARALLEL if tokens >= self.sharded else self.replicated(tokens)

    def replicated(self, tokens: int) -> str:
        """Recipe of a pass of which every rank has all tokens."""
        return FUSED_NORM if tokens <= self.fused_norm else REPLICATED


@remembered
def times(tokens: int, layer: Layer, world_size: int, gpu: Gpu) -> Mapping[str, float]:
    """µs of a layer without its attention, by recipe."""
    gathers = tokens <= gathered(layer, world_size, gpu)
    passes = (
        Pass(recipe=recipe, tokens=tokens, world_size=world_size, layer=layer, gathers=gathers) for recipe in RECIPES
    )
    return {one.recipe: _sum(one.launches(), one, gpu) for one in passes}


def _sum(launches: Iterable[Launch], of: Pass, gpu: Gpu) -> float:
    """µs of launches, each by its fastest design."""
    total = 0.0
    for one in launches:
        shape = tuple(max(1, int(size)) for size in one.shape)
        total += one.count * min(times_of(one.op, shape, of.layer.item, of.world_size, gpu).values())
    return total


@remembered
def gathered(layer: Layer, world_size: int, gpu: Gpu) -> float:
    """Most tokens that "sequence_parallel" gathers before an MLP."""
    if world_size == 1:  # a GEMM of few gathered rows has silu
        return FEW_ROWS
    return _last(change(*zip(*(_gathering(tokens, layer, world_size, gpu) for tokens in TOKENS), strict=True)))


def _gathering(tokens: int, layer: Layer, world_size: int, gpu: Gpu) -> tuple[float, float]:
    """µs of a feed-forward whose rows are gathered first, and under its first GEMM, beside what both have."""
    of = Pass(recipe=SEQUENCE_PARALLEL, tokens=tokens, world_size=world_size, layer=layer)
    if layer.mixture is not None:
        sent = [Launch("rows", op, (tokens * layer.hidden * layer.item,)) for op in ("all_gather", "reduce_scatter")]
        local = replace(of, recipe=FUSED_NORM).experts(layer.mixture)
        return _sum((*sent, *local), of, gpu), _sum(of.experts(layer.mixture), of, gpu)
    if is_fp8(layer.variant):
        first, under = (replace(of, gathers=gathers).dense(layer.features) for gathers in (True, False))
        return _sum(first, of, gpu), _sum(under, of, gpu)
    shape = tokens, (1 + layer.gated) * layer.features, layer.hidden
    gemm = times_of(f"all_gather_matmul{layer.variant}", shape, layer.item, world_size, gpu)
    if not layer.variant:
        return gemm["sequential"], gemm["pipelined"]
    rows = Launch("rows", "all_gather", (tokens * layer.hidden * layer.item,))
    whole = Launch("gate, up", f"matmul{layer.variant}", shape)
    return _sum((rows, whole), of, gpu), min(gemm.values())


@remembered
def changes(layer: Layer, world_size: int, gpu: Gpu) -> Changes:
    """Numbers of tokens at which recipes change, by ``times``."""
    if world_size == 1:  # nothing is sent; a norm may add up partials
        return Changes(PARTIAL_ROWS, math.inf, gathered(layer, world_size, gpu))
    by_tokens = [times(tokens, layer, world_size, gpu) for tokens in TOKENS]
    # Few rows take as long as the weights are read: no transport hides there, and norms add up over the ranks.
    few = sum(tokens <= FEW_ROWS for tokens in TOKENS)
    norm = few + change([one[FUSED_NORM] for one in by_tokens[few:]], [one[REPLICATED] for one in by_tokens[few:]])
    least = [one[FUSED_NORM if at < norm else REPLICATED] for at, one in enumerate(by_tokens)]
    sharded = few + change(least[few:], [one[SEQUENCE_PARALLEL] for one in by_tokens[few:]])
    split = TOKENS[sharded] if sharded < len(TOKENS) else math.inf
    return Changes(_last(norm), split, gathered(layer, world_size, gpu))


def _last(change: int) -> int:
    """Most tokens before a change."""
    return TOKENS[change - 1] if change else 0


def change(before: Sequence[float], after: Sequence[float]) -> int:
    """Index from which ``after`` is taken in place of ``before``: the least regret, the last of equals.

    Costs near each other change places more than once; a model has one change, for graphs and bits follow it.
    """

    def regret(first: int) -> float:
        taken = [*before[:first], *after[first:]]
        return sum(max(CLOSE, time / min(both)) for time, *both in zip(taken, before, after, strict=True))

    return min(reversed(range(len(before) + 1)), key=regret)
