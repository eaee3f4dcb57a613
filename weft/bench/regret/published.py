"""Shapes of published models that no row of the tables has: 30 listed here, more by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from weft.bench.harness.workload import DTYPES, Shape
from weft.bench.ops.shapes import FORMS, OPS, Model, op_of, parts_of, size_label
from weft.ops.attention.sharded_plan import ShardedShape
from weft.ops.gemm.gemm_op import GemmOp
from weft.ops.moe.moe_op import MoeShape
from weft.runtime.arithmetic import cdiv

if TYPE_CHECKING:
    from weft.ops.op import Op
    from weft.plan.planned import Machine


class Published(NamedTuple):
    """Sizes of a model's config.

    features  of a feed-forward layer, or of an expert; experts, k: 0 of a dense model
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    features: int
    experts: int = 0
    k: int = 0


DENSE = {
    "llama-3.1-8b": Published(4096, 32, 8, 128, 14336),
    "llama-3.2-3b": Published(3072, 24, 8, 128, 8192),
    "mistral-small-24b": Published(5120, 32, 8, 128, 32768),
    "mistral-nemo-12b": Published(5120, 32, 8, 128, 14336),
    "gemma-2-9b": Published(3584, 16, 8, 256, 14336),
    "gemma-3-27b": Published(5376, 32, 16, 128, 21504),
    "phi-4": Published(5120, 40, 10, 128, 17920),
    "qwen2.5-7b": Published(3584, 28, 4, 128, 18944),
    "qwen2.5-72b": Published(8192, 64, 8, 128, 29568),
    "qwen3-4b": Published(2560, 32, 8, 128, 9728),
    "qwen3-14b": Published(5120, 40, 8, 128, 17408),
    "seed-oss-36b": Published(5120, 80, 8, 128, 27648),
    "granite-3.3-8b": Published(4096, 32, 8, 128, 12800),
}
EXPERTS = {
    "gpt-oss-20b": Published(2880, 64, 8, 64, 2880, 32, 4),
    "gpt-oss-120b": Published(2880, 64, 8, 64, 2880, 128, 4),
    "glm-4.5": Published(5120, 96, 8, 128, 1536, 160, 8),
    "glm-4.5-air": Published(4096, 96, 8, 128, 1408, 128, 8),
    "kimi-k2": Published(7168, 64, 64, 128, 2048, 384, 8),
    "llama-4-scout": Published(5120, 40, 8, 128, 8192, 16, 1),
    "llama-4-maverick": Published(5120, 40, 8, 128, 8192, 128, 1),
    "minimax-m2": Published(3072, 48, 8, 128, 1536, 256, 8),
    "qwen3-next-80b": Published(2048, 16, 2, 256, 512, 512, 10),
    "phi-3.5-moe": Published(4096, 32, 8, 128, 6400, 16, 2),
    "ernie-4.5-300b": Published(8192, 64, 8, 128, 3584, 64, 8),
    "granite-3-3b-a800m": Published(1536, 24, 8, 64, 512, 40, 8),
}
# Tokens of a step, of decodes and of prompts.
TOKENS = (1, 2, 5, 12, 24, 48, 96, 200, 400, 800, 1600, 3200, 6400, 12800)
# Tokens that a sequence has seen.
CONTEXTS = (300, 1000, 3000, 10000, 30000, 100000)
# Bytes of a cache of keys and values, of which a measurement holds two and more; (query, key) pairs of a prompt's attention.
MOST_CACHE, MOST_SCORES = 2 << 30, 3e11

# Seed of the shapes in place of listed ones that a row decides.
LISTED_SEED = -1

