"""matmul_reduce_scatter: replays of the pipelined design, and the GEMMs that it makes."""

import pytest
import torch

import weft
from tests.ops.checking import assert_identical
from weft.ops.case import FP32
from weft.ops.gemm import cublas
from weft.ops.overlap.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER, Pipelined


@pytest.mark.parametrize("seed", range(4))
def test_replayed_calls_fill_the_same_half_each_time(seed):
    place = torch.arange(60.0)[:, None].expand(60, 24)

    def main(team):
        results = []
        for call in range(5):
            a, b = place + float(call + team.rank), torch.ones(16, 24)
            results.append(MATMUL_REDUCE_SCATTER.run(Pipelined(streams=2), team, a, b))
            [workspace] = team.workspace(("matmul_reduce_scatter pipelined", FP32), dict).values()
            workspace.halves.calls = 0
        for call, result in enumerate(results):
            mine = slice(20 * team.rank, 20 * team.rank + 20)
            expected = (24.0 * (3 * call + 3) + 72.0 * place[mine, :1]).expand(20, 16)
            assert_identical(result, expected.contiguous(), what=f"call {call}")

    weft.simulate(main, 3, seed=seed, slow={seed % 3: 20.0})


def test_local_pieces_are_gemms_of_their_own(monkeypatch):
    sizes = []

    def noted(a, b, out=None, **words):
        sizes.append(len(a))
        return multiply(a, b, out, **words)

    multiply = cublas.matmul
    monkeypatch.setattr(cublas, "matmul", noted)

    def main(team, design):
        return MATMUL_REDUCE_SCATTER.run(design, team, torch.ones(57, 24), torch.ones(16, 24))

    for fields, expected in (
        ({}, [19] * 9),
        ({"local_pieces": 2}, [19] * 6 + [10, 9] * 3),
        ({"local_pieces": 40}, [19] * 6 + [1] * 57),
    ):
        sizes.clear()
        for result in weft.simulate(main, 3, args=(Pipelined(streams=2, **fields),)):
            assert_identical(result, torch.full((19, 16), 72.0))
        assert sorted(sizes) == sorted(expected)
