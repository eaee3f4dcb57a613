"""On GPUs stages answer as one rank does: over NCCL's rails, launched kernel by kernel and in CUDA graphs."""

import pytest
import torch

import weft
from weft.engine import Engine
from weft.engine.graphs import Turn

PROMPTS = ["a prompt", "x", "another, longer prompt", "one of more tokens than a microbatch has, which is cut"]


def answers(team, directory, options):
    """Token ids of greedy and sampled answers, twice each: captured, and replayed. In fp32, so that rounding chooses none."""
    found = []
    for cuda_graph in (False, True):
        engine = Engine(directory, team, dtype=torch.float32, cuda_graph=cuda_graph, **options)
        for sampling in ({}, {"temperature": 1.0, "top_p": 0.9, "seed": 1, "logprobs": 1}) * 2:
            found.append(
                [one.token_ids for one in engine.generate(PROMPTS, max_tokens=12, ignore_eos=True, **sampling)]
            )
        turns = {type(size) for size, _ in engine.batch.runner.graphs} & {Turn}
        assert bool(turns) == (cuda_graph and options.get("microbatch_tokens") == 1), (
            "steps of four sequences in flight"
        )
    return found


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("world_size", "node_size"), [(2, 1), (2, 2), (4, 2)])
def test_stages_answer_as_one_rank(byte_model, world_size, node_size):
    [alone] = weft.launch(answers, 1, "cuda", args=(byte_model, {}))
    assert alone[:4] == alone[4:]
    shared = torch.cuda.device_count() < world_size
    for microbatch_tokens in (16, 1):
        options = {"pipeline_parallel": 2, "microbatch_tokens": microbatch_tokens}
        given = {"args": (byte_model, options), "node_size": node_size, "share_gpus": shared}
        assert weft.launch(answers, world_size, "cuda", heap_bytes=64 << 20, **given) == [alone] * world_size
