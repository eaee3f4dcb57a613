"""Families whose experts have further options: config.json is read as transformers reads it, and the engine answers alike."""

import copy

import pytest
import torch

import weft
from tests.against_transformers import FAMILIES, check_engine, prompt
from tests.teacher_forced import all_logits
from weft.errors import CheckpointError
from weft.models import Decoder, DecoderConfig
from weft.models.family import ExpertOptions
from weft.models.routed_experts import READS, sigmoid_experts, softmax_experts
from weft.parallel import plain

SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 5, "num_attention_heads": 8,
}  # fmt: skip
ROUTED = {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2}
HUNYUAN = {"num_experts": 8, "moe_topk": 2}
NO_LIMIT = {"max_window_layers": None, "n_shared_experts": 2, "num_key_value_heads": 8}
EXAONE = {
    "num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "layer_types": ["sliding_attention"] * 5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *((name, {}) for name in ("olmoe", "granitemoe", "glm4_moe", "gpt_oss")),
        ("olmoe", {"num_experts": 12, "num_experts_per_tok": 3, "norm_topk_prob": True, "num_key_value_heads": 4}),
        ("granitemoe", {"num_local_experts": 12, "num_experts_per_tok": 3, "residual_multiplier": 0.22}),
        ("glm4_moe", ROUTED | {"routed_scaling_factor": 2.5, "n_shared_experts": 2, "norm_topk_prob": False}),
        ("glm4_moe", {"first_k_dense_replace": 3, "attention_bias": True, "use_qk_norm": True, "head_dim": 16}),
        ("glm4_moe", {"first_k_dense_replace": 0, "partial_rotary_factor": 0.25}),
        (
            "dots1",
            ROUTED | NO_LIMIT | {"layer_types": [*["full_attention"] * 4, "sliding_attention"], "sliding_window": 7},
        ),
        ("dots1", ROUTED | NO_LIMIT | {"sliding_window": None}),
        ("flex_olmo", {"pad_token_id": 0, "num_experts": 12, "num_experts_per_tok": 3, "num_key_value_heads": 4}),
        ("solar_open", ROUTED | {"n_shared_experts": 2, "attention_bias": True}),
        ("exaone_moe", EXAONE | {"first_k_dense_replace": 3, "first_last_k_dense_replace": 3}),
        ("gpt_oss", {"num_local_experts": 12, "num_experts_per_tok": 3, "swiglu_limit": 5.0, "sliding_window": 7}),
        ("gpt_oss", {"attention_bias": False, "layer_types": ["full_attention"] * 5, "swiglu_alpha": 1.5}),
    ],
    ids=str,
)
def test_a_config_means_what_it_means_to_transformers(model_type, changes):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(model_type, **SMALL | copy.deepcopy(changes))
    config = DecoderConfig.from_dict({"model_type": model_type} | SMALL | changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    for key in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(config, key) == getattr(theirs, key), key
    matrices = {id(one): one.numel() for name, one in model.named_parameters() if one.dim() > 1 and "bias" not in name}
    assert config.parameters == sum(matrices.values())
    for index, layer in enumerate(model.model.layers):
        block, attention = getattr(layer, "mlp", None) or layer.block_sparse_moe, layer.self_attn
        assert config.head_dim == attention.head_dim
        assert config.attention.bias == (attention.q_proj.bias is not None)
        assert config.attention.output_bias == (attention.o_proj.bias is not None)
        assert config.attention.qk_norm == hasattr(attention, "q_norm")
        assert config.attention.sinks == hasattr(attention, "sinks")
        assert config.attention.window(index) == getattr(attention, "sliding_window", None)
        assert config.experts.in_layer(index) == hasattr(block, "experts")
        if hasattr(block, "experts"):
            check_experts(config.experts, block)


def check_experts(experts, block):
    router = getattr(block, "gate", None) or block.router
    assert (experts.num_experts, experts.num_experts_per_tok) == (len(router.weight), router.top_k)
    assert experts.norm_topk_prob == getattr(router, "norm_topk_prob", True)
    assert experts.scale == getattr(router, "routed_scaling_factor", 1.0)
    assert (experts.groups, experts.group_limit) == (getattr(router, "num_group", 1), getattr(router, "topk_group", 1))
    assert experts.router_bias == hasattr(router, "e_score_correction_bias")
    assert experts.logit_bias == (getattr(router, "bias", None) is not None)
    assert experts.bias == hasattr(block.experts, "down_proj_bias")
    shared = getattr(block, "shared_experts", None)
    assert experts.shared_intermediate_size == (None if shared is None else shared.down_proj.weight.shape[1])
    clamped = (block.experts.alpha, block.experts.limit) if experts.bias else None
    assert experts.clamped_swiglu == clamped


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported; weft runs OLMoE with None"),
        ("olmoe", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("granitemoe", {"num_local_experts": 0}, "num_local_experts=0 is not an integer in 1 .. 1024"),
        ("granitemoe", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("glm4_moe", ROUTED | {"n_group": 3}, "n_group=3, topk_group=2: num_experts_per_tok=4 of 16 experts do not lie"),
        ("glm4_moe", ROUTED | {"topk_group": 5}, "n_group=4, topk_group=5: "),
        ("glm4_moe", ROUTED | {"num_experts_per_tok": 9}, "num_experts_per_tok=9 of 16 experts do not lie in topk_group"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1 is not an integer of at least 0"),
        ("glm4_moe", {"routed_scaling_factor": "1"}, "routed_scaling_factor='1' is not a positive number"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts=0 is not a positive integer"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported; weft runs GLM-4.5 with 'sigmoid'"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        ("hunyuan_v1_moe", HUNYUAN | {"moe_topk": [2, 2, 2, 2, 1]}, r"moe_topk=.* is not one value for each of num_hidden_la"),
        ("hunyuan_v1_moe", HUNYUAN | {"moe_topk": [2] * 4}, r"moe_topk=\[2, 2, 2, 2\] is not one value for each of num_hidden"),
        ("hunyuan_v1_moe", HUNYUAN | {"moe_topk": 9}, "moe_topk=9 is not an integer in 1 .. 8"),
        ("hunyuan_v1_moe", HUNYUAN | {"moe_intermediate_size": [16] * 5}, "moe_intermediate_size=16 is not supported; weft ru"),
        ("hunyuan_v1_moe", HUNYUAN | {"num_shared_expert": 2}, "num_shared_expert=2 is not supported; weft runs Hunyuan-MoE"),
        ("dots1", ROUTED | NO_LIMIT, "max_window_layers=None is not an integer of at least 0"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit=0 is not a positive number"),
        ("gpt_oss", {"layer_types": ["linear_attention"] * 5}, r"layer_types\[0\]='linear_attention' is not supported"),
    ],
    ids=str,
)  # fmt: skip
def test_what_weft_does_not_run_is_refused_by_name(model_type, changes, message):
    with pytest.raises(CheckpointError, match="^config.json: .*" + message):
        DecoderConfig.from_dict({"model_type": model_type} | SMALL | changes)


DEEPSEEK = ROUTED | {
    "num_hidden_layers": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}  # fmt: skip


def test_tables_of_deepseek_s_routing():
    made = sigmoid_experts(DEEPSEEK)
    assert made == ExpertOptions(
        num_experts=16, num_experts_per_tok=4, intermediate_size=24, scoring="sigmoid", router_bias=True, groups=4,
        group_limit=2, scale=2.5, shared_intermediate_size=24, layers=(False, True, True, True),
    )  # fmt: skip
    limited = softmax_experts(DEEPSEEK | {"topk_method": "group_limited_greedy"})
    assert (limited.scoring, limited.norm_topk_prob, limited.groups, limited.group_limit) == ("softmax", False, 4, 2)
    greedy = softmax_experts(DEEPSEEK | {"topk_method": "greedy", "n_group": None, "n_shared_experts": None})
    assert (greedy.groups, greedy.group_limit, greedy.shared_intermediate_size) == (1, 1, None)
    assert {*READS} <= {*DEEPSEEK}
    with pytest.raises(CheckpointError, match="topk_method='noaux_tc' is not supported; weft runs 'greedy'"):
        softmax_experts(DEEPSEEK | {"topk_method": "noaux_tc"})


@pytest.mark.parametrize(
    ("name", "world_size", "options"),
    [
        ("olmoe", 2, {"mode": "replicated"}),
        ("granitemoe", 2, {"mode": "sequence_parallel", "expert_layout": "slices"}),
        ("glm4-moe", 4, {"mode": "sequence_parallel", "expert_layout": (2, 2)}),
        ("gpt-oss", 2, {"mode": "replicated", "expert_layout": "slices"}),
        ("gpt-oss", 4, {"mode": "sequence_parallel", "pipeline_parallel": 2}),
    ],
)
def test_an_engine_answers_as_transformers_does(make_checkpoint, plain_ops, name, world_size, options):
    check_engine(make_checkpoint(**FAMILIES[name]), world_size, options)


def test_random_weights_of_a_model_in_mxfp4(plain_ops):
    """Of slices only the first rank of a group has biases of down."""
    config = DecoderConfig.from_dict(
        {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}, "num_local_experts": 4}
        | SMALL | {"intermediate_size": 64}
    )  # fmt: skip

    def main(team):
        model = Decoder(config, team, mode="replicated", dtype=torch.float32, expert_layout="slices").fill_dummy()
        return model.layers[0].mlp.down_bias.abs().max().item(), all_logits(model, prompt(1, 5) % 64)

    (first, logits), (second, others) = weft.simulate(main, 2)
    assert first > 0 and second == 0
    assert logits.isfinite().all() and torch.equal(logits, others)


@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe"])
def test_tokens_of_random_weights_choose_evenly(family, plain_ops, monkeypatch):
    """Else steps that are measured read fewer experts than of a trained model: 32 tokens choose 55 of 64 on average."""
    sizes = {"hidden_size": 256, "num_experts_per_tok": 4, "vocab_size": 256, "num_hidden_layers": 4}
    counts = {
        "gpt_oss": {"num_local_experts": 64},
        "glm4_moe": {"n_routed_experts": 64, "first_k_dense_replace": 0, "moe_intermediate_size": 64},
    }
    config = DecoderConfig.from_dict({"model_type": family} | SMALL | sizes | counts[family])
    chosen, given = [], plain.routing_of

    def routing_of(*arguments):
        chosen.append(given(*arguments))
        return chosen[-1]

    monkeypatch.setattr(plain, "routing_of", routing_of)

    def main(team):
        model = Decoder(config, team, mode="reference", dtype=torch.float32).fill_dummy()
        all_logits(model, torch.arange(32)[:, None])

    weft.simulate(main, 1)
    layers = [ids for ids, _ in chosen]
    assert [ids.shape for ids in layers] == [(32, 4)] * 4
    assert min(len(ids.unique()) for ids in layers) >= 38
