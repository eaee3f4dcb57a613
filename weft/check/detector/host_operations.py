"""Accesses of host code: PyTorch operations on memory that kernels and peers may touch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from weft.check.detector.happens_before import HappensBefore
from weft.simulator.places import indices

# Operations that use a tensor's shape only.
_SHAPE_ONLY = frozenset({
    "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
    "rand_like", "randn_like", "sym_size", "sym_stride", "is_same_size",
})  # fmt: skip
# Methods that give the plain tensors within a tensor of another layout.
_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_MEMBERS = {
    torch.sparse_coo: ("_indices", "_values"), torch.sparse_csr: _ROWS, torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS, torch.sparse_bsc: _COLUMNS, torch.jagged: ("values", "offsets"),
}  # fmt: skip


class HostOperations(TorchDispatchMode):
    """Dispatch mode that reports this thread's operations to the observer.

    Private memory costs one look-up.
    """

    def __init__(self, observer: HappensBefore, rank: int) -> None:
        super().__init__()
        self._observer, self._rank = observer, rank

    def __torch_dispatch__(self, func: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        custom = _implementation(func)
        if custom is not None:
            # A mode is off while it handles an operation, and the operations inside are the ones to be seen.
            with self:
                return custom(*args, **kwargs)
        name = func._schema.name.split("::")[-1]
        if name in _SHAPE_ONLY:
            return func(*args, **kwargs)
        operands = [(t, w) for value, w in _operands(func, args, kwargs) for t in _tensors(value)]
        if operands:
            self._observer.machine.settle()
            self._observer.host_works(self._rank)
        for tensor, _ in operands:
            self._observer.host_touches(self._rank, tensor, name)
        touched = [(t, w) for t, w in operands if self._concerns(t)]
        before = [self._signals_in(tensor) if write else {} for tensor, write in touched]
        result = func(*args, **kwargs)
        for (tensor, write), values in zip(touched, before, strict=True):
            self._observer.host_access(self._rank, _addresses(tensor), tensor.element_size(), name, write, values)
            if write:
                self._observer.machine.scheduler.written(tensor.data_ptr(), tensor.data_ptr() + _reach(tensor))
        if name == "_local_scalar_dense":
            self._observer.host_waited(self._rank)
        return result

    def _signals_in(self, tensor: torch.Tensor) -> dict[int, int]:
        """Values by address of the signals that lie in a tensor."""
        low, signals = tensor.data_ptr(), self._observer.signals
        return {signal.address: signals.value(signal) for signal in signals.within(low, low + _reach(tensor))}

    def _concerns(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() > 0 and self._observer.memory.find(tensor.data_ptr()) is not None


def _operands(func: OpOverload, args: tuple, kwargs: dict) -> list[tuple[object, bool]]:
    """(argument, is it written) for each argument whose elements are used; a view uses none."""
    operands = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        if value is not None and (alias is None or alias.is_write):
            operands.append((value, alias is not None))
    return operands


def _tensors(value: object) -> list[torch.Tensor]:
    """Tensors with memory of an argument; a sparse tensor has indices and values."""
    given = value if isinstance(value, (list, tuple)) else [value]
    return [part for tensor in given if isinstance(tensor, torch.Tensor) for part in _with_memory(tensor)]


def _with_memory(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.strided:
        return list(tensor.unbind()) if tensor.is_nested else [tensor]
    return [getattr(tensor, name)() for name in _MEMBERS.get(tensor.layout, ())]


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    return (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * tensor.element_size()


def _addresses(tensor: torch.Tensor) -> np.ndarray:
    if tensor.is_contiguous():
        offsets = np.arange(tensor.numel(), dtype=np.int64)
    else:
        steps = zip(indices(tuple(tensor.shape)), tensor.stride(), strict=True)
        offsets = sum((index * stride for index, stride in steps), np.zeros(1, np.int64))
    return (tensor.data_ptr() + offsets.ravel() * tensor.element_size()).astype(np.uint64)


def _implementation(func: OpOverload) -> Callable[..., Any] | None:
    """Implementation of a library's operator, or of PyTorch's that calls other ones; else None."""
    if func.namespace == "aten":
        # Within a custom operator "contiguous" arrives as such, and not as the clone that it may make.
        return func.decompose if func.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd) else None
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(func._schema.name)
    if definition is not None:
        return definition._init_fn
    key = torch.DispatchKey.CompositeExplicitAutograd
    return partial(func._op_dk, key) if func.has_kernel_for_dispatch_key(key) else None
