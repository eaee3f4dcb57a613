"""NVLink multicast (multimem): one store reaches all ranks, one load reduces over them.

The primitives exist so that kernels can be written against them, but have no lowering yet: using one is a compile-time error.
``team.caps.multicast`` tells the host whether the heap has a multicast address.
"""

import triton
import triton.language as tl


@triton.jit
def multimem_store(ptr, x, mask, team):
    """Store ``x`` at the same symmetric address of every rank."""
    tl.static_assert(
        team.multicast > 0,
        "multimem_store needs NVLink multicast, which this team lacks (team.caps.multicast); "
        "tl.store through wl.symm_at(ptr, peer, team) in a loop over wl.num_ranks(team)",
    )
    tl.static_assert(
        False,
        "multimem_store has no lowering yet; tl.store through wl.symm_at(ptr, peer, team) in a loop over wl.num_ranks(team)",
    )


@triton.jit
def multimem_load_reduce(ptr, mask, team):
    """Sum over all ranks of the elements at one symmetric address."""
    tl.static_assert(
        team.multicast > 0,
        "multimem_load_reduce needs NVLink multicast, which this team lacks (team.caps.multicast); "
        "add up tl.load of wl.symm_at(ptr, peer, team) in a loop over wl.num_ranks(team)",
    )
    tl.static_assert(
        False,
        "multimem_load_reduce has no lowering yet; add up tl.load of wl.symm_at(ptr, peer, team) in a loop over "
        "wl.num_ranks(team)",
    )
