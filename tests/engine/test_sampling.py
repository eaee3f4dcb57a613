"""Sampling draws what softmax, temperature and top-p say, and nonsense parameters are refused."""

import pytest
import torch

from weft.engine.sampling import Sampling, sample_top_p


def frequencies(logits, temperature=1.0, top_p=1.0, draws=100_000):
    uniform = torch.rand(draws, generator=torch.Generator().manual_seed(0))
    tokens = sample_top_p(logits.expand(draws, -1), torch.tensor(temperature), torch.tensor(top_p), uniform)
    return torch.bincount(tokens, minlength=len(logits)) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_as_frequent_as_softmax_says(temperature):
    logits = torch.tensor([0.3, 2.0, -1.0, 1.2, -float("inf")])
    found = frequencies(logits, temperature)
    torch.testing.assert_close(found, torch.softmax(logits / temperature, -1), rtol=0, atol=0.01)
    assert found[-1] == 0


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25])
    torch.testing.assert_close(
        frequencies(probabilities.log(), top_p=0.7), torch.tensor([0.0, 2 / 3, 0.0, 1 / 3]), rtol=0, atol=0.01
    )
    assert frequencies(probabilities.log(), top_p=0.5 - 1e-4).tolist() == [0, 1, 0, 0]
    assert frequencies(probabilities.log(), top_p=1e-12).tolist() == [0, 1, 0, 0]


def test_the_ends_of_the_uniform_range_stay_inside():
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(2, -1)
    uniform = torch.tensor([0.0, 1.0 - 2**-24])
    one = torch.tensor(1.0)
    assert sample_top_p(logits, one, one, uniform).tolist() == [0, 2]
    assert sample_top_p(logits, one, torch.tensor(0.9), uniform).tolist() == [1, 2]


def test_a_temperature_near_zero_is_greedy():
    assert frequencies(torch.tensor([1.0, 1.001, 0.5]), temperature=1e-20).tolist() == [0, 1, 0]


def test_random_numbers_do_not_depend_on_how_many_are_drawn():
    sampling = Sampling(temperature=1.0, seed=3)
    assert torch.equal(sampling.uniforms(20, 3)[:7], sampling.uniforms(7, 3))
    assert not torch.equal(sampling.uniforms(7, 3), Sampling(seed=4).uniforms(7, 3))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 is not a positive integer"),
        ({"temperature": -1.0}, "temperature=-1.0 is not 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, r"top_p=0.0 is not in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"seed": -1}, "seed=-1"),
        ({"stop": ("a", "")}, "stop="),
    ],
)
def test_parameters_that_mean_nothing_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)
