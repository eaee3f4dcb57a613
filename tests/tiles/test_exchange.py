"""scatter and exchange: sums in rank order, merges, parts that are kept apart, calls in a row, refusals."""

import pytest
import torch
import triton.language as tl

import weft
from tests.ops.checking import assert_close, assert_identical
from tests.sampled import sampled
from tests.tiles import bodies
from weft import tiles
from weft.tiles.exchange import _shared

M, N, K = 20, 24, 16
STEP = tl.constexpr(16)
PLAN = tiles.ExchangePlan(rows=16, columns=32)


def scattered(team, call, dtype, mapped=False, plan=PLAN):
    """The result, all ranks' a [W, W * M, K] and b [W, N, K]."""
    seeded, world = torch.Generator().manual_seed(call), team.size
    a, b = (torch.randn(*shape, generator=seeded).to(dtype) for shape in ((world, world * M, K), (world, N, K)))
    operands, map = bodies.Matrices(a[team.rank], b[team.rank], N, K, STEP), None
    if mapped:
        operands = bodies.Reversed(*operands, M, tl.constexpr(world))
        map = tiles.TileMap(
            owner_of=bodies.reversed_owner, rows_of=bodies.reversed_rows, tiles=2 * world, covers=world * M
        )
    out = torch.empty((M, N), dtype=dtype)
    return tiles.scatter(bodies.partial_tile, out, operands, team, plan=plan, map=map), a, b


@pytest.mark.parametrize(
    ("world", "dtype", "mapped"),
    sampled(
        [(world, dtype, mapped) for world in (1, 2, 3, 4) for dtype in (torch.float32, torch.bfloat16) for mapped in (0, 1)],
        lambda *at: at in ((1, torch.float32, 0), (3, torch.bfloat16, 0), (2, torch.float32, 1), (4, torch.float32, 0)),
    ),
)  # fmt: skip
def test_sums_over_the_ranks(world, dtype, mapped):
    def main(team):
        for call in range(3):
            out, a, b = scattered(team, call, dtype, mapped)
            wanted = torch.einsum("wmk,wnk->mn", a.double(), b.double())[team.rank * M : (team.rank + 1) * M]
            assert_close(out, wanted, K, partials=world, what=f"call {call} of rank {team.rank}")

    weft.simulate(main, world, seed=world, slow={world - 1: 10.0})


@pytest.mark.parametrize(
    ("world", "split", "mapped", "K"),
    sampled(
        [(world, split, mapped, K) for world in (1, 2, 3) for split in (2, 3) for mapped in (False, True) for K in (16, 80)],
        lambda *at: at in ((2, 3, False, 80), (2, 2, True, 16)),
    ),
)  # fmt: skip
def test_programs_share_a_tile_s_sum(world, split, mapped, K, monkeypatch):
    """Of 16 or 80 in steps of 16: some shares have nothing to add."""
    monkeypatch.setattr("tests.tiles.test_exchange.K", K)
    plan = tiles.ExchangePlan(rows=16, columns=32, split=split)

    def main(team):
        for call in range(3):
            out, a, b = scattered(team, call, torch.float32, mapped, plan)
            wanted = torch.einsum("wmk,wnk->mn", a.double(), b.double())[team.rank * M : (team.rank + 1) * M]
            assert_close(out, wanted, K, partials=world * split, what=f"call {call} of rank {team.rank}")
        return out

    once, again = (weft.simulate(main, world, seed=seed, slow={world - 1: 10.0}) for seed in (1, 2))
    for one, other in zip(once, again, strict=True):
        assert_identical(one, other, what="another timing")


@pytest.mark.parametrize(
    ("split", "count", "programs", "whole_and_split"),
    [
        (4, 6, 4, (4, 2)),
        (4, 2, 8, (0, 4)),
        (8, 3, 4, (3, 1)),
        (4, 400, 132, (396, 4)),
        (3, 8, 4, (8, 1)),
        (1, 5, 4, (5, 1)),
    ],
)
def test_tiles_of_a_round_that_is_half_full_at_most_are_shared(split, count, programs, whole_and_split):
    assert _shared(split, count, programs) == whole_and_split


@pytest.mark.parametrize(("mapped", "sms"), [(False, 4), (False, 5), (True, 8), (True, 3)])
def test_only_the_tiles_of_the_last_round_are_shared(mapped, sms, monkeypatch):
    """Six tiles, or four of a map: whole numbers below 2**24, whose sums are exact."""
    monkeypatch.setattr("tests.tiles.test_exchange.K", 48)
    monkeypatch.setattr("tests.tiles.test_exchange.M", M if mapped else 36)
    monkeypatch.setattr(
        torch, "randn", lambda *shape, generator: torch.randint(-4, 5, shape, generator=generator).float()
    )

    def main(team):
        for call in range(2):
            split = scattered(team, call, torch.float32, mapped, tiles.ExchangePlan(rows=16, columns=32, split=4))[0]
            whole, a, b = scattered(team, call, torch.float32, mapped)
            wanted = torch.einsum("wmk,wnk->mn", a, b).chunk(team.size)[team.rank]
            assert_identical(split, whole, what=f"call {call} of rank {team.rank}")
            assert_identical(split, wanted, what=f"call {call} of rank {team.rank}")

    weft.simulate(main, 2, seed=1, slow={1: 10.0}, sms=sms)


