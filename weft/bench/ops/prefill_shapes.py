"""Shapes of attention over prompts whose tokens are sharded over the ranks (``PrefillShape``)."""

from __future__ import annotations

from typing import NamedTuple

from weft.bench.harness.workload import Shape, listed_shapes
from weft.ops.attention.gathered_plan import check_sharing
from weft.ops.op import Op


class PrefillShape(NamedTuple):
    """One prompt's attention in one layer; sizes count all ranks together."""

    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int


# Query heads, KV heads and head_dim of published models.
PROMPTED = {"qwen3-30b-a3b": (32, 4, 128), "qwen3-8b": (32, 8, 128), "qwen3-32b": (64, 8, 128)}
TOKENS = (32 << 10, 128 << 10, 512 << 10)
# Most of each size for simulated ranks.
SIMULATED = PrefillShape(64, 16, 8, 64)


def read_prefill(op: Op, word: str, world_size: int, tiny: bool) -> list[Shape]:
    """See ``Form.read``."""

    def named(name: str, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [(count, *PROMPTED[name]) for count in tokens or TOKENS]

    small = (4 * world_size, 2 * world_size, world_size, 16) if tiny else ()
    return listed_shapes(word, 4, PROMPTED, "TOKENS,QUERY_HEADS,KV_HEADS,HEAD_DIM", small, named)


def check_heads_shared(op: Op, word: str, size: tuple[int, ...], dtype: str) -> None:
    """See ``Form.check``: ValueError for heads without a kernel."""
    check_sharing(f"--shapes {word}", *size[1:])


def simulable_prefill(op: Op, size: tuple[int, ...], world_size: int) -> tuple[str, tuple[int, ...]]:
    """See ``Form.simulable``."""
    smaller = PrefillShape(*map(min, size, SIMULATED))
    return f"{SIMULATED.tokens} tokens", tuple(smaller)
