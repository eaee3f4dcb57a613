"""Lower layer: the operations that Triton's semantic layer asks of a builder, as NumPy calls."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import triton.language as tl

from weft.errors import NotInterpretable
from weft.simulator import numerics
from weft.simulator.interpreter import libdevice
from weft.simulator.interpreter.descriptors import Descriptor
from weft.simulator.interpreter.port import Port
from weft.simulator.interpreter.values import SCALAR_SHAPE, Handle, not_interpretable, numpy_dtype, plain
from weft.simulator.places import Order, Places, Scattered, everywhere
from weft.triton_api import InterpreterBuilder, InterpreterOptions, ir

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
# LLVM's functions that read special registers; a value that differs between threads has one element for each.
_SPECIAL_REGISTER = re.compile(r"llvm\.nvvm\.read\.ptx\.sreg\.((?:tid|ntid|ctaid|nctaid)\.[xyz]|laneid|warpid|smid)")


def _array(x: np.ndarray | Handle) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.data


def _order(sem: ir.MEM_SEMANTIC, scope: ir.MEM_SYNC_SCOPE) -> Order:
    return Order(_SEMANTICS[sem], _SCOPES[scope])


def _unary(op: Callable) -> Callable:
    return lambda self, x, *how: Handle(op(x.data, *how), x.dtype)


def _binary(op: Callable) -> Callable:
    return lambda self, x, y, *how: Handle(op(x.data, y.data, *how), x.dtype)


class Builder(InterpreterBuilder):
    """Triton's interpreter builder without its state, its raw-bit bf16 and its memory."""

    def __init__(self, port: Port, names: Callable[[], str]) -> None:
        super().__init__()
        self.port, self.names = port, names
        # Asserts of a kernel are checked; overflow of integers is not an error on the GPU.
        self.options = InterpreterOptions(debug=True, sanitize_overflow=False, arch="simulator")
        self.codegen_fns["min_dot_size"] = lambda a, b: (1, 1, 32 if a.scalar.primitive_bitwidth == 8 else 16)

    def get_null_value(self, ty: tl.dtype) -> Handle:
        return Handle(np.zeros(SCALAR_SHAPE, numpy_dtype(ty.scalar)), ty.scalar)

    def get_all_ones_value(self, ty: tl.dtype) -> Handle:
        return Handle(~np.zeros(SCALAR_SHAPE, numpy_dtype(ty.scalar)), ty.scalar)

    # programs

    def create_get_program_id(self, axis: int) -> Handle:
        return Handle(np.array([self.port.program()[0][axis]], np.int32), tl.int32)

    def create_get_num_programs(self, axis: int) -> Handle:
        return Handle(np.array([self.port.program()[1][axis]], np.int32), tl.int32)

    def create_barrier(self) -> None:
        active = self.port.active_threads()
        if active is not None and not active.all():
            raise NotInterpretable(
                f"tl.debug_barrier() in {self.names()} is reached by {int(active.sum())} of the program's "
                f"{active.size} threads; move it out of the branch"
            )
        self.port.barrier()

    def create_print(self, prefix: str, hexadecimal: bool, values: list[Handle], is_signed: object) -> None:
        where = self.port.program()[0]
        for value in values:
            shown = [hex(v) for v in value.data.ravel().tolist()] if hexadecimal else value.data
            print(f"{where}{prefix}{shown}")
        if not values:
            print(f"{where}{prefix}")

    def create_assert(self, condition: Handle, message: str) -> None:
        if not condition.data.all():
            raise AssertionError(message)

    def create_assume(self, condition: Handle) -> None:
        self.create_assert(condition, "tl.assume() of a condition that does not hold")

    def create_extern_elementwise(
        self, library: str, path: str, symbol: str, args: list, ret_type: tl.dtype, is_pure: bool
    ) -> Handle:
        function, element = libdevice.function_of(symbol), ret_type.scalar
        if register := _SPECIAL_REGISTER.fullmatch(symbol):
            out = np.array(self.port.position().read(f"%{register[1]}")).reshape(-1)
        elif function is not None:
            out = function(*(x.data for x in args))
        elif (external := self.port.external(symbol)) is not None:
            out = np.full(SCALAR_SHAPE, external(*(int(x.data.item()) for x in args)))
        else:
            raise not_interpretable(
                f"the external function {symbol} of {library or path or 'libdevice'} in {self.names()}"
            )
        return Handle(numerics.convert(np.asarray(out), numpy_dtype(element)), element)

    # memory

    def load(self, places: Places, element: tl.dtype, access: str) -> np.ndarray:
        bits, dtype = self.port.load(places, access), numpy_dtype(element)
        return bits.astype(dtype) if dtype.kind == "b" else bits.view(dtype)

    def store(self, places: Places, values: np.ndarray, access: str) -> None:
        self.port.store(places, values.view(numerics.BITS[values.dtype.itemsize]), access)

    def create_masked_load(self, ptr: Handle, mask: np.ndarray | Handle, other: Handle | None, *_: object) -> Handle:
        """Load through a block pointer, which Triton's own code makes."""
        element, mask = ptr.get_element_ty(), _array(mask)
        values = self.load(Scattered(ptr.data, mask, numpy_dtype(element).itemsize), element, "plain")
        if other is not None:
            values = np.where(mask, values, other.data.view(values.dtype))
        return Handle(values, element)

    def create_masked_store(self, ptr: Handle, value: Handle, mask: np.ndarray | Handle, *_: object) -> None:
        self.store(Scattered(ptr.data, _array(mask), value.data.dtype.itemsize), value.data, "plain")

    def create_atomic_rmw(
        self, op: ir.ATOMIC_OP, ptr: Handle, value: Handle, mask: Handle, sem: ir.MEM_SEMANTIC, scope: ir.MEM_SYNC_SCOPE
    ) -> Handle:
        return self.atomic(_ATOMICS[op], ptr, value.data, mask, _order(sem, scope))

    def atomic(self, op: str, ptr: Handle, values: np.ndarray, mask: Handle, order: Order) -> Handle:
        shape, element = ptr.data.shape, ptr.dtype.scalar.element_ty
        values, active = np.broadcast_to(values, shape), np.broadcast_to(mask.data, shape)
        return Handle(self.port.atomic(op, ptr.data, values, active, order).view(values.dtype), element)

    def create_atomic_cas(
        self, ptr: Handle, compare: Handle, value: Handle, sem: ir.MEM_SEMANTIC, scope: ir.MEM_SYNC_SCOPE
    ) -> Handle:
        element = ptr.dtype.scalar.element_ty
        dtype = numpy_dtype(element)
        bits = numerics.BITS[dtype.itemsize]
        wanted, new = (
            np.broadcast_to(numerics.convert(x.data, dtype).view(bits), ptr.data.shape) for x in (compare, value)
        )
        return Handle(self.port.cas(ptr.data, wanted, new, _order(sem, scope)).view(dtype), element)

    def create_atomic_load(self, ptr: Handle, mask: Handle, sem: ir.MEM_SEMANTIC, scope: ir.MEM_SYNC_SCOPE) -> Handle:
        dtype = numpy_dtype(ptr.dtype.scalar.element_ty)
        nothing = np.zeros(ptr.data.shape, numerics.BITS[dtype.itemsize])
        old = self.atomic("or", ptr, nothing, mask, _order(sem, scope))
        return Handle(old.data.view(dtype), old.dtype)

    def create_atomic_store(
        self, ptr: Handle, value: Handle, mask: Handle, sem: ir.MEM_SEMANTIC, scope: ir.MEM_SYNC_SCOPE
    ) -> None:
        self.atomic("xchg", ptr, value.data, mask, _order(sem, scope))

    def create_atomic_poll(
        self, ptr: Handle, expected: Handle, timeout_ns: object, sem: ir.MEM_SEMANTIC, scope: ir.MEM_SYNC_SCOPE
    ) -> Handle:
        """Poll until the value is there. The simulator has no clock, so the timeout is never reached."""
        enable = Handle(everywhere(ptr.data.shape), tl.int1)
        while True:
            seen = self.create_atomic_load(ptr, enable, sem, scope)
            if (seen.data == expected.data).all():
                return enable

    def create_make_tensor_descriptor(
        self,
        base: Handle,
        shape: list,
        strides: list,
        block_shape: list[int],
        is_signed: bool,
        padding: ir.PADDING_OPTION | None = None,
    ) -> Descriptor:
        sizes, steps = ([x.data.item() for x in xs] for xs in (shape, strides))
        nan = padding == ir.PADDING_OPTION.PAD_NAN
        return Descriptor(base.data.item(), base.dtype.scalar.element_ty, sizes, steps, tuple(block_shape), nan)

    def descriptor_load(self, descriptor: Descriptor, offsets: list[int | np.ndarray]) -> np.ndarray:
        places = descriptor.locate(offsets)
        values = self.load(places, descriptor.element, "tma")
        if descriptor.nan:
            values = np.where(places.mask, values, values.dtype.type(float("nan")))
        return numerics.round_to_tf32(values) if descriptor.round_to_tf32 else values

    def descriptor_store(self, descriptor: Descriptor, values: np.ndarray, offsets: list[int | np.ndarray]) -> None:
        places = descriptor.locate(offsets)
        self.store(places, values if values.shape == places.shape else np.broadcast_to(values, places.shape), "tma")

    def create_descriptor_reduce(
        self, kind: ir.DESCRIPTOR_REDUCE_KIND, descriptor: Descriptor, value: Handle, offsets: list[Handle]
    ) -> None:
        places = descriptor.locate([x.data.item() for x in offsets])
        op, dtype = _REDUCTIONS[kind], value.data.dtype
        if op == "add" and dtype in numerics.FLOATS:
            op = "fadd"
        elif op in ("min", "max") and dtype.kind == "u":
            op = "u" + op
        values = np.broadcast_to(value.data, places.shape)
        self.port.atomic(op, places.addresses, values, places.mask, Order("relaxed", "gpu", "tma"))

    def create_descriptor_gather(self, descriptor: Descriptor, rows: Handle, column: Handle, _: object) -> Handle:
        offsets = [rows.data.astype(np.int64).reshape(-1, 1), column.data.item()]
        return Handle(self.descriptor_load(descriptor, offsets), descriptor.element)

    def create_descriptor_scatter(self, descriptor: Descriptor, value: Handle, rows: Handle, column: Handle) -> None:
        offsets = [rows.data.astype(np.int64).reshape(-1, 1), column.data.item()]
        self.descriptor_store(descriptor, value.data, offsets)

    # casts, shapes, arithmetic

    def create_int_cast(self, x: Handle, to: tl.dtype, is_signed: bool) -> Handle:
        return Handle(numerics.convert(x.data, numpy_dtype(to.scalar)), to.scalar)

    def create_bitcast(self, x: Handle, to: tl.dtype) -> Handle:
        return Handle(x.data.view(numpy_dtype(to.scalar)), to.scalar)

    def create_splat(self, ty: tl.dtype, x: Handle) -> Handle:
        return self.create_broadcast(x, ty.shape)

    def create_split(self, x: Handle) -> tuple[Handle, Handle]:
        return Handle(x.data[..., 0], x.dtype), Handle(x.data[..., 1], x.dtype)

    create_broadcast = _unary(lambda x, shape: np.broadcast_to(x, tuple(shape)))
    create_unsplat = _unary(lambda x: x.reshape(SCALAR_SHAPE))
    create_expand_dims = _unary(np.expand_dims)
    create_reshape = _unary(lambda x, shape, allow_reorder: x.reshape(tuple(map(plain, shape))))
    create_trans = _unary(lambda x, order: np.transpose(x, list(map(plain, order))))
    create_join = _binary(lambda x, y: np.stack(np.broadcast_arrays(x, y), axis=-1))
    create_cat = _binary(lambda x, y: np.concatenate([x, y]))
    create_gather = _binary(lambda x, index, axis: np.take_along_axis(x, index.astype(np.int64), axis=axis))

    def create_histogram(self, x: Handle, bins: int, mask: Handle | None) -> Handle:
        return Handle(numerics.histogram(x.data, bins, None if mask is None else mask.data), tl.int32)

    def create_make_range(self, ty: tl.dtype, start: int, stop: int) -> Handle:
        return Handle(np.arange(start, stop, dtype=np.int32), tl.int32)

    def create_dot(self, a: Handle, b: Handle, accumulator: Handle, precision: object, imprecise: object) -> Handle:
        result = numerics.dot(a.data, b.data, accumulator.data, self.port.has_exact_dots())
        return Handle(result, accumulator.dtype.scalar)

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        return Handle(numerics.fma(x.data, y.data, z.data), z.dtype)

    def create_clampf(self, x: Handle, low: Handle, high: Handle, propagate: tl.PropagateNan) -> Handle:
        nan = propagate is tl.PropagateNan.ALL
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
