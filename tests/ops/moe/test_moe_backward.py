"""Gradients through moe_dispatch and moe_combine: two layers over ranks against one model, planted mistakes, refusals."""

import pytest
import torch

import weft
from tests.ops.checking import assert_identical
from tests.ops.layer_cases import DEVICES, everywhere, mutated
from tests.ops.moe.trained import EXPERTS, check, joined, on_one, over_ranks
from weft import ops
from weft.ops.moe import moe_sum
from weft.ops.moe.routing import Routing

SWEEP = pytest.mark.sweep


@pytest.mark.parametrize(
    ("world_size", "dispatch", "combine"),
    [
        (2, "push", "push"),
        (2, "pipelined", "pipelined"),
        *(
            pytest.param(w, *algorithms, marks=SWEEP)
            for w in (1, 2, 3, 4)
            for algorithms in (
                ("push", "push"),
                ("auto", "auto"),
                ("lamport", "sum_then_scatter"),
                ("pipelined", "pipelined"),
            )
        ),
    ],
)
def test_gradients_over_ranks_are_those_of_one_model(world_size, dispatch, combine):
    check(weft.simulate(over_ranks, world_size, args=(False, dispatch, combine)), on_one(world_size))


@pytest.mark.parametrize(
    ("world_size", "algorithms"),
    [
        (2, ("push", "push")),
        *(pytest.param(4, (one, two), marks=SWEEP) for one in ("push", "auto") for two in ("push", "auto")),
    ],
)
def test_gradients_of_experts_whose_slices_two_ranks_hold_are_those_of_one_model(world_size, algorithms):
    found = weft.simulate(over_ranks, world_size, args=(False, *algorithms, 2))
    check(found, on_one(world_size), 2)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=SWEEP), 3])
def test_experts_without_rows_have_zero_gradients(world_size):
    by_rank = weft.simulate(over_ranks, world_size, args=(True,), slow={0: 20})
    _, _, gate_up, down = joined(by_rank)
    assert {e for e in range(EXPERTS) if gate_up[e].any() or down[e].any()} == {1, 7}
    check(by_rank, on_one(world_size, True))


def returned(team, algorithm):
    """moe_dispatch's backward by one algorithm of moe_combine, of rows that are NaN where they are not sent."""
    ids = torch.tensor([[0, 5], [2, 4], [-1, -1], [3, 1]] * team.size, dtype=torch.int32)
    generator = torch.Generator().manual_seed(team.rank)
    mine = (ids // 2 == team.rank).any(-1, keepdim=True)
    rows = torch.randn(len(ids), 40, generator=generator).bfloat16().masked_fill(~mine, torch.nan)
    return torch.ops.weft.moe_combine(rows, ids, None, 6, 4, team.name, algorithm)


def test_rows_come_back_with_the_same_bits_by_every_algorithm():
    """In rank order: three summands of which fp32 loses another one in each order."""

    def main(team):
        return [returned(team, algorithm) for algorithm in ("push", "pipelined", "lamport")]

    for push, *others in weft.simulate(main, 3):
        for other in others:
            assert_identical(push, other)
        assert not push[2].any() and push[[0, 1, 3]].any(-1).all()


def check_sum_grad(device):
    """Gradients of three tokens' pairs, of which this rank has the experts 1 and 2; the other rows are NaN."""
    generator = torch.Generator().manual_seed(0)
    y, weights, grad = (torch.randn(shape, generator=generator) for shape in ((6, 1100), (3, 2), (3, 1100)))
    ids = torch.tensor([[1, 0], [2, 1], [3, 0]], dtype=torch.int32)
    mine = (ids == 1) | (ids == 2)
    y, grad = y.masked_fill(~mine.view(-1, 1), torch.nan), grad.masked_fill(~mine.any(-1, keepdim=True), torch.nan)
    found = moe_sum.MoeSumGrad().forward(*(x.to(device) for x in (y, ids, weights, grad)), 1, 2)
    of_y = torch.where(mine[..., None], grad.double()[:, None] * weights.double()[..., None], 0.0)
    of_weights = torch.where(mine, torch.einsum("tn,tjn->tj", grad.double(), y.view(3, 2, -1).double()), 0.0)
    for one, other in zip(found, (of_y.flatten(0, 1), of_weights), strict=True):
        torch.testing.assert_close(one.double().cpu(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradients_of_a_sum_are_exact(device):
    everywhere(check_sum_grad, device)


MISTAKES = {
    "the neighbour's weight": ("weight, total = tl.load(weights + pair)", "weight, total = tl.load(weights + token * K)"),
    "all ranks' choices": ("(expert >= 0) & (expert < count)\n    weight, total", "expert >= -99\n    weight, total"),
    "the neighbour's rows": ("tl.load(y + pair * N + column", "tl.load(y + token * K * N + column"),
    "one block of columns": ("total += row * tl.load", "total = row * tl.load"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_them_is_seen(mistake, tmp_path, monkeypatch):
    mutant = mutated(moe_sum, *MISTAKES[mistake], f"grad_mutant_{len(mistake)}", tmp_path)
    monkeypatch.setattr(moe_sum, "moe_sum_grad_kernel", mutant.moe_sum_grad_kernel)
    with pytest.raises(AssertionError):
        everywhere(check_sum_grad, "cpu")


def test_fp8_rows_have_no_gradient():
    def main(team):
        x = torch.ones(2, 16, requires_grad=True)
        routing = Routing(torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1))
        found = ops.moe_dispatch(x, routing, team, experts=2, max_tokens=2, dtype=torch.float8_e4m3fn)
        with pytest.raises(RuntimeError) as refused:
            found.rows.float().sum().backward()
        assert "moe_dispatch has no backward for fp8 rows; send rows of x's dtype" in str(refused.value)
        assert "\n" not in str(refused.value)

    weft.simulate(main, 1)


@pytest.mark.parametrize("algorithm", ["push", "pipelined"])
def test_a_backward_of_receive_buffers_that_were_written_again_is_refused(algorithm):
    """Only experts have gradients here: nothing tells moe_dispatch to keep its rows."""

    def main(team, late):
        x, weight = torch.ones(3, 16), torch.ones(1, 8, 16, requires_grad=True)
        routing = Routing(torch.zeros(3, 1, dtype=torch.int32) + team.rank, torch.ones(3, 1))
        named = {"experts": team.size, "max_tokens": 3, "algorithm": algorithm}
        found = ops.moe_dispatch(x, routing, team, **named)
        schedule = ops.moe_schedule(found.routing.ids, found.experts)
        y = ops.grouped_matmul(found.rows, weight, schedule, gather=True)[:3].sum()
        if late:
            ops.moe_dispatch(x, routing, team, **named)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()
        else:
            y.backward()
            assert (weight.grad == 3).all()

    for late in (False, True):
        weft.simulate(main, 2, args=(late,))
