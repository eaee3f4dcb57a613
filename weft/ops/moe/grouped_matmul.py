"""grouped_matmul: each expert's weight times the rows of its pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.ops.case import Case
from weft.ops.moe.grouped_op import GroupedOp, check_grouped
from weft.ops.moe.routing import Schedule
from weft.ops.op import register


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    schedule: Schedule,
    *,
    gather: bool = False,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """x's rows @ weight[e].T for the pairs of each expert e -> [T * k, N].

    x         [T * k, K]: row i is of the i-th pair of the schedule, as ``grouped_matmul_silu_mul`` gives them; with ``gather``
              [T, K]: a row for each token. fp16, bf16 or fp32; a row of K elements has a multiple of 16 bytes
    weight    [experts, N, K] of x's dtype; with ``scales`` fp16, bf16 or fp32
    schedule  of ``moe_schedule``, for T tokens
    gather    False: row t * k + j of the result is that of token t's choice j. True: row i is that of the i-th pair
    scales    fp32 [T, ceil(K / 128)] of fp8 rows x, as ``moe_dispatch`` gives them, with ``gather``: row times scale,
              rounded to the weight's dtype, is multiplied

    Rows of pairs that are not in the schedule are not written. Computed in fp32, rounded once; the same bits from run to run.
    Gradients of x and weight, without scales. ValueError for shapes, dtypes or devices that do not fit.
    """
    check_grouped("grouped_matmul", x, weight, schedule, scales, gather=gather, gated=False)
    return GROUPED_MATMUL.dispatch(x, weight, schedule, gather, scales)


class GroupedMatmul(GroupedOp):
    name, alias = "grouped_matmul", "grouped-gemm"
    gated = False
    variants = ("gather",)

    def case_of(self, shape: Sequence[int], dtype: torch.dtype, world_size: int, **fields: Any) -> Case:
        return super().case_of(shape, dtype, world_size, **{"gather": False, **fields})

    def public(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        schedule: Schedule,
        gather: bool,
        scales: torch.Tensor | None,
    ) -> torch.Tensor:
        return grouped_matmul(x, weight, schedule, gather=gather, scales=scales)


GROUPED_MATMUL = GroupedMatmul()
register(GROUPED_MATMUL)
