"""A schedule that is data: panels of different sizes, in the kernel that reads it."""

import pytest
import torch

import weft
from weft.kernels.gemm_tile import Sizes, SplitK
from weft.kernels.tile_schedule import as_argument, make_tiles, tile_table
from weft.ops.gemm.matmul import matmul_kernel
from weft.ops.gemm.tile import Tile


def covered(table, N, block_m, block_n):
    """How often the tiles of ``table`` cover each element, and whose it is."""
    rows = int(table[:, 2].max())
    times, owners = torch.zeros((rows, N), dtype=torch.int32), torch.full((rows, N), -1, dtype=torch.int32)
    for owner, first, limit, column in table.tolist():
        area = slice(first, min(first + block_m, limit)), slice(column * block_n, (column + 1) * block_n)
        times[area] += 1
        owners[area] = owner
    return times, owners


@pytest.mark.parametrize("panels", [(5, 0, 40, 17), (16, 16), (1,), (0, 3), (33, 1, 0)])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_tiles_cover_every_element_of_its_owner_once(panels, group):
    table = tile_table(panels, 33, block_m=16, block_n=16, group=group)
    times, owners = covered(table, 33, 16, 16)
    assert times.eq(1).all()
    expected = torch.arange(len(panels), dtype=torch.int32).repeat_interleave(torch.tensor(panels))
    assert owners.eq(expected[:, None]).all()


def test_the_kernel_computes_panels_of_different_sizes():
    panels, N, K = (5, 0, 40, 17), 33, 24
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, K, generator=generator) for rows in (sum(panels), N))

    def main(team):
        out = torch.full((len(a), N), torch.nan)
        tile = Tile(block_m=16, block_n=16, block_k=16)
        table = tile_table(panels, N, block_m=16, block_n=16, group=2)
        tiles = make_tiles(16 * len(table), 16, panels=1, block_m=16, block_n=16, group=1)
        split = SplitK(torch.zeros(1), torch.zeros(1, dtype=torch.int32))
        matmul_kernel[(3,)](
            a, b, out, split, len(a), Sizes(N, K, K, K), as_argument(tiles), table, tile.block(False), num_warps=4
        )
        return out

    torch.testing.assert_close(weft.simulate(main, 1)[0], (a.double() @ b.double().T).float())
