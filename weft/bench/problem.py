"""Problem: one shape of one op at one rank, with random inputs, the fp32 answer and its tolerance."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weft.bench.shapes import COLLECTIVES, Shape
from weft.runtime.codec import exchangeable

if TYPE_CHECKING:
    from weft.bench.providers import Attempt
    from weft.runtime.team import Team

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Bytes read between two uses of the same weights: twice the 60 MB L2 of an H200.
COLD_BYTES = 120e6
# Each set is one call in a CUDA graph: many for small inputs, few for large results.
MOST_SETS, FEW_SETS, RESULT_BYTES = 256, 24, 4e9
FP32_EPS = torch.finfo(torch.float32).eps

Inputs = tuple[torch.Tensor, ...]


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Comparison of an answer with the fp32 one.

    ``wrong``: reason for its rejection, "" if it is accepted.
    """

    max_abs_error: float
    rms_error: float
    wrong: str


class Problem:
    """Inputs and answer of one shape. ``sets``: different inputs of this rank, used in rotation.

    Inputs: x of a collective; a, b of a GEMM op, as weft's op takes them. All are a function of (op, shape, rank, number of
    the set), so a rank can make its peers' inputs where the answer needs them.
    """

    def __init__(self, op: str, shape: Shape, dtype: str, team: Team) -> None:
        self.op, self.shape, self.team = op, shape, team
        self.dtype, self.dtype_name = DTYPES[dtype], dtype
        self.sets = [self._inputs(team.rank, number) for number in range(self._count())]
        self._answers: dict[bool, torch.Tensor] = {}

    @property
    def replicas(self) -> int:
        """Number of calls in one CUDA graph: enough that the first weights are cold again at its replay."""
        if self.op not in COLLECTIVES:
            return max(2, len(self.sets))
        return 8 if self.shape.size[0] <= 1 << 20 else 4 if self.shape.size[0] <= 1 << 24 else 2

    def _count(self) -> int:
        if self.team.is_simulated:
            return 1
        if self.op in COLLECTIVES:
            return 4 if self.shape.size[0] <= 1 << 24 else 2
        nbytes = sum(math.prod(size) for size in self._sizes()) * self.dtype.itemsize
        m, n, _ = self.shape.size
        most = max(FEW_SETS, min(MOST_SETS, int(RESULT_BYTES / (m * n * self.dtype.itemsize))))
        return min(most, 1 + math.ceil(COLD_BYTES / nbytes))

    def _sizes(self) -> list[tuple[int, ...]]:
        """Sizes of one rank's inputs."""
        size, world = self.shape.size, self.team.size
        if self.op in COLLECTIVES:
            elements = size[0] // self.dtype.itemsize
            return [(elements // world if self.op == "all-gather" else elements,)]
        m, n, k = size
        return [(m // world if self.op == "ag-gemm" else m, k), (n, k)]

    def _inputs(self, rank: int, number: int) -> Inputs:
        seed = zlib.crc32(f"{self.op} {self.shape.size} {rank} {number}".encode())
        generator = torch.Generator(self.team.device).manual_seed(seed)
        sizes = self._sizes()
        # Products with b have the variance of a, so that sums do not grow with K.
        scales = [1.0] if len(sizes) == 1 else [1.0, sizes[1][1] ** -0.5]
        return tuple(
            torch.empty(size, dtype=self.dtype, device=self.team.device).normal_(0, scale, generator=generator)
            for size, scale in zip(sizes, scales, strict=True)
        )

    # --- answer to set 0 ---------------------------------------------------------------------------------------------

    @property
    def is_exact(self) -> bool:
        """True if nothing is computed, so that all bits must arrive unchanged."""
        return self.op in ("all-gather", "all-to-all")

    def answer(self, local: bool = False) -> torch.Tensor:
        """Expected result of this rank in fp32 (or unchanged). ``local``: of its own GEMM alone."""
        if local not in self._answers:
            self._answers[local] = self._local_answer() if local else self._answer()
        return self._answers[local]

    def forget(self) -> None:
        """Free the answers' memory."""
        self._answers.clear()

    def _peers(self) -> list[Inputs]:
        me = self.team.rank
        return [self.sets[0] if rank == me else self._inputs(rank, 0) for rank in range(self.team.size)]

    def _local_answer(self) -> torch.Tensor:
        a, b = self.sets[0]
        return a.float() @ b.float().T

    def _answer(self) -> torch.Tensor:
        me, world = self.team.rank, self.team.size
        if self.op == "gemm":
            return self._local_answer()
        if self.op == "ag-gemm":
            return self.gathered(0).float() @ self.sets[0][1].float().T
        if self.op == "all-gather":
            return torch.cat([x for (x,) in self._peers()])
        if self.op == "all-to-all":
            return torch.cat([x.chunk(world)[me] for (x,) in self._peers()])
        total: torch.Tensor | None = None
        for inputs in self._peers():
            mine = inputs[0].chunk(world)[me] if self.op in ("reduce-scatter", "gemm-rs") else inputs[0]
            part = mine.float() if len(inputs) == 1 else mine.float() @ inputs[1].float().T
            # Not in place: of fp32 inputs, `part` may be rank 0's own.
            total = part if total is None else total + part
        assert total is not None
        return total

    def gathered(self, number: int) -> torch.Tensor:
        """All ranks' rows of A of a set, as a GEMM after an all-gather reads them."""
        return torch.cat([self._inputs(rank, number)[0] for rank in range(self.team.size)])

    # --- comparison --------------------------------------------------------------------------------------------------

    def verdict(self, attempt: Attempt, actual: torch.Tensor) -> Verdict:
        return self.judge(actual, attempt.local)

    def judge(self, actual: torch.Tensor, local: bool = False) -> Verdict:
        return self.compare(actual, self.answer(local), *self._tolerance(local))

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
        """(relative to the element, relative to the RMS): one rounding, random walk of sums, partial sums.

        A library's ring rounds W - 1 times, and cuBLAS may add split-K partials in 16 bits. Omissions still show: 64 of
        K = 5120 are 0.11 of the RMS, all tolerances together 0.03 in bf16.
        """
        eps = torch.finfo(self.dtype).eps
        summed = self.op in ("all-reduce", "reduce-scatter", "gemm-rs", "gemm-ar") and not local
        length = self.team.size if self.op in COLLECTIVES else self.shape.size[2] * (self.team.size if summed else 1)
        in_parts = self.op not in COLLECTIVES or (summed and self.team.size > 1)
        return eps, 6 * FP32_EPS * math.sqrt(length) + (4 * eps if in_parts else 0.0)


def poison(problem: Problem, local: bool) -> None:
    """Fill the memory that the result will probably get, so that unwritten elements show."""
    expected = problem.answer(local)
    torch.empty(expected.shape, dtype=problem.dtype, device=expected.device).fill_(math.nan)
