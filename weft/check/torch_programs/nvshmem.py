"""NVSHMEM's device functions, as kernels of Triton call them: external functions, by symbol.

torch's ``torch.distributed._symmetric_memory._nvshmem_triton`` and other wrappers of the same library name these symbols. The
meaning is that of OpenSHMEM: a put is delivered by a later ``fence`` or ``quiet`` and not by a later ``signal_op``; a put with
signal delivers its data before the signal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from weft.errors import NotAPeer, WeftError
from weft.simulator.machine.memory import signed
from weft.simulator.machine.pointers import ADDRESS
from weft.simulator.places import Order, Scattered

if TYPE_CHECKING:
    from weft.check.torch_programs.ranks import Ranks
    from weft.check.torch_programs.symmetric import Allocation

# Comparisons of waits, by NVSHMEM's constants: EQ, NE, GT, GE. GT waits for the next number.
_COMPARISONS = {0: ("==", 0), 1: ("!=", 0), 2: (">=", 1), 5: (">=", 0)}
# Operations of signals, by the constants of NVSHMEM and of torch's documentation.
_SETS, _ADDS = (9, 0), (10, 5)
_REDUCTIONS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
_DTYPES = {"half": "float16", "float": "float32", "double": "float64"}


class Nvshmem:
    """Device functions of the calling rank's program. Addresses, numbers and results are integers."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._machine = ranks, ranks.machine
        self._functions: dict[str, Callable[..., int]] = {
            "my_pe": lambda: self._machine.rank,
            "n_pes": lambda: self._machine.world_size,
            "putmem_block": lambda to, source, nbytes, pe: self._copy(self._at(to, pe), source, nbytes),
            "getmem_block": lambda to, source, nbytes, pe: self._copy(to, self._at(source, pe), nbytes),
            "putmem_nbi_block": lambda to, source, nbytes, pe: self._copy(self._at(to, pe), source, nbytes, "put"),
            "getmem_nbi_block": lambda to, source, nbytes, pe: self._copy(to, self._at(source, pe), nbytes, "get"),
            "putmem_signal_block": self._put_signal,
            "signal_op": lambda *signal: self._change(*signal, "relaxed"),  # orders nothing that came before
            "signal_wait_until": lambda at, cmp, value: self._wait(at, cmp, value, 8),
            "int_wait_until": lambda at, cmp, value: self._wait(at, cmp, value, 4),
            "fence": self._fence,
            "quiet": self._quiet,
            "sync_all": lambda: self._meet("nvshmem_sync_all"),
            "barrier_all": self._barrier,
            "alltoallmem_block": self._all_to_all,
            "broadcastmem_block": self._broadcast,
        }

    def function(self, symbol: str) -> Callable[..., int] | None:
        """Function of a symbol; None if it is not of NVSHMEM. NotInterpretable for one that is not simulated."""
        if not (match := re.fullmatch(r"nvshmemx?_(\w+)", symbol)):
            return None
        if known := self._functions.get(match[1]):
            return known
        if reduction := re.fullmatch(r"(\w+)_(sum|prod|min|max)_reduce", match[1]):
            name, operation = reduction.groups()
            return lambda *args: self._reduce(_DTYPES.get(name, name), operation, *args)
        raise self._ranks.refuse(f"{symbol} of NVSHMEM", f"of it are simulated {', '.join(sorted(self._functions))}")

    # --- addresses ---------------------------------------------------------------------------------------------------

    def _at(self, address: int, pe: int) -> int:
        """Address in ``pe``'s memory of the symmetric object at ``address`` in this rank's."""
        address &= ADDRESS
        size = self._machine.world_size
        if not 0 <= pe < size:
            raise NotAPeer(self._machine.who(), pe, size)
        own, base = self._owner(address)
        there = next((one for one in self._allocations(pe) if one.number == own.number), None)
        if there is None:
            raise WeftError(
                f"{self._machine.who()}: rank {pe} has not allocated symmetric tensor #{own.number}; all ranks call "
                f"symm_mem.empty in one order and meet in rendezvous before a kernel takes its address"
            )
        return address - base + (there.base if base == own.base else there.pad.data_ptr())

    def _owner(self, address: int) -> tuple[Allocation, int]:
        """Allocation of this rank at an address, and where its buffer or its signal pad begins."""
        for one in self._allocations(self._machine.rank):
            for part in (one.data, one.pad):
                if 0 <= address - part.data_ptr() < part.numel():
                    return one, part.data_ptr()
        raise WeftError(
            f"{self._machine.who()}: {self._machine.memory.describe(address)} is not symmetric memory of this rank; "
            f"allocate it by symm_mem.empty"
        )

    def _allocations(self, rank: int) -> list[Allocation]:
        return [value for key, value in self._ranks.ranks[rank].kept.items() if key[0] == "allocation"]

    # --- copies ------------------------------------------------------------------------------------------------------

    def _places(self, address: int, nbytes: int, itemsize: int) -> Scattered:
        steps = np.arange(0, nbytes, itemsize, dtype=np.uint64)
        return Scattered(np.uint64(address) + steps, None, itemsize)

    def _copy(self, target: int, source: int, nbytes: int, later: str = "") -> int:
        """Copy by all threads of the program, between two CTA barriers.

        later  "put" or "get": begin it only, as ``Accesses.copy_later`` does
        """
        machine = self._machine
        machine.barrier()
        if nbytes > 0:
            itemsize = _width(target, source, nbytes)
            to, of = (self._places(address, nbytes, itemsize) for address in (target, source))
            if later:
                machine.copy_later(to, of, lambda bits: bits, later)
            else:
                machine.store(to, machine.load(of, "plain"), "plain")
        machine.barrier()
        return 0

    # --- signals and order -------------------------------------------------------------------------------------------

    def _put_signal(self, target: int, source: int, nbytes: int, at: int, value: int, operation: int, pe: int) -> int:
        self._copy(self._at(target, pe), source, nbytes)
        return self._change(at, value, operation, pe, "release")

    def _change(self, at: int, value: int, operation: int, pe: int, sem: str) -> int:
        if operation not in (*_SETS, *_ADDS):
            raise self._ranks.refuse(f"sig_op={operation}", f"pass {_SETS[0]} to set or {_ADDS[0]} to add")
        address = np.array([self._at(at, pe)], np.uint64)
        bits = np.array([value & (2**64 - 1)], np.uint64)
        name = "xchg" if operation in _SETS else "add"
        self._machine.atomic(name, address, bits, np.ones(1, bool), Order(sem, "sys"))
        return 0

    def _wait(self, at: int, cmp: int, value: int, itemsize: int) -> int:
        if cmp not in _COMPARISONS:
            raise self._ranks.refuse(f"a wait with cmp={cmp}", "wait for ==, !=, > or >= (0, 1, 2, 5)")
        self._owner(at & ADDRESS)
        comparison, more = _COMPARISONS[cmp]
        self._machine.wait_for_words([at], itemsize, signed(value, itemsize) + more, comparison)
        self._machine.fence_async()
        return 0

    def _fence(self) -> int:
        self._machine.barrier()
        self._machine.fence()
        self._machine.barrier()
        return 0

    def _quiet(self) -> int:
        self._machine.complete_copies()
        return self._fence()

    # --- collectives -------------------------------------------------------------------------------------------------

    def _meet(self, what: str) -> int:
        number = self._ranks.here.number(what)
        self._machine.barrier()
        self._ranks.meet(f"{what} (call {number})", list(range(self._machine.world_size)))
        self._machine.barrier()
        return 0

    def _barrier(self) -> int:
        self._quiet()
        return self._meet("nvshmem_barrier_all")

    def _of_world(self, team: int) -> range:
        if team != 0:
            raise self._ranks.refuse(f"team={team} of NVSHMEM", "pass 0, all ranks")
        return range(self._machine.world_size)

    def _all_to_all(self, team: int, target: int, source: int, nbytes: int) -> int:
        """Each rank fetches its part from each rank: between two meetings of all."""
        members, own = self._of_world(team), self._machine.rank
        self._meet("nvshmem_alltoallmem")
        for pe in members:
            self._copy(target + pe * nbytes, self._at(source, pe) + own * nbytes, nbytes)
        return self._meet("end of nvshmem_alltoallmem")

    def _broadcast(self, team: int, target: int, source: int, nbytes: int, root: int) -> int:
        self._of_world(team)
        self._meet("nvshmem_broadcastmem")
        self._copy(target, self._at(source, root), nbytes)
        return self._meet("end of nvshmem_broadcastmem")

    def _reduce(self, dtype: str, operation: str, team: int, target: int, source: int, count: int) -> int:
        """Elements in the order of ranks; bf16 is not simulated, since NumPy has no such sums."""
        if dtype == "bfloat16":
            raise self._ranks.refuse("a reduction of NVSHMEM in bfloat16", "reduce in float32")
        itemsize = np.dtype(dtype).itemsize
        self._meet("nvshmem_reduce")
        parts = [
            self._machine.load(self._places(self._at(source, pe), count * itemsize, itemsize), "plain").view(dtype)
            for pe in self._of_world(team)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = _REDUCTIONS[operation](total, part)
        self._machine.barrier()
        places = self._places(target, count * itemsize, itemsize)
        self._machine.store(places, total.view(f"uint{8 * itemsize}"), "plain")
        return self._meet("end of nvshmem_reduce")


def _width(*numbers: int) -> int:
    """Bytes of the widest words that addresses and sizes allow."""
    return next(width for width in (8, 4, 2, 1) if all((number & ADDRESS) % width == 0 for number in numbers))
