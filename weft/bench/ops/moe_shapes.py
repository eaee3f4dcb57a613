"""Shapes of ops of a mixture of experts (``MoeShape``), and named sets of published models."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from weft.bench.harness.workload import DTYPES, Shape
from weft.ops.moe.moe_op import SKEWS, MoeShape
from weft.ops.moe.routing import MAX_CHOICES
from weft.ops.op import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Sizes of a model's mixture of experts. tokens: for which it is measured; (): the ops' usual ones."""

    experts: int
    k: int
    hidden: int
    features: int
    tokens: tuple[int, ...] = ()


MIXTURES = {
    "qwen3-30b-a3b": Mixture(experts=128, k=8, hidden=2048, features=768),
    "qwen3-235b-a22b": Mixture(experts=128, k=8, hidden=4096, features=1536),
    "mixtral-8x7b": Mixture(experts=8, k=2, hidden=4096, features=14336),
    "olmoe-1b-7b": Mixture(experts=64, k=8, hidden=2048, features=1024),
    "deepseek-v3": Mixture(experts=256, k=8, hidden=7168, features=2048),
    # The all-to-all that kraken times, with one choice a token; dispatch and combine have no features.
    "kraken-a2a": Mixture(experts=8, k=1, hidden=4096, features=4096, tokens=(4096,)),
}
# Tokens of each rank that are dispatched; tokens that a rank sees.
SENT_TOKENS = (1, 8, 32, 128, 1024, 4096)
SEEN_TOKENS = (1, 4, 8, 32, 128, 1024, 4096, 8192)
# Most of each size for simulated ranks, and what they run instead of a named set at one rank.
SIMULATED = MoeShape(64, MAX_CHOICES, 64, 64, 512, 512, 2)
TINY = MoeShape(tokens=6, k=2, experts=4, held=4, hidden=32, features=48)


def read_moe(op: Op, word: str, world_size: int, tiny: bool) -> list[Shape]:
    """See ``Form.read``."""
    if re.fullmatch(r"[1-9]\d*(,[1-9]\d*){5}(,[012])?", word):
        given = MoeShape(*map(int, word.split(",")))
        _check_held(op, word, given, world_size)
        return [_moe(given, "x".join(map(str, given[:6])))]
    match = re.fullmatch(r"([a-z0-9-]+)(?:/(zipf|recorded))?(?::([1-9]\d*(?:,[1-9]\d*)*))?", word.lower())
    if match is None or match[1] not in MIXTURES:
        raise ValueError(
            f"--shapes {word!r} is neither a set ({', '.join(MIXTURES)}; SET/zipf, SET/recorded: skewed routing) nor "
            f"T,K,EXPERTS,HELD,HIDDEN,FEATURES"
        )
    name, skew, tokens = match[1], SKEWS.index(match[2] or ""), match[3]
    if tiny:
        return [_moe(TINY._replace(experts=TINY.held * world_size, skew=skew), "tiny")]
    model = MIXTURES[name]
    if model.experts % world_size:
        raise ValueError(
            f"--world-size {world_size}: {name} has {model.experts} experts, which do not divide into equal shares; take 1, "
            f"2, 4 or 8"
        )
    listed = tuple(map(int, tokens.split(","))) if tokens else model.tokens
    sizes = model.k, model.experts, model.experts // world_size, model.hidden, model.features, skew
    return [
        _moe(MoeShape(count, *sizes), f"{name} T={count}")
        for count in listed or (SENT_TOKENS if op.collective else SEEN_TOKENS)
    ]


def _moe(shape: MoeShape, label: str) -> Shape:
    return Shape(size=tuple(shape), label=f"{label} {SKEWS[shape.skew]}".rstrip())


def _check_held(op: Op, word: str, shape: MoeShape, world_size: int) -> None:
    """Raise ValueError for experts that cannot be on ``world_size`` ranks."""
    if op.collective and shape.held * world_size != shape.experts:
        raise ValueError(
            f"--shapes {word}: held={shape.held} is not the share of each of {world_size} ranks of experts={shape.experts}; "
            f"take experts={shape.held * world_size}"
        )
    if shape.experts % shape.held:
        raise ValueError(f"--shapes {word}: held={shape.held} does not divide experts={shape.experts}; take a divisor")


def check_choices(op: Op, word: str, size: tuple[int, ...], dtype: str) -> None:
    """See ``Form.check``: ValueError for choices or rows without a kernel."""
    shape = MoeShape(*size)
    if shape.k > min(shape.experts, MAX_CHOICES):
        raise ValueError(
            f"--shapes {word}: k={shape.k} is more than experts={shape.experts} or {MAX_CHOICES}; take fewer"
        )
    step = 16 // DTYPES.get(dtype, torch.bfloat16).itemsize
    for name, value in (("hidden", shape.hidden), ("features", shape.features)):
        if value % step:
            raise ValueError(
                f"--shapes {word}: {name}={value} of {dtype} is no multiple of 16 bytes; take {-(-value // step) * step}"
            )


def simulable_moe(op: Op, size: tuple[int, ...], world_size: int) -> tuple[str, tuple[int, ...]]:
    """See ``Form.simulable``."""
    limit = f"{SIMULATED.tokens} tokens, {SIMULATED.experts} experts and {SIMULATED.hidden} elements of a row"
    smaller = MoeShape(*map(min, size, SIMULATED))
    shrink = size[2] // smaller.experts
    return limit, tuple(smaller._replace(k=min(smaller.k, smaller.experts), held=max(1, size[3] // shrink)))
