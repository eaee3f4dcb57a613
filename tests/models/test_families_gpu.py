"""Models in bf16 on GPUs against transformers in fp32, teacher-forced, fused and unfused; the built-in one with experts."""

import pytest
import torch

import weft
from tests.against_transformers import (
    FAMILIES,
    prompt,
    prompt_without_ties,
    reference_logits,
    relative_rms,
    router_gaps,
)
from tests.teacher_forced import in_three_ways
from weft.engine import Engine
from weft.models import Decoder

TOLERANCE = (
    0.05  # relative RMS of the logits; bf16's own noise at these weights is about 0.024, and less without q/k norms
)
CASES = [
    *(("qwen3", world_size) for world_size in (1, 2, 4)),
    *((name, 2) for name in ("llama-3", "qwen2.5-window", "mistral", "qwen3-yarn", "qwen3-window", "seed-oss")),
    *((name, 2) for name in ("hunyuan-plain", "arcee", "apertus")),
]
# Of prompts without ties; bf16 moves their router logits by up to 0.03, qwen2-moe's by 0.15 of a least gap of 0.46.
GAP = 0.2
EXPERT_CASES = [*(("qwen3-moe", world_size) for world_size in (1, 2, 4)), ("mixtral", 2), ("qwen2-moe", 2)]
FORMS = [("torch", False), ("gemm_ar", False), ("gemm_ar", True), ("ag_rs", False), ("ag_rs", True), ("auto", True)]
# Families with further blocks, in weft's kernels alone.
FUSED = [("gemm_ar", True), ("ag_rs", True)]
BLOCKS = ("gemma2", "gemma3", "olmo2", "olmo3", "granite", "smollm3", "phi3", "phi3-long", "glm4", "youtu", "qwen3.5")
EXPERT_BLOCKS = ("olmoe", "granitemoe", "glm4-moe", "gpt-oss", "deepseek-v2-lite", "deepseek-v3")
STATE_BLOCKS = ("qwen3-next", "qwen3.5-moe")
# Of larger weights gated delta nets have more noise in bf16, 0.14 at 0.15; beside larger ones gpt-oss's biases hardly count.
WEIGHTS = {**dict.fromkeys(("qwen3.5", *STATE_BLOCKS), 0.07), "gpt-oss": 0.1}

# Tokens that are tried at each place, where 64 leave a router near a tie.
CANDIDATES = {"gpt-oss": 160}


def teacher_forced(team, directory, mode, fused, tokens):
    model = Decoder.from_pretrained(directory, team, mode=mode, dtype=torch.bfloat16, fused=fused)
    cut = tokens.shape[1] * 3 // 7
    return in_three_ways(model, tokens, cuts=(cut, cut + 1))


def in_forms(team, directory, tokens, forms):
    """By form. Without torch's collectives where ranks share a GPU: NCCL refuses them."""
    shared = torch.distributed.get_backend(team.group) == "gloo"
    return {
        form: teacher_forced(team, directory, *form, tokens) for form in forms if not (shared and form[0] == "torch")
    }


@pytest.mark.parametrize(
    ("name", "world_size"), [pytest.param(*case, marks=pytest.mark.gpu(case[1])) for case in CASES]
)
def test_bf16_logits_are_those_of_transformers_up_to_its_noise(make_checkpoint, name, world_size):
    directory, reference = make_checkpoint(**FAMILIES.get(name, {}))
    check(directory, reference, prompt(3, 40), world_size)


@pytest.mark.parametrize(
    ("name", "world_size"), [pytest.param(*case, marks=pytest.mark.gpu(case[1])) for case in EXPERT_CASES]
)
def test_bf16_logits_of_experts_are_those_of_transformers_where_no_router_is_near_a_tie(
    make_checkpoint, name, world_size
):
    directory, reference = make_checkpoint(**FAMILIES[name])
    tokens = prompt_without_ties(reference, 3, 40)
    assert router_gaps(reference, tokens).min() > GAP
    check(directory, reference, tokens, world_size)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", BLOCKS)
def test_bf16_logits_of_further_blocks_are_those_of_transformers_up_to_its_noise(make_checkpoint, name):
    directory, reference = checkpoint_of(make_checkpoint, name)
    check(directory, reference, prompt(3, 24), 2, FUSED)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", EXPERT_BLOCKS)
def test_bf16_logits_of_further_experts_are_those_of_transformers(make_checkpoint, name):
    directory, reference = checkpoint_of(make_checkpoint, name)
    tokens = prompt_without_ties(reference, 2, 24, CANDIDATES.get(name, 64))
    assert router_gaps(reference, tokens).min() > GAP
    check(directory, reference, tokens, 2, FUSED)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", STATE_BLOCKS)
def test_bf16_logits_of_delta_nets_with_experts_are_those_of_transformers(make_checkpoint, name):
    """One short prompt: transformers computes 64 tokens for each candidate."""
    directory, reference = checkpoint_of(make_checkpoint, name)
    tokens = prompt_without_ties(reference, 1, 12, candidates=48)
    assert router_gaps(reference, tokens).min() > GAP
    check(directory, reference, tokens, 2, FUSED)


def checkpoint_of(make_checkpoint, name):
    changes = {"initializer_range": WEIGHTS[name]} if name in WEIGHTS else {}
    return make_checkpoint(**FAMILIES[name] | changes)


def check(directory, reference, tokens, world_size, forms=FORMS):
    expected = reference_logits(reference, tokens)
    by_rank = weft.launch(in_forms, world_size, "cuda", args=(directory, tokens, forms))
    for form, of_rank_0 in by_rank[0].items():
        for way, found in zip(("at once", "in chunks", "by decoding"), of_rank_0, strict=True):
            assert relative_rms(found, expected) <= TOLERANCE, (form, way)
        for other in by_rank:
            assert all(map(torch.equal, other[form], of_rank_0)), form


def sums(team):
    """By (mode, fused, graph): the built-in experts' answers, 16 at once and one alone."""
    shared = torch.distributed.get_backend(team.group) == "gloo"
    found = {}
    for form in FORMS:
        for cuda_graph in (False,) if shared else (False, True):
            if not (shared and form[0] == "torch"):
                engine = Engine("adder-moe", team, mode=form[0], fused=form[1], cuda_graph=cuda_graph)
                batches = engine.generate(SUMS, max_tokens=6), engine.generate(SUMS[:1], max_tokens=6)
                found[(*form, cuda_graph)] = [answer.text for answers in batches for answer in answers]
    return found


SUMS = ["123+456=", *(f"{a}+{b}=" for a, b in zip(range(101, 1000, 63), range(998, 99, -61), strict=True))]


@pytest.mark.parametrize("world_size", [pytest.param(w, marks=pytest.mark.gpu(w)) for w in (1, 2, 4)])
def test_the_built_in_experts_add(world_size):
    right = [str(sum(map(int, text[:-1].split("+")))) for text in (*SUMS, SUMS[0])]
    for by_form in weft.launch(sums, world_size, "cuda"):
        for form, answers in by_form.items():
            assert answers == right, form
