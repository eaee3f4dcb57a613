"""benchmarks/lab/mla_designs.py times designs that fit their shape, the plan's first."""

import pytest
import torch

import weft
from benchmarks.lab import mla_designs
from weft.kernels.paged_cache import Sequences
from weft.ops.attention.mla_decode_attention import MLA_DECODE_ATTENTION, MLAArguments
from weft.plan.planned import machine
from weft.runtime.capabilities import simulated

H200 = machine(simulated(1), 1)


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_each_shape_is_timed_with_plain_blocks_and_early_copies(heads):
    for shape in (shape for shape in mla_designs.SHAPES if shape.heads == heads):
        designs = list(mla_designs.designs_for(shape, H200))
        call = MLA_DECODE_ATTENTION.call_of((shape.batch, heads, shape.context, 576), torch.bfloat16, H200)
        assert MLA_DECODE_ATTENTION.plan(call, H200).design in designs[: 1 if heads == 16 else 2]
        assert [MLA_DECODE_ATTENTION.name_of(design) for design in designs] == [
            "blocks",
            *["early"] * (len(designs) - 1),
        ]
        assert len(set(designs)) == len(designs) == (3 if heads == 16 else 2)


def test_a_wrong_result_has_an_error():
    def main(team):
        torch.manual_seed(0)
        q, q_rope, cache = torch.randn(1, 4, 512), torch.randn(1, 4, 64), torch.randn(2, 64, 576)
        sequences = Sequences(torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([100], dtype=torch.int32))
        given = MLAArguments(q, q_rope, cache, sequences, mla_designs.SCALE)
        out = MLA_DECODE_ATTENTION.forward(given)[0][0]
        return [mla_designs.error_of(out, q[0], q_rope[0], cache[[1, 0]], tokens) for tokens in (100, 99)]

    [(right, wrong)] = weft.simulate(main, 1)
    assert right < 1e-5 < 1e-3 < wrong
