"""Scales of an fp8 KV cache in a checkpoint: one of the keys and one of the values of each layer.

As compressed-tensors and ModelOpt write them: a key is its byte times k_scale, a value its byte times v_scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from weft.arguments import quoted
from weft.errors import CheckpointError
from weft.models.checkpoint import Checkpoint
from weft.models.family import WeightNames

# Below a layer's attention: compressed-tensors' names, then ModelOpt's.
NAMES = (("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"))
# What kv_cache_scheme may say, with the values that its format assumes for absent keys.
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
ASSUMED = {"strategy": "tensor", "dynamic": False, "symmetric": True}


def check_cache_scheme(quantization: Mapping[str, Any]) -> None:
    """CheckpointError for a quantization_config with a KV cache that weft does not run."""
    algorithm = quantization.get("kv_cache_quant_algo")  # ModelOpt's name of it
    if algorithm not in (None, "FP8"):
        raise CheckpointError(
            f"config.json: kv_cache_quant_algo={quoted(algorithm)} is not supported; weft runs 'FP8': take another checkpoint"
        )
    scheme = quantization.get("kv_cache_scheme")
    if scheme is None or (scheme == "static" and quantization.get("quant_method") == "fp8"):
        return
    if not isinstance(scheme, Mapping):
        raise CheckpointError(f"config.json: kv_cache_scheme={quoted(scheme)} is not an object")
    for name, value in SCHEME.items():
        if (asked := scheme.get(name, ASSUMED.get(name))) != value:
            raise CheckpointError(
                f"config.json: kv_cache_scheme with {name}={quoted(asked)} is not supported; weft runs an fp8 cache with "
                f"{name}={value!r}: one scale of the keys and one of the values of each layer"
            )


def scale_names(checkpoint: Checkpoint, names: WeightNames, layers: Sequence[int]) -> list[str]:
    """Names of the scales of keys and values of these layers, in their order; [] without any.

    CheckpointError where some are missing.
    """
    for pair in NAMES:
        wanted = [f"{names.layers}.{layer}.{names.attention}.{name}" for layer in layers for name in pair]
        there = [name for name in wanted if checkpoint.has(name)]
        if there and there != wanted:
            missing = next(name for name in wanted if name not in there)
            raise CheckpointError(
                f"{checkpoint.directory}: tensor {missing} is missing beside {there[0]}; an fp8 cache has a scale of the keys "
                f"and one of the values of each layer"
            )
        if there:
            return there
    return []


def read_scale(checkpoint: Checkpoint, name: str) -> float:
    """The scale in a tensor. CheckpointError unless it is one positive number."""
    tensor = checkpoint.read(name)
    if tensor.numel() != 1:
        raise CheckpointError(
            f"{checkpoint.directory}: tensor {name} has shape {tuple(tensor.shape)}; weft takes one scale for all heads of a "
            f"layer: leave out kv_cache_dtype='fp8'"
        )
    value = float(tensor)
    if not (math.isfinite(value) and value > 0):
        raise CheckpointError(
            f"{checkpoint.directory}: tensor {name} is {value}, not a positive number; download it again"
        )
    return value
