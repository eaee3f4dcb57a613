"""On a GPU that two ranks share: graphs over a spread cache after a warm-up, and pages that windows have left."""

import json
import shutil

import pytest
import torch

import weft
from weft.engine import Engine
from weft.engine.prompts import Shape

PROMPTS = [
    "a prompt",
    "another, longer prompt",
    "a prompt of more tokens than are read at once by an engine that is told so",
]
# In fp32, so that rounding chooses no token.
OPTIONS = {"mode": "gemm_ar", "dtype": torch.float32, "chunk_tokens": 16, "max_batch": 4, "page_size": 16}


def spread_and_warm(team, directory):
    """[token ids] of calls without graphs, and with those of a warm-up; (prompts' passes that had none, gathering replays)."""
    found = []
    for graphs in (False, True):
        engine = Engine(directory, team, context_parallel=True, warm_up=graphs, cuda_graph=graphs, **OPTIONS)
        prompts, shapes = engine.batch.runner.prompts, []
        padded = prompts._read_padded
        prompts._read_padded = lambda chunks, shape, run=padded, seen=shapes: seen.append(shape) or run(chunks, shape)
        # The second call finds first tokens in the cache.
        calls = [engine.generate(PROMPTS, max_tokens=12, **one) for one in ({}, {}, {"temperature": 1.0, "seed": 1})]
        assert not graphs or engine.stats.capture_seconds == 0
        found.append([[answer.token_ids for answer in call] for call in calls])
    gathering = [shape for shape in shapes if isinstance(shape, Shape) and shape.entries]
    return *found, sum(prompts._launched.values()), len(gathering)


@pytest.mark.gpu(1)
def test_after_a_warm_up_no_prompt_over_a_spread_cache_runs_without_a_graph(byte_model):
    for expected, found, eager, gathering in weft.launch(
        spread_and_warm, 2, "cuda", heap_bytes=64 << 20, args=(byte_model,), share_gpus=True
    ):
        assert found == expected and eager == 0 and gathering > 0


def in_few_pages(team, directory):
    """Token ids with pages enough, without graphs; and with those of a window or two, with graphs."""
    few = 2 if team.size > 1 else 3  # of 20 tokens
    found = []
    for graphs, pages in ((False, None), (True, 1 + few), (True, 1 + 2 * few + 1)):
        engine = Engine(
            directory, team, context_parallel=team.size > 1, cuda_graph=graphs, pages=pages, max_seq_len=96, **OPTIONS
        )
        calls = [engine.generate([PROMPTS[1], "x"], max_tokens=60, ignore_eos=True) for _ in range(2)]
        assert engine.batch.scheduler.pool.free == engine.batch.scheduler.pool.capacity
        found.append([[answer.token_ids for answer in call] for call in calls])
    return found


@pytest.mark.gpu(1)
@pytest.mark.parametrize("world_size", [1, 2])
def test_long_answers_run_in_the_pages_of_their_windows(byte_model, tmp_path, world_size):
    directory = shutil.copytree(byte_model, tmp_path / "windowed")
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 0}
    (directory / "config.json").write_text(json.dumps(json.loads((directory / "config.json").read_text()) | window))
    for expected, *others in weft.launch(
        in_few_pages, world_size, "cuda", heap_bytes=64 << 20, args=(directory,), share_gpus=world_size > 1
    ):
        assert all(found == expected for found in others)
