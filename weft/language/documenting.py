"""``help(wl.put)`` and ``inspect.signature(wl.put)``: primitives are documented as functions are, though they are objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import triton


class JITFunction(triton.JITFunction):
    """Triton's class, for ``help`` to take for a routine. What Triton compiles, and its cache keys, are the same."""

    def __get__(self, instance: Any, owner: Any = None) -> JITFunction:
        return self


def document(primitives: Iterable[Any]) -> None:
    """Let ``help`` and ``inspect.signature`` show each primitive's own signature and docstring."""
    for primitive in primitives:
        # Not where TRITON_INTERPRET has made something else of it.
        if type(primitive) is triton.JITFunction:
            primitive.__class__ = JITFunction
            primitive.__signature__ = primitive.signature
