"""Model benchmarks: models by name, and their steps.

A shape is (batch, length, new): `batch` sequences that have `length` tokens after the step, `new` of which the step computes.
Decoding: new = 1, and `length` is the context with the new token in it. Prefill of whole prompts: new = length. For
``generate`` it is (batch, prompt, new): the length of prompts, and the number of tokens generated after each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from weft.bench.harness.workload import Shape, words_apart
from weft.bench.models.names import LEVELS, MODELS, RUN_TYPES, TINY
from weft.console import one_of
from weft.layers.attention import check_heads
from weft.models.config import DecoderConfig
from weft.models.family import AttentionOptions
from weft.parallel.rotary import Rotary

# Default steps; simulated ranks get small ones.
DEFAULTS = {
    "mlp": ("decode:1x128,128x128", "prefill:32x128"),
    "attn": ("decode:1x128,32x1024,128x128", "prefill:32x128"),
    "model": ("decode:1x128,32x1024,128x128", "prefill:1x128,32x128"),
    "generate": ("1x128+64", "32x128+64"),
}
TINY_DEFAULTS = {level: ("2x5+3",) if level == "generate" else ("decode:2x6", "prefill:2x5") for level in LEVELS}


# Model for simulated ranks: all dimensions differ, and only world sizes 1 and 2 divide its 130 token ids.
TINY_CONFIG = DecoderConfig(
    model_type="qwen3", vocab_size=130, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, head_dim=16, rms_norm_eps=1e-6, rotary=Rotary(theta=1e4), max_position_embeddings=256,
    tie_word_embeddings=False, dtype=torch.bfloat16, attention=AttentionOptions(qk_norm=True),
)  # fmt: skip
# Most tokens of all sequences for simulated ranks: the tiny model prefills 512 in half a minute (x86).
SIMULATED_TOKENS = 1024


def config_of(model: str, layers: int | None = None) -> DecoderConfig:
    """Config of a model by name, with fewer layers if given.

    ValueError for an unknown name or an invalid number.
    """
    one_of("model", model, MODELS)
    config = TINY_CONFIG if model == TINY else DecoderConfig.named(model)
    if layers is None:
        return config
    if not 1 <= layers <= config.num_hidden_layers:
        raise ValueError(f"--layers {layers}: {model} has 1 to {config.num_hidden_layers}")
    return replace(config, num_hidden_layers=layers)


def check_split(model: str, config: DecoderConfig, world_size: int) -> None:
    """Raise ValueError if the ranks cannot have equal shares."""
    try:
        check_heads(config.num_attention_heads, config.num_key_value_heads, world_size)
    except ValueError as error:
        raise ValueError(f"--model {model}: {error}") from error
    # Experts are split whole, or their features are.
    sizes = (config.experts.num_experts, config.experts.intermediate_size) if config.experts else ()
    if config.intermediate_size % world_size and not any(size % world_size == 0 for size in sizes):
        raise ValueError(
            f"--world-size {world_size} does not divide the intermediate_size={config.intermediate_size} of {model}; take "
            f"{math.gcd(config.intermediate_size, world_size)}"
        )


def is_decode(shape: Sequence[int]) -> bool:
    """True for a decoding step (batch, length, new). A prompt of one token is one."""
    return shape[2] == 1


def words_of(level: str, run_type: str | None, batches: Sequence[int], contexts: Sequence[int]) -> tuple[str, ...]:
    """``--run-type``, ``--bsz`` and ``--ctx`` as words for `parse_steps`: every batch with every context."""
    pairs = ",".join(f"{batch}x{context}" for batch in batches or (1,) for context in contexts or (128,))
    if level == "generate":
        return tuple(f"{pair}+64" for pair in pairs.split(","))
    return tuple(f"{run}:{pairs}" for run in ([run_type] if run_type else reversed(RUN_TYPES)))


def parse_steps(
    level: str, words: Sequence[str], config: DecoderConfig, *, tiny: bool = False, random_cache: bool = False
) -> tuple[Shape, ...]:
    """Shapes that ``words`` name, in order, without duplicates; the op's defaults without words.

    word  RUN:BxC,BxC,… with RUN prefill or decode, B sequences and C tokens each; for generate BxP+N,…: N tokens
          after prompts of P; or several words separated by commas
    tiny  for simulated ranks: other defaults, and many tokens are refused
    random_cache  steps with random caches, which may be longer than the model's positions

    ValueError for unreadable words, and for sequences longer than the model's positions.
    """
    by_size: dict[tuple[int, ...], Shape] = {}
    words = [one for several in words for one in words_apart(several)]
    for word in words or (TINY_DEFAULTS if tiny else DEFAULTS)[level]:
        for shape in _generations(word) if level == "generate" else _steps(level, word):
            longest = shape.size[1] + (shape.size[2] if level == "generate" else 0)
            if longest > config.max_position_embeddings and not random_cache:
                raise ValueError(
                    f"--shapes {word}: {longest} tokens, but the model has {config.max_position_embeddings} positions"
                )
            if tiny:
                _check_simulable(level, word, shape.size, longest)
            by_size.setdefault(shape.size, shape)
    return tuple(by_size.values())


def _check_simulable(level: str, word: str, size: tuple[int, ...], longest: int) -> None:
    """Raise ValueError, with a smaller step, for more tokens than simulated ranks can take."""
    batch, length, new = size
    if batch * longest <= SIMULATED_TOKENS:
        return
    step = f"{max(1, SIMULATED_TOKENS // longest)}x{length}"
    smaller = f"{step}+{new}" if level == "generate" else f"{word.partition(':')[0].strip()}:{step}"
    raise ValueError(
        f"--shapes {word}: simulated ranks take at most {SIMULATED_TOKENS:,} tokens, of all sequences together; take "
        f"{smaller}, or a machine with GPUs"
    )


def _steps(level: str, word: str) -> list[Shape]:
    run_type, _, pairs = word.strip().partition(":")
    sizes = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", pair) for pair in pairs.split(",")]
    if run_type not in RUN_TYPES or not all(sizes):
        raise ValueError(
            f"--shapes {word!r} is no step of {level}; write prefill:BxC or decode:BxC, B sequences of C tokens, as in "
            f"decode:32x1024"
        )
    return [
        Shape(size=(int(m[1]), int(m[2]), 1 if run_type == "decode" else int(m[2])), label=f"{run_type} {m[1]}x{m[2]}")
        for m in sizes
        if m
    ]


def _generations(word: str) -> list[Shape]:
    sizes = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)\+([1-9]\d*)", part) for part in word.strip().split(",")]
    if not all(sizes):
        raise ValueError(
            f"--shapes {word!r} is nothing to generate; write BxP+N, B prompts of P tokens and N tokens after each, as in "
            f"32x128+64"
        )
    return [
        Shape(size=(int(m[1]), int(m[2]), int(m[3])), label=f"{m[1]} prompts of {m[2]}, {m[3]} new") for m in sizes if m
    ]
