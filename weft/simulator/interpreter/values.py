"""Values of a kernel: a ``tl.tensor`` whose handle is a NumPy array, and conversions to and from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl

from weft.errors import NotInterpretable
from weft.simulator import numerics
from weft.triton_api import TensorHandle

SCALAR_SHAPE = (1,)
Number = int | float | bool
# What a kernel computes with; an integer, a truth value and a string that the compiler knows.
Operand = tl.tensor | tl.constexpr | Number
Integer = int | tl.constexpr
Flag = bool | tl.constexpr
Text = str | tl.constexpr


class Handle(TensorHandle):
    """Array of a ``tl.tensor``: shape (1,) for a scalar, bf16 and fp8 as ml_dtypes arrays.

    Never written to.
    """

    attr = None  # hints, unused here; the base's repr shows the field

    def __init__(self, data: np.ndarray, dtype: tl.dtype) -> None:
        self.data, self.dtype = data, dtype


_new, _Tensor, _Constexpr = object.__new__, tl.tensor, tl.constexpr
# Block types by element type and shape: building one costs as much as an operation.
_blocks: dict[tuple, tl.block_type] = {}


def _block_type(element: tl.dtype, shape: tuple[int, ...]) -> tl.block_type:
    made = _blocks[element.name, shape] = tl.block_type(element, list(shape))
    return made


def plain(x: object) -> Any:
    """Value of a constexpr; anything else unchanged."""
    return x.value if isinstance(x, _Constexpr) else x


def numpy_dtype(element: tl.dtype) -> np.dtype:
    """NumPy dtype for a Triton element type; uint64 for pointers."""
    known = numerics.DTYPES.get(element.name)
    if known is None:
        if not isinstance(element, tl.pointer_type):
            raise not_interpretable(f"element type {element}")
        known = numerics.BITS[8]
    return known


def not_interpretable(what: str) -> NotInterpretable:
    return NotInterpretable(
        f"{what} cannot run in the simulator; such a path needs a portable twin in plain Triton, "
        f"and a test that the two agree"
    )


def not_one_value(what: str) -> NotInterpretable:
    return NotInterpretable(
        f"a value that differs between the threads of a program (%tid) is {what} where the simulator needs one value; keep it "
        f"in an `if` without else, or in the assembly"
    )


def make(data: np.ndarray, element: tl.dtype, is_block: bool) -> tl.tensor:
    """``tl.tensor`` of an array that already has the element type's dtype.

    A block's ``type`` is not its ``dtype``.
    """
    # Without the calls of __init__ (_init_tensor in patching): kernels make most of their values here.
    handle, x = _new(Handle), _new(_Tensor)
    handle.data, handle.dtype = data, element
    x.handle, x.dtype = handle, element
    if not is_block:
        x.type = element
        return x
    known = _blocks.get((element.name, data.shape))
    x.type = known if known is not None and known.element_ty is element else _block_type(element, data.shape)
    return x


def scalar(value: int | float | bool, dtype: tl.dtype) -> tl.tensor:
    """Scalar ``tl.tensor``."""
    return make(numerics.convert(np.array([value]), numpy_dtype(dtype)), dtype, False)


def block(array: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    """Block ``tl.tensor`` of an array whose sizes are powers of two."""
    return make(numerics.convert(np.asarray(array), numpy_dtype(dtype)), dtype, True)


def value_of(x: object) -> Any:
    """Plain value of ``x``.

    A Python number for a scalar tensor (an address for a pointer), the array of a block, the value of a constexpr; anything
    else unchanged.
    """
    if isinstance(x, _Tensor):
        data = x.handle.data
        if x.type is not x.dtype:
            return data
        if data.size != 1:
            raise not_one_value("used")
        return data.item()
    return x.value if isinstance(x, _Constexpr) else x


def addresses_of(pointer: tl.tensor) -> np.ndarray:
    """Addresses (uint64) of a pointer or block of pointers; shape (1,) for one pointer."""
    if not isinstance(pointer.dtype, tl.pointer_type):
        raise TypeError(f"a pointer is needed, got {pointer.type}")
    return pointer.handle.data


def element_dtype(pointer: tl.tensor) -> tl.dtype:
    """Element type that a pointer (or block of pointers) points to."""
    return pointer.dtype.element_ty
