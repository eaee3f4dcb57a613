"""Models whose KV cache is spread over the ranks compute what transformers computes, and their engine answers as one rank's."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import weft
from tests.against_transformers import FAMILIES, TOLERANCE, prompt, reference_logits, relative_rms
from tests.teacher_forced import in_three_ways
from weft.costs.gpu import named
from weft.engine import Engine
from weft.models import Decoder
from weft.ops.collectives.ahead import InFlight

# 16 tokens a page: rank 0 holds all of the first 16, and chunks begin and end within pages of several ranks.
LENGTH, CUTS = 53, (15, 34)


def logits(team, directory, mode, tokens, fused):
    model = Decoder.from_pretrained(directory, team, mode=mode, fused=fused, context_parallel=True)
    assert model.new_cache(4, 16).data.shape[3] == model.config.num_key_value_heads
    return in_three_ways(model, tokens, CUTS)


def check(made, mode, world_size, fused=False, length=LENGTH):
    directory, reference = made
    tokens = prompt(2, length)
    expected = reference_logits(reference, tokens)
    for found in weft.simulate(logits, world_size, args=(directory, mode, tokens, fused)):
        for way, one in zip(("at once", "in chunks", "by decoding"), found, strict=True):
            assert relative_rms(one, expected) <= TOLERANCE, way


CASES = [
    (world_size, kv_heads, mode)
    for world_size in (2, 3, 4, 8)
    for kv_heads in ((1, 3, 6) if world_size == 3 else (1, 2, 8))
    for mode in ("replicated", "sequence_parallel")
]
SAMPLE = [(2, 8, "replicated"), (2, 2, "sequence_parallel"), (3, 3, "sequence_parallel"), (4, 1, "replicated")]


def made_for(make_checkpoint, world_size, kv_heads):
    if world_size == 3:
        return make_checkpoint(num_attention_heads=6, kv_heads=kv_heads)
    return make_checkpoint(kv_heads=kv_heads)


@pytest.mark.parametrize(("world_size", "kv_heads", "mode"), SAMPLE)
def test_logits_are_those_of_transformers(make_checkpoint, plain_ops, world_size, kv_heads, mode):
    check(made_for(make_checkpoint, world_size, kv_heads), mode, world_size)


@pytest.mark.sweep
@pytest.mark.parametrize(("world_size", "kv_heads", "mode"), CASES)
def test_all_logits_are_those_of_transformers(make_checkpoint, plain_ops, world_size, kv_heads, mode):
    check(made_for(make_checkpoint, world_size, kv_heads), mode, world_size)


@pytest.mark.parametrize("family", ["qwen3-window", pytest.param("mistral", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_windows_reach_over_the_pages_of_all_ranks(make_checkpoint, request, family, fused):
    if not fused:
        request.getfixturevalue("plain_ops")
    check(make_checkpoint(**FAMILIES[family]), "replicated", 2, fused=fused, length=40)


@pytest.mark.parametrize(
    ("world_size", "kv_heads", "mode"),
    [(3, 3, "replicated"), *(pytest.param(*case, marks=pytest.mark.sweep) for case in CASES if case[1] != 8)],
)
def test_pages_that_travel_a_layer_ahead_arrive_in_time(
    make_checkpoint, plain_ops, monkeypatch, world_size, kv_heads, mode
):
    """Whatever their size; as many are sent as are received."""
    flights = []
    monkeypatch.setattr("weft.ops.collectives.ahead.FEWEST_BYTES", 0)
    for name in ("send", "receive"):
        whole = getattr(InFlight, name)
        monkeypatch.setattr(InFlight, name, counted(whole, name, flights))
    check(made_for(make_checkpoint, world_size, kv_heads), mode, world_size)
    layers = 3 * world_size
    # Two chunks behind cached tokens, and nothing for new prompts.
    assert Counter(flights) == {"send": 2 * layers, "receive": 2 * layers}


def counted(function, name, calls):
    def call(*args):
        calls.append(name)
        return function(*args)

    return call


PAGES = 5  # of 16 tokens, one of them for padding


def answers(team, directory, prompts, options):
    engine = Engine(directory, team, **{"page_size": 16, "context_parallel": True} | options)
    found = [completion.token_ids for completion in engine.generate(prompts, max_tokens=12, ignore_eos=True)]
    bytes_each = engine.batch.runner.cache.data.element_size()
    assert bytes_each == (1 if options.get("kv_cache_dtype") == "fp8" else 4)
    pool = engine.batch.scheduler.pool
    assert pool.free == pool.capacity
    return found


@pytest.mark.parametrize(("world_size", "mode"), [(2, "auto"), (4, "sequence_parallel")])
def test_an_engine_answers_as_one_rank_does(make_checkpoint, plain_ops, world_size, mode):
    """Prompts that need more pages than there are, and so wait for each other; one needs more than a rank has."""
    directory, _ = make_checkpoint(kv_heads=2)
    prompts = [prompt(1, length, seed=length)[0].tolist() for length in (3, 32 * world_size + 5, 40, 17 * world_size)]
    options = {"mode": "replicated", "context_parallel": False}
    [alone] = weft.simulate(answers, 1, args=(directory, prompts, options))
    few = {"pages": PAGES, "chunk_tokens": 24}
    for found in weft.simulate(answers, world_size, args=(directory, prompts, {"mode": mode, **few})):
        assert found == alone
    with pytest.raises(ValueError, match="KV pages"):
        weft.simulate(answers, 1, args=(directory, prompts, options | few))


def test_an_engine_spreads_the_keys_of_few_heads_by_itself(make_checkpoint, plain_ops):
    directory, _ = make_checkpoint(kv_heads=1, num_hidden_layers=1)

    def main(team, asked):
        engine = Engine(directory, team, page_size=16, context_parallel=asked, warn=False)
        [answer] = engine.generate(prompt(1, 40)[0].tolist(), max_tokens=4, ignore_eos=True)
        return engine.model.context_parallel, answer.token_ids

    (_, expected), _ = weft.simulate(main, 2, args=(False,))
    assert weft.simulate(main, 2, args=(None,)) == [(True, expected)] * 2


def test_an_fp8_cache_gives_the_same_answers_by_heads_and_over_the_ranks(make_checkpoint, plain_ops):
    directory, _ = make_checkpoint(kv_heads=2)
    prompts = [prompt(1, length, seed=length)[0].tolist() for length in (3, 40)]
    options = {"mode": "replicated", "context_parallel": False, "chunk_tokens": 24, "kv_cache_dtype": "fp8"}
    [alone] = weft.simulate(answers, 1, args=(directory, prompts, options))
    assert weft.simulate(answers, 2, args=(directory, prompts, options | {"context_parallel": True})) == [alone] * 2


def test_prompts_share_pages_of_a_spread_cache(make_checkpoint, plain_ops):
    """The first 32 tokens are a page of each of two ranks."""
    directory, _ = make_checkpoint(kv_heads=2, num_hidden_layers=1)
    [tokens] = prompt(1, 36).tolist()

    def main(team, prefix_caching):
        engine = Engine(directory, team, page_size=16, context_parallel=True, prefix_caching=prefix_caching)
        answers = [engine.generate([tokens[:length]], max_tokens=4, ignore_eos=True) for length in (34, 36, 34)]
        return answers, engine.batch.scheduler.hit_tokens

    [(expected, none), _] = weft.simulate(main, 2, args=(False,))
    assert none == 0
    assert weft.simulate(main, 2, args=(True,)) == [(expected, 64)] * 2


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' is not one of auto, fp8"),
        (
            {},
            {"kv_cache_dtype": "fp8", "fused": True},
            "kv_cache_dtype='fp8' with dtype=torch.float32: it is for bfloat16",
        ),
        ({}, {"mode": "torch"}, "context_parallel=True: mode='torch' keeps the cache split by heads"),
        ({}, {"context_parallel": 1}, "context_parallel=1"),
    ],
)
def test_what_cannot_be_spread_is_refused(make_checkpoint, changes, options, message):
    directory, _ = make_checkpoint(**changes)
    with pytest.raises(ValueError, match=message):
        weft.simulate(answers, 2, args=(directory, [[1, 2]], options))


def fused_logits(team, directory, tokens, options):
    """After a prompt, after a chunk behind it, and after each of two decoded tokens."""
    model = Decoder.from_pretrained(directory, team, mode="replicated", context_parallel=True, **options)
    cache, pages = model.new_cache(5, 16), torch.tensor([[3], [1]], dtype=torch.int32)
    found, tokens = [], tokens.to(team.device)
    for before, end in ((0, 15), (15, 18)):
        step = model.prefill_step([(before, end - before)] * 2, pages, 16)
        found.append(
            model.lm_head.gather(model(tokens[:, before:end].flatten(), step, cache)).view(2, end - before, -1)
        )
    for at in (18, 19):
        step = model.decode_step(torch.full((2,), at), pages, 16)
        found.append(model.lm_head.gather(model(tokens[:, at].contiguous(), step, cache))[:, None])
    return torch.cat(found, 1).float()


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_kernels_over_a_spread_cache_agree_with_transformers(make_checkpoint, world_size):
    directory, reference = make_checkpoint(kv_heads=2, num_hidden_layers=1)
    tokens = prompt(2, 20)
    for found in weft.simulate(fused_logits, world_size, args=(directory, tokens, {"fused": True})):
        assert relative_rms(found, reference_logits(reference, tokens)) <= 1e-3


@pytest.mark.parametrize("family", [pytest.param("Qwen3", marks=pytest.mark.sweep), "Qwen2"])
def test_new_prompts_by_torch_s_attention_take_a_rank_s_own_heads(make_checkpoint, monkeypatch, family):
    """As on GPUs with many rows. Qwen2 has biases, with which keys and values come together."""
    limits = replace(named("h200").limits, cudnn_rows=0)
    monkeypatch.setattr("weft.parallel.step.limits_of", lambda team: limits)
    directory, reference = make_checkpoint(family, kv_heads=2, num_hidden_layers=1)
    tokens = prompt(2, 20)
    for found in weft.simulate(fused_logits, 2, args=(directory, tokens, {"fused": True})):
        assert relative_rms(found, reference_logits(reference, tokens)) <= 1e-3


@pytest.mark.parametrize("family", [pytest.param("Qwen3", marks=pytest.mark.sweep), "Qwen2"])
def test_prompts_that_go_on_over_a_spread_cache_are_computed_in_parts(make_checkpoint, monkeypatch, family):
    """As on GPUs after many cached tokens, of which the pages come from all ranks."""
    limits = replace(named("h200").limits, cudnn_rows=0, cudnn_cached=0)
    monkeypatch.setattr("weft.parallel.step.limits_of", lambda team: limits)
    monkeypatch.setattr("weft.parallel.step.takes_cached", lambda *given: True)
    directory, reference = make_checkpoint(family, kv_heads=2, num_hidden_layers=1)
    tokens = prompt(2, 20)
    for found in weft.simulate(fused_logits, 2, args=(directory, tokens, {"fused": True})):
        assert relative_rms(found, reference_logits(reference, tokens)) <= 1e-3


@pytest.mark.sweep
def test_kernels_over_a_spread_fp8_cache_agree_with_torch(make_checkpoint):
    directory, _ = make_checkpoint(kv_heads=2, num_hidden_layers=1)
    options = {"dtype": torch.bfloat16, "kv_cache_dtype": "fp8"}
    fused, plain = (
        weft.simulate(fused_logits, 2, args=(directory, prompt(2, 20), options | {"fused": fused}))
        for fused in (True, False)
    )
    assert torch.equal(*fused) and relative_rms(fused[0], plain[0]) <= 0.05
