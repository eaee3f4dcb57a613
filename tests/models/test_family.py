"""A family is a table: it reads config.json as transformers does, and refuses by name what weft does not run."""

import copy
import dataclasses

import pytest
import torch

import weft
from weft.errors import CheckpointError
from weft.models import Decoder, DecoderConfig, families
from weft.models.family import WeightNames
from weft.models.qwen3 import QWEN3

CONTENT = {
    "model_type": "qwen3", "vocab_size": 10, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def test_a_family_names_its_weights_and_its_defaults(monkeypatch):
    names = WeightNames(layers="transformer.h", attention="attn", norm="transformer.ln_f")
    other = dataclasses.replace(
        QWEN3,
        name="Other",
        model_type="other",
        architecture="OtherForCausalLM",
        weights=names,
        defaults={**QWEN3.defaults, "tie_word_embeddings": True},
    )
    monkeypatch.setitem(families.FAMILIES, "other", other)

    def names_of(content):
        made = DecoderConfig.from_dict(content)
        return weft.simulate(lambda team: [*Decoder(made, team, dtype=torch.float32).shards()], 1)[0]

    mine, theirs = names_of(CONTENT), names_of(CONTENT | {"model_type": "other"})
    renamed = [
        name.replace("model.layers", "transformer.h")
        .replace("self_attn", "attn")
        .replace("model.norm", "transformer.ln_f")
        for name in mine
    ]
    assert theirs == renamed[:-1] and mine[-1] == "lm_head.weight"  # a tied head
    with pytest.raises(ValueError, match="weft runs Other with 'silu'"):
        DecoderConfig.from_dict(CONTENT | {"model_type": "other", "hidden_act": "gelu"})


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.6), ("llama-3.2-1b", 1.24), ("llama-3.2-3b", 3.21),
        ("qwen2.5-0.5b", 0.494), ("qwen2.5-1.5b", 1.54), ("qwen2.5-3b", 3.09), ("qwen2.5-7b", 7.62), ("qwen2.5-14b", 14.8),
        ("qwen2.5-32b", 32.8), ("qwen2.5-72b", 72.7), ("mistral-7b", 7.24), ("mistral-7b-v0.3", 7.25), ("seed-oss-36b", 36.2),
        ("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.72), ("qwen3-4b", 4.02), ("qwen3-8b", 8.19), ("qwen3-14b", 14.8),
        ("qwen3-32b", 32.8), ("qwen3-30b-a3b", 30.5), ("qwen3-235b-a22b", 235), ("qwen1.5-moe-a2.7b", 14.3),
        ("qwen2-57b-a14b", 57.4), ("mixtral-8x7b", 46.7), ("mixtral-8x22b", 141), ("olmoe-1b-7b", 6.92),
        ("granite-3.1-3b-a800m", 3.3), ("glm-4.5", 353), ("glm-4.5-air", 106.9), ("gpt-oss-20b", 20.9), ("gpt-oss-120b", 117),
        ("granite-3.3-2b", 2.53),
        ("granite-3.3-8b", 8.17), ("olmo-2-7b", 7.30), ("olmo-2-13b", 13.7), ("olmo-2-32b", 32.2), ("olmo-3-7b", 7.30),
        ("olmo-3-32b", 32.2), ("gemma-2-2b", 2.61), ("gemma-2-9b", 9.24), ("gemma-2-27b", 27.2), ("gemma-3-1b", 1.0),
        ("gemma-3-4b", 3.88), ("gemma-3-12b", 11.8), ("gemma-3-27b", 27.0), ("smollm3-3b", 3.08),
        ("phi-3-mini-4k", 3.82), ("phi-4", 14.7), ("phi-4-mini", 3.84), ("glm-4-9b-0414", 9.40),
        ("ministral-3-3b", 3.43), ("ministral-3-8b", 8.49), ("ministral-3-14b", 13.5),
        ("glm-4.7-flash", 29.9), ("ernie-4.5-0.3b", 0.361), ("exaone-4.0-32b", 32.0), ("minimax-m2", 228.7),
        ("dots.llm1", 142.8), ("k-exaone-236b-a23b", 236.5), ("ernie-4.5-21b-a3b", 21.8), ("ernie-4.5-300b-a47b", 300),
        ("deepseek-v2-lite", 15.7), ("deepseek-v2", 236), ("deepseek-v3", 671),
        ("gemma-2b", 2.51), ("gemma-7b", 8.54), ("glm-4-9b-chat", 9.40), ("helium-1-preview-2b", 2.17), ("cwm-32b", 32.6),
        ("flexolmo-7x7b", 33.3), ("solar-open-100b", 102.6), ("youtu-llm-2b", 1.96),
        ("afm-4.5b", 4.62), ("apertus-8b", 8.05), ("apertus-70b", 70.6), ("hunyuan-7b", 7.50), ("hunyuan-a13b", 80.4),
        ("qwen3-next-80b-a3b", 79.7), ("qwen3.6-27b", 26.9), ("qwen3.6-35b-a3b", 34.7),
    ],
)  # fmt: skip
def test_published_models_have_the_parameters_of_their_cards(name, billions):
    assert set(families.PUBLISHED) >= {name}
    found = DecoderConfig.named(name)
    assert found.parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_options_of_published_models():
    llama, qwen, mistral, later, seed, qwen3 = (
        DecoderConfig.named(name)
        for name in ("llama-3.1-70b", "qwen2.5-72b", "mistral-7b", "mistral-7b-v0.3", "seed-oss-36b", "qwen3-32b")
    )
    assert [made.attention.bias for made in (llama, qwen, mistral, later, seed, qwen3)] == [0, 1, 0, 0, 1, 0]
    assert [made.attention.qk_norm for made in (llama, qwen, mistral, later, seed, qwen3)] == [0, 0, 0, 0, 0, 1]
    assert [made.attention.window(31) for made in (llama, qwen, mistral, later)] == [None, None, 4096, None]
    assert llama.rotary.scaling.factor == 8.0 and llama.rotary.theta == 5e5 and mistral.rotary.theta == 1e4


