"""Types of the replicated recipe: a partial sum over the ranks keeps its split-K partials when rows are chosen."""

import torch

import weft
from weft.parallel.replicated import FusedNorm
from weft.parallel.tensors import NormWeights, PartialSum, SplitK


def test_rows_of_a_partial_sum_are_those_of_its_partials():
    parts, rows = torch.arange(24.0).view(2, 3, 4), torch.tensor([2, 0])
    assert torch.equal(PartialSum(SplitK(parts)).rows(rows).summand.parts, parts[:, [2, 0]])
    assert torch.equal(PartialSum(parts[0]).rows(rows).summand, parts[0, [2, 0]])


def test_a_fused_norm_adds_up_partials_and_ranks():
    parts = torch.ones(2, 3, 16)

    def main(team):
        recipe = FusedNorm(team=team, deferred_scale=False)
        norm = NormWeights(torch.ones(16, dtype=torch.bfloat16), 0.0)
        residual = torch.zeros(3, 16, dtype=torch.bfloat16)
        return recipe.all_reduce_norm(PartialSum(SplitK((team.rank + 1) * parts)), residual, norm)

    for normed, hidden in weft.simulate(main, 2):
        assert torch.equal(hidden, torch.full((3, 16), 6.0, dtype=torch.bfloat16))  # 2 parts of 1 and of 2
        assert torch.equal(normed, torch.ones(3, 16, dtype=torch.bfloat16))
