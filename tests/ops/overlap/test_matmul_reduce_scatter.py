"""matmul_reduce_scatter: replays of the pipelined design, and the GEMMs that it makes."""

import torch

import weft
from tests.ops.checking import assert_identical
from weft.ops.gemm import cublas
from weft.ops.overlap.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER, Pipelined


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