SMALL = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 32,
}  # fmt: skip
FEW = {"moe_intermediate_size": 8}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in ("Llama", "Qwen2", "Qwen3", "Mistral", "SeedOss")),
        *((name, {"num_key_value_heads": None}) for name in ("Llama", "Qwen2", "SeedOss")),
        *((name, {"head_dim": 10}) for name in ("Llama", "Qwen2", "Mistral", "SeedOss")),
        *(
            (name, {"rope_theta": 70.0, "rope_scaling": YARN})
            for name in ("Llama", "Qwen2", "Qwen3", "Mistral", "SeedOss")
        ),
        *((name, {"head_dim": None}) for name in ("SeedOss", "Ernie4_5")),
        ("Llama", {"head_dim": None, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}),
        *((name, WINDOW) for name in ("Qwen2", "Qwen3")),
        ("Qwen2", WINDOW | {"max_window_layers": 9}),
        ("Qwen2", WINDOW | {"use_sliding_window": False, "max_window_layers": 0}),
        ("Qwen2", WINDOW | {"sliding_window": None}),
        ("Qwen2", WINDOW | {"layer_types": ["sliding_attention", "attention", "full_attention", "sliding_attention"]}),
        ("Mistral", {"sliding_window": None, "head_dim": None}),
        ("Mistral", {"sliding_window": 9}),
        *((name, FEW | {"num_experts_per_tok": 3}) for name in ("Qwen2Moe", "Qwen3Moe")),
        *((name, FEW | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}) for name in ("Qwen2Moe", "Qwen3Moe")),
        ("Mixtral", {"num_experts_per_tok": 3}),
        ("Qwen2Moe", FEW | WINDOW | {"qkv_bias": False, "norm_topk_prob": True, "shared_expert_intermediate_size": 24}),
        ("Qwen2Moe", FEW | {"mlp_only_layers": None, "sliding_window": 0}),
        ("Qwen3Moe", FEW | WINDOW),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}),
        ("SeedOss", {"attention_bias": False, "attention_out_bias": False, "residual_dropout": 0.1}),
    ],
    ids=str,
)
def test_a_config_means_what_it_means_to_transformers(name, changes):
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, f"{name}Config")(**SMALL | copy.deepcopy(changes))
    found = DecoderConfig.from_dict({"model_type": theirs.model_type} | SMALL | changes)
    model = getattr(transformers, f"{name}ForCausalLM")(theirs)
    for key in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(found, key) == getattr(theirs, key), key
    if "rope_scaling" not in changes:
        assert found.max_position_embeddings == theirs.max_position_embeddings
    rotary, layers = model.model.rotary_emb, model.model.layers
    frequencies, factor = found.rotary.frequencies(found.head_dim, torch.device("cpu"))
    assert torch.equal(frequencies, rotary.inv_freq) and factor == rotary.attention_scaling
    for index, layer in enumerate(layers):
        attention = layer.self_attn
        assert found.head_dim == attention.head_dim
        assert found.attention.bias == (attention.v_proj.bias is not None)
        assert found.attention.qk_norm == hasattr(attention, "q_norm")
        whole = theirs.sliding_window if name in ("Mistral", "Mixtral") else None
        assert found.attention.window(index) == getattr(attention, "sliding_window", whole)
        block = layer.mlp
        assert (found.experts is not None and found.experts.in_layer(index)) == hasattr(block, "experts")
        if hasattr(block, "experts"):
            assert found.experts.num_experts == block.gate.weight.shape[0]
            assert found.experts.num_experts_per_tok == block.gate.top_k
            assert found.experts.intermediate_size == block.experts.down_proj.shape[2]
            assert found.experts.norm_topk_prob == getattr(block.gate, "norm_topk_prob", True)
            shared = getattr(block, "shared_expert", None)
            assert found.experts.shared_intermediate_size == (shared and shared.down_proj.weight.shape[1])
            assert found.experts.shared_gate == hasattr(block, "shared_expert_gate")


