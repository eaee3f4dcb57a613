"""Commands of the documents, each as the words that its program gets.

A command stands in
    a block of sh, bash or console, or one without a language that begins with a program
    a block of YAML, as the list `command` and what the list `args` adds to it
    an indented line, or a code span, that begins with two words as a command does
Prompt, comment, variables, redirections and `…` are left out; parts of a pipe are commands of their own.
"""

from __future__ import annotations

import keyword
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tests.documents import Block, blocks, turns

# Other blocks without a language are pictures.
PROGRAMS = ("weft", "python", "torchrun", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Command of a page. ``is_turn``: it is one of a console block; ``is_whole``: nothing was left out of it."""

    page: Path
    words: tuple[str, ...]
    is_turn: bool
    is_whole: bool

    def __str__(self) -> str:
        return shlex.join(self.words)


def commands(page: Path) -> Iterator[Command]:
    """Yield the commands of a page."""
    for line, is_turn in lines(page):
        for words in parts(line):
            kept = tuple(word for word in words if "…" not in word and word != "...")
            yield Command(page=page, words=kept, is_turn=is_turn, is_whole=kept == words)


def lines(page: Path) -> Iterator[tuple[str, bool]]:
    """Yield the lines of a page that hold commands, and whether each is one of a console block."""
    for block in blocks(page):
        for line in lines_of(block):
            yield line, block.language == "console"
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`((?:[^`\n]|\n(?!\s*\n))+)`", text)  # they may be broken over lines, not over paragraphs
    for line in re.findall(r"^ {4}(.*)$", text, flags=re.MULTILINE) + spans:
        if looks_like_a_command(line):
            yield " ".join(line.splitlines()), False


def lines_of(block: Block) -> Iterator[str]:
    """Yield the lines of a block that hold commands; a line that ends in a backslash goes on in the next one."""
    text = block.text.replace("\\\n", " ")
    if block.language == "console":
        yield from (command for command, _ in turns(replace(block, text=text)))
    elif block.language == "yaml":
        yield from commands_of_yaml(yaml.safe_load(text))
    elif block.language in ("sh", "bash") or not block.language and first_word(text) in PROGRAMS:
        yield from (line for line in text.splitlines() if line and not line.startswith("#"))


def commands_of_yaml(tree: Any) -> Iterator[str]:
    """Yield the command of each container of a YAML document."""
    if isinstance(tree, dict):
        if "command" in tree:
            yield shlex.join([*tree["command"], *tree.get("args", [])])
        tree = list(tree.values())
    for inner in tree if isinstance(tree, list) else ():
        yield from commands_of_yaml(inner)


def looks_like_a_command(text: str) -> bool:
    """True for a word in lower case and another one behind it, unless they are Python, as in `team.node is team`."""
    first, second = (*without_variables(text.split()), "", "")[:2]
    is_word = re.fullmatch(r"[a-z.][\w./-]*\w", first) and re.match(r"[\w./$'\"\[…-]", second)
    return bool(is_word) and second != "-" and not {first, second} & {*keyword.kwlist}


def first_word(text: str) -> str:
    return (*without_variables(text.split()), "")[0]


def parts(line: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command in a line: of a pipe's parts, and of `$(…)` in front of what takes its output."""
    for inner in re.findall(r"\$\((.*?)\)", line):
        yield from parts(inner)
    line = re.sub(r"(?<=\s)\d(?=[<>])", "", re.sub(r"\$\(.*?\)", "OUTPUT", line))  # 2> as >
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    tokens = iter([*lexer, ";"])
    for token in tokens:
        if set(token) <= set("|&;"):
            if words := without_wrappers(words):
                yield tuple(words)
            words = []
        elif set(token) <= set("<>&"):
            next(tokens)  # the file
        else:
            words.append(token)


def without_wrappers(words: list[str]) -> list[str]:
    """Words behind variables, `timeout 60` and `srun`. Those of the environment of this checkout lose their folder."""
    words = without_variables(words)
    while words and words[0] in ("timeout", "srun"):
        words = words[2 if words[0] == "timeout" else 1 :]
    return [words[0].removeprefix(".venv/bin/"), *words[1:]] if words else []


def without_variables(words: list[str]) -> list[str]:
    """Words behind those of the form NAME=value."""
    return without_variables(words[1:]) if words and re.match(r"[A-Z_]+=", words[0]) else words
