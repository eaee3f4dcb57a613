"""Grouped-query attention with q- and k-norm over a paged cache, its heads split over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from weft import ops
from weft.kernels.deferred_norm import FactoredNorm
from weft.layers.whole_attention import check_module
from weft.parallel.linear import ColumnParallelLinear, RowParallelLinear, Rows, check_layer, split_evenly
from weft.parallel.rotary import apply_rotary
from weft.parallel.sharding import Shard, fill_from_module, whole
from weft.parallel.step import Chunk, Step
from weft.parallel.step_plan import Mode

if TYPE_CHECKING:
    from weft.runtime.team import Team

# From this many rows (heads times tokens) of new prompts of one length on cuDNN beats our prefill kernel on an H200
# (docs/decisions.md, "Attention").
MANY_ROWS = 65536


class TPAttention(nn.Module):
    """y = softmax(rope(norm(q)) @ rope(norm(k)).T / sqrt(head_dim)) @ v @ o.T          q, k, v = x @ qkv.T, by heads

    x, y: [T, hidden] on every rank; in mode "ag_rs" this rank's 1/W of these rows, padded to W's multiple.
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
        check_layer(
            team, mode, dtype, hidden_size=hidden_size, num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads, head_dim=head_dim,
        )  # fmt: skip
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

        `config` names the sizes as a Qwen3Config does, transformers' or ours. ValueError, by what was found, for a module that
        computes anything else: other norms, scaling, rotary embedding, masks or weights.
        """
        sizes = check_module(module, config)
        attention = cls(**sizes, team=team, mode=mode, dtype=module.q_proj.weight.dtype)
        fill_from_module(attention.shards(), module)
        return attention

    def shards(self) -> dict[str, Shard]:
        norms = {"q_norm.weight": whole(self.q_norm.weight), "k_norm.weight": whole(self.k_norm.weight)}
        return self.qkv_proj.shards() | self.o_proj.shards() | norms

    def forward(
        self, x: torch.Tensor | FactoredNorm, step: Step, cache: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """`cache`: this layer's keys and values, each [pages, kv_heads_local, page_size, head_dim]; written in place."""
        plan, (keys, values) = step.plan, cache
        by_library = plan.fused and for_the_library(step.chunks, self.num_heads)
        projected = self.qkv_proj(x, plan, in_parts=plan.fused and not by_library)
        if isinstance(projected, FactoredNorm) or projected.dim() == 3:  # fp32 [parts, T, ...]
            qkv, padding = projected, 0
        else:  # [rows, ...] with rows >= T: ag_rs pads
            qkv, padding = projected[: step.tokens], projected.shape[0] - step.tokens
        weights = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, step.angles
        if plan.fused and step.is_prefill:
            q = ops.qk_norm_rope(qkv, *weights, step.positions, step.slots, keys, values, with_keys=by_library)
        elif not plan.fused:
            q = self._norm_rope_write(qkv, step, keys, values)
        if plan.fused and not step.is_prefill:
            attended = ops.decode_attention(qkv, *weights, keys, values, step.pages, step.lengths, tickets=step.tickets)
        elif plan.fused and not by_library:
            attended = ops.paged_prefill_attention(q, keys, values, step.pages, step.spans)
        elif step.is_prefill:
            q, new_keys = q.split(self.num_heads, dim=1) if by_library else (q, keys[step.cells[0], :, step.cells[1]])
            new = new_keys, qkv[:, -self.num_kv_heads * self.head_dim :]
            found = [attend_to_chunk(q, new, cache, step.pages, chunk) for chunk in step.chunks]
            attended = found[0] if len(found) == 1 else torch.cat(found)
        else:
            attended = attend_to_pages(q, keys, values, step.pages, step.lengths)
        attended = attended.reshape(step.tokens, self.num_heads * self.head_dim)
        if padding > 0:
            attended = F.pad(attended, (0, 0, 0, padding))
        return self.o_proj(attended, plan)

    def _norm_rope_write(self, qkv: torch.Tensor, step: Step, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """What ops.qk_norm_rope does, in torch. Padding goes to page 0."""
        heads = qkv.view(step.tokens, -1, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        angles = step.angles[step.positions]
        page, offset = step.cells
        keys[page, :, offset] = apply_rotary(self.k_norm(k), angles)
        values[page, :, offset] = v
        return apply_rotary(self.q_norm(q), angles)


def gather_pages(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """[pages, heads, page_size, head_dim] and a table [B, n] → [B, heads, n * page_size, head_dim]: a copy"""
    _, heads, page_size, head_dim = cache.shape
    found = cache[pages.long()].transpose(1, 2)
    return found.reshape(len(pages), heads, pages.shape[1] * page_size, head_dim)


def attend_to_pages(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """What ops.paged_attention does, in torch, except that a row of length 0 gives what nobody reads. [B, heads, head_dim]"""
    batch, heads, head_dim = q.shape
    keys, values = (gather_pages(cache, pages) for cache in (keys, values))
    seen = torch.arange(keys.shape[2], device=q.device) < lengths.clamp(min=1)[:, None]
    # Query heads of one KV head are rows of one attention.
    q = q.view(batch, keys.shape[1], -1, head_dim)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[:, None, None]).reshape(
        batch, heads, head_dim
    )


def for_the_library(chunks: Sequence[Chunk], heads: int) -> bool:
    """Whether torch's attention takes less time than ops.paged_prefill_attention: all are new prompts, of many rows."""
    return bool(chunks) and all(c.before == 0 and c.batch * c.length * heads >= MANY_ROWS for c in chunks)


def attend_to_chunk(
    q: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    pages: torch.Tensor,
    chunk: Chunk,
) -> torch.Tensor:
    """Each of a chunk's tokens to all before it in its sequence and to itself: [batch * length, heads, head_dim]

    q    [T, heads, head_dim]
    new  keys [T, kv_heads, head_dim] and values [T, kv_heads * head_dim] of all tokens of the pass; what a new prompt needs
    """
    batch, length, before, token, sequence = chunk
    whole_length = before + length

    def of_chunk(x: torch.Tensor) -> torch.Tensor:
        rows = x[token : token + batch * length]
        return rows.view(batch, length, -1, q.shape[-1]).transpose(1, 2)

    q = of_chunk(q)
    if before == 0:
        attended = F.scaled_dot_product_attention(q, *map(of_chunk, new), is_causal=True, enable_gqa=True)
    else:
        table = pages[sequence : sequence + batch, : -(-whole_length // cache[0].shape[2])]
        keys, values = (gather_pages(part, table)[:, :, :whole_length] for part in cache)
        # torch's own lower-right mask does not know of grouped heads.
        keys, values = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (keys, values))
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=causal_lower_right(length, whole_length))
    return attended.transpose(1, 2).flatten(0, 1)


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
