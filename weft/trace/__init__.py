"""``weft.trace``: a timeline of all ranks, with arrows from notifies to the waits they released.

with weft.trace("out.json", team):
    y = weft.ops.all_gather_matmul(x, w, team)
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from weft.trace.tracing import trace

__all__ = ["trace"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command line imports this package and should not wait for PyTorch.
    if name != "trace":
        raise AttributeError(f"module 'weft.trace' has no attribute {name!r}")
    from weft.trace.tracing import trace

    return trace


class _Callable(types.ModuleType):
    """Module that can be called.

    Importing a submodule binds ``weft.trace`` to the module, but it must be the function.
    """

    def __call__(self, *args: object, **kwargs: object) -> AbstractContextManager[None]:
        return __getattr__("trace")(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
