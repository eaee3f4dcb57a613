"""Parts of the baselines of all-reduce-rms-norm: an all-reduce, then an addition and a norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from weft.ops.case import Case


def copy_into(buffer: torch.Tensor, x: torch.Tensor) -> None:
    buffer.copy_(x)


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = x + residual
    return F.rms_norm(hidden, weight.shape, weight, Case.eps), hidden


def compiled_add_norm() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Addition and norm as one kernel of torch.compile."""
    return torch.compile(add_norm, fullgraph=True, dynamic=False)
