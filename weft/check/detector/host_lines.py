"""Source lines of host code."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # ml_dtypes need not be installed where this is imported
    from weft.simulator.interpreter import CodeLine

_MACHINERY = ("torch.", "triton.", "weft.simulator.", "weft.check.", "weft.runtime.", "contextlib")
OF_WEFT = (*_MACHINERY, "weft.")


def host_line(outside: tuple[str, ...] = _MACHINERY) -> CodeLine | None:
    """(code, line) of the calling host code: the innermost frame outside PyTorch and weft's machinery."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(outside):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None


def host_line_of(error: BaseException) -> CodeLine | None:
    """(code, line) of the host code that raised ``error``: the innermost frame outside the same modules."""
    code, entry = None, error.__traceback__
    while entry is not None:
        name = entry.tb_frame.f_globals.get("__name__", "")
        if not name.startswith((*_MACHINERY, "threading")):
            code = entry.tb_frame.f_code, entry.tb_lineno
        entry = entry.tb_next
    return code