# Model and tokens.
LISTED_DENSE = (
    ("llama-3.1-8b", 1), ("llama-3.1-8b", 48), ("llama-3.1-8b", 800), ("llama-3.1-8b", 6400), ("llama-3.2-3b", 5),
    ("llama-3.2-3b", 1600), ("mistral-small-24b", 24), ("mistral-small-24b", 400), ("mistral-small-24b", 3200),
    ("mistral-nemo-12b", 12), ("mistral-nemo-12b", 800), ("gemma-2-9b", 2), ("gemma-2-9b", 1600), ("gemma-3-27b", 1),
    ("gemma-3-27b", 96), ("gemma-3-27b", 6400), ("phi-4", 48), ("phi-4", 3200), ("qwen2.5-7b", 5), ("qwen2.5-7b", 400),
    ("qwen2.5-7b", 12800), ("qwen2.5-72b", 24), ("qwen2.5-72b", 800), ("qwen3-4b", 1), ("qwen3-4b", 3200), ("qwen3-14b", 200),
    ("qwen3-14b", 1600), ("seed-oss-36b", 12), ("seed-oss-36b", 6400), ("granite-3.3-8b", 400),
)  # fmt: skip
LISTED_EXPERTS = (
    ("gpt-oss-120b", 1), ("gpt-oss-120b", 24), ("gpt-oss-120b", 128), ("gpt-oss-120b", 800), ("gpt-oss-120b", 2048),
    ("gpt-oss-20b", 5), ("gpt-oss-20b", 400), ("gpt-oss-20b", 6400), ("glm-4.5", 12), ("glm-4.5", 200), ("glm-4.5", 1600),
    ("glm-4.5-air", 1), ("glm-4.5-air", 96), ("glm-4.5-air", 3200), ("kimi-k2", 24), ("kimi-k2", 400), ("kimi-k2", 1600),
    ("llama-4-scout", 2), ("llama-4-scout", 256), ("llama-4-scout", 3200), ("llama-4-maverick", 48),
    ("llama-4-maverick", 800), ("minimax-m2", 12), ("minimax-m2", 1600), ("qwen3-next-80b", 5), ("qwen3-next-80b", 800),
    ("phi-3.5-moe", 96), ("phi-3.5-moe", 1600), ("ernie-4.5-300b", 200), ("granite-3-3b-a800m", 400),
)  # fmt: skip


def listed(op: Op, here: Machine, dtype: str, fields: dict[str, bool], count: int = 30) -> list[Shape]:
    """``count`` shapes that ``here`` can run and no row decides: listed ones, then ones by LISTED_SEED."""
    pairs = LISTED_EXPERTS if op.form == "moe" else LISTED_DENSE
    made = (
        _fresh(op, _shape(op, model, tokens, number, here.world_size), here, dtype, fields)
        for number, (model, tokens) in enumerate(pairs)
    )
    shapes = list({shape.size: shape for shape in made if shape is not None}.values())[:count]
    return shapes + drawn(op, here, dtype, fields, LISTED_SEED, count - len(shapes), shapes)


