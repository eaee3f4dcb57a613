"""Dense tensor-parallel Qwen3 in plain torch: reference and baseline of weft's models.

The recipe of gpt-fast: a static dense KV cache, fused qkv and gate-up GEMMs by F.linear, torch's SDPA and RMSNorm, NCCL for
all-reduces, everything captured in one CUDA graph by the caller; `compiled` puts torch.compile over the same functions.
It shares its weights with a model of weft by reference, and no code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from weft.bench.levels import dense
from weft.bench.levels.dense import LayerWeights, Sizes, Sum, Tokens

if TYPE_CHECKING:
    from weft.models import Decoder
    from weft.models.config import DecoderConfig
    from weft.runtime.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """Functions of a step: weft.bench.levels.dense's, or these compiled."""

    layer: Callable[..., tuple[torch.Tensor, torch.Tensor]] = dense.layer
    summed_attention: Callable[..., torch.Tensor] = dense.summed_attention
    summed_mlp: Callable[..., torch.Tensor] = dense.summed_mlp
    head: Callable[..., torch.Tensor] = dense.head


class Cache(NamedTuple):
    """KV cache; keys, values: [layers, batch, Hkv, max_len, D]"""

    keys: torch.Tensor
    values: torch.Tensor


class Widened:
    """Layers whose weights are converted to fp32 on access."""

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self.layers = layers

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerWeights]:
        for w in self.layers:
            yield LayerWeights(*(part.float() for part in w))


