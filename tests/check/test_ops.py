"""weft's own ops under a few schedules each; ``python -m tests.check.sweep`` runs hundreds."""

import pytest

import weft.check
from tests.check.sweep import OPS
from tests.runtime import behaviour


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("call", OPS, ids=lambda call: call.name.replace(" ", "-"))
def test_an_op_is_clean(call, world_size):
    report = weft.check.check(call, world_size, schedules=4)
    assert report.ok, str(report)


@pytest.mark.parametrize("behave", behaviour.ALL, ids=lambda behave: behave.__name__)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_teams_and_words_promise_holds_under_check(behave, world_size):
    report = weft.check.check(behave, world_size, schedules=4)
    assert report.ok, str(report)
