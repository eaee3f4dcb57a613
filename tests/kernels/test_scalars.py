"""Numbers that kernels get: Triton makes a number of 1 a compile-time constant, which has no ``.to``."""

import ast
from pathlib import Path

import pytest

import weft

ROOT = Path(weft.__file__).parent
FILES = [path for path in sorted(ROOT.rglob("*.py")) if "@triton.jit" in path.read_text()]


def converted_numbers(source: str) -> list[str]:
    """Of each launched kernel the parameters of which it takes ``.to``, and that Triton may specialize."""
    wrong = []
    for kernel in ast.walk(ast.parse(source)):
        if not isinstance(kernel, ast.FunctionDef) or not kernel.name.endswith("_kernel"):
            continue
        kept = {
            name.value for line in kernel.decorator_list for name in ast.walk(line) if isinstance(name, ast.Constant)
        }
        numbers = {argument.arg for argument in kernel.args.args if argument.annotation is None} - kept
        wrong += [
            f"{kernel.name}: {node.value.id}"
            for node in ast.walk(kernel)
            if isinstance(node, ast.Attribute) and node.attr == "to" and isinstance(node.value, ast.Name)
            and node.value.id in numbers and not assigned(kernel, node.value.id)
        ]  # fmt: skip
    return wrong


def assigned(kernel: ast.FunctionDef, name: str) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store) for node in ast.walk(kernel)
    )


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_converted_numbers_are_not_specialized(path):
    assert not converted_numbers(path.read_text()), "name them in do_not_specialize"


def test_a_converted_number_is_seen():
    kernel = "@triton.jit{}\ndef a_kernel(x, T, N: tl.constexpr):\n    y = T.to(tl.int64) * N\n"
    assert converted_numbers(kernel.format("")) == ["a_kernel: T"]
    assert converted_numbers(kernel.format('(do_not_specialize=["T"])')) == []
