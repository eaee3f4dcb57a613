"""``fence`` and ``quiet`` with their OpenSHMEM meaning."""

import triton
import triton.language as tl

from weft.language.lowering import stock


@triton.jit
def fence(team):
    """This program's puts and stores to any peer before it are delivered before those after it."""
    stock.drain_tma_stores()
    tl.debug_barrier()
    stock.fence_system(team.barriers)
    tl.debug_barrier()


@triton.jit
def quiet(team):
    """All of this program's earlier puts and gets, the ``_nbi`` ones too, are complete and visible at their targets.

    Sources of puts may be overwritten and targets of gets may be read afterwards.
    """
    fence(team)
