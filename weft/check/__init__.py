"""``weft.check``: run a ``main(team)`` under many schedules and report the errors of its kernels.

report = weft.check(main, world_size=[2, 4], schedules=50)
assert report.ok, str(report)
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

from weft.check.report import Found, Report, Schedule

if TYPE_CHECKING:
    from weft.check.run import check

__all__ = ["Found", "Report", "Schedule", "check"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command line imports this package and should not wait for PyTorch.
    if name != "check":
        raise AttributeError(f"module 'weft.check' has no attribute {name!r}")
    from weft.check.run import check

    return check


class _Callable(types.ModuleType):
    """Module that can be called.

    Importing a submodule binds ``weft.check`` to the module, but it must be the function.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        return __getattr__("check")(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
