"""Remedies for a race by its two sides: copies, rails, host code, two writers, a polling loop."""

from __future__ import annotations

from collections.abc import Callable

from weft.check.detector.findings import LOADS, STORES, Place
from weft.check.detector.thread_clocks import COPYING, DELIVERY, Access
from weft.check.detector.vector_clocks import at
from weft.simulator.machine.polling import is_polled

_COPY, _HOST, _RAIL = "copy", "host", "rail"
_NBI = (DELIVERY, COPYING)


def advice_for(kind: str, earlier: Access, later: Access, place: Callable[[tuple | None], Place | None]) -> str:
    """Remedy in one line for a race of two accesses; "" where the remedy of its kind suffices."""
    if kind == "unquieted":
        return _of_late_copies(earlier, later)
    if kind != "race":
        return ""
    remedy = _of_transport(earlier, later)
    return _of_kernels(earlier, later, place) if remedy is None else remedy


def _of_transport(earlier: Access, later: Access) -> str | None:
    """Remedy where a side is of a rail, a transfer, a copy or host code; else None."""
    same_rank = earlier.thread.rank == later.thread.rank
    if _RAIL in (earlier.thread.stream, later.thread.stream):
        return _of_rails(earlier, later)
    if any(access.thread.stream.startswith("put ") for access in (earlier, later)):  # platforms/virtual_put.py
        return "put fence(to) or a strong signal after the transfer; its source may be written after quiet()"
    if _COPY in (earlier.kind, later.kind):
        return _of_copies(earlier, later) if same_rank else _of_peers_copies(earlier, later)
    if _HOST not in (earlier.kind, later.kind):
        return None
    if same_rank:
        return "call team.synchronize() between the two"
    return "call team.barrier() between the two: host code waits there for the streams of all ranks"


def _of_kernels(earlier: Access, later: Access, place: Callable[[tuple | None], Place | None]) -> str:
    early_release = later.thread.early_release
    if early_release is not None and at(early_release[0], earlier.slot) >= earlier.time:
        where = place(early_release[1])
        return (
            f"call wl.wait_for_previous_kernel() before the notify in {where}: with launch_pdl=True the earlier kernels' "
            f"stores may land after it"
        )
    if any(_polls(access) for access in (earlier, later)):
        return (
            "poll with wl.wait, or with an atomic that acquires: a plain load orders nothing, and a compiler may take it out "
            "of the loop, which then never ends"
        )
    if earlier.verb in STORES and later.verb in STORES:
        return "write to separate places, or mask all stores but one; order the two only if the later value must remain"
    if earlier.code is not None and earlier.code == later.code:
        return _of_one_line(earlier, later)
    if earlier.verb in LOADS and later.verb in STORES:
        load, store = place(earlier.code), place(later.code)
        return (
            f"if the load in {load} wants what {store} stores: notify after the store, wait before the load; else it wants "
            f"what was there before: notify after the load, wait before the store"
        )
    return ""


def _of_one_line(earlier: Access, later: Access) -> str:
    if any(access.sync.address is not None for access in (earlier, later)):  # they take turns by signals
        return (
            "let each turn notify after its store and wait for the turn before it ahead of its load; an atomic "
            "(tl.atomic_add) only if the order does not matter"
        )
    return (
        "read and write in one step, with an atomic (tl.atomic_add), or use a separate place for each program, if the "
        "order is to be fixed"
    )


def _of_late_copies(earlier: Access, later: Access) -> str:
    """Remedy for an access to what a copy that is complete only after ``quiet`` may still read or write."""
    copy = earlier if earlier.kind in _NBI else later
    reads, name = copy.verb.startswith("load"), copy.verb.rpartition(" ")[2]
    if earlier.thread is later.thread:
        if reads and not name.startswith("get"):
            return (
                f"call wl.quiet(team) before the source of {name} is written again: wl.fence completes nothing, nor does an "
                f"answer of the receiver that depends on the data (docs/check-model.md)"
            )
        return f"call wl.quiet(team) between {name} and the access: only that completes it"
    if copy.kind == DELIVERY:
        return f"call wl.fence(team) or wl.quiet(team) between {name} and the notify: a notify alone does not wait for the copy"
    return f"call wl.quiet(team) between {name} and the notify: a fence orders the delivery of puts alone"


def _of_rails(earlier: Access, later: Access) -> str:
    """Remedy for pieces of a rail, by the order of issue."""
    rail, other = (earlier, later) if earlier.thread.stream == _RAIL else (later, earlier)
    forked = "call rail.fork() after it: a rail waits only for main-stream work before fork()"
    if rail.verb == "read":  # at the receiver, so that the order of issue is not known
        return (
            f"if the piece sends what is written here, {forked}; else write only after rail.after(mark) or rail.join()"
        )
    if other.thread.grid is not None:
        rail_first = rail.launches is None or other.thread.launch > rail.launches
    else:
        rail_first = rail.issued is None or other.issued is None or rail.issued < other.issued
    if not rail_first:
        return f"if the piece is to come after the other access, {forked}"
    return (
        "call rail.after(mark) of the piece, or rail.join(), before it is used; a kernel may wait for the piece's own flag "
        "instead (Piece(landed=...), wl.wait)"
    )


def _of_copies(earlier: Access, later: Access) -> str:
    """Remedy for a copy and the main stream of its rank, by the order of issue, not of execution."""
    copy, other = (earlier, later) if earlier.kind == _COPY else (later, earlier)
    copy_first = copy is earlier
    if other.kind == _COPY or copy.launches is None:
        return ""
    if other.thread.grid is not None:
        copy_first = other.thread.launch > copy.launches
    if copy_first:
        return "call team.copy_engine.join() after the copy: until then the main stream runs concurrently with it"
    return "call team.copy_engine.fork() before the copy: a copy waits only for main-stream work issued before fork()"


def _of_peers_copies(earlier: Access, later: Access) -> str:
    if later.kind != _COPY:
        return (
            "send team.copy_engine.signal() after the copy and wait for it (wl.wait, wl.chunk_wait) in each program that uses "
            "it, or join() on its rank and team.barrier()"
        )
    keep = "call team.barrier() before the copy, or fork() after a kernel that waits for the other rank"
    if earlier.verb in STORES or earlier.kind in (_COPY, _HOST):
        return keep
    # A load too early for what the copy brings, or a copy too early for what the load wants: a schedule cannot tell.
    return (
        f"if the load wants what is copied, wait for the copy's signal before it, in each program (wl.wait, wl.chunk_wait); if "
        f"it wants what was there before, {keep}"
    )


def _polls(access: Access) -> bool:
    return access.verb == "load" and access.code is not None and is_polled(access.code[0].co_filename, access.code[1])
