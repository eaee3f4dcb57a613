"""Qwen3 in bf16 on GPUs against transformers in fp32, teacher-forced: by prefill, and token by token from the cache."""

import pytest
import torch

import weft
from weft.layers import MODES
from weft.models import Qwen3ForCausalLM

TOLERANCE = 0.05  # relative RMS of the logits; bf16's own noise at these weights is about 0.024
WORLD_SIZES = [pytest.param(world_size, marks=pytest.mark.gpu(world_size)) for world_size in (1, 2, 4)]


def prompt(batch, length):
    return torch.randint(257, (batch, length), generator=torch.Generator().manual_seed(0))


def teacher_forced(team, directory, mode, tokens):
    """All logits [batch, length, V] of a rank, by one prefill and by decoding after a prefill of two tokens."""
    model = Qwen3ForCausalLM.from_pretrained(directory, team, mode=mode, dtype=torch.bfloat16)
    tokens = tokens.to(team.device)
    batch, length = tokens.shape
    cache = model.new_cache(batch, 128)
    lengths = torch.full((batch,), 2, device=team.device)
    model.prefill(tokens[:, :2], lengths, cache)
    decoded = [model.decode(tokens[:, at], torch.full_like(lengths, at), cache) for at in range(2, length)]
    return model.logits(tokens).cpu(), torch.stack([model.lm_head.gather(logits) for logits in decoded], dim=1).cpu()


def relative_rms(found, expected):
    return ((found - expected).square().mean() / expected.square().mean()).sqrt().item()


def in_all_modes(team, directory, tokens):
    return {mode: teacher_forced(team, directory, mode, tokens) for mode in MODES}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bf16_logits_are_those_of_transformers_up_to_its_noise(make_checkpoint, world_size):
    directory, reference = make_checkpoint(kv_heads=2)
    tokens = prompt(3, 40)
    with torch.no_grad():
        expected = reference(tokens).logits
    by_rank = weft.launch(in_all_modes, world_size, "cuda", args=(directory, tokens))
    for mode in MODES:
        prefilled, decoded = by_rank[0][mode]
        assert relative_rms(prefilled, expected) <= TOLERANCE, mode
        assert relative_rms(decoded, expected[:, 2:]) <= TOLERANCE, mode
        for found in by_rank:
            assert torch.equal(found[mode][0], prefilled) and torch.equal(found[mode][1], decoded), mode
