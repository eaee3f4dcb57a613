"""The sizes of a dense Qwen3: from a config.json, or those of a published model by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import CheckpointError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# hidden, intermediate, layers, heads, KV heads, whether head and embedding share their weight: config.json of Qwen/Qwen3-*.
PUBLISHED = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, False),
    "qwen3-14b": (5120, 17408, 40, 40, 8, False),
    "qwen3-32b": (5120, 25600, 64, 64, 8, False),
}

# qwen3-0.6b takes a minute for two tokens on two simulated ranks, and qwen3-32b 64 GB.
SIMULATED_PARAMETERS = 100_000_000


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

    @property
    def parameters(self) -> int:
        """Of its matrices."""
        attention = 2 * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        layer = self.hidden_size * (attention + 3 * self.intermediate_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * layer

    @classmethod
    def named(cls, name: str) -> Qwen3Config:
        """Of a published model: "qwen3-0.6b", "-1.7b", "-4b", "-8b", "-14b" or "-32b". ValueError for another name."""
        sizes = PUBLISHED.get(name.lower())
        if sizes is None:
            raise ValueError(f"model {name!r} is not one whose sizes are known; choose one of {', '.join(PUBLISHED)}")
        hidden_size, intermediate_size, layers, heads, kv_heads, tied = sizes
        return cls(
            vocab_size=151936,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=128,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            max_position_embeddings=40960,
            tie_word_embeddings=tied,
            dtype=torch.bfloat16,
        )

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Qwen3Config:
        """Reads a config.json of transformers 4.x or 5.x. CheckpointError (a ValueError) for any but a dense Qwen3."""
        if (model_type := content.get("model_type")) != "qwen3":
            raise CheckpointError(f"config.json: model_type={model_type!r} is not supported; weft runs 'qwen3'")
        if quantization := content.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
            raise CheckpointError(
                f"config.json: quantization_config with quant_method={method!r} is not supported; weft runs weights of "
                f"{', '.join(DTYPES)}: take the checkpoint that was not quantized"
            )
        # 5.x keeps theta and the type in rope_parameters, 4.x has rope_theta beside a rope_scaling that is mostly null. Where
        # it is not, it counts in 5.x too: Qwen's model cards say to add one.
        parameters, scaling = (content.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
        for name, rope in (("rope_parameters", parameters), ("rope_scaling", scaling)):
            if not isinstance(rope, Mapping):
                raise CheckpointError(f"config.json: {name}={rope!r} is not an object")
        types = [rope.get("rope_type", rope.get("type", "default")) for rope in (scaling, parameters)]
        rope_type = next((found for found in types if found != "default"), "default")
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
            rope_theta={**scaling, **parameters}.get("rope_theta") or content.get("rope_theta") or 10000.0,
            max_position_embeddings=content.get("max_position_embeddings", 32768),
            tie_word_embeddings=content.get("tie_word_embeddings", False),
            dtype=DTYPES[dtype],
        )
        for name in (*sizes, "num_key_value_heads", "head_dim", "max_position_embeddings"):
            if type(value := getattr(config, name)) is not int or value < 1:
                raise CheckpointError(f"config.json: {name}={value!r} is not a positive integer")
        if not isinstance(config.tie_word_embeddings, bool):
            raise CheckpointError(
                f"config.json: tie_word_embeddings={config.tie_word_embeddings!r} is not true or false"
            )
        for name in ("rms_norm_eps", "rope_theta"):
            if not isinstance(value := getattr(config, name), (int, float)) or not value > 0:
                raise CheckpointError(f"config.json: {name}={value!r} is not a positive number")
        if config.num_attention_heads % config.num_key_value_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads={config.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={config.num_key_value_heads}"
            )
        return config


def check_simulable(model: str, config: Qwen3Config, remedy: str) -> None:
    """ValueError for a model that is too large for simulated ranks. `model`: what the message calls it."""
    if config.parameters > SIMULATED_PARAMETERS:
        raise ValueError(
            f"{model} has {config.parameters / 1e9:.2g} billion parameters, and simulated ranks take at most "
            f"{SIMULATED_PARAMETERS / 1e9:g}; {remedy}"
        )
