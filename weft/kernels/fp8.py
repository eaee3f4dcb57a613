"""Rows in fp8 e4m3 with one fp32 scale for each block of 128 columns, the last one possibly ragged.

    scale = largest finite |x| of the block / 448, at least 2**-126; 1 for a block of zeros
    byte  = x * (1 / scale), rounded to the nearest even

e4m3 has no infinity: infinities and NaN become NaN (0x7f), and do not count for the scale of their block. A block whose largest
is below 448 * 2**-126 = 5.3e-36 keeps 2**-136 of absolute precision. A row is read back as byte * scale in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

E4M3 = torch.float8_e4m3fn
LARGEST: tl.constexpr = tl.constexpr(448.0)
# The smallest normal number, so that neither the scale nor its inverse is subnormal or infinite.
SMALLEST: tl.constexpr = tl.constexpr(2.0**-126)
# Columns under one scale.
COLUMNS: tl.constexpr = tl.constexpr(128)
# Columns of a program of ``quantize_rows_kernel``.
BLOCK = 1024


def scales_of(width: int) -> int:
    """Number of scales of a row."""
    return cdiv(width, COLUMNS.value)


def check_e4m3(op: str, caps: Capabilities) -> None:
    """ValueError where Triton cannot convert to and from e4m3: NVIDIA GPUs before sm_89."""
    if caps.arch.startswith("sm_") and int(caps.arch.removeprefix("sm_")) < 89:
        raise ValueError(
            f"{op}: dtype={E4M3} on {caps.arch}, which has no conversion to it; use sm_89 or later, or rows of 16 bits"
        )


@triton.jit
def quantized(x):
    """(e4m3 rows, scales [ROWS, WIDTH // COLUMNS]) of ``x`` [ROWS, WIDTH], 0 beyond its rows' ends."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    x = x.to(tl.float32).reshape(ROWS, WIDTH // COLUMNS, COLUMNS)
    size = tl.abs(x)
    finite = size < float("inf")
    largest = tl.max(tl.where(finite, size, 0.0), axis=2, keep_dims=True)
    # div_rn: a plain division is approximate.
    scale = tl.where(largest > 0, tl.maximum(tl.div_rn(largest, LARGEST), SMALLEST), 1.0)
    x = tl.where(finite, x * tl.div_rn(1.0, scale), float("nan"))
    return x.to(tl.float8e4nv).reshape(ROWS, WIDTH), scale.reshape(ROWS, WIDTH // COLUMNS)


@triton.jit(do_not_specialize=["T"])
def quantize_rows_kernel(x, rows, scales, T, WIDTH: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr):
    """rows [tokens, WIDTH], scales [tokens, SCALES] of x [T, WIDTH], zeros from row T on

    grid: (tokens, cdiv(WIDTH, BLOCK))
    """
    token, first = tl.program_id(0), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)[None, :]
    block = first // COLUMNS + tl.arange(0, BLOCK // COLUMNS)[None, :]
    wl.follow_previous_kernel()
    at = token.to(tl.int64) * WIDTH + column
    row, scale = quantized(tl.load(x + at, mask=(token < T) & (column < WIDTH), other=0.0))
    tl.store(rows + at, row, mask=column < WIDTH)
    tl.store(scales + token.to(tl.int64) * SCALES + block, scale, mask=block < SCALES)


def quantize_rows(
    x: torch.Tensor, tokens: int, caps: Capabilities, into: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows e4m3 [tokens, H], scales fp32) of ``x`` [T, H], with rows of zeros behind its own.

    into  where they go; None: new tensors
    """
    T, H = x.shape
    count = scales_of(H)
    if into is None:
        into = x.new_empty((tokens, H), dtype=E4M3), x.new_empty((tokens, count), dtype=torch.float32)
    constants = {"WIDTH": H, "SCALES": count, "BLOCK": BLOCK, **launch_options(caps)}
    launch = launch_on(x.device, quantize_rows_kernel, H, lambda: constants)
    launch((tokens, cdiv(H, BLOCK)), x.contiguous(), *into, T)
    return into


def by_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, scales) of ``x``, bit for bit as kernels give them."""
    H = x.shape[1]
    blocks = torch.nn.functional.pad(x.float(), (0, -H % COLUMNS.value)).unflatten(1, (-1, COLUMNS.value))
    finite = blocks.isfinite()
    largest = torch.where(finite, blocks.abs(), 0).amax(-1, keepdim=True)
    # A tensor below: on GPUs torch multiplies by the inverse of a number, which rounds otherwise.
    scale = torch.where(largest > 0, (largest / torch.full_like(largest, LARGEST.value)).clamp(min=SMALLEST.value), 1)
    # torch makes NaN of what is too large.
    rows = torch.where(finite, blocks * (1 / scale), torch.nan).clamp(-LARGEST.value, LARGEST.value)
    return rows.flatten(1)[:, :H].to(E4M3), scale.squeeze(-1)


def read_back(rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``rows`` times their scales, in ``dtype``, as grouped GEMMs load them."""
    return (rows.float() * scales.repeat_interleave(COLUMNS.value, 1)[:, : rows.shape[1]]).to(dtype)


class Fp8(NamedTuple):
    """A matrix [rows, K] of e4m3 with its scales: data * scales, each scale in fp32.

    data         [rows, K] float8_e4m3fn, or of experts [E, rows, K]
    scales       of a weight [ceil(N / r), ceil(K / c)], a scale for each block of r rows and c columns, powers of two up to
                 128, the largest that give the shape; [N, 1] for each channel; [1, 1] for the whole tensor.
                 Of activations [M, ceil(K / 128)] for groups of 128 columns of a row; [M, 1] for each token; [1, 1] for all
    input_scale  [1, 1], of a weight whose activations are quantized with this scale, whatever they are
    """

    data: torch.Tensor
    scales: torch.Tensor
    input_scale: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in ``dtype``: each byte times its scale, in fp32 at least, rounded once."""
        wide = torch.promote_types(dtype, torch.float32)
        rows, columns = (spread(self.scales.shape[dim], self.shape[dim]) for dim in (-2, -1))
        scales = self.scales.to(wide).repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        return (self.data.to(wide) * scales[..., : self.shape[-2], : self.shape[-1]]).to(dtype)


def spread(scales: int, size: int) -> int:
    """Rows or columns of a scale, of ``scales`` along ``size``: all for a single one; 0: none fits."""
    if scales == 1:
        return size
    block = COLUMNS.value
    while block and cdiv(size, block) != scales:
        block //= 2
    return block


def quantized_weight(weight: torch.Tensor, scheme: str) -> Fp8:
    """``weight`` [N, K] in e4m3: a scale for each "block" of 128 x 128, "channel", or "tensor"."""
    N, K = weight.shape
    rows, columns = {"block": (COLUMNS.value, COLUMNS.value), "channel": (1, K), "tensor": (N, K)}[scheme]
    padded = torch.nn.functional.pad(weight.float(), (0, -K % columns, 0, -N % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    largest = blocks.abs().amax((1, 3), keepdim=True)
    scales = torch.where(largest > 0, (largest / torch.full_like(largest, LARGEST.value)).clamp(min=SMALLEST.value), 1)
    data = (blocks * (1 / scales)).clamp(-LARGEST.value, LARGEST.value).flatten(2).flatten(0, 1)[:N, :K]
    return Fp8(data.to(E4M3).contiguous(), scales[:, 0, :, 0].contiguous())
