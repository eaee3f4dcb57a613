"""Refusal of a main whose body would never run: coroutine functions, generator functions and the like."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from weft.arguments import quoted, shortened
from weft.errors import WrongMain


def check_main(main: object) -> None:
    """WrongMain if a call of ``main`` would not run its body, as with async functions and generators."""
    body = main
    while isinstance(body, functools.partial):
        body = body.func
    call = body if inspect.isroutine(body) or inspect.isclass(body) else type(body).__call__
    for function in (body, call):
        for matches, what in _KINDS:
            if matches(function):
                raise WrongMain(_name(main), what)


def check_takes(main: Any, args: tuple) -> None:
    """ValueError unless ``main`` can be called with a team and ``args``."""
    try:
        signature = inspect.signature(main, follow_wrapped=False)
    except (TypeError, ValueError):  # of a function written in C
        return
    try:
        signature.bind(None, *args)
    except TypeError as error:
        given = ", ".join(["team", *(quoted(arg) for arg in args)])
        takes = f"{_name(main)}{shortened(str(signature))}"
        raise ValueError(
            f"main={takes} cannot be called as {_name(main)}({shortened(given)}): {error}; it takes the team, then args"
        ) from None


def checked_result(main: object, result: Any) -> Any:
    """``result`` of ``main``; WrongMain if it is a coroutine or a generator, whose body has not run."""
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        if hasattr(result, "close"):
            result.close()  # otherwise Python warns that it was never awaited
        raise WrongMain(_name(main), f"returned a {type(result).__name__}")
    return result


_KINDS = (
    (inspect.iscoroutinefunction, "is an async function"),
    (inspect.isasyncgenfunction, "is an async generator function"),
    (inspect.isgeneratorfunction, "is a generator function"),
)


def _name(main: object) -> str:
    while isinstance(main, functools.partial):
        main = main.func
    return getattr(main, "__name__", None) or type(main).__name__
