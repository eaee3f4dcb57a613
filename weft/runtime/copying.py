"""Copies from the host to the device, and on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def upload(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device asynchronously."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def to_device(values: Iterable[float], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Tensor of these numbers, copied to the device asynchronously."""
    return upload(torch.tensor(list(values), dtype=dtype), device)


def move_rows(moves: Sequence[tuple[int, int]], *tensors: torch.Tensor) -> None:
    """Copy rows of tensors on one device, (from, to); all are read before one is written."""
    sources, targets = (to_device(rows, tensors[0].device) for rows in zip(*moves, strict=True))
    for tensor in tensors:
        tensor.index_copy_(0, targets, tensor[sources])
