"""Baseline of benchmarks: the reference recipe over a dense KV cache.

As gpt-fast does it: a static cache, fused qkv and gate-up GEMMs by F.linear, torch's SDPA and RMSNorm, NCCL for all-reduces,
everything captured in one CUDA graph by the caller; compiled.py puts torch.compile over the same functions. The weights
belong to a model of weft, by reference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F

from weft.kernels.four_bit import FourBit
from weft.parallel import plain
from weft.parallel.plain import normed_and_turned
from weft.parallel.quantized import operands
from weft.parallel.reference import AllReduce, Reference
from weft.parallel.rotary import rotary_angles
from weft.parallel.tensors import AttentionWeights, LayerWeights, Matrix, MoEWeights, NormWeights
from weft.parallel.vocabulary import best_of, best_pairs

if TYPE_CHECKING:
    from weft.models import Decoder, DecoderConfig
    from weft.runtime.team.team import Team

# Prompts with more tokens are read in several passes, as an engine does: GEMMs are as fast, and activations take less memory.
PREFILL_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """Methods that run, of ``recipe`` or the same compiled.

    gather  all ranks' rows of a tensor, where the recipe's x and residual are a rank's; None: all ranks have all rows
    """

    recipe: Reference
    layer: Callable[..., tuple[torch.Tensor, torch.Tensor]] = Reference.decoder_layer
    attention: Callable[..., torch.Tensor] = Reference.attention
    mlp: Callable[..., torch.Tensor] = Reference.feed_forward
    head: Callable[..., torch.Tensor] = Reference.logits
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None


class Cache(NamedTuple):
    """keys, values: [layers, batch, Hkv, max_len, D]; of one layer without the first dimension"""

    keys: torch.Tensor
    values: torch.Tensor


class Tokens(NamedTuple):
    """Tokens of a step: `new` of each of `batch` sequences.

    rotations  (cos, sin), [batch or 1, new, 1, D] of their positions, of each rotary embedding of the model
    rows       [batch], positions [batch]: where decoding writes the cache; None: whole prompts, at 0 .. new
    mask       [batch, 1, 1, max_len] bool: what decoding may see; None with whole prompts
    windowed   the same in layers with a window, of prompts [length, length]; None where no window is shorter than the sequences
    """

    batch: int
    new: int
    rotations: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    rows: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    windowed: torch.Tensor | None = None


def lacks(config: DecoderConfig) -> str:
    """Name of the model's blocks that the baseline does not compute; "" if it computes all."""
    if config.linear_attention is not None:
        return "gated delta nets"
    return "latent attention" if config.attention.latent is not None else ""


class Widened:
    """Layers whose weights are converted to fp32 on access."""

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self.layers = layers

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerWeights]:
        return (mapped(torch.Tensor.float, w) for w in self.layers)


