"""Workspaces of a team that grow by powers of two and are never freed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, TypeVar

from weft.runtime.arithmetic import next_power_of_2

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


T = TypeVar("T")


def grown_workspace(team: Team, key: Hashable, size: int, make: Callable[[int], T]) -> T:
    """Workspace of the team under ``key`` for ``size`` elements, made if none is large enough.

    Capacities are powers of two, so all together take less than twice the largest. None is freed, since a captured CUDA
    graph may use it. Calls of any shape share one: the kernels prove reuse from call to call.
    """
    by_capacity = team.workspace(key, dict)
    capacity = max(by_capacity, default=0)
    if capacity < size:
        capacity = capacity_for(size)
        by_capacity[capacity] = make(capacity)
    return by_capacity[capacity]


def capacity_for(size: int) -> int:
    """Capacity of a workspace for ``size`` elements: a power of two."""
    return max(1 << 16, next_power_of_2(size))
