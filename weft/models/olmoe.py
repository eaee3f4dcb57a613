"""OLMoE: the tables of its family."""

from __future__ import annotations

from weft.models.family import AttentionOptions, Content, ExpertOptions, Family, experts_of, flag


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(qk_norm=True, norm_all_heads=True)


def experts(content: Content) -> ExpertOptions:
    total, chosen = experts_of(content, "num_experts")
    return ExpertOptions(
        num_experts=total,
        num_experts_per_tok=chosen,
        intermediate_size=content["intermediate_size"],
        norm_topk_prob=flag(content, "norm_topk_prob"),
    )


OLMOE = Family(
    name="OLMoE",
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    attention=attention,
    experts=experts,
    reads=("num_experts", "num_experts_per_tok", "norm_topk_prob"),
    supported={"clip_qkv": (None,)},
    published={
        # config.json of allenai/OLMoE-1B-7B-0924.
        "olmoe-1b-7b": {
            "model_type": "olmoe",
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "rope_theta": 10000.0,
            "max_position_embeddings": 4096,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
    },
)
