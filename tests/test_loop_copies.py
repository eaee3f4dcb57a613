"""Names that a kernel's loop copies, and Triton's compiler (3.6 to 3.9) loses; in the simulator the loop is right.

After ``last = now``, a loop that begins with ``last = now`` and then changes ``now`` compiles as if ``last`` stayed: its
value behind the body is that before it. Equal constants are two values.
"""

import ast
from operator import attrgetter
from pathlib import Path

import pytest

WEFT = Path(__file__).parent.parent / "weft"
ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)
place = attrgetter("lineno", "col_offset")


def assigned(statement):
    """(name, name that it is a copy of or None) of each name that a statement assigns."""
    value = statement.value if isinstance(statement, ast.Assign) else None
    for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
        both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        for to, of in zip(target.elts, value.elts, strict=True) if both else [(target, value)]:
            copied = of.id if isinstance(to, ast.Name) and isinstance(of, ast.Name) else None
            yield from ((node.id, copied) for node in ast.walk(to) if isinstance(node, ast.Name))


def lost(source):
    """Statements of loops that copy a name to one that has its value before the loop, where the loop changes it later."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for function in (f for f in functions if any("jit" in ast.unparse(d) for d in f.decorator_list)):
        statements = sorted((node for node in ast.walk(function) if isinstance(node, ASSIGNMENTS)), key=place)
        for loop in (node for node in ast.walk(function) if isinstance(node, (ast.For, ast.While))):
            value = {}  # of a name: the place of the assignment that made it
            for node in (s for s in statements if place(s) < place(loop)):
                value |= {name: value.get(of, of) if of else (place(node), name) for name, of in assigned(node)}
            body = [node for node in ast.walk(loop) if isinstance(node, ASSIGNMENTS)]
            changes = [(name, place(node)) for node in body for name, _ in assigned(node)]
            for node in body:
                for name, of in assigned(node):
                    first = min((at for changed, at in changes if changed == of), default=(0, 0))
                    if of and value.get(name, name) == value.get(of, of) and first > place(node):
                        yield f"{node.lineno}: {ast.unparse(node)}"


def test_no_kernel_loses_a_copy():
    sources = ((file.name, file.read_text()) for file in WEFT.rglob("*.py"))
    assert [(name, line) for name, source in sources if "jit" in source for line in lost(source)] == []


KERNEL = "@triton.jit\ndef f(out, n):\n now = n * 2\n {}\n for i in range(n):\n  tl.store(out, last)\n  {}\n"


@pytest.mark.parametrize("before, body, found", [
    ("last = now", "last = now; now += i", 1), ("last, far = now, n", "last, far = now, i\n  now += i", 1),
    ("far = now; last = far", "last = now\n  if i > 2:\n   now = i", 1), ("last = 0", "last = now; now += i", 0),
    ("last = now", "now += i; last = now", 0), ("last = now", "last = now", 0), ("last = now + 0", "last = now; now += i", 0),
])  # fmt: skip
def test_a_lost_copy_is_found(before, body, found):
    assert len(list(lost(KERNEL.format(before, body)))) == found
