"""A family is a table: other names of weights need no code, and options without a kernel are refused."""

import dataclasses

import pytest
import torch

import weft
from weft.models import Decoder, DecoderConfig, config
from weft.models.family import AttentionOptions, WeightNames
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
    monkeypatch.setitem(config.FAMILIES, "other", other)

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
    ("option", "message"),
    [
        ({"qk_norm": False}, "attention.qk_norm=False has no kernel in weft; it runs qk_norm=True"),
        ({"bias": True}, "attention.bias=True has no kernel"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "attention.rope_scaling={'rope_type': 'llama3'} has no kernel"),
    ],
)
def test_attention_without_a_kernel_is_refused_by_name(option, message):
    made = dataclasses.replace(DecoderConfig.from_dict(CONTENT), attention=AttentionOptions(**option))
    with pytest.raises(ValueError, match=message):
        weft.simulate(lambda team: Decoder(made, team), 1)
