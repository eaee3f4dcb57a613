"""Kernel and source line that are being compiled, for records of debug-mode waits and of traces.

The compiler visits called functions recursively and does not tell them their caller, so its Python stack is searched for the
outermost kernel. Only debug builds and traced ones do so.
"""

import sys
import zlib

import triton.language as tl

from weft.triton_api import builtin


@builtin
def kernel_line(_semantic=None):
    """Line of the kernel's file that is being compiled; 0 if unknown."""
    return tl.constexpr(_kernel()[1])


@builtin
def kernel_name_int64(index, _semantic=None):
    """Bytes ``8 * index .. 8 * index + 7`` of the kernel's name, as a little-endian int64.

    ``runtime/wait_record.py`` unpacks them.
    """
    at = 8 * int(getattr(index, "value", index))
    chunk = _kernel()[0].encode()[:63].ljust(64, b"\0")[at : at + 8]
    return tl.constexpr(int.from_bytes(chunk, "little", signed=True))


@builtin
def kernel_crc(_semantic=None):
    """CRC-32 of the kernel's name, as a signed number."""
    crc = zlib.crc32(_kernel()[0].encode())
    return tl.constexpr(crc - ((crc & 1 << 31) << 1))


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
