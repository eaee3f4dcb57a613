"""Barrier on the stream: later work waits for all ranks' earlier work.

It is no ``Op``: torch's ops have tensors, and a case has inputs and a result.
"""

from __future__ import annotations

import torch
import triton

import weft.language as wl
from weft.ops.op import without_plan
from weft.ops.registration import check_team
from weft.runtime.launching import launch_of
from weft.runtime.team.rail import Piece
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

    The host does not wait (``team.barrier()`` does). Captured in a CUDA graph it replays. Over several nodes each rank hears
    from its rail between two barriers of its node.
    """
    check_team("barrier", team, over_nodes=True)
    team.compare("weft.ops.barrier", {})
    _within(team.node)
    if team.rail is not None:
        _over(team)
        _within(team.node)


without_plan("barrier", "one kernel of one program for each node, and a word by rail between nodes")


def _within(team: Team) -> None:
    launch = launch_of(team, barrier_kernel, (), lambda: {"num_warps": 1, "launch_cooperative_grid": True})
    launch(1, team.view)


def _over(team: Team) -> None:
    """Have the current stream wait until all ranks of the rail have come here."""
    rail = team.rail
    word, heard = (torch.zeros(size, dtype=torch.int32, device=team.device) for size in (1, rail.size))
    rail.fork()
    for step in range(1, rail.size):
        to, source = (rail.index + step) % rail.size, (rail.index - step) % rail.size
        rail.exchange([Piece(send=word, to=to, receive=heard[source : source + 1], source=source)])
    rail.join()
