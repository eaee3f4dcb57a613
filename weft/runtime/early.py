"""Processes of ranks that start before they have work, and load torch while their parent does.

Without torch itself, so that a command can start them first.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle

from weft.runtime.environment import visible_gpus
from weft.runtime.signals import held_for_children

# Devices of NVIDIA's and AMD's drivers.
DRIVERS = "/dev/nvidiactl", "/dev/kfd"
# Seconds between two looks of a process that waits at whether its parent lives.
WATCH_SECONDS = 0.5


class EarlyProcesses:
    """Processes that load modules and wait for work; each is taken once, and the rest end with `close`.

    modules     they load these before they have work
    gpus        process i makes the context of GPU i modulo this number while it loads them, since rank i runs there; 0: none
    first_gemm  each then runs what the first GEMM and the first copy on a GPU would wait for
    """

    def __init__(self, count: int, modules: Sequence[str] = (), *, gpus: int = 0, first_gemm: bool = False) -> None:
        resource_tracker.ensure_running()  # otherwise the first start would start it, which ends the hold of signals
        self._modules, self._first_gemm = tuple(modules), first_gemm
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
        process = multiprocessing.get_context("spawn").Process(
            target=_wait_for_work, args=(theirs, self._modules, gpu, self._first_gemm), daemon=True
        )
        self._waiting.append((process, ours))  # before an interrupt can come, which would leave it waiting for ever
        with held_for_children():
            process.start()
        theirs.close()

    def take(self, target: object, arguments: Sequence[object], pipes: Sequence[Connection]) -> BaseProcess:
        """Have a process, a new one if none is left, call target(pipes[0], *arguments, *pipes[1:])."""
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
def early_processes(count: int, modules: Sequence[str], *, first_gemm: bool = False) -> Iterator[EarlyProcesses | None]:
    """Yield `EarlyProcesses` for `count` ranks on GPUs; None for none, or without a driver."""
    if not count or not any(map(os.path.exists, DRIVERS)):
        yield None
        return
    processes = EarlyProcesses(count, modules, gpus=visible_gpus(), first_gemm=first_gemm)
    try:
        yield processes
    finally:
        processes.close()


def _make_context(gpu: int) -> None:
    """Initialise NVML and the driver, and make the context of a GPU that torch will use."""
    with suppress(OSError):  # torch asks NVML for links between machines as it allocates symmetric memory
        ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2()
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


def _wait_for_work(feed: Connection, modules: Sequence[str], gpu: int | None, first_gemm: bool) -> None:
    """Body of a process: load modules, wait for what to call, and call it."""
    # Calls of the driver let the imports go on.
    beside = threading.Thread(target=_make_context, args=(gpu,), daemon=True) if gpu is not None else None
    if beside is not None:
        beside.start()
    for module in modules:
        importlib.import_module(module)
    if beside is not None:
        beside.join()
        if first_gemm:
            with suppress(RuntimeError):  # the rank will say what is wrong with its GPU
                _use_gpu(gpu)
    parent = multiprocessing.parent_process()
    try:
        while not feed.poll(WATCH_SECONDS):
            if parent is not None and os.getppid() != parent.pid:  # a fork of it has the pipe's other end too
                return
        # From the parent alone, over a pipe without a name that no other program has.
        target, arguments, count = pickle.loads(feed.recv_bytes())
        first, *rest = (Connection(recv_handle(feed)) for _ in range(count))
    except (EOFError, OSError):  # it is not needed
        return
    feed.close()
    target(first, *arguments, *rest)