class Baseline:
    """Model from tokens to this rank's logits. Collective: all ranks call a method with the same tokens."""

    def __init__(self, model: Decoder) -> None:
        """Use ``model``'s weights by reference."""
        self.config: DecoderConfig = model.config
        self.team: Team = model.team
        self.layers: Sequence[LayerWeights] | Widened = [
            mapped(torch.Tensor.detach, layer.weights) for layer in model.layers
        ]
        parts = model.embed_tokens.weights, NormWeights.of(model.norm), model.lm_head.weights
        self.table, self.norm, self.head = (mapped(torch.Tensor.detach, part) for part in parts)
        self.start, self.real = self.head.start, self.head.real
        self.dtype, self.device = self.head.weight.dtype, self.team.device
        recipe = Reference(team=self.team, attend=attend, all_reduce=all_reduce(self.team), experts=grouped)
        self.eager = Functions(recipe=recipe)
        self.angles = rotary_tables(self.config, self.dtype, self.device)
        # One mask serves all layers: config.json has one window.
        self.window = next((window for window in self.config.attention.windows if window is not None), None)

    def in_fp32(self) -> Baseline:
        """Copy of the model with every operation in fp32, to measure the error of rounding to `dtype`.

        One layer's weights are converted at a time.
        """
        wide = copy.copy(self)
        wide.dtype, wide.layers = torch.float32, Widened(self.layers)
        wide.angles = rotary_tables(self.config, torch.float32, self.device)
        wide.table, wide.norm, wide.head = (
            mapped(torch.Tensor.float, part) for part in (self.table, self.norm, self.head)
        )
        return wide

    def new_cache(self, batch: int, max_len: int) -> Cache:
        kv_heads = max(self.config.num_key_value_heads // self.team.size, 1)
        size = (len(self.layers), batch, kv_heads, max_len, self.config.head_dim)
        # Zeros, since a masked NaN times the softmax's zero weight is still NaN.
        return Cache(*(torch.zeros(size, dtype=self.dtype, device=self.device) for _ in range(2)))

    def prefill(
        self,
        tokens: torch.Tensor,
        at: Tokens,
        cache: Cache,
        run: Functions,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Prompts tokens[batch, length] → logits after the last token of each, or after the tokens ``rows``.

        ``at``: from `prompts`. Passes of at most PREFILL_TOKENS tokens, unless ``rows`` are given or ranks have a part of x.
        """
        if rows is not None or run.gather is not None:
            rows = self._last_rows(*tokens.shape) if rows is None else rows
            return self._logits(tokens.flatten(), at, cache, run, rows)
        batch, length = tokens.shape
        at_once, logits = max(1, PREFILL_TOKENS // length), []
        for first in range(0, batch, at_once):
            group = slice(first, min(first + at_once, batch))
            count = group.stop - group.start
            part, last = Cache(cache.keys[:, group], cache.values[:, group]), self._last_rows(count, length)
            logits.append(self._logits(tokens[group].flatten(), at._replace(batch=count), part, run, last))
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _last_rows(self, batch: int, length: int) -> torch.Tensor:
        return torch.arange(1, batch + 1, device=self.device) * length - 1

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache, run: Functions) -> torch.Tensor:
        """One more token of each sequence, [batch] at positions[batch] → logits after it. Can be captured."""
        return self._logits(tokens, self.one_each(positions, cache.keys.shape[3]), cache, run, None)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's logits → token id [batch] of the largest of all ranks', from one (value, id) a rank."""
        return best_of(self.team.library.all_gather(best_pairs(logits, self.start)[None]))

    def prompts(self, batch: int, length: int) -> Tokens:
        rotations = tuple((cos[None, :length], sin[None, :length]) for cos, sin in self.angles)
        at = torch.arange(length, device=self.device)
        return Tokens(batch=batch, new=length, rotations=rotations, windowed=self._windowed(at[:, None], length))

    def one_each(self, positions: torch.Tensor, max_len: int) -> Tokens:
        rotations = tuple((cos[positions[:, None]], sin[positions[:, None]]) for cos, sin in self.angles)
        mask = torch.arange(max_len, device=self.device) <= positions[:, None]
        windowed = self._windowed(positions[:, None, None, None], max_len)
        rows = torch.arange(len(positions), device=self.device)
        return Tokens(
            batch=len(positions),
            new=1,
            rotations=rotations,
            rows=rows,
            positions=positions,
            mask=mask[:, None, None],
            windowed=windowed,
        )

    def _windowed(self, positions: torch.Tensor, max_len: int) -> torch.Tensor | None:
        """Mask of layers with a window, [..., max_len] for positions [..., 1]."""
        if self.window is None or self.window >= max_len:
            return None
        age = positions - torch.arange(max_len, device=self.device)
        return (age >= 0) & (age < self.window)

    def _logits(
        self, tokens: torch.Tensor, at: Tokens, cache: Cache, run: Functions, rows: torch.Tensor | None
    ) -> torch.Tensor:
        x = self.eager.recipe.embed(tokens, self.table)
        if run.gather is not None:
            x = x.chunk(self.team.size)[self.team.rank]
        residual = torch.zeros_like(x)  # not None, so that a compiled layer is the same for all
        for w, *layer in zip(self.layers, cache.keys, cache.values, strict=True):
            x, residual = run.layer(run.recipe, x, residual, w, at, Cache(*layer))
        if run.gather is not None:
            x = run.gather(x + residual)  # one gather of the sum, in place of two
            residual = torch.zeros_like(x)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        return run.head(run.recipe, x, residual, self.norm, self.head, at, None)


def attend(qkv: torch.Tensor, w: AttentionWeights, at: Tokens, cache: Cache) -> torch.Tensor:
    """Bias, norm, rotary embedding, cache write, attention over a dense cache: [batch * new, heads * D]."""
    keys, values = cache
    windowed = None if w.window is None else at.windowed
    qkv = qkv if w.bias is None else qkv + w.bias
    q, k, v = qkv.view(at.batch, at.new, -1, w.head_dim).split([w.heads, w.kv_heads, w.kv_heads], dim=2)
    cos, sin = at.rotations[w.rotary]
    turn = partial(rotate, cos=cos, sin=sin)
    q, k = (normed_and_turned(x, norm, w, turn) for x, norm in ((q, w.q_norm), (k, w.k_norm)))
    if at.rows is None:
        keys[:, :, : at.new] = k.transpose(1, 2)
        values[:, :, : at.new] = v.transpose(1, 2)
        heads = (part.transpose(1, 2) for part in (q, k, v))
        out = plain.softmax_attention(*heads, w.scores, windowed).transpose(1, 2)
    else:
        keys[at.rows, :, at.positions] = k[:, 0]
        values[at.rows, :, at.positions] = v[:, 0]
        # The query heads of one KV head are rows of one attention, so that its keys are read once.
        packed = q.reshape(at.batch, w.kv_heads, w.heads // w.kv_heads, w.head_dim)
        out = plain.softmax_attention(packed, keys, values, w.scores, at.mask if windowed is None else windowed)
    return out.reshape(at.batch * at.new, w.heads * w.head_dim)


def grouped(x: torch.Tensor, w: MoEWeights) -> torch.Tensor:
    """This rank's summand of a mixture of experts, by torch's grouped GEMM over sorted rows.

    As transformers' experts_implementation="grouped_mm" does it; shapes do not depend on the routing.
    """
    (T, _), k, count = x.shape, w.gating.k, w.experts.count
    logits, gate = w.logits(F.linear(x, w.router))
    ids, weights = plain.routing_of(logits, w.bias, w.gating)
    local = ids.flatten() - w.experts.first
    # Pairs of other ranks' experts come last.
    local = torch.where((local < 0) | (local >= count), count, local)
    local, order = local.sort(stable=True)
    ends = torch.searchsorted(local, torch.arange(count, device=x.device), right=True).int()
    expert = local.clamp(max=count - 1)
    rows = x[order // k]
    gate_up = plain.with_bias(_grouped_linear(rows, w.gate_up, ends), w.gate_up_bias, expert)
    h = plain.silu_mul(gate_up) if w.swiglu is None else plain.clamped_swiglu(gate_up, w.swiglu)
    y = plain.with_bias(_grouped_linear(h, w.down, ends), w.down_bias, expert)
    weighted = torch.where((local < count)[:, None], y * weights.flatten()[order][:, None], 0)
    total = torch.empty_like(weighted).index_copy_(0, order, weighted).view(T, k, -1).sum(1)
    return total if w.shared is None else total + plain.shared_expert(x, w.shared, gate)


def _grouped_linear(rows: torch.Tensor, weight: Matrix, ends: torch.Tensor) -> torch.Tensor:
    rows, weight = operands(rows, weight)
    return torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotary_tables(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """(cos, sin) [max_positions, 1, D] of each rotary embedding of the model, computed in fp32."""
    tables = []
    for rotary in config.rotaries:
        halves = rotary_angles(config.max_position_embeddings, config.head_dim, rotary, device)[:, None].chunk(
            2, dim=-1
        )
        tables.append(tuple(torch.cat((half, half), dim=-1).to(dtype) for half in halves))
    return tuple(tables)


def mapped(change: Callable[[torch.Tensor], torch.Tensor], weights: Any) -> Any:
    """The same NamedTuple with `change` applied to every tensor in it, except matrices in 4 bits."""
    if isinstance(weights, FourBit):
        return weights
    if isinstance(weights, tuple):
        return type(weights)(*(mapped(change, part) for part in weights))
    return change(weights) if isinstance(weights, torch.Tensor) else weights


def all_reduce(team: Team) -> AllReduce:
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
