"""Names of the model benchmarks on the command line: layers, a step of a model, complete generations."""

LEVELS = ("mlp", "attn", "model", "generate")
