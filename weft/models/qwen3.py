"""Qwen3, dense: its architecture over parallel layers, and the names its weights have in a checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.errors import ModelTooLarge
from weft.layers import TPMLP, TPAttention
from weft.models.checkpoint import Checkpoint, Progress
from weft.models.config import DTYPES, Qwen3Config
from weft.parallel.norm import ResidualRMSNorm
from weft.parallel.rotary import rotary_angles
from weft.parallel.sharding import Shard, under
from weft.parallel.step import PagedCache, Step
from weft.parallel.step_plan import Mode, StepPlan, check_head_dim, mode_named, plan_step
from weft.parallel.tensors import LayerWeights
from weft.parallel.vocabulary import VocabParallelEmbedding, VocabParallelHead

if TYPE_CHECKING:
    from weft.runtime.team import Team

DEFAULT_PAGE_SIZE = 64
logger = logging.getLogger("weft")


class Qwen3Layer(nn.Module):
    """One rank's share of a decoder layer: weights that a recipe of weft.parallel computes with."""

    def __init__(self, config: Qwen3Config, *, team: Team, mode: Mode, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = _norm(config, team, dtype)
        self.self_attn = TPAttention(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            team=team,
            mode=mode,
            dtype=dtype,
        )
        self.post_attention_layernorm = _norm(config, team, dtype)
        self.mlp = TPMLP(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            team=team,
            mode=mode,
            dtype=dtype,
        )

    def shards(self) -> dict[str, Shard]:
        return (
            under("self_attn", self.self_attn.shards())
            | under("mlp", self.mlp.shards())
            | under("input_layernorm", self.input_layernorm.shards())
            | under("post_attention_layernorm", self.post_attention_layernorm.shards())
        )

    @property
    def weights(self) -> LayerWeights:
        return LayerWeights(
            self.input_layernorm.weights,
            self.self_attn.weights,
            self.post_attention_layernorm.weights,
            self.mlp.weights,
        )


def check_memory(config: Qwen3Config, team: Team, dtype: torch.dtype) -> None:
    """ModelTooLarge where a rank's share of the weights alone is more than its GPU has free, or all virtual ranks' shares more
    than the machine has."""
    share = config.parameters * dtype.itemsize // team.size
    memory: int | None
    virtual = team.device.type != "cuda"
    if not virtual:
        memory, where, shares = free_bytes(team.device), f"{team.device} that are free", 1
    else:
        memory, where, shares = memory_of_this_machine(), "this machine, which virtual ranks share", team.size
    if memory is not None and share * shares > memory:
        raise ModelTooLarge(team.rank, share, memory, where, team.size, str(dtype).removeprefix("torch."), virtual)


def check_cache(config: Qwen3Config, team: Team, dtype: torch.dtype, pages: int, page_size: int) -> None:
    """ValueError where a KV cache of so many pages alone is more than what `check_memory` compares weights with."""
    kv_heads = max(config.num_key_value_heads // team.size, 1)
    page_bytes = 2 * config.num_hidden_layers * kv_heads * page_size * config.head_dim * dtype.itemsize
    virtual = team.device.type != "cuda"
    memory = memory_of_this_machine() if virtual else free_bytes(team.device)
    if memory is not None and (most := memory // (page_bytes * (team.size if virtual else 1))) < pages:
        raise ValueError(
            f"pages={pages} are more than the {most} of {page_size} tokens that rank {team.rank} has memory for "
            f"({memory / 1e9:.3g} GB{', shared by all virtual ranks' if virtual else ' free'}); lower it, or leave it out"
        )


def free_bytes(device: torch.device) -> int:
    """Of a GPU, for a new tensor. What torch holds and no tensor uses is given back first, so that it counts; what it keeps for
    CUDA graphs does not."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def memory_of_this_machine() -> int | None:
    """Bytes; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


class Qwen3ForCausalLM(nn.Module):
    """Token ids → logits, over all ranks of `team`. Collective: all ranks call a method with the same tokens.

    mode   "torch", "ag_rs", "gemm_ar", or "auto", which chooses between the last two by the number of tokens
    fused  local work between the GEMMs in weft.ops' kernels; None: where the team is on GPUs. Mode "torch" never is

    Logits are this rank's [n, V'/W] in fp32, or in a fused plan in the model's dtype; `lm_head.argmax` and `lm_head.gather`
    bring them together.
    For inference: its weights carry no gradients. ValueError where W does not divide heads or intermediate size, or fused
    kernels take no such heads; ModelTooLarge where the weights do not fit.
    """

    def __init__(
        self,
        config: Qwen3Config,
        team: Team,
        *,
        mode: Mode = "auto",
        dtype: torch.dtype | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        dtype = dtype or config.dtype
        if dtype not in DTYPES.values():
            raise ValueError(f"dtype={dtype} is not supported; pass one of {', '.join(map(str, DTYPES.values()))}")
        sizes = {"hidden_size": config.hidden_size, "dtype": dtype}
        if plan_step(1, mode=mode, **sizes, team=team, fused=fused).fused:
            check_head_dim(config.head_dim)
        check_memory(config, team, dtype)
        self.config, self.team, self.mode, self.dtype, self.fused = config, team, mode_named(mode), dtype, fused
        self.layers = nn.ModuleList(
            Qwen3Layer(config, team=team, mode=mode, dtype=dtype) for _ in range(config.num_hidden_layers)
        )
        self.norm = _norm(config, team, dtype)
        words = {"team": team, "mode": mode, "dtype": dtype}
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, **words)
        self.lm_head = VocabParallelHead(config.vocab_size, config.hidden_size, **words)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.angles = rotary_angles(config.max_position_embeddings, config.head_dim, config.rope_theta, team.device)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | PathLike[str] | Checkpoint,
        team: Team,
        *,
        mode: Mode = "auto",
        dtype: torch.dtype | None = None,
        fused: bool | None = None,
        progress: Progress | None = None,
    ) -> Qwen3ForCausalLM:
        """Reads this rank's slices of a checkpoint, cast to `dtype` (None: the checkpoint's own). Warnings as of `load`."""
        checkpoint = directory if isinstance(directory, Checkpoint) else Checkpoint(directory)
        model = cls(Qwen3Config.of(checkpoint), team, mode=mode, dtype=dtype, fused=fused)
        for line in model.load(checkpoint, progress):
            if team.rank == 0:
                logger.warning(line)
        return model

    def load(self, checkpoint: Checkpoint, progress: Progress | None = None) -> list[str]:
        """Reads this rank's slices. Collective. Returns what to warn of, a line each: NaN, and tensors that are not used."""
        shards = self.shards()
        odd = {name for names in self.team.exchange(checkpoint.load(shards, progress)) for name in names}
        unused = checkpoint.unused({*shards, "lm_head.weight"})  # a tied head is there twice, and alike
        where, dtype = checkpoint.directory, str(self.dtype).removeprefix("torch.")
        lines = []
        if odd:
            found = _listed([name for name in shards if name in odd])
            lines.append(f"{where}: NaN or infinite weights in {dtype}, so answers mean nothing: {found}")
        if unused:
            lines.append(f"{where}: tensors that this model does not have, and does not use: {_listed(unused)}")
        return lines

    def fill_dummy(self, seed: int = 0) -> Qwen3ForCausalLM:
        """Random weights, made on the device: matrices N(0, 0.02), norms 1 and 5 % noise. For benchmarks; returns itself.

        The same on every run of a rank. What all ranks hold alike (norms) is alike; W ranks make another model than W + 1.
        """
        for index, (name, shard) in enumerate(self.shards().items()):
            generator = torch.Generator(self.team.device)
            if "norm" in name:
                generator.manual_seed(seed * 7919 + index)
                shard.target.normal_(1.0, 0.05, generator=generator)
            else:
                generator.manual_seed((seed * 7919 + index) * 1024 + self.team.rank + 1)
                shard.target.normal_(0.0, 0.02, generator=generator)
        return self

    def shards(self) -> dict[str, Shard]:
        """Checkpoint name → what this rank holds of it."""
        shards = under("model.embed_tokens", self.embed_tokens.shards())
        for index, layer in enumerate(self.layers):
            shards |= under(f"model.layers.{index}", layer.shards())
        shards |= under("model.norm", self.norm.shards())
        if not self.config.tie_word_embeddings:
            shards |= under("lm_head", self.lm_head.shards())
        return shards

    def plan(self, tokens: int) -> StepPlan:
        """How a forward pass of so many tokens is computed, and why; print it."""
        sizes = {"hidden_size": self.config.hidden_size, "dtype": self.dtype}
        return plan_step(tokens, mode=self.mode, **sizes, team=self.team, fused=self.fused)

    def new_cache(self, pages: int, page_size: int = DEFAULT_PAGE_SIZE) -> PagedCache:
        kv_heads = self.layers[0].self_attn.num_kv_heads
        sizes = (len(self.layers), pages, kv_heads, page_size, self.config.head_dim)
        return PagedCache(*sizes, dtype=self.dtype, device=self.team.device)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        attention = self.layers[0].self_attn
        return attention.num_heads // attention.num_kv_heads

    def decode_step(self, positions: torch.Tensor, pages: torch.Tensor, page_size: int = DEFAULT_PAGE_SIZE) -> Step:
        """One new token of each sequence at positions[B] int64 (-1: padding), with the page table pages[B, max_pages] int32.

        Made on the device from values that lie there: it may be captured in a CUDA graph.
        """
        kv_heads = self.layers[0].self_attn.num_kv_heads
        return Step.decode(positions, pages, page_size, self.angles, self.plan(len(positions)), kv_heads)

    def prefill_step(
        self, spans: Sequence[tuple[int, int]], pages: torch.Tensor, page_size: int = DEFAULT_PAGE_SIZE
    ) -> Step:
        """Sequence b goes on by `length` tokens after `before` cached ones, (before, length) = spans[b]."""
        tokens = sum(length for _, length in spans)
        return Step.prefill(spans, pages, page_size, self.angles, self.plan(tokens), self.group, self.dtype)

    def forward(
        self, tokens: torch.Tensor, step: Step, cache: PagedCache, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """tokens[T] → logits [n, V'/W] after the tokens `rows` [n] (None: after each of them).

        Keys and values go into `cache`. Shapes depend on nothing but the step's, and the host reads nothing: it can be captured
        in a CUDA graph, after one call outside.
        """
        x, residual = self._layers(tokens, step, cache)
        recipe = step.plan.of_head(step.tokens if rows is None else len(rows)).recipe
        return recipe.logits(x, residual, self.norm.weights, self.lm_head.weights, step, rows)

    def fill_cache(self, tokens: torch.Tensor, step: Step, cache: PagedCache) -> None:
        """The same, of a prompt's part that no token is chosen after."""
        self._layers(tokens, step, cache)

    def _layers(self, tokens: torch.Tensor, step: Step, cache: PagedCache) -> tuple[Any, Any]:
        recipe = step.plan.recipe
        x, residual = recipe.embed(tokens, self.embed_tokens.weights), None
        for index, layer in enumerate(self.layers):
            x, residual = recipe.decoder_layer(x, residual, layer.weights, step, cache.layer(index))
        return x, residual


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _norm(config: Qwen3Config, team: Team, dtype: torch.dtype) -> ResidualRMSNorm:
    return ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, team=team, dtype=dtype)
