"""Structure that an answer has: a JSON schema, an expression, choices or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from weft.arguments import check_instance, quoted, strings_of
from weft.runtime.codec import exchangeable


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Structure that an answer has: one of these. ValueError for none, several or an invalid value.

    json         JSON schema, as text or a dict
    regex        regular expression that the whole answer matches, without look-around and back-references
    choice       texts, of which the answer is one
    grammar      context-free grammar, in Lark's syntax or GBNF (llama.cpp's)
    json_object  True: any JSON object
    """

    json: str | dict[str, Any] | None = field(default=None, hash=False)
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [one.name for one in fields(self) if getattr(self, one.name) is not None]
        if len(given) != 1:
            names = ", ".join(one.name for one in fields(self))
            raise ValueError(f"structured_outputs has {' and '.join(given) or 'nothing'}; pass one of {names}")
        [name] = given
        plain = {"json": _json, "choice": _choice, "json_object": _only_true}.get(name, _text)
        object.__setattr__(self, name, plain(name, getattr(self, name)))

    @property
    def grammar_text(self) -> tuple[str, str]:
        """Kind of grammar and its text, as llguidance names and takes them."""
        if self.json is not None or self.json_object:
            return "json_schema", self.json or '{"type": "object"}'
        if self.choice is not None:
            return "choice", json.dumps(self.choice)
        return ("regex", self.regex) if self.regex is not None else ("grammar", self.grammar)


def _text(name: str, value: object) -> str:
    check_instance(name, value, str, "text")
    return value


def _json(name: str, value: object) -> str:
    """A JSON schema as text, from text or a dict."""
    if not isinstance(value, Mapping):
        check_instance(name, value, str, "text")
    try:
        if isinstance(value, str):
            json.loads(value)
            return value
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}={quoted(value)} is not a JSON schema: {error}") from None


def _choice(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not (choice := strings_of(name, value)):
        raise ValueError(f"{name}={quoted(value)} is not a list of texts")
    return choice


def _only_true(name: str, value: object) -> bool:
    if value is not True:
        raise ValueError(f"{name}={quoted(value)} is not True; leave it out")
    return value
