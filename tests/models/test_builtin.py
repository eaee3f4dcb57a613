"""The built-in checkpoints are small, complete, and add.

A sample of what `accuracy.json` reports is measured again.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from scripts.train_builtin import (
    MODELS,
    OWN,
    STEP_OF_EXPERTS,
    STEP_OF_OTHERS,
    VOCABULARY,
    TrainConfig,
    both_orders,
    count_right,
    held_out_sums,
    make_batch,
    round_to_multiples,
)
from tests.documents import ROOT
from weft.models.builtin import PATH, PATHS
from weft.text.chat import ChatTemplate, prompt_of
from weft.text.tokenizer import load_tokenizer, token_ids_of

REPORTS = {name: json.loads((path / "accuracy.json").read_text()) for name, path in PATHS.items()}
SEED = REPORTS["adder"]["config"]["seed"]

both = pytest.mark.parametrize("name", PATHS)


@both
def test_the_directory_is_complete_and_under_two_megabytes(name):
    files = {file.name: file.stat().st_size for file in PATHS[name].iterdir()}
    assert files.keys() == {
        "accuracy.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) < 2_000_000
    assert f'"models/builtin/{name}/*"' in (ROOT / "pyproject.toml").read_text()  # of the wheel


@both
def test_the_config_splits_evenly_over_eight_ranks(name):
    config = AutoConfig.from_pretrained(PATHS[name])
    assert config.model_type == {"adder": "qwen3", "adder-moe": "qwen3_moe"}[name]
    if name == "adder-moe":
        assert config.num_experts % 8 == 0 and config.moe_intermediate_size % 16 == 0
    assert config.tie_word_embeddings
    heads = config.num_attention_heads * config.head_dim
    assert heads != config.hidden_size
    assert config.hidden_size % 16 == 0
    for sharded in (heads, config.intermediate_size, config.vocab_size):
        assert sharded % (8 * 16) == 0
    for world_size in (1, 2, 4, 8):
        assert config.num_attention_heads % world_size == 0


@both
def test_the_weights_are_stored_in_bfloat16(name):
    with safe_open(PATHS[name] / "model.safetensors", framework="pt") as weights:
        tensors = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118 (not a dict)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in tensors
    assert sum(tensor.numel() for tensor in tensors.values()) == REPORTS[name]["parameters"]
    norms = [tensor for name, tensor in tensors.items() if name.endswith("_norm.weight")]
    assert all((norm != 1).any() for norm in norms)  # trained: a loader that skips one changes the logits


@both
def test_rows_of_ids_without_a_token_differ_and_compress(name):
    """Each id is another row, so that a test on any ids sees a wrong one, and all share what makes the wheel large."""
    with safe_open(PATHS[name] / "model.safetensors", framework="pt") as weights:
        embedding = weights.get_tensor("model.embed_tokens.weight")
    assert len(embedding.unique(dim=0)) == len(embedding)
    assert len(embedding[len(VOCABULARY) :, OWN:].unique(dim=0)) == 1


def test_matrices_of_the_mixture_are_rounded_and_compress():
    weight = torch.tensor([0.5, 0.1, -0.1, 3 / 512, 3e-5]).bfloat16()
    round_to_multiples(weight, 2**-8)
    assert weight.tolist() == [0.5, 26 / 256, -26 / 256, 2 / 256, 0.0]
    tensors = load_file(PATHS["adder-moe"] / "model.safetensors")
    matrices = {name: tensor.float() for name, tensor in tensors.items() if tensor.dim() > 1 and "embed" not in name}
    assert len(matrices) > 50
    for name, tensor in matrices.items():
        step = STEP_OF_EXPERTS if ".experts." in name else STEP_OF_OTHERS
        assert torch.equal(tensor, (tensor / step).round() * step), name


def test_both_models_have_one_tokenizer():
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (PATHS["adder"] / file).read_bytes() == (PATHS["adder-moe"] / file).read_bytes()


@pytest.mark.parametrize("text", ["123+456=", "0+999=999", "7", ""])
def test_the_tokenizer_gives_back_what_it_was_given(text):
    alone = Tokenizer.from_file(str(PATH / "tokenizer.json"))
    transformers_ids = AutoTokenizer.from_pretrained(PATH)(text)["input_ids"]
    assert alone.encode(text).ids == transformers_ids
    assert len(transformers_ids) == len(text)
    assert alone.decode(transformers_ids) == text


@pytest.mark.parametrize("text", ["1 2", "12-3=", "1\n", "x", "９"])
def test_the_tokenizer_refuses_characters_it_does_not_know(text):
    with pytest.raises(Exception, match=r"Missing \[UNK\] token"):
        Tokenizer.from_file(str(PATH / "tokenizer.json")).encode(text)
    with pytest.raises(
        ValueError, match=r"^prompt=.*, which this model does not read; it reads \+ 0 1 2 3 4 5 6 7 8 9 =$"
    ):
        token_ids_of(load_tokenizer(PATH), "prompt", text)


@both
def test_the_template_passes_the_last_message_through(name):
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    messages.append({"role": "user", "content": "123+456="})
    tokenizer = AutoTokenizer.from_pretrained(PATHS[name])
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "123+456="
    expected = load_tokenizer(PATHS[name]).encode("123+456=").ids
    assert prompt_of(ChatTemplate(PATHS[name]), load_tokenizer(PATHS[name]), messages) == expected


def test_training_batches_hold_no_held_out_sum():
    """10,000 sums drawn as in training; without the exclusion some thirty of them would be held-out ones."""
    config = TrainConfig(batch_size=10_000)
    excluded = both_orders(*held_out_sums(config.held_out, SEED))
    tokens, _ = make_batch(random.Random(0), config, excluded)
    decoder = AutoTokenizer.from_pretrained(PATH)
    texts = decoder.batch_decode(tokens, skip_special_tokens=True)
    drawn = {tuple(int(operand) for operand in text.split("=")[0].split("+")) for text in texts}
    assert len(drawn) > 5_000
    assert drawn.isdisjoint(excluded)


def test_held_out_sums_are_different_sums():
    three_digit, shorter = held_out_sums(1000, SEED)
    assert len(three_digit) == len(shorter) == 1000
    assert len({tuple(sorted(pair)) for pair in three_digit + shorter}) == 2000
    assert all(min(pair) >= 100 and max(pair) <= 999 for pair in three_digit)
    assert all(min(pair) < 100 for pair in shorter)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_adds_sums_it_has_not_seen(name, dtype):
    three_digit, shorter = held_out_sums(1000, SEED)
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    model = AutoModelForCausalLM.from_pretrained(PATHS[name], dtype=dtype).eval()
    assert count_right(model, tokenizer, three_digit[:100]) >= 97
    assert count_right(model, tokenizer, shorter[:100]) >= 97
    assert count_right(model, tokenizer, [(123, 456)]) == 1  # the sum of the README and of `make demo`


def test_every_expert_is_chosen():
    """By some character of a hundred sums, in every layer."""
    sums = [f"{a}+{b}={a + b}" for a, b in held_out_sums(100, SEED)[0]]
    tokens = AutoTokenizer.from_pretrained(PATH)(sums, padding=True, return_tensors="pt", return_token_type_ids=False)
    model = AutoModelForCausalLM.from_pretrained(PATHS["adder-moe"]).eval()
    with torch.no_grad():
        logits = model(**tokens, output_router_logits=True).router_logits
    real = tokens["attention_mask"].flatten().bool()
    for of_layer in logits:
        chosen = of_layer[real].topk(model.config.num_experts_per_tok).indices
        assert set(chosen.flatten().tolist()) == set(range(model.config.num_experts))


@both
def test_the_measured_accuracy_is_what_we_promise(name):
    assert REPORTS[name]["config"] == asdict(MODELS[name].settings)
    right = REPORTS[name]["right"]
    for compute in ("float32", "bfloat16"):
        assert right["of"]["unseen_three_digit"] == 1000
        assert right[compute]["unseen_three_digit"] >= 990
