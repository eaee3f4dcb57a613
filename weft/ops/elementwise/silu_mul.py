"""silu_mul: the activation between the two GEMMs of a gated MLP, where no GEMM computes it itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.deferred_norm import DeferredNorm, check_scales, rms_scale
from weft.kernels.operands import rows_contiguous
from weft.ops.custom_op import custom_op
from weft.ops.local import capabilities_of, check_like
from weft.ops.registration import FLOATS
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options

# Elements of a program's tile: 8 a thread of 4 warps, so that bf16 is loaded 16 bytes at a time.
TILE = 1024
MAX_ROWS = 4


@triton.jit
def silu_mul_kernel(
    gate_up, stride, squares, eps, out, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, SQUARES: tl.constexpr
):
    """out[M, N] = silu(gate_up[:, :N]) * gate_up[:, N:]        grid: (tiles,), those along N first

    gate_up  [M, 2 N], rows ``stride`` apart. Computed in fp32, rounded once
    squares  fp32 [M, SQUARES], a deferred RMS scale: row m of gate_up times 1 / sqrt(sum(squares[m]) + eps). SQUARES 0: none
    """
    across = tl.cdiv(N, BLOCK)
    rows = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    at = gate_up + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    wl.follow_previous_kernel()
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + N, mask=inside, other=0.0).to(tl.float32)
    if SQUARES > 0:
        scale = rms_scale(squares, rows, rows < M, eps, SQUARES)[:, None]
        gate *= scale
        up *= scale
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + rows.to(tl.int64)[:, None] * N + columns[None, :], result.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor | DeferredNorm) -> torch.Tensor:
    """silu(gate) * up -> [M, N], contiguous, in the dtype of ``gate_up``; computed in fp32, rounded once.

    gate_up  [M, 2 N]: gate, then up; fp16, bf16 or fp32. Rows may be strided; any other layout is copied first. Or a
             ``DeferredNorm``, whose RMS scale is applied here

    No backward. ValueError for another shape or dtype.
    """
    norm = gate_up if isinstance(gate_up, DeferredNorm) else None
    gate_up = norm.scaled if norm else gate_up
    check_like("silu_mul", "gate_up", gate_up, None, FLOATS)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 != 0:
        raise ValueError(
            f"silu_mul: gate_up has shape {tuple(gate_up.shape)}; it must be [M, 2 N], the gate's N columns before up's"
        )
    if norm is None:
        return torch.ops.weft.silu_mul.default(gate_up, None, 0.0)
    check_scales("silu_mul", norm.operand, gate_up)
    return torch.ops.weft.silu_mul.default(gate_up, norm.squares, norm.eps)


@custom_op("silu_mul", backward=False)
def _silu_mul(gate_up: torch.Tensor, squares: torch.Tensor | None, eps: float) -> torch.Tensor:
    M, N = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((M, N), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() > 0:
        gate_up = rows_contiguous(gate_up)
        rows = min(MAX_ROWS, next_power_of_2(M))
        block = TILE // rows
        silu_mul_kernel[(cdiv(N, block) * cdiv(M, rows),)](
            gate_up,
            gate_up.stride(0),
            gate_up if squares is None else squares.contiguous(),
            eps,
            out,
            M,
            N,
            ROWS=rows,
            BLOCK=block,
            SQUARES=0 if squares is None else squares.shape[1],
            **launch_options(capabilities_of(out.device)),
        )
    return out


@_silu_mul.register_fake
def _(gate_up, squares, eps):
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
