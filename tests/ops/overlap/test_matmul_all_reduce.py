"""matmul_all_reduce: which design a shape gets, and the pipelined design's buffers."""

import dataclasses

import pytest
import torch

import weft
from tests.ops.checking import assert_identical, check_replicated, run_cases
from weft.ops.case import BF16, FP32, Case
from weft.ops.gemm.tile import Tile
from weft.ops.overlap import matmul_all_reduce as module
from weft.ops.overlap.fused_reduce import Fused
from weft.ops.overlap.matmul_all_reduce import MATMUL_ALL_REDUCE, Pipelined
from weft.plan.memo import forget
from weft.plan.planned import machine, machine_of
from weft.runtime import capabilities


@pytest.mark.parametrize("seed", range(4))
def test_one_buffer_serves_call_after_call_where_two_are_too_large(monkeypatch, seed):
    monkeypatch.setattr(module, "MOST_HALVED", 0)
    cases = [
        Case(op="matmul_all_reduce", world_size=3, dtype=BF16, sizes=sizes, design=design)
        for sizes in ((60, 24, 40), (31, 40, 24))
        for design in (Pipelined(chunks=1), Pipelined(chunks=3, streams=1))
    ]

    def main(team):
        found = run_cases(team, cases, 3)
        [workspace] = team.workspace(("matmul_all_reduce pipelined", BF16), dict).values()
        assert len(workspace.buffers) == 1
        return found

    check_replicated(weft.simulate(main, 3, seed=seed, slow={seed % 3: 20.0}))


def test_many_rows_a_rank_are_all_reduced_in_two_blocks():
    caps = dataclasses.replace(capabilities.simulated(4), device_name="Some GPU", is_simulated=False)
    for world_size, rows, blocks in (
        (2, 2**15, 0),
        (3, 6144, 2),
        (3, 6143, 0),
        (4, 8192, 2),
        (4, 8191, 0),
        (8, 8192, 0),
    ):
        here = machine(caps, world_size)
        for K in (1024, 8192):
            planned = MATMUL_ALL_REDUCE.plan(MATMUL_ALL_REDUCE.call_of((rows, 5120, K), BF16, here), here)
            found = planned.design.chunks if planned.name == "pipelined" else 0
            assert found == blocks, (world_size, rows, K)


def test_invariant_ranks_with_other_shares_of_K_are_refused():
    def main(team):
        K = 128 << team.rank
        weft.ops.matmul_all_reduce(torch.ones(4, K, dtype=BF16), torch.ones(32, K, dtype=BF16), team, invariant=True)

    with pytest.raises(ValueError, match="K with invariant=True is 128 on rank 0, 256 on rank 1; pass the same"):
        weft.simulate(main, 2)


def test_sums_that_32_bits_cannot_count_are_pipelined(monkeypatch):
    monkeypatch.setattr(module, "MOST_ELEMENTS", 1)
    monkeypatch.setattr(module, "rows_overlap", lambda rows: True)
    forget()

    def main(team):
        generator = torch.Generator().manual_seed(team.rank)
        a, b = (torch.randn(size, generator=generator) for size in ((40, 24), (20, 24)))
        here = machine_of(team)
        planned = MATMUL_ALL_REDUCE.plan(MATMUL_ALL_REDUCE.call_of((40, 20, 24), FP32, here), here)
        assert planned.name == "pipelined"
        found = weft.ops.matmul_all_reduce(a, b, team)
        assert_identical(found, MATMUL_ALL_REDUCE.run(planned.design, team, a, b))
        fused = Fused(tile=Tile(block_m=16, block_n=16, block_k=16))
        with pytest.raises(
            ValueError, match="design='fused' has receive buffers of .* for M=40, N=20, .* pass design='pipelined'"
        ):
            MATMUL_ALL_REDUCE.run(fused, team, a, b)
        return found, a @ b.T

    results = weft.simulate(main, 3)
    forget()
    for found, _ in results:
        torch.testing.assert_close(found, sum(product for _, product in results), rtol=1e-4, atol=1e-4)
