"""GEMM whose bits depend neither on M nor on the ranks: a tree over slices of K (weft.kernels.slices).

    out[M, N] = x[M, K] @ weight[N, K].T

Every element is computed by the same instructions in the same order, whatever the tile: the weight's rows are the 64-row side
of the tensor instructions at every M, a step along K is as long at every M, and a program adds up a whole slice. Tiles, and the
number of programs that share one, are free.

    gemm   | slice 0 | slice 1 | ...       programs of a tile, each with neighbouring slices; in turn in a program
    sum      add their nodes               one more kernel, or the ranks' all-reduce
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.activations import activated
from weft.kernels.four_bit import FourBit
from weft.kernels.fp8 import COLUMNS, Fp8
from weft.kernels.fp8_tile import fp8_tile, scales_of_gemm
from weft.kernels.gemm_tile import Block, Operand, Outgoing, Sizes, gemm_tile
from weft.kernels.operands import ScaledMatrix, descriptor_or_self, row_stride
from weft.kernels.slices import as_node, joined, node_of, shape_free_dots
from weft.ops.gemm.fp8_operands import columns_of, described, quantized_for
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.knobs import design_type, knob, powers
from weft.ops.local import capabilities_of, compiler_options
from weft.ops.registration import HALVES
from weft.plan.planned import Planned
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import Capabilities, launch_options
from weft.runtime.launching import launch_on
from weft.runtime.recording import traced_view

# Slices of K of a GEMM whose ranks hold whole rows of the weight. More would give few rows more programs, and a tile of many
# rows more additions.
COLUMN_SLICES = 2
# Longest step along K; a shorter one divides slices that this does not.
STEP = 64
# Elements that a program of ``sum_nodes_kernel`` adds up.
SUM_BLOCK = 1024


@design_type
class Sliced:
    """GEMM in slices of K, of the same bits for all fields.

    block_m, block_n  rows of the weight, a multiple of 64, and of x in a tile
    programs     that share a tile, each with its share of the slices
    num_warps, num_stages  compiler options
    """

    block_m: int = knob(legal=powers(64))
    block_n: int = knob(legal=powers(16))
    programs: int = knob(1, powers())
    num_warps: int = 4
    num_stages: int = 4


def default_sliced(M: int, N: int, slices: int, caps: Capabilities, *, gated: bool = False) -> Sliced:
    """Design for M rows of x, N columns of out and ``slices`` slices on a rank. gated: as of ``run``."""
    block_n = max(16, min(128, next_power_of_2(M)))
    if caps.arch not in ("sm_90", "sm_100", "sm_103"):
        return Sliced(block_m=64, block_n=min(64, block_n), num_stages=2)
    # Up to 128 rows the time goes into reading the weight: many programs.
    block_m = 64 if M <= 128 else 128
    tiles = cdiv(N, block_m) * cdiv(M, block_n)
    # A round of programs that fills the SMs, or nearly.
    programs = 1
    while not gated and programs < slices and tiles * programs * 2 <= 2 * caps.sms:
        programs *= 2
    return Sliced(
        block_m=block_m,
        block_n=block_n,
        programs=programs,
        # With four, a gated tile's results do not fit the registers.
        num_warps=8 if block_n == 128 and (block_m == 128 or gated) else 4,
        num_stages=4 if block_n >= 64 else 6,
    )


def planned(op: str, call: GemmCall, slices: tuple[int, int], caps: Capabilities, *, gated: bool = False) -> Planned:
    """Plan of a GEMM. slices: of this rank, and of all ranks. ValueError where they do not divide K."""
    step_of(op, call.K, *slices, call.block_fp8)
    design = default_sliced(call.M, call.N, slices[0], caps, gated=gated)
    return Planned("sliced", design, f"invariant: K in {slices[1]} slices, of which this rank has {slices[0]}")


def check(op: str, x: ScaledMatrix, weight: torch.Tensor | Fp8 | FourBit) -> None:
    """ValueError unless an invariant GEMM takes these operands; the checks of any GEMM come after."""
    if isinstance(weight, Fp8):
        if not weight.is_grouped or columns_of(weight) != COLUMNS.value:
            raise ValueError(
                f"{op}: invariant=True with weight.scales of {tuple(weight.scales.shape)} for a weight of "
                f"{tuple(weight.shape)}; scales of blocks of {COLUMNS.value} columns alone do not depend on the ranks' shares"
            )
    elif isinstance(weight, FourBit) or getattr(weight, "dtype", HALVES[0]) not in HALVES:
        kind = "4 bits" if isinstance(weight, FourBit) else weight.dtype
        raise ValueError(f"{op}: invariant=True with a weight of {kind}; pass bfloat16, float16, or fp8 in blocks")
    if x.scales is not None:
        raise ValueError(f"{op}: invariant=True with a deferred RMS scale; pass normed rows")


def step_of(op: str, K: int, slices: int, whole: int, fp8: bool = False) -> int:
    """Columns of a step along K. ValueError where K does not fall into equal slices of whole steps.

    K      columns of this rank
    slices of this rank, of ``whole`` in all
    """
    least = COLUMNS.value if fp8 else 16
    total = K * whole // slices
    if K % slices or K // slices % least:
        raise ValueError(
            f"{op}: K={total} is not divisible by {whole * least}: invariant sums take {whole} slices of K, each of a multiple "
            f"of {least} columns; pad K to {cdiv(total, whole * least) * whole * least}"
        )
    step = least
    while not fp8 and step < STEP and K // slices % (2 * step) == 0:
        step *= 2
    return step


@triton.jit(do_not_specialize=["M", "programs", "steps"])
def sliced_kernel(
    x,
    weight,
    out,
    M,
    sizes,
    programs,
    steps,
    block,
    fp8,
    team,
    COUNT: tl.constexpr,
    ROUNDED: tl.constexpr,
    ACTIVATION: tl.constexpr = "",
):
    """out[p] = node over slices p * COUNT .. (p + 1) * COUNT - 1 of x @ weight.T

    grid: (tiles * programs,). The programs of a tile have consecutive ids; out is [programs, M, N].
    x, weight  descriptors; sizes: ``Sizes``, where A is x and B the weight
    steps      of a slice, of block.k columns each
    block      ``Block``: block.m rows of the weight and block.n of x
    fp8        ``Fp8Scales`` of operands in e4m3; else None
    team       in a trace (``traced_view``), else None
    ROUNDED    nodes are rounded to the dtype of ``out`` (weft.kernels.slices)
    ACTIVATION of the gate, if the weight is [2 N, K], gate's rows, then up's; both results are rounded before it. One program
               a tile. "": of any weight

    bits     of an element depend on its row of x, its row of the weight and ``steps``, and on nothing else
    signals, waits  none, except the wait for the previous kernel
    """
    shape_free_dots()
    dtype: tl.constexpr = out.dtype.element_ty
    part, tile = tl.program_id(0) % programs, tl.program_id(0) // programs
    tile_rows = tl.cdiv(M, block.n)
    row, column = tile % tile_rows * block.n, tile // tile_rows * block.m
    wl.wait_for_previous_kernel()
    began = wl.begin_tile(team)
    node = node_of_tile(x, weight, fp8, out, M, sizes, row, column, part * COUNT, steps, block, COUNT, ROUNDED)
    if ACTIVATION != "":
        gate = node.to(dtype)
        up = node_of_tile(
            x, weight, fp8, out, M, sizes, row, sizes.N + column, part * COUNT, steps, block, COUNT, ROUNDED
        )
        node = activated(gate.to(tl.float32), ACTIVATION) * up.to(dtype).to(tl.float32)
    wl.let_next_kernel_start()
    m, n = row + tl.arange(0, block.n), column + tl.arange(0, block.m)
    at = out + part * tl.cast(M, tl.int64) * sizes.N + m[None, :].to(tl.int64) * sizes.N + n[:, None]
    tl.store(at, node.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < sizes.N)[:, None])
    wl.end_tile(began, tile % tile_rows, tile // tile_rows, team)


@triton.jit
def node_of_tile(
    x, weight, fp8, out, M, sizes, row, column, number, steps, block, COUNT: tl.constexpr, ROUNDED: tl.constexpr
):
    """Node above the COUNT slices of a tile from ``number`` on, fp32, as of ``slice_of``."""
    dtype: tl.constexpr = out.dtype.element_ty
    node = slice_of(x, weight, fp8, out, M, sizes, row, column, number, steps, block, ROUNDED, dtype)
    if COUNT > 1:
        # Left neighbours that wait for the right one, a level each.
        first = node.to(dtype) if ROUNDED else node
        second, third = first, first
        for at in range(1, COUNT):
            node = slice_of(x, weight, fp8, out, M, sizes, row, column, number + at, steps, block, ROUNDED, dtype)
            if at % 2 == 0:
                first = node.to(first.dtype)
            else:
                node = joined(first.to(tl.float32), node, ROUNDED, dtype)
                if at % 4 == 1:
                    second = node.to(first.dtype)
                else:
                    node = joined(second.to(tl.float32), node, ROUNDED, dtype)
                    if at % 8 == 3:
                        third = node.to(first.dtype)
                    else:
                        node = joined(third.to(tl.float32), node, ROUNDED, dtype)
    return node


@triton.jit
def slice_of(
    x, weight, fp8, out, M, sizes, row, column, number, steps, block, ROUNDED: tl.constexpr, dtype: tl.constexpr
):
    """Leaf of slice ``number`` of a tile: [block.m rows of the weight, block.n rows of x], fp32."""
    first, last = number * steps, (number + 1) * steps
    if fp8 is not None:
        leaf, _ = fp8_tile(x, weight, fp8, M, sizes.N, row, column, first, last, block, True, False)
    else:
        weights, rows = Operand(weight, sizes.b_stride, sizes.N), Operand(x, sizes.a_stride, M)
        leaf = gemm_tile(weights, rows, column, row, sizes.K, first, last, Outgoing(out, out, 0), block, False)
    return as_node(leaf, ROUNDED, dtype)


@triton.jit
def sum_nodes_kernel(source, out, n, COUNT: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = node above source[0 .. COUNT - 1, i], rounded        grid: (cdiv(n, BLOCK),)"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wl.follow_previous_kernel()
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + at, node_of(source + at, at < n, n, COUNT, ROUNDED, dtype).to(dtype), mask=at < n)


def run(
    design: Sliced,
    x: torch.Tensor | Fp8,
    weight: torch.Tensor | Fp8,
    slices: int,
    *,
    rounded: bool,
    step: int,
    dtype: torch.dtype | None = None,
    activation: str = "",
) -> torch.Tensor:
    """Nodes [programs, M, N] over this rank's ``slices`` slices, which are neighbours of one another.

    rounded  nodes are in ``dtype``, by default that of x; else fp32 where there are several, and one is rounded to ``dtype``
    step     ``step_of`` these operands
    activation  of the gate, of a weight [2 N, K] as of ``matmul_silu_mul``; "": the GEMM alone
    """
    fp8, dtype = None, dtype or x.dtype
    if isinstance(weight, Fp8):
        weight = weight._replace(scales=weight.scales.contiguous())
        fp8, x, weight = scales_of_gemm(x.scales, weight, design.block_m, False), x.data, weight.data
    x, weight = map(described, (x, weight))
    (M, K), N = x.shape, weight.shape[0] // (2 if activation else 1)
    programs = 1 if activation else min(design.programs, slices)
    out = torch.empty((programs, M, N), dtype=dtype if rounded or programs == 1 else torch.float32, device=x.device)
    caps = capabilities_of(x.device)
    count = slices // programs
    block = Block(*map(tl.constexpr, (design.block_m, design.block_n, step, True, 1, 1)))
    launch = launch_on(
        x.device,
        sliced_kernel,
        (design, step, count, rounded, activation),
        lambda: {
            "COUNT": count,
            "ROUNDED": rounded,
            "ACTIVATION": activation,
            # Sums of fp8 steps are multiplied by scales and added, by two instructions in every tile.
            "enable_fp_fusion": False,
            **compiler_options(design, caps),
        },
    )
    tiles = cdiv(M, design.block_n) * cdiv(N, design.block_m)
    launch(
        tiles * programs,
        descriptor_or_self(x, design.block_n, step, True),
        descriptor_or_self(weight, design.block_m, step, True),
        out,
        M,
        Sizes(N, K, row_stride(x), row_stride(weight)),
        programs,
        K // slices // step,
        block,
        fp8,
        traced_view(),
    )
    return out


def product(
    op: str,
    design: Sliced,
    x: torch.Tensor | Fp8,
    weight: torch.Tensor | Fp8,
    out: torch.Tensor | None = None,
    activation: str = "",
) -> torch.Tensor:
    """x @ weight.T of a weight whose rows ranks hold whole, rounded once. activation: as of ``run``."""
    return total(column_nodes(op, design, x, weight, activation), x.dtype, rounded=False, out=out)


def column_nodes(
    op: str, design: Sliced, x: torch.Tensor | Fp8, weight: torch.Tensor | Fp8, activation: str = ""
) -> torch.Tensor:
    """Nodes of ``product``, [programs, M, N]: fp32, or of one program in x's dtype."""
    dtype = x.dtype
    if isinstance(weight, Fp8):
        x = quantized_for(weight, x, capabilities_of(weight.device))
    step = step_of(op, x.shape[1], COLUMN_SLICES, COLUMN_SLICES, isinstance(weight, Fp8))
    return run(design, x, weight, COLUMN_SLICES, rounded=False, step=step, dtype=dtype, activation=activation)


def total(nodes: torch.Tensor, dtype: torch.dtype, *, rounded: bool, out: torch.Tensor | None = None) -> torch.Tensor:
    """Node above ``nodes`` [count, M, N], in ``dtype``: ``out``, a new tensor, or the only node itself."""
    count, *shape = nodes.shape
    if count == 1 and nodes.dtype == dtype:
        return nodes[0] if out is None else out.copy_(nodes[0])
    out = torch.empty(shape, dtype=dtype, device=nodes.device) if out is None else out
    options = launch_options(capabilities_of(nodes.device))
    launch = launch_on(
        nodes.device,
        sum_nodes_kernel,
        (count, rounded),
        lambda: {"COUNT": count, "ROUNDED": rounded, "BLOCK": SUM_BLOCK, "num_warps": 4, **options},
    )
    launch(cdiv(out.numel(), SUM_BLOCK), nodes, out, out.numel())
    return out
