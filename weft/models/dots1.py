"""dots.llm1, with DeepSeek-V3's experts: the tables of its family."""

from __future__ import annotations

from weft.models.family import (
    DEFAULTS,
    SHAPE,
    AttentionOptions,
    Content,
    ExpertOptions,
    Family,
    WeightNames,
    flag,
    table,
    windows_by_layer,
)
from weft.models.routed_experts import READS, SIGMOID_SUPPORTED, sigmoid_experts


def attention(content: Content) -> AttentionOptions:
    bias = flag(content, "attention_bias")
    # transformers does not read use_sliding_window.
    windowed = content["sliding_window"] is not None
    if content["max_window_layers"] is None and (content.get("layer_types") is not None or not windowed):
        content = {**content, "max_window_layers": 0}  # not read then
    windows = windows_by_layer({**content, "use_sliding_window": windowed})
    return AttentionOptions(qk_norm=True, bias=bias, output_bias=bias, windows=windows)


def experts(content: Content) -> ExpertOptions:
    # Null for no groups.
    return sigmoid_experts({**content, **{key: 1 for key in ("n_group", "topk_group") if content[key] is None}})


DOTS1 = Family(
    name="dots.llm1",
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "attention_bias": False,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    attention=attention,
    experts=experts,
    reads=(*READS, "sliding_window", "max_window_layers", "layer_types", "attention_bias"),
    supported=SIGMOID_SUPPORTED,
    weights=WeightNames(shared_expert="shared_experts"),
    # config.json of rednote-hilab/dots.llm1.inst
    published=table(
        f"{SHAPE} n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size",
        {"dots.llm1": (4096, 10944, 62, 32, 128, 2, 6, 1408)},
        vocab_size=152064,
        rms_norm_eps=1e-5,
        rope_theta=1e7,
        max_position_embeddings=32768,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
)
