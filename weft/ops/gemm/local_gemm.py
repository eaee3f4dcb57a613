"""Base class of the two GEMMs of one rank: plans and cases with the small-M kernel among the designs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.kernels.deferred_norm import normed
from weft.kernels.four_bit import FourBit
from weft.kernels.fp8 import Fp8
from weft.kernels.operands import RowScales, ScaledMatrix, rows_contiguous
from weft.ops.case import Case, Draw, Inputs, agreed, format_of
from weft.ops.gemm import cublas, four_bit_operands, fp8_operands, sliced, small_m, space
from weft.ops.gemm.cublas import Cublas
from weft.ops.gemm.gemm_op import GemmCall, GemmOp, named, product
from weft.ops.gemm.sliced import COLUMN_SLICES
from weft.ops.gemm.small_m_rule import SmallM, default_small_m, small_m_rule, takes
from weft.ops.local import capabilities_of
from weft.ops.op import registered
from weft.plan import table
from weft.plan.planned import AUTO, Machine, Planned, machine


class LocalGemm(GemmOp):
    """A GEMM of one rank."""

    variants = options = ("deferred_norm", "partials", "block_fp8", "channel_fp8", "four_bit", "invariant")
    internal = ("sliced",)
    rare = ("small_m",)
    collective = False

    def table_key(self, call: GemmCall, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        # A GEMM of one rank knows of no other ranks.
        return self.variant(call), (call.M, call.N, call.K), 1

    def choose(self, call: GemmCall, machine: Machine) -> Planned:
        if call.invariant and call.design in (AUTO, "sliced"):
            return sliced.planned(self.name, call, (COLUMN_SLICES, COLUMN_SLICES), machine.caps, gated=self.gated)
        if call.design == "small_m" and not takes(call):
            raise ValueError(
                f"{self.name}: design='small_m' reads float16 or bfloat16 in rows that begin on 16 bytes, and not this call's "
                f"{call.dtype} with K={call.K}; take 'cublas'"
            )
        planned = super().choose(call, machine)
        if planned.row is not None or call.quantized or not isinstance(planned.design, Cublas):
            return planned
        N = call.N * (2 if self.gated else 1)
        design, reason = cublas.chosen(call.M, N, call.K, call.dtype, machine.caps)
        return replace(planned, design=design, reason=f"{planned.reason}; {reason}") if reason else planned

    def row_for(self, call: GemmCall, machine: Machine) -> table.Found | None:
        best = super().row_for(call, machine)
        # A row may be of another alignment or layout than this very call.
        if best and best.row.design != "cublas" and not call.dense:
            return None
        return None if best and best.row.design == "small_m" and not takes(call) else best

    def space(self, call: GemmCall, machine: Machine, quick: bool = False) -> Iterator[Any]:
        if call.invariant:
            return
        if call.quantized:
            yield Cublas()
        else:
            yield from space.algorithms(call, quick)
        if takes(call) and table.small_m_rows(call.M) is not None:
            base = self.default("small_m", call, machine)
            yield base
            yield from space.small_m_tiles(base, call, machine.caps, self.gated, quick)

    def around(self, design: Any, machine: Machine, quick: bool = False) -> Iterator[Any]:
        return super().around(design, machine, quick and not isinstance(design, Cublas))

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """The operands, and for a deferred RMS scale the squares of a's rows in four parts."""
        operands = super().inputs(case, rank, draw)
        if not case.field("deferred_norm"):
            return operands
        return *operands, draw.own("squares", (case.sizes[0], 4)).float().square()

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        a, b, squares = named(case, by_rank[rank])
        result = product(a, b)
        for of_rows in squares:
            result *= (of_rows.double().sum(1, keepdim=True) + case.eps).rsqrt()
        if not self.gated:
            return result
        gate, up = result.chunk(2, dim=1)
        if case.field("activation") == "gelu_tanh":
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        return torch.nn.functional.silu(gate) * up

    def run_case(self, case: Case, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Result by the case's design; fp32 [partials, M, N] where it leaves split-K partials."""
        a, b, squares = named(case, tensors)
        design = self.design_of(case, machine(capabilities_of(a.device), 1))
        operand = ScaledMatrix(a, RowScales(squares[0], case.eps) if squares else None)
        summed = not case.field("partials")
        if isinstance(b, Fp8):
            out = fp8_operands.by_design(design, operand, b, gated=self.gated, summed=summed)
            if not (format := format_of(case, a)):
                return out
            return agreed(out, fp8_operands.by_design(design, operand, b, gated=True, format=format), format)
        if isinstance(b, FourBit):
            return four_bit_operands.by_design(design, operand, b, gated=self.gated, summed=summed)
        a, b = rows_contiguous(a), rows_contiguous(b)
        activation = (case.field("activation") or "silu") if self.gated else None
        if isinstance(design, SmallM):
            return small_m.run(operand._replace(data=a), b, design, activation=activation, summed=summed)
        more = (activation,) if self.gated else ()
        return self.run(design, None, normed(a, squares[0], case.eps) if squares else a, b, *more)

    def rule(self, call: GemmCall, machine: Machine) -> tuple[str, str]:
        if not call.dense:
            return "cublas", "an operand by columns, which cuBLAS reads as it is"
        small, reason = small_m_rule(call, machine.caps, gated=self.gated)
        return "small_m" if small else "cublas", reason

    def default(self, name: str, call: GemmCall, machine: Machine) -> Any:
        """cuBLAS with torch.mm's choice, or the small-M design; ops define other designs."""
        return Cublas() if name == "cublas" else default_small_m(call, machine.caps, gated=self.gated)


@functools.cache
def local_gemm(gated: bool) -> LocalGemm:
    """The op that is a GEMM of one rank, gated or not."""
    return next(op for op in registered() if isinstance(op, LocalGemm) and op.gated == gated)
