"""Launches: conversion of host arguments to a kernel's values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.simulator.interpreter.port import GridSizes
from weft.simulator.interpreter.semantic import Semantic
from weft.simulator.interpreter.values import make, scalar, value_of
from weft.triton_api import JITFunction, TensorWrapper, canonicalize_dtype

# Launch options of the NVIDIA and AMD backends.
_OPTIONS = frozenset({
    "allow_flush_denorm", "arch", "clc", "cluster_dims", "debug", "default_dot_input_precision", "enable_fp_fusion",
    "enable_reflect_ftz", "extern_libs", "instrumentation_mode", "ir_override", "kpack", "llvm_fn_attrs",
    "matrix_instr_nonkdim", "maxRegAutoWS", "maxnreg", "minRegAutoWS", "num_ctas", "num_stages", "num_warps",
    "ptx_options", "ptx_version", "sanitize_overflow", "sched4reg", "schedule_hint", "supported_fp8_dtypes",
    "warp_size", "waves_per_eu"
})  # fmt: skip
# Largest size of a grid along each dimension on NVIDIA GPUs.
_MOST = (2**31 - 1, 65535, 65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Kernel with its arguments bound. ``run()`` executes it once, for the program that the port names.

    threads          CUDA threads of each program
    tensors, tuples  among its arguments, passed by position, by name, by default or inside a tuple
    """

    name: str
    grid: tuple[int, int, int]
    run: Callable[[], None]
    threads: int
    tensors: list[torch.Tensor]
    tuples: list[tuple]


def prepare(
    semantic: Semantic, jit_fn: JITFunction, function: Callable, grid: GridSizes, args: tuple, kwargs: dict
) -> Launch:
    """Bind a launch's arguments to ``function``, which replaces the kernel, as Triton does.

    TypeError for missing, extra or unknown arguments and for unsupported types; TypeError or ValueError for an invalid grid.
    """
    names = {p.name for p in jit_fn.params}
    own = {name: value for name, value in kwargs.items() if name in names}
    _check_options(jit_fn.__name__, {name: value for name, value in kwargs.items() if name not in names})
    try:
        bound = jit_fn.signature.bind(*args, **own)
    except TypeError as error:
        raise TypeError(f"{jit_fn.__name__}: {error}") from None
    bound.apply_defaults()
    for hook in jit_fn.pre_run_hooks:
        hook(*args, **kwargs)
    arguments, seen = _Arguments(semantic), {}
    for p in jit_fn.params:
        try:
            seen[p.name] = arguments.convert(bound.arguments[p.name], p.is_constexpr, p.is_const, p.annotation_type)
        except _NoArgument as error:
            raise TypeError(
                f"{jit_fn.__name__}: argument {p.name} is {error}, which no kernel takes; pass a tensor, a number, a tensor "
                f"descriptor or a tuple of such, or make the parameter a tl.constexpr"
            ) from None
    sizes = _sizes(jit_fn.__name__, grid(bound.arguments) if callable(grid) else grid)
    named = {p.name: seen.pop(p.name) for p in jit_fn.signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
    positional = list(seen.values())

    def run() -> None:
        with np.errstate(all="ignore"):
            function(*positional, **named)

    return Launch(
        name=own.get("KERNEL", jit_fn.__name__),
        grid=(*sizes, 1, 1)[:3],
        run=run,
        threads=32 * value_of(kwargs.get("num_warps", 4)),
        tensors=arguments.tensors,
        tuples=arguments.tuples,
    )


def _check_options(kernel: str, options: dict[str, object]) -> None:
    """TypeError for an unknown launch option, ValueError for an impossible number of warps."""
    for name in options:
        if name not in _OPTIONS and not name.startswith("launch_"):
            raise TypeError(f"{kernel}: keyword argument {name} was specified but unrecognised")
    warps = value_of(options.get("num_warps", 4))
    if not isinstance(warps, int) or warps < 1 or warps & (warps - 1):
        raise ValueError(f"{kernel}: num_warps={warps!r} is not a power of 2")


def _sizes(kernel: str, grid: Sequence[int]) -> list[int]:
    """Sizes of a grid as Triton's launcher reads them. A size of 0 launches nothing."""
    try:
        sizes = list(grid)
    except TypeError:
        raise TypeError(f"{kernel}: grid={grid!r} is not a tuple; launch it as {kernel}[({grid!r},)](...)") from None
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"{kernel}: grid={grid} has {len(sizes)} dimensions; a grid has 1 to 3")
    for axis, size in enumerate(sizes):
        try:
            sizes[axis] = operator.index(value_of(size))
        except TypeError:
            raise TypeError(
                f"{kernel}: grid={tuple(grid)} has {size!r} in dimension {axis}; pass integers (triton.cdiv divides and "
                f"rounds up)"
            ) from None
        if sizes[axis] < 0:
            raise ValueError(
                f"{kernel}: grid={tuple(grid)} is negative in dimension {axis}; a GPU would launch nothing"
            )
        if sizes[axis] > _MOST[axis]:
            raise ValueError(f"{kernel}: grid={tuple(grid)} has more than {_MOST[axis]:,} programs in dimension {axis}")
    return sizes


