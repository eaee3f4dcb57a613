"""Replacement of the parts of torch that need GPUs, while a torch program runs on virtual ranks."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch._library.custom_ops
import torch._library.triton
import torch.autograd
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.multiprocessing
import torch.utils._triton

from weft.check.torch_programs import devices, drivers, operators, streams
from weft.check.torch_programs.groups import Group, Groups
from weft.check.torch_programs.nvshmem import Nvshmem
from weft.check.torch_programs.ranks import ranks_if_running
from weft.check.torch_programs.symmetric import Handle, SymmetricMemory
from weft.simulator.interpreter.patching import Patches
from weft.triton_api import driver, testing

if TYPE_CHECKING:
    from weft.check.torch_programs.ranks import Ranks


@contextmanager
def patches(ranks: Ranks) -> Iterator[None]:
    """Scope in which torch's functions for GPUs act on the virtual rank whose host code calls them.

    A module of an installed package is imported once for all runs, and may keep what it finds meanwhile: the members that torch
    gets here are the same ones in each run, and lead to the stand-ins of the run.
    """
    made = Patches()
    groups = Groups(ranks)
    memory = SymmetricMemory(ranks, groups)
    define_op = partial(operators.custom_op, ranks, torch._library.custom_ops.custom_op)
    ranks.functions = Nvshmem(ranks).function
    try:
        for owner, members in (
            (torch.cuda, _cuda(ranks)),
            (torch.cuda.nvtx, dict.fromkeys(("mark", "range_push", "range_pop", "range_start", "range_end"), _nothing)),
            (torch.accelerator, _accelerator(ranks)),
            # Tensors are on the GPU whatever the default device.
            (torch, {"set_default_device": _nothing}),
            (dist, groups.functions() | {"ProcessGroup": Group, "group": groups, "GroupMember": groups}),
            (dist.distributed_c10d, groups.functions()),
            (torch.autograd, {"_engine_run_backward": partial(_backward, ranks, torch.autograd._engine_run_backward)}),
            (symm_mem, _symmetric(memory)),
            (torch._C._distributed_c10d, {"_SymmetricMemory": _symmetric(memory)["_SymmetricMemory"]}),
            (testing, {"do_bench": drivers.benchmark, "do_bench_cudagraph": drivers.benchmark_graph}),
            (torch.ops, {"symm_mem": _Ops(ranks, memory)}),
            (torch.library, {"custom_op": define_op}),
            (torch._library.custom_ops, {"custom_op": define_op}),
            (torch._library.triton, {"custom_op": define_op}),
            (torch.library.Library, operators.library(ranks)),
            (torch.multiprocessing, {"spawn": partial(_spawn, ranks)}),
            (_nvshmem_functions(), {"requires_nvshmem": _itself}),
        ):
            for name, value in members.items():
                ranks.stand_ins[owner, name] = value
                made.set(owner, name, value if isinstance(value, type) else _lasting(owner, name, callable(value)))
        made.set(driver, "_active", drivers.triton_driver(ranks))
        with _modules(drivers.cuda_modules()):
            yield
    finally:
        made.restore()
        for library in ranks.libraries:
            library._destroy()


@cache
def _lasting(owner: ModuleType, name: str, is_function: bool) -> object:
    """Member that leads to the stand-in of the present run, and outside runs to the original."""
    original = getattr(owner, name, None)

    def member() -> Any:
        ranks = ranks_if_running()
        return original if ranks is None else ranks.stand_ins[owner, name]

    def call(*args: object, **kwargs: object) -> object:
        return member()(*args, **kwargs)

    return call if is_function else _Lasting(name, (), {"member": member})


class _Lasting(type):
    """Class, as annotations need it, that leads to the object ``member()`` by its attributes."""

    def __getattr__(cls, name: str) -> Any:
        return getattr(vars(cls)["member"](), name)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, vars(cls)["member"]().instances)


@contextmanager
def _modules(stand_ins: dict[str, ModuleType]) -> Iterator[None]:
    """Scope in which modules have stand-ins."""
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _backward(ranks: Ranks, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a backward pass with tensors on the rank's GPU: torch leaves its mode for ``Tensor.backward``."""
    with devices.OnGpu(ranks, ranks.here.rank):
        return run(*args, **kwargs)


