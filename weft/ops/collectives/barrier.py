"""Barrier on the stream: later work of every rank's stream comes after earlier work of all ranks' streams."""

from __future__ import annotations

import triton

import weft.language as wl
from weft.ops.registration import check_team
from weft.runtime.team import Team


@triton.jit
def barrier_kernel(team):
    """All ranks meet.                                                                                     grid: (1,)

    signals, order: weft.language.barrier. What earlier kernels of each rank's stream stored is visible to later ones
    of all. reuse: its counters only grow.
    """
    wl.barrier(team)


def barrier(team: Team) -> None:
    """All ranks' streams meet; the host does not wait (``team.barrier()`` does). Captured in a CUDA graph it
    replays."""
    check_team("barrier", team)
    barrier_kernel[(1,)](team.view, num_warps=1, launch_cooperative_grid=True)
