"""Copies from the host to the device."""

from __future__ import annotations

import torch


def upload(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device asynchronously."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
