"""Progress of a start: functions that are told of it, and lines where no terminal shows a bar."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from weft.arguments import check_callable, check_optional

if TYPE_CHECKING:
    from weft.models.checkpoint import Progress

# Engine's progress and warm_up_progress by these names, called in the caller's process.
Watchers = Mapping[str, Callable[[int, int], None]]
logger = logging.getLogger("weft.engine")


def watchers_of(progress: Progress | None, warm_up_progress: Progress | None) -> Watchers:
    """The functions that are given, by name; in place of a missing `warm_up_progress` one that logs."""
    check_optional(check_callable, "progress", progress, "progress(bytes read, bytes to read)")
    check_optional(check_callable, "warm_up_progress", warm_up_progress, "warm_up_progress(captured, to capture)")
    given = {"progress": progress, "warm_up_progress": warm_up_progress or every_tenth(logger.info)}
    return {name: function for name, function in given.items() if function is not None}


def every_tenth(say: Callable[[str], None]) -> Progress:
    """A `warm_up_progress` that says a line for each tenth of the graphs."""

    def progress(captured: int, total: int) -> None:
        if captured * 10 // total > (captured - 1) * 10 // total:
            say(f"captured {captured} of {total} CUDA graphs")

    return progress
