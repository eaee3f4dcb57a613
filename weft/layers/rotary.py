"""Rotary position embedding in the half-split order of Hugging Face checkpoints."""

from __future__ import annotations

import torch


def rotary_angles(max_positions: int, head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """[max_positions, head_dim] fp32: of each position the cosines of its head_dim / 2 angles, then their sines.

    angle_i = position / theta ** (2i / head_dim)
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angles = torch.arange(max_positions, device=device).float()[:, None] * (1.0 / theta**exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def apply_rotary(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x * cos + rotate_half(x) * sin          x: [tokens, heads, head_dim]; angles: [tokens, head_dim], see above"""
    cos, sin = (part[:, None].to(x.dtype) for part in angles.chunk(2, dim=-1))
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
