"""Loops that poll, as their source says: what do they wait for?"""

from __future__ import annotations

import ast
import linecache
from functools import cache


@cache
def waits_for_one_value(file: str, line: int) -> bool:
    """Whether what is read in ``line`` is polled by a ``while`` that ends at one value only: ``!=``, or ``not ... ==``."""
    loop = _innermost(_loops(file), line)
    return loop is not None and _is_polled(loop, line) and any(_is_inequality(node) for node in ast.walk(loop.test))


def _is_inequality(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return any(isinstance(op, ast.NotEq) for op in node.ops)
    negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert))
    return negated and any(isinstance(op, ast.Eq) for n in ast.walk(node) if isinstance(n, ast.Compare) for op in n.ops)


def _is_polled(loop: ast.While, line: int) -> bool:
    """It is read in the loop's condition, or assigned to a name that stands there."""
    if loop.test.lineno <= line <= (loop.test.end_lineno or line):
        return True
    tested = {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and node.lineno <= line <= (node.end_lineno or line):
            return any(isinstance(n, ast.Name) and n.id in tested for target in node.targets for n in ast.walk(target))
    return False


def _innermost(loops: list[ast.While], line: int) -> ast.While | None:
    around = [loop for loop in loops if loop.lineno <= line <= (loop.end_lineno or line)]
    return max(around, key=lambda loop: loop.lineno, default=None)


@cache
def _loops(file: str) -> list[ast.While]:
    tree = ast.parse("".join(linecache.getlines(file)))
    return [node for node in ast.walk(tree) if isinstance(node, ast.While)]
