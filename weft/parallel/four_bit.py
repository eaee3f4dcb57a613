"""Matrices of a layer in 4 bits (weft.kernels.four_bit): how a rank's part is cut out, and filled.

Groups of columns under one scale may be cut by a rank's edge. This rank's matrix then has scales of fewer columns, some
repeated, so that number * scale is the same on all numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.kernels.four_bit import (
    BIAS,
    BLOCK,
    INT_GROUP,
    MIDDLE,
    MX_GROUP,
    FourBit,
    in_words,
    int4,
    mxfp4,
    narrow,
    packed,
    packed_e2m1,
    pairs,
    small,
    unpacked,
    unpacked_e2m1,
)
from weft.parallel.sharding import Shard, WholeTensor
from weft.runtime.arithmetic import cdiv

# Numbers of a word of 32 bits.
OF_WORD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBitFormat:
    """Form of a matrix in 4 bits.

    kind       "mxfp4" or "int4"
    group      columns of a scale; 0: all of a row
    symmetric  int4 without zero points
    stored     a checkpoint has it so, under the names of compressed-tensors; else its weights are of 16 or 32 bits, and are
               made so as they are read
    """

    kind: Literal["mxfp4", "int4"]
    group: int = MX_GROUP
    symmetric: bool = True
    stored: bool = False
    # Inputs stay in 16 bits.
    static_inputs = False

    @property
    def name(self) -> str:
        return self.kind

    @property
    def bits(self) -> float:
        """Bits of a weight with its share of a scale."""
        return 4 + (8 if self.kind == "mxfp4" else 32) / self.group if self.group else 4

    def made_of(self, weight: Tensor) -> FourBit:
        """``weight`` in this format, with whole groups."""
        return mxfp4(weight) if self.kind == "mxfp4" else int4(weight, self.group or None, self.symmetric)

    def data_shape(self, *shape: int) -> tuple[int, ...]:
        """Shape of the bytes of a matrix."""
        return *shape[:-1], cdiv(shape[-1], BLOCK) * BLOCK // 2


MADE = {"mxfp4": FourBitFormat(kind="mxfp4"), "int4": FourBitFormat(kind="int4", group=INT_GROUP)}
"""Formats made at load, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Groups of one rank's matrix [N, columns]: of ``group`` columns, the format's or a part."""

    format: FourBitFormat
    columns: int
    group: int

    @classmethod
    def of(cls, format: FourBitFormat, columns: int, edges: Sequence[int]) -> Cut:
        """Groups that end at these columns, or at multiples. ValueError where an edge halves a byte."""
        group = gcd(format.group, *edges) if format.group else columns
        if group < 2 and columns > 1:
            raise ValueError(
                f"a rank's {columns} columns of a weight in {format.kind} end within a byte; use fewer ranks"
            )
        return cls(format=format, columns=columns, group=group)

    @property
    def count(self) -> int:
        return cdiv(self.columns, self.group)

    def groups(self, start: int) -> Tensor:
        """Groups of the whole matrix in which the groups of columns from ``start`` on lie."""
        whole = self.format.group
        return (start + torch.arange(self.count) * self.group) // whole if whole else torch.zeros(1, dtype=torch.long)


class FourBitScales(nn.Module):
    """Scales of a matrix beside its bytes, and zero points if the format has them."""

    def __init__(self, cut: Cut, *shape: int, device: torch.device) -> None:
        """shape  of the matrix without its columns: [N], or of experts [E, N]"""
        super().__init__()
        self.cut = cut
        mx = cut.format.kind == "mxfp4"

        def empty(dtype: torch.dtype) -> nn.Parameter:
            zeros = torch.zeros((*shape, cut.count), dtype=dtype, device=device)
            return nn.Parameter(in_words(zeros) if mx else zeros, requires_grad=False)

        self.scales = empty(torch.uint8 if mx else torch.float32)
        self.zeros = None if mx or cut.format.symmetric else empty(torch.uint8)
        self._are_small: bool | None = None

    def _forget(self) -> None:
        """Before scales are written: take them as they come."""
        self._are_small = None
        if self.scales.is_floating_point():
            self.scales.data = self.scales.data.float()

    def _load_from_state_dict(self, *given: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*given)

    def matrix(self, weight: Tensor) -> FourBit:
        """The matrix, its scales as kernels read them fastest; the first call waits for the device."""
        if self._are_small is None and self.scales.device.type != "meta":
            mx = self.cut.format.kind == "mxfp4"
            self._are_small = mx and small(self.scales.data).dtype == torch.int8
            if not mx:
                self.scales.data = narrow(self.scales.data)
        scales = self.scales.view(torch.int8) if self._are_small else self.scales
        return FourBit(weight, scales, self.cut.columns, self.zeros)

    def shards(self, name: str, weight: Shard, first: int = 0, expert: int | None = None) -> dict[str, Shard]:
        """Shards of one checkpoint matrix and its scales; arguments as of ``Fp8Scales.shards``."""

        def rows_of(of_all: nn.Parameter | None) -> Tensor | None:
            rows = slice(first, first + len(weight.target))
            return None if of_all is None else (of_all.data if expert is None else of_all.data[expert])[rows]

        self._forget()
        cut, (N, K), scales, zeros = self.cut, weight.shape, rows_of(self.scales), rows_of(self.zeros)
        fields = {"dim": weight.dim, "start": weight.start, "cut": cut}
        if not cut.format.stored:
            made = MadeShard(target=weight.target, shape=weight.shape, scales=scales, zeros=zeros, **fields)
            return {f"{name}.weight": made}
        of_number = 2 if cut.format.kind == "mxfp4" else OF_WORD
        groups = cdiv(K, cut.format.group) if cut.format.group else 1
        numbers = NumberShard(target=weight.target, shape=(N, cdiv(K, of_number)), of_number=of_number, **fields)
        of_groups = GroupShard(target=scales, shape=(N, groups), **fields)
        shards: dict[str, Shard] = {f"{name}.weight_packed": numbers, f"{name}.weight_scale": of_groups}
        if zeros is not None:
            shape, ragged = (cdiv(N, OF_WORD), groups), N % OF_WORD != 0
            zero_points = ZeroShard(target=zeros, shape=shape, ends_within_a_row=ragged, **fields)
            shards[f"{name}.weight_zero_point"] = zero_points
        return shards

    def input_shards(self, name: str) -> dict[str, Shard]:
        """None: inputs are not quantized."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class CutShard(Shard):
    """A part of a matrix by its rows or its columns. dim, start: of the matrix, whatever its tensor has."""

    cut: Cut

    def fill_dummy(self, generator: torch.Generator) -> None:
        """Fill with random numbers, for matrices about N(0, 0.02)."""
        raise NotImplementedError

    @property
    def part(self) -> tuple[slice, int]:
        """Rows of the whole matrix, and the first column."""
        if self.dim == 0:
            return slice(self.start, self.start + len(self.target)), 0
        return slice(None), self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberShard(CutShard):
    """Numbers of this rank's rows and columns. of_number: in one byte or word of the checkpoint."""

    of_number: int

    @property
    def stored(self) -> torch.dtype | None:
        return torch.uint8 if self.of_number == 2 else torch.int32

    def copy_from(self, whole: WholeTensor) -> None:
        rows, column = self.part
        columns, first = self.cut.columns, column // self.of_number
        part = whole[rows, first : cdiv(column + columns, self.of_number)].contiguous().to(self.target.device)
        begin = column - first * self.of_number
        pack = packed_e2m1 if self.cut.format.kind == "mxfp4" else packed
        self.target.copy_(pack(pairs(part.view(torch.uint8))[:, begin : begin + columns]))

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.target.random_(0, 256, generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShard(CutShard):
    """Scales of this rank's rows and columns."""

    def fill_dummy(self, generator: torch.Generator) -> None:
        fill_dummy_scales(self.target)

    @property
    def stored(self) -> torch.dtype | None:
        return torch.uint8 if self.target.dtype == torch.uint8 else None

    def fits(self, shape: tuple[int, ...]) -> bool:
        return shape == self.shape or (self.shape[1] == 1 and shape == self.shape[:1])

    def copy_from(self, whole: WholeTensor) -> None:
        rows, column = self.part
        self.target.copy_(whole[rows].reshape(len(self.target), -1)[:, self.cut.groups(column)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroShard(CutShard):
    """Zero points of this rank's rows and columns, of words that hold eight rows."""

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.target.fill_(MIDDLE)

    @property
    def stored(self) -> torch.dtype | None:
        return torch.int32

    def copy_from(self, whole: WholeTensor) -> None:
        rows, column = self.part
        shifts = 4 * torch.arange(OF_WORD, dtype=torch.int32)[None, :, None]
        zeros = (whole[...][:, None] >> shifts & 15).flatten(0, 1)
        self.target.copy_(zeros[rows][: len(self.target), self.cut.groups(column)])


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeShard(CutShard):
    """This rank's part of a wider weight, put in 4 bits as it is read.

    Whole groups are read, so that all numbers of ranks get the same numbers.
    """

    scales: Tensor
    zeros: Tensor | None

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.target.random_(0, 256, generator=generator)
        fill_dummy_scales(self.scales)
        if self.zeros is not None:
            self.zeros.fill_(MIDDLE)

    @property
    def stored(self) -> torch.dtype | None:
        return None

    def copy_from(self, whole: WholeTensor) -> None:
        (rows, column), columns, group = self.part, self.cut.columns, self.cut.format.group
        K = self.shape[1]
        first = column // group * group if group else 0
        end = min(cdiv(column + columns, group) * group, K) if group else K
        made = self.cut.format.made_of(whole[rows, first:end].to(self.target.device))
        begin = column - first
        mx = made.is_mxfp4
        unpack, pack = (unpacked_e2m1, packed_e2m1) if mx else (unpacked, packed)
        self.target.copy_(pack(unpack(made.data, end - first)[:, begin : begin + columns]))
        groups = self.cut.groups(column) - (first // group if group else 0)
        scales = made.scales.view(torch.uint8) if mx else made.scales
        self.scales.copy_(scales[:, groups.to(scales.device)])
        if self.zeros is not None:
            self.zeros.copy_(made.zeros[:, groups.to(made.scales.device)])


def fill_dummy_scales(scales: Tensor) -> None:
    """Fill with the scale that gives random numbers of 4 bits a root mean square of some 0.02."""
    # 2 ** -7 times e2m1 of 2.9; int4 less its zero has 4.6, times a number that bf16 has.
    scales.fill_(BIAS - 7 if scales.dtype == torch.uint8 else 1.125 * 2.0**-8)
