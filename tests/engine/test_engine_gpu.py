"""On GPUs decode runs as a CUDA graph: the same tokens as without it, on every rank, call after call."""

import pytest
import torch

import weft
from weft.engine import Engine

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


@pytest.mark.parametrize("mode", ["torch", "ag_rs", "gemm_ar"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_graph_gives_the_tokens_of_eager_steps_on_every_rank(byte_model, mode, world_size):
    eager, *others = weft.launch(answers, world_size, "cuda", args=(byte_model, mode, False))
    graphed = weft.launch(answers, world_size, "cuda", args=(byte_model, mode, True))
    for found in (*others, *graphed):
        assert found == eager
    assert eager[0] == eager[2]


def sums(team, mode):
    engine = Engine(None, team, mode=mode)
    return engine.generate(["123+456=", "999+1="], max_new_tokens=8), engine.stats


@pytest.mark.parametrize("mode", ["torch", "ag_rs", "gemm_ar"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_built_in_model_adds_on_gpus(mode, world_size):
    for completions, stats in weft.launch(sums, world_size, "cuda", args=(mode,)):
        assert [completion.text for completion in completions] == ["579", "1000"]
        assert stats.capture_seconds > 0
