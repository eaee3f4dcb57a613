"""Parts of the baselines of all-reduce-rms-norm: an all-reduce, then an addition and a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from weft.bench.harness.provider import Prepared
from weft.bench.ops.problem import OpProblem
from weft.ops.collectives.all_reduce_rms_norm import CASES_EPS


def copy_into(buffer: torch.Tensor, x: torch.Tensor) -> None:
    buffer.copy_(x)


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = x + residual
    return F.rms_norm(hidden, weight.shape, weight, CASES_EPS), hidden


def compiled_add_norm() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Addition and norm as one kernel of torch.compile."""
    return torch.compile(add_norm, fullgraph=True, dynamic=False)


def then_norm(
    problem: OpProblem,
    buffers: list[torch.Tensor],
    call: Callable[[torch.Tensor], torch.Tensor],
    norm: Callable[..., Any],
) -> Prepared:
    """Copy x into ``buffers`` (one per set), sum it by ``call`` over the ranks, and norm it."""

    def prepare(number: int) -> None:
        copy_into(buffers[number], problem.sets[number][0])

    for number in reversed(range(len(buffers))):
        prepare(number)  # 0 last: the first call uses it, and buffers may be shared
    return Prepared(run=lambda number: norm(call(buffers[number]), *problem.sets[number][1:]), prepare=prepare)
