"""all-reduce-rms-norm: inputs, answer, and baselines (an all-reduce, then an addition and a norm)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from weft.bench.ops.problem import Problem, Verdict
from weft.bench.ops.providers import Attempt, copy_into
from weft.ops.case import tolerance
from weft.ops.collectives.all_reduce_rms_norm import ALL_REDUCE_RMS_NORM, all_reduce_rms_norm
from weft.plan.planned import AUTO

if TYPE_CHECKING:
    from weft.bench.ops.shapes import Shape
    from weft.runtime.team.team import Team


class NormProblem(Problem):
    """Problem of all-reduce-rms-norm, with the answer (normed, hidden)."""

    def __init__(self, op: str, shape: Shape, dtype: str, team: Team, **fields: bool) -> None:
        super().__init__(op, shape, dtype, team, **fields)
        # Compiled code of the last shape is not used again, and torch.compile limits its number.
        torch.compiler.reset()

    @property
    def is_exact(self) -> bool:
        return False

    @property
    def replicas(self) -> int:
        return 8

    def _count(self) -> int:
        return 1 if self.team.is_simulated else 4

    def call(self, tensors: Sequence[torch.Tensor], design: Any = AUTO) -> Any:
        if isinstance(design, str):
            return all_reduce_rms_norm(*tensors, NORM_EPS, self.team, algorithm=design)
        return ALL_REDUCE_RMS_NORM.run(design, self.team, *tensors, NORM_EPS)

    def _answer(self) -> torch.Tensor:
        """Expected [2, M, H]: normed, then hidden."""
        _, residual, weight = self.sets[0]
        by_rank = [self.inputs(rank, 0) for rank in range(self.team.size)]
        hidden = sum((x.float() for x, *_ in by_rank), start=residual.float())
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
        relative, absolute = tolerance(self.dtype, self.team.size, partials=self.team.size - 1)
        return 2 * relative, absolute


NORM_EPS = 1e-6


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
