"""Barrier on the stream: work behind it comes after all ranks' work before it.

It is no ``Op``: without tensors and with one design there is nothing to plan, explain or tune.
"""

from __future__ import annotations

import triton

import weft.language as wl
from weft.ops.registration import check_team
from weft.runtime.team.team import Team


@triton.jit
def barrier_kernel(team):
    """Barrier between the ranks.                grid: (1,)

    signals, order: weft.language.barrier. What earlier kernels of each rank's stream stored is visible to later ones
    of all. reuse: its counters only grow.
    """
    wl.barrier(team)


def barrier(team: Team) -> None:
    """Barrier between the current streams of all ranks.

    The host does not wait (``team.barrier()`` does). Captured in a CUDA graph it replays.
    """
    check_team("barrier", team)
    barrier_kernel[(1,)](team.view, num_warps=1, launch_cooperative_grid=True)
