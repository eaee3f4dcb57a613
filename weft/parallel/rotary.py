"""Rotary position embedding in the half-split order of Hugging Face checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

PLAIN = {
    "rope_type": "default",
    "type": "default",
    "factor": 1.0,
    "attention_factor": 1.0,
    "partial_rotary_factor": 1.0,
}


def rotary_angles(
    max_positions: int, head_dim: int, theta: float | Mapping[str, Any], device: torch.device
) -> torch.Tensor:
    """[max_positions, head_dim] fp32: cosines of each position's head_dim / 2 angles, then their sines.

    angle_i = position / theta ** (2i / head_dim)

    theta  a number, or transformers' `config.rope_parameters`, with ValueError where these are not plain (yarn, dynamic,
           partial)
    """
    theta = plain_theta(theta)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angles = torch.arange(max_positions, device=device).float()[:, None] * (1.0 / theta**exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def plain_theta(rope: float | Mapping[str, Any]) -> float:
    """Base of plain rotary embedding. ValueError for `rope_parameters` of another kind."""
    theta = rope
    if isinstance(rope, Mapping):
        for name, supported in PLAIN.items():
            if (value := rope.get(name)) is not None and value != supported:
                raise ValueError(
                    f"rope_parameters: {name}={value!r} is not supported; rotary embedding is plain here ({name}={supported!r})"
                )
        if unknown := sorted(name for name in rope if name not in PLAIN and name != "rope_theta"):
            raise ValueError(
                f"rope_parameters has {unknown} beside rope_theta; rotary embedding is plain here, one for all layers"
            )
        theta = rope.get("rope_theta")
    if isinstance(theta, bool) or not isinstance(theta, Real) or not 0 < theta <= sys.float_info.max:
        raise ValueError(f"theta={theta!r} is not a positive number that is finite, or rope_parameters with rope_theta")
    return float(theta)


def apply_rotary(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x * cos + rotate_half(x) * sin          x: [tokens, heads, head_dim]; angles: [tokens, head_dim]"""
    cos, sin = (part[:, None].to(x.dtype) for part in angles.chunk(2, dim=-1))
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
