"""all-reduce-rms-norm: inputs, answer, and baselines (an all-reduce, then an addition and a norm)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from weft.bench.problem import FP32_EPS, Inputs, Problem, Verdict
from weft.bench.providers import NORM_EPS, Attempt, copy_into

if TYPE_CHECKING:
    from weft.bench.shapes import Shape
    from weft.runtime.team import Team


class NormProblem(Problem):
    """Problem of all-reduce-rms-norm, with the answer (normed, hidden).

    Inputs: x [M, H], different on each rank; residual [M, H] and weight [H], equal on all ranks.
    """

    def __init__(self, op: str, shape: Shape, dtype: str, team: Team) -> None:
        Problem.__init__(self, op, shape, dtype, team)
        # Compiled code of the last shape is not used again, and torch.compile limits its number.
        torch.compiler.reset()

    @property
    def replicas(self) -> int:
        return 8

    def _count(self) -> int:
        return 1 if self.team.is_simulated else 4

    def _sizes(self) -> list[tuple[int, ...]]:
        rows, width = self.shape.size
        return [(rows, width), (rows, width), (width,)]

    def _inputs(self, rank: int, number: int) -> Inputs:
        def drawn(what: str, size: tuple[int, ...]) -> torch.Tensor:
            seed = zlib.crc32(f"{self.op} {self.shape.size} {what} {number}".encode())
            generator = torch.Generator(self.team.device).manual_seed(seed)
            return torch.empty(size, dtype=self.dtype, device=self.team.device).normal_(generator=generator)

        names = (f"x of {rank}", "residual", "weight")
        return tuple(drawn(name, size) for name, size in zip(names, self._sizes(), strict=True))

    def _answer(self) -> torch.Tensor:
        """Expected [2, M, H]: normed, then hidden."""
        _, residual, weight = self.sets[0]
        hidden = sum((x.float() for x, *_ in self._peers()), start=residual.float())
        # The norm takes the rounded sum, as the next layer does.
        rounded = hidden.to(self.dtype).float()
        return torch.stack((F.rms_norm(rounded, weight.shape, weight.float(), NORM_EPS), hidden))

    def judge(self, actual: Any, local: bool = False) -> Verdict:
        names = ("normed", "hidden")
        found = [
            self.compare(x, expected, *self._tolerance(local))
            for x, expected in zip(actual, self.answer(), strict=True)
        ]
        wrong = [f"{name}: {verdict.wrong}" for name, verdict in zip(names, found, strict=True) if verdict.wrong]
        worst = max(found, key=lambda verdict: verdict.max_abs_error)
        return replace(worst, rms_error=max(verdict.rms_error for verdict in found), wrong="; ".join(wrong))

    def _tolerance(self, local: bool) -> tuple[float, float]:
        """Tolerance of the sum (one rounding, W - 1 in a library's ring) and of the norm (one rounding more)."""
        eps = torch.finfo(self.dtype).eps
        return 2 * eps, 6 * FP32_EPS * math.sqrt(self.team.size) + (4 * eps if self.team.size > 1 else 0.0)


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = x + residual
    return F.rms_norm(hidden, weight.shape, weight, NORM_EPS), hidden


def compiled_add_norm() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Addition and norm as one kernel of torch.compile."""
    return torch.compile(add_norm, fullgraph=True, dynamic=False)


def then_norm(
    problem: Problem,
    buffers: list[torch.Tensor],
    call: Callable[[torch.Tensor], torch.Tensor],
    norm: Callable[..., Any],
) -> Attempt:
    """Attempt that copies x into ``buffers`` (one per set), sums by ``call`` over the ranks, and norms."""

    def prepare(number: int) -> None:
        copy_into(buffers[number], problem.sets[number][0])

    for number in reversed(range(len(buffers))):
        prepare(number)  # 0 last: the first call uses it, and buffers may be shared
    return Attempt(run=lambda number: norm(call(buffers[number]), *problem.sets[number][1:]), prepare=prepare)
