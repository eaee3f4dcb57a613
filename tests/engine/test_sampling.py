"""Sampling draws what softmax, temperature and top-p say, the same over any number of ranks; nonsense is refused."""

from dataclasses import replace

import pytest
import torch

import weft
from weft.engine.params import MAX_TEMPERATURE, Kind, SamplingParams
from weft.engine.sampling import Choice, choose_tokens
from weft.ops.vocab.sample_argmax import gumbel_noise
from weft.parallel.vocabulary import VocabParallelHead

DRAWS = 100_000


def choose(
    logits,
    temperature,
    top_p=1.0,
    seed=0,
    position=0,
    kind=None,
    world_size=1,
    fused=False,
    top_k=0,
    min_p=0.0,
    adjustments=None,
):
    """The tokens of logits[B, V], split over the ranks; all ranks must choose alike.

    adjustments  makes a rank's, and its rows, from its head
    """
    batch, vocab_size = logits.shape

    def column(values, dtype):
        return torch.as_tensor(values, dtype=dtype).expand(batch)

    choice = Choice(
        temperature=column(temperature, torch.float32),
        top_p=column(top_p, torch.float32),
        top_k=column(top_k, torch.int64),
        min_p=column(min_p, torch.float32),
        seed=column(seed, torch.int64),
        position=column(position, torch.int64),
    )
    if kind is None:
        kind = Kind.NUCLEUS if (choice.top_p < 1).any() else Kind.SAMPLED
        if (choice.top_k > 0).any() or (choice.min_p > 0).any():
            kind = Kind.TRUNCATED

    def main(team):
        head = VocabParallelHead(vocab_size, 8, team=team, mode="torch", dtype=torch.float32)
        mine = torch.full((batch, head.local_size), -float("inf"))
        mine[:, : head.real_size] = logits[:, head.start : head.start + head.real_size]
        made, rows = adjustments(head) if adjustments else (None, None)
        return choose_tokens(head, mine, replace(choice, adjustments=made, rows=rows), kind, fused=fused)

    results = weft.simulate(main, world_size)
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0]


def frequencies(logits, temperature=1.0, top_p=1.0, draws=DRAWS, **options):
    tokens = choose(logits.expand(draws, -1), temperature, top_p, seed=torch.arange(draws), **options)
    return torch.bincount(tokens, minlength=len(logits)) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_as_frequent_as_softmax_says(temperature):
    logits = torch.tensor([0.3, 2.0, -1.0, 1.2, -float("inf")])
    found = frequencies(logits, temperature)
    torch.testing.assert_close(found, torch.softmax(logits / temperature, -1), rtol=0, atol=0.01)
    assert found[-1] == 0


def test_tokens_of_one_seed_are_as_frequent_along_the_positions():
    logits = torch.tensor([0.3, 2.0, -1.0, 1.2])
    tokens = choose(logits.expand(DRAWS, -1), 1.0, position=torch.arange(DRAWS))
    found = torch.bincount(tokens, minlength=4) / DRAWS
    torch.testing.assert_close(found, torch.softmax(logits, -1), rtol=0, atol=0.01)


def test_noise_is_gumbel_and_of_seed_position_and_word_alike():
    words = torch.arange(1000)
    noise = gumbel_noise(torch.arange(100), torch.zeros(100, dtype=torch.int64), words)
    cumulative = torch.exp(-torch.exp(-noise.double())).flatten().sort().values
    uniform = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    assert (cumulative - uniform).abs().max() < 0.006  # Kolmogorov-Smirnov: 1.95 / sqrt(100,000) at 0.001
    assert noise.unique().numel() > 99_000
    along = gumbel_noise(torch.zeros(100, dtype=torch.int64), torch.arange(100), words)
    for other in (along, noise.roll(1, 0), noise.roll(1, 1)):
        assert abs(torch.corrcoef(torch.stack((noise.flatten(), other.flatten())))[0, 1]) < 0.02


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25])
    torch.testing.assert_close(
        frequencies(probabilities.log(), top_p=0.7), torch.tensor([0.0, 2 / 3, 0.0, 1 / 3]), rtol=0, atol=0.01
    )
    assert frequencies(probabilities.log(), top_p=0.5 - 1e-4).tolist() == [0, 1, 0, 0]
    assert frequencies(probabilities.log(), top_p=1e-12).tolist() == [0, 1, 0, 0]