class _NoArgument(Exception):
    """Type that no kernel takes; the message names it."""


class _Arguments:
    """Conversion of one launch's arguments, which also collects their tensors and tuples."""

    def __init__(self, semantic: Semantic) -> None:
        self.semantic = semantic
        self.tensors: list[torch.Tensor] = []
        self.tuples: list[tuple] = []

    def convert(self, value: object, fixed: bool = False, const: bool = False, annotation: str = "") -> object:
        """Kernel value of ``value``; unchanged if the parameter is ``fixed`` (constexpr)."""
        if isinstance(value, tl.constexpr):
            return value.value
        if fixed or value is None:
            return value
        if isinstance(value, (int, float)):
            if annotation:
                return scalar(value, tl.str_to_ty(annotation, None))
            return self.semantic.scalar_constant(value, _scalar_type(value))
        if isinstance(value, tuple):
            self.tuples.append(value)
            parts = [self.convert(v) for v in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, TensorDescriptor):
            return self._descriptor(value)
        if hasattr(value, "data_ptr"):
            tensor = value.base if isinstance(value, TensorWrapper) else value
            ty = _pointer_type(_element(value.dtype), const)
            self.tensors.append(tensor)
            return make(np.array([self.semantic.builder.port.pointer(tensor)], np.uint64), ty, False)
        if not isinstance(value, JITFunction):
            raise _NoArgument(f"a {type(value).__name__}")
        return value

    def _descriptor(self, host: TensorDescriptor) -> tl.tensor_descriptor:
        descriptor = self.semantic.make_tensor_descriptor(
            self.convert(host.base),
            [self.convert(int(size)) for size in host.shape],
            [*(self.convert(int(stride)) for stride in host.strides[:-1]), tl.constexpr(host.strides[-1])],
            [tl.constexpr(size) for size in host.block_shape],
            padding_option=host.padding,
        )
        descriptor.handle.round_to_tf32 = getattr(host, "round_f32_to_tf32", False)
        return descriptor


def _scalar_type(value: int | float) -> tl.dtype:
    if isinstance(value, bool):
        return tl.int1
    if isinstance(value, float):
        return tl.float32
    return tl.int32 if -(2**31) <= value < 2**31 else tl.int64 if value < 2**63 else tl.uint64


def _element(dtype: object) -> str:
    try:
        return canonicalize_dtype(dtype)
    except KeyError:
        raise _NoArgument(f"a tensor of {dtype}") from None


@cache
def _pointer_type(element: str, const: bool) -> tl.pointer_type:
    pointee = tl.str_to_ty(f"*{element}", None).element_ty
    return tl.pointer_type(pointee, const=const)
