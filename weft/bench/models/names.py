"""Names of the model benchmarks on the command line: layers, a step of a model, complete generations."""

from weft.models.families import PUBLISHED

LEVELS = ("mlp", "attn", "model", "generate")
RUN_TYPES = ("prefill", "decode")
TINY, DEFAULT_MODEL = "tiny", "qwen3-32b"
MODELS = (*PUBLISHED, TINY)
WEFT_MODES = ("auto", "sequence_parallel", "replicated")


def is_model(name: str) -> bool:
    """True for a model benchmark, False for an op."""
    return name in LEVELS
