"""Barrier of all programs of one rank's grid."""

import triton
import triton.language as tl

from weft.language.arguments import check_grid_counter, check_team
from weft.language.lowering import stock
from weft.language.ordering import gather_stores
from weft.language.signals import wait


@triton.jit
def grid_barrier(counter, team):
    """Barrier of all programs of this launch on this rank, with release and acquire.

    ``counter``: scalar pointer to one int64 of this rank, 0 at first (``team.local((1,), torch.int64)``). It only grows, so
    any number of barriers, launches and replays of a CUDA graph share it, of grids of any size, if a stream orders them.
    Promise: every store of any of the programs before it (all threads, remote ones and tensor-descriptor stores included) is
    visible to all programs after it, to plain loads and to tensor-descriptor loads. A ``notify`` by any program after it covers
    these stores, other programs' stores to peers included: GPU scope is enough here, since order passes from program to
    program whatever the scopes of its steps. ``barrier`` meets other ranks.
    Every program of the grid calls it the same number of times, and all must be resident: launch at most
    ``team.max_programs(num_warps)`` programs, with ``launch_cooperative_grid=True``, so that more are refused. Debug builds
    give up as ``wait`` does. Where a report names ``counter``, the value awaited less the value seen is the number of programs
    that are missing, once the first has come.
    """
    check_grid_counter("grid_barrier", counter)
    check_team("grid_barrier", team)
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0)
    # High half: barriers passed. Low half: programs that have arrived; the first program adds what carries the last one over.
    arrival = tl.where(is_first, 4294967296 - (programs - 1).to(tl.int64), 1)
    stock.drain_tma_stores()
    gather_stores()
    before = tl.atomic_add(counter, arrival, sem="release", scope="gpu")
    wait(counter, ((before >> 32) + 1) << 32, team)
