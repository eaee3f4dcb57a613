"""Grouped GEMMs of few pairs with experts in 4 bits (weft.kernels.four_bit.FourBit).

With few pairs the time goes into reading weights: a tile of an expert's rows by at most 32 of its pairs reads them in 4 bits,
as the small-M kernel does. With many pairs a kernel writes the weights in 16 bits for the GEMM of
``weft.ops.moe.grouped.gemms``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import weft.language as wl
from weft.arguments import quoted
from weft.kernels.four_bit import FourBit
from weft.kernels.four_bit_tile import HALF, STEP, dequantized, four_bit_dot, grid_of
from weft.ops.gemm.four_bit_operands import check_four_bit
from weft.ops.local import capabilities_of
from weft.ops.moe.routing import Schedule
from weft.ops.op import Op, define
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options

# Most pairs of a tile that the kernel here takes.
FEW = 32
# Rows of a weight in a tile, and programs of an SM. Not measured.
BLOCK_N, PER_SM = 64, 3


@triton.jit
def grouped_four_bit_kernel(
    x,
    weight,
    scales,
    out,
    schedule,
    N,
    K,
    CHOICES: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[row] = x[row] @ weight[e].T of expert e's pairs; silu(gate) * up if GATED

    grid    (programs,)

    x, schedule, out  as of ``grouped_matmul_kernel``: rows of tokens if CHOICES, else in the order of the schedule
    weight  descriptor over the bytes of all experts' rows, N of an expert, or gate's N and up's N
    scales  ``Grid`` of the experts' scales

    signals, waits  none
    """
    wl.follow_previous_kernel()
    if GATED:
        halves: tl.constexpr = 2
    else:
        halves: tl.constexpr = 1
    tile_columns = tl.cdiv(N, BLOCK_N)
    local, deep = tl.arange(0, BLOCK_M), tl.arange(0, HALF)[None, :]
    tl.assume(K > 0)
    for tile in tl.range(tl.program_id(0), tl.load(schedule.tile_count) * tile_columns, tl.num_programs(0)):
        entry, column = schedule.tiles + tile // tile_columns * 4, tile % tile_columns * BLOCK_N
        expert, first = tl.load(entry), tl.load(entry + 1)
        row, count = tl.load(entry + 2), tl.load(entry + 3)
        # Rows after the last pair repeat it: they are not stored.
        pair = tl.load(schedule.pairs + first + tl.minimum(local, count - 1))
        if CHOICES > 0:
            source, target = pair // CHOICES, row + local
        else:
            source, target = row + tl.minimum(local, count - 1), pair
        rows = x + source.to(tl.int64)[:, None] * K + deep
        begin = expert * N * halves
        of_weight = begin + column + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        up = acc
        for k in tl.range(0, K, STEP):
            low = tl.load(rows + k, mask=deep < K - k, other=0.0)
            high = tl.load(rows + k + HALF, mask=deep < K - k - HALF, other=0.0)
            bytes = weight.load([begin + column, k // 2])
            acc = four_bit_dot(low, high, bytes, scales, of_weight, begin + N, k, K, acc, True)
            if GATED:
                bytes = weight.load([begin + N + column, k // 2])
                up = four_bit_dot(low, high, bytes, scales, of_weight + N, begin + 2 * N, k, K, up, True)
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        n = column + tl.arange(0, BLOCK_N)
        at = out + target.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(at, acc.T.to(out.dtype.element_ty), mask=(local < count)[:, None] & (n < N)[None, :])


def grouped_four_bit(
    op: str, x: torch.Tensor, weight: FourBit, schedule: Schedule, gather: bool, gated: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``op`` with few pairs a tile; with many (x, the weight in 16 bits), for ``op`` of such weights."""
    flat = FourBit(*(one.flatten(0, 1) if isinstance(one, torch.Tensor) else one for one in weight))
    check_four_bit(op, x, flat, False)
    if not isinstance(schedule, Schedule):
        raise ValueError(f"{op}: schedule={quoted(schedule)} is not a Schedule; weft.ops.moe_schedule makes one")
    tokens = schedule.pairs.shape[1]
    if len(x) != (wanted := tokens if gather else tokens * schedule.choices):
        raise ValueError(
            f"{op}: x has {len(x)} rows; this schedule of {tokens} tokens takes {wanted} with gather={gather}"
        )
    if schedule.block > FEW:
        return x, dequantized(weight, x.dtype, capabilities_of(x.device))
    return _GROUPED_FOUR_BIT.dispatch(x, weight, schedule, gather, gated)


class GroupedFourBit(Op):
    name = alias = "grouped_four_bit"
    collective = False

    def forward(self, x: torch.Tensor, weight: FourBit, schedule: Schedule, gather: bool, gated: bool) -> torch.Tensor:
        out = self.fake(x, weight, schedule, gather, gated)
        if schedule.all_pairs == 0:
            return out
        data, caps, (_, N) = weight.data.flatten(0, 1), capabilities_of(x.device), out.shape
        bytes_of_row = data.shape[1]
        options: dict[str, Any] = {"num_warps": 4, "num_stages": 4, **launch_options(caps)}
        tiles = schedule.tiles.shape[0] * cdiv(N, BLOCK_N)
        grouped_four_bit_kernel[(min(tiles, caps.sms * PER_SM),)](
            x.contiguous(),
            TensorDescriptor(data, list(data.shape), [bytes_of_row, 1], [BLOCK_N, HALF.value]),
            grid_of(weight),
            out,
            schedule,
            N,
            weight.columns,
            CHOICES=schedule.choices if gather else 0,
            GATED=gated,
            BLOCK_M=schedule.block,
            BLOCK_N=BLOCK_N,
            **options,
        )
        return out

    def fake(self, x, weight, schedule, gather, gated):
        return x.new_empty((schedule.all_pairs, weight.data.shape[1] // (2 if gated else 1)))


_GROUPED_FOUR_BIT = GroupedFourBit()
define(_GROUPED_FOUR_BIT)
