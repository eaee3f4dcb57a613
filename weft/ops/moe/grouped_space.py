"""Search space of the grouped GEMMs' tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from weft.ops.gemm.space import STAGES_BYTES
from weft.ops.moe.grouped import GroupedCall, GroupedTiles

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

# block_n, block_k, num_warps, per_sm for 16-bit floats: bound by reading weights up to 32 pairs a tile, then by tensor cores.
FEW_PAIRS = (
    (64, 64, 4, 4), (64, 128, 4, 2), (64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 2), (128, 64, 4, 3), (128, 128, 4, 1),
    (128, 128, 4, 2), (128, 128, 4, 3), (128, 64, 8, 2),
)  # fmt: skip
QUICK_FEW = ((64, 128, 4, 3), (128, 128, 4, 2), (128, 128, 4, 3))
MANY_PAIRS = ((256, 64, 8, 1), (128, 64, 4, 2), (128, 64, 8, 1), (128, 128, 8, 1), (256, 32, 8, 1), (64, 64, 4, 3))
QUICK_MANY = ((256, 64, 8, 1), (128, 64, 4, 2))


def tiles(base: GroupedTiles, call: GroupedCall, caps: Capabilities, quick: bool) -> Iterator[GroupedTiles]:
    """Tiles far apart, besides the default ``base``."""
    if not caps.arch.startswith("sm_"):
        return  # the default and its neighbours
    if call.dtype == torch.float32:
        yield from (replace(base, block_n=n, num_stages=stages) for n in (32, 64, 128) for stages in (2, 3))
        return
    few = call.block <= 32
    sizes = (QUICK_FEW if few else QUICK_MANY) if quick else FEW_PAIRS if few else MANY_PAIRS
    for block_n, block_k, num_warps, per_sm in sizes:
        deepest = STAGES_BYTES // per_sm // ((call.block + block_n) * block_k * call.dtype.itemsize)
        for stages in sorted({min(3, deepest), min(5, deepest)} - {0, 1}):
            yield replace(
                base,
                block_n=block_n,
                block_k=block_k,
                transposed=few,
                num_warps=num_warps,
                per_sm=per_sm,
                num_stages=stages,
            )
