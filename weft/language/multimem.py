"""NVLink multicast (multimem): one store reaches all ranks of a node, one load sums over them.

From sm_90 on, where ``team.caps.multicast`` is true: the heap then has a multicast address besides the plain one. Each access
is of 16 bytes, eight fp16 or bf16 or four fp32. It compiles, and has never run on a GPU: the tests' machines have no multicast.
The simulator does the same by loads and stores of every rank, in rank order; a switch may add in another order.

Accesses are relaxed. What a rank reads from peers is ordered by ``barrier``, or ``notify`` and ``wait``, as with plain loads.
"""

import triton
import triton.language as tl

from weft.language.arguments import check_multimem
from weft.language.coordinates import num_ranks
from weft.language.lowering import ptx

# Values of ``team.multicast``: none, multimem instructions, loads and stores of every rank.
INSTRUCTIONS = tl.constexpr(1)


@triton.jit
def multimem_store(ptr, words, mask, team):
    """Store 16 bytes at the same symmetric address of every rank, this one included.

    ptr    block of pointers into this rank's symmetric heap, to fp16, bf16 or fp32, each a multiple of 16 bytes
    words  four int32 blocks of its shape, as of ``multimem_load_reduce``: the bits to store
    mask   block of its shape
    """
    check_multimem("multimem_store", ptr, mask, team)
    if team.multicast == INSTRUCTIONS:
        ptx.multimem_st(_at_all(ptr, team), words[0], words[1], words[2], words[3], mask)
    else:
        for peer in range(num_ranks(team)):
            target = _words_at(ptr, peer, team)
            for word in tl.static_range(4):
                tl.store(target + word, words[word], mask=mask)


@triton.jit
def multimem_load_reduce(ptr, mask, team):
    """Sum the 16 bytes at one symmetric address over all ranks.

    Returns four int32 blocks of ``ptr``'s shape, the sums' bits.

    ptr, mask  as in ``multimem_store``; where masked off the bits are 0

    Sums are made in fp32 and rounded once to the pointers' dtype. In which order a switch adds is not promised, so two ranks
    that load the same sum may get different last bits: let one rank load it and store it to all.
    """
    check_multimem("multimem_load_reduce", ptr, mask, team)
    if team.multicast == INSTRUCTIONS:
        return ptx.multimem_ld_reduce(_at_all(ptr, team), mask)
    else:
        return (
            _sum_of_word(ptr, 0, mask, team),
            _sum_of_word(ptr, 1, mask, team),
            _sum_of_word(ptr, 2, mask, team),
            _sum_of_word(ptr, 3, mask, team),
        )


@triton.jit
def _at_all(ptr, team):
    """Multicast address of symmetric objects: the last of the team's deltas leads there."""
    return ptr + tl.load(team.deltas + num_ranks(team)) // (ptr.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def _words_at(ptr, peer, team):
    """Addresses in ``peer``'s memory, as of int32."""
    there = ptr + tl.load(team.deltas + peer) // (ptr.dtype.element_ty.primitive_bitwidth // 8)
    return there.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def _sum_of_word(ptr, word: tl.constexpr, mask, team):
    """Bits of the sum of one word of four, in fp32 and rounded once."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    low = tl.zeros(ptr.shape, tl.float32)
    high = tl.zeros(ptr.shape, tl.float32)
    for peer in range(num_ranks(team)):
        bits = tl.load(_words_at(ptr, peer, team) + word, mask=mask, other=0)
        if dtype == tl.float32:
            low += bits.to(tl.float32, bitcast=True)
        else:
            low += bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
            high += (bits >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    if dtype == tl.float32:
        return low.to(tl.int32, bitcast=True)
    else:
        below = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return (high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16) | below
