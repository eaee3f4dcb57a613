"""Recipes of a pass by predicted time, beside the one that a plan takes: needs no GPU.

python -m benchmarks.recipes        # ms of one prompt by each recipe on H200s, and the time over the least one
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.bench.models.steps import config_of
from weft.costs.recipes import RECIPES
from weft.predict.steps import Layout, recipe_of, step_time

MODELS, WORLD_SIZES = ("qwen3-8b", "qwen3-32b", "qwen3-30b-a3b"), (2, 4)
TOKENS = 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192


def rows() -> Iterator[tuple[str, int, int, dict[str, float], str]]:
    """(model, ranks, tokens, ms by recipe, the recipe of mode "auto")."""
    for model in MODELS:
        config = config_of(model)
        for world_size in WORLD_SIZES:
            for tokens in TOKENS:
                step, layout = (1, tokens, tokens), Layout(world_size=world_size)
                ms = {one: step_time(config, step, layout, "h200", recipe=one).seconds * 1e3 for one in RECIPES}
                yield model, world_size, tokens, ms, recipe_of(config, tokens, layout, "h200")


def main() -> None:
    for model, world_size, tokens, ms, taken in rows():
        times = ", ".join(f"{name} {time:.2f}" for name, time in ms.items())
        print(f"{model:14} W={world_size} {tokens:5}: {times}; {taken}: {ms[taken] / min(ms.values()):.3f}")


if __name__ == "__main__":
    main()
