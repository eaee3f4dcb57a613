"""Problem: one shape of one op at one rank, with random inputs and the reference's answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from weft.bench.harness.meters import spoil
from weft.bench.harness.provider import Prepared, Result, Verdict
from weft.bench.harness.workload import DTYPES, Problem, Shape, together
from weft.bench.ops.shapes import computes, has_flops
from weft.ops.case import Draw, Inputs, error_bound
from weft.ops.gemm.gemm_op import named, product
from weft.ops.moe.moe_op import MoeShape
from weft.ops.op import Op
from weft.plan.planned import AUTO
from weft.runtime.capabilities import COLD_BYTES

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Each set is one call in a CUDA graph: many for small inputs, few for large results.
MOST_SETS, FEW_SETS, RESULT_BYTES = 256, 24, 4e9


class OpProblem(Problem):
    """Inputs and answer of one shape of ``op``. ``sets``: different inputs of this rank, used in rotation.

    arguments  of the op's calls, one for each set
    computes   of the op
    fields     of the call, as in ``Case.fields``

    Inputs, answer and accuracy are the op's. Inputs are a function of case, rank and number of the set, so a rank can make
    its peers' where the answer needs them.
    """

    def __init__(self, op: Op, shape: Shape, dtype: str, team: Team, **fields: bool) -> None:
        self.op, self.shape, self.team = op, shape, team
        self.dtype, self.computes = DTYPES[dtype], computes(op)
        if team.shape.nodes > 1:
            fields = {**fields, "nodes": team.shape.nodes}
        self.case = op.case_of(shape.size, self.dtype, team.size, **fields)
        self.sets = [self.inputs(team.rank, 0)]
        self.sets += [self.inputs(team.rank, number) for number in range(1, self._count())]
        self.arguments = [op.arguments(self.case, team, *tensors) for tensors in self.sets]
        self._answers: dict[bool, Result] = {}

    def figures(self) -> dict[str, float]:
        """The op's, the mean of this rank's sets; of the rank with the most pairs."""
        every = together(self.team, lambda: [self.op.figures(*arguments) for arguments in self.arguments])
        means = {name: sum(one[name] for one in every) / len(every) for name in every[0]}
        return max(self.team.exchange(means), key=lambda one: one.get("pairs", 0.0))

    @property
    def result_bytes(self) -> int:
        """Bytes of a result, about."""
        if self.op.form in ("attention", "prefill"):
            return self.sets[0][0].nbytes  # the queries, or a cache, which is larger
        if self.op.form == "moe":
            shape = MoeShape(*self.shape.size)
            return shape.tokens * shape.k * shape.hidden * self.dtype.itemsize
        size, itemsize = self.shape.size, self.dtype.itemsize
        return size[0] if len(size) == 1 else size[0] * size[1] * itemsize

    @property
    def replicas(self) -> int:  # type: ignore[override]
        """Number of calls in one CUDA graph: enough that the first weights are cold again at its replay."""
        if self.is_cold:
            return max(2, len(self.sets))
        return 8 if self.result_bytes <= 1 << 20 else 4 if self.result_bytes <= 1 << 24 else 2

    @property
    def is_cold(self) -> bool:
        """True if weights, or a cache, are read from memory at each call."""
        return self.computes and (has_flops(self.op) or self.op.form == "sharded")

    def _count(self) -> int:
        if self.team.is_simulated:
            return 1
        if not self.is_cold:
            return 4 if self.result_bytes <= 1 << 24 else 2
        nbytes = sum(x.nbytes for x in self.sets[0])
        if self.op.form == "moe":
            # Weights of experts that are not chosen stay cold.
            nbytes = self.op.memory_bytes(self.shape.size, self.dtype)
        most = max(FEW_SETS, min(MOST_SETS, int(RESULT_BYTES / self.result_bytes)))
        return min(most, 1 + math.ceil(COLD_BYTES / nbytes))

    def inputs(self, rank: int, number: int) -> Inputs:
        """Tensors of a set as the op takes them at ``rank``."""
        return self.op.inputs(self.case, rank, Draw(self.case, rank, number, self.team.device))

    def gathered(self, number: int) -> torch.Tensor:
        """All ranks' rows of A of a set, as a GEMM after an all-gather reads them."""
        return torch.cat([self.inputs(rank, number)[0] for rank in range(self.team.size)])

    def call(self, tensors: Sequence[torch.Tensor], design: object = AUTO) -> Result:
        """The op's public function, or the op by ``design``: a design, or for a collective the name of one."""
        return self.op.results(replace(self.case, design=design), self.team, *tensors)

    # --- answer to set 0 -------------------------------------------------------------------------------------------

    def answer(self, local: bool = False) -> Result:
        """Expected result of this rank in fp32, or bit for bit. ``local``: of this rank's GEMM alone."""
        if local not in self._answers:
            self._answers[local] = _narrowed(
                product(*named(self.case, self.sets[0])[:2]) if local else self._reference()
            )
        return self._answers[local]

    def _reference(self) -> Result:
        # An op that is not collective reads the inputs of this rank alone.
        peers = {rank for rank in range(self.team.size) if rank != self.team.rank and self.op.collective}
        by_rank = [self.inputs(rank, 0) if rank in peers else self.sets[0] for rank in range(self.team.size)]
        expected = self.op.reference(self.case, self.team.rank, by_rank)
        if isinstance(expected, tuple) and self.op.form != "moe":
            return expected[0]  # then come tensors that the op writes into its arguments
        return expected

    def poison(self, prepared: Prepared) -> None:
        expected = self.answer(prepared.local)
        for x in expected if isinstance(expected, tuple) else (expected,):
            spoil(torch.empty(x.shape, dtype=self.dtype if x.is_floating_point() else x.dtype, device=x.device))

    def forget(self) -> None:
        self._answers.clear()

    # --- comparison --------------------------------------------------------------------------------------------------

    def verdict(self, prepared: Prepared, out: Result) -> Verdict:
        if prepared.compare is not None:
            actual, expected = prepared.compare(out)
            return self._judged(actual, _narrowed(expected), roundings=prepared.roundings)
        return self.judge(out, prepared.local)

    def judge(self, actual: Result, local: bool = False) -> Verdict:
        """Verdict on a result, or on several as a tuple, of which the worst counts."""
        return self._judged(self.op.defined(self.case, self.team, actual, *self.sets[0]), self.answer(local), local)

    def _judged(self, actual: Result, expected: Result, local: bool = False, roundings: int = 1) -> Verdict:
        if not isinstance(actual, tuple):
            whole = actual.sum(0) if actual.dim() > expected.dim() else actual  # of partials
            return self._compared(whole, expected, local, roundings)
        verdicts = [self._compared(x, wanted, local, roundings) for x, wanted in zip(actual, expected, strict=True)]
        wrong = [f"result {number}: {verdict.wrong}" for number, verdict in enumerate(verdicts) if verdict.wrong]
        worst = max(verdicts, key=lambda verdict: verdict.max_abs_error)
        return replace(worst, rms_error=max(verdict.rms_error for verdict in verdicts), wrong="; ".join(wrong))

    def _compared(self, actual: torch.Tensor, expected: torch.Tensor, local: bool, roundings: int) -> Verdict:
        """Elementwise comparison within the one tolerance: a library may round partial sums."""
        if tuple(actual.shape) != tuple(expected.shape):
            wrong = f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
            return Verdict(max_abs_error=math.inf, rms_error=math.inf, wrong=wrong)
        if actual.numel() == 0:
            return Verdict()
        error = (actual.float() - expected.float()).abs_()
        worst, rms = float(error.max()), float(error.square().mean().sqrt())
        accuracy = self.op.accuracy(self.case)
        if accuracy.exact:
            bad = actual != expected
        else:
            terms = self.shape.size[2] if local else accuracy.terms
            # A node's sums are rounded before they cross.
            partials = 1 + (self.case.field("nodes") or 0)
            roundings = max(roundings, accuracy.roundings)
            bound = error_bound(
                expected, self.dtype, terms, partials, accuracy.by_row, roundings=roundings, levels=accuracy.levels
            )
            bad = ~(error <= bound)
        count = int(bad.sum())
        wrong = f"{count} of {bad.numel()} elements, max error {worst:.3g}" if count else ""
        return Verdict(max_abs_error=worst, rms_error=rms, wrong=wrong)


def _narrowed(answer: Result) -> Result:
    """fp64 tensors in fp32, since they would take the memory of two."""
    if isinstance(answer, tuple):
        return tuple(map(_narrowed, answer))
    return answer.float() if answer.dtype == torch.float64 else answer
