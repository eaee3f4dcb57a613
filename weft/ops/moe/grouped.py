"""Grouped GEMMs: each expert's weight times the rows of its pairs, one persistent kernel over the tiles of a ``Schedule``.

Tiles are ragged: at most ``Schedule.block`` pairs of one expert by a block of columns. Nothing is padded in memory. The weight
is read through a tensor descriptor of experts and rows, so no coordinate grows with experts * N * K. Rows of x are gathered by
token as they are loaded, or lie in the order of the pairs.

    grouped_matmul_silu_mul   h[i] = silu(x[t] @ gate.T) * (x[t] @ up.T)      pair i of the schedule is pair p, of token t
    grouped_matmul            y[p] = h[i] @ weight.T

A gated tile reads a block of gate's rows and the same of up's as one operand, so one product gives both halves of its columns.
With few pairs a tile is computed transposed: the weight's rows fill the tensor instruction, which has at least 64 of them. The
first operand of that instruction must come from shared memory as it was loaded, so there gate and up are two products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import weft.language as wl
from weft.kernels.gemm_tile import halves
from weft.kernels.operands import can_describe
from weft.ops.local import capabilities_of
from weft.ops.moe.routing import Schedule
from weft.plan.planned import AUTO
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedTiles:
    """Persistent programs, each over every programs-th tile.

    block_n     rows of the weight in a tile, gate's and up's together: a power of two of at least 16
    transposed  products are computed as weight @ x.T, for tiles of few pairs
    per_sm      programs of an SM
    columns     of the result, about, by which all tiles of pairs go before the next ones are begun
    """

    block_n: int = 256
    block_k: int = 64
    transposed: bool = False
    per_sm: int = 1
    columns: int = 1024
    num_warps: int = 8
    num_stages: int = 3

    def __post_init__(self) -> None:
        for name in ("block_n", "block_k"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name}={value} is not a power of two of at least 16")


class GroupedCall(NamedTuple):
    """Sizes that the plan of a grouped GEMM depends on.

    block   pairs of a tile
    pairs   of all tiles at most
    gather  rows are those of tokens, else in the order of the pairs
    """

    block: int
    pairs: int
    N: int
    K: int
    dtype: torch.dtype
    gather: bool
    design: str = AUTO


class Form(NamedTuple):
    """Compile-time form of a grouped GEMM.

    gated    gate and up, and silu(gate) * up of the results
    choices  k where rows of x are gathered: pair p is token p // k; 0 where they are in the order of the pairs
    block    pairs of a tile
    even     block_k divides K
    """

    gated: bool
    choices: int
    block: int
    even: bool


@triton.jit(do_not_specialize=["slab"])
def grouped_matmul_kernel(
    x,
    weight,
    out,
    schedule,
    N,
    K,
    slab,
    FORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """out[row] = x[row] @ weight[e].T of each pair of expert e, gated as FORM says    grid: (programs,), persistent

    x         [T, K] if FORM.choices, and rows of out are in the order of the schedule; else a descriptor of rows in that
              order, and row p of out is pair p's
    weight    descriptor of [experts, N, K] in blocks of BLOCK_N rows; if FORM.gated of [experts, 2, N, K] in blocks of
              BLOCK_N // 2 rows of both, or if TRANSPOSED of one
    schedule  ``Schedule``; out [pairs, N]: rows of pairs that are not in it are not written
    slab      tiles along N that go before the next ones are begun

    signals, waits  none: a tile is one program's
    """
    BLOCK_M: tl.constexpr = FORM.block
    WIDTH: tl.constexpr = BLOCK_N // 2 if FORM.gated else BLOCK_N
    wl.follow_previous_kernel()
    tile_rows, tile_columns = tl.load(schedule.tile_count), tl.cdiv(N, WIDTH)
    local, deep = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    tl.assume(K > 0)
    for tile in tl.range(tl.program_id(0), tile_rows * tile_columns, tl.num_programs(0), flatten=not TRANSPOSED):
        first_column = tile // (tile_rows * slab) * slab
        width = tl.minimum(slab, tile_columns - first_column)
        place = tile - first_column * tile_rows
        entry = schedule.tiles + place // width * 4
        column = (first_column + place % width) * WIDTH
        expert, first = tl.load(entry), tl.load(entry + 1)
        row, count = tl.load(entry + 2), tl.load(entry + 3)
        # Rows behind the last pair repeat it: they are not stored.
        pair = tl.load(schedule.pairs + first + tl.minimum(local, count - 1))
        if FORM.choices > 0:
            rows = x + (pair // FORM.choices).to(tl.int64)[:, None] * K + deep[None, :]
        if TRANSPOSED:
            acc = tl.zeros((WIDTH, BLOCK_M), dtype=tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = acc
        for k in tl.range(0, K, BLOCK_K):
            if FORM.choices == 0:
                a = x.load([row, k])
            elif FORM.even:
                a = tl.load(rows + k)
            else:
                a = tl.load(rows + k, mask=(deep < K - k)[None, :], other=0.0)
            if FORM.gated:
                b = weight.load([expert, 0, column, k])
            else:
                b = weight.load([expert, column, k])
            if TRANSPOSED:
                acc = tl.dot(b.reshape(WIDTH, BLOCK_K), a.T, acc, input_precision="ieee")
                if FORM.gated:
                    of_up = weight.load([expert, 1, column, k]).reshape(WIDTH, BLOCK_K)
                    up = tl.dot(of_up, a.T, up, input_precision="ieee")
            else:
                acc = tl.dot(a, b.reshape(BLOCK_N, BLOCK_K).T, acc, input_precision="ieee")
        if FORM.gated:
            if TRANSPOSED:
                gate = acc
            else:
                gate, up = halves(acc)
            acc = gate / (1.0 + tl.exp(-gate)) * up
        if TRANSPOSED:
            result = acc.T
        else:
            result = acc
        if FORM.choices > 0:
            target = row + local
        else:
            target = pair
        n = column + tl.arange(0, WIDTH)
        at = out + target.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=(local < count)[:, None] & (n < N)[None, :])


def grouped_tiles_for(call: GroupedCall, caps: Capabilities, *, gated: bool) -> GroupedTiles:
    """The fastest designs of probes on one H200 (Qwen3-30B-A3B, Qwen3-235B-A22B, Mixtral), for bf16.

    block 16  64 x 128, 3 stages, 4 programs an SM: at most 5 % from the best from 8 to 128 tokens. Gated: as many bytes in
              flight, as two products of 64 rows (not measured)
    gathered  128 x 256; 128 x 128 takes 27 % longer, its loads of rows being half of all
    in order  128 x 128 with 2 programs an SM; for N of 8192 and more 128 x 256
    """
    if call.dtype == torch.float32:
        return GroupedTiles(block_n=32, block_k=32, transposed=call.block < 64, num_warps=8, num_stages=2)
    if caps.arch.startswith("gfx") or caps.arch == "sm_80":  # less shared memory, and no descriptors in hardware
        return GroupedTiles(block_n=64, block_k=64, transposed=call.block < 64, num_warps=4, num_stages=2)
    if call.block < 64:
        if gated:
            return GroupedTiles(block_n=128, transposed=True, per_sm=3, num_warps=4, num_stages=4)
        return GroupedTiles(block_n=64, block_k=128, transposed=True, per_sm=4, num_warps=4)
    if call.gather:
        return GroupedTiles(num_stages=4) if call.block == 64 else GroupedTiles()
    if call.N * (2 if gated else 1) >= 8192:
        return GroupedTiles()
    return GroupedTiles(block_n=128, per_sm=2, num_warps=4)


def run(
    design: GroupedTiles, x: torch.Tensor, weight: torch.Tensor, schedule: Schedule, *, gather: bool, gated: bool
) -> torch.Tensor:
    """Rows [pairs, N] of checked arguments; see ``grouped_matmul_kernel``."""
    experts, rows, K = weight.shape
    N, caps = rows // (2 if gated else 1), capabilities_of(x.device)
    pairs = x.shape[0] * schedule.choices if gather else x.shape[0]
    out = x.new_empty((pairs, N))
    if pairs == 0:
        return out
    x = x if x.is_contiguous() else x.contiguous()
    weight = (
        weight
        if weight.is_contiguous() and can_describe(weight.view(-1, K))
        else weight.clone(memory_format=torch.contiguous_format)
    )
    block_n, block_k = design.block_n, design.block_k
    if gated:
        both = 1 if design.transposed else 2
        shape, block, strides = [experts, 2, N, K], [1, both, block_n // 2, block_k], [2 * N * K, N * K, K, 1]
    else:
        shape, block, strides = [experts, N, K], [1, block_n, block_k], [N * K, K, 1]
    if not gather:
        x = x if can_describe(x) else x.clone()
        x = TensorDescriptor(x, list(x.shape), [K, 1], [schedule.block, block_k])
    form = Form(gated, schedule.choices if gather else 0, schedule.block, K % block_k == 0)
    width = block_n // 2 if gated else block_n
    columns = cdiv(N, width)
    tiles = schedule.tiles.shape[0] * columns
    grouped_matmul_kernel[(min(tiles, caps.sms * design.per_sm),)](
        x,
        TensorDescriptor(weight, shape, strides, block),
        out,
        schedule,
        N,
        K,
        max(1, min(columns, design.columns // width)),
        FORM=form,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        TRANSPOSED=design.transposed,
        num_warps=design.num_warps,
        num_stages=design.num_stages,
        **launch_options(caps),
    )
    return out
