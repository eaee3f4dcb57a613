"""What checkpoints in 8 and 4 bits share: their files, and how matrices are cut over ranks."""

import json

import torch
from safetensors.torch import save_file

from tests.against_transformers import greedy
from tests.teacher_forced import all_logits
from weft.models import Decoder


def save(directory, source, tensors, quantization):
    """The checkpoint of ``source`` with these tensors and quantization_config."""
    for file in source.glob("*.json"):
        if "index" not in file.name:
            (directory / file.name).write_text(file.read_text())
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")


def heads_of(world_size):
    """Changes of a config whose heads ``world_size`` divides."""
    return {"num_attention_heads": 6, "kv_heads": 3} if world_size == 3 else {"kv_heads": 2}


def made_once(make_checkpoint, tmp_path_factory, sizes, write):
    """made(format, family, world_size, ...) -> (directory, source, transformers' model of 16 bits, tensors by ``write``)"""
    found = {}

    def make(name, family="Qwen3", world_size=1, **changes):
        key = name, family, world_size == 3, str(sorted(changes.items()))
        if key not in found:
            source, model = make_checkpoint(family, **sizes | heads_of(world_size) | changes)
            directory = tmp_path_factory.mktemp(name)
            found[key] = directory, source, model, write(directory, source, name)
        return found[key]

    return make


def content_of(quantization):
    """config.json of a model with this quantization_config."""
    return {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 4096, "intermediate_size": 8192,
        "num_hidden_layers": 2, "num_attention_heads": 32, "dtype": "bfloat16", "quantization_config": quantization,
    }  # fmt: skip


def answers(team, directory, mode, tokens, steps, fused, options):
    model = Decoder.from_pretrained(directory, team, mode=mode, fused=fused, **options)
    return all_logits(model, tokens), greedy(model, tokens.tolist(), steps)


def matrices_of(team, directory, dtype, options):
    """Dequantized matrices of this rank's layers, stored in ``dtype``, by name: qkv, o, gate_up, down."""
    model = Decoder.from_pretrained(directory, team, mode="reference", fused=False, **options)
    read = {}
    for index, layer in enumerate(model.layers):
        weights = layer.weights
        for name, matrix in {**weights.attention._asdict(), **weights.mlp._asdict()}.items():
            if name in ("qkv", "o", "gate_up", "down"):
                assert matrix.data.dtype == dtype and matrix.data.is_contiguous()
                read[index, name] = matrix.dequantized(torch.float32)
    return read


def check_cut(alone, ranks, head_dim):
    """AssertionError unless the ranks' matrices are, bit for bit, parts of one rank's."""
    world_size = len(ranks)
    heads, kv_heads = (6, 3) if world_size == 3 else (8, 2)
    for (layer, name), whole in alone.items():
        parts = [rank[layer, name] for rank in ranks]
        if name in ("o", "down"):
            joined = torch.cat(parts, 1)
        elif name == "gate_up":
            joined = torch.cat([torch.cat(half) for half in zip(*(part.chunk(2) for part in parts), strict=True)])
        else:
            local = max(kv_heads // world_size, 1) * head_dim
            per_rank = [part.split([heads // world_size * head_dim, local, local]) for part in parts]
            q, k, v = (torch.cat(of_ranks) for of_ranks in zip(*per_rank, strict=True))
            # Ranks that share a KV head hold the same.
            shared = max(world_size // kv_heads, 1)
            k, v = (x.view(-1, shared, head_dim, x.shape[1])[:, 0].flatten(0, 1) for x in (k, v))
            joined = torch.cat((q, k, v))
        assert torch.equal(joined, whole), (layer, name)
