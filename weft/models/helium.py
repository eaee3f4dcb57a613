"""Helium: the tables of its family."""

from __future__ import annotations

from weft.errors import CheckpointError
from weft.models.family import DEFAULTS, SHAPE, AttentionOptions, Content, Family, flag, table


def attention(content: Content) -> AttentionOptions:
    width = content["num_attention_heads"] * content["head_dim"]
    if width != content["hidden_size"]:
        raise CheckpointError(
            f"config.json: num_attention_heads * head_dim = {width} is not hidden_size={content['hidden_size']}; Helium's "
            f"o_proj takes rows of hidden_size"
        )
    return AttentionOptions(bias=flag(content, "attention_bias"), interleaved=True)


HELIUM = Family(
    name="Helium",
    model_type="helium",
    architecture="HeliumForCausalLM",
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100000.0,
        "max_position_embeddings": 4096,
        "attention_bias": False,
    },
    attention=attention,
    reads=("attention_bias",),
    # config.json of kyutai/helium-1-preview-2b
    published=table(SHAPE, {"helium-1-preview-2b": (2560, 7040, 24, 20)}, vocab_size=48000),
)
