"""On GPUs decode runs as a CUDA graph: the same tokens as without it, on every rank, call after call, in every bucket.

One launch a world size does all modes: starting the ranks takes longer than what they do.
"""

from dataclasses import replace

import pytest
import torch

import weft
from tests.engine.replaying import graphs_and_eager, replayed
from weft.engine import Engine, SamplingParams
from weft.engine.prompts import Shape
from weft.models import DecoderConfig
from weft.ops.collectives import ahead
from weft.plan import algorithms

PROMPTS = ["a prompt", "x", "another, longer prompt"]
LONG = ["a prompt of more tokens than are read at once by an engine that is told so"]
WORLD_SIZES = [pytest.param(world_size, marks=pytest.mark.gpu(world_size)) for world_size in (1, 2, 4)]


def answers(team, directory, mode, cuda_graph):
    """Each kind of answer: captured, captured anew for sampling and for another bucket, and replayed.

    In fp32: prompts that are padded for a graph may have another GEMM kernel, and a bf16 logit is often as large as the next.
    """
    engine = Engine(directory, team, mode=mode, dtype=torch.float32, cuda_graph=cuda_graph)
    by_16 = Engine(directory, team, mode=mode, dtype=torch.float32, cuda_graph=cuda_graph, chunk_tokens=16)
    return [
        engine.generate(PROMPTS, max_tokens=12),
        engine.generate(PROMPTS, max_tokens=12, temperature=1.0, seed=1),
        engine.generate(PROMPTS, max_tokens=12, temperature=1.0, top_p=0.9, seed=1),
        engine.generate(PROMPTS, max_tokens=12),
        engine.generate(PROMPTS[1:], max_tokens=4),
        engine.generate(PROMPTS * 3, max_tokens=8, stop="q"),  # some end early and leave their slots
        [engine.generate([prompt], max_tokens=12)[0] for prompt in PROMPTS],
        [*engine.generate(LONG, max_tokens=12), *by_16.generate(LONG, max_tokens=12)],
        by_16.generate(PROMPTS + LONG, max_tokens=12),  # the end of one prompt with the begin of another
    ]


def in_all_modes(team, directory):
    """{mode: (eager answers, answers from graphs, the adder's texts, seconds its capture took)}, and what `replayed` finds"""
    found = {}
    for mode in ("torch", "ag_rs", "gemm_ar"):
        adder = Engine(None, team, mode=mode)
        sums = [completion.text for completion in adder.generate(["123+456=", "999+1="], max_tokens=8)]
        eager, graphed = (answers(team, directory, mode, cuda_graph) for cuda_graph in (False, True))
        found[mode] = eager, graphed, sums, adder.stats.capture_seconds
    taking_turns = team.size > torch.cuda.device_count()  # then a step takes a hundred times as long
    ways = graphs_and_eager(20 if taking_turns else 1000)
    return found, [replayed(team, directory, ways, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_graphs_give_the_tokens_of_eager_steps_on_every_rank_a_thousand_times(byte_model, world_size):
    by_rank = weft.launch(in_all_modes, world_size, "cuda", args=(byte_model,))
    [one_rank] = weft.launch(answers, 1, "cuda", args=(byte_model, "torch", False))
    for mode, (expected, *_) in by_rank[0][0].items():
        assert expected[0] == expected[3], mode
        assert [a.token_ids for a in expected[6]] == [a.token_ids for a in expected[0]], f"{mode}: in a batch or alone"
        assert [a.token_ids for a in one_rank[0]] == [a.token_ids for a in expected[0]], (
            f"{mode}: other tokens than one rank's"
        )
        at_once, in_chunks = expected[7]
        assert at_once == in_chunks and expected[8] == [*expected[0], at_once], f"{mode}: by chunks"
        for rank, (found, _) in enumerate(by_rank):
            eager, graphed, sums, capture_seconds = found[mode]
            assert eager == expected and graphed == expected, f"rank {rank}, mode {mode}"
            assert sums == ["579", "1000"] and capture_seconds > 0, f"rank {rank}, mode {mode}"
    for _, found in by_rank:
        for exact, _, *others in found:
            for eager in others:
                assert torch.equal(exact[0], eager[0]) and torch.equal(exact[1], eager[1])
        exact, padded, *_ = found[0]
        assert torch.equal(exact[0], padded[0])
        # Another number of rows may be another GEMM kernel, with sums in another order.
        torch.testing.assert_close(padded[1], exact[1], rtol=1e-4, atol=1e-4)


def warmed_up_at_start(team, directory):
    """Answers, seconds of capture in them and hit tokens, of an engine that captures at start and of one without graphs."""
    options = {"mode": "gemm_ar", "dtype": torch.float32, "chunk_tokens": 64, "max_batch": 4, "page_size": 16}
    found = []
    for graphs in (True, False):
        engine = Engine(directory, team, warm_up=graphs, cuda_graph=graphs, **options)
        assert engine.batch.runner.graphs.warm == graphs
        made, seconds, hits = [], 0.0, 0
        for sampling in ({}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "top_p": 0.9, "seed": 1}):
            made.append(engine.generate([*PROMPTS, *LONG], max_tokens=12, **sampling))
            seconds, hits = seconds + engine.stats.capture_seconds, hits + engine.stats.hit_tokens
        found.append((made, seconds, hits))
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES[:2])
def test_an_engine_that_captures_at_start_captures_nothing_later_and_answers_alike(byte_model, world_size):
    for (made, seconds, hits), (expected, _, as_many) in weft.launch(
        warmed_up_at_start, world_size, "cuda", args=(byte_model,)
    ):
        assert made == expected and seconds == 0 and hits == as_many > 0


