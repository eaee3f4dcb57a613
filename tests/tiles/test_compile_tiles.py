"""The kernels of weft.tiles with the bodies of the benchmarks, compiled for GPUs that are not here.

On sm_90: TMA and wgmma in the body, 16 bytes a thread to peers and from receive buffers, no local memory; the marks for checks
leave nothing behind.
"""

import re

import pytest
import torch
import triton.language as tl

from tests.benchmarks.providers.loaded import loaded
from tests.compiling import SHARED, a_view, compiled, stack_bytes
from tests.sampled import sampled
from weft.kernels.gemm_tile import SplitK
from weft.kernels.operands import descriptor_or_self
from weft.kernels.tile_schedule import as_argument, make_tiles
from weft.ops.gemm.tile import Tile
from weft.runtime.team.channel import ChannelView
from weft.tiles.exchange import Inbox, exchange_kernel
from weft.tiles.gather import Rows, gather_kernel
from weft.tiles.tile import Geometry, table_owner, table_rows

on_tiles = loaded("tiles")
X, WORDS = torch.zeros((512, 512), dtype=torch.bfloat16), torch.zeros((4, 4), dtype=torch.int32)
FLOATS = torch.zeros(16)
WIDE = Tile(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=4)
SMALL = Tile(block_m=64, block_n=64, block_k=32)


def built(kernel, arch, tile, described=True, **switches):
    a, b = (descriptor_or_self(X, rows, tile.block_k, described) for rows in (tile.block_m, tile.block_n))
    operands = on_tiles.GemmOperands(512, 512, 4096, 512, tile.block(described))
    tiles = as_argument(make_tiles(2048, 4096, panels=4, block_m=tile.block_m, block_n=tile.block_n, group=8, chunks=4))
    channel, geometry = ChannelView(WORDS, WORDS, tl.constexpr(8)), Geometry(2048, 4096, 512, 64, 0, 64)
    common = {"OWNER_OF": None, "ROWS_OF": None, "ROWS": tile.block_m, "COLUMNS": tile.block_n}
    options = common | tile.options(described, arch) | switches
    if kernel is gather_kernel:
        rows = Rows(X, X, WORDS)
        return compiled(
            kernel, a, a, b, None, rows, X, operands, WORDS, channel, geometry, tiles, a_view(), arch=arch,
            BODY=on_tiles.gathered_tile, **{"PLACED": True, "STORES": False, "DESCRIBED": described, **options},
        )  # fmt: skip
    cuts = 2 if tile is WIDE else 0
    return compiled(
        kernel, b, a, X, operands, WORDS, Inbox(X, WORDS), SplitK(FLOATS, WORDS), channel, geometry, tiles, a_view(), arch=arch,
        BODY=on_tiles.partial_tile, MERGE=None, STORE=None, PART=tile.block_m * tile.block_n, CUTS=cuts,
        **{"SPLIT": 1, **options},
    )  # fmt: skip


@pytest.mark.parametrize("kernel", [gather_kernel, exchange_kernel], ids=lambda kernel: kernel.__name__)
def test_a_wide_gemm_tile_on_sm_90(kernel, tmp_path):
    made = built(kernel, "sm_90", WIDE)
    ptx = made.asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    stores = re.findall(r"st\.global\S* *\[", ptx)
    # Bookkeeping stores single words; tiles leave 16 bytes a thread.
    assert sum("v4" in store for store in stores) >= 16 and not any(re.search(r"\.b16|\.v2", store) for store in stores)
    assert stack_bytes(made, tmp_path) == 0
    if kernel is exchange_kernel:
        received = re.findall(r"ld\.global\S*\.v4", ptx)
        assert len(received) >= 16 and not re.search(r"ld\.global\S*\.b16 ", ptx)


@pytest.mark.parametrize(
    ("kernel", "arch"),
    sampled(
        [(kernel, arch) for kernel in (gather_kernel, exchange_kernel) for arch in ("sm_80", "sm_100", "gfx942")],
        lambda kernel, arch: (kernel, arch) in ((gather_kernel, "gfx942"), (exchange_kernel, "sm_80")),
    ),
)
def test_other_targets(kernel, arch):
    assert built(kernel, arch, SMALL, described=arch == "sm_100").metadata.shared <= SHARED[arch]


@pytest.mark.parametrize("tile", [pytest.param(WIDE, marks=pytest.mark.sweep), SMALL], ids=["wide", "small"])
def test_a_split_tile_on_sm_90(tile, tmp_path):
    made = built(exchange_kernel, "sm_90", tile, SPLIT=4)
    assert "atom.global.gpu.acq_rel.add" in made.asm["ptx"] and "wgmma.mma_async" in made.asm["ptx"]
    assert stack_bytes(made, tmp_path) == 0


def test_a_gather_by_stores_and_a_table():
    ptx = built(gather_kernel, "sm_90", SMALL, STORES=True, OWNER_OF=table_owner, ROWS_OF=table_rows).asm["ptx"]
    assert "st.release.sys" in ptx and "atom.global.sys.acq_rel.add" in ptx
