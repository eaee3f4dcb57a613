"""Models whose layers all have windows need the pages of these alone, and read none that they have given back."""

import pytest
import torch

import weft
from tests.against_transformers import FAMILIES, prompt, reference_greedy
from weft.engine import Engine

PAGE, WINDOW = 16, 20


def answers(team, directory, lengths, tokens, poison, options):
    """(token ids by prompt, preemptions), where pages that no sequence refers to, and page 0, hold `poison`."""
    engine = Engine(directory, team, **{"mode": "replicated", "page_size": PAGE} | options)
    pool, data = engine.batch.scheduler.pool, engine.batch.runner.cache.data
    give_back, usage = pool.give_back, []

    def poisoned(pages):
        assert 0 not in pages
        give_back(pages)
        data[:, :, [0, *(page for page in pages if not pool._references[page] and page not in pool._digest_of)]] = (
            poison
        )

    pool.give_back = poisoned
    poisoned([])
    prompts, found = [prompt(1, length)[0].tolist() for length in lengths], [[] for _ in lengths]
    for piece in engine.stream(prompts, max_tokens=tokens, ignore_eos=True):
        found[piece.prompt].append(piece.token_id)
        usage.append(engine.load.cache_usage)
    assert 0 < max(usage) <= 1 and engine.load.cache_usage == 0 and pool.free == pool.capacity
    return found, engine.stats.preemptions


def expected_of(reference, lengths, tokens):
    return [reference_greedy(reference, prompt(1, length), tokens)[0].tolist() for length in lengths]


@pytest.mark.parametrize(
    ("world_size", "lengths", "options"),
    [
        (1, (45,), {"pages": 1 + 3, "chunk_tokens": 64}),
        (1, (45, 30, 60), {"pages": 1 + 5, "chunk_tokens": 16, "prefix_caching": False}),
        (2, (45,), {"pages": 1 + 2, "chunk_tokens": 24, "context_parallel": True, "prefix_caching": False}),
    ],
    ids=str,
)
def test_answers_need_the_pages_of_their_windows(make_checkpoint, plain_ops, world_size, lengths, options):
    """45 + 30 tokens take 5 pages, or 3 of each of two ranks. Three prompts have to give way to each other."""
    directory, reference = make_checkpoint("Mistral", sliding_window=WINDOW)
    expected = expected_of(reference, lengths, 30)
    # Masked numbers have no weight, and NaN times no weight would be NaN in torch's operations.
    for found, preemptions in weft.simulate(answers, world_size, args=(directory, lengths, 30, 1e4, options)):
        assert found == expected and (preemptions > 0) == (len(lengths) > 1)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.sweep)])
def test_kernels_read_no_page_that_was_given_back(make_checkpoint, world_size):
    directory, reference = make_checkpoint("Mistral", sliding_window=WINDOW, num_hidden_layers=1)
    options = {"fused": True, "chunk_tokens": 24, "prefix_caching": False}
    options |= {"pages": 1 + 3 if world_size == 1 else 1 + 2, "context_parallel": world_size > 1}
    for found, _ in weft.simulate(answers, world_size, args=(directory, (45,), 12, torch.nan, options)):
        assert found == expected_of(reference, (45,), 12)


def test_a_model_with_one_layer_without_a_window_keeps_all_pages(make_checkpoint, plain_ops):
    directory, _ = make_checkpoint(**FAMILIES["qwen3-window"])
    with pytest.raises(ValueError, match="need 5 KV pages of 16 tokens, and there are 4"):
        weft.simulate(answers, 1, args=(directory, (45,), 30, 1e4, {"pages": 1 + 4}))
