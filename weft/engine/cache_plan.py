"""Choice between a KV cache that is split over the ranks by heads and one that is spread by pages."""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.config import EngineConfig
from weft.models import DecoderConfig
from weft.parallel.modes import mode_named
from weft.runtime.arithmetic import cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """Layout of the KV cache and the reason for it. context_parallel: as of weft.models.Decoder."""

    context_parallel: bool
    reason: str

    def __str__(self) -> str:
        how = "spread over the ranks by pages" if self.context_parallel else "split over the ranks by heads"
        return f"{how}: {self.reason}"


def plan_cache(config: EngineConfig, model: DecoderConfig, world_size: int, nodes: int = 1) -> CachePlan:
    """Plan for `config`, whose max_seq_len is known: as asked for, else what makes the cache smaller.

    With fewer KV heads than ranks, a split by heads holds each of them several times.
    """
    if world_size == 1:
        return CachePlan(context_parallel=False, reason="one rank has all")
    if config.context_parallel is not None:
        return CachePlan(context_parallel=config.context_parallel, reason=f"context_parallel={config.context_parallel}")
    if mode_named(config.mode) == "reference":
        return CachePlan(context_parallel=False, reason=f"mode={config.mode!r} knows no other cache")
    if nodes > 1:
        reason = f"{nodes} nodes, between which a spread cache sends in every layer; context_parallel=True spreads it"
        return CachePlan(context_parallel=False, reason=reason)
    heads, page = model.num_key_value_heads, config.page_size
    split = max(1, heads // world_size) * cdiv(config.max_seq_len, page) * page
    spread = heads * cdiv(config.max_seq_len, page * world_size) * page
    fewer, more = sorted((split, spread))
    reason = (
        f"{config.max_seq_len} tokens of {heads} KV heads take {fewer} tokens of a head on each of {world_size} ranks, the "
        f"other way {more}"
    )
    if spread >= split:
        return CachePlan(context_parallel=False, reason=reason)
    return CachePlan(context_parallel=True, reason=f"{reason}; context_parallel=False splits by heads")
