"""Tensors of a torch program: all lie on their rank's GPU, in memory of the CPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from weft.check.torch_programs import streams

if TYPE_CHECKING:
    from weft.check.torch_programs.ranks import Ranks

_CPU = torch.device("cpu")
# Functions of a tensor that touch no element, besides the getters of properties.
_VIEWS = frozenset({
    "view", "reshape", "chunk", "split", "narrow", "select", "__getitem__", "unsqueeze", "squeeze", "size", "stride", "numel",
    "data_ptr", "is_contiguous", "element_size", "storage_offset", "as_strided", "t", "transpose", "permute", "expand",
    "flatten", "dim", "__len__", "empty_like", "new_empty", "unbind", "untyped_storage", "view_as", "detach", "tensor_split",
    "nelement", "is_floating_point", "unflatten",
})  # fmt: skip

# Functions whose tensors hold whatever was in memory.
_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_WHOLE, _END = 64 << 20, 1 << 20  # bytes: the largest memory filled whole, and each end of a larger one


class OnGpu(TorchFunctionMode):
    """Mode of a rank's host code: "cuda" is the CPU, whose tensors say that they are of the GPU."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        super().__init__()
        self._ranks, self._device = ranks, torch.device("cuda", rank)
        tensor = torch.Tensor
        self._answers: dict[Any, Callable[..., Any]] = {
            tensor.device.__get__: lambda *_: self._device,
            tensor.is_cuda.__get__: lambda *_: True,
            tensor.is_cpu.__get__: lambda *_: False,
            tensor.get_device: lambda *_: self._device.index,
            tensor.cuda: lambda x, *_, **__: x,
            tensor.pin_memory: lambda x, *_, **__: x,
            tensor.record_stream: lambda *_: None,
            tensor.cpu: self._to_host,
            tensor.data_ptr: self._address,
        }

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        answer = self._answers.get(func)
        if answer is not None:
            return answer(*args, **kwargs)
        if func is torch.device:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "to" and any(_is_host(value) for value in (*args[1:], *kwargs.values())):
            return self._to_host(*args)
        kwargs = {key: _on_cpu(value) for key, value in kwargs.items() if key != "pin_memory"}
        args = tuple(_on_cpu(value) for value in args)
        is_aside = self._ranks.here.stream is not None and name != "__get__"
        result = self._on_stream(func, name, args, kwargs) if is_aside else func(*args, **kwargs)
        if name in _UNINITIALISED and kwargs.get("out") is None:
            _poison(result)
        return result

    def _address(self, x: torch.Tensor) -> int:
        """Address of a tensor, by which a kernel may reach it from now on."""
        address, here = x.data_ptr(), self._ranks.here
        caller = sys._getframe(2)
        module = caller.f_globals.get("__name__", "")
        if not module.startswith(("weft.", "triton.", "torch.")) and ("address", address) not in here.kept:
            here.kept["address", address] = x
            line = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
            self._ranks.machine.memory.add_tensor(x, here.rank, f"tensor of data_ptr() in {line}")
        return address

    def _to_host(self, x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        copy = x.clone()
        self._ranks.machine.observer.host_waited(self._ranks.machine.rank)
        return copy

    def _on_stream(self, func: Callable[..., Any], name: str, args: tuple, kwargs: dict) -> Any:
        """Result of an operation in the scope of a side stream, on which it runs later if it is a copy."""
        memory = self._ranks.machine.memory
        shared = [x for x in args if isinstance(x, torch.Tensor) and memory.find(x.data_ptr()) is not None]
        if name == "copy_":
            dst, src = args[0], args[1]
            src = src.to(dst.dtype) if src.dtype != dst.dtype else src
            streams.copy(self._ranks, "copy", dst, src.expand_as(dst))
            return dst
        if name in ("zero_", "fill_"):
            dst = args[0]
            value = args[1] if name == "fill_" else 0
            streams.copy(self._ranks, name, dst, torch.full(dst.shape, value, dtype=dst.dtype))
            return dst
        if shared and name not in _VIEWS:
            raise self._ranks.refuse(
                f"Tensor.{name} on a side stream, of memory that kernels or peers use", "call it on the main stream"
            )
        return func(*args, **kwargs)


def _poison(x: Any) -> None:
    """Fill new memory: a result that depends on it is wrong in every run, not in some.

    NaN in floats, -1 in integers; of a large tensor only the ends, and nothing of bools.
    """
    if type(x) is not torch.Tensor or x.dtype is torch.bool or x.layout is not torch.strided or x.device.type != "cpu":
        return
    if torch._is_functional_tensor(x) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return  # its memory is another tensor's
    storage = x.untyped_storage()
    base, size = storage.data_ptr(), storage.nbytes()
    if size <= _WHOLE:
        ctypes.memset(base, 0xFF, size)
    else:
        ctypes.memset(base, 0xFF, _END)
        ctypes.memset(base + size - _END, 0xFF, _END)


def _is_host(value: object) -> bool:
    return value == "cpu" or (isinstance(value, torch.device) and value.type == "cpu")


def _on_cpu(value: Any) -> Any:
    """The argument of a torch function, with a GPU replaced by the CPU."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    return _CPU if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def properties(sms: int, number: int) -> SimpleNamespace:
    """Result of ``torch.cuda.get_device_properties``: a Hopper GPU with ``sms`` SMs."""
    return SimpleNamespace(
        name="virtual H200", major=9, minor=0, multi_processor_count=sms, total_memory=141 << 30, warp_size=32,
        regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
        max_threads_per_multi_processor=2048, L2_cache_size=50 << 20, is_integrated=False, uuid=f"virtual-{number}",
        gcnArchName="",
    )  # fmt: skip
