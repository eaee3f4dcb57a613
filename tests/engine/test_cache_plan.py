"""The KV cache is spread over the ranks where that makes it smaller, unless something else is asked for."""

import dataclasses

import pytest

from weft.engine import EngineConfig
from weft.engine.config import plan_cache
from weft.models import DecoderConfig


def planned(world_size, model="qwen3-30b-a3b", **options):
    return plan_cache(EngineConfig(max_seq_len=40960, **options), DecoderConfig.named(model), world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_as_many_kv_heads_as_ranks_are_split_by_heads(world_size):
    assert not planned(world_size).context_parallel


def test_fewer_kv_heads_than_ranks_spread_the_cache():
    found = planned(8)
    assert found.context_parallel
    assert str(found) == (
        "spread over the ranks by pages: 40960 tokens of 4 KV heads take 20480 tokens of a head on each of 8 ranks, the other "
        "way 40960; context_parallel=False splits by heads"
    )
    assert not planned(8, page_size=256, mode="torch").context_parallel
    assert not plan_cache(EngineConfig(max_seq_len=40960), DecoderConfig.named("qwen3-30b-a3b"), 8, 2).context_parallel


def test_pages_that_a_sequence_cannot_fill_are_not_spread():
    config, model = EngineConfig(max_seq_len=128), DecoderConfig.named("qwen3-30b-a3b")
    assert not plan_cache(config, model, 8).context_parallel
    assert plan_cache(dataclasses.replace(config, page_size=16), model, 8).context_parallel


@pytest.mark.parametrize("asked", [True, False])
def test_what_is_asked_for_is_what_runs(asked):
    for world_size in (2, 8):
        found = planned(world_size, context_parallel=asked)
        assert (found.context_parallel, found.reason) == (asked, f"context_parallel={asked}")
