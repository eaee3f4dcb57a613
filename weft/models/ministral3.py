"""Ministral 3, Devstral 2 and Mistral Medium 3.5: the tables of their family."""

from __future__ import annotations

from collections.abc import Mapping

from weft.arguments import quoted
from weft.errors import CheckpointError
from weft.models.family import SHAPE, Content, Family, table
from weft.models.mistral import MISTRAL

BETA = "llama_4_scaling_beta"
YARN = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_theta": 1e6,
    BETA: 0.1,
}


def longest(content: Content) -> int | None:
    """Positions before the ones with scaled queries, by 1 + beta * log(1 + position // original ones)."""
    parameters = content.get("rope_scaling") or content.get("rope_parameters")
    given = parameters if isinstance(parameters, Mapping) else {}
    beta, original = given.get(BETA), given.get("original_max_position_embeddings")
    if beta is None or beta == 0:
        return None
    if type(original) is not int or original < 1:
        raise CheckpointError(
            f"config.json: {BETA}={quoted(beta)} needs original_max_position_embeddings, which is {quoted(original)}"
        )
    return original


MINISTRAL3 = Family(
    name="Ministral 3",
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    defaults={
        **MISTRAL.defaults,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 262144,
        "sliding_window": None,
        "rope_parameters": YARN | {"max_position_embeddings": 262144},
    },
    attention=MISTRAL.attention,
    longest=longest,
    reads=("sliding_window",),
    without_effect=(BETA,),
    # config.json of mistralai/Ministral-3-*-2512
    published=table(
        f"{SHAPE} num_key_value_heads tie_word_embeddings",
        {
            "ministral-3-3b": (3072, 9216, 26, 32, 8, True),
            "ministral-3-8b": (4096, 14336, 34, 32, 8, False),
            "ministral-3-14b": (5120, 16384, 40, 32, 8, False),
        },
        vocab_size=131072,
        rope_parameters=YARN,
    ),
)
