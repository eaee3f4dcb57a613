"""``TRITON_INTERPRET``: Triton's own interpreter, which models one GPU and no order between programs."""

from __future__ import annotations

from weft.errors import WeftError
from weft.triton_api import JITFunction, knobs, standard

MESSAGE = (
    "TRITON_INTERPRET is set, so Triton's own interpreter runs every kernel, on GPUs too; unset it: weft.simulate, weft.check "
    "and virtual ranks have an interpreter of their own"
)


def is_set() -> bool:
    """True if kernels run in Triton's interpreter, now or when Triton's own library was imported."""
    return bool(knobs.runtime.interpret) or not isinstance(standard.sum, JITFunction)


def refuse_triton_interpret() -> None:
    """WeftError if kernels run in Triton's interpreter."""
    if is_set():
        raise WeftError(MESSAGE)
