"""Gemma, of 2024: the tables of its family."""

from __future__ import annotations

from weft.models.family import DEFAULTS, SHAPE, BlockOptions, Content, Family, table


def block(content: Content) -> BlockOptions:
    return BlockOptions(
        one_plus_norms=True,
        activation="gelu_tanh",
        embedding_scale=content["hidden_size"] ** 0.5,
        embedding_scale_rounded=True,
    )


GEMMA = Family(
    name="Gemma",
    model_type="gemma",
    architecture="GemmaForCausalLM",
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    block=block,
    supported={
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),  # transformers takes the second for the first
        "hidden_activation": ("gelu_pytorch_tanh", None),  # transformers reads hidden_act alone
        "use_bidirectional_attention": (False, None),
    },
    # config.json of google/gemma-2b and gemma-7b
    published=table(
        f"{SHAPE} num_key_value_heads",
        {"gemma-2b": (2048, 16384, 18, 8, 1), "gemma-7b": (3072, 24576, 28, 16, 16)},
        vocab_size=256000,
    ),
)
