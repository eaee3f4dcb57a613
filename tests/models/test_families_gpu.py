"""Models in bf16 on GPUs against transformers in fp32, teacher-forced, fused and unfused."""

import pytest
import torch

import weft
from tests.against_transformers import FAMILIES, prompt, reference_logits, relative_rms
from tests.teacher_forced import in_three_ways
from weft.models import Decoder

TOLERANCE = (
    0.05  # relative RMS of the logits; bf16's own noise at these weights is about 0.024, and less without q/k norms
)
CASES = [
    *(("qwen3", world_size) for world_size in (1, 2, 4)),
    *((name, 2) for name in ("llama-3", "qwen2.5-window", "mistral", "qwen3-yarn", "qwen3-window", "seed-oss")),
]
FORMS = [("torch", False), ("gemm_ar", False), ("gemm_ar", True), ("ag_rs", False), ("ag_rs", True), ("auto", True)]


def teacher_forced(team, directory, mode, fused, tokens):
    model = Decoder.from_pretrained(directory, team, mode=mode, dtype=torch.bfloat16, fused=fused)
    return in_three_ways(model, tokens, cuts=(17, 18))


def in_all_forms(team, directory, tokens):
    """By form. Without torch's collectives where ranks share a GPU: NCCL refuses them."""
    shared = torch.distributed.get_backend(team.group) == "gloo"
    return {
        form: teacher_forced(team, directory, *form, tokens) for form in FORMS if not (shared and form[0] == "torch")
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "world_size"), [pytest.param(*case, marks=pytest.mark.gpu(case[1])) for case in CASES]
)
def test_bf16_logits_are_those_of_transformers_up_to_its_noise(make_checkpoint, name, world_size):
    directory, reference = make_checkpoint(**FAMILIES.get(name, {}))
    tokens = prompt(3, 40)
    expected = reference_logits(reference, tokens)
    by_rank = weft.launch(in_all_forms, world_size, "cuda", args=(directory, tokens))
    for form, of_rank_0 in by_rank[0].items():
        for way, found in zip(("at once", "in chunks", "by decoding"), of_rank_0, strict=True):
            assert relative_rms(found, expected) <= TOLERANCE, (form, way)
        for other in by_rank:
            assert all(map(torch.equal, other[form], of_rank_0)), form
