"""gather: answers by transport, map and dtype, calls in a row, slow ranks, refusals."""

import pytest
import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import weft
from tests.ops.checking import assert_close
from tests.sampled import sampled
from tests.tiles.bodies import (
    Matrices,
    Reversed,
    described_tile,
    gemm_tile,
    partial_tile,
    reversed_owner,
    reversed_rows,
)
from weft import tiles
from weft.errors import ArgumentMismatch
from weft.kernels.tile_schedule import tile_table
from weft.runtime.team.team import COMPARING

M, N, K = 20, 24, 16
STEP = tl.constexpr(16)


def draw(call, world, dtype=torch.float32, rows=M):
    """All ranks' rows [W, rows, K], and b [N, K]."""
    seeded = torch.Generator().manual_seed(call)
    return [torch.randn(*shape, generator=seeded).to(dtype) for shape in ((world, rows, K), (N, K))]


def gathered(team, plan, call, dtype=torch.float32, map=None, body=gemm_tile):
    xs, b = draw(call, team.size, dtype)
    out = torch.empty((team.size * M, N), dtype=dtype)
    operands = Matrices(b, b, N, K, STEP)
    if map == "functions":
        operands = Reversed(b, b, N, K, STEP, M, tl.constexpr(team.size))
        map = tiles.TileMap(owner_of=reversed_owner, rows_of=reversed_rows, tiles=2 * team.size, covers=team.size * M)
    elif map == "table":
        table = tile_table([M] * team.size, N, block_m=plan.rows, block_n=plan.columns, group=1)
        map = tiles.TileMap.of(table.flip(0).contiguous(), covers=team.size * M)
    tiles.gather(body, xs[team.rank], out, operands, team, plan=plan, map=map)
    assert_close(out, xs.flatten(0, 1).double() @ b.double().T, K, what=f"call {call} of rank {team.rank}")


@pytest.mark.parametrize(
    ("world", "dtype", "transport", "chunks", "map"),
    sampled(
        [
            (world, dtype, transport, chunks, map)
            for world in (1, 2, 3, 4)
            for dtype in (torch.float32, torch.bfloat16)
            for transport in ("copy", "store")
            for chunks in (1, 2)
            for map in (None, "functions", "table")
        ],
        lambda *at: at in (
            (1, torch.float32, "copy", 1, None), (3, torch.bfloat16, "store", 2, None), (2, torch.float32, "copy", 2, "table"),
            (3, torch.float32, "copy", 1, "functions"), (4, torch.bfloat16, "copy", 2, None),
        ),
    ),
)  # fmt: skip
def test_tiles_of_all_ranks_rows(world, dtype, transport, chunks, map):
    plan = tiles.GatherPlan(rows=16, columns=32, chunks=chunks, transport=transport)

    def main(team):
        for call in range(3):
            gathered(team, plan, call, dtype, map)

    weft.simulate(main, world, seed=world, slow={world - 1: 10.0})


def test_a_tensor_descriptor_of_the_rows():
    plan = tiles.GatherPlan(rows=16, columns=32, step=16)
    weft.simulate(lambda team: gathered(team, plan, 0, body=described_tile), 2)


def test_a_tensor_descriptor_where_one_ranks_rows_begin_off_16_bytes():
    plan = tiles.GatherPlan(rows=16, columns=32, step=16)

    def main(team):
        xs, b = draw(0, team.size)
        flat = torch.empty(M * K + 1)
        shard = flat[team.rank : team.rank + M * K].view(M, K).copy_(xs[team.rank])
        out = torch.empty((team.size * M, N))
        tiles.gather(described_tile, shard, out, Matrices(b, b, N, K, STEP), team, plan=plan)
        assert_close(out, xs.flatten(0, 1).double() @ b.double().T, K, what=f"rank {team.rank}")

    weft.simulate(main, 2)


def test_calls_of_different_sizes_share_a_workspace():
    def main(team):
        for call, chunks in enumerate((2, 1, 2)):
            gathered(
                team, tiles.GatherPlan(rows=16, columns=32, chunks=chunks, transport=("store", "copy")[call % 2]), call
            )
        assert len(team.workspace(("tiles.gather", torch.float32), dict)) == 1

    weft.simulate(main, 2, seed=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"body": len}, "body=.*decorated with @triton.jit"),
        ({"shard": torch.zeros(M, K, 1)}, r"shard has shape \(20, 16, 1\); pass a matrix"),
        ({"out": torch.zeros(N, 2 * M).T}, "out has strides"),
        ({"out": torch.zeros(M, N)}, "out has 20 rows, and 2 ranks have 20 each; pass 40 rows, or a map"),
        ({"plan": tiles.ExchangePlan()}, "plan=.*GatherPlan"),
        ({"matrices": [0]}, r"matrices=\[0\] is not a tuple of at most two"),
        ({"matrices": 3}, "matrices=3 is not a tuple of at most two"),
        ({"map": "x"}, "tiles.gather: map='x' is not a weft.tiles.TileMap, or None"),
        ({"shard": torch.eye(M)[:, :K].to_sparse()}, "shard is a tensor of layout sparse_coo; pass a dense one"),
        (
            {"operands": (1, (TensorDescriptor.from_tensor(torch.zeros(16, 16), [16, 16]),))},
            "holds a tensor descriptor",
        ),
        ({"plan": tiles.GatherPlan(step=16), "shard": torch.zeros(M, 15)}, "step=16 needs rows that begin on 16 bytes"),
    ],
)
def test_refusals(change, message):
    given = {"body": gemm_tile, "shard": torch.zeros(M, K), "out": torch.zeros(2 * M, N)}
    arguments = given | {"operands": Matrices(None, None, N, K, STEP)} | change

    def main(team):
        with pytest.raises(ValueError, match=message):
            tiles.gather(**arguments, team=team)
        team.barrier()

    weft.simulate(main, 2)


def test_ranks_whose_shapes_differ_are_told():
    def main(team):
        COMPARING.discard(team.name)  # as on GPUs without debug
        shard, out = torch.zeros(M + team.rank, K), torch.zeros(2 * (M + team.rank), N)
        with pytest.raises(ValueError, match=r"shard.shape\[0\] is 20 on rank 0, 21 on rank 1"):
            tiles.gather(partial_tile, shard, out, None, team)

    weft.simulate(main, 2)


def test_virtual_ranks_are_told_at_every_call():
    def main(team):
        for more in (0, 1, team.rank):  # both shapes are known to all ranks before they differ
            shard, out, b = torch.zeros(M + more, K), torch.zeros(2 * (M + more), N), torch.zeros(N, K)
            tiles.gather(gemm_tile, shard, out, Matrices(b, b, N, K, STEP), team)

    with pytest.raises(ArgumentMismatch, match=r"tiles.gather: shard.shape\[0\] is 20 on rank 0, 21 on rank 1"):
        weft.simulate(main, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": 48}, "rows=48 is not a power of two"),
        ({"chunks": 9}, "chunks=9"),
        ({"transport": "pigeon"}, "transport='pigeon' is not one of copy, store"),
    ],
)
def test_plans_that_do_not_fit(fields, message):
    with pytest.raises(ValueError, match=message):
        tiles.GatherPlan(**fields)


def test_a_table_has_four_columns_of_int32():
    with pytest.raises(ValueError, match=r"shape \(2, 3\) and dtype torch.int64; pass a contiguous int32 tensor"):
        tiles.TileMap.of(torch.zeros(2, 3, dtype=torch.int64))
