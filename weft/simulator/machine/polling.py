"""Polling loops: programs that repeat themselves until memory changes, and their loop conditions.

A kernel's next step is a function of its variables and of what it reads. If a program returns to the same loads and atomics
with equal variables, and has not changed memory in between, it loops for ever unless what it read in that round changes. The
argument is exact, so such a program blocks until then and a deadlock is seen at once. A loop that counts its tries never
returns to equal variables; the scheduler gives up on it after many fruitless tries.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import CodeType

import numpy as np

from weft.simulator.interpreter.rewriting import compile_expression
from weft.simulator.places import Places

# Reads of the same bytes after which a program's rounds are compared, and most places remembered of a program.
_READS = 8
_MOST_KEYS = 4096

# Functions that read memory, that change the type of what was read, and that touch no memory.
_READERS, _CASTS = ("load", "atomic_"), ("to", "cast")
_PURE = frozenset({"num_programs", "program_id", "num_ranks", "rank", "cdiv", "minimum", "maximum", *_CASTS})

# Identity of a read: (first address, elements, bytes of each).
Key = tuple[int, int, int]
# Frames of a kernel, innermost first: code, instruction, line, variables.
State = list[tuple[CodeType, int, int, dict[str, object]]]


@dataclass(slots=True)
class Read:
    """Load, or atomic that changed nothing, with the bits that it has seen."""

    verb: str
    places: Places
    bits: np.ndarray


@dataclass(slots=True)
class Round:
    """Reads of a program since it was at ``key`` with the variables ``state``."""

    key: Key
    state: State
    reads: dict[Key, Read] = field(default_factory=dict)
    is_steady: bool = True  # no bytes read twice have changed

    def add(self, key: Key, read: Read) -> None:
        known = self.reads.setdefault(key, read)
        self.is_steady = self.is_steady and np.array_equal(known.bits, read.bits)


@dataclass(slots=True)
class ReadHistory:
    """Reads of one program since it last changed memory."""

    counts: dict[Key, int] = field(default_factory=dict)
    round: Round | None = None
    last: Read | None = None
    in_while: bool = False
    code: tuple[CodeType, int] | None = None  # line of its last read, once rounds are compared

    def repeats(self, key: Key, state: Callable[[], State]) -> bool:
        """Note a read that is about to come. True if the program was at ``key`` before with equal variables."""
        count = self.counts.get(key, 0) + 1
        if len(self.counts) >= _MOST_KEYS:
            self.counts.clear()
        self.counts[key] = count
        if count < _READS:
            return False
        around = self.round
        if around is not None and around.key == key and around.is_steady and around.reads:
            if _same_state(state(), around.state):
                return True
        if count & (count - 1) == 0:  # at powers of two, so that a round of any length is found (Brent)
            now = state()
            self.in_while = any(_innermost(_loops(code.co_filename), line) for code, _, line, _ in now)
            self.round = Round(key, now)
        elif around is not None and not around.is_steady and around.key == key:
            self.round = Round(key, state())
        return False

    def add(self, key: Key, read: Read) -> bool:
        """Note a read. True if it is one of many in a ``while`` loop."""
        self.last = read
        if self.round is not None:
            self.round.add(key, read)
        return self.in_while and self.counts.get(key, 0) >= _READS


def _same_state(one: State, other: State) -> bool:
    return len(one) == len(other) and all(
        a[:2] == b[:2] and a[3].keys() == b[3].keys() and all(_same(a[3][name], b[3][name]) for name in a[3])
        for a, b in zip(one, other, strict=True)
    )


def _same(a: object, b: object) -> bool:
    """Equality of two variables of a kernel; False if it cannot be decided."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (int, float, str)):
        return a == b
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    for inner in ("handle", "data", "value"):  # a tensor, its handle, a constexpr
        if hasattr(a, inner):
            return getattr(a, "dtype", None) == getattr(b, "dtype", None) and _same(
                getattr(a, inner), getattr(b, inner)
            )
    return False


@dataclass(frozen=True, slots=True)
class OneValueLoop:
    """``while`` loop that polls for one value only: ``!=``, or ``not ... ==``.

    wanted  expression of the value, to be evaluated in the kernel's frame; None where the condition does not show it
    """

    wanted: CodeType | None


