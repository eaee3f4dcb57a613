"""Search of the designs of a model's ops at its start, by passes of padding at the sizes of its steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weft.engine.graphs import without_autograd
from weft.layers import MoE
from weft.runtime.logs import logger_of
from weft.tune.warm_search import Mixture, Pass, Searched, warm_search

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weft.engine.config import EngineConfig
    from weft.engine.runner import Runner
    from weft.models import Decoder

logger = logger_of(__name__)


def search(runner: Runner, config: EngineConfig) -> Searched | None:
    """Search the ops that this model's steps call, before the KV cache takes the memory. Collective.

    Kernels then run by these results and by the file of earlier starts. None on virtual ranks, whose times
    mean nothing.
    """
    if runner.pipeline.team.is_simulated:
        logger.info("tune: virtual ranks search nothing, since their times mean nothing")
        return None
    made = search_passes(runner, config)
    logger.info("tune: %s", made)
    return made


def search_passes(runner: Runner, config: EngineConfig) -> Searched:
    """``search``, on virtual ranks too."""
    folder = None if config.tune_cache is None else Path(config.tune_cache)
    passes = list(passes_of(runner, config.chunk_tokens))
    return warm_search(
        runner.pipeline.team, passes, mixture_of(runner.pipeline.model), seconds=config.tune_seconds, folder=folder
    )


def passes_of(runner: Runner, chunk_tokens: int) -> Iterator[Pass]:
    """Decode steps of all sizes, with drafts as configured, and prompts of up to ``chunk_tokens`` tokens."""
    for batch in runner.buckets.sizes:
        for size in runner.decode_sizes(batch):
            yield Pass(f"decode {size}", batch, partial(runner.run_empty, size))
    # The largest prompts first: they take most of a long prompt's time.
    for tokens in reversed(runner.prompts.padding_sizes(chunk_tokens)):
        yield Pass(f"prompt {tokens}", tokens, partial(_prompt, runner, tokens))


def _prompt(runner: Runner, tokens: int) -> None:
    with without_autograd(runner.pipeline.team.device):
        runner.prompts.run_padding_of(tokens)


def mixture_of(model: Decoder) -> Mixture | None:
    """Sizes of the model's experts at a rank; None: it has none."""
    mixtures = (layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE))
    if (moe := next(mixtures, None)) is None:
        return None
    return Mixture(moe.gating.k, moe.experts.total, moe.experts.count, model.config.hidden_size, moe.local_features)
