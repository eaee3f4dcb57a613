"""GSan's words: device assertions on a rank's standard error, and the findings that they are.

GSan ends a kernel at the later access of a race. It names the kind of both accesses and the later one's line, but not the
program and the line of the earlier one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from weft.check.detector.findings import Finding, Place, Side, allowed_by

# As CUDA's driver writes it: file, line, function (GSan's is empty), block, thread, message.
_LINE = re.compile(
    r"^(?P<file>.+?):(?P<line>\d+): (?P<function>.*?): ?block: \[(?P<block>[\d, ]+)\], thread: \[[\d, ]+\] "
    r"Assertion [`'](?P<message>.*)[`'] failed\.?\s*$"
)
# Message of a race -> its earlier and its later access.
RACES = {
    "Read after write race detected": ("store", "load"),
    "Write after read race detected": ("load", "store"),
    "Write after write race detected": ("store", "store"),
}
UNFOLLOWED = "kernel launched with programmatic dependent launch did not call gdc_wait"
# Messages that say that GSan cannot go on, not that the program is wrong.
LIMITS = {
    "Vector clock overflowed": "an SM has made more than 65,535 releases",
    "GSan clock buffer token overflowed": "an SM has made more than 65,535 releases, or as many looks at a signal by atomics",
    "GSan clock buffer token overwritten": "more releases since than TRITON_GSAN_CLOCK_BUFFER_SIZE",
    "Access crosses a GSan memory category boundary": "an access is partly of memory that GSan does not follow",
    "Atomic access spans too many GSan shadow cells": "an atomic access of more than 12 bytes",
    "GSan detected atomic release accumulation with mixed scopes, which is not supported.": (
        "two atomic operations release one signal at different scopes"
    ),
}  # fmt: skip
# Functions of weft whose line GSan names in place of the kernel's, and the primitive that calls them.
_PRIMITIVES = {
    "load_acquire": "wait", "load_acquire_each": "wait", "store_release": "notify", "add_release": "notify",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Assertion:
    """A device assertion of one line, merged over programs and threads.

    program  first program whose thread failed; ``threads``: lines of the driver
    """

    rank: int
    file: str
    line: int
    message: str
    program: int
    threads: int

    @property
    def is_race(self) -> bool:
        return self.message in RACES

    @property
    def place(self) -> Place:
        function, text = _around(self.file, self.line)
        return Place(file=self.file, line=self.line, function=function, text=text)


def assertions(text: str, rank: int) -> list[Assertion]:
    """Device assertions in a rank's standard error, in the order of their first lines."""
    merged: dict[tuple[str, int, str], Assertion] = {}
    for line in text.splitlines():
        said = _LINE.match(line)
        if said is None:
            continue
        key = said["file"], int(said["line"]), said["message"]
        before = merged.get(key)
        program = int(said["block"].split(",")[0]) if before is None else before.program
        threads = 1 if before is None else before.threads + 1
        merged[key] = Assertion(
            rank=rank, file=key[0], line=key[1], message=key[2], program=program, threads=threads
        )  # fmt: skip
    return list(merged.values())


def findings(said: Iterable[Assertion]) -> list[Finding]:
    """Findings in weft's words; what only says that GSan cannot go on is none (`limits`)."""
    return [finding_of(one) for one in said if one.message not in LIMITS]


def limits(said: Iterable[Assertion]) -> list[str]:
    """Sentences about what GSan could not follow."""
    return [
        f"GSan stopped on rank {one.rank} at {one.place}: {one.message.rstrip('.')} ({LIMITS[one.message]})"
        for one in said
        if one.message in LIMITS
    ]


def finding_of(said: Assertion) -> Finding:
    place = said.place
    task = f"rank {said.rank} kernel {place.function} program {said.program}"
    if not said.is_race:
        kind = "unfollowed" if said.message == UNFOLLOWED else "error"
        later = Side(
            rank=said.rank, task=task, verb="ends" if kind == "unfollowed" else "asserts", place=place, sync=""
        )
        return Finding(kind=kind, message=f"on the GPU: {said.message}", rank=said.rank, sides=(later,))
    first, second = RACES[said.message]
    later = Side(rank=said.rank, task=task, verb=_verb(place, second), place=place, sync="")
    earlier = Side(rank=said.rank, task="another program, which GSan does not name", verb=first, place=None, sync="")
    message = f"GSan, on the GPU: a {second} after a {first} that nothing orders before it"
    sides = earlier, later
    return Finding(kind="race", message=message, rank=said.rank, sides=sides, allowed=allowed_by("race", sides))


def _verb(place: Place, verb: str) -> str:
    """Verb of the access at ``place``, more exactly where its line says so."""
    if place.function in _PRIMITIVES:
        return _PRIMITIVES[place.function]
    atomic = re.search(r"tl\.atomic_(\w+)", place.text)
    return f"atomic {atomic[1]}" if atomic else verb


@lru_cache(maxsize=64)
def _source(file: str) -> tuple[ast.Module | None, tuple[str, ...]]:
    try:
        text = Path(file).read_text()
        return ast.parse(text), tuple(text.splitlines())
    except (OSError, SyntaxError, UnicodeError):
        return None, ()


def _around(file: str, line: int) -> tuple[str, str]:
    """Name of the innermost function around a line, and the line."""
    tree, lines = _source(file)
    text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    name = "?"
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or node.lineno):
            name = node.name  # a walk meets outer functions first
    return name, text
