"""sample_argmax with a floor against plain torch; the cases run with all others."""

import pytest
import torch

from tests.ops.layer_cases import DEVICES, everywhere, random
from weft import ops
from weft.ops.vocab.sample_argmax import gumbel_noise, join_argmax
from weft.ops.vocab.top_p_mass import LOWEST

SHAPES = [(1, 1), (1, 5000), (3, 1024), (5, 1025), (40, 70)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(batch, vocab, dtype, device):
    logits = random((batch, vocab), dtype, device) * 4
    logits[:, vocab // 3 : vocab // 3 + 2] = logits.amax(dim=1, keepdim=True)  # equal ones
    temperature = torch.linspace(0, 2, batch, device=device)
    seed, position = torch.arange(batch, device=device) * 12_345_678_901, torch.arange(batch, device=device)
    return logits, temperature, seed, position


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_floor_excludes_lesser_logits(shape, dtype, device):
    def check(device):
        logits, temperature, seed, position = inputs(*shape, dtype, device)
        scores = logits.float() + temperature[:, None] * gumbel_noise(seed, position, torch.arange(shape[1]).to(device))
        lowest = torch.full((shape[0],), LOWEST, dtype=torch.int32, device=device)
        pairs = ops.sample_argmax(logits, 0, temperature, seed, position, lowest)
        assert join_argmax(pairs).tolist() == scores.argmax(dim=1).tolist()
        torch.testing.assert_close(pairs[..., 0].amax(dim=0), scores.amax(dim=1), rtol=1e-5, atol=1e-5)
        # The floor is a logit as the integer of its bits, where it is positive.
        best = logits.float().amax(dim=1)
        positive = (best > 0).nonzero()[:, 0]
        pairs = ops.sample_argmax(logits, 0, temperature, seed, position, best.contiguous().view(torch.int32))
        expected = scores.masked_fill(logits.float() != best[:, None], -float("inf")).argmax(dim=1)
        assert join_argmax(pairs)[positive].tolist() == expected[positive].tolist()

    everywhere(check, device)


def test_wrong_arguments_are_refused():
    logits, rows = torch.zeros(2, 8), torch.zeros(2)
    longs = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="a temperature needs random numbers; pass seed"):
        ops.sample_argmax(logits, 0, rows)
    with pytest.raises(ValueError, match=r"token ids 16777210 .. 16777217 are not in 0 .. 2\*\*24 - 1"):
        ops.sample_argmax(logits, (1 << 24) - 6)
    with pytest.raises(ValueError, match=r"seed has shape \(3,\); it must be \(2,\)"):
        ops.sample_argmax(logits, 0, rows, torch.zeros(3, dtype=torch.int64), longs)
    with pytest.raises(ValueError, match="logits.dtype=torch.int64 is not one of"):
        ops.sample_argmax(logits.long(), 0)
    with pytest.raises(ValueError, match=r"pairs has shape \(2, 8\); it must be \(.., B, 2\)"):
        join_argmax(logits)