def _cuda(ranks: Ranks) -> dict[str, Any]:
    machine = ranks.machine

    def synchronize(*_: object) -> None:
        machine.drain(*(stream.name for stream in ranks.here.streams))
        machine.observer.synchronized(machine.rank)

    idle = (
        "set_device", "empty_cache", "_sleep", "init", "_lazy_init", "manual_seed", "manual_seed_all", "ipc_collect",
        "reset_peak_memory_stats",
    )  # fmt: skip

    return {
        "Stream": streams.Stream, "Event": streams.Event, "stream": partial(streams.on_stream, ranks),
        "StreamContext": partial(streams.on_stream, ranks),
        "current_stream": partial(streams.current_stream, ranks),
        "default_stream": lambda *_: streams.main_stream(ranks),
        "set_stream": lambda stream: setattr(ranks.here, "stream", stream if stream.name else None),
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: machine.world_size,
        "current_device": lambda: ranks.here.rank, "device": lambda *_: contextlib.nullcontext(),
        "get_device_properties": lambda *_: devices.properties(machine.sms, ranks.here.rank),
        "get_device_capability": lambda *_: (9, 0), "get_device_name": lambda *_: "virtual H200",
        "can_device_access_peer": lambda *_: True, "is_current_stream_capturing": lambda: False,
        "synchronize": synchronize,
        "mem_get_info": lambda *_: (100 << 30, 141 << 30), "memory_allocated": lambda *_: 0,
        "CUDAGraph": streams.Graph, "graph": streams.Graph,
        **dict.fromkeys(idle, _nothing),
    }  # fmt: skip


def _nothing(*_: object, **__: object) -> None:
    return None


def _nvshmem_functions() -> ModuleType:
    """torch's module of NVSHMEM's device functions, which torch leaves empty where there is no GPU."""
    has_triton = torch.utils._triton.has_triton
    torch.utils._triton.has_triton = lambda: True
    try:
        module = importlib.import_module("torch.distributed._symmetric_memory._nvshmem_triton")
        return module if hasattr(module, "putmem_signal_block") else importlib.reload(module)
    finally:
        torch.utils._triton.has_triton = has_triton


def _itself(kernel: Any) -> Any:
    """``requires_nvshmem``: the kernel without NVSHMEM's library, which is not needed here."""
    return kernel


def _accelerator(ranks: Ranks) -> dict[str, Any]:
    return {
        "is_available": lambda: True, "current_device_index": lambda: ranks.here.rank,
        "device_count": lambda: ranks.machine.world_size, "set_device_index": lambda *_: None,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "synchronize": lambda *_: torch.cuda.synchronize(),
        "current_stream": lambda *_: streams.current_stream(ranks),
    }  # fmt: skip


def _symmetric(memory: SymmetricMemory) -> dict[str, Any]:
    direct = SimpleNamespace(
        empty_strided_p2p=memory.empty_strided, rendezvous=memory.rendezvous, set_backend=memory.set_backend,
        get_backend=memory.backend, has_multicast_support=lambda *_: True, stream_write_value32=memory.write_value,
        instances=Handle,
    )  # fmt: skip
    return {
        "empty": memory.empty, "rendezvous": memory.rendezvous, "get_symm_mem_workspace": memory.workspace,
        "is_symm_mem_tensor": memory.is_symmetric, "_get_backend_stream": memory.backend_stream,
        "get_signal_pad_size": memory.pad_size, "set_signal_pad_size": memory.set_pad_size,
        "get_backend": memory.backend, "set_backend": memory.set_backend, "is_nvshmem_available": lambda: True,
        "enable_symm_mem_for_group": lambda *_: None, "is_symm_mem_enabled_for_group": lambda *_: True,
        "_SymmetricMemory": direct,
    }  # fmt: skip


class _Ops:
    """Stand-in for ``torch.ops.symm_mem``."""

    def __init__(self, ranks: Ranks, memory: SymmetricMemory) -> None:
        self._ranks, self.stream_write_value32_ = ranks, memory.write_value
        self.get_remote_tensors = memory.remote_tensors

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._ranks.refuse(f"torch.ops.symm_mem.{name}", "write it out, with a kernel or with copies")


def _spawn(ranks: Ranks, fn: Any, args: tuple = (), nprocs: int = 1, *_: object, **__: object) -> None:
    """``torch.multiprocessing.spawn`` on a rank, which is one of the processes already."""
    size = ranks.machine.world_size
    if nprocs != size:
        raise ValueError(
            f"the program spawns {nprocs} processes, and --world-size is {size}; pass --world-size {nprocs}"
        )
    fn(ranks.here.rank, *args)
