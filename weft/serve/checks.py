"""Checks of a request's fields, whose errors name the field at fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from weft.arguments import check_optional, did_you_mean, quoted, shortened

JSON_TYPES = {dict: "an object", bool: "true or false", str: "a string", list: "a list"}


class BadField(ValueError):
    """A request that cannot be answered as it is. ``param``: the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def json_of(text: str | bytearray) -> Any:
    """Decoded JSON. ValueError or RecursionError for what is none, such as NaN."""

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is not a number of JSON")

    return json.loads(text, parse_constant=refuse_constant)


def given_of(body: object) -> dict[str, Any]:
    """Fields of a decoded JSON body that are not null. BadField for a body that is no object."""
    if not isinstance(body, dict):
        raise BadField(f"the body is {quoted(body)}; send a JSON object")
    return {name: value for name, value in body.items() if value is not None}


def given_among(body: object, known: Iterable[str], neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Fields of `given_of` that are known. BadField for another one, unless it is neutral."""
    given, known = given_of(body), tuple(known)
    for name, value in given.items():
        if name not in known:
            refuse(name, value, neutral, known)
    return {name: given[name] for name in known if name in given}


def refuse(name: str, value: object, neutral: Mapping[str, tuple[Any, ...]], known: Iterable[str]) -> None:
    """Raise BadField for a field that is not supported, unless its value asks for nothing.

    neutral  values that ask for nothing, by field of the API
    known    fields that are supported
    """
    if name not in neutral:
        near = did_you_mean(name, known)
        raise BadField(f"{shortened(name)} is not a field of this request; leave it out{near}", shortened(name))
    if not any(value == one and type(value) in (type(one), float) for one in neutral[name]):
        raise BadField(f"{name}={quoted(value)} is not supported; leave it out", name)


def checked(name: str, check: Callable[[str, Any], Any], value: Any) -> Any:
    """The value that `check(name, value)` returns, else `value`. BadField for its ValueError."""
    try:
        result = check_optional(check, name, value)
    except ValueError as error:
        raise BadField(str(error), name) from None
    return value if result is None else result


def of_type(kind: type) -> Callable[[str, object], None]:
    """Check of a value of a type in JSON."""

    def check(name: str, value: object) -> None:
        if not isinstance(value, kind):
            raise ValueError(f"{name}={quoted(value)} is not {JSON_TYPES[kind]}")

    return check


a_text, an_object = of_type(str), of_type(dict)
