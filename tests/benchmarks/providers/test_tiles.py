"""Ops written on weft.tiles give the ops' answers."""

import pytest
import torch

import weft
from tests.bench.ops.choosing import choose
from tests.benchmarks.providers.loaded import loaded
from tests.ops.checking import assert_close
from weft.bench.ops.problem import OpProblem
from weft.bench.ops.shapes import op_of, parse_shapes


@pytest.mark.parametrize(
    ("op", "shape"), [("ag-gemm", "40,48,64"), ("ag-gemm", "40,48,36"), ("gemm-rs", "40,48,64"), ("ag-moe", "")]
)
def test_answers(op, shape):
    def main(team):
        shapes = parse_shapes(op, [shape] if shape else [], team.size, tiny=True)
        problem = OpProblem(op_of(op), shapes[0], "bf16", team)
        for provider in choose(op, ["tiles"]):
            prepared = provider.make(problem)
            for _ in range(2):
                assert problem.verdict(prepared, prepared.run(0)).wrong == "", provider.name

    weft.simulate(main, 2)


def test_parts_of_heads_are_merged_over_the_ranks():
    B, heads, D = 3, 4, 16

    def main(team):
        seeded = torch.Generator().manual_seed(0)
        means = torch.randn(team.size, B, heads, D, generator=seeded)
        log_sums = torch.randn(team.size, B, heads, generator=seeded)
        log_sums[0, 1] = -torch.inf  # a rank without tokens of a sequence
        out = loaded("tiles").merge_over_ranks(means[team.rank], log_sums[team.rank], team)
        wanted = (log_sums.softmax(0)[..., None] * means).sum(0).chunk(team.size, 1)[team.rank]
        assert_close(out, wanted, team.size, what=f"heads of rank {team.rank}")

    weft.simulate(main, 2)
