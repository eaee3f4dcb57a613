"""Choices of experts as often as a trained router made them."""

import pytest
import torch

from weft.ops.case import BF16, Case, Draw
from weft.ops.moe.choices import OLMOE, draw_ids, recorded_shares
from weft.ops.moe.moe_op import MoeShape


@pytest.mark.parametrize(("experts", "k"), [(64, 8), (128, 8), (8, 2), (60, 4), (4, 2), (4, 4), (256, 8), (3, 1)])
def test_shares_are_k_in_all_and_at_most_one_each(experts, k):
    shares = recorded_shares(experts, k)
    assert len(shares) == experts and shares.max() <= 1 and shares.min() > 0
    assert shares.sum().item() == pytest.approx(k, abs=1e-6)


def test_the_recorded_model_has_its_own_shares():
    assert sum(OLMOE) == pytest.approx(8, abs=1e-3)
    torch.testing.assert_close(recorded_shares(64, 8), torch.tensor(OLMOE).double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("experts", "k"), [(64, 8), (8, 2), (5, 5), (4, 3)])
def test_experts_are_chosen_in_their_shares_and_once_by_a_token(experts, k):
    case = Case(op="moe_schedule", world_size=1, dtype=BF16, sizes=(), fields=(("skew", "recorded"),))
    ids = draw_ids(Draw(case, 0, 0, "cpu"), 20000, k, experts)
    assert ids.dtype == torch.int32 and ids.shape == (20000, k)
    assert (ids.sort(dim=1).values.diff(dim=1) > 0).all() and ids.min() >= 0 and ids.max() < experts
    found = torch.bincount(ids.flatten(), minlength=experts) / len(ids)
    torch.testing.assert_close(found.double(), recorded_shares(experts, k), atol=0.015, rtol=0)


def test_a_shape_knows_the_rank_that_has_the_most():
    shape = MoeShape(128, 8, 64, 32, 2048, 1024, 2)
    halves = torch.tensor(OLMOE).view(2, 32).sum(1)
    assert shape.pairs == pytest.approx(128 * float(halves.max()), rel=1e-3)
    assert 31 < shape.active <= 32
