"""Random weights for benchmarks and examples."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from weft.kernels.fp8 import E4M3
from weft.models.checkpoint import SCALES
from weft.parallel.four_bit import CutShard
from weft.parallel.quantized import QuantizedShard
from weft.parallel.sharding import SeveralShards, Shard

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Biases of q, k and v, together or alone.
QKV_BIAS = re.compile(r"\b(q|k|v|qkv)_proj\.bias$")


def fill_dummy(shards: Mapping[str, Shard], team: Team, *, whole: bool = False) -> None:
    """Fill shards by their names: N(0, 0.02), biases of q, k and v N(0, 0.1), norms 1 and 5 % noise.

    Larger biases would be a part that all tokens have in common: of their values, of the residual stream, of the logits of
    experts. The tokens would choose alike, and a step would read too few experts.

    A rank has the same weights on every run, and all ranks the same ones of replicated shards.
    whole  a rank makes each tensor whole and takes its part, so that ranks of every number have parts of one model
    """
    if whole:
        for name, shard in shards.items():
            shard.copy_from(whole_dummy(name, shard, team.device))
        return
    for index, (name, shard) in enumerate(shards.items()):
        generator = torch.Generator(team.device)
        generator.manual_seed(index if shard.replicated else index * 1024 + team.rank + 1)
        for part in shard.parts if isinstance(shard, SeveralShards) else (shard,):
            _fill(name, part, generator)


def _fill(name: str, shard: Shard, generator: torch.Generator) -> None:
    if isinstance(shard, CutShard):
        shard.fill_dummy(generator)
    elif shard.target.dtype == E4M3:
        drawn = torch.empty(shard.target.shape, device=shard.target.device)
        shard.target.copy_(_drawn(name, drawn, generator, e4m3=True))
        if isinstance(shard, QuantizedShard):
            shard.scales.fill_(2e-4)
    else:
        _drawn(name, shard.target, generator)


def whole_dummy(name: str, shard: Shard, device: torch.device) -> torch.Tensor:
    """The whole tensor of a shard, by its name alone."""
    generator = torch.Generator(device)
    generator.manual_seed(zlib.crc32(name.encode()))
    dtype = torch.float32 if shard.target.itemsize == 1 else shard.target.dtype
    e4m3 = shard.stored == E4M3 and not name.endswith(SCALES)
    drawn = _drawn(name, torch.empty(shard.shape, dtype=dtype, device=device), generator, e4m3=e4m3)
    return drawn.to(E4M3) if e4m3 else drawn


def _drawn(name: str, x: torch.Tensor, generator: torch.Generator, *, e4m3: bool = False) -> torch.Tensor:
    """`x`, filled in place."""
    if e4m3:
        # N(0, 0.02) up to rounding: the largest of a block is near e4m3's.
        return x.normal_(0.0, 100.0, generator=generator).clamp_(-448, 448)
    if name.endswith(SCALES):
        # An input of 50 is as large as e4m3 can be.
        return x.fill_(50 / 448 if name.endswith("input_scale") else 2e-4)
    if "norm" in name:
        return x.normal_(1.0, 0.05, generator=generator)
    # A bias that is not seen beside x @ qkv.T would be checked by no benchmark.
    return x.normal_(0.0, 0.1 if QKV_BIAS.search(name) else 0.02, generator=generator)
