"""weft's own ops under a few schedules each; ``python -m tests.check.sweep`` runs hundreds."""

import inspect

import pytest

import weft.check
from tests.check.sweep import OPS
from tests.runtime import behaviour
from weft import ops


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("call", OPS, ids=lambda call: call.name.replace(" ", "-"))
def test_an_op_is_clean(call, world_size):
    report = weft.check.check(call, world_size, schedules=4, sms=call.sms)
    assert report.ok, str(report)


def test_all_ops_of_a_team_are_among_them():
    named = {call.name.split()[0] for call in OPS}
    of_a_team = {name for name in ops.__all__ if "team" in inspect.signature(getattr(ops, name)).parameters}
    assert of_a_team - {"explain"} <= named


@pytest.mark.parametrize("behave", behaviour.ALL, ids=lambda behave: behave.__name__)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_teams_and_words_promise_holds_under_check(behave, world_size):
    report = weft.check.check(behave, world_size, schedules=4)
    assert report.ok, str(report)