def kept_by_sorting(logits, temperature, top_p):
    """The words that some draw of top-p sampling may give, by the definition: sorted, until top_p is reached."""
    probabilities = torch.softmax(logits.double() / temperature, -1)
    ordered, words = probabilities.sort(descending=True)
    before = ordered.cumsum(-1) - ordered
    return {int(word) for word in words[before < top_p]}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 0.5), (0.3, 0.9), (2.0, 0.99)])
def test_the_kept_tokens_are_those_of_sorting(temperature, top_p, world_size):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    tokens = choose(logits.expand(20_000, -1), temperature, top_p, seed=torch.arange(20_000), world_size=world_size)
    kept = kept_by_sorting(logits, temperature, top_p)
    found = set(tokens.tolist())
    # What is likelier than one in 1,000 is drawn once in 20,000 draws, or should be.
    probabilities = torch.softmax(logits / temperature, -1)
    assert {word for word in kept if probabilities[word] > 1e-3} <= found <= kept


TRUNCATED = [
    {"top_k": 3},
    {"top_k": 20},
    {"min_p": 0.2},
    {"top_k": 6, "min_p": 0.1, "top_p": 0.8},
    {"top_k": 99, "top_p": 0.6},
]


@pytest.mark.parametrize("options", TRUNCATED)
@pytest.mark.parametrize("temperature", [1.5])
def test_truncated_draws_are_as_frequent_as_after_transformers_processors(options, temperature):
    """In vLLM's order: temperature, min_p, top_k, top_p. Pearson's chi-squared, five standard deviations allowed."""
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(40, generator=torch.Generator().manual_seed(5)) * 2
    kept = logits[None] / temperature
    if "min_p" in options:
        kept = transformers.MinPLogitsWarper(options["min_p"])(None, kept)
    if "top_k" in options:
        kept = transformers.TopKLogitsWarper(min(options["top_k"], 40))(None, kept)
    kept = transformers.TopPLogitsWarper(options.get("top_p", 1.0))(None, kept)
    draws = 20_000
    expected = draws * kept[0].double().softmax(-1)
    found = draws * frequencies(logits, temperature, draws=draws, **options)
    assert (found[expected == 0] == 0).all()
    often = expected > 5
    statistic, freedom = ((found - expected)[often].square() / expected[often]).sum(), int(often.sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 1


def test_equally_likely_tokens_at_the_end_of_top_k_are_all_kept():
    found = frequencies(torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0]), top_k=2)
    shares = torch.tensor([1.0, 2.0, 1.0, 1.0, -torch.inf]).softmax(-1)
    torch.testing.assert_close(found, shares, rtol=0, atol=0.01)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_truncated_draws_are_alike_over_the_ranks_and_in_a_mixed_batch(world_size, fused):
    """Rows of which some ask for nothing, one is greedy, one has -inf everywhere but at one rank."""
    logits = torch.randn(8, 101, generator=torch.Generator().manual_seed(6)) * 3
    logits[6, :90] = -torch.inf
    words = {
        "temperature": torch.tensor([0.0, 1.0, 1.0, 2.0, 0.7, 1.0, 1.0, 0.0]),
        "top_p": torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0, 1.0, 0.9, 0.5]),
        "top_k": torch.tensor([0, 5, 0, 50, 200, 0, 3, 2]),
        "min_p": torch.tensor([0.0, 0.0, 0.3, 0.05, 0.0, 0.0, 0.1, 0.5]),
        "seed": torch.arange(8),
    }
    for position in range(2):
        together = choose(logits, **words, position=position, world_size=world_size, fused=fused)
        for row in range(8):
            one = {name: value[row : row + 1] for name, value in words.items()}
            assert together[row] == choose(logits[row : row + 1], **one, position=position)[0]


@pytest.mark.parametrize("kind", [Kind.SAMPLED, Kind.NUCLEUS])
def test_every_world_size_chooses_alike(kind):
    logits = torch.randn(50, 101, generator=torch.Generator().manual_seed(2)) * 3
    words = {"temperature": 1.0, "top_p": 1.0 if kind == Kind.SAMPLED else 0.9, "seed": torch.arange(50), "position": 7}
    alone = choose(logits, **words)
    assert len(alone.unique()) > 20
    for world_size in (2, 4):
        assert torch.equal(choose(logits, **words, world_size=world_size), alone)


def test_each_sequence_of_a_mixed_batch_is_served_as_alone():
    logits = torch.randn(6, 64, generator=torch.Generator().manual_seed(3))
    temperature, top_p = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.7, 1.3]), torch.tensor([1.0, 1.0, 0.5, 0.5, 0.9, 1.0])
    seed, position = torch.arange(6), torch.arange(6) * 3
    together = choose(logits, temperature, top_p, seed, position, world_size=2)
    assert together[0] == logits[0].argmax() and together[3] == logits[3].argmax()
    for row in range(6):
        one = slice(row, row + 1)
        kind = Kind.GREEDY if temperature[row] == 0 else Kind.SAMPLED if top_p[row] == 1 else Kind.NUCLEUS
        alone = choose(logits[one], temperature[one], top_p[one], seed[one], position[one], kind=kind)
        assert together[row] == alone[0]


