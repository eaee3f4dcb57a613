"""Check that a tensor has strides, and so addresses."""

from __future__ import annotations

import torch

from weft.arguments import check_instance


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """ValueError unless ``tensor`` is a dense tensor, whose elements have addresses."""
    if not isinstance(tensor, torch.Tensor):
        check_instance(name, tensor, torch.Tensor, "a tensor")
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise ValueError(f"{name} is a tensor of layout {layout}; pass a dense one, as .to_dense() returns")
