"""Runs ordinary ``@triton.jit`` functions with NumPy, one program at a time, on whatever memory a ``Port`` offers.

The only file of weft that touches Triton's internals. An ``Interpreter`` patches Triton once, for the scope of a
simulation; a kernel is rewritten once (operators and statements that Python would read otherwise than Triton's compiler
does) and then runs as Python, so tracebacks, ``breakpoint()`` and debuggers show the user's file and line. Nothing here
belongs to a program: which one runs, and what memory holds, is asked of the port, so programs may be greenlets.
"""

from __future__ import annotations

import builtins
import inspect
import linecache
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.language.core import TRITON_BUILTIN, base_value, constexpr, tensor_descriptor_base
from triton.language.semantic import IncompatibleTypeErrorImpl, TritonSemantic
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions, TensorHandle
from triton.runtime.jit import JITFunction, TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.simulator import numerics, rewriting


class Port(Protocol):
    """What the interpreter needs of the virtual machine.

    Address, bit and mask arrays of a call have one shape, (1,) for a scalar. They may be read-only and not contiguous.
    """

    def program(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """(program index, grid) of the program that is running now."""

    def load(self, addresses: np.ndarray, mask: np.ndarray, itemsize: int, access: str) -> np.ndarray:
        """Raw bits (uint8/16/32/64 by ``itemsize``) at ``addresses`` (uint64), zeros where masked off: a new array.

        ``access`` is "plain", "volatile" or "tma"."""

    def store(self, addresses: np.ndarray, bits: np.ndarray, mask: np.ndarray, access: str) -> None: ...

    def atomic(
        self, op: str, addresses: np.ndarray, bits: np.ndarray, mask: np.ndarray, dtype: np.dtype, sem: str, scope: str
    ) -> np.ndarray:
        """Old raw bits; ``op`` of add, fadd, xchg, min, max, umin, umax, and, or, xor, computed in ``dtype``."""

    def cas(self, addresses: np.ndarray, compare: np.ndarray, bits: np.ndarray, sem: str, scope: str) -> np.ndarray: ...

    def barrier(self) -> None: ...

    def launch(self, jit_fn: Any, grid: Any, args: tuple, kwargs: dict) -> None:
        """A launch ``kernel[grid](*args, **kwargs)`` met while the interpreter is active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel with its arguments bound. ``run()`` executes it once, for the program that the port names."""

    name: str
    grid: tuple[int, int, int]
    run: Callable[[], None]
    tensors: list[torch.Tensor]


# Launch options of the NVIDIA and AMD backends.
_OPTIONS = frozenset({
    "allow_flush_denorm", "arch", "clc", "cluster_dims", "debug", "default_dot_input_precision", "enable_fp_fusion",
    "enable_reflect_ftz", "extern_libs", "instrumentation_mode", "ir_override", "kpack", "llvm_fn_attrs",
    "matrix_instr_nonkdim", "maxRegAutoWS", "maxnreg", "minRegAutoWS", "num_ctas", "num_stages", "num_warps",
    "ptx_options", "ptx_version", "sanitize_overflow", "sched4reg", "schedule_hint", "supported_fp8_dtypes",
    "warp_size", "waves_per_eu"
})  # fmt: skip
_SEMANTICS = {
    ir.MEM_SEMANTIC.RELAXED: "relaxed",
    ir.MEM_SEMANTIC.ACQUIRE: "acquire",
    ir.MEM_SEMANTIC.RELEASE: "release",
    ir.MEM_SEMANTIC.ACQUIRE_RELEASE: "acq_rel",
}
_SCOPES = {ir.MEM_SYNC_SCOPE.GPU: "gpu", ir.MEM_SYNC_SCOPE.CTA: "cta", ir.MEM_SYNC_SCOPE.SYSTEM: "sys"}
_ATOMICS = {
    getattr(ir.ATOMIC_OP, name): name.lower()
    for name in ("ADD", "FADD", "XCHG", "MIN", "MAX", "UMIN", "UMAX", "AND", "OR", "XOR")
}
_REDUCTIONS = {
    getattr(ir.DESCRIPTOR_REDUCE_KIND, name): name.lower() for name in ("ADD", "MIN", "MAX", "AND", "OR", "XOR")
}
_LOAD_MODIFIERS = frozenset([None, "", "none", ".ca", ".cg", ".cs", ".cv"])
_EVICTIONS = frozenset([None, "", "evict_normal", "evict_first", "evict_last"])
_ALL_NAN = tl.PropagateNan.ALL
_ABSENT = object()
_SCALAR_SHAPE = (1,)
_EVERYTHING = slice(None)


# --- values -----------------------------------------------------------------------------------------------------------


class Handle(TensorHandle):
    """The array behind a ``tl.tensor``: shape (1,) for a scalar; bf16 and fp8 as ml_dtypes arrays. Never written to."""

    def __init__(self, data: np.ndarray, dtype: tl.dtype) -> None:
        self.data, self.dtype = data, dtype

    @property
    def attr(self) -> dict:
        return {}

    def set_attr(self, key: str, value: Any) -> None:
        """Hints say nothing that an interpreter needs."""


_blocks: dict[tuple, tl.block_type] = {}  # a memo: building a block type costs as much as an operation


def _block_type(element: tl.dtype, shape: tuple[int, ...]) -> tl.block_type:
    found = _blocks.get((element.name, shape))
    if found is None or found.element_ty is not element:
        found = _blocks[element.name, shape] = tl.block_type(element, list(shape))
    return found


@cache
def _pointer_type(element: str, const: bool) -> tl.pointer_type:
    pointee = tl.str_to_ty(f"*{element}", None).element_ty
    return tl.pointer_type(pointee, const=True) if const else tl.pointer_type(pointee)


@cache
def _everywhere(shape: tuple[int, ...]) -> np.ndarray:
    """The mask of an access without a mask."""
    mask = np.ones(shape, np.bool_)
    mask.flags.writeable = False
    return mask


@cache
def _shape_tuple(shape: tuple[int, ...]) -> tl.tuple:
    return tl.tuple([constexpr(size) for size in shape])


def _plain(x: Any) -> Any:
    return x.value if isinstance(x, constexpr) else x


def numpy_dtype(element: tl.dtype) -> np.dtype:
    """The dtype of the array that holds values of a Triton element type; addresses for pointers."""
    if isinstance(element, tl.pointer_type):
        return numerics.BITS[8]
    if element.name not in numerics.DTYPES:
        raise _not_interpretable(f"element type {element}")
    return numerics.DTYPES[element.name]


def _not_interpretable(what: str) -> Exception:
    from weft.errors import NotInterpretable

    return NotInterpretable(
        f"{what} cannot run in the simulator; such a path needs a portable twin in plain Triton, "
        f"and a test that the two agree"
    )


def _make(data: np.ndarray, element: tl.dtype, is_block: bool) -> tl.tensor:
    return tl.tensor(Handle(data, element), _block_type(element, data.shape) if is_block else element)


def scalar(value: int | float | bool, dtype: tl.dtype) -> tl.tensor:
    """A scalar ``tl.tensor``."""
    return _make(numerics.convert(np.array([value]), numpy_dtype(dtype)), dtype, False)


def block(array: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    """A block ``tl.tensor`` of an array, whose sizes are powers of two."""
    return _make(numerics.convert(np.asarray(array), numpy_dtype(dtype)), dtype, True)


def value_of(x: Any) -> Any:
    """The plain value of ``x``: of a scalar tensor a Python number (an address for a pointer), of a block its array,
    of a constexpr what it holds; anything else as it is."""
    if isinstance(x, constexpr):
        return x.value
    if isinstance(x, tl.tensor):
        data = x.handle.data
        return data if x.type is not x.dtype else data.item()
    return x


def addresses_of(pointer: tl.tensor) -> np.ndarray:
    """Addresses (uint64) of a pointer or block of pointers; shape (1,) for one pointer."""
    if not isinstance(pointer.dtype, tl.pointer_type):
        raise TypeError(f"a pointer is needed, got {pointer.type}")
    return pointer.handle.data


def element_dtype(pointer: tl.tensor) -> tl.dtype:
    """The type of what a pointer (or block of pointers) points to."""
    return pointer.dtype.element_ty


@cache
def _steps(block_shape: tuple[int, ...]) -> list[np.ndarray]:
    """Per dimension the indices within a block, shaped to broadcast."""
    rank = len(block_shape)
    return [
        np.arange(size, dtype=np.int64).reshape([-1 if d == axis else 1 for d in range(rank)])
        for axis, size in enumerate(block_shape)
    ]


class Descriptor:
    """Handle of a tensor descriptor: plain Python numbers."""

    def __init__(
        self,
        base: int,
        element: tl.dtype,
        shape: list[int],
        strides: list[int],
        block_shape: tuple[int, ...],
        nan: bool,
    ) -> None:
        self.base, self.element, self.shape, self.strides = base, element, shape, strides
        self.block_shape, self.nan, self.round_to_tf32 = block_shape, nan, False
        self.itemsize = numpy_dtype(element).itemsize
        if base % 16:
            raise ValueError(f"a tensor descriptor's base must be 16-byte aligned, got address {base:#x}")
        for stride in strides[:-1]:
            if stride * self.itemsize % 16:
                raise ValueError(f"a descriptor's strides must be multiples of 16 bytes, got {stride} of {element}")
        if strides[-1] != 1:
            raise ValueError(f"the last stride of a tensor descriptor must be 1, got {strides[-1]}")
        self._relative: np.ndarray | None = None

    def locate(self, offsets: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Addresses and in-bounds mask of the block at ``offsets``; an offset may be an array (gather)."""
        if np.any(offsets[-1] * self.itemsize % 16):
            raise ValueError(
                f"a descriptor's block must start at a multiple of 16 bytes, got offset {offsets[-1]} of {self.element}"
            )
        steps = _steps(self.block_shape)
        bytes_of = [stride * self.itemsize for stride in self.strides]
        if self._relative is None:
            self._relative = sum(step * by for step, by in zip(steps, bytes_of, strict=True)).view(np.uint64)
        start = sum(offset * by for offset, by in zip(offsets, bytes_of, strict=True)) + self.base
        start = start.view(np.uint64) if isinstance(start, np.ndarray) else np.uint64(start % 2**64)
        addresses = self._relative + start
        mask = None
        for offset, step, size in zip(offsets, steps, self.shape, strict=True):
            if isinstance(offset, np.ndarray) or not 0 <= offset <= size - step.size:
                at = step + offset
                inside = (at >= 0) & (at < size)
                mask = inside if mask is None else mask & inside
        return addresses, _everywhere(addresses.shape) if mask is None else np.broadcast_to(mask, addresses.shape)


# --- the builder: what Triton's semantic layer asks for, as NumPy calls -----------------------------------------------


def _array(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.data


def _unary(op: Callable) -> Callable:
    return lambda self, x: Handle(op(x.data), x.dtype)


def _binary(op: Callable) -> Callable:
    return lambda self, x, y: Handle(op(x.data, y.data), x.dtype)


def _cast(self: Builder, x: TensorHandle, to: tl.dtype, *_: Any) -> Handle:
    return Handle(numerics.convert(x.data, numpy_dtype(to.scalar)), to.scalar)


class Builder(InterpreterBuilder):
    """Triton's interpreter builder without its state, its raw-bit bf16 and its memory."""

    def __init__(self, port: Port, names: Callable[[], str]) -> None:
        super().__init__()
        self.port, self.names = port, names
        # Asserts of a kernel are checked; overflow of integers is not an error on the GPU.
        self.options = InterpreterOptions(debug=True, sanitize_overflow=False, arch="simulator")
        self.codegen_fns["min_dot_size"] = lambda a, b: (1, 1, 32 if a.scalar.primitive_bitwidth == 8 else 16)

    def get_half_ty(self) -> tl.dtype:
        return tl.float16

    def get_bf16(self, value: float) -> Handle:
        return Handle(numerics.f32_to_bf16(np.array([value], np.float32)), tl.bfloat16)

    def get_null_value(self, ty: tl.dtype) -> Handle:
        return Handle(np.zeros(_SCALAR_SHAPE, numpy_dtype(ty.scalar)), ty.scalar)

    def get_all_ones_value(self, ty: tl.dtype) -> Handle:
        return Handle(~np.zeros(_SCALAR_SHAPE, numpy_dtype(ty.scalar)), ty.scalar)

    # programs

    def create_get_program_id(self, axis: int) -> Handle:
        return Handle(np.array([self.port.program()[0][axis]], np.int32), tl.int32)

    def create_get_num_programs(self, axis: int) -> Handle:
        return Handle(np.array([self.port.program()[1][axis]], np.int32), tl.int32)

    def create_barrier(self) -> None:
        self.port.barrier()

    def create_grid_dependency_wait(self) -> None: ...

    def create_grid_dependency_launch_dependents(self) -> None: ...

    def create_print(self, prefix: str, hexadecimal: bool, values: list, is_signed: Any) -> None:
        where = self.port.program()[0]
        for value in values:
            shown = [hex(v) for v in value.data.ravel().tolist()] if hexadecimal else value.data
            print(f"{where}{prefix}{shown}")
        if not values:
            print(f"{where}{prefix}")

    def create_assert(self, condition: TensorHandle, message: str) -> None:
        if not condition.data.all():
            raise AssertionError(message)

    def create_assume(self, condition: TensorHandle) -> None:
        self.create_assert(condition, "tl.assume() of something that does not hold")

    def create_inline_asm(self, *_: Any) -> None:
        raise _not_interpretable(f"inline assembly in {self.names()}")

    def create_extern_elementwise(self, library: str, path: str, symbol: str, *_: Any) -> None:
        raise _not_interpretable(f"the external function {symbol} of {library or path} in {self.names()}")

    # memory

    def load(self, ptr: np.ndarray, mask: np.ndarray, element: tl.dtype, access: str) -> np.ndarray:
        dtype = numpy_dtype(element)
        bits = self.port.load(ptr, mask, dtype.itemsize, access)
        return bits.astype(np.bool_) if dtype == np.bool_ else bits.view(dtype)

    def store(self, ptr: np.ndarray, values: np.ndarray, mask: np.ndarray, access: str) -> None:
        self.port.store(ptr, values.view(numerics.BITS[values.dtype.itemsize]), mask, access)

    def get_cache_policy(self, cache_modifier: str, eviction_policy: str) -> str:
        return "volatile" if cache_modifier == "cv" else "plain"

    def create_masked_load(self, ptr: TensorHandle, mask: Any, other: Any, *_: Any) -> Handle:
        """For block pointers, which are loaded through Triton's own code."""
        element, mask = ptr.get_element_ty(), _array(mask)
        values = self.load(ptr.data, mask, element, "plain")
        if other is not None:
            values = np.where(mask, values, other.data.view(values.dtype))
        return Handle(values, element)

    def create_masked_store(self, ptr: TensorHandle, value: TensorHandle, mask: Any, *_: Any) -> None:
        self.store(ptr.data, value.data, _array(mask), "plain")

    def create_atomic_rmw(self, op: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Handle:
        return self.atomic(_ATOMICS[op], ptr.data, value.data, mask.data, value.dtype, _SEMANTICS[sem], _SCOPES[scope])

    def atomic(
        self, op: str, ptr: np.ndarray, values: np.ndarray, mask: np.ndarray, element: tl.dtype, sem: str, scope: str
    ) -> Handle:
        bits = np.broadcast_to(values.view(numerics.BITS[values.dtype.itemsize]), ptr.shape)
        old = self.port.atomic(op, ptr, bits, np.broadcast_to(mask, ptr.shape), values.dtype, sem, scope)
        return Handle(old.view(values.dtype), element)

    def create_atomic_cas(self, ptr: Any, compare: Any, value: Any, sem: Any, scope: Any) -> Handle:
        element = ptr.dtype.scalar.element_ty
        dtype = numpy_dtype(element)
        bits = numerics.BITS[dtype.itemsize]
        wanted, new = (
            np.broadcast_to(numerics.convert(x.data, dtype).view(bits), ptr.data.shape) for x in (compare, value)
        )
        old = self.port.cas(ptr.data, wanted, new, _SEMANTICS[sem], _SCOPES[scope])
        return Handle(old.view(dtype), element)

    def create_atomic_load(self, ptr: Any, mask: Any, sem: Any, scope: Any) -> Handle:
        element = ptr.dtype.scalar.element_ty
        dtype = numpy_dtype(element)
        nothing = np.zeros(ptr.data.shape, numerics.BITS[dtype.itemsize])
        old = self.atomic("or", ptr.data, nothing, mask.data, element, _SEMANTICS[sem], _SCOPES[scope])
        return Handle(old.data.view(dtype), element)

    def create_atomic_store(self, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> None:
        self.atomic("xchg", ptr.data, value.data, mask.data, value.dtype, _SEMANTICS[sem], _SCOPES[scope])

    def create_atomic_poll(self, ptr: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any) -> Handle:
        """Polls until the value is there; there is no clock here, so a timeout is never reached."""
        everywhere = np.ones(ptr.data.shape, np.bool_)
        while True:
            seen = self.create_atomic_load(ptr, Handle(everywhere, tl.int1), sem, scope)
            if (seen.data == expected.data).all():
                return Handle(everywhere, tl.int1)

    def create_make_tensor_descriptor(
        self, base: Any, shape: list, strides: list, block_shape: list[int], is_signed: bool, padding: Any = None
    ) -> Descriptor:
        sizes, steps = ([x.data.item() for x in xs] for xs in (shape, strides))
        nan = padding == ir.PADDING_OPTION.PAD_NAN
        return Descriptor(base.data.item(), base.dtype.scalar.element_ty, sizes, steps, tuple(block_shape), nan)

    def descriptor_load(self, descriptor: Descriptor, offsets: list) -> np.ndarray:
        addresses, mask = descriptor.locate(offsets)
        values = self.load(addresses, mask, descriptor.element, "tma")
        if descriptor.nan:
            values = np.where(mask, values, values.dtype.type(float("nan")))
        return numerics.round_to_tf32(values) if descriptor.round_to_tf32 else values

    def descriptor_store(self, descriptor: Descriptor, values: np.ndarray, offsets: list) -> None:
        addresses, mask = descriptor.locate(offsets)
        self.store(addresses, np.broadcast_to(values, addresses.shape), mask, "tma")

    def create_descriptor_reduce(self, kind: Any, descriptor: Descriptor, value: Any, offsets: list) -> None:
        addresses, mask = descriptor.locate([x.data.item() for x in offsets])
        op, dtype = _REDUCTIONS[kind], value.data.dtype
        if op == "add" and dtype in numerics.FLOATS:
            op = "fadd"
        elif op in ("min", "max") and dtype.kind == "u":
            op = "u" + op
        self.atomic(op, addresses, value.data, mask, value.dtype, "relaxed", "gpu")

    def create_descriptor_gather(self, descriptor: Descriptor, rows: Any, column: Any, _: Any) -> Handle:
        offsets = [rows.data.astype(np.int64).reshape(-1, 1), column.data.item()]
        return Handle(self.descriptor_load(descriptor, offsets), descriptor.element)

    def create_descriptor_scatter(self, descriptor: Descriptor, value: Any, rows: Any, column: Any) -> None:
        offsets = [rows.data.astype(np.int64).reshape(-1, 1), column.data.item()]
        self.descriptor_store(descriptor, value.data, offsets)

    # casts, shapes, arithmetic

    create_si_to_fp = create_ui_to_fp = create_fp_to_si = create_fp_to_ui = create_int_cast = _cast
    create_fp_ext = create_fp_trunc = _cast

    def create_fp_to_fp(self, x: Any, to: tl.dtype, rounding: Any) -> Handle:
        toward_zero = rounding == ir.ROUNDING_MODE.RTZ
        return Handle(numerics.convert(x.data, numpy_dtype(to.scalar), toward_zero), to.scalar)

    def create_bitcast(self, x: Any, to: tl.dtype) -> Handle:
        return Handle(x.data.view(numpy_dtype(to.scalar)), to.scalar)

    create_int_to_ptr = create_ptr_to_int = create_bitcast

    def create_splat(self, ty: tl.dtype, x: Any) -> Handle:
        return Handle(np.broadcast_to(x.data, tuple(ty.shape)), x.dtype)

    def create_unsplat(self, x: Any) -> Handle:
        return Handle(x.data.reshape(_SCALAR_SHAPE), x.dtype)

    def create_broadcast(self, x: Any, shape: Any) -> Handle:
        return Handle(np.broadcast_to(x.data, tuple(shape)), x.dtype)

    def create_expand_dims(self, x: Any, axis: int) -> Handle:
        return Handle(np.expand_dims(x.data, axis), x.dtype)

    def create_reshape(self, x: Any, shape: Any, allow_reorder: bool) -> Handle:
        return Handle(x.data.reshape(tuple(tl.core._unwrap_if_constexpr(s) for s in shape)), x.dtype)

    def create_trans(self, x: Any, order: Any) -> Handle:
        return Handle(np.transpose(x.data, [tl.core._unwrap_if_constexpr(d) for d in order]), x.dtype)

    def create_join(self, x: Any, y: Any) -> Handle:
        return Handle(np.stack(np.broadcast_arrays(x.data, y.data), axis=-1), x.dtype)

    def create_split(self, x: Any) -> tuple[Handle, Handle]:
        return Handle(x.data[..., 0], x.dtype), Handle(x.data[..., 1], x.dtype)

    def create_cat(self, x: Any, y: Any) -> Handle:
        return Handle(np.concatenate([x.data, y.data]), x.dtype)

    def create_gather(self, x: Any, index: Any, axis: int) -> Handle:
        return Handle(np.take_along_axis(x.data, index.data.astype(np.int64), axis=axis), x.dtype)

    def create_histogram(self, x: Any, bins: int, mask: Any) -> Handle:
        return Handle(numerics.histogram(x.data, bins, None if mask is None else mask.data), tl.int32)

    def create_make_range(self, ty: tl.dtype, start: int, stop: int) -> Handle:
        return Handle(np.arange(start, stop, dtype=np.int32), tl.int32)

    def create_addptr(self, ptr: Any, offset: Any) -> Handle:
        size = max(1, ptr.dtype.scalar.element_ty.primitive_bitwidth // 8)
        return Handle(ptr.data + (offset.data.astype(np.int64) * size).view(np.uint64), ptr.dtype)

    def create_select(self, condition: Any, x: Any, y: Any) -> Handle:
        return Handle(np.where(condition.data, x.data, y.data), x.dtype)

    def create_dot(self, a: Any, b: Any, accumulator: Any, precision: Any, imprecise: Any) -> Handle:
        return Handle(numerics.dot(a.data, b.data, accumulator.data), accumulator.dtype.scalar)

    def create_dot_scaled(self, *_: Any) -> None:
        raise _not_interpretable(f"tl.dot_scaled in {self.names()}")

    def create_fma(self, x: Any, y: Any, z: Any) -> Handle:
        return Handle(numerics.fma(x.data, y.data, z.data), z.dtype)

    def create_clampf(self, x: Any, low: Any, high: Any, propagate: Any) -> Handle:
        nan = propagate is _ALL_NAN
        out = numerics.minimum(numerics.maximum(x.data, low.data, nan), high.data, nan)
        return Handle(out, x.dtype)

    create_precise_divf = create_fdiv = create_approx_divf = _binary(np.divide)
    create_umulhi = _binary(numerics.multiply_high)
    create_fneg = _unary(np.negative)
    create_fabs = create_iabs = _unary(numerics.absolute)
    create_rsqrt = _unary(lambda x: np.divide(x.dtype.type(1), np.sqrt(x)))
    create_erf = _unary(lambda x: numerics.erf(x).astype(x.dtype))
    create_exp, create_exp2, create_log, create_log2 = map(_unary, (np.exp, np.exp2, np.log, np.log2))
    create_cos, create_sin, create_floor, create_ceil = map(_unary, (np.cos, np.sin, np.floor, np.ceil))
    create_sqrt = create_precise_sqrt = _unary(np.sqrt)


# --- the semantic layer: Triton's own, with the hot operations short-cut ----------------------------------------------


def _bitwise(op: Callable) -> Callable:
    def method(self: Semantic, x: Any, y: Any) -> tl.tensor:
        left, right, ty, is_block = self.operands(x, y)
        if not ty.is_int():
            raise IncompatibleTypeErrorImpl(ty, ty)
        return _make(op(left, right), ty, is_block)

    return method


def _comparison(op: Callable) -> Callable:
    def method(self: Semantic, x: Any, y: Any) -> tl.tensor:
        left, right, _, is_block = self.operands(x, y)
        return _make(op(left, right), tl.int1, is_block)

    return method


class Semantic(TritonSemantic):
    """Triton's type rules, memoised; operands broadcast by NumPy rather than copied out."""

    builder: Builder

    def __init__(self, builder: Builder) -> None:
        super().__init__(builder)
        self._promotions: dict[tuple, tl.dtype] = {}
        self._constants: dict[tuple, np.ndarray] = {}

    def make_tensor(self, handle: TensorHandle, ty: tl.dtype) -> tl.tensor:
        return tl.tensor(handle, ty)

    def to_tensor(self, x: Any, check_type: bool = True) -> Any:
        if isinstance(x, constexpr):
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

    def to_tensor_type(self, x: Any) -> tl.dtype:
        x = x.value if isinstance(x, tl.core.constexpr_type) else x
        return x if isinstance(x, tl.dtype) else self._type_of(x)

    def scalar_constant(self, value: Any, dtype: tl.dtype) -> tl.tensor:
        return tl.tensor(Handle(self._constant(value, dtype), dtype), dtype)

    def _constant(self, value: Any, dtype: tl.dtype) -> np.ndarray:
        key = (dtype.name, value, type(value), value == 0 and str(value))  # 0.0 == -0.0 == 0 == False
        found = self._constants.get(key)
        if found is None:
            if dtype.is_int() and not dtype.is_bool():
                self._check_range(value, dtype)
                wide = np.array([int(value)], np.uint64 if value >= 2**63 else np.int64)
            else:
                wide = np.array([value], np.bool_ if dtype.is_bool() else np.float64)
                wide = wide if dtype.is_bool() or dtype.is_fp64() else wide.astype(np.float32)
            if len(self._constants) > 4096:
                self._constants.clear()
            found = self._constants[key] = numerics.convert(wide, numpy_dtype(dtype))
        return found

    def _check_range(self, value: Any, dtype: tl.dtype) -> None:
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
        found = self._promotions.get(key)
        if found is None:
            found = self._promotions[key] = self.computation_type_impl(a, a_is_scalar, b, b_is_scalar, div)
        return found

    def operands(self, x: Any, y: Any, div: bool = False) -> tuple[np.ndarray, np.ndarray, tl.dtype, bool]:
        """Two arrays of the common element type, that type, and whether the result is a block. No pointers."""
        x_is_tensor, y_is_tensor = isinstance(x, tl.tensor), isinstance(y, tl.tensor)
        a, b = x.dtype if x_is_tensor else self._type_of(x), y.dtype if y_is_tensor else self._type_of(y)
        if a is b and not div and not isinstance(a, tl.pointer_type):
            ty = a
        else:
            if isinstance(a, tl.pointer_type) or isinstance(b, tl.pointer_type):
                raise IncompatibleTypeErrorImpl(a, b)
            ty = self._promote(a, not x_is_tensor, b, not y_is_tensor, div)
        if x_is_tensor:
            left = x.handle.data if a is ty else numerics.convert(x.handle.data, numpy_dtype(ty))
        else:
            left = self._constant(x, ty)
        if y_is_tensor:
            right = y.handle.data if b is ty else numerics.convert(y.handle.data, numpy_dtype(ty))
        else:
            right = self._constant(y, ty)
        is_block = (x_is_tensor and x.type is not x.dtype) or (y_is_tensor and y.type is not y.dtype)
        return left, right, ty, is_block

    def binary_op_type_checking_impl(
        self,
        x: Any,
        y: Any,
        allow_x_ptr: bool = False,
        allow_y_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[tl.tensor, tl.tensor]:
        if any(isinstance(getattr(v, "dtype", None), tl.pointer_type) for v in (x, y)) or not arithmetic_check:
            return super().binary_op_type_checking_impl(x, y, allow_x_ptr, allow_y_ptr, arithmetic_check, div_or_mod)
        left, right, ty, is_block = self.operands(x, y, div_or_mod)
        if is_block and left.shape != right.shape:
            shape = np.broadcast_shapes(left.shape, right.shape)
            left, right = np.broadcast_to(left, shape), np.broadcast_to(right, shape)
        return _make(left, ty, is_block), _make(right, ty, is_block)

    def _arithmetic(self, op: np.ufunc, x: Any, y: Any) -> tl.tensor:
        left, right, ty, is_block = self.operands(x, y)
        out = op(left, right) if ty.name != "int1" else numerics.wrap_bool(op, left, right)
        return _make(out, ty, is_block)

    def add(self, x: Any, y: Any, sanitize_overflow: bool = False) -> tl.tensor:
        if isinstance(y, tl.tensor) and isinstance(y.dtype, tl.pointer_type):
            x, y = y, x
        if isinstance(x, tl.tensor) and isinstance(x.dtype, tl.pointer_type):
            return self._offset(x, y)
        return self._arithmetic(np.add, x, y)

    def _offset(self, ptr: tl.tensor, by: Any) -> tl.tensor:
        by = self.to_tensor(by)
        if not by.dtype.is_int():
            raise IncompatibleTypeErrorImpl(ptr.type, by.type)
        size = max(1, ptr.dtype.element_ty.primitive_bitwidth // 8)
        out = ptr.handle.data + (by.handle.data.astype(np.int64) * size).view(np.uint64)
        return _make(out, ptr.dtype, ptr.type is not ptr.dtype or by.type is not by.dtype)

    def sub(self, x: Any, y: Any, sanitize_overflow: bool = False) -> tl.tensor:
        if isinstance(x, tl.tensor) and isinstance(x.dtype, tl.pointer_type):
            return self._offset(x, self.minus(self.to_tensor(y)))
        return self._arithmetic(np.subtract, x, y)

    def mul(self, x: Any, y: Any, sanitize_overflow: bool = False) -> tl.tensor:
        return self._arithmetic(np.multiply, x, y)

    def floordiv(self, x: Any, y: Any) -> tl.tensor:
        left, right, ty, is_block = self.operands(x, y, True)
        if not ty.is_int():
            raise TypeError(f"unexpected type {ty}")
        return _make(numerics.divide_int(left, right), ty, is_block)

    def mod(self, x: Any, y: Any) -> tl.tensor:
        left, right, ty, is_block = self.operands(x, y, True)
        return _make(numerics.remainder_int(left, right), ty, is_block)

    def minimum(self, x: Any, y: Any, propagate_nan: Any) -> tl.tensor:
        left, right, ty, is_block = self.operands(x, y)
        return _make(numerics.minimum(left, right, propagate_nan is _ALL_NAN), ty, is_block)

    def maximum(self, x: Any, y: Any, propagate_nan: Any) -> tl.tensor:
        left, right, ty, is_block = self.operands(x, y)
        return _make(numerics.maximum(left, right, propagate_nan is _ALL_NAN), ty, is_block)

    and_, or_, xor_ = map(_bitwise, (np.bitwise_and, np.bitwise_or, np.bitwise_xor))
    shl, lshr, ashr = map(_bitwise, (np.left_shift, numerics.shift_right_logical, numerics.shift_right_arithmetic))
    greater_than, greater_equal = _comparison(np.greater), _comparison(np.greater_equal)
    less_than, less_equal = _comparison(np.less), _comparison(np.less_equal)
    equal, not_equal = _comparison(np.equal), _comparison(np.not_equal)

    def where(self, condition: tl.tensor, x: Any, y: Any) -> tl.tensor:
        condition = self.cast(condition, tl.int1)
        if any(isinstance(v, tl.tensor) and isinstance(v.dtype, tl.pointer_type) for v in (x, y)):
            x, y = super().binary_op_type_checking_impl(x, y, True, True)
            left, right, ty, is_block = x.handle.data, y.handle.data, x.dtype, x.type is not x.dtype
        else:
            left, right, ty, is_block = self.operands(x, y)
        return _make(
            np.where(condition.handle.data, left, right), ty, is_block or condition.type is not condition.dtype
        )

    def cast(self, x: tl.tensor, dst_ty: tl.dtype, fp_downcast_rounding: str | None = None) -> tl.tensor:
        source, to = x.dtype, dst_ty.scalar
        if source is to or source == to:
            return x
        if isinstance(source, tl.pointer_type) or isinstance(to, tl.pointer_type):
            if source.is_ptr() and to.is_ptr() or {source.name, to.name} & {"int64", "uint64"}:
                return _make(x.handle.data.view(numpy_dtype(to)), to, x.type is not source)
            return super().cast(x, dst_ty)
        if source.is_fp8() and to.is_int() or source.is_int() and to.is_fp8():
            raise TypeError(f"Triton cannot cast {source} to {to}; go through fp32")
        if fp_downcast_rounding not in (None, "rtne", "rtz"):
            raise ValueError(f"Invalid rounding mode: {fp_downcast_rounding}. Supported: 'rtne' and 'rtz'.")
        narrowing = source.is_floating() and to.is_floating() and to.primitive_bitwidth < source.primitive_bitwidth
        if fp_downcast_rounding is not None and not narrowing:
            raise ValueError(f"fp_downcast_rounding is for truncating float casts, not {source} to {to}")
        out = numerics.convert(x.handle.data, numpy_dtype(to), fp_downcast_rounding == "rtz")
        return _make(out, to, x.type is not source)

    def full(self, shape: Any, value: Any, dtype: tl.dtype) -> tl.tensor:
        data = self.make_scalar(value, dtype).handle.data
        shape = tuple(map(_plain, shape))
        if not all(isinstance(size, int) for size in shape):
            raise TypeError(f"Shape elements must have type `constexpr[int]`, got {shape}")
        return _make(np.broadcast_to(data, shape) if shape else data, dtype, bool(shape))

    def dot_fp32(self, a: tl.tensor, b: tl.tensor, acc: tl.tensor | None) -> tl.tensor | None:
        """The usual products with an fp32 result; None for whatever Triton's own code should judge."""
        if a.dtype.name != b.dtype.name or a.dtype.name not in ("bf16", "fp16", "fp32"):
            return None
        left, right = a.handle.data, b.handle.data
        if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0] or left.shape[1] < 16:
            return None
        if acc is None:
            return _make(numerics.dot(left, right, np.zeros((1, 1), np.float32)), tl.float32, True)
        if acc.dtype.name != "fp32" or acc.handle.data.shape != (left.shape[0], right.shape[1]):
            return None
        return _make(numerics.dot(left, right, acc.handle.data), tl.float32, True)

    def make_scalar(self, value: Any, dtype: tl.dtype) -> tl.tensor:
        return self.cast(value, dtype) if isinstance(value, tl.tensor) else self.scalar_constant(value, dtype)

    # memory

    def _mask(self, ptr: tl.tensor, mask: tl.tensor | None, may_grow: bool) -> tuple[np.ndarray, np.ndarray, bool]:
        """Addresses and mask of one shape. A larger mask repeats the pointers of a load, and is refused in a store."""
        if not isinstance(ptr.dtype, tl.pointer_type):
            raise ValueError(f"a pointer is needed, got {ptr.type}")
        addresses, is_block = ptr.handle.data, ptr.type is not ptr.dtype
        if mask is None:
            return addresses, _everywhere(addresses.shape), is_block
        if mask.dtype is not tl.int1 and mask.dtype != tl.int1:
            raise ValueError(f"Mask must have boolean scalar type, got {mask.dtype}")
        enable = mask.handle.data
        if mask.type is not mask.dtype and not is_block:
            raise ValueError("Mask argument cannot be block type if pointer argument is not a block")
        if enable.shape != addresses.shape:
            shape = np.broadcast_shapes(addresses.shape, enable.shape) if may_grow else addresses.shape
            addresses, enable = np.broadcast_to(addresses, shape), np.broadcast_to(enable, shape)
        return addresses, enable, is_block

    def _values(self, value: Any, element: tl.dtype, shape: tuple[int, ...], is_block: bool) -> np.ndarray:
        """What a store or an atomic takes to addresses of ``shape``."""
        if isinstance(value, tl.tensor):
            if value.type is not value.dtype and not is_block:
                raise ValueError("Value argument cannot be block type if pointer argument is not a block")
            if value.dtype is not element:
                value = self.cast(value, element)
            data = value.handle.data
        else:
            data = self.cast(self.to_tensor(value), element).handle.data
        return data if data.shape == shape else np.broadcast_to(data, shape)

    def fetch(self, ptr: tl.tensor, mask: tl.tensor | None, other: Any, access: str) -> tl.tensor:
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
        values = self.builder.load(addresses, enable, element, access)
        if other is not None:
            values = np.where(enable, values, self._values(other, element, addresses.shape, is_block))
        return _make(values, element, is_block)

    def put(self, ptr: tl.tensor, value: Any, mask: tl.tensor | None) -> None:
        addresses, enable, is_block = self._mask(ptr, mask, False)
        if ptr.dtype.const:
            raise ValueError("Cannot store to a constant pointer")
        data = self._values(value, ptr.dtype.element_ty, addresses.shape, is_block)
        self.builder.store(addresses, data, enable, "plain")

    def atom_red_typechecking_impl(self, ptr: tl.tensor, val: Any, mask: Any, op: str) -> tuple:
        addresses, enable, is_block = self._mask(ptr, self.to_tensor(mask) if mask is not None else None, False)
        element = ptr.dtype.element_ty
        bits = element.primitive_bitwidth
        if ptr.dtype.const:
            raise ValueError("Cannot store to a constant pointer")
        if bits < 16 or (bits == 16 and (element.is_int() or op != "add")):
            raise ValueError(f"atomic_{op} does not support {element}")
        data = self._values(val, element, addresses.shape, is_block)
        return ptr, _make(data, element, is_block), _make(enable, tl.int1, is_block)

    def _offsets(self, descriptor: tl.tensor_descriptor_base, offsets: Any) -> list[int]:
        values = [value_of(x) for x in offsets]
        if len(values) != len(descriptor.block_shape):
            raise ValueError(f"expected {len(descriptor.block_shape)} offsets, but got {len(values)}")
        return values

    def descriptor_load(self, desc: tl.tensor_descriptor_base, offsets: Any, *_: Any) -> tl.tensor:
        return _make(self.builder.descriptor_load(desc.handle, self._offsets(desc, offsets)), desc.handle.element, True)

    def descriptor_store(self, desc: tl.tensor_descriptor_base, value: tl.tensor, offsets: Any) -> None:
        data = self.cast(value, desc.handle.element).handle.data
        if data.shape != desc.handle.block_shape:
            raise ValueError(f"a block of shape {data.shape} stored through a descriptor of {desc.handle.block_shape}")
        self.builder.descriptor_store(desc.handle, data, self._offsets(desc, offsets))
        return None

    def _has_native_tma(self) -> bool:
        return True


# --- reductions and scans: combine functions run on whole blocks ------------------------------------------------------


class Reductions:
    """tl.reduce, tl.associative_scan and tl.map_elementwise."""

    def __init__(self, function: Callable[[Any], Callable]) -> None:
        self.function = function

    def reduce(self, input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:
        inputs = (input,) if isinstance(input, tl.tensor) else tuple(input)
        axis, keep_dims, combine_fn = map(tl.core._unwrap_if_constexpr, (axis, keep_dims, combine_fn))
        arrays = [x.handle.data for x in inputs]
        rank = arrays[0].ndim
        along = 0
        if axis is None:
            arrays = [a.reshape(-1) for a in arrays]
        else:
            along = tl.core._wrap_axis(axis, rank)
        standard = tl.standard
        if combine_fn is standard._sum_combine:
            out = [numerics.reduce_sum(arrays[0], along)]
        elif combine_fn is standard._elementwise_max or combine_fn is standard._elementwise_min:
            out = [numerics.reduce_extreme(arrays[0], along, combine_fn is standard._elementwise_max)]
        else:
            out = self._tree(combine_fn, arrays, [x.dtype for x in inputs], along)
        if keep_dims:
            out = out if axis is not None else [a.reshape((1,) * rank) for a in out]
        else:
            out = [a.reshape(a.shape[:along] + a.shape[along + 1 :] or _SCALAR_SHAPE) for a in out]
        is_block = keep_dims or (axis is not None and rank > 1)
        results = tuple(_make(a, x.dtype, is_block) for a, x in zip(out, inputs, strict=True))
        return results[0] if isinstance(input, tl.tensor) else results

    def _combine(self, function: Callable, left: list, right: list, types_: list[tl.dtype]) -> list[np.ndarray]:
        got = function(*map(_block, left, types_), *map(_block, right, types_))
        got = got if isinstance(got, (tuple, tl.tuple)) else (got,)
        return [
            np.broadcast_to(numerics.convert(np.asarray(_data(g)), numpy_dtype(ty)), a.shape)
            for g, ty, a in zip(got, types_, left, strict=True)
        ]

    def _tree(self, combine_fn: Any, arrays: list, types_: list[tl.dtype], along: int) -> list[np.ndarray]:
        """Neighbours are combined, then neighbouring pairs, …: order is kept, so the function need not commute."""
        function = self.function(combine_fn)
        arrays = [np.moveaxis(a, along, 0) for a in arrays]
        while len(arrays[0]) > 1:
            arrays = self._combine(function, [a[0::2] for a in arrays], [a[1::2] for a in arrays], types_)
        return [np.moveaxis(a, 0, along) for a in arrays]

    def scan(self, input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> Any:
        inputs = (input,) if isinstance(input, tl.tensor) else tuple(input)
        axis, reverse, combine_fn = map(tl.core._unwrap_if_constexpr, (axis, reverse, combine_fn))
        along = tl.core._wrap_axis(axis, inputs[0].handle.data.ndim)
        arrays = [np.moveaxis(x.handle.data, along, 0) for x in inputs]
        arrays = [a[::-1] for a in arrays] if reverse else arrays
        if combine_fn is tl.standard._sum_combine:
            out = [numerics.scan_sum(arrays[0], 0)]
        else:
            function, types_ = self.function(combine_fn), [x.dtype for x in inputs]
            rows = [[a[0:1] for a in arrays]]
            for i in range(1, len(arrays[0])):
                rows.append(self._combine(function, rows[-1], [a[i : i + 1] for a in arrays], types_))
            out = [np.concatenate(parts) for parts in zip(*rows, strict=True)]
        out = [a[::-1] for a in out] if reverse else out
        results = tuple(_make(np.moveaxis(a, 0, along), x.dtype, True) for a, x in zip(out, inputs, strict=True))
        return results[0] if isinstance(input, tl.tensor) else results

    def map_elementwise(self, scalar_fn: Any, *args: tl.tensor, pack: Any = 1, **_: Any) -> Any:
        function = self.function(tl.core._unwrap_if_constexpr(scalar_fn))
        if value_of(pack) != 1:
            raise _not_interpretable("tl.map_elementwise with pack > 1")
        arrays = np.broadcast_arrays(*(x.handle.data for x in args))
        results: list[tuple] = []
        single = True
        for values in zip(*(a.reshape(-1) for a in arrays), strict=True):
            got = function(*(_make(np.array([v]), x.dtype, False) for v, x in zip(values, args, strict=True)))
            single = isinstance(got, tl.tensor)
            results.append((got,) if single else tuple(got))
        out = tuple(
            _make(np.concatenate([r.handle.data for r in column]).reshape(arrays[0].shape), column[0].dtype, True)
            for column in zip(*results, strict=True)
        )
        return out[0] if single else out


def _block(data: np.ndarray, element: tl.dtype) -> tl.tensor:
    return _make(data, element, True)


def _data(x: Any) -> Any:
    return x.handle.data if isinstance(x, tl.tensor) else value_of(x)


# --- the interpreter --------------------------------------------------------------------------------------------------


class _Patches:
    """Attributes replaced for a while."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def restore(self) -> None:
        while self._undo:
            owner, name, value = self._undo.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


class Interpreter:
    """``with Interpreter(port) as interpreter:`` is the scope in which Triton is patched; one at a time per process.

    ``words`` maps ``id(jit_fn)`` to the Python function that stands for it in kernels; register with ``replace``.
    """

    def __init__(self, port: Port) -> None:
        self.port = port
        self.words: dict[int, Callable] = {}
        self._patches = _Patches()
        self._table: dict[int, tuple[Any, Callable]] = {}  # id -> (what it is the id of, what to call)
        self._codes: dict[int, types.CodeType] = {}
        self._ranges: dict[tuple[int, int], tl.tensor] = {}
        self._kept: list[Any] = []
        self.semantic = Semantic(Builder(port, self._kernel_name))
        self.reductions = Reductions(self.resolve)
        self._helpers = {
            "__weft_call__": self.resolve,
            "__weft_assign__": self._assign,
            "__weft_truth__": self._truth,
            "__weft_all__": _all,
            "__weft_not__": self._not,
            "__weft_and_more__": lambda x: isinstance(x, tl.tensor) or bool(x),
            "__weft_or_more__": lambda x: isinstance(x, tl.tensor) or not x,
            "__weft_and__": partial(self._both, self.semantic.logical_and, False),
            "__weft_or__": partial(self._both, self.semantic.logical_or, True),
        }

    # the scope

    def __enter__(self) -> Interpreter:
        if getattr(JITFunction.run, "__weft_interpreter__", False):
            raise RuntimeError("an Interpreter is active in this process already; leave its scope first")
        if triton.knobs.runtime.interpret:
            raise RuntimeError("TRITON_INTERPRET is set, so Triton's own interpreter has the kernels; unset it")
        try:
            self._patch()
        except BaseException:
            self._patches.restore()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self._patches.restore()
        self._table.clear()

    def _patch(self) -> None:
        set_, semantic = self._patches.set, self.semantic

        def run(jit_fn: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            if not warmup:
                self.port.launch(jit_fn, grid, args, kwargs)

        def get(jit_fn: Any, instance: Any, owner: Any = None) -> Any:
            return partial(self.resolve(jit_fn), instance) if isinstance(instance, base_value) else jit_fn

        run.__weft_interpreter__ = True  # type: ignore[attr-defined]
        set_(JITFunction, "run", run)
        set_(JITFunction, "__call__", lambda jit_fn, *args, **kwargs: self.resolve(jit_fn)(*args, **kwargs))
        set_(JITFunction, "__get__", get)
        set_(tl.target_info, "current_target", lambda: None)
        for kind in (tl.dtype, tl.pointer_type, tl.block_type):
            set_(kind, "to_ir", lambda ty, builder: ty)

        self._stock = {name: self._with_semantic(getattr(tl.core, name)) for name in ("load", "store", "dot")}
        replaced = {
            "load": self._load,
            "store": self._store,
            "arange": self._arange,
            "full": self._full,
            "where": self._where,
            "dot": self._dot,
            "cast": self._cast,
            "reduce": self.reductions.reduce,
            "associative_scan": self.reductions.scan,
            "map_elementwise": self.reductions.map_elementwise,
            "range": self._range,
            "static_range": _static_range,
            "static_assert": _static_assert,
            "static_print": _static_print,
            "multiple_of": _multiple_of,
            "max_contiguous": _hint,
            "max_constancy": _hint,
            "condition": lambda value, **_: value,
        }
        stand_ins = {getattr(tl.core, name): function for name, function in replaced.items()}
        for module in (tl.core, tl.math, tl):
            for name, member in list(vars(module).items()):
                if not (_is_builtin(member) or inspect.isclass(member)) or isinstance(member, JITFunction):
                    continue
                function = stand_ins.get(member)
                if function is None:
                    if inspect.isclass(member):
                        continue
                    function = self.words.get(id(member)) or self._with_semantic(member)
                self._know(member, function)
                set_(module, name, function)
        for member in _dependent_launch_words():
            self._know(member, lambda **_: None)
        self._know(range, self._range)
        self._know(tl.standard.zeros, lambda shape, dtype: self._full(shape, 0, dtype))
        self._know(min, partial(self._extreme, builtins.min, semantic.minimum))
        self._know(max, partial(self._extreme, builtins.max, semantic.maximum))
        self._patch_values()

    def _patch_values(self) -> None:
        set_, semantic = self._patches.set, self.semantic
        for kind in (tl.tensor, tensor_descriptor_base):
            for name, member in list(vars(kind).items()):
                if _is_builtin(member):
                    set_(kind, name, _method(getattr(member, "__wrapped__", member), semantic))
        s = semantic
        forward = {
            "add": s.add, "sub": s.sub, "mul": s.mul, "truediv": s.truediv, "floordiv": s.floordiv, "mod": s.mod,
            "and": s.and_, "or": s.or_, "xor": s.xor_, "lshift": s.shl,
            "lt": s.less_than, "le": s.less_equal, "gt": s.greater_than, "ge": s.greater_equal,
            "eq": s.equal, "ne": s.not_equal,
        }  # fmt: skip
        for name, operation in forward.items():
            set_(tl.tensor, f"__{name}__", _operator(operation))
            if name not in ("lt", "le", "gt", "ge", "eq", "ne"):
                set_(tl.tensor, f"__r{name}__", _reflected(operation))
        set_(tl.tensor, "to", lambda x, *args, _semantic=None, **kwargs: self._cast(x, *args, **kwargs))
        set_(tl.tensor, "__init__", _init_tensor)
        set_(tl.tensor, "shape", property(_shape))
        set_(tl.tensor, "numel", property(lambda x: constexpr(x.handle.data.size)))
        set_(tl.tensor, "__index__", lambda x: int(value_of(x)))
        set_(tl.tensor, "__bool__", _bool)
        set_(tl.tensor, "__repr__", _show)
        set_(tl.tensor, "__str__", _show)
        set_(tl.tensor, "__getitem__", _getitem)
        set_(tl.tensor, "T", property(lambda x: semantic.permute(x, (1, 0))))
        for name in _CONSTEXPR_OPERATORS:
            if name in vars(constexpr):
                set_(constexpr, name, _yielding(vars(constexpr)[name]))

    # calls

    def replace(self, jit_fn: Any, function: Callable) -> None:
        """Let ``function`` stand for a jit function (or any callable) in kernels; it gets the arguments as they are."""
        self.words[id(jit_fn)] = function
        self._know(jit_fn, function)
        self._kept.append(jit_fn)

    def _know(self, callee: Any, function: Callable) -> None:
        self._table[id(callee)] = (callee, function)

    def resolve(self, callee: Any) -> Callable:
        """What kernel code calls where it says ``callee``."""
        entry = self._table.get(id(callee))
        if entry is not None and entry[0] is callee:
            return entry[1]
        if isinstance(callee, types.MethodType):
            return callee
        if id(callee) in self.words:
            function = self.words[id(callee)]
        elif isinstance(callee, constexpr):
            return self.resolve(callee.value)
        elif isinstance(callee, JITFunction):
            function = self._rewritten(callee)
        elif _is_builtin(callee):
            function = self._with_semantic(callee)
        else:
            return callee
        self._know(callee, function)
        return function

    def _with_semantic(self, member: Any) -> Callable:
        signature = getattr(member, "signature", None) or inspect.signature(member)
        if "_semantic" not in signature.parameters and not inspect.isclass(member):
            return member
        inner = member.__wrapped__ if hasattr(member, "__wrapped__") and hasattr(member, "signature") else member
        return partial(inner, _semantic=self.semantic)

    def _rewritten(self, jit_fn: Any) -> Callable:
        if jit_fn.is_gluon():
            raise _not_interpretable(f"the Gluon function {jit_fn.__name__}")
        original = jit_fn.fn
        raw = "".join(jit_fn.raw_src)
        definition = re.search(r"^([ \t]*)def\s+\w+\s*\(", raw, re.MULTILINE)
        assert definition is not None, jit_fn
        first_line = jit_fn.starting_line_number + raw[: definition.start()].count("\n")
        code = rewriting.compile_kernel(
            jit_fn.src, original.__code__.co_filename, first_line, len(definition[1]), original.__name__,
            original.__code__.co_freevars,
        )  # fmt: skip
        for part in rewriting.codes_of(code):
            self._codes[id(part)] = part
        return rewriting.bind(code, original, self._helpers)

    # what the rewritten statements call

    def _assign(self, value: Any) -> Any:
        kind = type(value)
        if kind is tl.tensor:
            return value
        if kind is constexpr:
            value, kind = value.value, type(value.value)
        if kind in (int, float, bool):
            return self.semantic.to_tensor(value)
        if isinstance(value, tuple):
            parts = [self._assign(v) for v in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    def _truth(self, condition: Any) -> bool:
        if isinstance(condition, tl.tensor):
            data = condition.handle.data
            if data.size != 1:
                raise ValueError("Boolean value of Tensor with more than one value is ambiguous")
            return bool(data.item())
        return bool(condition)

    def _not(self, x: Any) -> Any:
        return self.semantic.not_(x) if isinstance(x, tl.tensor) else not x

    def _both(self, operation: Callable, decisive: bool, x: Any, y: Any) -> Any:
        if not isinstance(x, tl.tensor):
            return y
        if not isinstance(y, tl.tensor):
            return y if bool(y) is decisive else x
        return operation(x, y)

    def _range(self, start: Any, stop: Any = None, step: Any = None, **_: Any) -> Iterator[tl.tensor]:
        """``range`` and ``tl.range``: the loop variable is a tensor of the type that the bounds promote to."""
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
            yield tl.tensor(Handle(np.array([value], dtype), ty), ty)

    def _load(
        self,
        pointer: tl.tensor,
        mask: Any = None,
        other: Any = None,
        boundary_check: Any = (),
        padding_option: Any = "",
        cache_modifier: Any = "",
        eviction_policy: Any = "",
        volatile: Any = False,
        _semantic: Any = None,
    ) -> tl.tensor:
        if _is_block_pointer(pointer):
            return self._stock["load"](pointer, mask, other, boundary_check, padding_option)
        cache_modifier, mask, other = _plain(cache_modifier), _plain(mask), _plain(other)
        if cache_modifier not in _LOAD_MODIFIERS:
            raise ValueError(f"Cache modifier {cache_modifier} not supported")
        if _plain(eviction_policy) not in _EVICTIONS:
            raise ValueError(f"Eviction policy {_plain(eviction_policy)} not supported")
        if mask is not None and not isinstance(mask, tl.tensor):
            mask = self.semantic.to_tensor(mask)
        access = "volatile" if cache_modifier == ".cv" or _plain(volatile) else "plain"
        return self.semantic.fetch(pointer, mask, other, access)

    def _store(
        self,
        pointer: tl.tensor,
        value: Any,
        mask: Any = None,
        boundary_check: Any = (),
        cache_modifier: Any = "",
        eviction_policy: Any = "",
        _semantic: Any = None,
    ) -> None:
        if _is_block_pointer(pointer):
            self._stock["store"](pointer, value, mask, boundary_check)
            return
        mask = _plain(mask)
        if mask is not None and not isinstance(mask, tl.tensor):
            mask = self.semantic.to_tensor(mask)
        self.semantic.put(pointer, _plain(value), mask)

    def _arange(self, start: Any, end: Any, _semantic: Any = None) -> tl.tensor:
        key = _plain(start), _plain(end)
        found = self._ranges.get(key) if type(key[0]) is type(key[1]) is int else None
        if found is None:
            found = self._ranges[key] = self.semantic.arange(*key)
        return found

    def _full(self, shape: Any, value: Any, dtype: Any, _semantic: Any = None) -> tl.tensor:
        shape = _plain(shape)
        return self.semantic.full((shape,) if isinstance(shape, int) else shape, _plain(value), _plain(dtype))

    def _where(self, condition: Any, x: Any, y: Any, _semantic: Any = None) -> tl.tensor:
        return self.semantic.where(self.semantic.to_tensor(condition), _plain(x), _plain(y))

    def _cast(
        self, x: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False, _semantic: Any = None
    ) -> tl.tensor:
        x = x if isinstance(x, tl.tensor) else self.semantic.to_tensor(x)
        if _plain(bitcast):
            return self.semantic.bitcast(x, _plain(dtype))
        return self.semantic.cast(x, _plain(dtype), _plain(fp_downcast_rounding))

    def _dot(self, input: tl.tensor, other: tl.tensor, acc: Any = None, *args: Any, **kwargs: Any) -> tl.tensor:
        result = None
        if not args and _plain(kwargs.get("out_dtype")) in (None, tl.float32):
            result = self.semantic.dot_fp32(input, other, _plain(acc))
        return self._stock["dot"](input, other, acc, *args, **kwargs) if result is None else result

    def _extreme(self, plain: Callable, operation: Callable, *args: Any) -> Any:
        if not any(isinstance(x, tl.tensor) for x in args):
            return plain(*map(value_of, args))
        result = args[0]
        for x in args[1:]:
            result = operation(value_of(result) if isinstance(result, constexpr) else result, x, tl.PropagateNan.NONE)
        return result

    # launches

    def prepare(self, jit_fn: Any, grid: Any, args: tuple, kwargs: dict) -> Launch:
        """Bind a launch's arguments as Triton does. TypeError for missing, surplus or unknown arguments."""
        names = {p.name for p in jit_fn.params}
        own = {name: value for name, value in kwargs.items() if name in names}
        unknown = [n for n in kwargs if n not in names and n not in _OPTIONS and not n.startswith("launch_")]
        if unknown:
            raise TypeError(f"{jit_fn.__name__}: keyword argument {unknown[0]} was specified but unrecognised")
        try:
            bound = jit_fn.signature.bind(*args, **own)
        except TypeError as error:
            raise TypeError(f"{jit_fn.__name__}: {error}") from None
        bound.apply_defaults()
        for hook in jit_fn.pre_run_hooks:
            hook(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        arguments = [
            self._argument(bound.arguments[p.name], tensors, p.is_constexpr, p.is_const, p.annotation_type)
            for p in jit_fn.params
        ]
        size = grid(bound.arguments) if callable(grid) else grid
        sizes = [int(value_of(n)) for n in (size if isinstance(size, (tuple, list)) else (size,))]
        if not 1 <= len(sizes) <= 3:
            raise ValueError(f"{jit_fn.__name__}: a grid has 1 to 3 dimensions, got {size}")
        function = self.resolve(jit_fn)
        keywords = {p.name for p in jit_fn.signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
        positional = [a for p, a in zip(jit_fn.params, arguments, strict=True) if p.name not in keywords]
        named = {p.name: a for p, a in zip(jit_fn.params, arguments, strict=True) if p.name in keywords}

        def run() -> None:
            with np.errstate(all="ignore"):
                function(*positional, **named)

        return Launch(name=jit_fn.__name__, grid=(*sizes, 1, 1)[:3], run=run, tensors=tensors)

    def _argument(self, value: Any, tensors: list, fixed: bool, const: bool = False, annotation: str = "") -> Any:
        if isinstance(value, constexpr):
            return value.value
        if fixed or value is None:
            return value
        if annotation and isinstance(value, (int, float)):
            return scalar(value, tl.str_to_ty(annotation, None))
        if isinstance(value, bool):
            return scalar(value, tl.int1)
        if isinstance(value, int):
            ty = tl.int32 if -(2**31) <= value < 2**31 else tl.int64 if value < 2**63 else tl.uint64
            return self.semantic.scalar_constant(value, ty)
        if isinstance(value, float):
            return self.semantic.scalar_constant(value, tl.float32)
        if isinstance(value, tuple):
            parts = [self._argument(v, tensors, False) for v in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, TensorDescriptor):
            return self._host_descriptor(value, tensors)
        if hasattr(value, "data_ptr"):
            tensors.append(value.base if isinstance(value, TensorWrapper) else value)
            ty = _pointer_type(triton._utils.canonicalize_dtype(value.dtype), const)
            return _make(np.array([value.data_ptr()], np.uint64), ty, False)
        return value

    def _host_descriptor(self, host: TensorDescriptor, tensors: list) -> tl.tensor_descriptor:
        semantic = self.semantic
        strides = [*(self._argument(int(s), tensors, False) for s in host.strides[:-1]), constexpr(host.strides[-1])]
        descriptor = semantic.make_tensor_descriptor(
            self._argument(host.base, tensors, False),
            [self._argument(int(s), tensors, False) for s in host.shape],
            strides,
            [constexpr(b) for b in host.block_shape],
            padding_option=host.padding,
        )
        descriptor.handle.round_to_tf32 = getattr(host, "round_f32_to_tf32", False)
        return descriptor

    # where we are

    def source_location(self) -> tuple[str, int, str, str] | None:
        """(file, line number, function, text of the line) of the innermost kernel code now executing; Triton's own
        library counts only where nothing else does. None outside kernels."""
        frame: types.FrameType | None = sys._getframe(1)
        library = None
        while frame is not None:
            if id(frame.f_code) in self._codes:
                if not str(frame.f_globals.get("__name__")).startswith("triton."):
                    return _location(frame)
                library = library or frame
            frame = frame.f_back
        return _location(library) if library is not None else None

    def _kernel_name(self) -> str:
        where = self.source_location()
        return f"{where[2]} ({where[0]}:{where[1]})" if where else "a kernel"


def _location(frame: types.FrameType) -> tuple[str, int, str, str]:
    code = frame.f_code
    return code.co_filename, frame.f_lineno, code.co_name, linecache.getline(code.co_filename, frame.f_lineno).strip()


_CONSTEXPR_OPERATORS = [
    f"__{prefix}{name}__"
    for name in (
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
        "lt",
        "le",
        "gt",
        "ge",
        "eq",
        "ne",
    )
    for prefix in ("", "r")
]


def _is_block_pointer(x: Any) -> bool:
    """``tl.make_block_ptr`` gives a tensor of its own kind in Triton 3.6 and 3.7, another object in 3.8."""
    return not isinstance(x, tl.tensor) or isinstance(getattr(x.dtype, "element_ty", None), tl.block_type)


def _is_builtin(member: Any) -> bool:
    try:
        return bool(getattr(member, TRITON_BUILTIN, False))
    except Exception:  # lazily loaded attributes of foreign objects
        return False


def _method(member: Callable, semantic: Semantic) -> Callable:
    def call(self: Any, *args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return member(self, *args, _semantic=semantic, **kwargs)

    return call


def _operator(operation: Callable) -> Callable:
    def call(self: tl.tensor, other: Any, _semantic: Any = None) -> tl.tensor:
        return operation(self, other.value if isinstance(other, constexpr) else other)

    return call


def _reflected(operation: Callable) -> Callable:
    def call(self: tl.tensor, other: Any, _semantic: Any = None) -> tl.tensor:
        return operation(other.value if isinstance(other, constexpr) else other, self)

    return call


def _yielding(original: Callable) -> Callable:
    """constexpr's own operators would wrap a tensor; here they leave the operation to it."""

    def call(self: constexpr, other: Any) -> Any:
        return NotImplemented if isinstance(other, tl.tensor) else original(self, other)

    return call


def _init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar


def _shape(x: tl.tensor) -> tl.tuple:
    return _shape_tuple(tuple(x.type.shape) if x.type is not x.dtype else ())


def _bool(x: tl.tensor) -> bool:
    """Of a scalar its value; a block is true as any object is, which Triton's own code leans on."""
    return bool(x.handle.data.item()) if x.handle.data.size == 1 else True


def _getitem(x: tl.tensor, index: Any, _semantic: Any = None) -> tl.tensor:
    keys = list(index) if isinstance(index, (tuple, list, tl.tuple)) else [index]
    for i, key in enumerate(keys):
        if key is not None and not (type(key) is slice and key == _EVERYTHING):
            keys[i] = _plain(key)
            if keys[i] is not None:
                raise ValueError(f"unsupported tensor index: {key}")
    data = x.handle.data
    if x.type is x.dtype:
        data = data.reshape(())
    if len(keys) - keys.count(None) > data.ndim:
        raise ValueError(f"too many indices for tensor of rank {data.ndim}")
    return _make(data[tuple(keys)], x.dtype, True)


def _show(x: tl.tensor) -> str:
    return f"{value_of(x)} ({x.type})" if x.handle is not None else "void"


def _all(x: Any) -> bool:
    return bool(x.handle.data.all()) if isinstance(x, tl.tensor) else bool(x)


def _static_range(start: Any, end: Any = None, step: Any = None, **_: Any) -> range:
    start, end, step = (None if x is None else int(value_of(x)) for x in (start, end, step))
    return range(0, start, step or 1) if end is None else range(start, end, step or 1)


def _static_assert(condition: Any, message: Any = "", **_: Any) -> None:
    if not value_of(condition):
        raise AssertionError(value_of(message))


def _static_print(*values: Any, _semantic: Any = None, **kwargs: Any) -> None:
    print(*map(value_of, values), **kwargs)


def _multiple_of(x: Any, values: Any, _semantic: Any = None) -> Any:
    """A wrong hint makes a GPU's vector accesses fault or misread, so it is an error here. Only scalars are checked."""
    values = [_plain(v) for v in (values if isinstance(values, (list, tuple, tl.tuple)) else [_plain(values)])]
    if isinstance(x, tl.tensor) and x.type is x.dtype and x.handle.data.item() % values[0]:
        raise AssertionError(f"tl.multiple_of(x, {values[0]}) of x = {x.handle.data.item()}")
    return x


def _dependent_launch_words() -> list[Any]:
    """Programmatic dependent launch: here a kernel begins when the one before it has ended."""
    cuda = getattr(tl.extra, "cuda", None)
    words = (getattr(cuda, name, None) for name in ("gdc_wait", "gdc_launch_dependents"))
    return [word for word in words if word is not None]


def _hint(x: Any, *_: Any, **__: Any) -> Any:
    return x
