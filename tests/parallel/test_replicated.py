"""Types of the replicated recipe: a partial sum over the ranks keeps its split-K partials when rows are chosen."""

import types

import torch

import weft
import weft.ops.moe.grouped_matmul_all_reduce_rms_norm as grouped_norm
from weft import ops
from weft.ops.moe import moe_sum
from weft.parallel import fused
from weft.parallel.replicated import FusedNorm
from weft.parallel.tensors import Gating, MoEWeights, NormWeights, PartialSum, SplitK

summed = moe_sum.moe_sum


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


def test_the_pairs_of_experts_are_added_up_in_the_next_norm(monkeypatch):
    """One launch less than with moe_sum, and the same bits."""
    generator, launches = torch.Generator().manual_seed(0), []
    router, gate_up, down, x = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((4, 32), (4, 32, 32), (4, 32, 16), (3, 32))
    )
    for module in (ops, grouped_norm):
        counted = lambda *given, **named: launches.append("moe_sum") or summed(*given, **named)  # noqa: E731
        monkeypatch.setattr(module, "moe_sum", counted)

    def main(team):
        recipe = FusedNorm(team=team, deferred_scale=False)
        experts, norm = ops.Experts.whole(4, team.rank, team.size), NormWeights(torch.ones(32).bfloat16(), 1e-6)
        mine = slice(experts.first, experts.first + experts.count)
        w = MoEWeights(router, None, gate_up[mine], down[mine], experts, Gating(2))
        rows = PartialSum(fused.expert_rows(x, w))
        found = recipe.all_reduce_norm(rows, x, norm)
        assert not launches
        team.barrier()
        return found, recipe.all_reduce_norm(recipe.moe(x, w), x, norm)

    for found, expected in weft.simulate(main, 2):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
    assert launches == ["moe_sum"] * 2


def test_a_norm_after_attention_adds_up_split_k_partials():
    """The zeros in place of a residual have the layer's shape and dtype, whatever those of the norm's weight."""
    parts = torch.arange(2.0 * 3 * 64).view(2, 3, 64) / 50

    def main(team):
        norm = NormWeights(torch.ones(64), 1e-6)
        recipe = FusedNorm(team=team, deferred_scale=False)
        w = types.SimpleNamespace(residual_scale=None)
        return recipe.summand(PartialSum(SplitK(parts)), norm, w, torch.ones(3, 64).bfloat16())

    whole = 2 * parts.sum(0)
    expected = (whole / whole.square().mean(1, keepdim=True).sqrt()).bfloat16()
    for normed in weft.simulate(main, 2):
        torch.testing.assert_close(normed, expected)


def test_the_first_layer_keeps_the_dtype_of_the_embedding_beside_a_norm_in_fp32():
    rows = torch.arange(3.0 * 64).view(3, 64).bfloat16() / 50

    def main(team):
        recipe = FusedNorm(team=team, deferred_scale=False)
        return recipe.add_norm(PartialSum(rows), None, NormWeights(torch.ones(64), 1e-6))

    for normed, hidden in weft.simulate(main, 2):
        assert (normed.dtype, hidden.dtype) == (torch.bfloat16, torch.bfloat16)
        assert torch.equal(hidden, 2 * rows)
