"""Copies from the host to the device."""

from __future__ import annotations

import torch


def upload(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device, without waiting for what the device is doing."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
