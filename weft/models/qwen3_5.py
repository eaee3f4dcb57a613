"""Qwen3.5's and Qwen3.6's text models, dense and with experts: the tables of their families.

They are Qwen3-Next's, with the matrices of gated delta nets apart. A text token has one position in all sections of the
multimodal rotary embedding, so that it is a plain one.
"""

from __future__ import annotations

from dataclasses import replace

from weft.models import qwen3_next
from weft.models.family import DEFAULTS, SHAPE, Content, ExpertOptions, Family, LinearAttentionOptions, table
from weft.models.qwen3_next import QWEN3_NEXT

PUBLISHED = {"vocab_size": 248320, "rope_theta": 1e7, "max_position_embeddings": 262144}
READS = (*qwen3_next.LINEAR_KEYS, "partial_rotary_factor")
SUPPORTED = {
    "attn_output_gate": (True, None),
    "output_gate_type": ("swish", "silu", None),
    "mlp_only_layers": ([], None),
}
# Of drafts' heads, of states' dtype in other engines, of positions in images.
WITHOUT_EFFECT = (
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "mrope_section", "mrope_interleaved",
)  # fmt: skip


def linear_attention(content: Content) -> LinearAttentionOptions:
    return replace(qwen3_next.linear_attention(content), joined=False)


def experts(content: Content) -> ExpertOptions:
    # transformers' class has experts in all layers, with weights that add up to 1.
    fixed = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return QWEN3_NEXT.experts({**content, **fixed})


QWEN3_5_TEXT = Family(
    name="Qwen3.5",
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    defaults={**DEFAULTS, **qwen3_next.LINEAR_DEFAULTS, "num_key_value_heads": 4},
    attention=QWEN3_NEXT.attention,
    block=QWEN3_NEXT.block,
    linear_attention=linear_attention,
    reads=READS,
    supported=SUPPORTED,
    without_effect=WITHOUT_EFFECT,
    # Of Qwen3.5 and Qwen3.8 too.
    published=table(
        f"{SHAPE} num_key_value_heads linear_num_value_heads",
        {"qwen3.6-27b": (5120, 17408, 64, 24, 4, 48)},
        **PUBLISHED,
    ),
)
QWEN3_5_MOE_TEXT = Family(
    name="Qwen3.5-MoE",
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    defaults={
        **DEFAULTS,
        **qwen3_next.LINEAR_DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "intermediate_size": 512,
    },
    attention=QWEN3_NEXT.attention,
    block=QWEN3_NEXT.block,
    experts=experts,
    linear_attention=linear_attention,
    reads=(
        *READS,
        *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        *("num_local_experts", "shared_expert_intermediate_size"),
    ),
    supported={**SUPPORTED, "norm_topk_prob": (True, None), "decoder_sparse_step": (1, None)},
    without_effect=WITHOUT_EFFECT,
    published=table(f"{SHAPE} num_key_value_heads", {"qwen3.6-35b-a3b": (2048, 512, 40, 16, 2)}, **PUBLISHED),
)
