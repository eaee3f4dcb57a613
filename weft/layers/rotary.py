"""Rotary position embedding in the half-split order of Hugging Face checkpoints."""

from __future__ import annotations

import torch


def rotary_angles(
    positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [..., head_dim] of positions[...]: angle_i = position / theta ** (2i / head_dim), in fp32, then cast."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[..., None].float() * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + rotate_half(x) * sin

    x: [batch, length, heads, head_dim]; cos, sin: [batch or 1, length, head_dim]
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, :, None] + torch.cat((-second, first), dim=-1) * sin[:, :, None]