@pytest.mark.parametrize("name", ["Qwen2Moe", "Qwen3Moe", "Mixtral"])
def test_absent_sizes_of_experts_are_what_transformers_assumes(name):
    theirs = getattr(pytest.importorskip("transformers"), f"{name}Config")(**SMALL)
    found = DecoderConfig.from_dict({"model_type": theirs.model_type} | SMALL).experts
    assert found.intermediate_size == getattr(theirs, "moe_intermediate_size", SMALL["intermediate_size"])
    assert found.shared_intermediate_size == getattr(theirs, "shared_expert_intermediate_size", None)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True is not supported; weft runs Llama with False"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("llama", {"sliding_window": 8}, "sliding_window=8 is a key that weft does not know; where it changes nothing"),
        ("llama", {"layer_types": ["full_attention"] * 4}, "is a key that weft does not know"),
        ("llama", {"num_attention_heads": 24}, "hidden_size=128 is not a multiple of num_attention_heads=24, and there"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quant_method='awq' is not supported"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor, high_freq_factor, orig"),
        ("qwen2", {"attention_bias": False}, "attention_bias=False is not supported; weft runs Qwen2.5 with True"),
        ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window='yes' is not true or false"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window=1 is not true or false"),
        ("qwen2", WINDOW | {"sliding_window": 0}, "sliding_window=0 is not a positive integer or null"),
        ("qwen2", WINDOW | {"max_window_layers": -1}, "max_window_layers=-1 is not an integer of at least 0"),
        ("qwen2", WINDOW | {"max_window_layers": None}, "max_window_layers=None is not an integer"),
        ("qwen2", {"layer_types": ["full_attention"] * 3}, "is not a list of num_hidden_layers=4"),
        ("qwen2", {"layer_types": [["full_attention"]] * 4}, r"layer_types\[0\]=\['full_attention'\] is not supported"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, r"layer_types\[0\]='sliding_attention' has no window; set"),
        ("qwen2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type='dynamic' is not supported"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0 is not a positive integer or null"),
        ("mistral", {"sliding_window": -4096}, "sliding_window=-4096 is not a positive integer"),
        ("mistral", {"sliding_window": "4096"}, "sliding_window='4096' is not a positive integer"),
        ("mistral", {"sliding_window": True}, "sliding_window=True is not a positive integer"),
        ("mistral", {"sliding_window": 4096.0}, "sliding_window=4096.0 is not a positive integer"),
        ("mistral", {"use_sliding_window": True}, "use_sliding_window=True is not supported; weft runs Mistral with False"),
        ("mistral", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("seed_oss", {"attention_out_bias": True}, "attention_out_bias=True is not supported; weft runs Seed-OSS with False"),
        ("seed_oss", {"attention_bias": "true"}, "attention_bias='true' is not true or false"),
        ("seed_oss", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("qwen3", {"head_dim": None}, "head_dim=None is not a positive integer"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True is not supported; weft runs Qwen3 with False"),
        *((family, {key: value}, f"{key}={value!r} is not an integer in 1 .. 1024")
          for family, key in (("qwen2_moe", "num_experts"), ("qwen3_moe", "num_experts"), ("mixtral", "num_local_experts"))
          for value in (0, -8, "8", True, 8.0, 1025)),
        ("qwen3_moe", {"layer_types": ["sliding_attention"] * 4}, "is a key that weft does not know"),
        ("qwen3_moe", {"num_local_experts": 0}, "num_local_experts=0 is not an integer in 1 .. 1024"),
        *((family, {"num_experts_per_tok": value}, f"num_experts_per_tok={value!r} is not an integer in 1 .. {most}")
          for family, most in (("qwen2_moe", 16), ("qwen3_moe", 16), ("mixtral", 8)) for value in (0, 17, "2", True, None)),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5 is not an integer in 1 .. 4"),
        *((family, {"mlp_only_layers": value}, r"mlp_only_layers=.* is not a list of layers")
          for family in ("qwen2_moe", "qwen3_moe") for value in (0, 1, "", "1", {"1": 1}, [True], ["1"], [1.0], [None])),
        *((family, {"decoder_sparse_step": value}, f"decoder_sparse_step={value!r} is not a positive integer")
          for family in ("qwen2_moe", "qwen3_moe") for value in (0, -1, "1", True, None)),
        ("qwen2_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size=0 is not a positive integer"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0 is not a positive"),
        ("qwen2_moe", {"norm_topk_prob": "false"}, "norm_topk_prob='false' is not true or false"),
        ("qwen2_moe", {"qkv_bias": 1}, "qkv_bias=1 is not true or false"),
        ("qwen2_moe", {"attention_bias": False}, "attention_bias=False is not supported; weft runs Qwen2-MoE with True"),
        ("qwen2_moe", {"sliding_window": 0, "use_sliding_window": True}, "sliding_window=0 is not a positive integer or null"),
        ("qwen2_moe", {"num_local_experts": 8}, "num_local_experts=8 is a key that weft does not know"),
        ("qwen2_moe", {"n_shared_experts": 1}, "n_shared_experts=1 is a key that weft does not know"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64 is a key that weft"),
        ("mixtral", {"num_experts": 8}, "num_experts=8 is a key that weft does not know"),
        ("mixtral", {"norm_topk_prob": True}, "norm_topk_prob=True is a key that weft does not know"),
        ("qwen3", {"num_experts": 8}, "num_experts=8 is a key that weft does not know"),
        ("qwen3", {"rope_scaling": YARN | {"original_max_position_embeddings": None}}, "'yarn' needs original_max_position"),
        ("qwen3", {"rope_scaling": YARN | {"factor": 0.25}}, "rope_scaling: factor=0.25 is not a number from 1 to 1000000"),
    ],
    ids=str,
)  # fmt: skip
def test_keys_that_a_family_does_not_run_are_refused_by_name(model_type, changes, message):
    with pytest.raises(CheckpointError, match="^config.json: .*" + message) as caught:
        DecoderConfig.from_dict({"model_type": model_type} | SMALL | changes)
    assert "\n" not in str(caught.value)


def test_positions_with_yarn_are_those_of_its_parameters():
    card = {**families.PUBLISHED["qwen3-32b"], "rope_scaling": YARN}
    assert DecoderConfig.from_dict(card).max_position_embeddings == 131072
    assert DecoderConfig.from_dict(card | {"rope_scaling": None}).max_position_embeddings == 40960
