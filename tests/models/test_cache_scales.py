"""Scales of an fp8 KV cache in a checkpoint are those that keys and values are stored with."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import weft
from tests.against_transformers import FAMILIES, prompt, reference_logits, relative_rms
from weft.errors import CheckpointError
from weft.models import Decoder

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
MODELOPT = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
LAYERS = {0: (0.02, 0.5), 1: (0.25, 0.01)}  # scales of keys and of values


@pytest.fixture
def scaled(make_checkpoint, tmp_path):
    """scaled(quantization, tensors, **changes) -> a checkpoint with them, of two layers unless `changes` say more."""

    def make(quantization, tensors, **changes):
        directory, make.reference = make_checkpoint(**{"kv_heads": 2, "num_hidden_layers": 2} | changes)
        copied = shutil.copytree(directory, tmp_path / "scaled")
        path = copied / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
        index = json.loads((copied / "model.safetensors.index.json").read_text())
        shard = copied / index["weight_map"]["model.norm.weight"]
        save_file(load_file(shard) | tensors, shard)
        index["weight_map"] |= dict.fromkeys(tensors, shard.name)
        (copied / "model.safetensors.index.json").write_text(json.dumps(index))
        return copied

    return make  # its `reference`: of the weights alone


def named(key="k_scale", value="v_scale", dtype=torch.float32):
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor([scale], dtype=dtype)
        for layer, pair in LAYERS.items()
        for name, scale in zip((key, value), pair, strict=True)
    }


def run(team, directory, tokens, context_parallel, kv_cache_dtype):
    """(cache, logits) of a prompt in two parts: the second reads the first one's keys from the cache."""
    options = {"kv_cache_dtype": kv_cache_dtype, "context_parallel": context_parallel}
    model = Decoder.from_pretrained(directory, team, mode="replicated", fused=False, **options)
    cache, pages = model.new_cache(3, 64), torch.tensor([[2]], dtype=torch.int32)
    for before, end in ((0, 9), (9, tokens.shape[1])):
        logits = model(tokens[0, before:end], model.prefill_step([(before, end - before)], pages, 64), cache)
    return cache, model.lm_head.gather(logits)


@pytest.mark.parametrize(
    ("quantization", "tensors", "context_parallel"),
    [
        (COMPRESSED, named(dtype=torch.bfloat16), True),
        (MODELOPT, named("k_proj.k_scale", "v_proj.v_scale"), False),
    ],
    ids=["compressed-tensors", "modelopt"],
)
def test_keys_and_values_are_stored_with_the_scales(scaled, plain_ops, caplog, quantization, tensors, context_parallel):
    directory, tokens = scaled(quantization, tensors), prompt(1, 20)
    plain = weft.simulate(run, 2, args=(directory, tokens, context_parallel, "auto"))
    assert "scales of an fp8 KV cache, which only kv_cache_dtype='fp8' uses: model.layers.0" in caplog.text
    assert "does not use" not in caplog.text
    found = weft.simulate(run, 2, args=(directory, tokens, context_parallel, "fp8"))
    expected = torch.tensor([*LAYERS.values()]).to(next(iter(tensors.values())).dtype).float()
    for (cache, logits), (whole, _) in zip(found, plain, strict=True):
        assert torch.equal(cache.scales, expected)
        # Keys and values of layer 0 depend on no other layer's cache.
        for data, unscaled, scale in zip(cache.data[0], whole.data[0], expected[0], strict=True):
            assert torch.equal(data.float(), (unscaled / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float())
        assert relative_rms(logits[None], reference_logits(scaled.reference, tokens)[:, 9:]) <= 0.05


def test_gated_delta_nets_have_no_scales(scaled):
    """A cache counts layers with keys alone: of three the second."""
    tensors = {name: scale for name, scale in named().items() if ".1." in name}
    directory = scaled(COMPRESSED, tensors, **FAMILIES["qwen3.5"], num_hidden_layers=3)

    def main(team):
        return Decoder.from_pretrained(directory, team, kv_cache_dtype="fp8", fused=False).new_cache(2).scales

    assert torch.equal(weft.simulate(main, 1)[0], torch.tensor([LAYERS[1]]))


def changed(**changes):
    return COMPRESSED | {"kv_cache_scheme": SCHEME | changes}


@pytest.mark.parametrize(
    ("quantization", "tensors", "message"),
    [
        (
            COMPRESSED,
            {"model.layers.0.self_attn.k_scale": torch.ones(2)},
            "tensor model.layers.0.self_attn.v_scale is miss",
        ),
        (
            COMPRESSED,
            named() | {"model.layers.1.self_attn.v_scale": torch.ones(2)},
            r"v_scale has shape \(2,\); weft takes",
        ),
        (COMPRESSED, named() | {"model.layers.1.self_attn.k_scale": torch.zeros(1)}, "k_scale is 0.0, not a positive"),
        (changed(strategy="attn_head"), {}, "kv_cache_scheme with strategy='attn_head' is not supported"),
        (changed(dynamic=True), {}, "kv_cache_scheme with dynamic=True is not supported"),
        (changed(type="int"), {}, "kv_cache_scheme with type='int' is not supported"),
        (COMPRESSED | {"config_groups": {"group_0": {}}}, {}, "weights=None is not supported"),
        (MODELOPT | {"kv_cache_quant_algo": "NVFP4"}, {}, "kv_cache_quant_algo='NVFP4' is not supported"),
    ],
)
def test_other_scales_and_quantized_weights_are_refused(scaled, quantization, tensors, message):
    directory = scaled(quantization, tensors)
    with pytest.raises(CheckpointError, match=message):
        weft.simulate(lambda team: Decoder.from_pretrained(directory, team, kv_cache_dtype="fp8", fused=False), 1)
