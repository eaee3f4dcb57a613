"""Multi-head latent attention (MLA) over a paged cache of latents, its heads split over the ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.parallel.latent_sizes import LatentSizes
from weft.parallel.linear import ColumnParallelLinear, RowParallelLinear, Rows, check_layer, split_evenly
from weft.parallel.modes import Mode, mode_named
from weft.parallel.quantized import Formats
from weft.parallel.sharding import Shard, under, whole
from weft.parallel.tensors import MLAWeights

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Of the norms of latents, whatever rms_norm_eps says, as in transformers.
EPS = 1e-6


class LatentAttention(nn.Module):
    """y = softmax(q @ (latent @ keys.T, rope(k)).T * scale) @ (latent @ values.T) @ o.T

    (latent, k) = (norm(kv_a[:latent]), kv_a[latent:]), kv_a = x @ kv_a_proj.T;  keys, values: rows of kv_b_proj, by head
    q = x @ q_proj.T, or norm(x @ q_a_proj.T) @ q_b_proj.T; the last qk_rope_head_dim elements of a head are rotated

    sizes    with q_lora_rank the queries have a latent: q_a_proj and q_b_proj in place of q_proj
    formats  of the weights; None: they are in `dtype`. kv_b_proj is in `dtype` in any case: it is absorbed into queries and
             results, so a quantized one is dequantized once it is there

    A rank has num_attention_heads / W query heads, and all of kv_a_proj and q_a_proj: every rank computes the latents of all
    tokens. They are cached on each rank, or, with context_parallel, spread over the ranks by pages. For inference, as a part of
    a Decoder. ValueError where W does not divide the heads.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_attention_heads: int,
        sizes: LatentSizes,
        team: Team,
        mode: Mode,
        dtype: torch.dtype,
        formats: Formats | None = None,
    ) -> None:
        super().__init__()
        latent, nope, rope, value = sizes.kv_lora_rank, sizes.qk_nope_head_dim, sizes.qk_rope_head_dim, sizes.v_head_dim
        check_layer(
            team, mode, dtype, hidden_size=hidden_size, num_attention_heads=num_attention_heads, kv_lora_rank=latent,
            qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value,
        )  # fmt: skip
        self.team, self.mode = team, mode_named(mode)
        self.num_heads = split_evenly("num_attention_heads", num_attention_heads, team)
        # One latent of a token for all heads; no windows.
        self.num_kv_heads, self.group, self.window = 1, self.num_heads, None
        self.eps = EPS
        self.nope, self.rope, self.scale, self.interleaved = nope, rope, sizes.scale, sizes.rope_interleave
        options = {"team": team, "dtype": dtype, "formats": formats}

        def by_head(name: str, features: int) -> Rows:
            return Rows.even(name, num_attention_heads * features, team)

        q_rows, of_q = by_head("q_proj", nope + rope), sizes.q_lora_rank
        first = {"q_proj": q_rows} if of_q is None else {"q_a_proj": Rows(of_q, 0, of_q)}
        self.qkv_proj = ColumnParallelLinear(
            hidden_size, first | {"kv_a_proj_with_mqa": Rows(sizes.width, 0, sizes.width)}, **options
        )
        self.q_a_layernorm = self.q_b_proj = None
        norm = {"eps": self.eps, "device": team.device, "dtype": dtype}
        if of_q is not None:
            self.q_a_layernorm = nn.RMSNorm(of_q, **norm).requires_grad_(False)
            self.q_b_proj = ColumnParallelLinear(of_q, {"q_b_proj": q_rows}, **options)
        self.kv_a_layernorm = nn.RMSNorm(latent, **norm).requires_grad_(False)
        kv_b = {"kv_b_proj": by_head("kv_b_proj", nope + value)}
        self.kv_b_proj = ColumnParallelLinear(latent, kv_b, **options)
        self.o_proj = RowParallelLinear("o_proj", num_attention_heads * value, hidden_size, **options)
        self._dtype, self._kv_b = dtype, None

    @property
    def kv_b(self) -> torch.Tensor:
        """[heads, nope + value, latent] of kv_b_proj, dequantized in the first call."""
        if self.kv_b_proj.scales is None:
            return self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))
        if self._kv_b is None:
            self._kv_b = self.kv_b_proj.matrix.dequantized(self._dtype).unflatten(0, (self.num_heads, -1))
        return self._kv_b

    @property
    def weights(self) -> MLAWeights:
        return MLAWeights(
            self.qkv_proj.matrix, self.o_proj.matrix,
            None if self.q_a_layernorm is None else self.q_a_layernorm.weight,
            None if self.q_b_proj is None else self.q_b_proj.matrix,
            self.kv_a_layernorm.weight, self.kv_b, self.eps, self.num_heads, self.nope, self.rope, self.scale, self.interleaved,
        )  # fmt: skip

    def shards(self) -> dict[str, Shard]:
        shards = {
            # Of the matrices that every rank has whole, dummy weights are alike too.
            name: replace(shard, replicated=True) if name.startswith(("q_a", "kv_a")) else shard
            for name, shard in self.qkv_proj.shards().items()
        }
        shards |= self.kv_b_proj.shards() | self.o_proj.shards()
        shards |= under("kv_a_layernorm", {"weight": whole(self.kv_a_layernorm.weight)})
        if self.q_b_proj is not None:
            shards |= self.q_b_proj.shards() | under("q_a_layernorm", {"weight": whole(self.q_a_layernorm.weight)})
        return shards
