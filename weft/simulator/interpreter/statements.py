"""Helpers that rewritten kernels call: assignment, truth, ``and``, ``or``, ``not`` as in Triton."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import triton.language as tl

from weft.simulator.interpreter.semantic import Semantic
from weft.simulator.interpreter.values import not_one_value
from weft.simulator.ptx.threads import Divergence


def helpers(semantic: Semantic) -> dict[str, Callable]:
    """Functions for ``rewriting.HELPERS``, except ``__weft_call__``."""
    return {
        "__weft_assign__": partial(_assign, semantic),
        "__weft_truth__": _truth,
        "__weft_enter__": partial(_enter, semantic),
        "__weft_leave__": partial(_leave, semantic),
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
        if condition.type is condition.dtype:
            raise not_one_value("a condition with an else, a return or a loop")
        raise ValueError("Boolean value of Tensor with more than one value is ambiguous")
    return bool(condition)


def _enter(semantic: Semantic, condition: object) -> bool | Divergence:
    """Truth of an ``if``, which the threads enter whose condition holds, where it differs."""
    if not isinstance(condition, tl.tensor) or condition.handle.data.size == 1 or condition.type is not condition.dtype:
        return _truth(condition)
    taken = condition.handle.data.astype(np.bool_)
    return Divergence(taken) if semantic.builder.port.diverge(taken) else False


def _leave(semantic: Semantic, entered: bool | Divergence) -> None:
    if isinstance(entered, Divergence):
        semantic.builder.port.converge()


def _all(x: object) -> bool:
    return bool(x.handle.data.all()) if isinstance(x, tl.tensor) else bool(x)


def _both(operation: Callable, decisive: bool, x: object, y: object) -> object:
    if not isinstance(x, tl.tensor):
        return y
    if not isinstance(y, tl.tensor):
        return y if bool(y) is decisive else x
    return operation(x, y)
