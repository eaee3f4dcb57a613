"""Shapes of attention over ranks (``ShardedShape``), and named sets."""

from __future__ import annotations

from weft.bench.harness.workload import Shape, sizes_or_set
from weft.ops.attention.qk_norm_rope import HEAD_DIMS
from weft.ops.attention.sharded_plan import ShardedShape
from weft.ops.op import Op

# Query heads, KV heads, head_dim, and contexts of one sequence. The second is published for other systems on 8 GPUs.
LONG = {
    "qwen3-30b-a3b": (32, 4, 128, (32 << 10, 128 << 10, 1 << 20)),
    "12-kv-heads": (96, 12, 128, (64 << 10, 1 << 20)),
}
# Most tokens of all sequences and heads for simulated ranks.
SIMULATED_TOKENS, SIMULATED_HEADS = 256, 8


def read_sharded(op: Op, word: str, world_size: int, tiny: bool) -> list[Shape]:
    """See ``Form.read``."""
    given, name, contexts = sizes_or_set(word, 5, LONG, "BATCH,HEADS,KV_HEADS,HEAD_DIM,CONTEXT")
    if given:
        return [_shape(ShardedShape(*given, world_size))]
    if tiny:
        return [_shape(ShardedShape(1, 2 * world_size, 1, 16, 40, world_size))]
    *heads, usual = LONG[name]
    return [_shape(ShardedShape(1, *heads, context, world_size)) for context in contexts or usual]


def _shape(shape: ShardedShape) -> Shape:
    return Shape(size=tuple(shape), label="x".join(map(str, shape[:5])))


def check_sharded(op: Op, word: str, size: tuple[int, ...], dtype: str) -> None:
    """See ``Form.check``: ValueError for heads without a kernel, or that the ranks cannot share."""
    shape = ShardedShape(*size)
    if shape.head_dim not in HEAD_DIMS:
        raise ValueError(f"--shapes {word}: head_dim={shape.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}")
    for what, divisor in (("kv_heads", shape.kv_heads), ("world_size", shape.ranks)):
        if shape.q_heads % divisor:
            raise ValueError(
                f"--shapes {word}: heads={shape.q_heads} is not divisible by {what}={divisor}; take "
                f"{-(-shape.q_heads // divisor) * divisor}"
            )


def simulable_sharded(op: Op, size: tuple[int, ...], world_size: int) -> tuple[str, tuple[int, ...]]:
    """See ``Form.simulable``."""
    shape, limit = (
        ShardedShape(*size),
        f"{SIMULATED_TOKENS} tokens in all and {SIMULATED_HEADS} KV heads of all sequences",
    )
    batch = min(shape.batch, SIMULATED_HEADS // min(shape.kv_heads, SIMULATED_HEADS))
    context = min(shape.context, SIMULATED_TOKENS // batch)
    return limit, tuple(shape._replace(batch=batch, kv_heads=min(shape.kv_heads, SIMULATED_HEADS), context=context))
