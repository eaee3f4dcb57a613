"""Upper layer: Triton's own semantics, with fast paths for frequent operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import triton.language as tl

from weft.simulator import numerics
from weft.simulator.interpreter.builder import Builder
from weft.simulator.interpreter.values import (
    Integer,
    Number,
    Operand,
    make,
    not_interpretable,
    numpy_dtype,
    plain,
    value_of,
)
from weft.simulator.places import Places, Scattered, everywhere, one_place
from weft.simulator.ptx.threads import elements_of, stored_by
from weft.triton_api import IncompatibleTypeErrorImpl, TritonSemantic

T = TypeVar("T")
_Tensor, _Pointer = tl.tensor, tl.pointer_type
# Bytes of an element by its bits, as arrays: a product with one is of 64 bits.
_SIZES = {bits: np.array(max(1, bits // 8), np.int64) for bits in (1, 8, 16, 32, 64)}


def _arithmetic(op: np.ufunc) -> Callable:
    def method(self: Semantic, x: Operand, y: Operand, sanitize_overflow: bool = False) -> tl.tensor:
        left, right, ty, is_block = self.operands(x, y)
        out = op(left, right) if ty.name != "int1" else numerics.wrap_bool(op, left, right)
        return make(out, ty, is_block)

    return method


def _bitwise(op: Callable) -> Callable:
    def method(self: Semantic, x: Operand, y: Operand) -> tl.tensor:
        left, right, ty, is_block = self.operands(x, y)
        if not ty.is_int():
            raise IncompatibleTypeErrorImpl(ty, ty)
        return make(op(left, right), ty, is_block)

    return method


def _comparison(op: Callable) -> Callable:
    def method(self: Semantic, x: Operand, y: Operand) -> tl.tensor:
        left, right, _, is_block = self.operands(x, y)
        return make(op(left, right), tl.int1, is_block)

    return method


def _places(addresses: np.ndarray, mask: np.ndarray | None, itemsize: int) -> Places:
    if addresses.size == 1 and (mask is None or mask.item()):
        return one_place(addresses.item(), addresses.shape, itemsize)
    return Scattered(addresses, mask, itemsize)


def _remember(cache: dict[tuple, T], key: tuple, value: T) -> T:
    if len(cache) > 4096:
        cache.clear()
    cache[key] = value
    return value


def _is_pointer(x: Operand) -> bool:
    return isinstance(x, tl.tensor) and isinstance(x.dtype, tl.pointer_type)


def _is_zero(x: Operand) -> bool:
    """True for a number whose bits are zeros in every type."""
    return type(x) in (int, float) and x == 0 and str(x) != "-0.0"


def _check_cast(source: tl.dtype, to: tl.dtype, rounding: str | None) -> None:
    if source.is_fp8() and to.is_int() or source.is_int() and to.is_fp8():
        raise TypeError(f"Triton cannot cast {source} to {to}; go through fp32")
    if rounding not in (None, "rtne", "rtz"):
        raise ValueError(f"Invalid rounding mode: {rounding}. Supported: 'rtne' and 'rtz'.")
    narrowing = source.is_floating() and to.is_floating() and to.primitive_bitwidth < source.primitive_bitwidth
    if rounding is not None and not narrowing:
        raise ValueError(f"fp_downcast_rounding is for truncating float casts, not {source} to {to}")


class Semantic(TritonSemantic):
    """Triton's type rules, memoised, with operands broadcast by NumPy instead of copied."""

    builder: Builder

    def __init__(self, builder: Builder) -> None:
        super().__init__(builder)
        self._promotions: dict[tuple, tl.dtype] = {}
        self._constants: dict[tuple, np.ndarray] = {}
        self._numbers_with: dict[
            tuple, tuple[tl.dtype, np.ndarray]
        ] = {}  # common type with a tensor, and the number in it
        self._filled: dict[tuple, np.ndarray] = {}  # blocks of an integer in a type
        self._casts: set[tuple] = set()  # checked ones

    def to_tensor(self, x: Operand, check_type: bool = True) -> tl.tensor:
        if isinstance(x, tl.constexpr):
            x = x.value
        if isinstance(x, (int, float)):
            return self.scalar_constant(x, self._type_of(x))
        if check_type and not isinstance(x, tl.tensor):
            raise TypeError(f"cannot convert {x} of type {type(x)} to tensor")
        return x

    def _type_of(self, x: int | float) -> tl.dtype:
        if isinstance(x, bool):
            return tl.int1
        if isinstance(x, int):
            if -(2**31) <= x < 2**31:
                return tl.int32
            for bits, ty in ((31, tl.int32), (32, tl.uint32), (63, tl.int64), (64, tl.uint64)):
                if (x >> bits) == 0 or (x >> bits == -1 and ty.is_int_signed()):
                    return ty
            raise ValueError(f"Nonrepresentable integer {x}.")
        size = abs(x)
        fits = size == 0.0 or x != x or size == float("inf") or 2**-126 <= size <= (2 - 2**-23) * 2**127
        return tl.float32 if fits else tl.float64

    def scalar_constant(self, value: Number, dtype: tl.dtype) -> tl.tensor:
        return make(self._constant(value, dtype), dtype, False)

    def _constant(self, value: Number, dtype: tl.dtype) -> np.ndarray:
        key = (dtype.name, value, type(value), value == 0 and str(value))  # 0.0 == -0.0 == 0 == False
        array = self._constants.get(key)
        if array is None:
            if dtype.is_int() and not dtype.is_bool():
                self._check_range(value, dtype)
                wide = np.array([int(value)], np.uint64 if value >= 2**63 else np.int64)
            else:
                wide = np.array([value], np.bool_ if dtype.is_bool() else np.float64)
                wide = wide if dtype.is_bool() or dtype.is_fp64() else wide.astype(np.float32)
            array = _remember(self._constants, key, numerics.convert(wide, numpy_dtype(dtype)))
        return array

    def _check_range(self, value: Number, dtype: tl.dtype) -> None:
        if value != int(value):
            raise TypeError(f"cannot make a {dtype} of {value}")
        if value < 0 and dtype.is_int_unsigned():
            raise ValueError(
                "Cannot perform a binary operation between an unsigned tensor and a negative scalar. "
                "Perform a explicit cast on one of them."
            )
        if not dtype.get_int_min_value() <= value <= dtype.get_int_max_value():
            raise ValueError(f"Scalar {value} is out of range for type {dtype}")

    def _promote(self, a: tl.dtype, a_is_scalar: bool, b: tl.dtype, b_is_scalar: bool, div: bool) -> tl.dtype:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, div)
        common = self._promotions.get(key)
        if common is None:
            if isinstance(a, tl.pointer_type) or isinstance(b, tl.pointer_type):
                raise IncompatibleTypeErrorImpl(a, b)
            common = self._promotions[key] = self.computation_type_impl(a, a_is_scalar, b, b_is_scalar, div)
        return common

    def operands(self, x: Operand, y: Operand, div: bool = False) -> tuple[np.ndarray, np.ndarray, tl.dtype, bool]:
        """(left array, right array, common element type, result is a block). Pointers are refused."""
        if not isinstance(x, _Tensor):
            return self._with_number(y, x, True, div) if isinstance(y, _Tensor) else self._numbers(x, y, div)
        if not isinstance(y, _Tensor):
            return self._with_number(x, y, False, div)
        a, b, left, right = x.dtype, y.dtype, x.handle.data, y.handle.data
        if a is not b or div or isinstance(a, _Pointer):
            ty = self._promote(a, False, b, False, div)
            if a is not ty:
                left = numerics.convert(left, numpy_dtype(ty))
            if b is not ty:
                right = numerics.convert(right, numpy_dtype(ty))
        else:
            ty = a
        return left, right, ty, x.type is not a or y.type is not b

    def _with_number(
        self, x: tl.tensor, number: Number, is_left: bool, div: bool
    ) -> tuple[np.ndarray, np.ndarray, tl.dtype, bool]:
        """``operands`` of a tensor and a number, which is the left one or the right one."""
        a, array = x.dtype, x.handle.data
        key = (a.name, number, type(number), is_left, div)
        known = self._numbers_with.get(key) if number or type(number) is int else None  # 0.0 == -0.0
        if known is None:
            b = self._type_of(number)
            if a is b and not div:
                ty = a
            else:
                ty = self._promote(b, True, a, False, div) if is_left else self._promote(a, False, b, True, div)
            known = _remember(self._numbers_with, key, (ty, self._constant(number, ty)))
        ty, constant = known
        if a is not ty:
            array = numerics.convert(array, numpy_dtype(ty))
        is_block = x.type is not a
        return (constant, array, ty, is_block) if is_left else (array, constant, ty, is_block)

    def _numbers(self, x: Number, y: Number, div: bool) -> tuple[np.ndarray, np.ndarray, tl.dtype, bool]:
        a, b = self._type_of(x), self._type_of(y)
        ty = a if a is b and not div else self._promote(a, True, b, True, div)
        return self._constant(x, ty), self._constant(y, ty), ty, False

    def binary_op_type_checking_impl(
        self,
        x: Operand,
        y: Operand,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[tl.tensor, tl.tensor]:
        if any(isinstance(getattr(v, "dtype", None), tl.pointer_type) for v in (x, y)) or not arithmetic_check:
            return super().binary_op_type_checking_impl(
                x, y, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
            )
        left, right, ty, is_block = self.operands(x, y, div_or_mod)
        if is_block and left.shape != right.shape:
            shape = np.broadcast_shapes(left.shape, right.shape)
            left, right = np.broadcast_to(left, shape), np.broadcast_to(right, shape)
        return make(left, ty, is_block), make(right, ty, is_block)

    def add(self, x: Operand, y: Operand, sanitize_overflow: bool = False) -> tl.tensor:
        if isinstance(x, _Tensor) and isinstance(x.dtype, _Pointer):
            return self._offset(x, y)
        if isinstance(y, _Tensor) and isinstance(y.dtype, _Pointer):
            return self._offset(y, x)
        return self._sum(x, y)

    def _offset(self, ptr: tl.tensor, by: Operand) -> tl.tensor:
        by = by if isinstance(by, _Tensor) else self.to_tensor(by)
        data, pointer = by.handle.data, ptr.dtype
        if data.dtype.kind not in "iub" or isinstance(by.dtype, _Pointer):
            raise IncompatibleTypeErrorImpl(ptr.type, by.type)
        data = data if data.dtype.itemsize < 8 else data.view(np.int64)
        steps = np.multiply(data, _SIZES[pointer.element_ty.primitive_bitwidth])  # int64, whatever the type of ``by``
        out = ptr.handle.data + steps.view(np.uint64)
        return make(out, pointer, ptr.type is not pointer or by.type is not by.dtype)

    def sub(self, x: Operand, y: Operand, sanitize_overflow: bool = False) -> tl.tensor:
        if isinstance(x, _Tensor) and isinstance(x.dtype, _Pointer):
            return self._offset(x, self.minus(self.to_tensor(y)))
        return self._difference(x, y)

    mul = _arithmetic(np.multiply)
    _sum, _difference = map(_arithmetic, (np.add, np.subtract))

    def floordiv(self, x: Operand, y: Operand) -> tl.tensor:
        left, right, ty, is_block = self.operands(x, y, True)
        if not ty.is_int():
            raise TypeError(f"unexpected type {ty}")
        return make(numerics.divide_int(left, right), ty, is_block)

    def mod(self, x: Operand, y: Operand) -> tl.tensor:
        left, right, ty, is_block = self.operands(x, y, True)
        return make(numerics.remainder_int(left, right), ty, is_block)

    def minimum(self, x: Operand, y: Operand, propagate_nan: tl.PropagateNan) -> tl.tensor:
        left, right, ty, is_block = self.operands(x, y)
        return make(numerics.minimum(left, right, propagate_nan is tl.PropagateNan.ALL), ty, is_block)

    def maximum(self, x: Operand, y: Operand, propagate_nan: tl.PropagateNan) -> tl.tensor:
        left, right, ty, is_block = self.operands(x, y)
        return make(numerics.maximum(left, right, propagate_nan is tl.PropagateNan.ALL), ty, is_block)

    and_, or_, xor_ = map(_bitwise, (np.bitwise_and, np.bitwise_or, np.bitwise_xor))
    shl, lshr, ashr = map(_bitwise, (np.left_shift, numerics.shift_right_logical, numerics.shift_right_arithmetic))
    greater_than, greater_equal = _comparison(np.greater), _comparison(np.greater_equal)
    less_than, less_equal = _comparison(np.less), _comparison(np.less_equal)
    equal, not_equal = _comparison(np.equal), _comparison(np.not_equal)

    def where(self, condition: tl.tensor, x: Operand, y: Operand) -> tl.tensor:
        condition = self.cast(condition, tl.int1)
        if _is_pointer(x) or _is_pointer(y):
            x, y = super().binary_op_type_checking_impl(x, y, True, True)
            left, right, ty, is_block = x.handle.data, y.handle.data, x.dtype, x.type is not x.dtype
        else:
            left, right, ty, is_block = self.operands(x, y)
        return make(np.where(condition.handle.data, left, right), ty, is_block or condition.type is not condition.dtype)

    def cast(self, x: tl.tensor, dst_ty: tl.dtype, fp_downcast_rounding: str | None = None) -> tl.tensor:
        source, to = x.dtype, dst_ty.scalar
        if source is to or source == to:
            return x
        if isinstance(source, tl.pointer_type) or isinstance(to, tl.pointer_type):
            if source.is_ptr() and to.is_ptr() or {source.name, to.name} & {"int64", "uint64"}:
                return make(x.handle.data.view(numpy_dtype(to)), to, x.type is not source)
            return super().cast(x, dst_ty)
        if (source.name, to.name, fp_downcast_rounding) not in self._casts:
            _check_cast(source, to, fp_downcast_rounding)
            self._casts.add((source.name, to.name, fp_downcast_rounding))
        out = numerics.convert(x.handle.data, numpy_dtype(to), fp_downcast_rounding == "rtz")
        return make(out, to, x.type is not source)

    def full(self, shape: Sequence[Integer], value: Operand, dtype: tl.dtype) -> tl.tensor:
        shape = tuple(map(plain, shape))
        if not all(isinstance(size, int) for size in shape):
            raise TypeError(f"Shape elements must have type `constexpr[int]`, got {shape}")
        key = (shape, value, dtype.name) if type(value) is int else None
        data = None if key is None else self._filled.get(key)
        if data is None:
            data = self.make_scalar(value, dtype).handle.data
            data = np.broadcast_to(data, shape) if shape else data
            if key is not None:
                _remember(self._filled, key, data)
        return make(data, dtype, bool(shape))

    def broadcast_impl_shape(self, input: tl.tensor, shape: Sequence[int]) -> tl.tensor:
        data, shape = input.handle.data, tuple(shape)
        is_block = input.type is not input.dtype
        if is_block and data.shape == shape:
            return input
        if (
            not is_block
            or len(shape) != data.ndim
            or any(n not in (1, to) for n, to in zip(data.shape, shape, strict=True))
        ):
            return super().broadcast_impl_shape(input, shape)  # its splat, its errors
        return make(np.broadcast_to(data, shape), input.dtype, True)

    def permute(self, input: tl.tensor, dims: Sequence[Integer]) -> tl.tensor:
        data, order = input.handle.data, tuple(map(plain, dims))
        if sorted(order) != list(range(data.ndim)) or input.type is input.dtype:
            return super().permute(input, dims)  # its errors
        return make(data.transpose(order), input.dtype, True)

    def transpose(self, x: tl.tensor) -> tl.tensor:
        """``x.T``."""
        data = x.handle.data
        return make(data.T, x.dtype, True) if data.ndim == 2 else self.permute(x, (1, 0))

    def dot_fp32(self, a: tl.tensor, b: tl.tensor, acc: tl.tensor | None) -> tl.tensor | None:
        """Common cases of ``tl.dot`` with an fp32 result; None for cases left to Triton's own code."""
        if a.dtype.name != b.dtype.name or a.dtype.name not in ("bf16", "fp16", "fp32"):
            return None
        left, right, exact = a.handle.data, b.handle.data, self.builder.port.has_exact_dots()
        if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0] or left.shape[1] < 16:
            return None
        if acc is None:
            return make(numerics.dot(left, right, np.zeros((1, 1), np.float32), exact), tl.float32, True)
        if acc.dtype.name != "fp32" or acc.handle.data.shape != (left.shape[0], right.shape[1]):
            return None
        return make(numerics.dot(left, right, acc.handle.data, exact), tl.float32, True)

    def dot_scaled(self, *_: object) -> None:
        raise not_interpretable(f"tl.dot_scaled in {self.builder.names()}")

    def make_scalar(self, value: tl.tensor | Number, dtype: tl.dtype) -> tl.tensor:
        return self.cast(value, dtype) if isinstance(value, tl.tensor) else self.scalar_constant(value, dtype)

    # memory

    def _mask(self, ptr: tl.tensor, mask: Operand | None, may_grow: bool) -> tuple[np.ndarray, np.ndarray | None, bool]:
        """Addresses, and a mask of equal shape or None.

        A larger mask broadcasts the pointers of a load; a store refuses it.
        """
        if not isinstance(ptr.dtype, tl.pointer_type):
            raise ValueError(f"a pointer is needed, got {ptr.type}")
        addresses, is_block = ptr.handle.data, ptr.type is not ptr.dtype
        if self.builder.port.active_threads() is not None or (not is_block and addresses.size > 1):
            return self._mask_by_threads(addresses, mask, is_block, may_grow)
        if mask is None:
            return addresses, None, is_block
        mask = self.to_tensor(mask)
        if mask.dtype is not tl.int1 and mask.dtype != tl.int1:
            raise ValueError(f"Mask must have boolean scalar type, got {mask.dtype}")
        enable = mask.handle.data
        if mask.type is not mask.dtype and not is_block:
            raise ValueError("Mask argument cannot be block type if pointer argument is not a block")
        if enable.shape != addresses.shape:
            shape = np.broadcast_shapes(addresses.shape, enable.shape) if may_grow else addresses.shape
            addresses, enable = np.broadcast_to(addresses, shape), np.broadcast_to(enable, shape)
        return addresses, enable, is_block

    def _mask_by_threads(
        self, addresses: np.ndarray, mask: Operand | None, is_block: bool, is_load: bool
    ) -> tuple[np.ndarray, np.ndarray | None, bool]:
        """``_mask`` where threads differ: in a branch that some take, or in the address of a scalar.

        All threads load a scalar; thread 0 alone stores it. Of the holders of an element the first one stores it.
        """
        enable = everywhere(addresses.shape) if mask is None else self.to_tensor(mask).handle.data
        shape = np.broadcast_shapes(addresses.shape, enable.shape)
        addresses, enable = np.broadcast_to(addresses, shape), np.broadcast_to(enable, shape)
        port = self.builder.port
        active = port.active_threads()
        if active is None:
            active = np.ones(port.position().threads, np.bool_)
        if is_block:
            held = (elements_of if is_load else stored_by)(active, addresses.size).reshape(shape)
        elif is_load:
            held = active if addresses.size > 1 else active.any(keepdims=True)
        else:
            held = np.arange(addresses.size) < (1 if active[0] else 0)
        return addresses, enable & held, is_block

    def _values(self, value: Operand, element: tl.dtype, shape: tuple[int, ...], is_block: bool) -> np.ndarray:
        """Operand of a store or an atomic, broadcast to the addresses' ``shape``."""
        if isinstance(value, tl.tensor):
            if value.type is not value.dtype and not is_block:
                raise ValueError("Value argument cannot be block type if pointer argument is not a block")
            if value.dtype is not element:
                value = self.cast(value, element)
            data = value.handle.data
        else:
            data = self.cast(self.to_tensor(value), element).handle.data
        return data if data.shape == shape else np.broadcast_to(data, shape)

    def fetch(self, ptr: tl.tensor, mask: Operand | None, other: Operand | None, access: str) -> tl.tensor:
        if mask is None and other is not None:
            raise ValueError("`other` cannot be provided without `mask`")
        addresses, enable, is_block = self._mask(ptr, mask, True)
        element = ptr.dtype.element_ty
        if (
            isinstance(other, tl.tensor)
            and other.type is not other.dtype
            and other.handle.data.shape != addresses.shape
        ):
            shape = np.broadcast_shapes(addresses.shape, other.handle.data.shape)
            addresses, enable = np.broadcast_to(addresses, shape), np.broadcast_to(enable, shape)
        places = _places(addresses, enable, numpy_dtype(element).itemsize)
        values = self.builder.load(places, element, access)
        if other is not None and not _is_zero(other):  # what is masked off was read as zeros
            values = np.where(enable, values, self._values(other, element, addresses.shape, is_block))
        return make(values, element, is_block)

    def put(self, ptr: tl.tensor, value: Operand, mask: Operand | None) -> None:
        addresses, enable, is_block = self._mask(ptr, mask, False)
        if ptr.dtype.const:
            raise ValueError("Cannot store to a constant pointer")
        data = self._values(value, ptr.dtype.element_ty, addresses.shape, is_block)
        self.builder.store(_places(addresses, enable, data.dtype.itemsize), data, "plain")

    def atom_red_typechecking_impl(self, ptr: tl.tensor, val: Operand, mask: Operand | None, op: str) -> tuple:
        addresses, enable, is_block = self._mask(ptr, mask, False)
        element = ptr.dtype.element_ty
        bits = element.primitive_bitwidth
        if ptr.dtype.const:
            raise ValueError("Cannot store to a constant pointer")
        if bits < 16 or (bits == 16 and (element.is_int() or op != "add")):
            raise ValueError(f"atomic_{op} does not support {element}")
        data = self._values(val, element, addresses.shape, is_block)
        enable = everywhere(addresses.shape) if enable is None else enable
        return ptr, make(data, element, is_block), make(enable, tl.int1, is_block)

    def _offsets(self, descriptor: tl.tensor_descriptor_base, offsets: Sequence[Operand]) -> list[int]:
        values = [value_of(x) for x in offsets]
        if len(values) != len(descriptor.handle.block_shape):
            raise ValueError(f"expected {len(descriptor.handle.block_shape)} offsets, but got {len(values)}")
        return values

    def descriptor_load(self, desc: tl.tensor_descriptor_base, offsets: Sequence[Operand], *_: object) -> tl.tensor:
        return make(self.builder.descriptor_load(desc.handle, self._offsets(desc, offsets)), desc.handle.element, True)

    def descriptor_store(self, desc: tl.tensor_descriptor_base, value: tl.tensor, offsets: Sequence[Operand]) -> None:
        data = self.cast(value, desc.handle.element).handle.data
        if data.shape != desc.handle.block_shape:
            raise ValueError(f"a block of shape {data.shape} stored through a descriptor of {desc.handle.block_shape}")
        self.builder.descriptor_store(desc.handle, data, self._offsets(desc, offsets))
        return None

    def _has_native_tma(self) -> bool:
        return True
