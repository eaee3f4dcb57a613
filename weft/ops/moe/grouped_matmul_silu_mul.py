"""grouped_matmul_silu_mul: the first half of each expert's gated MLP, on rows of its tokens."""

from __future__ import annotations

import torch

from weft.ops.moe.grouped_op import GroupedOp, check_grouped
from weft.ops.moe.routing import Schedule
from weft.ops.op import register


def grouped_matmul_silu_mul(
    x: torch.Tensor, weight: torch.Tensor, schedule: Schedule, *, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """h[i] = silu(x[t] @ gate.T) * (x[t] @ up.T) -> [T * k, N], for the i-th pair, of token t.

    x         [T, K], fp16, bf16 or fp32; a row of K elements has a multiple of 16 bytes
    weight    [experts, 2 N, K] of x's dtype, or with ``scales`` fp16, bf16 or fp32: of each expert of the schedule gate's N
              rows, then up's
    schedule  of ``moe_schedule``, for T tokens
    scales    fp32 [T, ceil(K / 128)] of fp8 rows x, as ``moe_dispatch`` gives them: row times scale, rounded to the weight's
              dtype, is multiplied

    Rows from the number of pairs on are not written. Computed in fp32, rounded once; the same bits from run to run.
    Gradients of x and weight, without scales. ValueError for shapes, dtypes or devices that do not fit.
    """
    check_grouped("grouped_matmul_silu_mul", x, weight, schedule, scales, gather=True, gated=True)
    return GROUPED_MATMUL_SILU_MUL.dispatch(x, weight, schedule, True, scales)


class GroupedMatmulSiluMul(GroupedOp):
    name, alias = "grouped_matmul_silu_mul", "grouped-gemm-silu"
    gated = True

    def public(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        schedule: Schedule,
        gather: bool,
        scales: torch.Tensor | None,
    ) -> torch.Tensor:
        return grouped_matmul_silu_mul(x, weight, schedule, scales=scales)


GROUPED_MATMUL_SILU_MUL = GroupedMatmulSiluMul()
register(GROUPED_MATMUL_SILU_MUL)
