"""Gated delta net of a decoder layer, its heads split over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.layers.norm import RMSNorm
from weft.ops.linear_attention.delta_rule import DeltaSizes
from weft.parallel.linear import (
    RowParallelLinear,
    empty_parameter,
    matrix_parameter,
    scales_beside,
    split_evenly,
)
from weft.parallel.sharding import SeveralShards, Shard, in_order, under
from weft.parallel.tensors import DeltaWeights, NormWeights
from weft.parallel.widened import fp8_formats, widened

if TYPE_CHECKING:
    from weft.parallel.quantized import Formats
    from weft.runtime.team.team import Team


class TPGatedDeltaNet(nn.Module):
    """y = norm(delta_rule(silu(conv(qkv)), a, b)) * silu(z) @ out.T, with q, k, v, z, b, a = x @ in.T

    Rank r has key heads r * key_heads / W and on, with their value heads. ValueError where W does not divide key_heads.
    joined  as of LinearAttentionOptions. For inference
    formats  of the weights; None: they are in `dtype`. Projections to q, k, v and z run in fp8 and in `dtype`
             (``fp8_formats``), to b and a in `dtype`: beside fp8 every rank has the rows of all heads
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
        values, options = sizes.value_heads * sizes.V, {"team": team, "dtype": dtype}
        # Rows of q, k, v and z: of this rank, and of one key head.
        self.rows = sizes.columns + values
        self.of_key_head = (sizes.K, sizes.K, values // key_heads, values // key_heads)
        in_fp8 = fp8_formats(formats)
        format = None if in_fp8 is None else in_fp8(("in_proj_qkvz",) if joined else ("in_proj_qkv", "in_proj_z"))
        rates = (2 * whole.value_heads, hidden_size)
        self.rates = None if format is None else empty_parameter(*rates, **options)
        rows = self.rows + (2 * sizes.value_heads if self.rates is None else 0)
        self.in_proj = matrix_parameter(rows, hidden_size, format=format, **options)
        edges = self.of_key_head if joined else (sizes.key_heads * sizes.K, values)
        self.scales = scales_beside(self.in_proj, hidden_size, format, row_edges=edges)
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
            qkv=self.in_proj if self.scales is None else self.scales.matrix(self.in_proj),
            o=self.out_proj.matrix,
            conv=self.conv1d,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            norm=NormWeights.of(self.norm),
            sizes=self.sizes,
            rates=self.rates,
            first_head=self.team.rank * self.sizes.value_heads,
        )

    def shards(self) -> dict[str, Shard]:
        sizes, rank = self.sizes, self.team.rank
        taps = self.conv1d.shape[1]
        heads = {"shape": (self.whole.value_heads,), "start": rank * sizes.value_heads}
        # Rows of the convolution have a dimension of one channel there.
        conv = {"target": self.conv1d.data[:, None], "shape": (self.whole.columns, 1, taps)}
        return {
            **(self._joined_shards() if self.joined else self._separate_shards()),
            **widened(self._rate_shards(), self.formats),
            "conv1d.weight": SeveralShards.of(part for part, _ in self._of_heads(**conv)),
            "A_log": Shard(target=self.A_log.data, **heads),
            "dt_bias": Shard(target=self.dt_bias.data, **heads),
            **under("norm", self.norm.shards()),
            **self.out_proj.shards(),
        }

    def _of_heads(self, target: torch.Tensor, shape: tuple[int, ...]) -> Iterator[tuple[Shard, int]]:
        """(shard, first row of ``target``) of q, k and v of this rank's heads, in the rows of all heads."""
        sizes, rank = self.sizes, self.team.rank
        keys, values = sizes.key_heads * sizes.K, sizes.value_heads * sizes.V
        all_keys, first = keys * self.team.size, 0
        for start, count in (
            (rank * keys, keys),
            (all_keys + rank * keys, keys),
            (2 * all_keys + rank * values, values),
        ):
            yield Shard(target=target[first : first + count], shape=shape, start=start), first
            first += count

    def _quantized(self, name: str, weight: Shard, first: int = 0) -> dict[str, Shard]:
        """Shards of a checkpoint's matrix whose rows lie in ``in_proj`` from ``first`` on."""
        return {f"{name}.weight": weight} if self.scales is None else self.scales.shards(name, weight, first)

    def _joined_shards(self) -> dict[str, Shard]:
        """Shards of in_proj_qkvz, which has q, k, v and z of a key head together."""
        target = self.in_proj.data[: self.rows]
        shape, start = (self.rows * self.team.size, self.hidden_size), self.team.rank * self.rows
        shards = self._quantized("in_proj_qkvz", Shard(target=target, shape=shape, start=start))
        order = by_part(self.sizes.key_heads, self.of_key_head).to(self.team.device)
        return {name: in_order(shard, order) for name, shard in shards.items()}

    def _separate_shards(self) -> dict[str, Shard]:
        """Shards of in_proj_qkv, which has all heads' q, then k, then v, and of in_proj_z."""
        sizes, first, H = self.sizes, self.sizes.columns, self.hidden_size
        parts = [
            self._quantized("in_proj_qkv", part, at)
            for part, at in self._of_heads(self.in_proj.data[:first], (self.whole.columns, H))
        ]
        z = {"shape": (self.whole.value_heads * sizes.V, H), "start": self.team.rank * (self.rows - first)}
        return {
            **{name: SeveralShards.of(part[name] for part in parts) for name in parts[0]},
            **self._quantized("in_proj_z", Shard(target=self.in_proj.data[first : self.rows], **z), first),
        }

    def _rate_shards(self) -> dict[str, Shard]:
        """Shards of in_proj_ba, which has b and a of a key head together, or of in_proj_b and in_proj_a."""
        whole = self.rates is not None
        target = self.rates.data if whole else self.in_proj.data[self.rows :]
        heads, options = len(target) // 2, {"replicated": whole}
        start, shape = 0 if whole else self.team.rank * heads, (self.whole.value_heads, self.hidden_size)
        if not self.joined:
            names = ("in_proj_b.weight", "in_proj_a.weight")
            parts = (Shard(target=part, shape=shape, start=start, **options) for part in target.split(heads))
            return dict(zip(names, parts, strict=True))
        group, shape = self.sizes.value_heads // self.sizes.key_heads, (2 * shape[0], shape[1])
        order = by_part(heads // group, (group, group)).to(self.team.device)
        return {"in_proj_ba.weight": Shard(target=target, shape=shape, start=2 * start, order=order, **options)}


def by_part(heads: int, parts: Sequence[int]) -> torch.Tensor:
    """Order of rows that come head by head, each with all ``parts``, as they are part by part."""
    rows = torch.arange(heads * sum(parts)).view(heads, -1)
    return torch.cat([part.flatten() for part in rows.split(parts, dim=1)])
