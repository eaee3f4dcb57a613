"""Processes of ranks that start before they have work, and load torch while their parent does.

Without torch itself, so that a command can start them first.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from weft.runtime.environment import visible_gpus
from weft.runtime.signals import held_for_children

# Devices of NVIDIA's and AMD's drivers.
DRIVERS = "/dev/nvidiactl", "/dev/kfd"
# Seconds between two looks of a process that waits at whether its parent lives.
WATCH_SECONDS = 0.5


class EarlyProcesses:
    """Processes that load modules and wait for work; each is taken once, and the rest end with `close`.

    modules     they load these before they have work
    later       they load these after `modules` in a thread, beside what their work begins with
    gpus        process i prepares GPU i modulo this number while it loads them, since rank i runs there: NVML, the GPU's
                context, and the hash for Triton's cache; 0: none
    first_gemm  each then runs what the first GEMM and the first copy on a GPU would wait for
    """

    def __init__(
        self,
        count: int,
        modules: Sequence[str] = (),
        *,
        later: Sequence[str] = (),
        gpus: int = 0,
        first_gemm: bool = False,
    ) -> None:
        resource_tracker.ensure_running()  # otherwise the first start would start it, which ends the hold of signals
        self._modules, self._later, self._first_gemm = tuple(modules), tuple(later), first_gemm
        self._waiting: list[tuple[BaseProcess, Connection]] = []
        # Python would end them by SIGTERM, which they hold back, and wait.
        multiprocessing.util.Finalize(self, _end_waiting, (self._waiting,), exitpriority=0)
        try:
            for number in range(count):
                self._start(number % gpus if gpus else None)
        except BaseException:
            self.close()
            raise

    def _start(self, gpu: int | None) -> None:
        ours, theirs = multiprocessing.Pipe()
        given = theirs, Preparation(time.monotonic()), self._modules, self._later, gpu, self._first_gemm
        process = multiprocessing.get_context("spawn").Process(target=_wait_for_work, args=given, daemon=True)
        self._waiting.append((process, ours))  # before an interrupt can come, which would leave it waiting for ever
        with held_for_children():
            process.start()
        theirs.close()

    def take(self, target: object, arguments: Sequence[object], pipes: Sequence[Connection]) -> BaseProcess:
        """Have a process call target(its Preparation, pipes[0], *arguments, *pipes[1:]).

        A new process if none is left.
        """
        work = pickle.dumps((target, tuple(arguments), len(pipes)))
        while True:
            if is_new := not self._waiting:
                self._start(None)
            process, feed = self._waiting[0]
            try:
                feed.send_bytes(work)
                for pipe in pipes:
                    send_handle(feed, pipe.fileno(), process.pid)
                has_ended = False
            except OSError:
                process.join(timeout=1)
                has_ended = True
            feed.close()
            del self._waiting[0]  # only now: an interrupt before leaves it to `close`
            if is_new or not has_ended:
                return process

    def close(self) -> None:
        """End the processes that wait."""
        _end_waiting(self._waiting)


def _end_waiting(waiting: list[tuple[BaseProcess, Connection]]) -> None:
    while waiting:
        process, feed = waiting[-1]
        feed.close()
        if process.pid is not None:  # it was started
            process.kill()
            process.join()
        waiting.pop()


@contextmanager
def early_processes(
    count: int, modules: Sequence[str], *, later: Sequence[str] = (), first_gemm: bool = False
) -> Iterator[EarlyProcesses | None]:
    """Yield `EarlyProcesses` for `count` ranks on GPUs; None for none, or without a driver."""
    if not count or not any(map(os.path.exists, DRIVERS)):
        yield None
        return
    processes = EarlyProcesses(count, modules, later=later, gpus=visible_gpus(), first_gemm=first_gemm)
    try:
        # torch asks it for the number of GPUs, which this process needs before ranks have work.
        threading.Thread(target=_init_nvml, name="weft NVML", daemon=True).start()
        yield processes
    finally:
        processes.close()


@contextmanager
def collections_held() -> Iterator[None]:
    """Scope of imports, in which no garbage is collected, a seventh of their time. It freezes them.

    Otherwise each full collection would take 0.15 s to walk through them, and hold up all ranks or streams.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


