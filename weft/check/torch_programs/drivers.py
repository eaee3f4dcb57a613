"""Stand-ins for the drivers that host code calls: Triton's, its benchmarks, ``cuda.bindings.driver``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from weft.check.torch_programs import devices, streams
from weft.check.torch_programs.ranks import Ranks, running_ranks
from weft.simulator.front_end import TARGET


def triton_driver(ranks: Ranks) -> SimpleNamespace:
    """Stand-in for ``triton.runtime.driver.active``: of a Hopper GPU."""
    gpu = devices.properties(ranks.machine.sms, 0)
    known = {
        "max_shared_mem": gpu.shared_memory_per_block_optin, "max_num_regs": gpu.regs_per_multiprocessor,
        "multiprocessor_count": gpu.multi_processor_count, "warpSize": gpu.warp_size, "sm_clock_rate": 1980000,
        "mem_clock_rate": 2619000, "mem_bus_width": 6144,
    }  # fmt: skip
    return SimpleNamespace(
        ranks=ranks, get_current_target=lambda: TARGET, get_current_device=lambda: ranks.here.rank,
        set_current_device=lambda *_: None, get_current_stream=lambda *_: 0, is_active=lambda: True,
        get_active_torch_device=lambda: torch.device("cuda", ranks.here.rank), get_device_interface=lambda: torch.cuda,
        get_device_capability=lambda *_: (9, 0), get_benchmarker=lambda: benchmark,
        get_empty_cache_for_benchmark=lambda: torch.empty(0), clear_cache=lambda *_: None,
        utils=SimpleNamespace(get_device_properties=lambda *_: dict(known)),
    )  # fmt: skip


def benchmark(
    fn: Callable[[], object], warmup: int = 25, rep: int = 100, grad_to_none: Iterable[torch.Tensor] | None = None,
    quantiles: Sequence[float] | None = None, return_mode: str = "mean",
) -> float | list[float]:  # fmt: skip
    """Stand-in for ``triton.testing.do_bench``: one call, whose time means nothing."""
    fn()
    if quantiles is not None and len(quantiles) != 1:
        return [1.0] * len(quantiles)
    return [1.0] if quantiles is None and return_mode == "all" else 1.0


def benchmark_graph(
    fn: Callable[[], object], rep: int = 20, grad_to_none: Iterable[torch.Tensor] | None = None,
    quantiles: Sequence[float] | None = None, return_mode: str = "mean",
) -> float | list[float]:  # fmt: skip
    """Stand-in for ``triton.testing.do_bench_cudagraph``."""
    return benchmark(fn, quantiles=quantiles, return_mode=return_mode)


class CUresult(IntEnum):
    CUDA_SUCCESS = 0


class CUstreamWaitValue_flags(IntEnum):  # noqa: N801  (CUDA's names)
    CU_STREAM_WAIT_VALUE_GEQ = 0
    CU_STREAM_WAIT_VALUE_EQ = 1


class CUstreamWriteValue_flags(IntEnum):  # noqa: N801
    CU_STREAM_WRITE_VALUE_DEFAULT = 0


_COMPARISONS = {0: ">=", 1: "=="}


@cache
def cuda_modules() -> dict[str, ModuleType]:
    """Stand-ins for ``cuda.bindings.driver`` and its parents: waits for and writes of values by a stream.

    The same ones for all runs, since modules of installed packages keep them; they act on the ranks of the present run.
    """
    members: dict[str, Any] = {
        "CUresult": CUresult, "CUstream": int, "CUdeviceptr": int,
        "CUstreamWaitValue_flags": CUstreamWaitValue_flags, "CUstreamWriteValue_flags": CUstreamWriteValue_flags,
        **{f"cuStreamWaitValue{bits}": partial(_wait_value, bits // 8) for bits in (32, 64)},
        **{f"cuStreamWriteValue{bits}": partial(_write_value, bits // 8) for bits in (32, 64)},
    }  # fmt: skip

    def absent(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise running_ranks().refuse(f"{name} of cuda.bindings.driver")

    driver, bindings, cuda = (ModuleType(name) for name in ("cuda.bindings.driver", "cuda.bindings", "cuda"))
    vars(driver).update(members, __getattr__=absent)
    # Further modules, such as cuda.tile, are the installed ones.
    vars(bindings).update(driver=driver, __path__=_places("cuda.bindings"))
    vars(cuda).update(bindings=bindings, cuda=driver, __path__=_places("cuda"))
    return {"cuda": cuda, "cuda.bindings": bindings, "cuda.bindings.driver": driver, "cuda.cuda": driver}


def _places(package: str) -> list[str]:
    """Folders of an installed package; empty if there is none."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # nor its parent
        return []
    return list(spec.submodule_search_locations or []) if spec is not None else []


def _stream(ranks: Ranks, handle: Any) -> streams.Stream:
    """The stream of a handle: its number, or an object that converts to it."""
    number = int(handle)
    return ranks.here.streams[number - 1] if number else streams.main_stream(ranks)


def _wait_value(nbytes: int, stream: Any, address: Any, value: int, flags: int) -> tuple[CUresult]:
    ranks = running_ranks()
    if int(flags) not in _COMPARISONS:
        raise ranks.refuse(f"cuStreamWaitValue{8 * nbytes} with flags {int(flags)}", "wait for >= or ==")
    wait = partial(ranks.machine.wait_for_words, [int(address)], nbytes, int(value), _COMPARISONS[int(flags)])
    _stream(ranks, stream).issue(f"wait for {int(value)}", wait, [])
    return (CUresult.CUDA_SUCCESS,)


def _write_value(nbytes: int, stream: Any, address: Any, value: int, _: int = 0) -> tuple[CUresult]:
    ranks = running_ranks()
    extent, address = ranks.machine.memory.find(int(address)), int(address)
    if extent is None:
        raise ValueError(f"cuStreamWriteValue{8 * nbytes} writes to address {address:#x}, which is in no tensor")
    at = (address - extent.base) // nbytes
    words = extent.words(nbytes)[at : at + 1]
    with torch._C.DisableTorchFunction():  # these views are no operations of the current stream
        target, source = torch.from_numpy(words), torch.from_numpy(np.array([value], words.dtype))
    streams.copy(ranks, f"write of {int(value)}", target, source, True, _stream(ranks, stream))
    return (CUresult.CUDA_SUCCESS,)
