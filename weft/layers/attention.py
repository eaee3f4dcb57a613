"""Grouped-query attention over a paged cache, its heads split over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.arguments import check_optional, positive
from weft.layers.whole_attention import check_module
from weft.parallel.linear import ColumnParallelLinear, RowParallelLinear, Rows, check_layer, split_evenly
from weft.parallel.sharding import Shard, fill_from_module, whole
from weft.parallel.step import Step
from weft.parallel.step_plan import Mode, mode_named
from weft.parallel.tensors import AttentionWeights, tensor_of

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


class TPAttention(nn.Module):
    """y = softmax(rope(norm(q)) @ rope(norm(k)).T / sqrt(head_dim)) @ v @ o.T, q, k, v = x @ qkv.T + bias

    qk_norm  False: no norms of q and k
    bias     False: no bias
    window   tokens that a token attends to, itself the last of them; None: all before it
    context_parallel  the cache is spread over the ranks by pages (weft.parallel.context), so every rank has all KV heads

    x, y: [T, hidden] on every rank; in mode "sequence_parallel" this rank's 1/W of these rows, padded to W's multiple.
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
        qk_norm: bool = True,
        bias: bool = False,
        window: int | None = None,
        context_parallel: bool = False,
    ) -> None:
        super().__init__()
        check_optional(positive, "window", window)
        check_layer(
            team, mode, dtype, hidden_size=hidden_size, num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads, head_dim=head_dim,
        )  # fmt: skip
        check_heads(num_attention_heads, num_key_value_heads, team.size)
        self.team, self.mode, self.head_dim = team, mode_named(mode), head_dim
        self.num_heads = split_evenly("num_attention_heads", num_attention_heads, team)
        self.num_kv_heads = max(num_key_value_heads // team.size, 1)
        first_kv_head = team.rank * num_key_value_heads // team.size
        if context_parallel:
            if window is not None:
                raise ValueError(
                    f"context_parallel=True: this layer attends to a window of {window} tokens, which few pages hold; pass "
                    f"context_parallel=False"
                )
            self.num_kv_heads, first_kv_head = num_key_value_heads, 0
        # Query heads that attend to the same KV head here.
        self.group = min(self.num_heads, num_attention_heads // num_key_value_heads)
        q_rows = Rows.even("num_attention_heads", num_attention_heads * head_dim, team)
        kv_rows = Rows(num_key_value_heads * head_dim, first_kv_head * head_dim, self.num_kv_heads * head_dim)
        parts = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        self.qkv_proj = ColumnParallelLinear(hidden_size, parts, team=team, dtype=dtype, bias=bias)
        self.o_proj = RowParallelLinear("o_proj", q_rows.total, hidden_size, team=team, dtype=dtype)
        self.eps, self.window = rms_norm_eps, window
        norm = {"eps": rms_norm_eps, "device": team.device, "dtype": dtype}
        self.q_norm, self.k_norm = (
            nn.RMSNorm(head_dim, **norm).requires_grad_(False) if qk_norm else None for _ in range(2)
        )

    @classmethod
    def from_module(cls, module: nn.Module, config: Any, team: Team, mode: Mode) -> TPAttention:
        """This rank's share of a whole attention, such as transformers' LlamaAttention or Qwen3Attention.

        `config` names the sizes as transformers' configuration of the module does. ValueError, by what was found, for a module
        that computes anything else: other norms, scaling, rotary embedding, masks or weights.
        """
        attention = cls(**check_module(module, config), team=team, mode=mode, dtype=module.q_proj.weight.dtype)
        fill_from_module(attention.shards(), module)
        return attention

    def shards(self) -> dict[str, Shard]:
        norms = {"q_norm.weight": self.q_norm, "k_norm.weight": self.k_norm}
        norms = {name: whole(norm.weight) for name, norm in norms.items() if norm is not None}
        return self.qkv_proj.shards() | self.o_proj.shards() | norms

    @property
    def weights(self) -> AttentionWeights:
        q_norm, k_norm = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        return AttentionWeights(
            self.qkv_proj.weight, self.o_proj.weight, q_norm, k_norm, self.eps,
            self.num_heads, self.num_kv_heads, self.head_dim, self.qkv_proj.bias, self.window,
        )  # fmt: skip

    def forward(self, x: torch.Tensor, step: Step, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """cache: this layer's keys and values [pages, kv_heads_local, page_size, head_dim], written in place.

        With a plan whose norms add up over the ranks, y is this rank's summand, or fp32 split-K partials of it.
        """
        return tensor_of(step.plan.recipe.attention(step.plan.recipe.given(x), self.weights, step, cache))


def check_heads(num_attention_heads: int, num_key_value_heads: int, world_size: int) -> None:
    """ValueError unless ranks get equal numbers of query heads, and of whole KV heads for them."""

    def fits(w: int) -> bool:
        return num_attention_heads % w == 0 and (num_key_value_heads % w == 0 or w % num_key_value_heads == 0)

    if not fits(world_size):
        possible = ", ".join(str(w) for w in range(1, num_attention_heads + 1) if fits(w))
        raise ValueError(
            f"num_attention_heads={num_attention_heads} (num_key_value_heads={num_key_value_heads}) cannot be split "
            f"over world_size={world_size}; use a world size of {possible}"
        )