def spread_over_ranks(team, directory):
    """[token ids by call] without graphs, with graphs, and with those and pages that copy engines carry; graphs that gather."""
    options = {"mode": "gemm_ar", "dtype": torch.float32, "chunk_tokens": 16, "page_size": 16, "context_parallel": True}
    found, fewest = [], ahead.FEWEST_BYTES
    for graphs, least in ((False, fewest), (True, fewest), (True, 0)):
        ahead.FEWEST_BYTES = least
        engine = Engine(directory, team, cuda_graph=graphs, **options)
        calls = [engine.generate([*PROMPTS, *LONG], max_tokens=12) for _ in range(8)]
        gathering = {size for size, _ in engine.batch.runner.graphs if isinstance(size, Shape) and size.entries}
        found.append(([[answer.token_ids for answer in call] for call in calls], len(gathering)))
    return found


@pytest.mark.gpu(2)
def test_prompts_over_a_spread_cache_run_as_graphs_and_give_the_same_tokens(byte_model):
    """The later calls find the first tokens of the long prompt in the cache."""
    for (expected, none), *others in weft.launch(spread_over_ranks, 2, "cuda", args=(byte_model,)):
        assert none == 0
        for found, gathering in others:
            assert found == expected and gathering > 0


@pytest.mark.gpu(2)
def test_an_llm_answers_from_processes_of_its_own_and_outlives_a_refusal(byte_model):
    with weft.LLM(byte_model, 2, device="cuda") as llm:
        [first] = llm.generate(PROMPTS[0], SamplingParams(max_tokens=20))
        with pytest.raises(ValueError, match=r"prompts\[0\]='' is empty"):
            llm.generate("")
        kept = llm.stream(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True))
        begun = next(kept)
        for drawn in range(4):
            left = llm.stream(PROMPTS, SamplingParams(max_tokens=70, ignore_eos=True))
            for _ in range(drawn):
                next(left)
            left.close()
        assert len([begun, *kept]) == 60
        assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=20)) == [first]
        assert len(first.token_ids) == 20 and llm.stats.new_tokens == 20
    with pytest.raises(ValueError, match="no such directory"):
        weft.LLM("/nowhere", 2, device="cuda")


def warmed_up(team, file):
    """Entries that an engine's warm-up leaves, and tokens of a prompt, for two engines of one file."""
    config = replace(DecoderConfig.named("qwen3-0.6b"), num_hidden_layers=2)
    found = []
    for _ in range(2):
        engine = Engine(config, team, algorithm_cache=file, chunk_tokens=512, max_batch=2, max_seq_len=600, pages=40)
        [answer] = engine.generate([list(range(1, 500))], max_tokens=4)
        found.append((algorithms.read(file), answer.token_ids))
    return found


@pytest.mark.gpu(2)
def test_an_engine_finds_algorithms_once(tmp_path):
    file = tmp_path / "algorithms.json"
    first, second = weft.launch(warmed_up, 2, "cuda", args=(file,))
    assert first == second
    (entries, tokens), again = first
    assert again == (entries, tokens)
    if torch.cuda.get_device_capability() == (9, 0):
        assert {entry.shape[0] for entry in entries} >= {256, 512}
