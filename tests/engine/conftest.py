"""A random Qwen3 that reads and writes bytes: 256 tokens for them, and `<eos>`."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from weft.models import Qwen3Config, Qwen3ForCausalLM

CONFIG = {
    "model_type": "qwen3", "vocab_size": 257, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 50.0,
    "max_position_embeddings": 96, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory):
    """Its checkpoint directory."""
    directory = tmp_path_factory.mktemp("bytes")
    config = Qwen3Config.from_dict(CONFIG)
    # Only the shapes are wanted, so that GPU machines without the simulator can make it too.
    alone = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"), name="alone")
    model = Qwen3ForCausalLM(config, alone, mode="torch")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.rand(shard.shape, generator=generator) + 0.5
        if "norm" in name
        else torch.randn(shard.shape, generator=generator) * 0.2
        for name, shard in model.shards().items()
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [256]}))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def one_layer(byte_model, tmp_path_factory):
    """The byte model without its second layer: the simulator runs every row of every layer."""
    copied = shutil.copytree(byte_model, tmp_path_factory.mktemp("one_layer") / "copy")
    config = json.loads((copied / "config.json").read_text()) | {"num_hidden_layers": 1}
    (copied / "config.json").write_text(json.dumps(config))
    return copied
