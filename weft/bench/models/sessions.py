"""Sessions: a model set up for a batch of sequences, weft's or the baseline's, with one interface."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from weft.bench.models.baseline import Baseline, Cache, Functions, Tokens
from weft.models.decoder import DEFAULT_PAGE_SIZE, Decoder
from weft.parallel.modes import mode_named

if TYPE_CHECKING:
    from weft.layers.moe import Layout
    from weft.models.config import DecoderConfig
    from weft.parallel.step import Step
    from weft.runtime.team.team import Team


class Session(Protocol):
    """Model for `batch` sequences of at most `max_len` tokens. Collective.

    x and y of a layer: [tokens, H], or [tokens' / W, H] if tokens are sharded, with tokens' the next multiple of W. Nothing
    waits for the GPU, and everything but `prompts` can be captured.
    """

    batch: int

    def prompts(self, length: int) -> object:
        """Data that `prefill` and `attend` need for prompts of this length."""

    def prefill(self, tokens: torch.Tensor, at: object) -> torch.Tensor:
        """Prompts [batch, length] → this rank's logits after the last token of each, [batch, V' / W] in fp32."""

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One more token of each sequence, [batch], at positions [batch] → logits after it."""

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Likeliest token id [batch] over all ranks."""

    def one_each(self, positions: torch.Tensor) -> object:
        """Data that `attend` needs for a decoding step."""

    def recall(self, history: Cache, length: int) -> None:
        """Fill the caches with the first `length` tokens of the baseline's `history`."""

    def fill_at_random(self) -> None:
        """Fill the caches with random numbers."""

    def is_sharded(self, tokens: int) -> bool:
        """True if a layer's x and y are sharded in a step of this many tokens."""

    def attend(self, index: int, x: torch.Tensor, at: object) -> torch.Tensor:
        """y = attention of layer `index`, summed over the ranks."""

    def mlp(self, index: int, x: torch.Tensor, tokens: int) -> torch.Tensor: ...


class TorchSession:
    """Session of the baseline, compiled if `functions` are given."""

    def __init__(self, model: Baseline, batch: int, max_len: int, functions: Functions | None = None) -> None:
        self.model, self.batch, self.max_len = model, batch, max_len
        self.cache = model.new_cache(batch, max_len)
        self.run = functions or model.eager

    def prompts(self, length: int) -> Tokens:
        return self.model.prompts(self.batch, length)

    def prefill(self, tokens: torch.Tensor, at: Tokens, rows: torch.Tensor | None = None) -> torch.Tensor:
        return self.model.prefill(tokens, at, self.cache, self.run, rows)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model.decode(tokens, positions, self.cache, self.run)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        return self.model.choose(logits)

    def one_each(self, positions: torch.Tensor) -> Tokens:
        return self.model.one_each(positions, self.max_len)

    def recall(self, history: Cache, length: int) -> None:
        self.cache = history

    def fill_at_random(self) -> None:
        for part in self.cache:
            part.normal_()

    def is_sharded(self, tokens: int) -> bool:
        return self.run.gather is not None

    def attend(self, index: int, x: torch.Tensor, at: Tokens) -> torch.Tensor:
        cache = Cache(self.cache.keys[index], self.cache.values[index])
        return self.run.attention(self.run.recipe, x, self.model.layers[index].attention, at, cache)

    def mlp(self, index: int, x: torch.Tensor, tokens: int) -> torch.Tensor:
        return self.run.mlp(self.run.recipe, x, self.model.layers[index].mlp)


