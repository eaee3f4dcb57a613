"""Phi-3 and Phi-4: the tables of their family."""

from __future__ import annotations

from weft.models.family import DEFAULTS, Content, Family, WeightNames
from weft.models.joined import GATE_UP, QKV
from weft.models.mistral import attention

# Of microsoft/Phi-4-mini-instruct, by angle; the short factors are 1.
LONG = (
    *(1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898, 2.735880826),
    *(3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555, 7.485043894),
    *(8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807),
    *(22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93),
    *(32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
)  # fmt: skip
# config.json of microsoft/Phi-3-mini-4k-instruct, phi-4 and Phi-4-mini-instruct.
PUBLISHED: dict[str, Content] = {
    "phi-3-mini-4k": {
        "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "sliding_window": 2047, "max_position_embeddings": 4096,
    },
    "phi-4": {
        "vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 10, "rope_theta": 250000.0, "max_position_embeddings": 16384,
        "original_max_position_embeddings": 16384,
    },
    "phi-4-mini": {
        "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 24, "num_key_value_heads": 8, "sliding_window": 262144, "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * len(LONG), "long_factor": [*LONG]},
    },
}  # fmt: skip


PHI3 = Family(
    name="Phi-3",
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    defaults={
        **DEFAULTS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "sliding_window": None,
        "partial_rotary_factor": 1.0,
    },
    attention=attention,
    reads=("sliding_window", "partial_rotary_factor", "original_max_position_embeddings"),
    supported={
        "resid_pdrop": (0.0, None),
        "embd_pdrop": (0.0, None),
        "lm_head_bias": (False, None),
        "full_attn_mod": (1, None),
        "interpolate_factor": (1, None),
    },
    weights=WeightNames(joined=(QKV, GATE_UP)),
    published=PUBLISHED,
)
