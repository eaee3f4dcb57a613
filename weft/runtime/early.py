"""Processes of ranks that start before they have work, and load torch while their parent does.

Without torch itself, so that a command can start them first.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle

from weft.runtime.signals import held_for_children

# Devices of NVIDIA's and AMD's drivers.
DRIVERS = "/dev/nvidiactl", "/dev/kfd"


class EarlyProcesses:
    """Processes that have loaded modules and wait; each is taken once, and the rest end with `close`."""

    def __init__(self, count: int, modules: Sequence[str]) -> None:
        """Process i makes the context of GPU i, if there is one, while it imports: rank i mostly runs there."""
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # otherwise the first start would start it, which ends the hold of signals
        self._waiting: list[tuple[BaseProcess, Connection]] = []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_wait_for_work, args=(theirs, tuple(modules), number), daemon=True)
            with held_for_children():
                process.start()
            theirs.close()
            self._waiting.append((process, ours))

    def take(self, target: object, arguments: Sequence[object], pipes: Sequence[Connection]) -> BaseProcess | None:
        """Have a process call target(pipes[0], *arguments, *pipes[1:]); None: there is none left."""
        while self._waiting:
            process, feed = self._waiting.pop(0)
            try:
                feed.send_bytes(pickle.dumps((target, tuple(arguments), len(pipes))))
                for pipe in pipes:
                    send_handle(feed, pipe.fileno(), process.pid)
            except OSError:  # it has ended
                process.join(timeout=1)
                continue
            finally:
                feed.close()
            return process
        return None

    def close(self) -> None:
        """Let the processes that wait end."""
        while self._waiting:
            process, feed = self._waiting.pop()
            feed.close()
            process.kill()
            process.join()


@contextmanager
def early_processes(count: int, modules: Sequence[str]) -> Iterator[EarlyProcesses | None]:
    """Yield processes for `count` ranks on GPUs; None for none, or without a driver."""
    if not count or not any(map(os.path.exists, DRIVERS)):
        yield None
        return
    processes = EarlyProcesses(count, modules)
    try:
        yield processes
    finally:
        processes.close()


def _make_context(gpu: int) -> None:
    """Initialise the driver and make the context of a GPU that torch will use."""
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


def _wait_for_work(feed: Connection, modules: Sequence[str], number: int) -> None:
    """Body of a process: load modules, wait for what to call, and call it."""
    beside = threading.Thread(target=_make_context, args=(number,), daemon=True)
    beside.start()  # calls of the driver let the imports go on
    for module in modules:
        importlib.import_module(module)
    beside.join()
    if "torch" in sys.modules:
        with suppress(RuntimeError):  # the rank will say what is wrong with its GPU
            _use_gpu(number)
    try:
        # From the parent alone, over a pipe without a name that no other process has.
        target, arguments, count = pickle.loads(feed.recv_bytes())
        first, *rest = (Connection(recv_handle(feed)) for _ in range(count))
    except (EOFError, OSError):  # it is not needed
        return
    feed.close()
    target(first, *arguments, *rest)
