"""``tl.reduce``, ``tl.associative_scan`` and ``tl.map_elementwise`` on whole blocks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import triton.language as tl

from weft.simulator import numerics
from weft.simulator.interpreter.values import (
    SCALAR_SHAPE,
    Flag,
    Integer,
    Operand,
    block,
    make,
    not_interpretable,
    numpy_dtype,
    plain,
    value_of,
)
from weft.triton_api import JITFunction, combine_max, combine_min, combine_sum, wrap_axis

Tensors = tl.tensor | tuple[tl.tensor, ...]
Function = JITFunction | tl.constexpr


class Reductions:
    """The three functions. ``function`` resolves a combine function to its interpreted form."""

    def __init__(self, function: Callable[[object], Callable]) -> None:
        self.function = function

    def reduce(
        self, input: Tensors, axis: Integer | None, combine_fn: Function, keep_dims: Flag = False, **_: object
    ) -> Tensors:
        inputs = (input,) if isinstance(input, tl.tensor) else tuple(input)
        axis, keep_dims, combine_fn = map(plain, (axis, keep_dims, combine_fn))
        arrays = [x.handle.data for x in inputs]
        shape, along = arrays[0].shape, 0
        if axis is None:
            arrays, left = [a.reshape(-1) for a in arrays], (1,) * len(shape) if keep_dims else ()
        else:
            along = wrap_axis(axis, len(shape))
            left = (*shape[:along], *((1,) if keep_dims else ()), *shape[along + 1 :])
        reduced = self._reduced(combine_fn, arrays, [x.dtype for x in inputs], along)
        results = tuple(
            make(a.reshape(left or SCALAR_SHAPE), x.dtype, bool(left)) for a, x in zip(reduced, inputs, strict=True)
        )
        return results[0] if isinstance(input, tl.tensor) else results

    def _reduced(
        self, combine_fn: Function, arrays: list[np.ndarray], types_: list[tl.dtype], along: int
    ) -> list[np.ndarray]:
        if combine_fn is combine_sum:
            return [numerics.reduce_sum(arrays[0], along)]
        if combine_fn is combine_max or combine_fn is combine_min:
            return [numerics.reduce_extreme(arrays[0], along, combine_fn is combine_max)]
        return self._tree(combine_fn, arrays, types_, along)

    def _combine(self, function: Callable, left: list, right: list, types_: list[tl.dtype]) -> list[np.ndarray]:
        got = function(*map(block, left, types_), *map(block, right, types_))
        got = got if isinstance(got, (tuple, tl.tuple)) else (got,)
        return [
            np.broadcast_to(numerics.convert(_array(g), numpy_dtype(ty)), a.shape)
            for g, ty, a in zip(got, types_, left, strict=True)
        ]

    def _tree(self, combine_fn: Function, arrays: list, types_: list[tl.dtype], along: int) -> list[np.ndarray]:
        """Combine neighbours, then neighbouring pairs, and so on, in order.

        A GPU's shuffles swap the operands, so a function that does not commute gives other results there.
        """
        function = self.function(combine_fn)
        arrays = [np.moveaxis(a, along, 0) for a in arrays]
        while len(arrays[0]) > 1:
            arrays = self._combine(function, [a[0::2] for a in arrays], [a[1::2] for a in arrays], types_)
        return [np.moveaxis(a, 0, along) for a in arrays]

    def scan(self, input: Tensors, axis: Integer, combine_fn: Function, reverse: Flag = False, **_: object) -> Tensors:
        inputs = (input,) if isinstance(input, tl.tensor) else tuple(input)
        axis, reverse, combine_fn = map(plain, (axis, reverse, combine_fn))
        along = wrap_axis(axis, inputs[0].handle.data.ndim)
        arrays = [np.moveaxis(x.handle.data, along, 0) for x in inputs]
        arrays = [a[::-1] for a in arrays] if reverse else arrays
        if combine_fn is combine_sum:
            out = [numerics.scan_sum(arrays[0], 0)]
        else:
            function, types_ = self.function(combine_fn), [x.dtype for x in inputs]
            rows = [[a[0:1] for a in arrays]]
            for i in range(1, len(arrays[0])):
                rows.append(self._combine(function, rows[-1], [a[i : i + 1] for a in arrays], types_))
            out = [np.concatenate(parts) for parts in zip(*rows, strict=True)]
        out = [a[::-1] for a in out] if reverse else out
        results = tuple(make(np.moveaxis(a, 0, along), x.dtype, True) for a, x in zip(out, inputs, strict=True))
        return results[0] if isinstance(input, tl.tensor) else results

    def map_elementwise(self, scalar_fn: Function, *args: tl.tensor, pack: Integer = 1, **_: object) -> Tensors:
        function = self.function(plain(scalar_fn))
        if value_of(pack) != 1:
            raise not_interpretable("tl.map_elementwise with pack > 1")
        arrays = np.broadcast_arrays(*(x.handle.data for x in args))
        results: list[tuple] = []
        single = True
        for values in zip(*(a.reshape(-1) for a in arrays), strict=True):
            got = function(*(make(np.array([v]), x.dtype, False) for v, x in zip(values, args, strict=True)))
            single = isinstance(got, tl.tensor)
            results.append((got,) if single else tuple(got))
        out = tuple(
            make(np.concatenate([r.handle.data for r in column]).reshape(arrays[0].shape), column[0].dtype, True)
            for column in zip(*results, strict=True)
        )
        return out[0] if single else out


def _array(x: Operand) -> np.ndarray:
    return x.handle.data if isinstance(x, tl.tensor) else np.asarray(plain(x))
