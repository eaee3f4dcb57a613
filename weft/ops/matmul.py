"""matmul: a persistent GEMM. The fused ops fall to it where there is one rank."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from weft.ops import gemm
from weft.ops.gemm import GemmConfig, gemm_tile, store_tile
from weft.ops.tiles import locate, make_tiles
from weft.runtime import capabilities

# Programs of the plain GEMM in the simulator. They wait for nobody, so any number is right.
_SIMULATED_SMS = 8


@triton.jit(do_not_specialize=["M", "tiles"])
def matmul_kernel(
    a, a_stride, b, b_stride, out, M, N, K, tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """out[M, N] = a[M, K] @ b[N, K].T        grid: (min(tiles, SMs),)

    signals, waits  none
    """
    for number in range(tl.program_id(0), tiles.count, tl.num_programs(0)):
        panel, chunk, tile_row, tile_column = locate(number, tiles)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        acc = gemm_tile(a, a_stride, M, b, b_stride, N, row, column, K, BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS)
        store_tile(out, acc, row, column, 0, M, N, BLOCK_M, BLOCK_N)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a[M, K] @ b[N, K].T -> [M, N], fp32 accumulation, in the dtype of both (fp16, bf16, fp32).

    Rows may be strided; anything else is copied first. ValueError for shapes, dtypes or devices that do not fit.
    """
    gemm.check_operands("matmul", a, b, a.device)
    return torch.ops.weft.matmul(a, b)


def run(a: torch.Tensor, b: torch.Tensor, config: GemmConfig | None = None) -> torch.Tensor:
    """``matmul`` of checked arguments, with a chosen config."""
    a, b = gemm.rows_contiguous(a), gemm.rows_contiguous(b)
    (M, K), N = a.shape, b.shape[0]
    caps = _capabilities(a.device)
    config = config or gemm.config_for(M, N, a.dtype, caps)
    tiles = make_tiles(M, N, panels=1, block_m=config.block_m, block_n=config.block_n, group=config.group)
    out = torch.empty((M, N), dtype=a.dtype, device=a.device)
    descriptors = gemm.can_describe(a, b)
    matmul_kernel[(min(tiles.count, caps.sms),)](
        gemm.operand(a, config.block_m, config.block_k, descriptors), gemm.row_stride(a),
        gemm.operand(b, config.block_n, config.block_k, descriptors), gemm.row_stride(b),
        out, M, N, K, tiles, **gemm.constants(config, descriptors),
    )  # fmt: skip
    return out


@functools.lru_cache
def _capabilities(device: torch.device) -> capabilities.Capabilities:
    if device.type == "cpu":
        return capabilities.simulated(1, _SIMULATED_SMS)
    return capabilities.probe(device, [])


@torch.library.custom_op("weft::matmul", mutates_args=())
def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return run(a, b)


@_matmul.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]))


def _remember(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    a, b = ctx.saved_tensors
    return torch.ops.weft.matmul(grad, b.t()), torch.ops.weft.matmul(grad.t(), a.t())


_matmul.register_autograd(_backward, setup_context=_remember)
