"""The built-in models on a team of several nodes answer as one rank does."""

import pytest

import weft
from weft.engine import Engine
from weft.models.builtin import PATHS


def answers(team, name, options, prompts, tokens):
    found = Engine(PATHS[name], team, **options).generate(prompts, max_tokens=tokens)
    return [completion.token_ids for completion in found]


def check(name, options, prompts=("123+456=", "7+8="), tokens=5):
    [alone] = weft.simulate(answers, 1, args=(name, {"mode": "replicated", "fused": False}, prompts, tokens))
    assert weft.simulate(answers, 4, node_size=2, args=(name, options, prompts, tokens)) == [alone] * 4


def test_decode_answers_over_two_nodes():
    check("adder", {"mode": "replicated", "fused": True}, prompts=("7+8=",), tokens=2)


@pytest.mark.sweep
@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("mode", ["replicated", "sequence_parallel"])
@pytest.mark.parametrize("fused", [True, False])
def test_every_recipe_answers_over_two_nodes(name, mode, fused):
    check(name, {"mode": mode, "fused": fused})


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["replicated", "sequence_parallel"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_spread_cache_answers_over_two_nodes(mode, fused):
    check("adder", {"mode": mode, "fused": fused, "context_parallel": True, "page_size": 16})
