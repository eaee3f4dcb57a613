"""Gated delta net of a decoder layer, its heads split over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.layers.norm import RMSNorm
from weft.ops.linear_attention.delta_rule import DeltaSizes
from weft.parallel.linear import RowParallelLinear, empty_parameter, split_evenly
from weft.parallel.sharding import Shard, WholeTensor, under
from weft.parallel.tensors import DeltaWeights, NormWeights
from weft.parallel.widened import widened

if TYPE_CHECKING:
    from weft.parallel.quantized import Formats
    from weft.runtime.team.team import Team


class TPGatedDeltaNet(nn.Module):
    """y = norm(delta_rule(silu(conv(qkv)), a, b)) * silu(z) @ out.T, with q, k, v, z, b, a = x @ in.T

    Rank r has key heads r * key_heads / W and on, with their value heads. ValueError where W does not divide key_heads.
    joined  as of LinearAttentionOptions. For inference
    formats  of the weights; None: they are in `dtype`. Projections before the convolution are in `dtype` here in any case
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        whole: DeltaSizes,
        taps: int,
        rms_norm_eps: float,
        joined: bool,
        team: Team,
        dtype: torch.dtype,
        formats: Formats | None = None,
    ) -> None:
        super().__init__()
        key_heads = split_evenly("linear_num_key_heads", whole.key_heads, team)
        self.whole, self.team, self.joined, self.hidden_size = whole, team, joined, hidden_size
        self.sizes = sizes = whole._replace(key_heads=key_heads, value_heads=whole.value_heads // team.size)
        values = sizes.value_heads * sizes.V
        options = {"team": team, "dtype": dtype}
        self.in_proj = empty_parameter(sizes.columns + values + 2 * sizes.value_heads, hidden_size, **options)
        self.conv1d = empty_parameter(sizes.columns, taps, **options)
        self.A_log, self.dt_bias = (
            empty_parameter(sizes.value_heads, team=team, dtype=torch.float32) for _ in range(2)
        )
        self.norm = RMSNorm(sizes.V, rms_norm_eps, **options)
        self.formats = formats
        self.out_proj = RowParallelLinear(
            "out_proj", whole.value_heads * whole.V, hidden_size, formats=formats, **options
        )

    @property
    def weights(self) -> DeltaWeights:
        return DeltaWeights(
            qkv=self.in_proj,
            o=self.out_proj.matrix,
            conv=self.conv1d,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            norm=NormWeights.of(self.norm),
            sizes=self.sizes,
        )

    def shards(self) -> dict[str, Shard]:
        sizes, whole, rank = self.sizes, self.whole, self.team.rank
        taps = self.conv1d.shape[1]
        conv = {"target": self.conv1d.data, "shape": (whole.columns, 1, taps)}
        heads = {"shape": (whole.value_heads,), "start": rank * sizes.value_heads}
        return {
            **widened(self._joined_shards() if self.joined else self._separate_shards(), self.formats),
            "conv1d.weight": ChannelShard(**conv, starts=self._channel_starts()),
            "A_log": Shard(target=self.A_log.data, **heads),
            "dt_bias": Shard(target=self.dt_bias.data, **heads),
            **under("norm", self.norm.shards()),
            **self.out_proj.shards(),
        }

    def _channel_starts(self) -> tuple[tuple[int, int], ...]:
        """(first row, rows) of the q, k and v of this rank in the rows of all heads."""
        sizes, rank = self.sizes, self.team.rank
        keys, values = sizes.key_heads * sizes.K, sizes.value_heads * sizes.V
        all_keys = keys * self.team.size
        return (rank * keys, keys), (all_keys + rank * keys, keys), (2 * all_keys + rank * values, values)

    def _joined_shards(self) -> dict[str, Shard]:
        """in_proj_qkvz has q, k, v and z of a key head together, in_proj_ba b and a."""
        sizes, group = self.sizes, self.sizes.value_heads // self.sizes.key_heads
        cut = sizes.columns + sizes.value_heads * sizes.V
        parts = {
            "in_proj_qkvz": (self.in_proj.data[:cut], (sizes.K, sizes.K, group * sizes.V, group * sizes.V)),
            "in_proj_ba": (self.in_proj.data[cut:], (group, group)),
        }
        shards = {}
        for name, (target, of_head) in parts.items():
            rows = torch.arange(len(target), device=target.device).view(sizes.key_heads, -1)
            order = torch.cat([part.flatten() for part in rows.split(of_head, dim=1)])
            shape, start = (len(target) * self.team.size, self.hidden_size), self.team.rank * len(target)
            shards[f"{name}.weight"] = Shard(target=target, shape=shape, start=start, order=order)
        return shards

    def _separate_shards(self) -> dict[str, Shard]:
        sizes, shards, first = self.sizes, {}, self.sizes.columns
        whole = (self.whole.columns, self.hidden_size)
        qkv = ChannelShard(target=self.in_proj.data[:first], shape=whole, starts=self._channel_starts())
        values = sizes.value_heads * sizes.V
        for name, count in (("in_proj_z", values), ("in_proj_b", sizes.value_heads), ("in_proj_a", sizes.value_heads)):
            target, shape = self.in_proj.data[first : first + count], (count * self.team.size, self.hidden_size)
            shards[f"{name}.weight"] = Shard(target=target, shape=shape, start=self.team.rank * count)
            first += count
        return {"in_proj_qkv.weight": qkv, **shards}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelShard(Shard):
    """target = rows of the whole tensor at several places, one after another.

    starts  (first row, rows) of a place
    """

    starts: tuple[tuple[int, int], ...]

    def copy_from(self, whole: WholeTensor) -> None:
        first = 0
        for start, count in self.starts:
            target = self.target[first : first + count]
            target.copy_(whole[start : start + count].reshape(target.shape))
            first += count
