"""Source positions in the user's kernels."""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Iterable

# The language's primitives and Triton's own library: messages name the line of their caller.
LIBRARIES = ("weft.language", "triton.")
# Code object, line number.
CodeLine = tuple[types.CodeType, int]


class KernelFrames:
    """Code objects of rewritten kernels, and their frames on the stack."""

    def __init__(self) -> None:
        self.codes: dict[int, types.CodeType] = {}  # by id

    def add(self, codes: Iterable[types.CodeType]) -> None:
        self.codes.update((id(code), code) for code in codes)

    def innermost(self, outside: tuple[str, ...] = ("triton.",)) -> types.FrameType | None:
        """Frame of the innermost kernel code now executing; None outside kernels.

        Modules whose names start with one of ``outside`` count only if there is no other kernel code.
        """
        frame: types.FrameType | None = sys._getframe(1)
        library = None
        while frame is not None:
            if id(frame.f_code) in self.codes:
                if not str(frame.f_globals.get("__name__")).startswith(outside):
                    return frame
                library = library or frame
            frame = frame.f_back
        return library

    def state(self) -> list[tuple[types.CodeType, int, int, dict[str, object]]]:
        """(code, instruction, line, variables) of all kernel code now executing, innermost first."""
        frames, frame = [], sys._getframe(1)
        while frame is not None:
            if id(frame.f_code) in self.codes:
                frames.append((frame.f_code, frame.f_lasti, frame.f_lineno, dict(frame.f_locals)))
            frame = frame.f_back
        return frames

    def line_of(self, error: BaseException) -> CodeLine | None:
        """(code, line) of the innermost kernel code that an exception passed, if possible not ``LIBRARIES``."""
        outside, inside, entry = None, None, error.__traceback__
        while entry is not None:
            frame = entry.tb_frame
            if id(frame.f_code) in self.codes:
                inside = frame.f_code, entry.tb_lineno
                if not str(frame.f_globals.get("__name__")).startswith(LIBRARIES):
                    outside = inside
            entry = entry.tb_next
        return outside or inside

    def source_location(self) -> tuple[str, int, str, str] | None:
        """(file, line number, function, text of the line) of the innermost kernel code; None outside kernels."""
        frame = self.innermost()
        if frame is None:
            return None
        code, line = frame.f_code, frame.f_lineno
        return code.co_filename, line, code.co_name, linecache.getline(code.co_filename, line).strip()

    def kernel_name(self) -> str:
        """The innermost kernel code, for messages."""
        where = self.source_location()
        return f"{where[2]} ({where[0]}:{where[1]})" if where else "a kernel"
