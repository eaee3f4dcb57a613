"""gpt-oss: the tables of its family."""

from __future__ import annotations

from dataclasses import replace

from weft.models.family import (
    DEFAULTS,
    AttentionOptions,
    Content,
    ExpertOptions,
    Family,
    StackedExperts,
    WeightNames,
    flag,
    local_experts,
    number_of,
    table,
    windows_of_pattern,
)

# Where config.json has no rotary embedding; the published files say the same.
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def attention(content: Content) -> AttentionOptions:
    bias = flag(content, "attention_bias")
    windows = windows_of_pattern(content, 2)
    return AttentionOptions(bias=bias, output_bias=bias, sinks=True, windows=windows)


def experts(content: Content) -> ExpertOptions:
    clamped = number_of(content, "swiglu_alpha"), number_of(content, "swiglu_limit")
    return replace(local_experts(content), bias=True, logit_bias=True, clamped_swiglu=clamped)


GPT_OSS = Family(
    name="gpt-oss",
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {**YARN, "rope_theta": 150000.0},
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    attention=attention,
    experts=experts,
    reads=(
        *("num_local_experts", "num_experts_per_tok", "swiglu_alpha", "swiglu_limit"),
        *("attention_bias", "sliding_window", "layer_types"),
    ),
    supported={"experts_per_token": (4, None), "initial_context_length": (4096, None)},
    weights=WeightNames(router="router", stacked=StackedExperts(transposed=True, interleaved=True)),
    # config.json of openai/gpt-oss-*.
    published=table(
        "num_hidden_layers num_local_experts",
        {"gpt-oss-20b": (24, 32), "gpt-oss-120b": (36, 128)},
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        rope_scaling=YARN,
        sliding_window=128,
        num_experts_per_tok=4,
        swiglu_limit=7.0,
        quantization_config={"quant_method": "mxfp4"},
    ),
)
