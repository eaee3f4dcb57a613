"""Limits are for hangs: those of tests are tests/limits.py's, and pytest's is larger."""

import ast
import re

from tests import limits
from tests.documents import ROOT

WAITS = {"acquire", "communicate", "join", "result", "run", "wait"}
# A file without it has no such limit, so it need not be parsed.
NUMBER = re.compile(r"(timeout|acquire|communicate|join|result|wait)\s*[=(]\s*[\d.]")


def seconds_of(tree):
    """Yield the line and the seconds of each limit that is written as a number."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = [word.value for word in node.keywords if word.arg == "timeout"]
            given += node.args if name in WAITS - {"run"} and len(node.args) == 1 or name == "timeout" else []
            for value in given:
                if isinstance(value, ast.Constant) and isinstance(value.value, (int, float)):
                    yield node.lineno, value.value


def test_no_test_has_a_limit_of_its_own_that_a_slow_machine_reaches():
    """A limit below a second is meant to elapse."""
    found = [
        f"{file.relative_to(ROOT)}:{line}: {seconds} s; take one of tests/limits.py"
        for file in sorted((ROOT / "tests").rglob("*.py"))
        if NUMBER.search(source := file.read_text())
        for line, seconds in seconds_of(ast.parse(source))
        if seconds >= 1
    ]
    assert found == []
    assert [
        seconds
        for _, seconds in seconds_of(ast.parse("x.wait(timeout=30)\ny.join(5)\n@pytest.mark.timeout(60)\ndef f(): ..."))
    ] == [30, 5, 60]


def test_pytest_waits_longer_than_a_test():
    [limit] = re.findall(r"^timeout = (\d+)", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert int(limit) > limits.PROCESS > limits.ANSWER
