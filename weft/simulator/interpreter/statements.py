"""Helpers that rewritten kernels call: assignment, truth, ``and``, ``or``, ``not`` as in Triton."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import triton.language as tl

from weft.simulator.interpreter.semantic import Semantic


def helpers(semantic: Semantic) -> dict[str, Callable]:
    """Functions for ``rewriting.HELPERS``, except ``__weft_call__``."""
    return {
        "__weft_assign__": partial(_assign, semantic),
        "__weft_truth__": _truth,
        "__weft_all__": _all,
        "__weft_not__": lambda x: semantic.not_(x) if isinstance(x, tl.tensor) else not x,
        "__weft_and_more__": lambda x: isinstance(x, tl.tensor) or bool(x),
        "__weft_or_more__": lambda x: isinstance(x, tl.tensor) or not x,
        "__weft_and__": partial(_both, semantic.logical_and, False),
        "__weft_or__": partial(_both, semantic.logical_or, True),
    }


def _assign(semantic: Semantic, value: object) -> object:
    kind = type(value)
    if kind is tl.tensor:
        return value
    if kind is tl.constexpr:
        value, kind = value.value, type(value.value)
    if kind in (int, float, bool):
        return semantic.to_tensor(value)
    if isinstance(value, tuple):
        parts = [_assign(semantic, v) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _truth(condition: object) -> bool:
    if isinstance(condition, tl.tensor) and condition.handle.data.size != 1:
        raise ValueError("Boolean value of Tensor with more than one value is ambiguous")
    return bool(condition)


def _all(x: object) -> bool:
    return bool(x.handle.data.all()) if isinstance(x, tl.tensor) else bool(x)


def _both(operation: Callable, decisive: bool, x: object, y: object) -> object:
    if not isinstance(x, tl.tensor):
        return y
    if not isinstance(y, tl.tensor):
        return y if bool(y) is decisive else x
    return operation(x, y)
