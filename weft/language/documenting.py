"""Support of ``help(wl.put)`` and ``inspect.signature(wl.put)`` for primitives, which are objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import triton


class JITFunction(triton.JITFunction):
    """Triton's class, with the one method by which ``help`` recognises a routine.

    Triton compiles the same code under the same cache keys.
    """

    def __get__(self, instance: object, owner: type | None = None) -> JITFunction:
        return self


def document(primitives: Iterable[Any]) -> None:
    """Let ``help`` and ``inspect.signature`` show each primitive's own signature and docstring."""
    for primitive in primitives:
        # Under TRITON_INTERPRET it is of another class, which stays as it is.
        if type(primitive) is triton.JITFunction:
            primitive.__class__ = JITFunction
            primitive.__signature__ = primitive.signature
