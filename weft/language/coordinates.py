"""Rank, world size, and the address of a symmetric object in a peer's memory."""

import triton
import triton.language as tl

from weft.language.arguments import check_symmetric, check_team, check_team_view
from weft.language.lowering import stock
from weft.triton_api import builtin


@triton.jit
def rank(team):
    """Number of this rank, an int32 scalar in ``0 .. num_ranks(team) - 1``."""
    check_team("rank", team)
    return (team.coords >> 1) - 1


@builtin
def num_ranks(team, _semantic=None):
    """World size, a compile-time constant: ``tl.static_range(num_ranks(team))`` unrolls over the ranks."""
    check_team_view("num_ranks", team)
    return team.size


@triton.jit
def symm_at(ptr, peer, team):
    """Address of the symmetric object at ``ptr`` in ``peer``'s memory.

    ``ptr``: scalar pointer into this rank's symmetric heap (a tensor of ``team.empty``, ``zeros`` or ``signals``). The
    simulator refuses other objects by name; on a GPU the result would point anywhere. ``peer``: an int32 scalar or block,
    each in ``0 .. num_ranks(team) - 1``; the result has its shape. Other ranks, as of another node, are refused by the compiler
    where they are constants, and by the simulator; debug builds trap for scalars. For ``peer == rank(team)`` the result is
    ``ptr``. The compiler keeps ``ptr``'s alignment up to 16 bytes, so tile stores through the result are as wide as local ones.
    Cost: one load, one add.
    """
    check_symmetric("symm_at", ptr, peer, team)
    stock.reaches_peers(ptr, peer, team)
    item: tl.constexpr = (ptr.dtype.element_ty.primitive_bitwidth + 7) // 8
    # Deltas are multiples of 16 bytes. The compiler keeps this for an element offset added to a typed pointer. Through an
    # integer cast it would be lost, and every bf16 would be stored alone.
    delta = tl.load(team.deltas + peer)
    # A division by 1 would be folded, and the multiple with it.
    delta = tl.multiple_of(delta if item == 1 else delta // item, 16 // item)
    return ptr + delta
