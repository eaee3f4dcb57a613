"""Names of the model benchmarks on the command line: layers, a step of a model, complete generations."""

LEVELS = ("mlp", "attn", "model", "generate")


def is_model(name: str) -> bool:
    """True for a model benchmark, False for an op."""
    return name in LEVELS
