"""Generator of docs/host.md: ``python -m tests.runtime.host_page`` writes it.

Signatures and descriptions are those of the code, the example that of tests/runtime/host_example.py.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import weft
from tests.language.primitives_page import promise, whole
from tests.runtime import host_example
from weft import errors
from weft.runtime.platforms.platform import CopyEngine, Library
from weft.runtime.team.channel import Channel
from weft.runtime.team.rail import Rail

PAGE = Path(__file__).parent.parent.parent / "docs" / "host.md"

HEAD = """# The host's API

What a program calls around its kernels: it starts the ranks, makes symmetric memory and signals, and copies beside the compute
stream. Written by `python -m tests.runtime.host_page` from the docstrings. What kernels call: [primitives](primitives.md). The
ops: `make docs`. [`weft check`](check.md) and [`weft.trace`](trace.md) have pages of their own.

A `main(team)` runs once per rank; *collective* calls are made by all ranks in the same order. The example adds up what the copy
engines of the other ranks send, twice:
"""
FUNCTIONS = ("launch", "simulate", "init", "exchangeable")
# Heading and name in programs -> its class.
CLASSES: dict[str, type] = {
    "team": weft.Team,
    "channel": Channel,
    "copy_engine": CopyEngine,
    "rail": Rail,
    "library": Library,
}
# How a program gets each.
FROM = {
    "team": "`main(team)` gets it from `weft.launch` and `weft.simulate`; elsewhere `weft.init()` makes one.",
    "copy_engine": "`team.copy_engine`.",
    "rail": "`team.rail`, of a team of several nodes ([nodes](nodes.md)).",
    "library": "`team.library`.",
}
# Public in Python, for weft's own files.
INTERNAL = {"team": {"record_into"}, "channel": {"make"}}


def members(name: str) -> dict[str, Any]:
    """Public methods and properties of a class, in the order of its source."""
    return {
        member: found
        for member, found in vars(CLASSES[name]).items()
        if not member.startswith("_")
        and (inspect.isroutine(found) or isinstance(found, (property, staticmethod, classmethod)))
        and member not in INTERNAL.get(name, ())
    }


def function_of(member: Any) -> Any:
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


def described_by_class(name: str) -> set[str]:
    """Names that the table of a class's docstring describes."""
    rows = re.findall(r"^(\w+(?:, \w+)*) {2,}\S", inspect.getdoc(CLASSES[name]), flags=re.MULTILINE)
    return {one for row in rows for one in row.split(", ")}


def lacking() -> list[str]:
    """Members without a description, a line each."""
    return [
        f"{name}.{member} has no docstring, and the class's docstring has no line for it"
        for name in CLASSES
        for member, found in members(name).items()
        if not function_of(found).__doc__ and member not in described_by_class(name)
    ]


def signature(function: Any) -> str:
    """Parameters with their defaults, without self and annotations."""
    parameters = [
        one.replace(annotation=inspect.Parameter.empty)
        for one in inspect.signature(function).parameters.values()
        if one.name != "self"
    ]
    return str(inspect.Signature(parameters)).replace("'", '"')


def meaning(kind: type) -> str:
    """First sentence of an error's docstring, without its fields."""
    return re.sub(r" `\w+`: .*", "", promise(kind).splitlines()[0])


def page() -> Iterator[str]:
    """Yield the page's paragraphs."""
    yield HEAD.strip()
    yield f"```python\n{inspect.getsource(host_example).partition(chr(10) * 2)[2].strip()}\n```"
    yield "## weft"
    for name in FUNCTIONS:
        function = getattr(weft, name)
        yield f"### weft.{name}"
        yield f"```python\nweft.{name}{signature(function)}\n```"
        yield promise(function)
    yield "### weft.Piece"
    yield promise(weft.Piece)
    for name, made in CLASSES.items():
        yield f"## {name}"
        if name in FROM:
            yield FROM[name]
        yield promise(made)
        for member, found in members(name).items():
            if not (function := function_of(found)).__doc__:
                continue  # the class's table has it
            of = "weft.Team" if isinstance(found, staticmethod) else name
            yield f"### {of}.{member}"
            shown = "" if isinstance(found, property) else signature(function)
            yield f"```python\n{of}.{member}{shown}\n```"
            yield promise(function)
    yield "## Errors"
    yield "All are `weft.errors.WeftError`; a wrong argument is a `ValueError`."
    kinds = (
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.WeftError) and kind is not errors.WeftError
    )
    rows = (f"| `{kind.__name__}` | {meaning(kind)} |" for kind in kinds)
    yield "\n".join(["| error | meaning |", "|---|---|", *rows])


def write() -> str:
    return whole(lacking(), page())


if __name__ == "__main__":
    PAGE.write_text(write())