def test_a_temperature_near_zero_is_greedy():
    assert frequencies(torch.tensor([1.0, 1.001, 0.5]), temperature=1e-20).tolist() == [0, 1, 0]
    assert frequencies(torch.tensor([1.0, 1.001, 0.5]), temperature=1e-20, top_p=0.5).tolist() == [0, 1, 0]


def test_at_the_greatest_temperature_all_tokens_are_alike_and_padding_is_none():
    logits = torch.tensor([9.0, 0.0, -9.0]).expand(20_000, -1)
    tokens = choose(logits, MAX_TEMPERATURE, seed=torch.arange(20_000), world_size=2)
    torch.testing.assert_close(torch.bincount(tokens, minlength=3) / 20_000, torch.full((3,), 1 / 3), rtol=0, atol=0.02)


def test_equally_likely_tokens_are_all_kept_whatever_the_sign_of_zero():
    found = frequencies(torch.tensor([0.0, -0.0, 0.0, -9.0]), top_p=0.3)
    torch.testing.assert_close(found, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0]), rtol=0, atol=0.01)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", [Kind.GREEDY, Kind.SAMPLED, Kind.NUCLEUS])
def test_fused_kernels_choose_what_torch_does(kind, world_size):
    logits = torch.randn(12, 3000, generator=torch.Generator().manual_seed(4)) * 3
    logits[3, 700:900] = logits[3].max()  # equal ones, over two ranks
    logits[4] = logits[4].bfloat16().float()
    logits[5, :2990] = -float("inf")
    words = {
        "temperature": torch.tensor([0.0, 0.3, 1.0, 2.0] * 3),
        "top_p": torch.tensor([0.5, 1.0, 0.9] * 4),
        "seed": torch.arange(12) * 1_000_003,
        "position": torch.arange(12),
        "kind": kind,
    }
    expected = choose(logits, **words)
    assert torch.equal(choose(logits, **words, world_size=world_size, fused=True), expected)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 is not a positive integer"),
        ({"temperature": -1.0}, "temperature=-1.0 is not 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1e38}, r"temperature=1e\+38 is not 0 \(greedy\) or a positive number up to 1e\+30"),
        ({"temperature": None}, "temperature=None is not a number"),
        ({"top_p": "0.9"}, "top_p='0.9' is not a number"),
        ({"stop": 5}, "stop=5 is not a string or a list of strings"),
        ({"top_k": -2}, "top_k=-2 is not a number of tokens, or 0 or -1 for all"),
        ({"top_k": 1.5}, "top_k=1.5 is not"),
        ({"top_k": 1 << 31}, "top_k=2147483648 is not"),
        ({"min_p": 1.5}, r"min_p=1.5 is not in \[0, 1\]"),
        ({"min_p": "0.1"}, "min_p='0.1' is not a number"),
        ({"skip_special_tokens": 1}, "skip_special_tokens=1 is not True or False"),
        ({"include_stop_str_in_output": None}, "include_stop_str_in_output=None"),
        ({"top_p": 0.0}, r"top_p=0.0 is not in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"max_tokens": True}, "max_tokens=True is not a positive integer"),
        ({"temperature": True}, "temperature=True is not a number"),
        ({"ignore_eos": "no"}, "ignore_eos='no' is not True or False"),
        ({"seed": False}, "seed=False is not an integer"),
        ({"seed": -1}, "seed=-1"),
        ({"stop": ("a", "")}, "stop="),
        ({"stop_token_ids": 5}, "stop_token_ids=5 is not a list of token ids"),
        ({"stop_token_ids": [1, -1]}, r"stop_token_ids=\[1, -1\] is not"),
        ({"stop_token_ids": b"ab"}, "stop_token_ids=b'ab' is not"),
        ({"stop_token_ids": {5: 1}}, "stop_token_ids={5: 1} is not"),
        ({"stop_token_ids": [True]}, r"stop_token_ids=\[True\] is not"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)


def test_stop_tokens_are_the_same_in_any_order():
    one, other = (SamplingParams(stop_token_ids=ids) for ids in ([7, 3, 7], {3, 7}))
    assert one == other and one.stop_token_ids == (3, 7)
