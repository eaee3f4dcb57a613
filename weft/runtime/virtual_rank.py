"""Virtual rank whose host code the current thread runs. Only ``weft.simulate`` starts such threads."""

from __future__ import annotations

import threading
from typing import Any

_THIS_THREAD = threading.local()


def enter_virtual_rank(cluster: Any, rank: int) -> None:
    """Make this thread run ``rank`` of a cluster (``weft.runtime.platforms.virtual``) from now on."""
    _THIS_THREAD.cluster, _THIS_THREAD.rank, _THIS_THREAD.teams = cluster, rank, {}


def on_virtual_rank() -> bool:
    """True if this thread runs a virtual rank's host code."""
    return getattr(_THIS_THREAD, "cluster", None) is not None


def rank_of_this_thread() -> int | None:
    """Virtual rank whose host code this thread runs; None outside a simulation."""
    return _THIS_THREAD.rank if on_virtual_rank() else None


def is_running() -> bool:
    """True while a simulation runs in this process, in whichever thread."""
    # Only here: the simulator's packages need not be installed where there are GPUs.
    from weft.simulator.interpreter.patching import is_active

    return is_active()


def gpu_of_this_thread() -> str | None:
    """``like`` of the simulation whose rank this thread runs; None outside one."""
    return _THIS_THREAD.cluster.like if on_virtual_rank() else None


def settle() -> None:
    """Wait for the main stream of this thread's virtual rank, before its host code reads memory."""
    if on_virtual_rank():
        _THIS_THREAD.cluster.machine.settle()


def platform_of_this_thread(heap_bytes: int | None, node_size: int | None) -> Any:
    """A new virtual platform for the rank whose host code this thread runs; None outside a simulation."""
    if not on_virtual_rank():
        return None
    return _THIS_THREAD.cluster.platform(_THIS_THREAD.rank, heap_bytes, node_size)


def shared_teams_of_this_thread() -> dict[Any, Any] | None:
    """Shared teams (``Team.of``) of the rank that this thread runs; None outside a simulation."""
    return _THIS_THREAD.teams if on_virtual_rank() else None
