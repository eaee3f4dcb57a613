"""Refused arguments of top_p_mass and narrow, and a strided one; the cases run with all others."""

import pytest
import torch

import weft
from weft import ops
from weft.ops.vocab.top_p_mass import LOWEST, narrow


def test_wrong_arguments_are_refused():
    logits, rows = torch.zeros(2, 8), torch.zeros(2)
    with pytest.raises(ValueError, match="shift=3 is not one of 28, 24"):
        ops.top_p_mass(logits, rows, rows, rows.int(), 3)
    above, strided = torch.zeros(1, 16, 2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32)[:, 0]
    with pytest.raises(ValueError, match=r"narrow: low has strides \(2,\); it is used in place"):
        narrow(above, rows, strided, rows.long(), 28)


def test_low_may_be_strided():
    def main(team):
        logits, rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)), torch.ones(3)
        low = torch.tensor([[LOWEST, 0], [-5, 0], [1 << 29, 0]], dtype=torch.int32)[:, 0]
        masses = (ops.top_p_mass(logits, logits.amax(1), rows, x, 28) for x in (low, low.contiguous()))
        return torch.equal(*masses)

    assert weft.simulate(main, 1) == [True]
