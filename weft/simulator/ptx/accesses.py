"""PTX instructions that access memory or order accesses, for the threads of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from weft.simulator.places import Places, Scattered
from weft.simulator.ptx.registers import TYPES, Bits, raw, typed

_SPACES = ("global", "generic")
_SEMANTICS = ("relaxed", "acquire", "release", "acq_rel")
_SCOPES = {"sys": "sys", "system": "sys", "gpu": "gpu", "gl": "gpu", "cta": "cta", "cluster": "gpu"}
_ATOMICS = {
    "add": "add", "exch": "xchg", "and": "and", "or": "or", "xor": "xor", "min": "min", "max": "max", "cas": "cas"
}  # fmt: skip
# Most threads whose atomics are separate steps of the schedule; atomics of more threads are one step.
_SEPARATE = 32


class Memory(Protocol):
    """Part of ``interpreter.port.Port`` that these instructions use."""

    def load(self, places: Places, access: str) -> np.ndarray: ...

    def store(self, places: Places, bits: np.ndarray, access: str) -> None: ...

    def atomic(
        self,
        op: str,
        addresses: np.ndarray,
        bits: np.ndarray,
        mask: np.ndarray,
        dtype: np.dtype,
        sem: str,
        scope: str,
        access: str = "plain",
    ) -> np.ndarray: ...

    def cas(
        self, addresses: np.ndarray, compare: np.ndarray, bits: np.ndarray, sem: str, scope: str, access: str = "plain"
    ) -> np.ndarray: ...

    def barrier(self) -> None: ...

    def fence(self, scope: str) -> None: ...

    def fence_async(self) -> None: ...

    def drain_async(self) -> None: ...

    def wait_for_previous_kernel(self) -> None: ...

    def let_next_kernel_start(self) -> None: ...

    def multicast(self, addresses: np.ndarray) -> list[np.ndarray]:
        """Addresses, at each member, of multicast addresses."""


def _operation(modifiers: tuple[str, ...]) -> str | None:
    """Name of an atomic operation for values of its type; None: it is not known."""
    op, dtype = next((_ATOMICS[one] for one in modifiers if one in _ATOMICS), None), TYPES.get(modifiers[-1])
    if op == "add" and dtype is not None and dtype.kind not in "iu":
        return "fadd"
    if op in ("min", "max") and dtype is not None and dtype.kind == "u":
        return "u" + op
    return op


def _semantics(modifiers: tuple[str, ...]) -> str:
    return next((one for one in modifiers if one in _SEMANTICS), "relaxed")


def _scope(modifiers: tuple[str, ...], default: str) -> str:
    return next((_SCOPES[one] for one in modifiers if one in _SCOPES), default)


def _width(modifiers: tuple[str, ...]) -> int:
    return next((int(one[1:]) for one in modifiers if one in ("v2", "v4", "v8")), 1)


def _is_known(modifiers: tuple[str, ...]) -> bool:
    """False for shared, local and parameter memory, and for types that are not modelled."""
    return modifiers[-1] in TYPES and not {"shared", "local", "param", "const", "async"} & set(modifiers)


def _spread(addresses: np.ndarray, width: int, itemsize: int) -> np.ndarray:
    """Addresses of ``width`` elements from each address on: (threads, width)."""
    return addresses[:, None] + np.arange(width, dtype=np.uint64) * np.uint64(itemsize)


class Accesses:
    """Loads, stores, atomics and fences of the threads that are active in one block of assembly."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def load(self, modifiers: tuple[str, ...], addresses: np.ndarray, active: np.ndarray) -> list[Bits] | None:
        """Results of ``ld``: one array for each register; None for a form that is not known."""
        if not _is_known(modifiers):
            return None
        dtype, width = TYPES[modifiers[-1]], _width(modifiers)
        at = _spread(addresses, width, dtype.itemsize)
        mask = np.broadcast_to(active[:, None], at.shape)
        if "acquire" in modifiers or "relaxed" in modifiers and active.sum() * width <= _SEPARATE:
            sem, scope = _semantics(modifiers), _scope(modifiers, "gpu")
            zeros = np.zeros(at.shape, f"uint{8 * dtype.itemsize}")
            bits = self._memory.atomic("or", at, zeros, mask, zeros.dtype, sem, scope, "threads")
        else:
            strong = "volatile" in modifiers or "relaxed" in modifiers or "mmio" in modifiers
            places = Scattered(at, None if mask.all() else mask, dtype.itemsize)
            bits = self._memory.load(places, "volatile" if strong else "plain")
        return [raw(typed(column.astype(np.uint64), modifiers[-1])) for column in bits.reshape(at.shape).T]

    def store(self, modifiers: tuple[str, ...], addresses: np.ndarray, values: list[Bits], active: np.ndarray) -> bool:
        """Execute ``st`` or ``multimem.st``; False for a form that is not known."""
        if not _is_known(modifiers):
            return False
        dtype = TYPES[modifiers[-1]]
        bits = np.stack([value.astype(f"uint{8 * dtype.itemsize}") for value in values], axis=1)
        at = _spread(addresses, len(values), dtype.itemsize)
        mask = np.broadcast_to(active[:, None], at.shape)
        strong = bool({"relaxed", "release", "volatile"} & set(modifiers))
        if strong and ("release" in modifiers or active.sum() * len(values) <= _SEPARATE):
            scope = _scope(modifiers, "sys" if "volatile" in modifiers else "gpu")
            self._memory.atomic("xchg", at, bits, mask, bits.dtype, _semantics(modifiers), scope, "threads")
        else:
            places = Scattered(at, None if mask.all() else mask, dtype.itemsize)
            self._memory.store(places, bits, "relaxed" if strong else "plain")
        return True

    def atomic(
        self, modifiers: tuple[str, ...], addresses: np.ndarray, operands: list[Bits], active: np.ndarray
    ) -> Bits | None:
        """Old values of ``atom`` or ``red``; None for a form that is not known."""
        op = _operation(modifiers)
        if op is None or not _is_known(modifiers) or _width(modifiers) > 1 or len(operands) != 1 + (op == "cas"):
            return None
        kind = modifiers[-1]
        dtype = TYPES[kind]
        sem, scope = _semantics(modifiers), _scope(modifiers, "gpu")
        old = np.zeros(addresses.shape, np.uint64)
        chosen = np.flatnonzero(active)
        steps = [chosen[i : i + 1] for i in range(chosen.size)] if chosen.size <= _SEPARATE else [chosen]
        for threads in steps:
            at, values = addresses[threads], [typed(operand[threads], kind) for operand in operands]
            if op == "cas":
                unsigned = f"uint{8 * dtype.itemsize}"
                compare, new = (value.view(unsigned) for value in values)
                seen = self._memory.cas(at, compare, new, sem, scope, "threads")
            else:
                unsigned = values[0].view(f"uint{8 * dtype.itemsize}")
                seen = self._memory.atomic(op, at, unsigned, np.ones(at.shape, bool), dtype, sem, scope, "threads")
            old[threads] = seen
        return old

    def _members(self, addresses: np.ndarray, active: np.ndarray) -> list[np.ndarray]:
        """Addresses at each member of a multicast; threads that are not active may have any."""
        return self._memory.multicast(np.where(active, addresses, addresses[active.argmax()]))

    def multicast_store(
        self, modifiers: tuple[str, ...], addresses: np.ndarray, values: list[Bits], active: np.ndarray
    ) -> bool:
        """Execute ``multimem.st``, at one member after the other."""
        strong = modifiers if {"relaxed", "release"} & set(modifiers) else ("relaxed", "sys", *modifiers)
        return all(self.store(strong, at, values, active) for at in self._members(addresses, active))

    def multicast_atomic(
        self, modifiers: tuple[str, ...], addresses: np.ndarray, operands: list[Bits], active: np.ndarray
    ) -> bool:
        """Execute ``multimem.red``."""
        everywhere = self._members(addresses, active)
        return all(self.atomic(modifiers, at, operands, active) is not None for at in everywhere)

    def multicast_load(
        self, modifiers: tuple[str, ...], addresses: np.ndarray, active: np.ndarray
    ) -> list[Bits] | None:
        """Results of ``multimem.ld_reduce.add``, summed in the order of members."""
        kind, total = modifiers[-1], None
        if "add" not in modifiers or kind not in TYPES:
            return None
        for at in self._members(addresses, active):
            parts = self.load(modifiers, at, active)
            if parts is None:
                return None
            total = parts if total is None else [
                raw(typed(a, kind) + typed(b, kind)) for a, b in zip(total, parts, strict=True)
            ]  # fmt: skip
        return total

    def order(self, name: str, modifiers: tuple[str, ...]) -> bool:
        """Execute a barrier or a fence; False for one that is not known."""
        actions: dict[str, Callable[[], object]] = {
            "membar": lambda: self._memory.fence(_scope(modifiers, "sys")),
            "bar": self._memory.barrier,
            "barrier": self._memory.barrier,
        }
        if name == "fence":
            return self._fence(modifiers)
        if name in ("bar", "barrier") and modifiers[:1] not in (("sync",), ("cta",)):
            return modifiers[:1] == ("warp",)
        if name == "griddepcontrol":
            (self._memory.wait_for_previous_kernel if modifiers == ("wait",) else self._memory.let_next_kernel_start)()
            return True
        if name in actions:
            actions[name]()
        return name in actions

    def group(self, modifiers: tuple[str, ...], pending: int) -> bool:
        """Commit bulk groups, or wait until at most ``pending`` are not complete; False for another copy.

        A wait for reads (``.read``), or with groups left pending, completes no store.
        """
        if modifiers[:3] == ("async", "bulk", "wait_group") and modifiers[3:] == () and pending == 0:
            self._memory.drain_async()
        return modifiers[:2] == ("async", "bulk") and modifiers[2:3] in (("wait_group",), ("commit_group",))

    def _fence(self, modifiers: tuple[str, ...]) -> bool:
        if modifiers[:1] != ("proxy",):
            self._memory.fence(_scope(modifiers, "gpu"))
        elif modifiers[1:2] == ("async",):
            self._memory.fence_async()
        return True  # alias and tensormap proxies are not modelled
