"""Shapes of ``weft bench train``: sizes of a decoder layer and of its tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from weft.bench.harness.workload import Shape, words_apart

DEFAULT, TINY = "qwen3-32b:1x4096,1x8192", "2x16,64,8,4,16,96"
# Most tokens and hidden features on simulated ranks.
MOST_SIMULATED = 256


class LayerShape(NamedTuple):
    """Sizes of a decoder layer and the tokens of all ranks together."""

    batch: int
    length: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    features: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def weights(self) -> int:
        """Elements of the four matrices."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.hidden * (attention + 3 * self.features)

    @property
    def flops(self) -> int:
        """Floating-point operations of all ranks.

        Three GEMMs for each weight; of causal attention, half of which is masked, two forward and five backward.
        """
        attention = 7 * self.tokens * self.length * self.heads * self.head_dim
        return 6 * self.tokens * self.weights + attention


def parse_layers(words: Sequence[str], world_size: int, *, tiny: bool) -> tuple[Shape, ...]:
    """Shapes that ``words`` name: MODEL:BATCHxLENGTH,… of a published dense model, or numbers.

    Numbers are BATCHxLENGTH,HIDDEN,HEADS,KV_HEADS,HEAD_DIM,FEATURES. ValueError for other words, and for sizes that W does not
    divide.
    """
    by_layer: dict[LayerShape, Shape] = {}
    for word in [one for several in words or (TINY if tiny else DEFAULT,) for one in words_apart(several)]:
        model, _, tokens = word.rpartition(":")
        for step in tokens.split(",") if model else (word,):
            if not (read := re.fullmatch(r"(\d+)x(\d+)" + ("" if model else r",(\d+)" * 5), step)):
                raise ValueError(
                    f"--shapes {word} is not MODEL:BATCHxLENGTH,…, such as {DEFAULT}, nor BATCHxLENGTH,HIDDEN,HEADS,KV_HEADS,"
                    f"HEAD_DIM,FEATURES, such as {TINY}"
                )
            shape = LayerShape(*map(int, read.groups()), *(_sizes(model) if model else ()))
            _check(word, shape, world_size, tiny)
            by_layer[shape] = Shape(size=tuple(shape), label=f"{model} {step}" if model else step)
    return tuple(by_layer.values())


def _sizes(model: str) -> tuple[int, int, int, int, int]:
    from weft.models.config import DecoderConfig  # it loads the models
    from weft.models.families import PUBLISHED

    config = DecoderConfig.named(model) if model in PUBLISHED else None
    if config is None or config.experts is not None:
        raise ValueError(f"--shapes {model}: choose a dense model of {', '.join(PUBLISHED)}")
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    return config.hidden_size, *heads, config.intermediate_size


def _check(word: str, shape: LayerShape, world_size: int, tiny: bool) -> None:
    if 0 in shape or shape.heads % shape.kv_heads:
        raise ValueError(f"--shapes {word}: all sizes are positive, and HEADS a multiple of KV_HEADS")
    for name in ("length", "kv_heads", "features"):
        if getattr(shape, name) % world_size:
            raise ValueError(
                f"--shapes {word}: {name}={getattr(shape, name)} is not divisible by world_size={world_size}"
            )
    if tiny and max(shape.tokens, shape.hidden) > MOST_SIMULATED:
        raise ValueError(
            f"--shapes {word}: simulated ranks take at most {MOST_SIMULATED} tokens and features; take {TINY}"
        )
