"""Torch ops of the overlapped GEMMs with fp8 weights (weft.kernels.fp8.Fp8): checks and signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.kernels.fp8 import E4M3, Fp8, check_e4m3
from weft.kernels.operands import ScaledMatrix
from weft.ops.gemm.fp8_operands import check_fp8
from weft.ops.op import Op, define
from weft.ops.overlap.eager import submit
from weft.ops.overlap.operands import Operand, form_of
from weft.runtime.team.team import find_team

if TYPE_CHECKING:
    from weft.ops.overlap.sequential import Overlapped
    from weft.runtime.team.team import Team


class Asked(NamedTuple):
    """Options of a call with fp8 weights: each field as of an op that takes it."""

    own_first: bool = False
    invariant: bool = False
    wire: str = "same"


class OverlappedFp8(Op):
    """An overlapped op with fp8 weights. of: the op of 16-bit operands, whose plans these calls have."""

    def __init__(self, of: Overlapped) -> None:
        super().__init__()
        self.of, self.name = of, f"{of.name}_fp8"  # type: ignore[misc]
        self.alias = self.name  # type: ignore[misc]
        of_k = {"a": (1,), "weights": (1,), "scales": (1,)} if of.ranks_differ_in_k else {}
        self.differs = {"a_scales": (0, 1), **of_k}  # type: ignore[misc]  # a scale of all rows, or of each
        define(self)

    def call_with(self, a: Operand, weights: Sequence[Fp8], team: Team, asked: Asked) -> list[torch.Tensor]:
        """Results for each weight, of unchecked operands."""
        op, first = self.of.name, weights[0]
        if torch.is_grad_enabled() and getattr(a, "requires_grad", False):
            raise RuntimeError(f"{op}: fp8 weights have no backward; take weights of 16 bits, or torch.no_grad()")
        check_e4m3(op, team.caps)
        for weight in weights:
            check_fp8(op, ScaledMatrix(a), weight, gated=False)
        if any(form_of(one) != form_of(first) or one.input_scale is not first.input_scale for one in weights):
            raise ValueError(f"{op}: the weights' scales ask for rows of different scales; call the op once for each")
        data, scales = (a.data, a.scales) if isinstance(a, Fp8) else (a, None)
        matrices, their_scales = [one.data for one in weights], [one.scales for one in weights]
        return self.dispatch(data, scales, matrices, their_scales, first.input_scale, team.name, asked)

    def forward(
        self,
        a: torch.Tensor,
        a_scales: torch.Tensor | None,
        weights: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        input_scale: torch.Tensor | None,
        team: str,
        asked: Asked,
    ) -> list[torch.Tensor]:
        members, rows = find_team(team), a if a_scales is None else Fp8(a, a_scales)
        bs = [Fp8(data, of, input_scale) for data, of in zip(weights, scales, strict=True)]
        options: dict[str, Any] = {"invariant": True} if asked.invariant else {}
        options |= {} if asked.wire == "same" else {"wire": asked.wire}
        results = self._empty(a, weights, members)
        submit(
            self.name,
            members,
            (rows, *bs, *results),
            (*asked, len(bs)),
            lambda: self.of.planned(members, rows, bs, asked.own_first, into=results, **options),
        )
        return results

    def fake(self, a, a_scales, weights, scales, input_scale, team, asked):
        return self._empty(a, weights, find_team(team))

    def _empty(self, a: torch.Tensor, weights: Sequence[torch.Tensor], team: Team) -> list[torch.Tensor]:
        """A new result for each weight."""
        rows, world = a.shape[0], team.size
        rows = rows * world if self.of.gathers else rows // world if self.of.rows_sharded else rows
        dtype = torch.bfloat16 if a.dtype == E4M3 else a.dtype
        return [torch.empty((rows, weight.shape[0]), dtype=dtype, device=a.device) for weight in weights]
