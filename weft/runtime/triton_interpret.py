"""``TRITON_INTERPRET``: Triton's own interpreter, which knows one GPU and no order between programs."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from weft.errors import WeftError

MESSAGE = (
    "TRITON_INTERPRET is set, so Triton's own interpreter has every kernel, on GPUs too; unset it: weft.simulate, weft.check "
    "and virtual ranks interpret kernels by themselves"
)


def is_set() -> bool:
    """Kernels that are decorated now, or Triton's own library when it was imported, go to Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret) or not isinstance(tl.standard.sum, JITFunction)


def refuse_triton_interpret() -> None:
    """WeftError where Triton's interpreter has the kernels."""
    if is_set():
        raise WeftError(MESSAGE)
