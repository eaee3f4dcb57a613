"""Matrices in fp8 e4m3 with fp32 scales: ``Fp8``, and how rows are quantized.

Rows have a scale for each group of 128 columns, the last one possibly ragged, or one for the whole row:

    scale = largest finite |x| of the group / 448, at least 2**-126; 1 for a group of zeros
    byte  = x * (1 / scale), rounded to the nearest even

e4m3 has no infinity: infinities and NaN become NaN (0x7f), and do not count for the scale of their group. A group whose largest
is below 448 * 2**-126 = 5.3e-36 keeps 2**-136 of absolute precision. A row is read back as byte * scale in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

E4M3 = torch.float8_e4m3fn
LARGEST: tl.constexpr = tl.constexpr(448.0)
# The smallest normal number, so that neither the scale nor its inverse is subnormal or infinite.
SMALLEST: tl.constexpr = tl.constexpr(2.0**-126)
# The largest of a group under the smallest scale.
LEAST_LARGEST: tl.constexpr = tl.constexpr(448.0 * 2.0**-126)
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
def quantized(x, GROUP: tl.constexpr = COLUMNS):
    """(e4m3 rows, scales [ROWS, WIDTH // GROUP]) of ``x`` [ROWS, WIDTH], 0 beyond its rows' ends."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    x = x.to(tl.float32).reshape(ROWS, WIDTH // GROUP, GROUP)
    size = tl.abs(x)
    finite = size < float("inf")
    largest = tl.max(tl.where(finite, size, 0.0), axis=2, keep_dims=True)
    # div_rn: a plain division is approximate. Not of zeros or of subnormal results, which takes several times as long.
    scale = tl.where(largest > 0, tl.div_rn(tl.maximum(largest, LEAST_LARGEST), LARGEST), 1.0)
    x = tl.where(finite, x * tl.div_rn(1.0, scale), float("nan"))
    return x.to(tl.float8e4nv).reshape(ROWS, WIDTH), scale.reshape(ROWS, WIDTH // GROUP)


@triton.jit(do_not_specialize=["T"])
def quantize_rows_kernel(
    x,
    rows,
    scales,
    scale_row,
    scale_column,
    T,
    WIDTH: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """rows [tokens, WIDTH], scales [tokens, SCALES] of x [T, WIDTH], zeros from row T on

    scale_row, scale_column  strides of ``scales``
    GROUP                    columns of a scale

    grid: (tokens, cdiv(WIDTH, BLOCK))
    """
    token, first = tl.program_id(0), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)[None, :]
    block = first // GROUP + tl.arange(0, BLOCK // GROUP)[None, :]
    wl.follow_previous_kernel()
    at = token.to(tl.int64) * WIDTH + column
    row, scale = quantized(tl.load(x + at, mask=(token < T) & (column < WIDTH), other=0.0), GROUP)
    tl.store(rows + at, row, mask=column < WIDTH)
    tl.store(scales + token.to(tl.int64) * scale_row + block * scale_column, scale, mask=block < SCALES)


def quantize_rows(
    x: torch.Tensor, tokens: int, caps: Capabilities, into: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows e4m3 [tokens, H], scales fp32) of ``x`` [T, H], zeros from row T on.

    into  where they go; None: new tensors. Its scales [tokens, 1] are of whole rows
    """
    T, H = x.shape
    if into is None:
        into = x.new_empty((tokens, H), dtype=E4M3), x.new_empty((tokens, scales_of(H)), dtype=torch.float32)
    rows, scales = into
    count = scales.shape[1]
    block = group = BLOCK
    if count == scales_of(H):
        group = COLUMNS.value
    else:
        block = group = next_power_of_2(H)
    constants = {"WIDTH": H, "SCALES": count, "BLOCK": block, "GROUP": group, **launch_options(caps)}
    if block > 4 * BLOCK:
        constants["num_warps"] = 8
    launch = launch_on(x.device, quantize_rows_kernel, (H, count), lambda: constants)
    launch((tokens, cdiv(H, block)), x.contiguous(), rows, scales, scales.stride(0), scales.stride(1), T)
    return into


def _scale_for(largest: torch.Tensor) -> torch.Tensor:
    """Scales of groups with these largest magnitudes."""
    # A tensor below: on GPUs torch multiplies by the inverse of a number, which rounds otherwise.
    return torch.where(largest > 0, (largest / torch.full_like(largest, LARGEST.value)).clamp(min=SMALLEST.value), 1)


def by_torch(x: torch.Tensor, columns: int = COLUMNS.value) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, scales) of ``x``, bit for bit as kernels give them. columns: of a scale."""
    H = x.shape[1]
    blocks = torch.nn.functional.pad(x.float(), (0, -H % columns)).unflatten(1, (-1, columns))
    finite = blocks.isfinite()
    scale = _scale_for(torch.where(finite, blocks.abs(), 0).amax(-1, keepdim=True))
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
    def dtype(self) -> torch.dtype:
        """The dtype of results of a GEMM of such rows."""
        return torch.bfloat16

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def is_grouped(self) -> bool:
        """True for several scales along K; activations then have one for each group of 128 columns."""
        return self.scales.shape[-1] > 1

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in ``dtype``: each byte times its scale, in fp32 at least, rounded once."""
        wide = torch.promote_types(dtype, torch.float32)
        rows, columns = (spread(self.scales.shape[dim], self.shape[dim]) for dim in (-2, -1))
        scales = self.scales.to(wide).repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        return (self.data.to(wide) * scales[..., : self.shape[-2], : self.shape[-1]]).to(dtype)


def by_static_scale(x: torch.Tensor, scale: torch.Tensor) -> Fp8:
    """``x`` in e4m3 by a scale [1, 1] of all of it, saturated."""
    # By a tensor: torch multiplies by a number's inverse in another precision.
    return Fp8((x.float() * (1 / scale)).clamp(-LARGEST.value, LARGEST.value).to(E4M3), scale)


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
    scales = _scale_for(blocks.abs().amax((1, 3), keepdim=True))
    data = (blocks * (1 / scales)).clamp(-LARGEST.value, LARGEST.value).flatten(2).flatten(0, 1)[:N, :K]
    return Fp8(data.to(E4M3).contiguous(), scales[:, 0, :, 0].contiguous())
