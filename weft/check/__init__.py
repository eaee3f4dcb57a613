"""``weft.check``: run a ``main(team)`` under many schedules and report the errors of its kernels.

report = weft.check(main, world_size=[2, 4], schedules=50)
assert report.ok, str(report)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.callable_package import make_callable
from weft.check.report import Found, Report, Schedule

if TYPE_CHECKING:
    from weft.check.run import check

__all__ = ["Found", "Report", "Schedule", "check"]
make_callable(__name__, "weft.check.run")
