"""Problem: one shape of one op at one rank, with random inputs and the reference's answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from weft.bench.ops.shapes import DTYPES, Shape, is_gemm, op_of
from weft.ops.case import Draw, Inputs, tolerance
from weft.ops.gemm.gemm_op import product
from weft.plan.planned import AUTO
from weft.runtime.codec import exchangeable

if TYPE_CHECKING:
    from weft.bench.ops.providers import Attempt
    from weft.runtime.team.team import Team

# Bytes read between two uses of the same weights: twice the 60 MB L2 of an H200.
COLD_BYTES = 120e6
# Each set is one call in a CUDA graph: many for small inputs, few for large results.
MOST_SETS, FEW_SETS, RESULT_BYTES = 256, 24, 4e9


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Comparison of an answer with the reference.

    ``wrong``: reason for its rejection, "" if it is accepted.
    """

    max_abs_error: float
    rms_error: float
    wrong: str


class Problem:
    """Inputs and answer of one shape of ``op``. ``sets``: different inputs of this rank, used in rotation.

    fields  of the call, as in ``Case.fields``

    Inputs, answer and accuracy are the op's. Inputs are a function of case, rank and number of the set, so a rank can make
    its peers' where the answer needs them.
    """

    def __init__(self, op: str, shape: Shape, dtype: str, team: Team, **fields: bool) -> None:
        self.op, self.shape, self.team = op_of(op), shape, team
        self.dtype, self.dtype_name = DTYPES[dtype], dtype
        self.is_gemm = is_gemm(op)
        self.case = self.op.case_of(shape.size, self.dtype, team.size, **fields)
        self.sets = [self.inputs(team.rank, 0)]
        self.sets += [self.inputs(team.rank, number) for number in range(1, self._count())]
        self._answers: dict[bool, Any] = {}

    @property
    def is_exact(self) -> bool:
        """True if nothing is computed: all bits must arrive as they were sent."""
        return self.op.accuracy(self.case).exact

    @property
    def result_bytes(self) -> int:
        """Bytes of a result, about."""
        size, itemsize = self.shape.size, self.dtype.itemsize
        return size[0] if len(size) == 1 else size[0] * size[1] * itemsize

    @property
    def replicas(self) -> int:
        """Number of calls in one CUDA graph: enough that the first weights are cold again at its replay."""
        if self.is_gemm:
            return max(2, len(self.sets))
        return 8 if self.result_bytes <= 1 << 20 else 4 if self.result_bytes <= 1 << 24 else 2

    def _count(self) -> int:
        if self.team.is_simulated:
            return 1
        if not self.is_gemm:
            return 4 if self.result_bytes <= 1 << 24 else 2
        nbytes = sum(x.nbytes for x in self.sets[0])
        most = max(FEW_SETS, min(MOST_SETS, int(RESULT_BYTES / self.result_bytes)))
        return min(most, 1 + math.ceil(COLD_BYTES / nbytes))

    def inputs(self, rank: int, number: int) -> Inputs:
        """Tensors of a set as the op takes them at ``rank``."""
        return self.op.inputs(self.case, rank, Draw(self.case, rank, number, self.team.device))

    def call(self, tensors: Sequence[torch.Tensor], design: Any = AUTO) -> Any:
        """The op's public function, or the op by ``design``: a design, or for a collective the name of one."""
        case = self.case if design == AUTO else replace(self.case, design=design)
        return self.op.call(case, self.team, *tensors)

    # --- answer to set 0 -------------------------------------------------------------------------------------------

    def answer(self, local: bool = False) -> Any:
        """Expected result of this rank in fp32, or bit for bit. ``local``: of its own GEMM alone."""
        if local not in self._answers:
            self._answers[local] = self._narrowed(product(*self.sets[0]) if local else self._answer())
        return self._answers[local]

    def _answer(self) -> torch.Tensor:
        me = self.team.rank
        by_rank = [self.sets[0] if rank == me else self.inputs(rank, 0) for rank in range(self.team.size)]
        return self.op.reference(self.case, me, by_rank)

    def _narrowed(self, answer: torch.Tensor) -> torch.Tensor:
        """``answer`` in fp32 if it is in fp64, which takes the memory of two."""
        return answer.float() if answer.dtype == torch.float64 else answer

    def forget(self) -> None:
        """Free the answers' memory."""
        self._answers.clear()

    def gathered(self, number: int) -> torch.Tensor:
        """All ranks' rows of A of a set, as a GEMM after an all-gather reads them."""
        return torch.cat([self.inputs(rank, number)[0] for rank in range(self.team.size)])

    # --- comparison --------------------------------------------------------------------------------------------------

    def verdict(self, attempt: Attempt, actual: torch.Tensor) -> Verdict:
        return self.judge(actual, attempt.local)

    def judge(self, actual: torch.Tensor, local: bool = False) -> Verdict:
        expected = self.answer(local)
        if actual.dim() > expected.dim():
            actual = actual.sum(0)  # split-K partials
        return self.compare(actual, expected, *self._tolerance(local))

    def compare(self, actual: torch.Tensor, expected: torch.Tensor, relative: float, absolute: float) -> Verdict:
        """Compare elementwise: errors up to ``relative`` times the element + ``absolute`` times the RMS."""
        if tuple(actual.shape) != tuple(expected.shape):
            return Verdict(
                max_abs_error=math.inf,
                rms_error=math.inf,
                wrong=f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}",
            )
        error = (actual.float() - expected.float()).abs_()
        worst, rms = float(error.max()), float(error.square().mean().sqrt())
        if self.is_exact:
            bad = actual != expected
        else:
            bad = ~(error <= relative * expected.abs() + absolute * float(expected.square().mean().sqrt()))
        count = int(bad.sum())
        wrong = f"{count} of {bad.numel()} elements, max error {worst:.3g}" if count else ""
        return Verdict(max_abs_error=worst, rms_error=rms, wrong=wrong)

    def _tolerance(self, local: bool) -> tuple[float, float]:
        """(relative to the element, relative to the RMS) of any provider: a library may round partial sums."""
        terms = self.shape.size[2] if local else self.op.accuracy(self.case).terms
        return tolerance(self.dtype, terms, partials=1)


def poison(problem: Problem, local: bool) -> None:
    """Fill the memory that the result will probably get, so that unwritten elements show."""
    expected = problem.answer(local)
    torch.empty(expected.shape, dtype=problem.dtype, device=expected.device).fill_(math.nan)
