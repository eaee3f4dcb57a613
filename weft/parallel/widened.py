"""Formats of projections of gated delta nets and gated attention: in fp8, or widened to 16 bits.

Small gates of heads stay in the model's dtype: in a checkpoint with fp8 there, byte * scale, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.errors import CheckpointError
from weft.parallel.four_bit import FourBitFormat
from weft.parallel.quantized import BLOCK, Format, Formats, are_scales, shape_of_scales
from weft.parallel.sharding import Shard, WholeTensor


def fp8_formats(formats: Formats | None) -> Formats | None:
    """The same formats without 4 bits that would be made as a matrix is read.

    CheckpointError for 4 bits of a checkpoint, and for static scales of inputs.
    """

    def of(names: Sequence[str]) -> Format | None:
        format = formats(names)
        in_four_bits = isinstance(format, FourBitFormat)
        if format is None or (in_four_bits and not format.stored):
            return None
        if in_four_bits or format.static_inputs:
            what = "4 bits" if in_four_bits else "fp8 with a static scale of its inputs"
            raise CheckpointError(
                f"config.json: quantization_config has {names[0]} in {what}, which weft does not run in gated attention and "
                f"gated delta nets; take a checkpoint with scales of blocks, channels or tensors, or of 16 bits"
            )
        return format

    return None if formats is None else of


def widened(shards: dict[str, Shard], formats: Formats | None) -> dict[str, Shard]:
    """Shards of ``NAME.weight`` in 16 or 32 bits, and of the scales that a checkpoint has beside them.

    What is quantized as it is read stays of 16 bits. CheckpointError as of ``fp8_formats``.
    """
    made: dict[str, Shard] = {}
    of = fp8_formats(formats)
    for key, weight in shards.items():
        name = key.removesuffix(".weight")
        format = None if of is None else of((name,))
        if format is None or format.scale is None:
            made[key] = weight
        else:
            made |= {key: BytesShard.of(weight), f"{name}.{format.scale}": FactorShard.of(weight, format)}
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesShard(Shard):
    """Bytes of a weight as numbers of the target's dtype; its ``FactorShard`` comes next."""

    weight: Shard

    @classmethod
    def of(cls, weight: Shard) -> BytesShard:
        return cls(target=weight.target, shape=weight.shape, weight=weight)

    @property
    def stored(self) -> torch.dtype | None:
        return torch.float8_e4m3fn

    def copy_from(self, whole: WholeTensor) -> None:
        self.weight.copy_from(whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorShard(Shard):
    """Scales of a weight, which multiply its bytes in the target.

    rows, columns  of the scales, for each row and column of the target
    """

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, weight: Shard, format: Format) -> FactorShard:
        N, K = weight.shape
        # Rows of the whole matrix, as the weight's shard takes them.
        numbers = torch.empty(len(weight.target), 1, dtype=torch.int64, device=weight.target.device)
        replace(weight, target=numbers, shape=(N, 1)).copy_from(torch.arange(N)[:, None])
        rows, columns = numbers[:, 0].cpu(), torch.arange(K)
        rows, columns = {
            "block": (rows // BLOCK, columns // BLOCK),
            "channel": (rows, columns * 0),
            "tensor": (rows * 0, columns * 0),
        }[format.scheme]
        shape = shape_of_scales(format.scheme, weight.shape)
        return cls(target=weight.target, shape=shape, rows=rows, columns=columns)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return are_scales(shape, self.shape)

    def copy_from(self, whole: WholeTensor) -> None:
        scales = whole[...].reshape(self.shape).float()[self.rows][:, self.columns]
        self.target.copy_(self.target.float() * scales.to(self.target.device))
