"""Families with other norms, activations, multipliers and soft caps: their config.json, bfloat16, and the engine."""

import copy

import pytest
import torch

import weft
from tests.against_transformers import FAMILIES, check_engine, prompt, reference_logits, relative_rms
from tests.teacher_forced import all_logits
from weft.errors import CheckpointError
from weft.models import Decoder, DecoderConfig
from weft.parallel.tensors import NormWeights

SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 13, "num_attention_heads": 16,
}  # fmt: skip
TYPES = ["sliding_attention", "full_attention", "full_attention", *["sliding_attention"] * 10]
LINEAR = {"rope_type": "linear", "factor": 8.0}
BY_TYPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 70.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
}
# By transformers' class.
ACTIVATIONS = {
    "SiLUActivation": "silu", "GELUTanh": "gelu_tanh", "ReLUSquaredActivation": "relu2", "XIELUActivation": "xielu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *((name, {}) for name in ("granite", "olmo2", "olmo3", "gemma2", "gemma3_text")),
        ("granite", {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-5}),
        ("granite", {"attention_multiplier": 0.015625, "logits_scaling": 8, "rope_theta": 1e7}),
        ("granite", {"head_dim": 10, "num_key_value_heads": 4, "tie_word_embeddings": True}),
        ("olmo2", {"num_key_value_heads": 4, "rope_theta": 70.0, "rms_norm_eps": 1e-6}),
        ("olmo3", {"layer_types": TYPES, "sliding_window": 7, "num_key_value_heads": 4}),
        ("olmo3", {"rope_parameters": BY_TYPE}),
        ("olmo3", {"rope_theta": 70.0, "rope_scaling": LINEAR}),
        ("gemma2", {"layer_types": TYPES, "sliding_window": 7, "query_pre_attn_scalar": 144}),
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False}),
        ("gemma2", {"head_dim": 16, "num_key_value_heads": 2, "rope_theta": 70.0}),
        ("gemma3_text", {"layer_types": TYPES, "query_pre_attn_scalar": 168, "final_logit_softcapping": 20.0}),
        ("gemma3_text", {"rope_theta": 70.0, "rope_local_base_freq": 30.0, "rope_scaling": LINEAR}),
        ("gemma3_text", {"rope_parameters": BY_TYPE, "sliding_window": 7}),
        ("gemma", {}),
        ("gemma", {"hidden_act": "gelu", "num_key_value_heads": 1, "head_dim": 16, "rope_theta": 70.0}),
        ("hyperclovax", {"use_post_norm": False, "attention_multiplier": 0.5, "residual_multiplier": 0.22}),
        ("vaultgemma", {"layer_types": TYPES, "sliding_window": 7, "query_pre_attn_scalar": 144, "head_dim": 16}),
        ("hyperclovax", {"use_post_norm": False, "embedding_multiplier": 10.0}),
        *((name, {"num_key_value_heads": 4}) for name in ("arcee", "apertus")),
        ("arcee", {"rope_theta": 70.0, "rope_scaling": LINEAR, "tie_word_embeddings": True}),
        ("apertus", {"rope_theta": 5e5, "rope_scaling": None}),
        ("apertus", {"rope_theta": 70.0, "rope_scaling": LINEAR}),
        ("gemma3_text", {"sliding_window_pattern": 4, "attn_logit_softcapping": 50.0}),
    ],
    ids=str,
)
def test_a_config_means_what_it_means_to_transformers(model_type, changes):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(model_type, **SMALL | copy.deepcopy(changes))
    config = DecoderConfig.from_dict({"model_type": model_type} | SMALL | changes)
    model = transformers.AutoModelForCausalLM.from_config(theirs)
    for key in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings"):
        assert getattr(config, key) == getattr(theirs, key), key
    block, inner = config.block, model.model
    scale = getattr(inner, "embedding_multiplier", getattr(inner.embed_tokens, "scalar_embed_scale", 1.0))
    assert (block.embedding_scale or 1.0) == scale
    assert block.embedding_scale_rounded == hasattr(inner.embed_tokens, "scalar_embed_scale")
    assert (block.logits_divisor or 1.0) == getattr(theirs, "logits_scaling", 1.0)
    assert block.logits_softcap == getattr(theirs, "final_logit_softcapping", None)
    for index, layer in enumerate(inner.layers):
        check_layer(config, index, layer)
        frequencies = config.rotary_of(index).frequencies(config.head_dim, torch.device("cpu"))
        assert_rotary(frequencies, inner.rotary_emb, theirs, index)


def check_layer(config, index, layer):
    attention, block = layer.self_attn, config.block
    assert config.head_dim == attention.head_dim
    assert config.attention.window(index) == getattr(attention, "sliding_window", None)
    scale = config.head_dim**-0.5 if config.attention.scale is None else config.attention.scale
    assert scale == pytest.approx(attention.scaling)
    # Gemma 3 has the key, and does not read it.
    softcap = None if config.model_type == "gemma3_text" else getattr(attention, "attn_logit_softcapping", None)
    assert config.attention.softcap == softcap
    assert config.attention.qk_norm == hasattr(attention, "q_norm")
    if config.attention.qk_norm:
        assert config.attention.norm_all_heads == (len(attention.k_norm.weight) > config.head_dim)
    names = config.family.weights
    for name, there in (
        ("input_norm", block.norms_before),
        ("post_norm", block.norms_before),
        ("attention_out_norm", block.norms_after),
        ("mlp_out_norm", block.norms_after),
    ):
        assert not there or hasattr(layer, getattr(names, name)), name
    norms = [name for name, _ in layer.named_children() if name.endswith("layernorm")]
    assert len(norms) == 2 * (block.norms_before + block.norms_after)
    assert block.activation == ACTIVATIONS[type(layer.mlp.act_fn).__name__]
    assert block.gated == hasattr(layer.mlp, "gate_proj")
    assert (block.residual_scale or 1.0) == getattr(layer, "residual_multiplier", 1.0)


