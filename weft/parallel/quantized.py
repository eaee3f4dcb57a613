"""Matrices of a layer in fp8: how their scales are cut with them, and filled; operands of any format.

A checkpoint's block of 128 x 128 weights under one scale may be cut by a rank's edge, or by the seam of two weights that one
GEMM takes. This rank's matrix then has a finer grid of scales, some repeated, so that byte * scale is the same on all numbers
of ranks. All blocks of a matrix have one size, powers of two that divide 128 (``weft.kernels.fp8.Fp8``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.four_bit import FourBit
from weft.kernels.four_bit_tile import dequantized
from weft.kernels.fp8 import COLUMNS, Fp8, RowFormat, by_static_scale, by_torch, quantized_weight
from weft.ops.gemm.fp8_operands import LEAST_COLUMNS, columns_of
from weft.ops.local import capabilities_of
from weft.ops.registration import HALVES
from weft.parallel.four_bit import FourBitFormat
from weft.parallel.sharding import Shard, WholeTensor
from weft.parallel.tensors import DeltaWeights, Matrix, MoEWeights
from weft.runtime.arithmetic import cdiv

BLOCK = COLUMNS.value
# Rows of a large weight that are in fp32 while they are quantized; whole blocks.
AT_ONCE = 64 * BLOCK
Scheme = Literal["block", "channel", "tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Format:
    """Form of a matrix in fp8, and the names of its tensors in a checkpoint below the matrix's.

    scheme         a scale for each "block" of 128 x 128, each "channel" (row), or for the whole "tensor"
    scale          name of the scales' tensor; None: weights are of 16 bits there, and quantized as they are read
    static_inputs  activations have one scale, ``inputs`` of the checkpoint; else they are scaled as they are quantized, in
                   groups of 128 columns with blocks, by tokens without
    """

    scheme: Scheme
    scale: str | None = None
    static_inputs: bool = False
    inputs: str = "input_scale"
    # As of FourBitFormat.
    name, bits = "fp8", 8


Format = Fp8Format | FourBitFormat
Formats = Callable[[Sequence[str]], Format | None]
"""Names of matrices that one GEMM takes, below their layer's → their format; None: they are of 16 bits."""


def formats_under(prefix: str, formats: Formats | None) -> Formats | None:
    """Formats of the part of a layer whose names begin with ``prefix``."""
    return None if formats is None else lambda names: formats([f"{prefix}.{name}" for name in names])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Grid:
    """Format of one rank's matrix, and the rows and columns under a scale; without blocks 1 and all."""

    format: Fp8Format
    rows: int
    columns: int

    @classmethod
    def of(cls, format: Fp8Format, in_features: int, row_edges: Sequence[int], column_edges: Sequence[int]) -> Fp8Grid:
        """Grid that is cut at these rows and columns, or at multiples."""
        if format.scheme != "block":
            return cls(format=format, rows=1, columns=in_features)
        return cls(format=format, rows=gcd(BLOCK, *row_edges), columns=gcd(BLOCK, *column_edges))

    def counts(self, rows: int, columns: int) -> tuple[int, int]:
        """Number of scales of a matrix along its rows and columns."""
        return cdiv(rows, self.rows), cdiv(columns, self.columns)


