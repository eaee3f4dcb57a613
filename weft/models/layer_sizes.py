"""Sizes of a model's layers on a rank, by which recipes of a forward pass are chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weft.costs.recipes import Layer, Mixture
from weft.models.config import DecoderConfig
from weft.parallel.quantized import Fp8Format
from weft.runtime.arithmetic import cdiv


def layer_of(config: DecoderConfig, world_size: int, slices: bool = False, item: int = 2) -> Layer:
    """Layer of ``config`` on one of ``world_size`` ranks, of the most frequent kind.

    slices   experts are split by their features, else whole
    item     bytes of an element that is not quantized
    """
    kinds = [(config.has_state(at), config.has_experts(at)) for at in range(config.num_hidden_layers)]
    [(kind, _)] = Counter(kinds).most_common(1)
    linear, has_experts = kind
    qkv, o = _linear(config, world_size) if linear else _attention(config, world_size)
    mixture = mixture_of(config, world_size, slices, item) if has_experts else None
    names = config.family.weights
    last = f"{names.linear_attention}.out_proj" if linear else f"{names.attention}.o_proj"
    variant = _variant(config, [at for at, other in enumerate(kinds) if other == kind], last, item)
    features, gated = cdiv(config.intermediate_size, world_size), config.block.gated
    return Layer(config.hidden_size, qkv, o, features, mixture, item, variant, gated)


def mixture_of(config: DecoderConfig, world_size: int, slices: bool = False, item: int = 2) -> Mixture:
    """Experts of a rank. slices, item: as of ``layer_of``."""
    experts = config.experts
    held, features = experts.num_experts, experts.intermediate_size
    if world_size > 1 and slices:
        features //= world_size
    elif world_size > 1:
        held //= world_size
    shared = cdiv(experts.shared_intermediate_size or 0, world_size)
    names = config.family.weights
    layers = [at for at in range(config.num_hidden_layers) if config.has_experts(at)]
    variant = _variant(config, layers, f"{names.mlp}.experts.0.{names.projections[2]}", item)
    return Mixture(experts.num_experts_per_tok, experts.num_experts, held, features, shared, variant)


def _variant(config: DecoderConfig, layers: Sequence[int], matrix: str, item: int) -> str:
    """Variant of ops that take this matrix of ``layers``, as ``Layer`` has it; "": not quantized.

    As of the middle one of the layers: checkpoints leave the first or the last ones in 16 bits. With rows of 32 bits all
    weights are converted to 32 bits first.
    """
    if config.quantization is None or item > 2 or not layers:
        return ""
    names = config.family.weights
    formats = config.quantization.formats(f"{names.layers}.{layers[len(layers) // 2]}", names.joined)
    if (format := formats((matrix,))) is None:
        return ""
    if isinstance(format, Fp8Format):
        return "+block_fp8" if format.scheme == "block" else "+channel_fp8"
    return "+four_bit" if format.kind == "mxfp4" else "+int4"


def _attention(config: DecoderConfig, world_size: int) -> tuple[int, int]:
    """Columns of the first projections, and depth of the last."""
    heads = cdiv(config.num_attention_heads, world_size)
    if (latent := config.attention.latent) is not None:
        o = heads * latent.v_head_dim
        return round(latent.parameters(config.hidden_size, heads) / config.hidden_size) - o, o
    kv_heads = max(config.num_key_value_heads // world_size, 1)
    gates = heads if config.attention.gated else 0
    return (heads + 2 * kv_heads + gates) * config.head_dim, heads * config.head_dim


def _linear(config: DecoderConfig, world_size: int) -> tuple[int, int]:
    linear = config.linear_attention
    values = linear.value_heads * linear.value_dim // world_size
    return linear.parameters // world_size - values, values
