"""``weft bench invariance``: requests, the first difference, flags; its runs are in tests/engine/test_invariant_engine.py."""

import struct

import pytest
from typer.testing import CliRunner

from weft.bench.invariance.answers import Answered, Bits, compare, requests_of
from weft.bench.invariance.command import FEW, MANY, SIMULATED, InvarianceFlags, asked_of
from weft.bench.invariance.configurations import configurations
from weft.cli import app


def word(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def bits(*logprobs):
    return Bits(tuple(range(len(logprobs))), tuple(map(word, logprobs)))


def test_requests_are_the_same_each_time_and_of_each_kind():
    made = requests_of(30, 1000, 64, 8)
    assert made == requests_of(30, 1000, 64, 8) != requests_of(30, 1000, 64, 8, seed=1)
    assert {(one.params.temperature, one.params.top_k) for one in made} == {(0.0, 0), (0.8, 0), (1.0, 50)}
    assert all(0 < len(one.prompt) <= 64 and max(one.prompt) < 1000 for one in made)
    heads = [tuple(one.prompt[:32]) for one in made if len(one.prompt) > 32]
    assert len(set(heads)) < len(heads), "no prefix is shared"


def test_the_first_difference_is_named_with_its_bits():
    expected = [Answered(bits(-1.0, -2.0)), Answered(bits(-1.0, -0.5), bits(-3.0))]
    given = [Answered(bits(-1.0, -2.0)), Answered(bits(-1.0, -0.25), bits(-3.0))]
    compared, differing, first = compare(expected, given)
    assert (compared, differing) == (5, 1)
    assert str(first) == (
        "request 1, answer token 1: token 1 with log-probability -0.25 (0xbe800000), expected token 1 with log-probability "
        "-0.5 (0xbf000000)"
    )
    shorter = [Answered(bits(-1.0)), given[1]]
    assert compare(expected, shorter)[2].given == "no token"
    assert (
        compare(expected, [Answered(Bits((0, 1))), given[1]])[0] == 3
    )  # without log-probabilities nothing is compared


@pytest.mark.parametrize(
    ("flags", "requests"),
    [
        ({"model": "qwen3-0.6b", "dummy_weights": True}, MANY),
        ({"model": "qwen3-8b", "dummy_weights": True}, FEW),
        ({"model": "qwen3-8b", "dummy_weights": True, "requests": 3}, 3),
    ],
)
def test_a_large_model_answers_fewer_requests(flags, requests):
    asked = asked_of(InvarianceFlags(**flags), simulated=False)
    assert asked.requests == requests and asked.engine.invariant
    assert [one.batch for one in asked.configurations] == [one.batch for one in configurations(False)]
    assert asked_of(InvarianceFlags(), simulated=True).requests == SIMULATED


def test_configurations_cover_every_option():
    for quick in (False, True):
        every = configurations(False, quick)
        for name in ("prefix", "drafts", "crowded", "finished"):
            assert {getattr(one, name) for one in every} == {False, True}, name
        assert {one.graphs for one in every} == {False, True} and {one.chunk for one in every} == {256, 4096}
        assert every[0].scored and {1, 128} <= {one.batch for one in every}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "sim", "--cost"], "--cost times steps on GPUs"),
        (["--dummy-weights"], "--dummy-weights takes --model NAME"),
        (["--compare", "no-such-file.json"], "--compare no-such-file.json is no file of weft bench invariance"),
    ],
)
def test_flags_that_do_not_fit_are_refused(words, message):
    result = CliRunner().invoke(app, ["bench invariance", *words])
    assert result.exit_code == 2 and message in result.output
