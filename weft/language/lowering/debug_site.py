"""Which kernel, and which of its lines, is being compiled: constants that a debug-mode wait writes into its record.

The compiler visits the functions a kernel calls recursively, so its own Python stack says it. Found by walking that stack,
since a called function is compiled without being told who calls it; only debug builds come here.
"""

import sys

import triton.language as tl


@tl.core.builtin
def kernel_line(_semantic=None):
    """The line of the kernel's file that is being compiled; 0 if unknown."""
    return tl.constexpr(_kernel()[1])


@tl.core.builtin
def kernel_name_int64(index, _semantic=None):
    """Bytes ``8 * index .. 8 * index + 7`` of the kernel's name, as a little-endian int64 (``wait_record`` unpacks them)."""
    at = 8 * int(getattr(index, "value", index))
    chunk = _kernel()[0].encode()[:63].ljust(64, b"\0")[at : at + 8]
    return tl.constexpr(int.from_bytes(chunk, "little", signed=True))


def _kernel() -> tuple[str, int]:
    outermost = None
    frame = sys._getframe(1)
    while frame is not None:
        visitor = frame.f_locals.get("self")
        if type(visitor).__name__ == "CodeGenerator":
            outermost = visitor
        frame = frame.f_back
    if outermost is None:
        return "?", 0
    node = getattr(outermost, "cur_node", None)
    line = getattr(outermost, "begin_line", 0) + getattr(node, "lineno", 0)
    name = str(getattr(outermost, "function_name", "?"))
    return name.split("__", 1)[0] if not name.startswith("_") else name, line
