"""Qwen3 in bf16 on GPUs against transformers in fp32, teacher-forced, fused and unfused."""

import pytest
import torch

import weft
from tests.against_transformers import prompt, relative_rms
from tests.teacher_forced import in_three_ways
from weft.models import Qwen3ForCausalLM

TOLERANCE = 0.05  # relative RMS of the logits; bf16's own noise at these weights is about 0.024
WORLD_SIZES = [pytest.param(world_size, marks=pytest.mark.gpu(world_size)) for world_size in (1, 2, 4)]
FORMS = [("torch", False), ("gemm_ar", False), ("gemm_ar", True), ("ag_rs", False), ("ag_rs", True), ("auto", True)]


def teacher_forced(team, directory, mode, fused, tokens):
    model = Qwen3ForCausalLM.from_pretrained(directory, team, mode=mode, dtype=torch.bfloat16, fused=fused)
    return in_three_ways(model, tokens, cuts=(17, 18))


def in_all_forms(team, directory, tokens):
    """By form. Without torch's collectives where ranks share a GPU: NCCL refuses them."""
    shared = torch.distributed.get_backend(team.group) == "gloo"
    return {
        form: teacher_forced(team, directory, *form, tokens) for form in FORMS if not (shared and form[0] == "torch")
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bf16_logits_are_those_of_transformers_up_to_its_noise(make_checkpoint, world_size):
    directory, reference = make_checkpoint(kv_heads=2)
    tokens = prompt(3, 40)
    with torch.no_grad():
        expected = reference(tokens).logits
    by_rank = weft.launch(in_all_forms, world_size, "cuda", args=(directory, tokens))
    for form, of_rank_0 in by_rank[0].items():
        for way, found in zip(("at once", "in chunks", "by decoding"), of_rank_0, strict=True):
            assert relative_rms(found, expected) <= TOLERANCE, (form, way)
        for other in by_rank:
            assert all(map(torch.equal, other[form], of_rank_0)), form
