"""Matrices in fp8 of a checkpoint that a rank has in 16 or 32 bits: byte * scale, rounded once.

Of gated delta nets and gated attention: their projections hold heads of several kinds, in another order than kernels take
them, and small gates of 16 bits, so that a block of weights under one scale would end up in several places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.errors import CheckpointError
from weft.parallel.four_bit import FourBitFormat
from weft.parallel.quantized import BLOCK, Format, Formats, are_scales, shape_of_scales
from weft.parallel.sharding import Shard, WholeTensor


def widened(shards: dict[str, Shard], formats: Formats | None) -> dict[str, Shard]:
    """Shards of ``NAME.weight`` here, with these formats in the checkpoint, and of their scales.

    What is quantized as it is read stays of 16 bits. CheckpointError for 4 bits, and for static scales of inputs.
    """
    made: dict[str, Shard] = {}
    for key, weight in shards.items():
        name = key.removesuffix(".weight")
        format = None if formats is None else formats((name,))
        if format is None or (stored := _name_of_scales(name, format)) is None:
            made[key] = weight
        else:
            made |= {key: BytesShard.of(weight), f"{name}.{stored}": FactorShard.of(weight, format)}
    return made


def _name_of_scales(name: str, format: Format) -> str | None:
    """Name of the tensor of scales, below the matrix's; None: the checkpoint has 16 bits."""
    in_four_bits = isinstance(format, FourBitFormat)
    if in_four_bits and not format.stored:
        return None
    if in_four_bits or format.static_inputs:
        what = "4 bits" if in_four_bits else "fp8 with a static scale of its inputs"
        raise CheckpointError(
            f"config.json: quantization_config has {name} in {what}, which weft does not run in gated attention and gated "
            f"delta nets; take a checkpoint with scales of blocks, channels or tensors, or of 16 bits"
        )
    return format.scale


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
