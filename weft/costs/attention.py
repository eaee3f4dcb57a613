"""Attention: µs of a layer's call."""

from __future__ import annotations

import math

from weft.costs import pushes
from weft.costs.fitted import Fitted
from weft.costs.gpu import Gpu


def decode(gpu: Gpu, fitted: Fitted, cached: float) -> float:
    """New tokens' attention to ``cached`` bytes of keys and values on this rank."""
    return gpu.launch + fitted.attention.call + cached / (fitted.attention.cache * gpu.memory)


def sharded_decode(gpu: Gpu, fitted: Fitted, cached: float, part: float, world_size: int) -> float:
    """Attention to a cache that is spread over the ranks.

    part  bytes of outputs and log-sum-exps that go to each peer
    """
    local = decode(gpu, fitted, cached)
    if world_size == 1:
        return local
    return (
        local
        - gpu.launch
        + fitted.attention.merge * math.log2(world_size)
        + pushes.one_hop(gpu, fitted.pushes, (world_size - 1) * part, world_size)
    )


def prefill(gpu: Gpu, fitted: Fitted, tokens: int, q_heads: int, head_dim: int) -> float:
    """Causal attention of a prompt."""
    flops = 2 * tokens * tokens * q_heads * head_dim
    return gpu.launch + fitted.attention.call + flops / (fitted.attention.prefill * gpu.flops)
