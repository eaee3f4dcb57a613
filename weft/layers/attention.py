"""Grouped-query attention over a paged cache, its heads split over the ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.arguments import check_optional, positive
from weft.layers.gradients import SharedHeadsGradient, SummedGradient, asked_for, replicated_plan, with_gradients
from weft.layers.norm import RMSNorm
from weft.layers.same_bits import with_backward
from weft.layers.whole_attention import check_module
from weft.parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    Rows,
    check_layer,
    check_rows,
    empty_parameter,
    split_evenly,
)
from weft.parallel.modes import Mode, mode_named
from weft.parallel.quantized import Formats, Fp8Scales, block_moved_whole
from weft.parallel.recipe import StepPlan
from weft.parallel.rotary import rotary_order
from weft.parallel.sequences import Sequences
from weft.parallel.sharding import Shard, fill_from_module, in_order, under
from weft.parallel.step import Step
from weft.parallel.tensors import AttentionWeights, tensor_of
from weft.parallel.widened import fp8_formats

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


class TPAttention(nn.Module):
    """y = softmax(rope(norm(q)) @ rope(norm(k)).T * scale) @ v @ o.T + o_bias, q, k, v = x @ qkv.T + bias

    qk_norm  False: no norms of q and k
    unrotated  norms of each head of q and k come after the rotary embedding: number of the step's table of angles of 0
    norm_names  of these norms in a checkpoint
    norm_all_heads  norms of q and k over all heads at once, in place of each head
    one_plus_norms  weights of these norms are w of 1 + w in a checkpoint (weft.layers.norm)
    bias, output_bias  False: no bias
    window   tokens that a token attends to, itself included; None: all before it
    scale    of scores; None: head_dim ** -0.5
    softcap  softcap * tanh(score / softcap) in place of a score; None: scores as they are
    sinks    a score beside each query head's, without a value, that the softmax counts
    rotary   number of the step's table of angles, where it has several
    rotated, interleaved  as of ``rotary_order``, by which rows of q and k are read; None: all elements are rotated
    inputs   rows of hidden_size side by side in x: [T, inputs * hidden]; y is [T, hidden]
    gated    q_proj has a gate beside each query head: o_proj takes attention times the sigmoid of its gate
    formats  of the weights; None: they are in `dtype`. Quantized ones have no gradients: RuntimeError. Projections of gated
             attention run in fp8 and in `dtype` (``fp8_formats``)
    context_parallel  the cache is spread over the ranks by pages (weft.parallel.context), so every rank has all KV heads

    x, y: [T, hidden] on every rank, the tokens of a Step; in mode "sequence_parallel" this rank's 1/W of these rows, padded to
    W's multiple. Or [batch, length, hidden] of Sequences; in mode "sequence_parallel" this rank's 1/W of each sequence.
    Rank r has query heads r * heads / W and on; with fewer KV heads than ranks, W / kv_heads neighbours share one.
    ValueError where the heads cannot be split over W ranks.

    Trains with Sequences as TPMLP does, after ``attention.requires_grad_()``: gradients of norms and of KV heads that ranks
    share are summed over the sharers in the backward, so that they stay the same on all.
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
        unrotated: int | None = None,
        norm_names: tuple[str, str] = ("q_norm", "k_norm"),
        norm_all_heads: bool = False,
        one_plus_norms: bool = False,
        bias: bool = False,
        output_bias: bool = False,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        rotary: int = 0,
        rotated: int | None = None,
        interleaved: bool = False,
        inputs: int = 1,
        gated: bool = False,
        context_parallel: bool = False,
        formats: Formats | None = None,
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
        # Ranks that hold the same KV head.
        self.sharers = 1 if context_parallel else max(team.size // num_key_value_heads, 1)
        first_kv_head = team.rank * num_key_value_heads // team.size
        if context_parallel:
            self.num_kv_heads, first_kv_head = num_key_value_heads, 0
        # Query heads that attend to the same KV head here.
        self.group = min(self.num_heads, num_attention_heads // num_key_value_heads)
        q_rows = Rows.even("num_attention_heads", num_attention_heads * head_dim, team)
        projected = Rows.even("num_attention_heads", 2 * q_rows.total, team) if gated else q_rows
        kv_rows = Rows(num_key_value_heads * head_dim, first_kv_head * head_dim, self.num_kv_heads * head_dim)
        parts = {"q_proj": projected, "k_proj": kv_rows, "v_proj": kv_rows}
        options = {"team": team, "dtype": dtype}
        self.norm_all_heads, self.gated = norm_all_heads, gated
        self.order = rotary_order(head_dim, head_dim if rotated is None else rotated, interleaved)
        orders = self._orders()
        of_qkv = {"bias": bias, "formats": formats}
        if gated:  # rows of queries and gates change places, by blocks that keep their scales
            block = min(block_moved_whole(orders[name]) for name in parts if name in orders)
            of_qkv = {"formats": fp8_formats(formats), "block": block}
        self.qkv_proj = ColumnParallelLinear(inputs * hidden_size, parts, **of_qkv, **options)
        of_o = {"bias": output_bias, "formats": formats}
        self.o_proj = RowParallelLinear("o_proj", q_rows.total, hidden_size, **of_o, **options)
        self.eps, self.window, self.scale, self.softcap, self.rotary = rms_norm_eps, window, scale, softcap, rotary
        self.unrotated, self.norm_names = unrotated, norm_names
        if gated and (bias or norm_all_heads):
            raise ValueError(
                "gated attention with biases or norms over all heads: weft does not run it; leave these out"
            )
        if unrotated is not None and (gated or norm_all_heads):
            raise ValueError(
                "norms after the rotary embedding with gates or over all heads: weft does not run it; leave these out"
            )
        self.sinks = empty_parameter(self.num_heads, team=team, dtype=dtype) if sinks else None
        if self.order is not None and not gated:
            check_order(self.qkv_proj, head_dim)
        self.q_norm, self.k_norm = (
            RMSNorm(rows if norm_all_heads else head_dim, rms_norm_eps, team=team, dtype=dtype, one_plus=one_plus_norms)
            if qk_norm
            else None
            for rows in (q_rows, kv_rows)
        )

    @classmethod
    def from_module(cls, module: nn.Module, config: object, team: Team, mode: Mode) -> TPAttention:
        """This rank's share of a whole attention, such as transformers' LlamaAttention or Qwen3Attention.

        `config` names the sizes as transformers' configuration of the module does. ValueError, with all differences, for a
        module that computes anything else: other norms, scaling, rotary embedding, masks or weights.
        """
        attention = cls(**check_module(module, config), team=team, mode=mode, dtype=module.q_proj.weight.dtype)
        fill_from_module(attention.shards(), module)
        return attention

    def shards(self) -> dict[str, Shard]:
        norms = {"q_norm": self.q_norm, "k_norm": self.k_norm}
        shards = self.qkv_proj.shards() | self.o_proj.shards()
        for name, norm in norms.items():
            shards |= {} if norm is None else under(name, norm.shards())
        orders = self._orders()
        for name, shard in shards.items():
            if (order := orders.get(name.split(".")[0])) is not None:
                shards[name] = in_order(shard, order.to(self.team.device))
        if self.sinks is not None:
            first, total = self.team.rank * self.num_heads, self.team.size * self.num_heads
            shards["sinks"] = Shard(target=self.sinks.data, shape=(total,), start=first)
        named = {f"{norm}.weight": f"{name}.weight" for norm, name in zip(norms, self.norm_names, strict=True)}
        return {named.get(name, name): shard for name, shard in shards.items()}

    def _orders(self) -> dict[str, torch.Tensor]:
        """Order of rows by matrix or norm, where a checkpoint has another one."""
        D, order, orders = self.head_dim, self.order, {}
        if order is not None:
            q, k = (
                (torch.arange(0, heads * D, D)[:, None] + order).flatten()
                for heads in (self.num_heads, self.num_kv_heads)
            )
            orders = {"q_proj": q, "k_proj": k, "q_norm": order, "k_norm": order}
            if self.norm_all_heads:
                orders |= {"q_norm": q, "k_norm": k}
        if self.gated:  # there a head's query and gate take turns
            rows = torch.arange(2 * self.num_heads * D).view(self.num_heads, 2, D)
            queries = rows[:, 0] if order is None else rows[:, 0, order]
            orders["q_proj"] = torch.cat((rows[:, 1].flatten(), queries.flatten()))
        return orders

    @property
    def weights(self) -> AttentionWeights:
        q_norm, k_norm = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        return AttentionWeights(
            self.qkv_proj.matrix, self.o_proj.matrix, q_norm, k_norm, self.eps,
            self.num_heads, self.num_kv_heads, self.head_dim, self.qkv_proj.bias, self.window, self.scale, self.softcap,
            self.o_proj.bias, self.rotary, self.sinks, self.norm_all_heads, self.gated, self.unrotated,
            self.qkv_proj.lora, self.o_proj.lora,
        )  # fmt: skip

    def forward(
        self, x: torch.Tensor, step: Step | Sequences, cache: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """cache: of a Step, this layer's [pages, kv_heads_local, page_size, head_dim] twice, written in place.

        With a plan whose norms add up over the ranks, y is this rank's summand, or fp32 split-K partials of it.
        """
        check_rows("TPAttention", x, self.qkv_proj.matrix)
        recipe, weights = step.plan.recipe, self.weights
        if isinstance(step, Sequences):
            self._check_sequences(x, step)
            if with_gradients(self, x, step.plan):
                if step.plan.mode == "invariant":
                    again = replace(step, plan=replicated_plan(step.plan))
                    return with_backward(self, x, lambda x: self(x, step), lambda x: self(x, again))
                weights = self._shared(weights, step.plan)
        elif x.dim() == 3:
            raise ValueError(
                "TPAttention: x is [batch, length, hidden] and step a Step; pass Sequences, or x.flatten(0, 1)"
            )
        elif asked_for(self, x):
            raise RuntimeError(
                "TPAttention has no gradients with a paged cache; pass Sequences, or call it in torch.no_grad()"
            )
        y = tensor_of(recipe.attention(recipe.given(x.flatten(0, -2)), weights, step, cache))
        return y.unflatten(-2, x.shape[:-1]) if x.dim() == 3 else y

    def _check_sequences(self, x: torch.Tensor, step: Sequences) -> None:
        """ValueError unless x are this rank's rows of ``step``."""
        if step.length % step.shards:
            raise ValueError(
                f"TPAttention: length={step.length} is not divisible by world_size={step.shards}; pad to "
                f"{step.length + -step.length % step.shards}"
            )
        shape = (step.batch, step.length // step.shards, x.shape[-1])
        if x.shape != shape:
            raise ValueError(f"TPAttention: x has shape {tuple(x.shape)}, and this rank's rows of step are {shape}")

    def _shared(self, weights: AttentionWeights, plan: StepPlan) -> AttentionWeights:
        """``weights``, with gradients summed over the ranks that hold the same."""
        summed = weights._asdict()
        # Where every rank adds it to all rows, its gradient is whole.
        split = ("o_bias",) if plan.mode == "sequence_parallel" else ()
        for name in ("q_norm", "k_norm", *split):
            if summed[name] is not None:
                summed[name] = SummedGradient.apply(summed[name], self.team)
        shared = 2 * self.num_kv_heads * self.head_dim
        for name in ("qkv", "bias"):
            if summed[name] is not None and self.sharers > 1:
                summed[name] = SharedHeadsGradient.apply(summed[name], shared, self.sharers, self.team)
        return AttentionWeights(**summed)


def check_order(projection: ColumnParallelLinear, head_dim: int) -> None:
    """ValueError unless rows of a head may change places: scales are of rows, whole heads or all."""
    if (scales := projection.scales) is None:
        return
    if not isinstance(scales, Fp8Scales) or (scales.grid.format.scheme == "block" and scales.grid.rows % head_dim):
        raise ValueError(
            "rotary embedding that is partial or interleaved, with quantized q_proj and k_proj whose scales are not of whole "
            "heads or of single rows: rows cannot be read in another order; take weights of 16 bits"
        )


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
