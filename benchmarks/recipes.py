"""Recipes of a pass by predicted time, beside the one that a plan takes: needs no GPU.

python -m benchmarks.recipes        # ms of one prompt by each recipe on H200s, and the time over the least one
python -m benchmarks.recipes --quantization fp8 --gpu h100    # of weights in fp8, on H100s
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from weft.bench.models.steps import config_of
from weft.costs.recipes import RECIPES
from weft.models.quantization import MADE
from weft.models.steps import Layout, recipe_of, step_time

MODELS, WORLD_SIZES = ("qwen3-8b", "qwen3-32b", "qwen3-30b-a3b"), (2, 4)
TOKENS = 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192


def rows(quantization: str | None = None, gpu: str = "h200") -> Iterator[tuple[str, int, int, dict[str, float], str]]:
    """(model, ranks, tokens, ms by recipe, the recipe of mode "auto")."""
    for model in MODELS:
        config = config_of(model)
        for world_size in WORLD_SIZES:
            for tokens in TOKENS:
                step, layout = (1, tokens, tokens), Layout(world_size=world_size, quantization=quantization)
                ms = {one: step_time(config, step, layout, gpu, recipe=one).seconds * 1e3 for one in RECIPES}
                yield model, world_size, tokens, ms, recipe_of(config, tokens, layout, gpu)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quantization", choices=MADE)
    parser.add_argument("--gpu", default="h200", choices=("h200", "h100"))
    for model, world_size, tokens, ms, taken in rows(**vars(parser.parse_args())):
        times = ", ".join(f"{name} {time:.2f}" for name, time in ms.items())
        print(f"{model:14} W={world_size} {tokens:5}: {times}; {taken}: {ms[taken] / min(ms.values()):.3f}")


if __name__ == "__main__":
    main()
