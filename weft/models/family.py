"""Tables of a family of models: how its config.json reads, and the names of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Options of attention beside softmax(q @ k.T) @ v with plain rotary embedding.

    qk_norm       RMSNorm of each head of q and k before the rotary embedding
    bias          of the projections
    rope_scaling  transformers' `rope_parameters` of another embedding than the plain one
    """

    qk_norm: bool = True
    bias: bool = False
    rope_scaling: Mapping[str, Any] | None = None

    def check(self) -> None:
        """ValueError for options without a kernel."""
        for name, value, supported in (
            ("qk_norm", self.qk_norm, True),
            ("bias", self.bias, False),
            ("rope_scaling", self.rope_scaling, None),
        ):
            if value != supported:
                raise ValueError(f"attention.{name}={value!r} has no kernel in weft; it runs {name}={supported!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """Prefixes of tensors' names in a checkpoint: the model's parts, and a layer's within it.

    Attention and MLP have q_proj, k_proj, v_proj, o_proj, q_norm, k_norm, gate_proj, up_proj and down_proj below theirs.
    """

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    input_norm: str = "input_layernorm"
    attention: str = "self_attn"
    post_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    norm: str = "model.norm"
    head: str = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models whose config.json has one `model_type`.

    name          in messages
    architecture  the member of `architectures` that generates text: drafters, classifiers and embedders share a model_type
    defaults      keys of config.json with the values that transformers assumes where the file has none
    published     name of a model -> its config.json, as far as it counts
    """

    name: str
    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    published: Mapping[str, Mapping[str, Any]]
    attention: AttentionOptions = AttentionOptions()
    weights: WeightNames = WeightNames()