class WeftSession:
    """Session of weft's model in one mode, with its KV cache in arbitrary pages."""

    def __init__(self, model: Decoder, batch: int, max_len: int) -> None:
        self.model, self.batch = model, batch
        each = -(-max_len // (DEFAULT_PAGE_SIZE * (model.team.size if model.context_parallel else 1)))
        self.cache = model.new_cache(1 + batch * each, slots=batch)
        shuffled = torch.randperm(batch * each, generator=torch.Generator().manual_seed(5))
        self.pages = (1 + shuffled).view(batch, each).to(model.team.device, torch.int32)

    def prompts(self, length: int) -> Step:
        return self.model.prefill_step([(0, length)] * self.batch, self.pages)

    def prefill(self, tokens: torch.Tensor, at: Step) -> torch.Tensor:
        last = torch.arange(1, self.batch + 1, device=tokens.device) * tokens.shape[1] - 1
        return self.model(tokens.flatten(), at, self.cache, last)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, self.model.decode_step(positions, self.pages), self.cache)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head.argmax(logits)

    def one_each(self, positions: torch.Tensor) -> Step:
        return self.model.decode_step(positions, self.pages)

    def recall(self, history: Cache, length: int) -> None:
        at, team = torch.arange(length, device=self.pages.device), self.model.team
        if self.model.context_parallel:  # this rank's tokens, of all heads
            entry = DEFAULT_PAGE_SIZE * team.size
            at = at[at // DEFAULT_PAGE_SIZE % team.size == team.rank]
            page = self.pages[:, at // entry].long()
        else:
            page = self.pages[:, at // DEFAULT_PAGE_SIZE].long()
        for index, layer in enumerate(zip(*history, strict=True)):
            for paged, part in zip(self.cache.layer(index), layer, strict=True):
                if self.model.context_parallel:
                    part = of_all_ranks(part.transpose(0, 1), paged.shape[1], team).transpose(0, 1)
                # [batch, tokens, Hkv, D] on both sides.
                paged[page, :, at % DEFAULT_PAGE_SIZE] = part[:, :, at].transpose(1, 2)

    def fill_at_random(self) -> None:
        self.cache.data.normal_()
        if self.cache.states is not None:
            for part in self.cache.states.kept:
                part.normal_()

    def is_sharded(self, tokens: int) -> bool:
        return self.model.plan(tokens).mode == "sequence_parallel"

    def attend(self, index: int, x: torch.Tensor, at: Step) -> torch.Tensor:
        at = replace(at, plan=at.plan.of_single_layers())
        return self.model.layers[index].self_attn(x, at, self.cache.layer(index))

    def mlp(self, index: int, x: torch.Tensor, tokens: int) -> torch.Tensor:
        return self.model.layers[index].mlp(x, self.model.plan(tokens).of_single_layers())


def build(
    config: DecoderConfig, team: Team, mode: str, dtype: torch.dtype, expert_layout: Layout | None = None
) -> Decoder:
    """weft's model with random weights that do not depend on the mode."""
    return Decoder(config, team, mode=mode, dtype=dtype, expert_layout=expert_layout).fill_dummy()


def in_mode(model: Decoder, mode: str) -> Decoder:
    """Copy of the model in another mode, with its weights by reference."""
    # Shared by the copy. Making another model would allocate its weights before they could be freed.
    kept = {id(p): nn.Parameter(p.data, requires_grad=False) for p in model.parameters()}
    made = copy.deepcopy(model, kept | {id(part): part for part in (model.team, model.angles)})
    for module in made.modules():
        if hasattr(module, "mode"):
            module.mode = mode_named(mode)
    made.runs_kernels = made.plan(1).fused
    return made


def in_fp8_wire(model: Decoder) -> Decoder:
    """The model with sums that travel in fp8, its weights by reference."""
    made = in_mode(model, model.mode)
    made.send_sums("fp8")
    return made


def over_context(model: Decoder) -> Decoder:
    """The model with a KV cache spread over the ranks, its other weights by reference. Collective."""
    if model.config.quantization is not None:
        raise ValueError("weft.context_parallel: its weights are of 16 bits; leave out --quantization")
    made = in_mode(model, model.mode)
    made.context_parallel = model.team.size > 1
    for layer in made.layers if made.context_parallel else ():
        attention, kv_heads = layer.self_attn, model.config.num_key_value_heads
        sizes = [n * attention.head_dim for n in (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)]
        for name, parameter in list(attention.qkv_proj.named_parameters()):
            queries, *rest = parameter.data.split(sizes)
            rest = [of_all_ranks(x.unflatten(0, (-1, attention.head_dim)), kv_heads, model.team) for x in rest]
            whole = torch.cat([queries, *(x.flatten(0, 1) for x in rest)])
            setattr(attention.qkv_proj, name, nn.Parameter(whole, requires_grad=False))
        attention.num_kv_heads = kv_heads
    return made


def of_all_ranks(x: torch.Tensor, heads: int, team: Team) -> torch.Tensor:
    """KV heads of all ranks [heads, ...] of this rank's; neighbours that share one hold the same."""
    gathered = team.library.all_gather(x.contiguous())
    return gathered[:: len(gathered) // heads]


def shard_of(x: torch.Tensor, team: Team) -> torch.Tensor:
    """This rank's rows of x [tokens, H], padded with zeros to a multiple of W."""
    return F.pad(x, (0, 0, 0, -x.shape[0] % team.size)).chunk(team.size)[team.rank].contiguous()
