"""Who am I, how many are we, and where is this object in a peer's memory."""

import triton
import triton.language as tl

from weft.language.arguments import check_symmetric, check_team, check_team_view
from weft.language.lowering import stock


@triton.jit
def rank(team):
    """This rank, an int32 scalar in ``0 .. num_ranks(team) - 1``."""
    check_team("rank", team)
    return (team.coords >> 1) - 1


@tl.core.builtin
def num_ranks(team, _semantic=None):
    """The world size, a compile-time constant: ``tl.static_range(num_ranks(team))`` unrolls over the ranks."""
    check_team_view("num_ranks", team)
    return team.size


@triton.jit
def symm_at(ptr, peer, team):
    """The symmetric object behind ``ptr``, in ``peer``'s memory.

    ``ptr``: scalar pointer into this rank's symmetric heap (a tensor of ``team.empty``, ``zeros`` or ``signals``; the simulator
    refuses others by name; on a GPU the result would point anywhere). ``peer``: an int32 scalar or block, each in
    ``0 .. num_ranks(team) - 1``; the result has its shape. For ``peer == rank(team)`` it is ``ptr``. What is known of
    ``ptr``'s alignment up to 16 bytes stays known, so tile stores through the result are as wide as local ones. One load and
    one add.
    """
    check_symmetric("symm_at", ptr, peer, team)
    stock.reaches_peers(ptr, peer, team)
    item: tl.constexpr = (ptr.dtype.element_ty.primitive_bitwidth + 7) // 8
    # Deltas are multiples of 16 bytes. Said of an element offset and added to a typed pointer, the compiler keeps it;
    # through an integer cast it would be lost, and every bf16 would be stored alone.
    delta = tl.multiple_of(tl.load(team.deltas + peer) // item, 16 // item)
    return ptr + delta
