"""On GPUs decode runs as a CUDA graph: the same tokens as without it, on every rank, call after call.

One launch a world size does all modes: starting the ranks takes longer than what they do.
"""

import pytest
import torch

import weft
from weft.engine import Engine
from weft.layers import MODES

PROMPTS = ["a prompt", "x", "another, longer prompt"]
WORLD_SIZES = [pytest.param(world_size, marks=pytest.mark.gpu(world_size)) for world_size in (1, 2, 4)]


def answers(team, directory, mode, cuda_graph):
    """Each kind of answer: captured, captured anew for sampling and for another batch, and replayed."""
    engine = Engine(directory, team, mode=mode, dtype=torch.bfloat16, cuda_graph=cuda_graph)
    return [
        engine.generate(PROMPTS, max_new_tokens=40),
        engine.generate(PROMPTS, max_new_tokens=40, temperature=1.0, top_p=0.9, seed=1),
        engine.generate(PROMPTS, max_new_tokens=40),
        engine.generate(PROMPTS[1:], max_new_tokens=10),
        engine.generate(PROMPTS, max_new_tokens=40, stop="q"),
    ]


def in_all_modes(team, directory):
    """{mode: (eager answers, answers from graphs, the adder's texts, seconds its capture took)}"""
    found = {}
    for mode in MODES:
        adder = Engine(None, team, mode=mode)
        sums = [completion.text for completion in adder.generate(["123+456=", "999+1="], max_new_tokens=8)]
        eager, graphed = (answers(team, directory, mode, cuda_graph) for cuda_graph in (False, True))
        found[mode] = eager, graphed, sums, adder.stats.capture_seconds
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_graph_gives_the_tokens_of_eager_steps_on_every_rank(byte_model, world_size):
    by_rank = weft.launch(in_all_modes, world_size, "cuda", args=(byte_model,))
    for mode in MODES:
        expected = by_rank[0][mode][0]
        assert expected[0] == expected[2], mode
        for rank, found in enumerate(by_rank):
            eager, graphed, sums, capture_seconds = found[mode]
            assert eager == expected and graphed == expected, f"rank {rank}, mode {mode}"
            assert sums == ["579", "1000"] and capture_seconds > 0, f"rank {rank}, mode {mode}"