class Preparation:
    """Parts of a rank's start that its process does before its work, some in threads, and when.

    begin  time.monotonic() when the process was started
    """

    def __init__(self, begin: float) -> None:
        self._begin, self._done = begin, dict[str, float]()
        self._threads: list[threading.Thread] = []

    def note(self, part: str) -> None:
        """Note that a part is done."""
        self._done[part] = time.monotonic() - self._begin

    def beside(self, part: str, work: Callable[..., object], *arguments: object) -> threading.Thread:
        """Do a part in a thread. Its error is left to what needs the part, and does it again."""

        def run() -> None:
            with suppress(Exception):
                work(*arguments)
                self.note(part)

        self._threads.append(thread := threading.Thread(target=run, name=f"weft {part}", daemon=True))
        thread.start()
        return thread

    def join(self) -> None:
        """Wait for all parts."""
        for thread in self._threads:
            thread.join()

    def __str__(self) -> str:
        """Parts and seconds after `begin`, in the order in which they were done."""
        return ", ".join(
            f"{part} {second:.2f} s" for second, part in sorted((s, p) for p, s in self._done.copy().items())
        )


def _init_nvml() -> None:
    """Initialise NVML, which torch asks for the number of GPUs, and for links as it makes a heap."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2()


def _make_context(gpu: int) -> None:
    """Initialise the driver, and make the context of a GPU that torch will use."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if not cuda.cuInit(0) and not cuda.cuDeviceGet(ctypes.byref(device), gpu):
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _use_gpu(number: int) -> None:
    """Run what the first GEMM and the first copy on a GPU would wait for: cuBLAS, the caching allocator."""
    import torch

    if number < torch.cuda.device_count():
        torch.cuda.set_device(number)
        ones = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
        (ones @ ones).cpu()


def _load(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def _wait_for_work(
    feed: Connection,
    preparation: Preparation,
    modules: Sequence[str],
    later: Sequence[str],
    gpu: int | None,
    first_gemm: bool,
) -> None:
    """Body of a process: load modules, wait for what to call, and call it."""
    preparation.note("python")
    with collections_held():
        _prepare(preparation, modules, later, gpu, first_gemm)
        work = _work_of(feed)
    if work is not None:
        preparation.note("work")
        target, *given = work
        target(preparation, *given)


def _prepare(
    preparation: Preparation, modules: Sequence[str], later: Sequence[str], gpu: int | None, first_gemm: bool
) -> None:
    drivers = []
    if gpu is not None:
        # Calls of the drivers, and hashing, let the imports go on.
        drivers = [preparation.beside("NVML", _init_nvml), preparation.beside("context", _make_context, gpu)]
        from weft.triton_api import hash_triton

        preparation.beside("hash of Triton", hash_triton)
    _load(modules)
    preparation.note("modules")
    if later:
        preparation.beside("later modules", _load, later)
    for thread in drivers:
        thread.join()
    if gpu is not None and first_gemm:
        with suppress(RuntimeError):  # the rank will say what is wrong with its GPU
            _use_gpu(gpu)
        preparation.note("first GEMM")


def _work_of(feed: Connection) -> tuple[Any, ...] | None:
    """Function to call and its arguments; None where the process is not needed."""
    parent = multiprocessing.parent_process()
    try:
        while not feed.poll(WATCH_SECONDS):
            if parent is not None and os.getppid() != parent.pid:  # a fork of it has the pipe's other end too
                return None
        # From the parent alone, over a pipe without a name that no other program has.
        target, arguments, count = pickle.loads(feed.recv_bytes())
        first, *rest = (Connection(recv_handle(feed)) for _ in range(count))
    except (EOFError, OSError):
        return None
    feed.close()
    return target, first, *arguments, *rest
