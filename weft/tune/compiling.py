"""Compile a candidate without running it: what fails does so before any rank has started a kernel that waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from weft.runtime.team import Team

# Of a rank that compile at once.
THREADS = 3


def compile_only(action: Callable[[], Any], team: Team) -> None:
    """Do ``action`` with every kernel compiled and loaded, and none launched; then raise what the first of them raised.

    The host code around the kernels runs to its end even where one does not compile: it makes workspaces, which is
    collective, and counts calls, and all ranks must do both alike. What it copies meanwhile nobody reads. In the
    simulator nothing is compiled, and this does nothing.
    """
    if team.is_simulated:
        return
    failures: list[Exception] = []
    try:
        with _launches_compile(failures):
            action()
    finally:
        if team.device.type == "cuda":
            torch.cuda.synchronize()  # copies that were given to the engine are over before the next call
    if failures:
        raise failures[0]


def compile_shares(actions: Sequence[Callable[[], Any]], team: Team) -> None:
    """Each rank compiles its share of what ``actions`` launch, so that all find it in Triton's cache. Collective.

    All ranks run the host code of all actions, as in ``compile_only``. What fails here fails there again, with its reason.
    """
    if team.is_simulated:
        return
    # Half of a compilation is LLVM and ptxas, which other threads need not wait for: 22 kernels 9.1 s, by two threads 5.1.
    with ThreadPoolExecutor(THREADS) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for number, action in enumerate(actions):
            with contextlib.suppress(Exception), _launches_compile([], number % team.size == team.rank):
                action()
    if team.device.type == "cuda":
        torch.cuda.synchronize()
    team.barrier()


@contextmanager
def _launches_compile(failures: list[Exception], mine: bool = True) -> Iterator[None]:
    """``kernel[grid](…)`` compiles and loads for these very arguments, with nothing given to the GPU; unless ``mine`` it does
    nothing at all.

    Triton's ``warmup`` does it for one kernel whose arguments are at hand; here an op's own host code has them. One rank
    is one process, so nobody else's launches are caught.
    """
    launch = JITFunction.run

    def load(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not mine:
            return None
        try:
            kernel = launch(self, *args, grid=grid, warmup=True, **options)
            if isinstance(kernel, CompiledKernel) and not warmup:  # not one that a thread compiles meanwhile
                kernel._init_handles()  # too much shared memory shows here
            return kernel
        except Exception as error:  # whatever a compiler may raise drops the candidate
            failures.append(error)
            return None

    JITFunction.run = load
    try:
        yield
    finally:
        JITFunction.run = launch
