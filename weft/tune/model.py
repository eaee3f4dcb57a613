"""Search of the ops that a model calls, ``weft tune --model``: random weights, few layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.engine.config import EngineConfig
from weft.engine.runner import Runner
from weft.models import Decoder, DecoderConfig
from weft.plan import searched
from weft.tune.engine_search import search_passes

if TYPE_CHECKING:
    from weft.runtime.team.team import Team
    from weft.tune.warm_search import Searched


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSearch:
    """Search for one model. engine: its options of steps, budget and cache."""

    model: DecoderConfig
    engine: EngineConfig

    @property
    def folder(self) -> Path:
        given = self.engine.tune_cache
        return searched.default_folder() if given is None else Path(given)


def fewest_layers(config: DecoderConfig) -> DecoderConfig:
    """The model's first layers, as many as have all kinds of its layers."""
    kinds: list[object] = []
    for layer in range(config.num_hidden_layers):
        experts = config.experts is not None and config.experts.in_layer(layer)
        linear = config.linear_attention is not None and config.linear_attention.layers[layer]
        kinds.append((config.attention.window(layer), config.rotary_of(layer), experts, linear))
    count = 1 + max(kinds.index(kind) for kind in set(kinds))
    return replace(config, num_hidden_layers=count)


def on_rank(team: Team, asked: ModelSearch) -> Searched:
    """Search on one rank."""
    engine, made = asked.engine, []
    sizes = fewest_layers(asked.model)
    longest = engine.max_seq_len or sizes.max_position_embeddings
    engine, sizes = replace(engine, max_seq_len=longest), replace(sizes, max_position_embeddings=longest)
    model = Decoder(sizes, team, expert_layout=engine.expert_layout, quantization=engine.quantization).fill_dummy()
    Runner(model, engine, before_cache=lambda runner: made.append(search_passes(runner, engine)))
    return made[0]
