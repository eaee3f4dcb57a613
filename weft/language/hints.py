"""Hints to the compiler and the memory system, which change no result: ``zero_here`` and ``prefetch``."""

import triton

from weft.language.arguments import check_prefetch
from weft.language.lowering import stock


@triton.jit
def zero_here():
    """An int32 zero that the compiler cannot fold.

    Add ``16 * wl.zero_here()``, which keeps alignments up to 16, to an address to have it computed at this point and not
    hoisted out of a loop, where it would occupy registers and spill. A plain 0 on targets other than NVIDIA's.
    """
    return stock.zero_here()


@triton.jit
def prefetch(ptr, nbytes):
    """A hint that the ``nbytes`` bytes from each of ``ptr`` on will be loaded soon: they come into the L2 cache meanwhile.

    ptr     a block of pointers to memory of this GPU, each on 16 bytes
    nbytes  int32, a block of the same shape: multiples of 16, or 0 for none of it

    Nothing is waited for and nothing is changed, so it needs no order with what others write: a line that is written
    after it came in is written in the L2. It must not touch memory outside of an allocation. On sm_90 and later; does
    nothing elsewhere, nor in the simulator.
    """
    check_prefetch(ptr, nbytes)
    stock.prefetch(ptr, nbytes)
