"""Names of the model benchmarks on the command line: layers, a step of a model, complete generations."""

from weft.models.families import PUBLISHED
from weft.parallel.modes import OLD_MODES

LEVELS = ("mlp", "attn", "model", "generate")
RUN_TYPES = ("prefill", "decode")
TINY, DEFAULT_MODEL = "tiny", "qwen3-32b"
MODELS = (*PUBLISHED, TINY)
# Providers have the old names of modes, as in the results that are committed.
WEFT_MODES = ("auto", "ag_rs", "gemm_ar")
OLD_NAMES = {new: old for old, new in OLD_MODES.items()}


def is_model(name: str) -> bool:
    """True for a model benchmark, False for an op."""
    return name in LEVELS