@pytest.mark.parametrize("columns", [32, 512])
def test_the_order_of_the_sum_is_that_of_the_ranks(columns):
    """1e8 + 1 - 1e8 in fp32 tells the order; 512 columns are summed in pieces."""
    values = (1e8, 1.0, -1e8)

    def main(team):
        a, b = torch.full((team.size * M, K), values[team.rank] / K), torch.ones(N, K)
        operands = bodies.Matrices(a, b, N, K, STEP)
        plan = tiles.ExchangePlan(rows=32, columns=columns)
        return tiles.scatter(bodies.partial_tile, torch.empty(M, N), operands, team, plan=plan)

    total = torch.tensor(values[0]) + values[1] + values[2]
    for out in weft.simulate(main, 3):
        assert_identical(out, torch.full((M, N), float(total)), what="sum")


def test_parts_of_attention_are_merged_at_the_owner_of_a_head():
    heads, batch, D = 4, 3, 16

    def main(team):
        for call in range(3):
            seeded = torch.Generator().manual_seed(call)
            outs = torch.randn(team.size, heads * batch, D, generator=seeded)
            lses = torch.randn(team.size, heads * batch, generator=seeded)
            out = torch.empty(heads * batch // team.size, D)
            plan = tiles.ExchangePlan(rows=8, columns=D)
            tiles.exchange(
                bodies.attention_part, bodies.store_mean, out, bodies.Parts(outs[team.rank], lses[team.rank]), team,
                part=8 * D + 8, merge=bodies.merge_attention, plan=plan,
            )  # fmt: skip
            wanted = (lses.softmax(0)[..., None] * outs).sum(0)
            assert_close(out, wanted.chunk(team.size)[team.rank], team.size, what=f"call {call}")

    weft.simulate(main, 2, seed=2, slow={0: 10.0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_without_a_merge_are_stored_one_by_one(dtype):
    """An all-to-all of rows."""
    rows, columns = 8, 16

    def main(team):
        x = torch.randn(team.size, team.size * rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
        map = tiles.TileMap(owner_of=bodies.dealt_owner, rows_of=bodies.dealt_rows, tiles=team.size)
        out = torch.empty(team.size * rows, columns, dtype=dtype)
        tiles.exchange(
            bodies.dealt_part, bodies.store_of_source, out, bodies.Dealt(x[team.rank], rows), team, part=rows * columns,
            dtype=dtype, plan=tiles.ExchangePlan(rows=rows, columns=columns), map=map,
        )  # fmt: skip
        assert_identical(out, x[:, team.rank * rows : (team.rank + 1) * rows].flatten(0, 1), what="dealt")

    weft.simulate(main, 3, seed=1)


def test_the_same_bits_whatever_the_timing():
    def main(team):
        return scattered(team, 0, torch.bfloat16)[0]

    results = [weft.simulate(main, 3, seed=seed, slow={seed: 20.0}) for seed in range(2)]
    for first, other in zip(*results, strict=True):
        assert_identical(first, other, what="another timing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"store": len}, "store=.*decorated with @triton.jit"),
        ({"merge": len}, "merge=.*decorated with @triton.jit"),
        ({"part": 0}, "part=0"),
        ({"dtype": torch.int32}, "dtype=torch.int32 is not one of"),
        ({"plan": tiles.GatherPlan()}, "plan=.*ExchangePlan"),
        ({"plan": tiles.ExchangePlan(split=2)}, "split=2 is for a scatter"),
        ({"out": torch.zeros(8, 4, 2)}, r"out has shape \(8, 4, 2\)"),
    ],
)
def test_refusals(change, message):
    arguments = {
        "body": bodies.attention_part, "store": bodies.store_mean, "out": torch.zeros(8, 16), "operands": None, "part": 8
    } | change  # fmt: skip

    def main(team):
        with pytest.raises(ValueError, match=message):
            tiles.exchange(**arguments, team=team)

    weft.simulate(main, 1)


@pytest.mark.parametrize("plan", ["auto", tiles.GatherPlan()])
def test_a_scatter_refuses_other_plans(plan):
    def main(team):
        with pytest.raises(ValueError, match="plan=.*ExchangePlan"):
            tiles.scatter(bodies.partial_tile, torch.zeros(8, 16), None, team, plan=plan)

    weft.simulate(main, 1)