def assert_rotary(found, rotary, theirs, index):
    """Frequencies and attention factor of a layer are those of transformers."""
    kind = theirs.layer_types[index] + "_" if hasattr(rotary, "full_attention_inv_freq") else ""
    assert torch.equal(found[0], getattr(rotary, f"{kind}inv_freq"))
    assert found[1] == getattr(rotary, f"{kind}attention_scaling")


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("granite", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier=0 is not a positive number"),
        ("granite", {"logits_scaling": None}, "logits_scaling=None is not a positive number"),
        ("granite", {"attention_multiplier": "1"}, "attention_multiplier='1' is not a positive number"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0 is a key that weft does not know"),
        ("olmo2", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("arcee", {"hidden_act": "silu"}, "hidden_act='silu' is not supported; weft runs Arcee with 'relu2'"),
        ("apertus", {"qk_norm": False}, "qk_norm=False is not supported; weft runs Apertus with True"),
        ("olmo3", {"sliding_window": None}, r"layer_types\[0\]='sliding_attention' has no window"),
        ("olmo3", {"layer_types": ["full_attention"]}, "is not a list of num_hidden_layers=13"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation='silu' is not supported"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping=-1.0 is not a positive number"),
        ("gemma2", {"attn_logit_softcapping": True}, "attn_logit_softcapping=True is not a positive number"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0 is not a positive integer"),
        ("gemma3_text", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar=None is not a positive number"),
    ],
    ids=str,
)
def test_keys_that_a_family_does_not_run_are_refused_by_name(model_type, changes, message):
    with pytest.raises(CheckpointError, match="^config.json: .*" + message):
        DecoderConfig.from_dict({"model_type": model_type} | SMALL | changes)


NAMES = ("granite", "olmo2", "olmo3", "gemma2", "gemma3")


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_rounds_as_transformers_does(make_checkpoint, name):
    """A multiplier in another place, or rounded otherwise, is beyond this."""
    directory, reference = make_checkpoint(**FAMILIES[name])
    tokens = prompt(3, 9)
    exact, rounded = reference_logits(reference, tokens), copy.deepcopy(reference).to(torch.bfloat16)
    noise = relative_rms(reference_logits(rounded, tokens), exact)

    def main(team):
        model = Decoder.from_pretrained(directory, team, mode="reference", dtype=torch.bfloat16)
        return all_logits(model, tokens)

    [logits] = weft.simulate(main, 1)
    assert 0.005 < noise < 0.05
    assert relative_rms(logits, exact) < 1.2 * noise
    assert relative_rms(logits, reference_logits(rounded, tokens).float()) < 1.2 * noise


def test_norms_by_one_plus_a_weight_keep_its_bits(make_checkpoint):
    """1 + w in bfloat16 would lose half of them."""
    directory, reference = make_checkpoint(**FAMILIES["gemma3"])

    def main(team):
        model = Decoder.from_pretrained(directory, team, mode="reference", dtype=torch.bfloat16)
        return NormWeights.of(model.norm).weight, model.layers[0].self_attn.weights.k_norm

    [(norm, k_norm)] = weft.simulate(main, 1)
    assert torch.equal(norm, 1 + reference.model.norm.weight)
    assert torch.equal(k_norm, 1 + reference.model.layers[0].self_attn.k_norm.weight)


@pytest.mark.parametrize(
    ("name", "world_size", "options"),
    [
        ("granite", 2, {"mode": "sequence_parallel"}),
        ("olmo3", 2, {"mode": "replicated"}),
        ("gemma2", 4, {"mode": "replicated", "pipeline_parallel": 2}),
        ("gemma3", 2, {"mode": "reference", "pipeline_parallel": 2}),
    ],
)
def test_an_engine_answers_as_transformers_does(make_checkpoint, plain_ops, name, world_size, options):
    check_engine(make_checkpoint(**FAMILIES[name]), world_size, options)


@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
def test_quantized_matrices_beside_these_options(make_checkpoint, plain_ops, name):
    """Norms and scales stay as they are: the recipes agree."""
    directory, _ = make_checkpoint(**FAMILIES[name], hidden_size=64, intermediate_size=128)
    tokens = prompt(2, 7)

    def main(team, mode, quantization):
        model = Decoder.from_pretrained(directory, team, mode=mode, quantization=quantization)
        return all_logits(model, tokens)

    [whole], [quantized] = (weft.simulate(main, 1, args=("reference", form)) for form in (None, "fp8"))
    assert 0.001 < relative_rms(quantized, whole) < 0.2
