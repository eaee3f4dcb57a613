"""Launches: a kernel's arguments as the kernel sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.core import constexpr
from triton.runtime.jit import TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.simulator.interpreter.semantic import Semantic
from weft.simulator.interpreter.values import make, scalar, value_of

# Launch options of the NVIDIA and AMD backends.
_OPTIONS = frozenset({
    "allow_flush_denorm", "arch", "clc", "cluster_dims", "debug", "default_dot_input_precision", "enable_fp_fusion",
    "enable_reflect_ftz", "extern_libs", "instrumentation_mode", "ir_override", "kpack", "llvm_fn_attrs",
    "matrix_instr_nonkdim", "maxRegAutoWS", "maxnreg", "minRegAutoWS", "num_ctas", "num_stages", "num_warps",
    "ptx_options", "ptx_version", "sanitize_overflow", "sched4reg", "schedule_hint", "supported_fp8_dtypes",
    "warp_size", "waves_per_eu"
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel with its arguments bound. ``run()`` executes it once, for the program that the port names."""

    name: str
    grid: tuple[int, int, int]
    run: Callable[[], None]
    tensors: list[torch.Tensor]


def prepare(semantic: Semantic, jit_fn: Any, function: Callable, grid: Any, args: tuple, kwargs: dict) -> Launch:
    """Bind a launch's arguments to ``function``, which stands for the kernel, as Triton does. TypeError for missing,
    surplus or unknown arguments."""
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
    arguments = _Arguments(semantic)
    seen = {
        p.name: arguments.convert(bound.arguments[p.name], p.is_constexpr, p.is_const, p.annotation_type)
        for p in jit_fn.params
    }
    size = grid(bound.arguments) if callable(grid) else grid
    sizes = [int(value_of(n)) for n in (size if isinstance(size, (tuple, list)) else (size,))]
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"{jit_fn.__name__}: a grid has 1 to 3 dimensions, got {size}")
    named = {p.name: seen.pop(p.name) for p in jit_fn.signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
    positional = list(seen.values())

    def run() -> None:
        with np.errstate(all="ignore"):
            function(*positional, **named)

    return Launch(name=jit_fn.__name__, grid=(*sizes, 1, 1)[:3], run=run, tensors=arguments.tensors)


class _Arguments:
    """Converts the arguments of one launch, and keeps the tensors met on the way."""

    def __init__(self, semantic: Semantic) -> None:
        self.semantic = semantic
        self.tensors: list[torch.Tensor] = []

    def convert(self, value: Any, fixed: bool = False, const: bool = False, annotation: str = "") -> Any:
        """``value`` as a kernel sees it; as it is where the parameter is ``fixed`` (constexpr)."""
        if isinstance(value, constexpr):
            return value.value
        if fixed or value is None:
            return value
        if isinstance(value, (int, float)):
            if annotation:
                return scalar(value, tl.str_to_ty(annotation, None))
            return self.semantic.scalar_constant(value, _scalar_type(value))
        if isinstance(value, tuple):
            parts = [self.convert(v) for v in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, TensorDescriptor):
            return self._descriptor(value)
        if hasattr(value, "data_ptr"):
            tensor = value.base if isinstance(value, TensorWrapper) else value
            self.tensors.append(tensor)
            ty = _pointer_type(triton._utils.canonicalize_dtype(value.dtype), const)
            return make(np.array([self.semantic.builder.port.pointer(tensor)], np.uint64), ty, False)
        return value

    def _descriptor(self, host: TensorDescriptor) -> tl.tensor_descriptor:
        descriptor = self.semantic.make_tensor_descriptor(
            self.convert(host.base),
            [self.convert(int(size)) for size in host.shape],
            [*(self.convert(int(stride)) for stride in host.strides[:-1]), constexpr(host.strides[-1])],
            [constexpr(size) for size in host.block_shape],
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


@cache
def _pointer_type(element: str, const: bool) -> tl.pointer_type:
    pointee = tl.str_to_ty(f"*{element}", None).element_ty
    return tl.pointer_type(pointee, const=const)
