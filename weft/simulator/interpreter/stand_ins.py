"""Replacements for functions of ``tl``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import TypeVar

import numpy as np
import triton.language as tl

from weft.errors import Misaligned
from weft.simulator.interpreter.assembly import Assembly
from weft.simulator.interpreter.callees import with_semantic
from weft.simulator.interpreter.reductions import Reductions
from weft.simulator.interpreter.semantic import Semantic
from weft.simulator.interpreter.values import Flag, Integer, Operand, Text, make, numpy_dtype, plain, value_of
from weft.triton_api import core, standard

T = TypeVar("T")
Dtype = tl.dtype | tl.constexpr
_LOAD_MODIFIERS = frozenset([None, "", "none", ".ca", ".cg", ".cs", ".cv"])
_EVICTIONS = frozenset([None, "", "evict_normal", "evict_first", "evict_last"])
_STOCK = {name: getattr(core, name) for name in ("load", "store", "dot")}  # taken before anything is patched


class StaticAssertionFailed(AssertionError):
    """A ``tl.static_assert`` that does not hold: the kernel would not compile."""


class StandIns:
    """Replacements bound to a semantic layer."""

    def __init__(self, semantic: Semantic, resolve: Callable[[object], Callable]) -> None:
        self.semantic = semantic
        self.reductions = Reductions(resolve)
        self._assembly = Assembly(semantic)
        self._stock_load, self._stock_store, self._stock_dot = (with_semantic(f, semantic) for f in _STOCK.values())
        self._ranges: dict[tuple[int, int], tl.tensor] = {}

    def in_core(self) -> dict[str, Callable]:
        """Replacements by their names in ``triton.language.core``."""
        return {
            "load": _without_semantic(self.load) if hasattr(core, "_block_ptr") else self.load,
            "store": self.store,
            "arange": self.arange,
            "full": self.full,
            "where": self.where,
            "dot": self.dot,
            "cast": self.cast,
            "reduce": self.reductions.reduce,
            "associative_scan": self.reductions.scan,
            "map_elementwise": self.reductions.map_elementwise,
            "range": self.range,
            "static_range": _static_range,
            "static_assert": _static_assert,
            "static_print": _static_print,
            "multiple_of": _multiple_of,
            "max_contiguous": _hint,
            "max_constancy": _hint,
            "condition": lambda value, **_: value,
            "inline_asm_elementwise": self._assembly.call,
        }

    def elsewhere(self) -> list[tuple[object, Callable]]:
        """(function that kernels call, replacement) for other modules."""
        port, cuda = self.semantic.builder.port, getattr(tl.extra, "cuda", None)
        # Programmatic dependent launch: a simulated kernel starts after the one before has ended; only the checker models it.
        dependent = (
            (getattr(cuda, "gdc_wait", None), lambda **_: port.wait_for_previous_kernel()),
            (getattr(cuda, "gdc_launch_dependents", None), lambda **_: port.let_next_kernel_start()),
        )
        return [
            (range, self.range),
            (min, partial(self._extreme, min, self.semantic.minimum)),
            (max, partial(self._extreme, max, self.semantic.maximum)),
            (standard.zeros, lambda shape, dtype: self.full(shape, 0, dtype)),
            *((builtin, stand_in) for builtin, stand_in in dependent if builtin is not None),
        ]

    def range(
        self, start: Operand, stop: Operand | None = None, step: Operand | None = None, **_: object
    ) -> Iterator[tl.tensor]:
        """``range`` and ``tl.range``, whose loop variable is a tensor of the bounds' promoted type."""
        if stop is None:
            start, stop = 0, start
        bounds = [self.semantic.to_tensor(x) for x in (start, stop, 1 if step is None else step)]
        for bound in bounds:
            if not bound.dtype.is_int() or bound.type.is_block():
                raise TypeError(f"For loop bounds and step must all be scalar ints, got {bound.type}")
        promote = self.semantic.integer_promote_impl
        ty = promote(promote(bounds[0].dtype, bounds[1].dtype), bounds[2].dtype)
        first, last, by = (int(value_of(x)) for x in bounds)
        dtype = numpy_dtype(ty)
        for value in range(first, last, by):
            yield make(np.array([value], dtype), ty, False)

    def load(
        self,
        pointer: tl.tensor,
        mask: Operand | None = None,
        other: Operand | None = None,
        boundary_check: Sequence[Integer] = (),
        padding_option: Text = "",
        cache_modifier: Text = "",
        eviction_policy: Text = "",
        volatile: Flag = False,
    ) -> tl.tensor:
        if _is_block_pointer(pointer):
            return self._stock_load(pointer, mask, other, boundary_check, padding_option)
        cache_modifier, eviction_policy = plain(cache_modifier), plain(eviction_policy)
        if cache_modifier not in _LOAD_MODIFIERS:
            raise ValueError(f"Cache modifier {cache_modifier} not supported")
        if eviction_policy not in _EVICTIONS:
            raise ValueError(f"Eviction policy {eviction_policy} not supported")
        access = "volatile" if cache_modifier == ".cv" or plain(volatile) else "plain"
        return self.semantic.fetch(pointer, plain(mask), plain(other), access)

    def store(
        self,
        pointer: tl.tensor,
        value: Operand,
        mask: Operand | None = None,
        boundary_check: Sequence[Integer] = (),
        cache_modifier: Text = "",
        eviction_policy: Text = "",
        _semantic: object = None,
    ) -> None:
        if _is_block_pointer(pointer):
            self._stock_store(pointer, value, mask, boundary_check)
            return
        self.semantic.put(pointer, plain(value), plain(mask))

    def arange(self, start: Integer, end: Integer, _semantic: object = None) -> tl.tensor:
        key = plain(start), plain(end)
        block = self._ranges.get(key) if type(key[0]) is type(key[1]) is int else None
        if block is None:
            block = self._ranges[key] = self.semantic.arange(*key)
        return block

    def full(
        self, shape: Integer | Sequence[Integer], value: Operand, dtype: Dtype, _semantic: object = None
    ) -> tl.tensor:
        shape = plain(shape)
        return self.semantic.full((shape,) if isinstance(shape, int) else shape, plain(value), plain(dtype))

    def where(self, condition: Operand, x: Operand, y: Operand, _semantic: object = None) -> tl.tensor:
        return self.semantic.where(self.semantic.to_tensor(condition), plain(x), plain(y))

    def cast(
        self,
        x: Operand,
        dtype: Dtype,
        fp_downcast_rounding: Text | None = None,
        bitcast: Flag = False,
        _semantic: object = None,
    ) -> tl.tensor:
        x = x if isinstance(x, tl.tensor) else self.semantic.to_tensor(x)
        if plain(bitcast):
            return self.semantic.bitcast(x, plain(dtype))
        return self.semantic.cast(x, plain(dtype), plain(fp_downcast_rounding))

    def dot(
        self, input: tl.tensor, other: tl.tensor, acc: tl.tensor | None = None, *args: object, **kwargs: object
    ) -> tl.tensor:
        result = None
        if not args and ("out_dtype" not in kwargs or plain(kwargs["out_dtype"]) in (None, tl.float32)):
            result = self.semantic.dot_fp32(input, other, plain(acc))
        if result is None:
            result = self._stock_dot(input, other, acc, *args, **kwargs)
        self.semantic.builder.port.computed(2 * input.handle.data.shape[-1] * result.handle.data.size)
        return result

    def _extreme(self, of_numbers: Callable, operation: Callable, *args: Operand) -> Operand:
        if not any(isinstance(x, tl.tensor) for x in args):
            return of_numbers(*map(value_of, args))
        result = args[0]
        for x in args[1:]:
            result = operation(
                value_of(result) if isinstance(result, tl.constexpr) else result, x, tl.PropagateNan.NONE
            )
        return result


