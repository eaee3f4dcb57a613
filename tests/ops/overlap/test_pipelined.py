"""How rows are cut and joined for cuBLAS's GEMMs, and calls that follow each other with rows in either order."""

import re

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

import weft
import weft.check
from tests.compiling import compiled
from tests.ops.checking import assert_close, assert_identical
from weft.ops.case import FP32
from weft.ops.op import find_op
from weft.ops.overlap.all_gather_matmul import ALL_GATHER_MATMUL, Pipelined
from weft.ops.overlap.pipelined import SUM_BLOCK, part_of, pieces_of, rows_of, runs_of, sum_kernel


@given(st.integers(1, 9), st.integers(0, 8), st.integers(1, 9))
def test_runs_hold_every_peer_once_in_the_order_of_ranks(world, first, span):
    first %= world
    runs = list(runs_of(first, world, span))
    assert [rank for run in runs for rank in run] == [(first + step) % world for step in range(world - 1)]
    assert all(0 <= run.start < run.stop <= world and len(run) <= span for run in runs)


@given(st.integers(0, 100), st.integers(1, 8))
def test_pieces_hold_every_row_once_and_none_is_empty(rows, count):
    pieces = list(pieces_of(rows, count))
    assert [number for number, _ in pieces] == list(range(len(pieces)))
    assert [row for _, piece in pieces for row in range(piece.start, piece.stop)] == list(range(rows))
    assert len(pieces) <= count
    assert all(piece.start < piece.stop for _, piece in pieces)


@pytest.mark.parametrize(
    ("world_size", "schedules"),
    [(3, 4), *(pytest.param(world_size, 20, marks=pytest.mark.sweep) for world_size in (3, 4))],
)
def test_calls_of_both_orders_of_rows_may_follow_each_other(world_size, schedules):
    """Without a barrier: a rank may be a call ahead, and what it then sends lies where another's of this call goes."""

    def main(team):
        for call in range(6):
            generator = torch.Generator().manual_seed(call)
            a, b = (torch.randn(rows, 32, generator=generator).bfloat16() for rows in (4 * team.size, 16))
            own_first = call % 2 == 1
            out = ALL_GATHER_MATMUL.run(Pipelined(), team, a.chunk(team.size)[team.rank], b, own_first)
            a = a.roll(-4 * team.rank, 0) if own_first else a
            assert_close(out, a.double() @ b.double().T, 32, what=f"call {call}")

    report = weft.check.check(main, world_size, schedules=schedules)
    assert report.ok, str(report)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("op", "workspace", "fields"),
    [
        ("all_gather_matmul", "all_gather_matmul", {"streams": 2}),
        ("matmul_reduce_scatter", "matmul_reduce_scatter pipelined", {"streams": 2}),
        *(("matmul_all_reduce", "matmul_all_reduce pipelined", {"chunks": chunks}) for chunks in (1, 3)),
    ],
)
def test_replayed_calls_fill_the_same_half_each_time(op, workspace, fields, seed):
    """A graph with one call writes the same half of the buffers at every replay: the device must wait, not the parity."""
    op, place = find_op(op), torch.arange(60.0)[:, None].expand(60, 24)

    def main(team):
        results, own = [], slice(20 * team.rank, 20 * team.rank + 20)
        for call in range(5):
            a = place[own] + call if op is ALL_GATHER_MATMUL else place + float(call + team.rank)
            results.append(op.run(op.designs["pipelined"](**fields), team, a, torch.ones(16, 24)))
            [held] = team.workspace((workspace, FP32), dict).values()
            held.halves.calls = 0
        for call, result in enumerate(results):
            summed = 24.0 * ((place + call) if op is ALL_GATHER_MATMUL else 3 * (place + call) + 3)[:, :1].expand(
                60, 16
            )
            expected = summed[own] if op.name == "matmul_reduce_scatter" else summed
            assert_identical(result, expected.contiguous(), what=f"call {call}")

    weft.simulate(main, 3, seed=seed, slow={seed % 3: 20.0})


@triton.jit
def note_parts(found, M, N, BLOCK: tl.constexpr, WORLD: tl.constexpr):
    for rank in range(WORLD):
        first, count, first_row = part_of(rank, M, N, BLOCK, WORLD)
        at = found + (rank * tl.num_programs(0) + tl.program_id(0)) * 3
        tl.store(at, first)
        tl.store(at + 1, count)
        tl.store(at + 2, first_row)


@pytest.mark.parametrize(("M", "N"), [(300_000, 16_384), (7, 1000), (1, 3000), (40, 33)])
@pytest.mark.parametrize("world", [2, 3])
def test_parts_hold_every_element_of_a_rank_once_however_many_there_are(world, M, N):
    """More than 2**31 at W=2, where a rank's sums are pipelined because 32 bits could not count them."""

    def main(team):
        found = team.local((world, 5, 3), torch.int64)
        note_parts[(5,)](found, M, N, BLOCK=1024, WORLD=world)
        return found.tolist()

    [found] = weft.simulate(main, 1)
    for rank, parts in enumerate(found):
        rows = rows_of(rank, M, world)
        size, end = (rows.stop - rows.start) * N, 0
        for first, count, first_row in parts:
            assert first_row == rows.start and first % 1024 == 0
            assert count == 0 or first == end
            end += count
        assert end == size


def test_a_block_of_a_sum_begins_where_64_bits_say():
    x = torch.zeros(16, dtype=torch.bfloat16)
    ttir = compiled(sum_kernel, x, x, x, 1 << 33, 1 << 32, BUFFERS=1, BLOCK=SUM_BLOCK, arch="sm_90").asm["ttir"]
    assert re.search(r"muli .* : i64", ttir) and not re.search(r"muli .* : i32", ttir)
