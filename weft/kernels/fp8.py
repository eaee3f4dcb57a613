"""Matrices in fp8 e4m3 with fp32 scales: ``Fp8``, and how rows are quantized.

Rows have a scale for each group of 128 columns, the last one possibly ragged, or one for the whole row:

    scale = largest finite |x| of the group / 448, at least 2**-126; 1 for a group of zeros
    byte  = x * (1 / scale), rounded to the nearest even

e4m3 has no infinity: infinities and NaN become NaN (0x7f), and do not count for the scale of their group. A group whose largest
is below 448 * 2**-126 = 5.3e-36 keeps 2**-136 of absolute precision. A row is read back as byte * scale in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
# Groups of 128 columns that a program of ``quantize_rows_kernel`` takes: 16 elements a thread, loaded 16 bytes at a time.
GROUPS = 16
# Of the rows that cuBLAS takes with scales of groups the number is a multiple of this.
ROWS_OF_CUBLAS = 4


class RowFormat(NamedTuple):
    """How rows are put in fp8: ``Fp8.row_format`` of the weight that they meet.

    kind          "group": a scale for 128 columns of a token; "token": for a token; "static": one is given
    static_scale  [1, 1] fp32, the given one
    beside        norms return the rows in 16 bits too (``RowsBeside``), for a weight that is not in fp8
    """

    kind: str
    static_scale: torch.Tensor | None = None
    beside: bool = False

    def count(self, width: int) -> int:
        """Number of scales of a row, as they are written."""
        return {"group": scales_of(width), "token": 1, "static": 0}[self.kind]


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
    scale = scale_for(largest)
    return by_scale(x, scale).reshape(ROWS, WIDTH), scale.reshape(ROWS, WIDTH // GROUP)


@triton.jit
def scale_for(largest):
    """Scales of groups with these ``largest`` finite magnitudes."""
    # div_rn: a plain division is approximate. Not of zeros or of subnormal results, which takes several times as long.
    return tl.where(largest > 0, tl.div_rn(tl.maximum(largest, LEAST_LARGEST), LARGEST), 1.0)


@triton.jit
def by_scale(x, scale):
    """fp32 ``x`` in e4m3 by the scale of its group."""
    return tl.where(tl.abs(x) < float("inf"), x * tl.div_rn(1.0, scale), float("nan")).to(tl.float8e4nv)


class Fp8Rows(NamedTuple):
    """Rows of fp8 that a kernel writes, its argument ``fp8``; None in place of it: rows of 16 bits.

    scales       fp32, written; if static [1, 1], read
    row, column  elements from a row's scales to the next row's, and from group to group
    group        columns under a scale; 0: static
    dtype        to which values are rounded before they are quantized
    both         these values are written in ``dtype`` too, to ``beside``, which is like the rows
    """

    scales: Any
    row: Any
    column: Any
    group: tl.constexpr
    dtype: tl.constexpr
    both: tl.constexpr
    beside: Any


NOTHING_BESIDE = tl.constexpr(False), tl.constexpr(0)  # fields both and beside


def empty_rows(like: torch.Tensor, tokens: int, width: int, format: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """New (rows [tokens, width], scales [tokens, format.count(width)]), on the device of ``like``.

    Both have room for a multiple of ROWS_OF_CUBLAS rows, which cuBLAS reads and whose results are dropped. Scales of a group of
    all tokens come one after the other, as cuBLAS reads them.
    """
    room = cdiv(tokens, ROWS_OF_CUBLAS) * ROWS_OF_CUBLAS
    rows = like.new_empty((room, width), dtype=E4M3)
    if format.kind == "static":
        return rows[:tokens], like.new_empty((tokens, 0), dtype=torch.float32)
    scales = like.new_empty((format.count(width), room), dtype=torch.float32).t()
    return rows[:tokens], scales[:tokens]


def fp8_of(rows: torch.Tensor, scales: torch.Tensor, format: RowFormat) -> Fp8:
    """The matrix of what a kernel wrote in ``format``."""
    return Fp8(rows, scales if format.static_scale is None else format.static_scale)


def written_of(
    rows: torch.Tensor, scales: torch.Tensor, format: RowFormat, beside: Sequence[torch.Tensor]
) -> Fp8 | RowsBeside:
    """``fp8_of``, with the rows in 16 bits if the format asks for them; ``beside``: these, or nothing."""
    made = fp8_of(rows, scales, format)
    return RowsBeside(made, *beside) if format.beside else made


def rows_argument(
    scales: torch.Tensor, format: RowFormat, dtype: torch.dtype, block: int, beside: torch.Tensor | None = None
) -> Fp8Rows:
    """Kernel argument ``fp8``. block: columns of a tile, all of a row with a scale for each token."""
    group = {"group": min(COLUMNS.value, block), "token": block, "static": 0}[format.kind]
    of_dtype = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]
    return Fp8Rows(
        scales if format.static_scale is None else format.static_scale,
        *(scales.stride() if scales.numel() > 0 else (0, 0)),
        tl.constexpr(group),
        tl.constexpr(of_dtype),
        *(NOTHING_BESIDE if beside is None else (tl.constexpr(True), beside)),
    )


@triton.jit
def by_given_scale(x, scale):
    """``x`` in e4m3 by one scale, saturated; NaN stays NaN."""
    x = x.to(tl.float32) * tl.div_rn(1.0, scale)
    x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    return x.to(tl.float8e4nv)


@triton.jit
def in_one_layout(x):
    """``x``, after a loop of one round, through which Triton does not move changes of layout.

    Scales and bytes are stored in two layouts. For the scales' one Triton would compute all that leads to x again, with a whole
    group in each thread: rows of 5,120 took 187 us in place of 43 (H200, 4,096 rows, benchmarks/fp8_rows.py).
    """
    result = tl.zeros(x.shape, x.dtype)
    for _ in range(0, tl.num_programs(2)):
        result = x
    return result


@triton.jit
def store_bytes(out, at, rows, mask, SUMMED: tl.constexpr):
    """Store fp8 ``rows`` at out + at.

    SUMMED  eight bytes a thread, as a thread holds eight elements of 16 bits. With sixteen Triton gives the rows another layout
            from their load on, and the sums before this store another order
    """
    to = out + at
    if SUMMED:
        to = tl.max_contiguous(to, (1, 8))
    tl.store(to, rows, mask=mask)


@triton.jit
def store_beside(x, at, mask, fp8):
    """Store ``x``, rounded to 16 bits, at fp8.beside + at, if ``fp8`` (``Fp8Rows``) says so."""
    if fp8.both:
        tl.store(fp8.beside + at, x, mask=mask)


@triton.jit
def store_rows(x, out, at, mask, fp8, token, exists, first, end, SUMMED: tl.constexpr = False):
    """Store x [ROWS, BLOCK] at out + at, or in fp8 as ``fp8`` (``Fp8Rows``) says.

    x       rounded to 16 bits; with fp8 0 beyond the ends of rows
    token   [ROWS], of its rows, which ``exist`` [ROWS]; first: column of x[:, 0], where a group begins
    end     of the row's columns, or of the columns that x holds
    SUMMED  x comes of a sum over its columns, whose order 16 bits and fp8 share (``store_bytes``)
    """
    if fp8 is None:
        tl.store(out + at, x, mask=mask)
    elif fp8.group == 0:
        store_beside(x, at, mask, fp8)
        store_bytes(out, at, by_given_scale(x, tl.load(fp8.scales)), mask, SUMMED)
    else:
        store_beside(x, at, mask, fp8)
        rows, scales = quantized(in_one_layout(x), fp8.group)
        group = first // fp8.group + tl.arange(0, x.shape[1] // fp8.group)
        to = fp8.scales + token.to(tl.int64)[:, None] * fp8.row + group[None, :] * fp8.column
        store_bytes(out, at, rows, mask, SUMMED)
        tl.store(to, scales, mask=exists[:, None] & (group * fp8.group < end)[None, :])


@triton.jit
def store_row(x, out, at, inside, fp8, row, WIDTH: tl.constexpr):
    """Store one row x [GROUPS, GROUP] at out + at, or in fp8 as ``fp8`` (``Fp8Rows``) says.

    x       rounded to 16 bits; with fp8 0 where it is not ``inside`` the row's WIDTH columns
    row     its number, int64
    """
    if fp8 is None:
        tl.store(out + at, x, mask=inside)
    elif fp8.group == 0:
        store_beside(x, at, inside, fp8)
        store_bytes(out, at, by_given_scale(x, tl.load(fp8.scales)), inside, True)
    else:
        store_beside(x, at, inside, fp8)
        size = tl.abs(x.to(tl.float32))
        largest = tl.max(tl.where(size < float("inf"), size, 0.0), axis=1, keep_dims=True)
        scales = fp8.scales + row * fp8.row
        if fp8.group == x.shape[1]:
            scale = scale_for(largest)
            group = tl.arange(0, x.shape[0])[:, None]
            tl.store(scales + group * fp8.column, scale, mask=group * fp8.group < WIDTH)
        else:
            scale = scale_for(tl.max(largest, axis=0, keep_dims=True))
            tl.store(scales + tl.zeros((1, 1), tl.int32), scale)
        store_bytes(out, at, by_scale(x.to(tl.float32), scale), inside, True)


@triton.jit
def store_groups(x, out, fp8, token, column, exists, width):
    """Store groups x [GROUPS, 128], rounded to 16 bits, as ``fp8`` says (``Fp8Rows``).

    Group i is out[token[i], column[i] : column[i] + 128] of rows of ``width``; token (int64), column, exists [GROUPS].
    """
    at = (token * width + column)[:, None] + tl.arange(0, 128)[None, :]
    if fp8.group == 0:
        tl.store(out + at, by_given_scale(x, tl.load(fp8.scales)), mask=exists[:, None])
    else:
        rows, scales = quantized(in_one_layout(x), 128)
        to = fp8.scales + token * fp8.row + column // 128 * fp8.column
        tl.store(out + at, rows, mask=exists[:, None])
        tl.store(to[:, None], scales, mask=exists[:, None])


@triton.jit(do_not_specialize=["T", "tokens"])
def quantize_rows_kernel(x, rows, fp8, T, tokens, WIDTH: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """rows [tokens, WIDTH] of x [T, WIDTH] in e4m3 as ``fp8`` says (``Fp8Rows``), zeros from row T on

    A program takes PIECES pieces of BLOCK columns, numbered by row and then along it.

    grid: (cdiv(tokens * cdiv(WIDTH, BLOCK), PIECES),)
    """
    ACROSS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    piece = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    token, first = piece // ACROSS, piece % ACROSS * BLOCK
    column = first[:, None] + tl.arange(0, BLOCK)[None, :]
    at = token.to(tl.int64)[:, None] * WIDTH + column
    exists = token < tokens
    wl.follow_previous_kernel()
    values = tl.load(x + at, mask=(token < T)[:, None] & (column < WIDTH), other=0.0)
    mask = exists[:, None] & (column < WIDTH)
    if fp8.group == 0:
        tl.store(rows + at, by_given_scale(values, tl.load(fp8.scales)), mask=mask)
    else:
        written, scale = quantized(values, BLOCK)
        tl.store(rows + at, written, mask=mask)
        to = fp8.scales + token.to(tl.int64) * fp8.row + first // BLOCK * fp8.column
        tl.store(to[:, None], scale, mask=exists[:, None])


def quantize_rows(
    x: torch.Tensor, tokens: int, caps: Capabilities, into: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows e4m3 [tokens, H], scales fp32) of ``x`` [T, H], zeros from row T on.

    into  where they go; None: new tensors. Its scales [tokens, 1] are of whole rows
    """
    H = x.shape[1]
    if into is None:
        into = x.new_empty((tokens, H), dtype=E4M3), x.new_empty((tokens, scales_of(H)), dtype=torch.float32)
    format = RowFormat("group" if into[1].shape[1] == scales_of(H) else "token")
    _quantize(x, *into, format, caps)
    return into