def _without_semantic(function: Callable[..., T]) -> Callable[..., T]:
    """The function, but for an argument of Triton's own, which block pointers of 3.8 pass."""

    @wraps(function)
    def call(*args: object, _semantic: object = None, **kwargs: object) -> T:
        return function(*args, **kwargs)

    return call


def _is_block_pointer(x: object) -> bool:
    """True for a block pointer: a tensor of a special kind in Triton 3.6 and 3.7, another object in 3.8."""
    return not isinstance(x, tl.tensor) or isinstance(getattr(x.dtype, "element_ty", None), tl.block_type)


def _static_range(start: Integer, end: Integer | None = None, step: Integer | None = None, **_: object) -> range:
    for bound in (start, end, step):
        if isinstance(bound, tl.tensor):
            raise TypeError(
                f"tl.static_range: {bound} is not a constexpr: an assignment, also one to several names, makes a tensor of a "
                f"constant; write `NAME: tl.constexpr = ...`"
            )
    start, end, step = (None if x is None else int(value_of(x)) for x in (start, end, step))
    return range(0, start, step or 1) if end is None else range(start, end, step or 1)


def _static_assert(condition: Flag, message: Text = "", **_: object) -> None:
    if not value_of(condition):
        raise StaticAssertionFailed(value_of(message))


def _static_print(*values: object, _semantic: object = None, **kwargs: str) -> None:
    print(*map(value_of, values), **kwargs)


def _multiple_of(x: T, values: Integer | Sequence[Integer], _semantic: object = None) -> T:
    """Check a hint, since a wrong one makes a GPU's vector accesses fault.

    Only a block's first element is checked.
    """
    values = [plain(v) for v in (values if isinstance(values, (list, tuple, tl.tuple)) else [plain(values)])]
    if isinstance(x, tl.tensor):
        first = int(x.handle.data.flat[0])
        if isinstance(x.dtype, tl.pointer_type):
            first %= 2**48  # the bits above are no address (simulator.pointers)
        for value in values:
            if first % value:
                raise Misaligned(f"tl.multiple_of(x, {value}) of x = {first}")
    return x


def _hint(x: T, *_: object, **__: object) -> T:
    return x
