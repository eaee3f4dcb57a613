"""Compilation of candidates without running them: failures precede kernels that wait for peers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import triton

from weft.triton_api import CompiledKernel, JITFunction

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Threads of a rank that compile at once.
THREADS = 3


def compile_only(action: Callable[[], Any], team: Team) -> None:
    """Call ``action`` with every kernel compiled, loaded and not launched; raise the first compile error.

    The host code around the kernels runs to its end even if one does not compile: it makes workspaces, which is collective, and
    counts calls, and all ranks must do both alike. Its copies are never read. In the simulator nothing is compiled, and this
    does nothing.
    """
    if team.is_simulated:
        return
    failures: list[Exception] = []
    try:
        with _launches_compile(failures):
            action()
    finally:
        if team.device.type == "cuda":
            torch.cuda.synchronize()  # copies given to the engine are complete before the next call
    if failures:
        raise failures[0]


def compile_shares(actions: Sequence[Callable[[], Any]], team: Team) -> None:
    """Compile this rank's share of the kernels that ``actions`` launch, for all ranks. Collective.

    All ranks then find them in Triton's cache. They run the host code of all actions, as in ``compile_only``. A kernel that
    fails here fails there again, with its reason.
    """
    if team.is_simulated:
        return
    # Half of a compilation is LLVM and ptxas, which run in parallel: 22 kernels 9.1 s, with two threads 5.1.
    with ThreadPoolExecutor(THREADS) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for number, action in enumerate(actions):
            with contextlib.suppress(Exception), _launches_compile([], number % team.size == team.rank):
                action()
    if team.device.type == "cuda":
        torch.cuda.synchronize()
    team.barrier()


@contextmanager
def _launches_compile(failures: list[Exception], active: bool = True) -> Iterator[None]:
    """Scope in which ``kernel[grid](…)`` compiles and loads, or without ``active`` does nothing.

    Triton's ``warmup`` does this for one kernel with given arguments; here an op's own host code has them. A rank is a process,
    so no other rank's launches are affected.
    """
    launch = JITFunction.run

    def load(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> Any:
        if not active:
            return None
        try:
            kernel = launch(self, *args, grid=grid, warmup=True, **options)
            if isinstance(kernel, CompiledKernel) and not warmup:  # not one that a thread is compiling
                kernel._init_handles()  # too much shared memory shows here
            return kernel
        except Exception as error:  # any error of a compiler drops the candidate
            failures.append(error)
            return None

    JITFunction.run = load
    try:
        yield
    finally:
        JITFunction.run = launch
