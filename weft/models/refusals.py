"""Families that people ask for and weft lacks: what stands against each.

Without torch: the command line reads a config.json before it loads torch.
"""

from __future__ import annotations

REASONS = {
    "sparse attention by an indexer": ("deepseek_v32", "glm_moe_dsa"),
    "compressed sparse attention and hyper-connections": ("deepseek_v4",),
    "attention in chunks, and experts whose input is scaled": ("llama4", "llama4_text"),
    "layers of lightning attention": ("minimax", "minimax_text_01"),
    "layers of state spaces (Mamba), in most sizes": ("granitemoehybrid",),
    "layers of state spaces (Mamba)": (
        *("nemotron_h", "falcon_h1", "bamba", "jamba", "zamba2"),
        *("mamba", "mamba2", "falcon_mamba"),
    ),
    "layers of short convolutions": ("lfm2", "lfm2_moe"),
    "layers of Kimi delta attention": ("kimi_linear", "kimi_k3"),
    "embeddings of each layer": ("gemma3n", "gemma3n_text"),
    "heads of two sizes, and values that are keys": ("gemma4", "gemma4_text"),
    "layers of different sizes": ("nemotron-nas",),
    "norms without weights": ("nanochat",),
    "layer norms with means": (
        "nemotron",
        *("cohere", "cohere2", "phi", "phimoe", "starcoder2", "stablelm"),
        *("gpt2", "gpt_neox", "gpt_bigcode", "gptj", "opt", "bloom", "falcon", "mpt"),
    ),
    "cross attention to images": ("mllama",),
    "text keys beside those of a tower": ("qwen2_vl", "qwen2_5_vl"),
    "an encoder in place of a decoder": ("bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert"),
    "an encoder before the decoder": ("t5", "bart", "whisper"),
}
"""Mechanism that weft lacks -> model types that have it."""


def lacked(model_type: object) -> str | None:
    """Mechanism of a model of this type that weft lacks; None for a type that is not known."""
    return next((mechanism for mechanism, model_types in REASONS.items() if model_type in model_types), None)