def drawn(
    op: Op, here: Machine, dtype: str, fields: dict[str, bool], seed: int, count: int, taken: Sequence[Shape] = ()
) -> list[Shape]:
    """``count`` shapes by ``seed``, equal on all ranks, without ``taken``; fewer where there are too few."""
    chosen, known = random.Random(f"{op.alias} {sorted(fields)} {seed}"), {shape.size for shape in taken}
    made: dict[tuple[int, ...], Shape] = {}
    models = sorted(EXPERTS if op.form == "moe" else {**DENSE, **EXPERTS})
    for _ in range(50 * count):
        if len(made) >= count:
            break
        model, tokens, number = chosen.choice(models), chosen.choice(TOKENS), chosen.randrange(1 << 16)
        tokens += chosen.randrange(max(1, tokens // 4))
        shape = _fresh(op, _shape(op, model, tokens, number, here.world_size), here, dtype, fields)
        if shape is not None and shape.size not in known:
            made.setdefault(shape.size, shape)
    return list(made.values())


def _fresh(op: Op, shape: Shape | None, here: Machine, dtype: str, fields: dict[str, bool]) -> Shape | None:
    """``shape``, or None where the op refuses it or a row decides it."""
    if shape is None:
        return None
    try:
        FORMS[op.form].check(op, shape.label, shape.size, dtype)
        case = op.case_of(shape.size, DTYPES[dtype], here.world_size, **fields)
        return None if op.plan(op.call_of_case(case, here), here).row is not None else shape
    except ValueError:
        return None


def _shape(op: Op, name: str, tokens: int, number: int, world_size: int) -> Shape | None:
    """Shape of a step of a model; None where the ranks cannot share it. number: chooses the part."""
    model = DENSE.get(name) or EXPERTS[name]
    sizes = _SIZES[op.form](op, model, tokens, number, world_size)
    if sizes is None:
        return None
    size, what = sizes
    return Shape(size=size, label=f"{name} {what}")


Made = tuple[tuple[int, ...], str] | None


def _bytes(op: Op, model: Published, tokens: int, number: int, world_size: int) -> Made:
    step = 16 * world_size
    nbytes = cdiv(2 * tokens * model.hidden, step) * step
    return (nbytes,), size_label(nbytes)


def _rows(op: Op, model: Published, tokens: int, number: int, world_size: int) -> Made:
    return (tokens, model.hidden), f"M={tokens}"


def _gemm(op: Op, model: Published, tokens: int, number: int, world_size: int) -> Made:
    gemm = cast(GemmOp, op)
    key_value = model.kv_heads * model.head_dim
    sizes = Model(model.hidden, model.heads * model.head_dim, key_value, model.features)
    if any(size % world_size for size in (sizes.query, sizes.key_value, sizes.intermediate)):
        return None
    parts = parts_of(gemm, sizes, world_size)
    part = list(parts)[number % len(parts)]
    M = cdiv(tokens, world_size) * world_size if gemm.rows_sharded else tokens
    return (M, *parts[part]), f"{part} M={M}"


def _moe(op: Op, model: Published, tokens: int, number: int, world_size: int) -> Made:
    if not model.experts or model.experts % world_size:
        return None
    held = model.experts // world_size if op.collective else model.experts
    return MoeShape(tokens, model.k, model.experts, held, model.hidden, model.features, 0), f"T={tokens}"


def _attention(op: Op, model: Published, tokens: int, number: int, world_size: int) -> Made:
    context = CONTEXTS[number % (3 if "prefill" in op.alias else len(CONTEXTS))]
    heads = model.kv_heads // world_size
    sequences = min(tokens, 64, MOST_CACHE // max(1, 4 * heads * context * model.head_dim))
    if model.kv_heads % world_size or sequences < 1:
        return None
    return (sequences * heads, context, model.head_dim), f"{sequences}x{context}"


def _sharded(op: Op, model: Published, tokens: int, number: int, world_size: int) -> Made:
    context, batch = CONTEXTS[3 + number % 3] * 2, 1 + number // 3 % 4
    if 4 * batch * context * model.kv_heads * model.head_dim > 2 * MOST_CACHE or model.heads % world_size:
        return None
    size = ShardedShape(batch, model.heads, model.kv_heads, model.head_dim, context, world_size)
    return tuple(size), f"{batch}x{context}"


def _prefill(op: Op, model: Published, tokens: int, number: int, world_size: int) -> Made:
    step = 2 * world_size
    whole = cdiv(CONTEXTS[1 + number % 4], step) * step
    if whole * whole * model.heads * model.head_dim > MOST_SCORES * 128:
        return None
    return (whole, model.heads, model.kv_heads, model.head_dim), f"{whole} tokens"


_SIZES = {
    "bytes": _bytes, "rows": _rows, "gemm": _gemm, "moe": _moe, "attention": _attention, "sharded": _sharded,
    "prefill": _prefill,
}  # fmt: skip


def planned_ops() -> Iterator[str]:
    """Aliases of the ops that choose: with a plan, and shapes of benchmarks."""
    yield from (op.alias for op in map(op_of, OPS) if op.sizes and not op.no_plan)
