"""Remedies for a race by its two sides: copies, host code, two writers, a polling loop."""

from __future__ import annotations

from collections.abc import Callable

from weft.check.detector.findings import Place
from weft.check.detector.thread_clocks import Access
from weft.check.detector.vector_clocks import at
from weft.simulator.machine.polling import is_polled

_STORES = ("store", "descriptor store")
_COPY, _HOST = "copy", "host"


def advice_for(kind: str, earlier: Access, later: Access, place: Callable[[tuple | None], Place | None]) -> str:
    """Remedy in one line for a race of two accesses; "" where the remedy of its kind suffices."""
    if kind != "race":
        return ""
    same_rank = earlier.thread.rank == later.thread.rank
    if _COPY in (earlier.kind, later.kind):
        return _of_copies(earlier, later) if same_rank else _of_peers_copies(earlier, later)
    if _HOST in (earlier.kind, later.kind):
        return (
            "call team.synchronize() between the two"
            if same_rank
            else "call team.barrier() between the two: host code waits there for the streams of all ranks"
        )
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
    if earlier.verb in _STORES and later.verb in _STORES:
        return "write to separate places, or mask all stores but one; order the two only if the later value must remain"
    if earlier.code is not None and earlier.code == later.code:
        return "read and write in one step, with an atomic (tl.atomic_add), or use a separate place for each program"
    return ""


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
    if earlier.verb in _STORES or earlier.kind in (_COPY, _HOST):
        return keep
    # A load too early for what the copy brings, or a copy too early for what the load wants: a schedule cannot tell.
    return (
        f"if the load wants what is copied, wait for the copy's signal before it, in each program (wl.wait, wl.chunk_wait); if "
        f"it wants what was there before, {keep}"
    )


def _polls(access: Access) -> bool:
    return access.verb == "load" and access.code is not None and is_polled(access.code[0].co_filename, access.code[1])
