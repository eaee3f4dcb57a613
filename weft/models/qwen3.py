"""Qwen3, dense: its config, its architecture over parallel layers, and the names its weights have in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.errors import CheckpointError
from weft.layers import TPMLP, Mode, Step, TPAttention, VocabParallelEmbedding, VocabParallelHead
from weft.layers.parallel import all_gather
from weft.layers.shard import Shard, under, whole
from weft.models.checkpoint import Checkpoint, Progress

if TYPE_CHECKING:
    from weft.runtime.team import Team

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config:
    """The sizes of a dense Qwen3, under the names of its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: torch.dtype

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Qwen3Config:
        """Reads a config.json of transformers 4.x or 5.x. CheckpointError (a ValueError) for any but a dense Qwen3."""
        if (model_type := content.get("model_type")) != "qwen3":
            raise CheckpointError(f"config.json: model_type={model_type!r} is not supported; weft runs 'qwen3'")
        # 5.x keeps theta and the type in rope_parameters, 4.x has rope_theta beside a rope_scaling that is mostly null.
        rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        for name, value, supported in (
            ("rope_type", rope_type, "default"),
            ("hidden_act", content.get("hidden_act", "silu"), "silu"),
            ("attention_bias", content.get("attention_bias", False), False),
            ("use_sliding_window", content.get("use_sliding_window", False), False),
        ):
            if value != supported:
                raise CheckpointError(
                    f"config.json: {name}={value!r} is not supported; weft runs Qwen3 with {supported!r}"
                )
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        dtype = str(content.get("dtype") or content.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if dtype not in DTYPES:
            raise CheckpointError(f"config.json: dtype={dtype!r} is not supported; weft runs {', '.join(DTYPES)}")
        config = cls(
            **{name: content.get(name) for name in sizes},
            num_key_value_heads=content.get("num_key_value_heads") or content.get("num_attention_heads"),
            # What transformers assumes where the file says nothing.
            head_dim=content.get("head_dim") or 128,
            rms_norm_eps=content.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta") or content.get("rope_theta") or 10000.0,
            max_position_embeddings=content.get("max_position_embeddings", 32768),
            tie_word_embeddings=content.get("tie_word_embeddings", False),
            dtype=DTYPES[dtype],
        )
        for name in (*sizes, "num_key_value_heads", "head_dim", "max_position_embeddings"):
            if not isinstance(value := getattr(config, name), int) or value < 1:
                raise CheckpointError(f"config.json: {name}={value!r} is not a positive integer")
        if config.num_attention_heads % config.num_key_value_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads={config.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={config.num_key_value_heads}"
            )
        return config


class KVCache:
    """Keys and values of every layer: data[layers, 2, batch, kv_heads_local, max_len, head_dim], at a fixed address."""

    def __init__(
        self, layers: int, batch: int, kv_heads: int, max_len: int, head_dim: int, *, dtype: torch.dtype, device: Any
    ) -> None:
        # Zeros, not garbage: a masked-out NaN times the zero weight of the softmax would still be NaN.
        self.data = torch.zeros(layers, 2, batch, kv_heads, max_len, head_dim, dtype=dtype, device=device)
        self.max_len = max_len

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data[index, 0], self.data[index, 1]


class Qwen3Layer(nn.Module):
    """x = x + attention(norm(x)); x = x + mlp(norm(x)). Norms and residual see the tokens that this rank holds."""

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
            | {
                "input_layernorm.weight": whole(self.input_layernorm.weight),
                "post_attention_layernorm.weight": whole(self.post_attention_layernorm.weight),
            }
        )

    def forward(self, x: torch.Tensor, step: Step, cache: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3ForCausalLM(nn.Module):
    """Token ids → logits, over all ranks of `team`. Collective: all ranks call a method with the same tokens.

    Logits are this rank's [batch, V'/W] in fp32; `lm_head.argmax` and `lm_head.gather` bring them together.
    For inference: its weights carry no gradients. ValueError where W does not divide heads or intermediate size.
    """

    def __init__(self, config: Qwen3Config, team: Team, *, mode: Mode = "gemm_ar", dtype: torch.dtype | None = None):
        super().__init__()
        dtype = dtype or config.dtype
        if dtype not in DTYPES.values():
            raise ValueError(f"dtype={dtype} is not supported; pass one of {', '.join(map(str, DTYPES.values()))}")
        self.config, self.team, self.mode, self.dtype = config, team, mode, dtype
        self.layers = nn.ModuleList(
            Qwen3Layer(config, team=team, mode=mode, dtype=dtype) for _ in range(config.num_hidden_layers)
        )
        self.norm = _norm(config, team, dtype)
        words = {"team": team, "mode": mode, "dtype": dtype}
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, **words)
        self.lm_head = VocabParallelHead(config.vocab_size, config.hidden_size, **words)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    @classmethod
    def from_pretrained(
        cls,
        directory: str | PathLike[str] | Checkpoint,
        team: Team,
        *,
        mode: Mode = "gemm_ar",
        dtype: torch.dtype | None = None,
        progress: Progress | None = None,
    ) -> Qwen3ForCausalLM:
        """Reads this rank's slices of a checkpoint, cast to `dtype` (None: the checkpoint's own)."""
        checkpoint = directory if isinstance(directory, Checkpoint) else Checkpoint(directory)
        model = cls(Qwen3Config.from_dict(checkpoint.config), team, mode=mode, dtype=dtype)
        checkpoint.load(model.shards(), progress)
        return model

    def shards(self) -> dict[str, Shard]:
        """Checkpoint name → what this rank holds of it."""
        shards = under("model.embed_tokens", self.embed_tokens.shards())
        for index, layer in enumerate(self.layers):
            shards |= under(f"model.layers.{index}", layer.shards())
        shards["model.norm.weight"] = whole(self.norm.weight)
        if not self.config.tie_word_embeddings:
            shards |= under("lm_head", self.lm_head.shards())
        return shards

    def new_cache(self, batch: int, max_len: int) -> KVCache:
        kv_heads = self.layers[0].self_attn.num_kv_heads
        sizes = (len(self.layers), batch, kv_heads, max_len, self.config.head_dim)
        return KVCache(*sizes, dtype=self.dtype, device=self.team.device)

    def prefill(self, tokens: torch.Tensor, lengths: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """Right-padded prompts tokens[batch, length] → logits after token lengths[b] - 1 of each: [batch, V'/W]."""
        x = self._prompt(tokens, cache).view(*tokens.shape, -1)
        rows = torch.arange(tokens.shape[0], device=x.device)
        return self.lm_head(x[rows, lengths - 1])

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """One more token of each sequence, tokens[batch] at positions[batch] → logits after it [batch, V'/W].

        Shapes depend on nothing but the batch and the cache, and the host reads nothing: it can be captured.
        """
        config = self.config
        step = Step.decode(
            positions, cache.max_len, head_dim=config.head_dim, theta=config.rope_theta, dtype=self.dtype
        )
        return self.lm_head(self._run(tokens, step, cache))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Teacher-forced: tokens[batch, length] → all logits [batch, length, V], the same on every rank."""
        return self.lm_head.gather(self.lm_head(self._prompt(tokens, None))).view(*tokens.shape, -1)

    def _prompt(self, tokens: torch.Tensor, cache: KVCache | None) -> torch.Tensor:
        batch, length = tokens.shape
        config = self.config
        step = Step.prefill(
            batch,
            length,
            head_dim=config.head_dim,
            theta=config.rope_theta,
            device=tokens.device,
            dtype=self.dtype,
        )
        return self._run(tokens.flatten(), step, cache)

    def _run(self, tokens: torch.Tensor, step: Step, cache: KVCache | None) -> torch.Tensor:
        """tokens[n] → normed hidden states [n, hidden], the same on every rank."""
        x = self.embed_tokens(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, step, cache.layer(index) if cache is not None else None)
        x = self.norm(x)
        return all_gather(x, self.team, self.mode)[: len(tokens)] if self.mode == "ag_rs" else x


def _norm(config: Qwen3Config, team: Team, dtype: torch.dtype) -> nn.RMSNorm:
    norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, device=team.device, dtype=dtype)
    return norm.requires_grad_(False)
