"""Plain English, as far as a machine can judge it: openings and lengths of docstrings, words that are not or seldom used."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.figures import DIALECT, VAGUE

ROOT = Path(__file__).parent.parent
WEFT = ROOT / "weft"
LONGEST = 100
# A noun phrase or an imperative has its noun in it; what begins so has left it to the function's name.
OPENINGS = re.compile(r"(Of|What|Whether|How many|Who|Nobody|That|As|It|Those|Where)\b")
PHRASES = re.compile(
    r"\b(so many|nobody|everybody|everyone|somebody|whoever|whomever|lest|in vain|come home|comes home)\b",
    re.IGNORECASE,
)
# Most uses of words for which a noun is clearer, in weft/ and docs/, and of variables that do not say what they hold, in weft/.
# The limits are the counts of the tree: lower them with it.
MOST_DIALECT, MOST_VAGUE = 90, 17


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


def test_docstrings_comments_and_messages_are_plain_english():
    by_file = {file.relative_to(WEFT).as_posix(): mistakes(file.read_text()) for file in sorted(WEFT.rglob("*.py"))}
    assert {file: lines for file, lines in by_file.items() if lines} == {}


@pytest.mark.parametrize(
    ("words", "most", "folders"), [(DIALECT, MOST_DIALECT, ("weft", "docs")), (VAGUE, MOST_VAGUE, ("weft",))]
)
def test_words_that_stand_for_a_noun_become_fewer(words, most, folders):
    """Whole docstrings, comments and pages; a failure lists the files that use them most."""
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.*") if file.suffix in (".py", ".md")]
    uses = Counter({file.relative_to(ROOT).as_posix(): len(words.findall(file.read_text())) for file in files})
    assert uses.total() <= most, f"{uses.total()} uses of {words.pattern}, {most} before: {uses.most_common(20)}"


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
