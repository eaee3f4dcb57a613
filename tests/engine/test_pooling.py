"""Vectors of prompts are the same by chunks and at once, in every recipe, over stages, and of a model without its head."""

import shutil

import numpy
import pytest

import weft
from weft.engine import SamplingParams
from weft.models.builtin import PATH
from weft.serve.embeddings import unit_vector

TEXT = "99+1=" * 6
PARAMS = [SamplingParams(max_tokens=1, pooling=pooling) for pooling in ("mean", "last")]
CASES = {
    "one pass": {"mode": "reference"},
    "chunks": {"mode": "reference", "chunk_tokens": 8, "prefix_caching": False},
    "stages": {"mode": "reference", "pipeline_parallel": 2, "microbatch_tokens": 8},
    "replicated": {"mode": "replicated"},
    "sequence_parallel": {"mode": "sequence_parallel"},
}


def vectors(**options):
    """Of TEXT, which comes twice, and of a shorter prompt between."""
    with weft.LLM(None, 2, device="sim", page_size=16, **options) as llm:
        answers = llm.generate([TEXT, "1+1=", TEXT] * 2, [one for one in PARAMS for _ in range(3)])
    assert all(answer.embedding is not None and len(answer.token_ids) == 1 for answer in answers)
    return [unit_vector(answer.embedding) for answer in answers]


@pytest.fixture(scope="module")
def expected():
    return vectors(**CASES["one pass"])


@pytest.mark.parametrize("case", [name for name in CASES if name != "one pass"])
def test_all_ways_to_read_a_prompt_give_its_vectors(expected, case):
    for one, other in zip(vectors(**CASES[case]), expected, strict=True):
        assert numpy.dot(one, other) > 0.999


def test_the_two_poolings_differ_and_equal_prompts_do_not(expected):
    mean, _, again, last, _, _ = expected
    assert numpy.dot(mean, again) > 0.999 and numpy.dot(mean, last) < 0.99


def test_requests_without_pooling_have_no_vector_and_drafts_refuse_it():
    with weft.LLM(None, 1, device="sim", mode="reference") as llm:
        assert llm.generate("1+1=")[0].embedding is None
    with pytest.raises(ValueError, match="pooling='cls' is not one of"):
        SamplingParams(pooling="cls")
    speculative = {"method": "ngram", "num_speculative_tokens": 2}
    drafting = weft.LLM(None, 1, device="sim", mode="reference", speculative=speculative)
    with drafting as llm, pytest.raises(ValueError, match="pooling='last': an engine that drafts tokens gives no vec"):
        llm.generate("1+1=", PARAMS[1])


def test_a_model_that_was_saved_without_its_head_is_read(tmp_path):
    """As embedding models are saved: names without `model.`, and no head."""
    from safetensors.torch import load_file, save_file

    import weft
    from weft.engine import SamplingParams

    whole, bare = PATH, tmp_path / "bare"
    shutil.copytree(whole, bare)
    tensors = load_file(whole / "model.safetensors")
    save_file(
        {name.removeprefix("model."): x for name, x in tensors.items() if name != "lm_head.weight"},
        bare / "model.safetensors",
    )
    params = SamplingParams(max_tokens=1, pooling="last")
    vectors = []
    for directory in (whole, bare):
        with weft.LLM(directory, 1, device="sim", mode="reference") as llm:
            vectors.append(llm.generate("12+34=", params)[0].embedding)
    assert vectors[0] == vectors[1]
