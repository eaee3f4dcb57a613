"""A main whose body would never run is refused by every function that takes one."""

import functools

import pytest

import weft
import weft.check
from weft.errors import WrongMain


async def coroutine(team):
    raise AssertionError("never runs")


def generator(team):
    yield team.rank


async def both(team):
    yield team.rank


class AsyncCall:
    async def __call__(self, team):
        raise AssertionError("never runs")


class Generates:
    def __call__(self, team):
        yield team.rank


@functools.wraps(coroutine)
def wrapped(team):
    return coroutine(team)


DOORS = {
    "simulate": lambda main: weft.simulate(main, 2),
    "check": lambda main: weft.check(main, 2, schedules=2),
    "launch": lambda main: weft.launch(main, 2, device="sim"),
}
REFUSED = {
    "coroutine": (coroutine, "main=coroutine is an async function"),
    "generator": (generator, "main=generator is a generator function"),
    "async generator": (both, "main=both is an async generator function"),
    "partial": (functools.partial(functools.partial(coroutine)), "main=coroutine is an async function"),
    "async call": (AsyncCall(), "main=AsyncCall is an async function"),
    "generating call": (Generates(), "main=Generates is a generator function"),
    "method": (AsyncCall().__call__, "main=__call__ is an async function"),
    "returned coroutine": (lambda team: coroutine(team), "main=<lambda> returned a coroutine"),
    "returned generator": (lambda team: generator(team), "main=<lambda> returned a generator"),
    "returned async generator": (lambda team: both(team), "main=<lambda> returned a async_generator"),
    "wrapper": (wrapped, "main=coroutine returned a coroutine"),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("case", REFUSED)
def test_a_main_that_would_never_run_is_refused_in_one_line(case, door):
    main, says = REFUSED[case]
    with pytest.raises(WrongMain) as caught:
        DOORS[door](main)
    message = str(caught.value)
    assert message.startswith(says), message
    assert "\n" not in message and "pass a plain function main(team, ...)" in message
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("door", DOORS)
def test_a_main_that_takes_other_arguments_is_refused_in_one_line(door):
    for main, says in (
        (
            lambda: None,
            r"main=<lambda>\(\) cannot be called as <lambda>\(team\): too many positional arguments; it takes",
        ),
        (lambda team, x: None, r"called as <lambda>\(team\): missing a required argument: 'x'; .* then args"),
    ):
        with pytest.raises(ValueError, match=says):
            DOORS[door](main)
    with pytest.raises(ValueError, match=r"called as <lambda>\(team, 'x', 2\): too many"):
        weft.simulate(lambda team, x: None, 2, args=("x", 2))


@functools.wraps(lambda team, x: x)
def adds_an_argument(team):
    return team.rank


class Plain:
    def __call__(self, team):
        return team.rank


@pytest.mark.parametrize(
    "main",
    [
        lambda team: team.rank,
        Plain(),
        functools.partial(lambda x, team: x, 3),
        Plain().__call__,
        adds_an_argument,
        lambda *given: 3,
        print,
    ],
)
def test_any_other_callable_runs(main):
    assert len(weft.simulate(main, 1)) == 1


def test_a_class_is_called_as_any_other():
    class Main:
        def __init__(self, team):
            self.rank = team.rank

    assert [main.rank for main in weft.simulate(Main, 2)] == [0, 1]
