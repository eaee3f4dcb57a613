"""Overlapped ops with an fp8 weight (weft.kernels.fp8.Fp8): a collective and a GEMM, in sequence.

all_gather_matmul       rows are quantized, then their bytes and scales gathered: half the bytes of 16-bit rows
matmul_reduce_scatter   partial results travel in the dtype of a
matmul_all_reduce       the same
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from weft.kernels.fp8 import E4M3, Fp8
from weft.kernels.operands import ScaledMatrix
from weft.ops.collectives.all_gather import all_gather
from weft.ops.collectives.all_reduce import all_reduce
from weft.ops.collectives.reduce_scatter import reduce_scatter
from weft.ops.gemm.fp8_operands import check_fp8, quantized_for
from weft.ops.gemm.gemm_op import rotated
from weft.ops.gemm.matmul import matmul
from weft.ops.local import capabilities_of

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


def gathered_matmul(
    a_shard: torch.Tensor | Fp8, weights: Sequence[Fp8], team: Team, own_first: bool
) -> list[torch.Tensor]:
    """``all_gather_matmul`` of one shard and fp8 weights whose rows have scales of the same form."""
    op, first = "all_gather_matmul", weights[0]
    if torch.is_grad_enabled() and getattr(a_shard, "requires_grad", False):
        raise RuntimeError(f"{op}: fp8 weights have no backward; take weights of 16 bits, or torch.no_grad()")
    for weight in weights:
        check_fp8(op, ScaledMatrix(a_shard), weight, gated=False)
        if weight.is_grouped != first.is_grouped or weight.input_scale is not first.input_scale:
            raise ValueError(f"{op}: the weights' scales ask for rows of different scales; call the op once for each")
    rows = quantized_for(first, a_shard, capabilities_of(first.device))
    data = all_gather(rows.data.view(torch.uint8), team).view(E4M3)
    # Static scales are the same on all ranks.
    scales = rows.scales if first.input_scale is not None else all_gather(rows.scales.expand(len(rows.data), -1), team)
    gathered = Fp8(data, scales)
    if own_first:
        turned = rotated(data.view(torch.uint8), team.rank, team.size).view(E4M3)
        gathered = Fp8(turned, scales if len(scales) == 1 else rotated(scales, team.rank, team.size))
    return [matmul(gathered, weight).to(a_shard.dtype) for weight in weights]


def matmul_scattered(a: torch.Tensor | Fp8, b: Fp8, team: Team, own_first: bool) -> torch.Tensor:
    """``matmul_reduce_scatter`` with an fp8 weight."""
    partial = matmul(a, b)
    return reduce_scatter(rotated(partial, -team.rank % team.size, team.size) if own_first else partial, team)


def matmul_reduced(a: torch.Tensor | Fp8, b: Fp8, team: Team) -> torch.Tensor:
    """``matmul_all_reduce`` with an fp8 weight."""
    return all_reduce(matmul(a, b), team)
