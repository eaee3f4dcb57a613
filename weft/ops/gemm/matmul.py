"""matmul: cuBLAS's GEMM, that of weft.ops.gemm.small_m for few rows, or a persistent one. The fused ops use it where there is
one rank."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.kernels.deferred_norm import FactoredNorm
from weft.kernels.gemm_tile import gemm_tile, join_parts, leave_part, store_tile
from weft.kernels.operands import can_describe, operand, row_stride, rows_contiguous
from weft.kernels.tile_schedule import MAX_PARTS, locate, make_tiles, work_at, work_steps
from weft.ops.custom_op import custom_op
from weft.ops.gemm import cublas, matmul_deferred_norm, persistent, small_m
from weft.ops.gemm.config import GemmConfig, configured
from weft.ops.local import capabilities_of
from weft.runtime.cublaslt import Algorithm


@triton.jit(do_not_specialize=["M", "tiles", "whole"])
def matmul_kernel(
    a, a_stride, b, b_stride, out, scratch, tickets, M, N, K, tiles, whole,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """out[M, N] = a[M, K] @ b[N, K].T        grid: (programs,); the tiles from place ``whole`` on are split

    signals, waits  none: the last part of a split tile adds up the others (join_parts)
    """
    depth = tl.cdiv(K, BLOCK_K)
    for step in range(0, work_steps(tiles, whole, depth)):
        number, first, last = work_at(step, tiles, whole, depth)
        panel, chunk, tile_row, tile_column = locate(number, tiles)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        acc = gemm_tile(
            a, a_stride, M, b, b_stride, N, row, column, K, first, last, out, out, 0,
            BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, 0,
        )  # fmt: skip
        if last - first == depth:
            store_tile(out, acc, row, column, 0, M, N, BLOCK_M, BLOCK_N)
        elif leave_part(acc, scratch, tickets, number, tiles, whole, depth, BLOCK_M, BLOCK_N):
            for at in range(0, BLOCK_M, ROWS):
                x = join_parts(scratch, number, at, tiles, whole, depth, BLOCK_M, BLOCK_N, ROWS)
                store_tile(out, x, row + at, column, 0, M, N, ROWS, BLOCK_N)


def matmul(a: torch.Tensor | FactoredNorm, b: torch.Tensor) -> torch.Tensor:
    """a[M, K] @ b[N, K].T -> [M, N], fp32 accumulation, in the dtype of both (fp16, bf16, fp32).

    Rows may be strided; anything else is copied first. The same bits from run to run; a row's bits may change with the
    design and config that M decides (``weft.ops.explain``). ``a`` may be a factored norm: its rows' factors are applied
    to the product, in fp32, where ``weft.ops.gemm.small_m`` has a config, else to ``a`` before; then there is no backward.
    ValueError for shapes, dtypes or devices that do not fit.
    """
    if isinstance(a, FactoredNorm):
        persistent.check_operands("matmul", a.scaled, b, None)
        return matmul_deferred_norm.product("matmul", a, b)
    persistent.check_operands("matmul", a, b, None)
    return torch.ops.weft.matmul.default(a, b)


def run(a: torch.Tensor, b: torch.Tensor, config: GemmConfig | Algorithm | None = None) -> torch.Tensor:
    """``matmul`` of checked arguments, with a chosen config or algorithm of the library. A config of design "library" is as
    torch calls it. ValueError for a config of design "segments", which is for ops of several ranks."""
    a, b = rows_contiguous(a), rows_contiguous(b)
    (M, K), N = a.shape, b.shape[0]
    caps = capabilities_of(a.device)
    if isinstance(config, Algorithm):
        return cublas.by(config, a, b)
    if config is None and (few_rows := small_m.chosen_for("matmul", a, b, caps)) is not None:
        return small_m.run(a, b, few_rows, gated=False)
    if config is not None:
        persistent.check_design("matmul", config, "fused", "library")
        if config.design == "library":
            return a @ b.T
    config = config or configured("matmul", M, N, K, a.dtype, 1, caps)
    if config.design == "library":
        return cublas.matmul(a, b)
    tiles = make_tiles(M, N, panels=1, block_m=config.block_m, block_n=config.block_n, group=config.group)
    out = torch.empty((M, N), dtype=a.dtype, device=a.device)
    programs = min(caps.sms, tiles.count * (MAX_PARTS.value if config.split else 1))
    whole = persistent.whole_for(tiles, programs, config)
    scratch, tickets = _parts(a.device, tiles.count - whole, programs, config)
    descriptors = can_describe(a, b)
    options = persistent.constants(config, descriptors, caps.arch)
    del options["PIECE"]
    matmul_kernel[(programs,)](
        operand(a, config.block_m, config.block_k, descriptors), row_stride(a),
        operand(b, config.block_n, config.block_k, descriptors), row_stride(b),
        out, scratch, tickets, M, N, K, tiles, whole, **options,
    )  # fmt: skip
    return out


def _parts(device: torch.device, split: int, programs: int, config: GemmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Scratch and tickets of one call. Its own, since calls may run on several streams at once."""
    tile = config.block_m * config.block_n
    scratch = torch.empty((programs, tile) if split else (1,), dtype=torch.float32, device=device)
    return scratch, torch.zeros(split, dtype=torch.int32, device=device) if split else scratch.view(torch.int32)


@custom_op("matmul")
def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return run(a, b)


@_matmul.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]))


def _remember(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    a, b = ctx.saved_tensors
    return torch.ops.weft.matmul.default(grad, b.t()), torch.ops.weft.matmul.default(grad.t(), a.t())


_matmul.register_autograd(_backward, setup_context=_remember)
