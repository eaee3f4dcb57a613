"""Platform of GPUs under GSan, Triton's sanitizer for races, which holds the heap.

GSan keeps clocks for each 4 bytes of the memory that its allocator has given out, and maps them with the heap at the peers.
An access that no release and acquire order after another one ends the kernel by a device assertion, in words on standard error.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import Unsupported
from weft.runtime.platforms.cuda import CudaPlatform, private_files
from weft.runtime.team.rail import Rail
from weft.triton_api import gsan, knobs

# Process group of the ranks: GSan's hosts meet in it, and two ranks of one GPU can be in it.
BACKEND = "gloo"


def instrument(folder: str) -> None:
    """Have GSan instrument the kernels that this process compiles from now on.

    One rank of a run compiles at a time, under a lock in ``folder``, so that the next one finds the kernel in Triton's cache:
    an instrumented kernel takes the assembler seconds.
    """
    lock = os.open(os.path.join(folder, "compiling"), os.O_RDWR | os.O_CREAT, 0o600)

    def begin(**_: object) -> None:
        fcntl.flock(lock, fcntl.LOCK_EX)

    def end(**_: object) -> None:
        fcntl.flock(lock, fcntl.LOCK_UN)

    knobs.compilation.instrumentation_mode = "gsan"
    knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = begin, end


def number_ranks() -> None:
    """Tell GSan that this process's GPU is this rank's, of all ranks of the world. Before the first heap."""
    gsan().symmetric_memory.configure(dist.group.WORLD)


def in_checked_memory(main: Callable[..., Any], *args: object) -> Any:
    """``main(*args)``; the tensors that it makes meanwhile are of memory that GSan follows."""
    pool = gsan().create_mem_pool()
    with torch.cuda.use_mem_pool(pool):
        return main(*args)


class SanitizedPlatform(CudaPlatform):
    """Ranks of one node whose heap is GSan's."""

    def _map_heap(self, heap_bytes: int) -> None:
        symmetric = gsan().symmetric_memory
        self.heap = symmetric.empty(heap_bytes, dtype=torch.uint8, device=self.device)
        with private_files():
            self._handle = symmetric.rendezvous(self.heap, self.group)
        self._peers = [
            self.heap if r == self.rank else self._handle.get_buffer(r, (heap_bytes,), torch.uint8)
            for r in range(self.size)
        ]

    def _make_node(self, heap_bytes: int) -> None:
        self._refuse("a team of several nodes")

    def exchange(self, what: str, item: object) -> list[Any]:
        items = super().exchange(what, item)
        if what == "barrier":
            # Hosts order what comes before and after it. GSan learns that from a kernel that it launches.
            self._handle.barrier()
        return items

    def max_programs(self, num_warps: int, registers: int) -> int:
        return self.caps.sms  # GSan gives each program all shared memory of an SM, since its threads are SMs

    def subset(self, ranks: Sequence[int], heap_bytes: int) -> CudaPlatform | None:
        self._refuse("a sub-team")

    def rail_over(self, ranks: Sequence[int]) -> Rail:
        self._refuse("a rail")

    def _refuse(self, what: str) -> Any:
        raise Unsupported(
            f"rank {self.rank}: {what} under weft check --gpu: GSan numbers the GPUs of one team; use the team of all ranks, "
            f"or leave --gpu out"
        )
