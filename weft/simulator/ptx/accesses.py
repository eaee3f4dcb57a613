"""PTX instructions that access memory or order accesses, for the threads of a program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from weft.simulator.places import Order, Scattered
from weft.simulator.ptx.registers import PACKED, TYPES, Bits, as_bits, packed, parts_of, raw, reduced, typed

if TYPE_CHECKING:
    from weft.simulator.interpreter.port import Port

_SEMANTICS = ("relaxed", "acquire", "release", "acq_rel")
_SCOPES = {"sys": "sys", "gpu": "gpu", "gl": "gpu", "cta": "cta", "cluster": "gpu"}
_ATOMICS = {
    "add": "add", "exch": "xchg", "and": "and", "or": "or", "xor": "xor", "min": "min", "max": "max", "cas": "cas"
}  # fmt: skip
_ANYWHERE = frozenset({"global", "sys", "gpu", "cta", "cluster"})
_VECTORS = frozenset({"v2", "v4", "v8"})
# Hints, which have no effect; with the last one comes an operand more.
CACHE_HINT = "L2::cache_hint"
_HINTS = frozenset({
    *(f"L1::{how}" for how in ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")),
    *(f"L2::{how}" for how in ("evict_normal", "evict_first", "evict_last", "64B", "128B", "256B")), CACHE_HINT,
})  # fmt: skip
_REDUCTIONS = _ATOMICS.keys() - {"exch", "cas"}
_PLAIN = _ANYWHERE | _VECTORS | _HINTS | {"weak", "volatile", "relaxed", "mmio"}
# Modifiers, apart from the type, of each instruction.
_MODIFIERS = {
    "ld": _PLAIN | {"acquire", "nc", "ca", "cg", "cs", "lu", "cv"},
    "ldu": _VECTORS | {"global"},
    "st": _PLAIN | {"release", "wb", "cg", "cs", "wt"},
    "atom": _ANYWHERE | {*_SEMANTICS, *_ATOMICS, "noftz", CACHE_HINT},
    "red": _ANYWHERE | _REDUCTIONS | {"relaxed", "release", "noftz", CACHE_HINT},
    "multimem.ld_reduce": _ANYWHERE | _VECTORS | _REDUCTIONS | {"weak", "relaxed", "acquire", "acc::f32"},
    "multimem.st": _ANYWHERE | _VECTORS | {"weak", "relaxed", "release"},
    "multimem.red": _ANYWHERE | _REDUCTIONS | {"relaxed", "release"},
}  # fmt: skip
# Orders of a fence. One of a single direction counts as one of both.
_FENCES = ((), ("acq_rel",), ("sc",), ("acquire",), ("release",))
# Proxy fences without effect: of shared memory, of aliases and of tensor maps, which are not modelled.
_IDLE_PROXIES = [
    ("proxy", "alias"), ("proxy", "async", "shared::cta"), ("proxy", "async", "shared::cluster"),
    *(("proxy", "tensormap::generic", way, scope) for way in ("acquire", "release") for scope in _SCOPES.keys() - {"gl"}),
]  # fmt: skip
_BARRIERS = [("sync",), ("cta", "sync")]
# Barriers and fences by name and modifiers: the method of ``Port`` and its argument, () for what has no effect.
_ORDERS: dict[str, dict[tuple[str, ...], tuple[str, ...]]] = {
    "bar": {**dict.fromkeys(_BARRIERS, ("barrier",)), ("warp", "sync"): ()},
    "barrier": dict.fromkeys([*_BARRIERS, *((*one, "aligned") for one in _BARRIERS)], ("barrier",)),
    "fence": {(*order, scope): ("fence", _SCOPES[scope]) for order in _FENCES for scope in _SCOPES if scope != "gl"}
    | dict.fromkeys([("proxy", "async"), ("proxy", "async", "global")], ("fence_async",))
    | dict.fromkeys(_IDLE_PROXIES, ()),
    "membar": {(scope,): ("fence", _SCOPES[scope]) for scope in ("cta", "gl", "sys")} | {("proxy", "alias"): ()},
    "griddepcontrol": {("wait",): ("wait_for_previous_kernel",), ("launch_dependents",): ("let_next_kernel_start",)},
}
# At most one of each.
_EXCLUSIVE = (frozenset({"weak", "volatile", *_SEMANTICS}), frozenset(_SCOPES), _VECTORS)
# Most threads whose atomics are separate steps of the schedule; atomics of more threads are one step.
_SEPARATE = 32


def _operation(modifiers: tuple[str, ...]) -> str | None:
    """Name of an atomic operation for values of its type; None: it is not known."""
    op, dtype = next((_ATOMICS[one] for one in modifiers if one in _ATOMICS), None), TYPES.get(modifiers[-1])
    if op == "add" and dtype is not None and dtype.kind not in "iu":
        return "fadd"
    if op in ("min", "max") and dtype is not None and dtype.kind == "u":
        return "u" + op
    return op


def _order(modifiers: tuple[str, ...], scope: str = "gpu") -> Order:
    """Order of an instruction of single threads. ``scope``: if it names none."""
    sem = next((one for one in modifiers if one in _SEMANTICS), "relaxed")
    return Order(sem, next((_SCOPES[one] for one in modifiers if one in _SCOPES), scope), "threads")


def _width(modifiers: tuple[str, ...]) -> int:
    return next((int(one[1:]) for one in modifiers if one in ("v2", "v4", "v8")), 1)


def refusal(name: str, modifiers: tuple[str, ...]) -> str:
    """Reason why an access is not known by its modifiers; "" if it is known."""
    if name == "multimem":
        name, modifiers = f"multimem.{'.'.join(modifiers[:1])}", modifiers[1:]
    known = _MODIFIERS.get(name)
    if known is None:
        return f"{name} is not modelled"
    *options, kind = modifiers or ("",)
    if unknown := [f".{one}" for one in options if one not in known]:
        return f"{name} with {', '.join(unknown)} is not modelled"
    if kind not in TYPES and (kind not in PACKED or name in ("ld", "ldu", "st")):
        return f"its last modifier, .{kind}, is no type that is modelled" if kind else "it has no type"
    given = ([f".{one}" for one in options if one in group] for group in _EXCLUSIVE)
    return next((f"{' and '.join(several)} exclude each other" for several in given if len(several) > 1), "")


def _spread(addresses: np.ndarray, width: int, itemsize: int) -> np.ndarray:
    """Addresses of ``width`` elements from each address on: (threads, width)."""
    return addresses[:, None] + np.arange(width, dtype=np.uint64) * np.uint64(itemsize)


class Accesses:
    """Loads, stores, atomics and fences of the threads that are active in one block of assembly."""

    def __init__(self, port: Port) -> None:
        self._port = port

    def load(self, modifiers: tuple[str, ...], addresses: np.ndarray, active: np.ndarray) -> list[Bits]:
        """Results of ``ld``: one array for each register."""
        dtype, width = TYPES[modifiers[-1]], _width(modifiers)
        at = _spread(addresses, width, dtype.itemsize)
        mask = np.broadcast_to(active[:, None], at.shape)
        if "acquire" in modifiers or "relaxed" in modifiers and active.sum() * width <= _SEPARATE:
            zeros = np.zeros(at.shape, f"uint{8 * dtype.itemsize}")
            bits = self._port.atomic("or", at, zeros, mask, _order(modifiers))
        else:
            strong = {"volatile", "relaxed", "mmio", "cv"} & set(modifiers)
            places = Scattered(at, None if mask.all() else mask, dtype.itemsize)
            bits = self._port.load(places, "volatile" if strong else "plain")
        return [raw(typed(column.astype(np.uint64), modifiers[-1])) for column in bits.reshape(at.shape).T]

    def store(self, modifiers: tuple[str, ...], addresses: np.ndarray, values: list[Bits], active: np.ndarray) -> bool:
        """Execute ``st`` or ``multimem.st``; False where the number of values is not the vector's."""
        if len(values) != _width(modifiers):
            return False
        dtype = TYPES[modifiers[-1]]
        bits = np.stack([value.astype(f"uint{8 * dtype.itemsize}") for value in values], axis=1)
        at = _spread(addresses, len(values), dtype.itemsize)
        mask = np.broadcast_to(active[:, None], at.shape)
        strong = bool({"relaxed", "release", "volatile"} & set(modifiers))
        if strong and ("release" in modifiers or active.sum() * len(values) <= _SEPARATE):
            self._port.atomic("xchg", at, bits, mask, _order(modifiers, "sys" if "volatile" in modifiers else "gpu"))
        else:
            places = Scattered(at, None if mask.all() else mask, dtype.itemsize)
            self._port.store(places, bits, "relaxed" if strong else "plain")
        return True

    def atomic(
        self, modifiers: tuple[str, ...], addresses: np.ndarray, operands: list[Bits], active: np.ndarray
    ) -> Bits | None:
        """Old values of ``atom`` or ``red``; None for a form that is not known."""
        kind = modifiers[-1]
        if kind in PACKED:
            return self._atomic_of_packed(modifiers, addresses, operands, active)
        op = _operation(modifiers)
        if op is None or len(operands) != 1 + (op == "cas"):
            return None
        order = _order(modifiers)
        old = np.zeros(addresses.shape, np.uint64)
        chosen = np.flatnonzero(active)
        steps = [chosen[i : i + 1] for i in range(chosen.size)] if chosen.size <= _SEPARATE else [chosen]
        for threads in steps:
            at, values = addresses[threads], [typed(operand[threads], kind) for operand in operands]
            if op == "cas":
                compare, new = (value.view(f"uint{8 * value.itemsize}") for value in values)
                old[threads] = self._port.cas(at, compare, new, order)
            else:
                old[threads] = self._port.atomic(op, at, values[0], np.ones(at.shape, bool), order)
        return old

    def _atomic_of_packed(
        self, modifiers: tuple[str, ...], addresses: np.ndarray, operands: list[Bits], active: np.ndarray
    ) -> Bits | None:
        """``atomic`` of several values in a register, each of which is an atomic access."""
        one, count = PACKED[modifiers[-1]]
        nbytes, operands = TYPES[one].itemsize, [parts_of(bits, count, 8 * TYPES[one].itemsize) for bits in operands]
        if len(operands) != 1 or not {"add", "min", "max"} & set(modifiers):
            return None
        kinds = (*modifiers[:-1], one)
        old = [self.atomic(kinds, addresses + np.uint64(i * nbytes), [operands[0][i]], active) for i in range(count)]
        return packed(old, 8 * nbytes)

    def _members(self, addresses: np.ndarray, active: np.ndarray) -> list[np.ndarray]:
        """Addresses at each member of a multicast; threads that are not active may have any."""
        return self._port.multicast(np.where(active, addresses, addresses[active.argmax()]))

    def multicast_store(
        self, modifiers: tuple[str, ...], addresses: np.ndarray, values: list[Bits], active: np.ndarray
    ) -> bool:
        """Execute ``multimem.st``, at one member after the other."""
        strong = () if {"relaxed", "release"} & set(modifiers) else ("relaxed", "sys")
        strong = (*strong, *modifiers[:-1], as_bits(modifiers[-1]))
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
        """Results of ``multimem.ld_reduce``, in the order of members; None for a form that is not known."""
        op, kind = next((one for one in modifiers if one in _REDUCTIONS), None), modifiers[-1]
        if op is None:
            return None
        loads = (*modifiers[:-1], as_bits(kind))
        parts = [self.load(loads, at, active) for at in self._members(addresses, active)]
        totals = [reduced(op, kind, values, "acc::f32" in modifiers) for values in zip(*parts, strict=True)]
        return None if any(total is None for total in totals) else totals

    def order(self, name: str, modifiers: tuple[str, ...], by_first: bool) -> bool:
        """Execute a barrier or a fence; False for one that is not known.

        ``by_first``: thread 0 executes it, which makes the program's scalar accesses. Without it a fence counts for no thread.
        """
        action = _ORDERS.get(name, {}).get(modifiers)
        if action and (by_first or name not in ("fence", "membar")):
            method, *arguments = action
            getattr(self._port, method)(*arguments)
        return action is not None

    def group(self, modifiers: tuple[str, ...], pending: int | None, active: np.ndarray) -> bool:
        """Commit bulk groups, or wait until at most ``pending`` are not complete; False for another copy.

        A wait for reads (``.read``), or with groups left pending, completes no store. Triton stores to a descriptor by the
        elected thread of warp 0, whose groups a wait by other threads does not concern.
        """
        if modifiers == ("async", "bulk", "commit_group"):
            return pending is None
        if modifiers == ("async", "bulk", "wait_group") and pending == 0 and active[0]:
            self._port.drain_async(by_all=False)  # a thread waits for groups that it has committed
        return (
            modifiers[:3] == ("async", "bulk", "wait_group")
            and modifiers[3:] in ((), ("read",))
            and pending is not None
        )
