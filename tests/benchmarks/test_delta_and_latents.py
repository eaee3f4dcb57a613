"""benchmarks/delta_and_latents.py compares a step with the op's reference before it times it."""

import torch

import weft
from benchmarks.delta_and_latents import EPS, TAPS, error_of_step
from weft import ops


def test_a_step_is_compared_with_its_reference():
    def main(team):
        torch.manual_seed(0)
        heads, columns, new, ring = 2, 64, 3, TAPS + 4
        qkv, z, conv, norm = (torch.randn(*shape) for shape in ((new, columns), (new, 32), (columns, TAPS), (16,)))
        gates = ops.Gates(*(torch.randn(new, heads) for _ in range(2)), *(torch.randn(heads) for _ in range(2)))
        kept = ops.DeltaSlots(
            torch.randn(1, ring, columns), torch.randn(1, ring, 2 * heads), torch.randn(1, heads, 16, 16)
        )
        lengths, slots, pending = (torch.tensor(x, dtype=torch.int32) for x in ([8, 9, 10], [0], [1]))
        tokens = ops.DeltaTokens(lengths, slots, pending, 2)
        right = error_of_step(qkv, z, gates, conv, (norm, EPS), ops.DeltaSlots(*(x.clone() for x in kept)), tokens)
        wrong = error_of_step(qkv, z, gates, conv, (2 * norm, 1.0), kept, tokens)
        return right, wrong

    [(right, wrong)] = weft.simulate(main, 1)
    assert right < 1e-5 and wrong > 0.1