@cache
def loop_for_one_value(file: str, line: int) -> OneValueLoop | None:
    """The loop for one value that polls the read in ``line``, if there is one."""
    loop = _innermost(_loops(file), line)
    if loop is None or not _is_polled(loop, line) or not any(_is_inequality(node) for node in ast.walk(loop.test)):
        return None
    for node in ast.walk(loop.test):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            for read, other in ((node.left, node.comparators[0]), (node.comparators[0], node.left)):
                if _is_read(read, loop, line) and _is_pure(other):
                    return OneValueLoop(compile_expression(other, file))
    return OneValueLoop(None)


@cache
def is_polled(file: str, line: int) -> bool:
    """True if the condition of a ``while`` loop, or assembly that loops, depends on the read in ``line``."""
    if any(_branches(node) for node in _calls_of_assembly(file, line)):
        return True
    loop = _innermost(_loops(file), line)
    return loop is not None and _is_polled(loop, line)


def _spans(node: ast.expr | ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or line)


def _is_inequality(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return any(isinstance(op, ast.NotEq) for op in node.ops)
    negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert))
    return negated and any(isinstance(op, ast.Eq) for n in ast.walk(node) if isinstance(n, ast.Compare) for op in n.ops)


def _is_read(node: ast.expr, loop: ast.While, line: int) -> bool:
    """True if ``node`` is the read in ``line`` itself, cast or not, or a variable that holds its result."""
    while isinstance(node, ast.Call) and _called(node) in _CASTS:
        node = node.func.value if _called(node) == "to" and isinstance(node.func, ast.Attribute) else node.args[0]
    if isinstance(node, ast.Call):
        return _spans(node, line) and _called(node).startswith(_READERS)
    if not isinstance(node, ast.Name):
        return False
    for one in ast.walk(loop):
        if isinstance(one, ast.Assign) and _spans(one, line):
            targets = [target.id for target in one.targets if isinstance(target, ast.Name)]
            return node.id in targets and _is_read(one.value, loop, line)
    return False


def _is_pure(node: ast.expr) -> bool:
    """True if the expression may be evaluated once more: it touches no memory."""
    calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
    return all(_called(call) in _PURE for call in calls) and not any(
        isinstance(one, (ast.NamedExpr, ast.Lambda, ast.Await, ast.Compare, ast.BoolOp)) for one in ast.walk(node)
    )


def _called(call: ast.Call) -> str:
    """Last part of the name of the called function."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _is_polled(loop: ast.While, line: int) -> bool:
    """True if ``line`` is in the loop's condition, or assigns a name that the condition uses."""
    if _spans(loop.test, line):
        return True
    tested = {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and _spans(node, line):
            return any(isinstance(n, ast.Name) and n.id in tested for target in node.targets for n in ast.walk(target))
    return False


def _innermost(loops: list[ast.While], line: int) -> ast.While | None:
    around = [loop for loop in loops if _spans(loop, line)]
    return max(around, key=lambda loop: loop.lineno, default=None)


@cache
def is_discarded(file: str, line: int) -> bool:
    """True if the value that an atomic or a primitive reads in ``line`` is not used."""
    if any(_branches(node) for node in _calls_of_assembly(file, line)):
        return False  # the assembly itself may use it
    for node in _statements(file):
        if isinstance(node, ast.Expr) and _spans(node, line):
            calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
            return not any(call is not node.value and _called(call).startswith(_READERS) for call in calls)
    return False


def _calls_of_assembly(file: str, line: int) -> list[ast.Call]:
    """Calls of ``tl.inline_asm_elementwise`` that span ``line``."""
    around = [node for node in _statements(file) if _spans(node, line)]
    calls = [one for node in around for one in ast.walk(node) if isinstance(one, ast.Call)]
    return [
        call for call in calls
        if _called(call) == "inline_asm_elementwise" and _spans(call, line)
    ]  # fmt: skip


def _branches(assembly: ast.Call) -> bool:
    """True if a text of the call has an instruction that branches."""
    texts = [node.value for node in ast.walk(assembly) if isinstance(node, ast.Constant)]
    return any(isinstance(text, str) and re.search(r"\bbra\b", text) for text in texts)


@cache
def _loops(file: str) -> list[ast.While]:
    return [node for node in _statements(file) if isinstance(node, ast.While)]


@cache
def _statements(file: str) -> list[ast.stmt]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a notebook cell with magic commands
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
