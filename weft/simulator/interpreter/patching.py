"""Patches of Triton while an interpreter is active, and their removal."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import triton.language as tl

from weft.simulator.interpreter.callees import Callees, is_builtin
from weft.simulator.interpreter.compiled import Compiled, options_among, run_first_configuration
from weft.simulator.interpreter.port import GridSizes
from weft.simulator.interpreter.semantic import Semantic
from weft.simulator.interpreter.stand_ins import StandIns
from weft.simulator.interpreter.values import Handle, Operand, make, plain, value_of
from weft.triton_api import (
    Autotuner,
    InterpretedFunction,
    JITFunction,
    base_value,
    core,
    target_info,
    tensor_descriptor_base,
)

_ABSENT = object()
_EVERYTHING = slice(None)
# Python's operators to the semantic layer's methods.
_ARITHMETIC = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "truediv", "floordiv": "floordiv", "mod": "mod",
    "and": "and_", "or": "or_", "xor": "xor_", "lshift": "shl",
}  # fmt: skip
_COMPARISONS = {
    "lt": "less_than", "le": "less_equal", "gt": "greater_than", "ge": "greater_equal", "eq": "equal", "ne": "not_equal",
}  # fmt: skip


class Patches:
    """Attributes replaced until ``restore``."""

    def __init__(self) -> None:
        self._undo: list[tuple[object, str, object]] = []

    def set(self, owner: object, name: str, value: object) -> None:
        self._undo.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def restore(self) -> None:
        while self._undo:
            owner, name, value = self._undo.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def is_active() -> bool:
    return hasattr(JITFunction.run, "__weft_resolve__")


def patch_jit_functions(
    patches: Patches, launch: Callable, resolve: Callable[[object], Callable], in_kernel: Callable[[], bool]
) -> None:
    """Redirect launches to ``launch``.

    A jit function that a kernel calls by Python code runs as in kernel code.
    """

    def run(jit_fn: JITFunction, *args: object, grid: GridSizes, warmup: bool, **kwargs: object) -> Compiled:
        if not warmup:
            launch(jit_fn, grid, args, kwargs)
        return Compiled(jit_fn, options_among(jit_fn, kwargs))

    def get(jit_fn: JITFunction, instance: object, owner: object = None) -> Callable:
        return partial(resolve(jit_fn), instance) if isinstance(instance, base_value) else jit_fn

    def refuse(function: InterpretedFunction, *_: object, **__: object) -> None:
        raise RuntimeError(
            f"{function.__name__} was defined while TRITON_INTERPRET was set, so Triton's own interpreter runs it; unset it "
            f"before the kernel is defined"
        )

    def call(jit_fn: JITFunction, *args: object, **kwargs: object) -> object:
        if not in_kernel():
            name = jit_fn.__name__
            raise TypeError(
                f"{name}: called on the host without a grid; launch it as {name}[(1,)](...), or call it in kernels"
            )
        return resolve(jit_fn)(*args, **kwargs)

    run.__weft_resolve__ = resolve  # type: ignore[attr-defined]
    patches.set(JITFunction, "run", run)
    patches.set(JITFunction, "__call__", call)
    patches.set(JITFunction, "__get__", get)
    patches.set(Autotuner, "run", run_first_configuration)
    patches.set(InterpretedFunction, "run", refuse)
    patches.set(InterpretedFunction, "__call__", refuse)


def patch_language(patches: Patches, callees: Callees, stand_ins: StandIns) -> None:
    """Patch the functions of ``tl``, in their modules and in the table of callees."""
    patches.set(target_info, "current_target", lambda: None)
    for name, function in stand_ins.in_core().items():
        callees.know(getattr(core, name), function)
    for member, function in stand_ins.elsewhere():
        callees.know(member, function)
    for module, name, member in _functions_of_tl():
        callees.know(_redirected(member), callees.resolve(member))
        patches.set(module, name, _redirected(member))


@cache
def _redirected(builtin: Callable) -> Callable:
    """Function in place of a builtin.

    A module that is imported meanwhile may keep it, so it is the builtin again after the scope.
    """

    @wraps(builtin)
    def call(*args: object, **kwargs: object) -> object:
        resolve = getattr(JITFunction.run, "__weft_resolve__", None)
        return (builtin if resolve is None else resolve(builtin))(*args, **kwargs)

    return call


@cache
def _functions_of_tl() -> list[tuple[object, str, Any]]:
    """(module, name, member) of all builtin functions of ``tl``, unpatched.

    Classes stay: kernel code finds their stand-ins in the table, and Triton's front end knows them by identity.
    """
    return [
        (module, name, member)
        for module in (core, tl.math, tl)
        for name, member in vars(module).items()
        if is_builtin(member) and not inspect.isclass(member)
    ]


def patch_values(patches: Patches, semantic: Semantic, cast: Callable) -> None:
    """Patch the methods and operators of tensors, descriptors and constexprs."""
    for kind in (tl.dtype, tl.pointer_type, tl.block_type):
        patches.set(kind, "to_ir", lambda ty, builder: ty)
    for kind in (tl.tensor, tensor_descriptor_base):
        for name, member in list(vars(kind).items()):
            if is_builtin(member):
                patches.set(kind, name, _method(getattr(member, "__wrapped__", member), semantic))
    for name, method in {**_ARITHMETIC, **_COMPARISONS}.items():
        patches.set(tl.tensor, f"__{name}__", _operator(getattr(semantic, method)))
    for name, method in _ARITHMETIC.items():
        patches.set(tl.tensor, f"__r{name}__", _reflected(getattr(semantic, method)))
    members = {
        "to": lambda x, *args, _semantic=None, **kwargs: cast(x, *args, **kwargs),
        "shape": property(_shape),
        "numel": property(lambda x: tl.constexpr(x.handle.data.size)),
        "T": property(semantic.transpose),
        "__init__": _init_tensor,
        "__index__": lambda x: int(value_of(x)),
        "__bool__": _bool,
        "__repr__": _show,
        "__str__": _show,
        "__getitem__": _getitem,
    }
    for name, member in members.items():
        patches.set(tl.tensor, name, member)
    patches.set(tl.constexpr, "__format__", lambda x, how: format(x.value, how))  # in a text of inline assembly
    for name in (*_ARITHMETIC, *_COMPARISONS, "pow", "rshift"):
        for operator in (f"__{name}__", f"__r{name}__"):
            if operator in vars(tl.constexpr):
                patches.set(tl.constexpr, operator, _yielding(vars(tl.constexpr)[operator]))


def _method(member: Callable, semantic: Semantic) -> Callable:
    def call(self: object, *args: object, _semantic: object = None, **kwargs: object) -> object:
        return member(self, *args, _semantic=semantic, **kwargs)

    return call


def _operator(operation: Callable) -> Callable:
    constexpr = tl.constexpr

    def call(self: tl.tensor, other: Operand, _semantic: object = None) -> tl.tensor:
        return operation(self, other.value if isinstance(other, constexpr) else other)

    return call


def _reflected(operation: Callable) -> Callable:
    constexpr = tl.constexpr

    def call(self: tl.tensor, other: Operand, _semantic: object = None) -> tl.tensor:
        return operation(other.value if isinstance(other, constexpr) else other, self)

    return call


def _yielding(original: Callable) -> Callable:
    """Operator of constexpr that leaves the operation to a tensor, which the original would wrap."""

    def call(self: tl.constexpr, other: object) -> object:
        return NotImplemented if isinstance(other, tl.tensor) else original(self, other)

    return call


def _init_tensor(self: tl.tensor, handle: Handle, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar


@cache
def _shape_tuple(shape: tuple[int, ...]) -> tl.tuple:
    return tl.tuple([tl.constexpr(size) for size in shape])


def _shape(x: tl.tensor) -> tl.tuple:
    return _shape_tuple(tuple(x.type.shape) if x.type is not x.dtype else ())


def _bool(x: tl.tensor) -> bool:
    """Truth of a scalar's value. A block is true like any object, which Triton's own code relies on."""
    return bool(x.handle.data.item()) if x.handle.data.size == 1 else True


def _getitem(x: tl.tensor, index: object, _semantic: object = None) -> tl.tensor:
    keys = list(index) if isinstance(index, (tuple, list, tl.tuple)) else [index]
    for i, key in enumerate(keys):
        if key is not None and not (type(key) is slice and key == _EVERYTHING):
            keys[i] = plain(key)
            if keys[i] is not None:
                raise ValueError(f"unsupported tensor index: {key}")
    data = x.handle.data
    if x.type is x.dtype:
        data = data.reshape(())
    if len(keys) - keys.count(None) > data.ndim:
        raise ValueError(f"too many indices for tensor of rank {data.ndim}")
    return make(data[tuple(keys)], x.dtype, True)


def _show(x: tl.tensor) -> str:
    return f"{value_of(x)} ({x.type})" if x.handle is not None else "void"
