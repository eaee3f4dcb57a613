"""Grouped-query attention with q- and k-norm, its heads split over the ranks, computed locally by torch's SDPA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from weft.layers.parallel import ColumnParallelLinear, Mode, RowParallelLinear, Rows, split_evenly
from weft.layers.rotary import apply_rotary, rotary_angles
from weft.layers.shard import Shard, fill_from_module, whole

if TYPE_CHECKING:
    from weft.runtime.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The tokens of one forward pass, batch-major: `length` of each of `batch` sequences. Every layer uses it.

    cos, sin:   [batch or 1, length, head_dim]
    positions:  None: tokens 0 .. length of right-padded prompts, each attending to those before it.
                [batch]: one new token a sequence, written to the cache there, attending to the cache up to and with it.
    mask:       with positions: [batch, 1, 1, max_len], 0 where the cache may be seen and -inf elsewhere
    """

    batch: int
    length: int
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    @classmethod
    def prefill(
        cls, batch: int, length: int, *, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
    ) -> Step:
        cos, sin = rotary_angles(torch.arange(length, device=device)[None], head_dim, theta, dtype)
        return cls(batch=batch, length=length, cos=cos, sin=sin)

    @classmethod
    def decode(cls, positions: torch.Tensor, max_len: int, *, head_dim: int, theta: float, dtype: torch.dtype) -> Step:
        """All on the device, nothing that depends on values: a decode step can be captured in a CUDA graph."""
        cos, sin = rotary_angles(positions[:, None], head_dim, theta, dtype)
        hidden = torch.arange(max_len, device=positions.device) > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill(hidden, float("-inf"))
        return cls(batch=positions.shape[0], length=1, cos=cos, sin=sin, positions=positions, mask=mask[:, None, None])


class TPAttention(nn.Module):
    """y = softmax(rope(norm(q)) @ rope(norm(k)).T / sqrt(head_dim)) @ v @ o.T          q, k, v = x @ qkv.T, by heads

    x, y: [batch * length, hidden] on every rank; in mode "ag_rs" this rank's 1/W of these rows, padded to W's multiple.
    Rank r has query heads r * heads / W and on; with fewer KV heads than ranks, W / kv_heads neighbours share one.
    For inference: its weights carry no gradients. ValueError where the heads cannot be split over W ranks.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        rms_norm_eps: float,
        team: Team,
        mode: Mode,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        check_heads(num_attention_heads, num_key_value_heads, team.size)
        self.team, self.mode, self.head_dim = team, mode, head_dim
        self.num_heads = split_evenly("num_attention_heads", num_attention_heads, team)
        self.num_kv_heads = max(num_key_value_heads // team.size, 1)
        first_kv_head = team.rank * num_key_value_heads // team.size
        q_rows = Rows.even("num_attention_heads", num_attention_heads * head_dim, team)
        kv_rows = Rows(num_key_value_heads * head_dim, first_kv_head * head_dim, self.num_kv_heads * head_dim)
        self.qkv_proj = ColumnParallelLinear(
            hidden_size, {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}, team=team, mode=mode, dtype=dtype
        )
        self.o_proj = RowParallelLinear("o_proj", q_rows.total, hidden_size, team=team, mode=mode, dtype=dtype)
        self.q_norm = nn.RMSNorm(head_dim, eps=rms_norm_eps, device=team.device, dtype=dtype).requires_grad_(False)
        self.k_norm = nn.RMSNorm(head_dim, eps=rms_norm_eps, device=team.device, dtype=dtype).requires_grad_(False)

    @classmethod
    def from_module(cls, module: nn.Module, config: Any, team: Team, mode: Mode) -> TPAttention:
        """This rank's share of a whole attention, such as transformers' Qwen3Attention.

        `config` names the sizes as a Qwen3Config does, transformers' or ours.
        """
        if (window := getattr(module, "sliding_window", None)) is not None:
            raise ValueError(f"module={type(module).__name__} has sliding_window={window}; TPAttention sees all tokens")
        attention = cls(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            team=team,
            mode=mode,
            dtype=module.q_proj.weight.dtype,
        )
        fill_from_module(attention.shards(), module)
        return attention

    def shards(self) -> dict[str, Shard]:
        norms = {"q_norm.weight": whole(self.q_norm.weight), "k_norm.weight": whole(self.k_norm.weight)}
        return self.qkv_proj.shards() | self.o_proj.shards() | norms

    def forward(
        self, x: torch.Tensor, step: Step, cache: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """`cache`: this layer's keys and values, each [batch, kv_heads_local, max_len, head_dim]; written in place."""
        projected = self.qkv_proj(x)  # [rows, ...] with rows >= batch * length: ag_rs pads
        tokens = step.batch * step.length
        heads = projected[:tokens].view(step.batch, step.length, -1, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=2)
        q = apply_rotary(self.q_norm(q), step.cos, step.sin).transpose(1, 2)
        k = apply_rotary(self.k_norm(k), step.cos, step.sin).transpose(1, 2)
        v = v.transpose(1, 2)
        if step.positions is None:
            attended = self._attend_to_prompt(q, k, v, cache)
        else:
            attended = self._attend_to_cache(q, k, v, step, cache)
        attended = attended.reshape(tokens, self.num_heads * self.head_dim)
        return self.o_proj(F.pad(attended, (0, 0, 0, projected.shape[0] - tokens)))

    def _attend_to_prompt(self, q, k, v, cache) -> torch.Tensor:
        """[batch, length, heads, head_dim]. A prompt's padding leaves keys in the cache, which decode overwrites."""
        if cache is not None:
            for whole_cache, new in zip(cache, (k, v), strict=True):
                whole_cache[:, :, : new.shape[2]] = new
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2)

    def _attend_to_cache(self, q, k, v, step: Step, cache) -> torch.Tensor:
        """[batch, kv_heads, heads / kv_heads, head_dim]: query heads of one KV head are rows of one attention."""
        assert cache is not None, "a decode step attends to its cache"
        at = step.positions[:, None, None, None].expand_as(k)
        for whole_cache, new in zip(cache, (k, v), strict=True):
            whole_cache.scatter_(2, at, new)
        q = q.reshape(step.batch, self.num_kv_heads, -1, self.head_dim)
        return F.scaled_dot_product_attention(q, *cache, attn_mask=step.mask)


def check_heads(num_attention_heads: int, num_key_value_heads: int, world_size: int) -> None:
    """ValueError unless every rank gets the same number of query heads, and these the same number of whole KV heads."""

    def fits(w: int) -> bool:
        return num_attention_heads % w == 0 and (num_key_value_heads % w == 0 or w % num_key_value_heads == 0)

    if not fits(world_size):
        possible = ", ".join(str(w) for w in range(1, num_attention_heads + 1) if fits(w))
        raise ValueError(
            f"num_attention_heads={num_attention_heads} (num_key_value_heads={num_key_value_heads}) cannot be split "
            f"over world_size={world_size}; use a world size of {possible}"
        )
