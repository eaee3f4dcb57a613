"""``weft.trace``: a timeline of all ranks, with arrows from notifies to the waits they released.

with weft.trace("out.json", team):
    y = weft.ops.all_gather_matmul(x, w, team)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.callable_package import make_callable

if TYPE_CHECKING:
    from weft.trace.tracing import trace

__all__ = ["trace"]
make_callable(__name__, "weft.trace.tracing")
