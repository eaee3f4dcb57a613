"""Qwen3 in bf16 on GPUs against transformers in fp32, teacher-forced, fused and unfused."""

import pytest
import torch

import weft
from tests.teacher_forced import all_logits
from weft.models import Qwen3ForCausalLM

TOLERANCE = 0.05  # relative RMS of the logits; bf16's own noise at these weights is about 0.024
WORLD_SIZES = [pytest.param(world_size, marks=pytest.mark.gpu(world_size)) for world_size in (1, 2, 4)]


def prompt(batch, length):
    return torch.randint(257, (batch, length), generator=torch.Generator().manual_seed(0))


def teacher_forced(team, directory, mode, fused, tokens):
    """All logits [batch, length, V]: by one prefill, by chunks, by decoding after a prefill of two tokens."""
    model = Qwen3ForCausalLM.from_pretrained(directory, team, mode=mode, dtype=torch.bfloat16, fused=fused)
    tokens = tokens.to(team.device)
    batch, length = tokens.shape
    # Pages in no order.
    table = (1 + torch.randperm(batch * 8, generator=torch.Generator().manual_seed(0))).view(batch, 8)
    table = table.to(torch.int32).to(team.device)

    def gathered(part, step, cache):
        return model.lm_head.gather(model(part.flatten(), step, cache)).view(*part.shape, -1)

    def prefill(before, end, cache):
        return gathered(tokens[:, before:end], model.prefill_step([(before, end - before)] * batch, table, 16), cache)

    def new_cache():
        return model.new_cache(1 + batch * 8, 16)

    cache = new_cache()
    in_chunks = [prefill(before, end, cache) for before, end in ((0, 17), (17, 18), (18, length))]
    cache = new_cache()
    decoded = [prefill(0, 2, cache)]
    for at in range(2, length):
        step = model.decode_step(torch.full((batch,), at, device=team.device), table, 16)
        decoded.append(gathered(tokens[:, at : at + 1], step, cache))
    return [found.cpu() for found in (all_logits(model, tokens), torch.cat(in_chunks, 1), torch.cat(decoded, 1))]


def relative_rms(found, expected):
    return ((found - expected).square().mean() / expected.square().mean()).sqrt().item()


FORMS = [("torch", False), ("gemm_ar", False), ("gemm_ar", True), ("ag_rs", False), ("ag_rs", True), ("auto", True)]


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