def block_moved_whole(order: Tensor) -> int:
    """Rows of the largest aligned block, up to BLOCK, that stays together in ``order``."""
    rows = gcd(BLOCK, len(order))
    while not torch.equal(order, (order[::rows, None] // rows * rows + torch.arange(rows)).flatten()):
        rows //= 2
    return rows


class Fp8Scales(nn.Module):
    """Scales of a matrix beside its weight, fp32, and ``input_scale`` [1, 1] if inputs have one."""

    def __init__(self, grid: Fp8Grid, *shape: int, device: torch.device) -> None:
        """shape  of the weight: [N, K], or of experts [E, N, K]"""
        super().__init__()
        self.grid = grid

        def empty(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(sizes, dtype=torch.float32, device=device), requires_grad=False)

        self.scales = empty(*shape[:-2], *grid.counts(*shape[-2:]))
        self.input_scale = empty(1, 1) if grid.format.static_inputs else None

    def matrix(self, weight: Tensor) -> Fp8:
        return Fp8(weight, self.scales, self.input_scale)

    def shards(self, name: str, weight: Shard, first: int = 0, expert: int | None = None) -> dict[str, Shard]:
        """Shards of one checkpoint matrix and its scales.

        weight  shard of its weight
        first   row of the matrix here from which it lies
        expert  of the matrices here that one
        """
        rows, columns = weight.target.shape
        scales = self.scales.data if expert is None else self.scales.data[expert]
        count = self.grid.counts(rows, columns)[0]
        begin = first // self.grid.rows
        scales, stored = scales[begin : begin + count], self.grid.format.scale
        if stored is None:
            return {f"{name}.weight": QuantizedShard.of(weight, self.grid, scales)}
        of_scales = ScaleShard.of(weight, self.grid, scales)
        return {f"{name}.weight": weight, f"{name}.{stored}": of_scales} | self.input_shards(name)

    def input_shards(self, name: str) -> dict[str, Shard]:
        """Shard of the inputs' scale of one checkpoint matrix, if they have one."""
        if self.input_scale is None:
            return {}
        return {
            f"{name}.{self.grid.format.inputs}": LargestShard(
                target=self.input_scale.data, shape=(1, 1), replicated=True
            )
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleShard(Shard):
    """This rank's scales of a matrix, for the blocks of its rows and columns, which may repeat."""

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, weight: Shard, grid: Fp8Grid, scales: Tensor) -> ScaleShard:
        """Scales of the part of a matrix that ``weight`` is."""
        scheme = grid.format.scheme
        shape, (rows, columns) = shape_of_scales(scheme, weight.shape), blocks_of(weight, grid, scales)
        ragged = scheme == "block" and weight.shape[0] % BLOCK != 0
        return cls(target=scales, shape=shape, rows=rows, columns=columns, ends_within_a_row=ragged)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return are_scales(shape, self.shape)

    def copy_from(self, whole: WholeTensor) -> None:
        self.target.copy_(whole[...].reshape(self.shape)[self.rows][:, self.columns])
        self.reorder()


def shape_of_scales(scheme: Scheme, weight: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the scales of a whole weight [N, K] in a checkpoint."""
    N, K = weight
    return {"block": (cdiv(N, BLOCK), cdiv(K, BLOCK)), "channel": (N, 1), "tensor": (1, 1)}[scheme]


def are_scales(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """True for scales of a `wanted` shape; channels may be a vector, and a single scale a scalar."""
    return shape == wanted or (wanted[1] == 1 and shape == wanted[:1]) or (shape == () and wanted == (1, 1))


def blocks_of(weight: Shard, grid: Fp8Grid, scales: Tensor) -> tuple[Tensor, Tensor]:
    """(row, column) of the whole matrix's scales for each row and column of ``scales``."""
    if grid.format.scheme == "tensor":
        return torch.zeros(len(scales), dtype=torch.long), torch.zeros(1, dtype=torch.long)
    starts = [weight.start if weight.dim == dim else 0 for dim in (0, 1)]
    if grid.format.scheme == "channel":
        return starts[0] + torch.arange(len(scales)), torch.zeros(1, dtype=torch.long)
    rows, columns = (torch.arange(count) for count in scales.shape)
    return (starts[0] + rows * grid.rows) // BLOCK, (starts[1] + columns * grid.columns) // BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestShard(Shard):
    """One scale of the inputs of several matrices: the largest in the checkpoint."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        return all(size == 1 for size in shape)

    def copy_from(self, whole: WholeTensor) -> None:
        self.target.copy_(torch.maximum(self.target, whole[...].reshape(1, 1).to(self.target)))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedShard(Shard):
    """This rank's part of a weight of 16 or 32 bits, quantized as it is read: bytes, and ``scales``.

    Whole blocks or rows are read, so that all numbers of ranks get the same bytes.
    """

    grid: Fp8Grid
    scales: Tensor

    @classmethod
    def of(cls, weight: Shard, grid: Fp8Grid, scales: Tensor) -> QuantizedShard:
        fields = {name: getattr(weight, name) for name in ("target", "shape", "dim", "start", "replicated")}
        return cls(**fields, grid=grid, scales=scales)

    @property
    def stored(self) -> torch.dtype | None:
        return None

    def copy_from(self, whole: WholeTensor) -> None:
        scheme = self.grid.format.scheme
        sizes, begins, ends = self.target.shape, [0, 0], list(self.shape)
        if scheme == "block" or self.dim == 0:
            step = BLOCK if scheme == "block" else 1
            begins[self.dim] = self.start // step * step
            ends[self.dim] = min(cdiv(self.start + sizes[self.dim], step) * step, self.shape[self.dim])
        part = whole[begins[0] : ends[0], begins[1] : ends[1]].to(self.target.device)
        quantized = quantized_weight(part, scheme)
        offsets = [self.start - begins[dim] if dim == self.dim else 0 for dim in (0, 1)]
        self.target.copy_(quantized.data[offsets[0] : offsets[0] + sizes[0], offsets[1] : offsets[1] + sizes[1]])
        rows, columns = blocks_of(self, self.grid, self.scales)
        if scheme == "block":
            rows, columns = rows - begins[0] // BLOCK, columns - begins[1] // BLOCK
        else:
            rows = rows - begins[0]
        self.scales.copy_(quantized.scales[rows.to(part.device)][:, columns.to(part.device)])
        self.reorder()
        if self.order is not None:
            self.scales.copy_(self.scales[self.order[:: self.grid.rows] // self.grid.rows])


def in_blocks(weight: Tensor) -> Fp8:
    """``weight`` [N, K] in fp8 with a scale for each block of 128 x 128, AT_ONCE rows at a time."""
    parts = [quantized_weight(rows, "block") for rows in weight.split(AT_ONCE)]
    data = torch.cat([part.data.view(torch.uint8) for part in parts]).view(parts[0].data.dtype)
    return Fp8(data, torch.cat([part.scales for part in parts]))


def rounded(x: Tensor, w: Fp8) -> Tensor:
    """``x`` [..., K] as the format of ``w`` rounds it: to fp8 and back, in its dtype."""
    rows = x.flatten(0, -2)
    if w.input_scale is not None:
        quantized = by_static_scale(rows, w.input_scale)
    else:
        quantized = Fp8(*by_torch(rows, BLOCK if w.is_grouped else x.shape[-1]))
    return quantized.dequantized(x.dtype).view(x.shape)


def operands(x: Any, w: Matrix) -> tuple[Any, Tensor]:
    """(x, w) for an op that takes no such weight: ``x`` rounded as the format says, ``w`` in its dtype."""
    if isinstance(w, FourBit):
        return x, widened(w, x.scaled.dtype if isinstance(x, DeferredNorm) else x.dtype)
    if not isinstance(w, Fp8):
        return x, w
    if isinstance(x, DeferredNorm):
        # Scales of rows or groups follow any factor of the row.
        return replace(x, scaled=rounded(x.scaled, w)), w.dequantized(x.scaled.dtype)
    return rounded(x, w), w.dequantized(x.dtype)


def widened(w: FourBit, dtype: torch.dtype) -> Tensor:
    """``w`` in ``dtype``: of 16 bits by a kernel."""
    if dtype not in HALVES or w.device.type == "cpu":
        return w.dequantized(dtype)
    return dequantized(w, dtype, capabilities_of(w.device))


def overlapped_operands(x: Any, w: Matrix) -> tuple[Any, Tensor | Fp8]:
    """(x, w) for a GEMM op with a collective, which takes no weight in 4 bits: many rows."""
    return operands(x, w) if isinstance(w, FourBit) else gemm_operands(x, w)


def gemm_operands(x: Any, w: Matrix) -> tuple[Any, Matrix]:
    """(x, w) for a GEMM op, which takes any weight with rows of 16 bits; as ``operands`` for other rows."""
    dtype = x.scaled.dtype if isinstance(x, DeferredNorm) else x.dtype
    takes = dtype in HALVES and not (isinstance(w, Fp8) and w.is_grouped and columns_of(w) < LEAST_COLUMNS)
    return (x, w) if takes else operands(x, w)


def expert_operands(x: Any, w: Matrix) -> tuple[Any, Tensor | Fp8]:
    """``overlapped_operands`` for a grouped GEMM, which reads rows of fp8 on 16 bytes."""
    return operands(x, w) if isinstance(w, Fp8) and w.shape[-1] % 16 else overlapped_operands(x, w)


def grouped_operands(x: Any, w: Matrix) -> tuple[Any, Matrix]:
    """``expert_operands`` for a grouped GEMM without a collective, which takes weights in 4 bits too."""
    return gemm_operands(x, w) if isinstance(w, FourBit) else expert_operands(x, w)


def rows_between(gate_up: Matrix, down: Matrix, dtype: torch.dtype) -> RowFormat | None:
    """Form in which experts' first GEMM writes rows for the second; None: in 16 bits.

    Several programs compute a row, which has a scale for each of its groups then.
    """
    if dtype != torch.bfloat16 or not (isinstance(gate_up, Fp8) and isinstance(down, Fp8)) or down.shape[-1] % 16:
        return None
    if down.is_grouped and columns_of(down) < LEAST_COLUMNS:
        return None
    # A row of one group has one scale.
    alone = down.input_scale is None and down.shape[-1] <= BLOCK
    format = RowFormat("group") if alone else down.row_format
    return None if format.kind == "token" else format


def rows_for(w: Matrix | MoEWeights | DeltaWeights | None, dtype: torch.dtype) -> RowFormat | None:
    """Format in which the kernel before a GEMM of ``w`` writes its rows; None: in ``dtype``.

    None for fp16 rows too, since the GEMM of fp8 rows returns bf16, and for weights that ``gemm_operands`` widens. Before
    experts and a delta net the kernel writes rows in ``dtype`` beside fp8, for the router and for ``rates``.
    """
    if isinstance(w, (MoEWeights, DeltaWeights)):
        matrix = w.qkv if isinstance(w, DeltaWeights) else w.gate_up
        format = rows_for(matrix, dtype) if matrix.shape[-1] % 16 == 0 else None
        return None if format is None else format._replace(beside=True)
    if not isinstance(w, Fp8) or dtype != torch.bfloat16 or (w.is_grouped and columns_of(w) < LEAST_COLUMNS):
        return None
    return w.row_format


def padded(rows: Tensor | Fp8, padding: int) -> Tensor | Fp8:
    """``rows`` and ``padding`` rows of zeros."""
    if not isinstance(rows, Fp8):
        return F.pad(rows, (0, 0, 0, padding)) if padding else rows
    if padding == 0:
        return rows
    scales = rows.scales if rows.scales.numel() == 1 else F.pad(rows.scales, (0, 0, 0, padding), value=1.0)
    return Fp8(F.pad(rows.data.view(torch.uint8), (0, 0, 0, padding)).view(rows.data.dtype), scales)


def linear(x: Tensor, w: Matrix) -> Tensor:
    """x @ w.T by torch."""
    return F.linear(*operands(x, w))


def expert_of(w: Matrix, expert: int) -> Matrix:
    """The matrix of one expert."""
    if isinstance(w, FourBit):
        zeros = None if w.zeros is None else w.zeros[expert]
        return FourBit(w.data[expert], w.scales[expert], w.columns, zeros)
    return Fp8(w.data[expert], w.scales[expert], w.input_scale) if isinstance(w, Fp8) else w[expert]