def quantized_rows(x: torch.Tensor, format: RowFormat, caps: Capabilities) -> Fp8:
    """``x`` [T, H] in e4m3, by a kernel for that alone: where the kernel that made x did not write it so."""
    return fp8_of(*quantized_parts(x, format, caps), format)


def quantized_parts(x: torch.Tensor, format: RowFormat, caps: Capabilities) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, scales as written) of ``quantized_rows``, for results of a torch op."""
    rows, scales = empty_rows(x, *x.shape, format)
    _quantize(x, rows, scales, format, caps)
    return rows, scales


def _quantize(x: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor, format: RowFormat, caps: Capabilities) -> None:
    (T, H), tokens = x.shape, rows.shape[0]
    block = next_power_of_2(H) if format.kind == "token" else COLUMNS.value
    pieces = max(1, GROUPS * COLUMNS.value // block)
    constants = {"WIDTH": H, "PIECES": pieces, "BLOCK": block, **launch_options(caps)}
    if block > 4096:
        constants["num_warps"] = 8
    launch = launch_on(x.device, quantize_rows_kernel, (H, block), lambda: constants)
    fp8 = rows_argument(scales, format, x.dtype, block)
    launch(cdiv(tokens * cdiv(H, block), pieces), x.contiguous(), rows, fp8, T, tokens)


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
    def row_format(self) -> RowFormat:
        """Format of the rows that a GEMM of this weight takes."""
        if self.input_scale is not None:
            return RowFormat("static", self.input_scale)
        return RowFormat("group" if self.is_grouped else "token")

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


class RowsBeside(NamedTuple):
    """The same rows in fp8 and in the 16 bits that they are rounded to first, for two weights."""

    fp8: Fp8
    rows: torch.Tensor


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