class Baseline:
    """Model from tokens to this rank's logits. Collective: all ranks call a method with the same tokens."""

    def __init__(self, model: Decoder) -> None:
        """``model``'s weights, by reference."""
        self.config: DecoderConfig = model.config
        self.team: Team = model.team
        self.layers: Sequence[LayerWeights] | Widened = [layer_weights(part) for part in model.layers]
        self.embedding, self.final_norm, self.vocabulary = (
            part.weight.detach() for part in (model.embed_tokens, model.norm, model.lm_head)
        )
        self.start, self.real = model.lm_head.start, model.lm_head.real_size
        self.sizes = sizes_of(self.config, self.team.size)
        self.dtype, self.device = self.vocabulary.dtype, self.team.device
        self.sum: Sum = all_reduce(self.team)
        self.angles = rotary_table(self.config, self.dtype, self.device)

    def in_fp32(self) -> Baseline:
        """Copy of the model with every operation in fp32, to measure the error of rounding to `dtype`.

        One layer's weights are converted at a time.
        """
        wide = copy.copy(self)
        wide.dtype, wide.layers = torch.float32, Widened(self.layers)
        wide.angles = rotary_table(self.config, torch.float32, self.device)
        wide.embedding, wide.final_norm, wide.vocabulary = (
            part.float() for part in (self.embedding, self.final_norm, self.vocabulary)
        )
        return wide

    def new_cache(self, batch: int, max_len: int) -> Cache:
        size = (len(self.layers), batch, self.sizes.kv_heads, max_len, self.sizes.head_dim)
        # Zeros, since a masked NaN times the softmax's zero weight is still NaN.
        return Cache(*(torch.zeros(size, dtype=self.dtype, device=self.device) for _ in range(2)))

    def prefill(
        self,
        tokens: torch.Tensor,
        at: Tokens,
        cache: Cache,
        run: Functions,
        summed: Sum,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Prompts tokens[batch, length] → logits after the last token of each, or after the tokens ``rows``.

        ``at``: from `prompts`.
        """
        batch, length = tokens.shape
        x, more = self._layers(tokens.flatten(), at, cache, run, summed)
        if rows is None:
            rows = torch.arange(1, batch + 1, device=x.device) * length - 1
        return self._head(x[rows], more[rows], run)

    def decode(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache, run: Functions, summed: Sum
    ) -> torch.Tensor:
        """One more token of each sequence, tokens[batch] at positions[batch] → logits after it.

        Can be captured.
        """
        at = self.one_each(positions, cache.keys.shape[3])
        return self._head(*self._layers(tokens, at, cache, run, summed), run)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's logits → the likeliest token id [batch] over all ranks.

        Sends one (value, id) per rank and row.
        """
        pairs = gathered(self.team, dense.best_words(logits, self.start)[None])
        winner = pairs[:, :, 0].argmax(dim=0)
        return pairs[:, :, 1].gather(0, winner[None])[0].long()

    def prompts(self, batch: int, length: int) -> Tokens:
        cos, sin = (table[None, :length] for table in self.angles)
        return Tokens(batch=batch, new=length, cos=cos, sin=sin)

    def one_each(self, positions: torch.Tensor, max_len: int) -> Tokens:
        cos, sin = (table[positions[:, None]] for table in self.angles)
        mask = torch.arange(max_len, device=self.device) <= positions[:, None]
        rows = torch.arange(len(positions), device=self.device)
        return Tokens(
            batch=len(positions), new=1, cos=cos, sin=sin, rows=rows, positions=positions, mask=mask[:, None, None]
        )

    def _layers(
        self, tokens: torch.Tensor, at: Tokens, cache: Cache, run: Functions, summed: Sum
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = dense.embed(tokens, self.embedding, self.start, self.sum)
        more = torch.zeros_like(x)
        for w, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            x, more = run.layer(x, more, w, keys, values, at, self.sizes, summed)
        return x, more

    def _head(self, x: torch.Tensor, more: torch.Tensor, run: Functions) -> torch.Tensor:
        return run.head(x, more, self.final_norm, self.vocabulary, self.real, self.sizes.eps)


def layer_weights(part: Any) -> LayerWeights:
    """Weights of one layer of a model of weft, by reference."""
    mixing, gated = part.self_attn, part.mlp
    return LayerWeights(
        *(module.weight.detach() for module in (
            part.input_layernorm, mixing.qkv_proj, mixing.q_norm, mixing.k_norm, mixing.o_proj,
            part.post_attention_layernorm, gated.gate_up_proj, gated.down_proj,
        ))
    )  # fmt: skip


def rotary_table(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [max_positions, 1, D], computed in fp32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    angles = torch.arange(config.max_position_embeddings, device=device).float()[:, None] / config.rope_theta**exponents
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def sizes_of(config: DecoderConfig, world_size: int) -> Sizes:
    kv_heads = max(config.num_key_value_heads // world_size, 1)
    return Sizes(config.num_attention_heads // world_size, kv_heads, config.head_dim, config.rms_norm_eps)


# --- the ranks ---------------------------------------------------------------------------------------------------------


def all_reduce(team: Team) -> Sum:
    """Sum over the ranks, in place by NCCL if there is a group."""
    group = team.group
    if team.size == 1:
        return lambda x: x
    if group is None:
        return team.library.all_reduce

    def in_place(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=group)
        return x

    return in_place


def traced_all_reduce(team: Team) -> Sum:
    """Sum over the ranks as an op in the graph, as torch.compile needs it."""
    if team.size == 1:
        return lambda x: x
    name, ops = team.group.group_name, torch.ops._c10d_functional
    return lambda x: ops.wait_tensor(ops.all_reduce(x, "sum", name))


def gathered(team: Team, x: torch.Tensor) -> torch.Tensor:
    """x[1, …] of every rank: [W, …]."""
    if team.group is None or team.size == 1:
        return team.library.all_gather(x)
    out = x.new_empty((team.size, *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=team.group)
    return out


def compiled(rows: int) -> Functions:
    """Layers and head by torch.compile, for steps of this many tokens.

    Embedding and choice are a few small kernels.

    A layer is compiled once for all layers, which differ in tensors only. Layers of one token use coordinate_descent_tuning, as
    gpt-fast does: their GEMMs become kernels of their own, which may stream weights faster than cuBLAS. It takes a minute. With
    more tokens GEMMs are cuBLAS's in any case.
    """

    def one(function: Callable, tuned: bool) -> Callable:
        return torch.compile(function, fullgraph=True, dynamic=False, options={"coordinate_descent_tuning": tuned})

    layers = {name: one(getattr(dense, name), rows == 1) for name in ("layer", "summed_attention", "summed_mlp")}
    return Functions(**layers, head=one(dense.head, False))
