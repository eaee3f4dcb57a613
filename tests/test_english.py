"""Rule 16, as far as a machine can judge it: how docstrings open, how long their first line is, words that are not used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

WEFT = Path(__file__).parent.parent / "weft"
LONGEST = 100
# A noun phrase or an imperative has its noun in it; what begins so has left it to the function's name.
OPENINGS = re.compile(r"(Of|What|Whether|How many|Who|Nobody|That|As|It|Those|Where)\b")
PHRASES = re.compile(
    r"\b(so many|nobody|everybody|everyone|somebody|whoever|whomever|lest|in vain|come home|comes home)\b",
    re.IGNORECASE,
)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, first line) of each docstring of a module, class or function."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text.strip().partition("\n")[0]


def mistakes(source: str) -> list[str]:
    """What a file must change, each with its line."""
    found = []
    for line, first in docstrings(ast.parse(source)):
        if opening := OPENINGS.match(first):
            found.append(f"{line}: a docstring opens with {opening[0]!r}")
        if len(first) > LONGEST:
            found.append(f"{line}: the first line of a docstring has {len(first)} characters, more than {LONGEST}")
    for number, text in enumerate(source.splitlines(), 1):
        found += (f"{number}: {phrase[0]!r}" for phrase in PHRASES.finditer(text))
    return found


FILES = sorted(file.relative_to(WEFT).as_posix() for file in WEFT.rglob("*.py"))


@pytest.mark.parametrize("file", FILES)
def test_docstrings_comments_and_messages_are_plain_english(file):
    assert mistakes((WEFT / file).read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        '"""Of a team: its ranks."""',
        'class A:\n    """What it holds."""',
        'def f():\n    """How many there are."""',
        f'def f():\n    """{"Long " * 21}"""',
        "x = 1  # nobody reads it",
        'raise ValueError(f"so many {x}")',
    ],
)
def test_a_mistake_would_be_seen(source):
    assert len(mistakes(source)) == 1


def test_plain_english_is_let_through():
    assert (
        mistakes('"""Offsets of tiles, as many as fit."""\n\n\ndef f():\n    """Assign slots.\n\n    What else."""')
        == []
    )
