"""OLMo 2: the tables of its family."""

from __future__ import annotations

from weft.models.family import AttentionOptions, BlockOptions, Content, Family, WeightNames


def attention(content: Content) -> AttentionOptions:
    return AttentionOptions(qk_norm=True, norm_all_heads=True)


def block(content: Content) -> BlockOptions:
    return BlockOptions(norms_before=False, norms_after=True)


WEIGHTS = WeightNames(attention_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm")

OLMO2 = Family(
    name="OLMo 2",
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
    attention=attention,
    block=block,
    weights=WEIGHTS,
    published={},
)
