"""Hints to the compiler and the memory system, which change no result: ``zero_here`` and ``prefetch``."""

import triton

from weft.language.arguments import check_prefetch
from weft.language.lowering import stock


@triton.jit
def zero_here():
    """An int32 zero that the compiler cannot fold.

    Add ``16 * wl.zero_here()`` to an address to have it computed at this point, and not hoisted out of a loop, where it would
    occupy registers and spill. The factor keeps alignments up to 16. A plain 0 on targets other than NVIDIA's.
    """
    return stock.zero_here()


@triton.jit
def prefetch(ptr, nbytes):
    """Hint that ``nbytes`` bytes from each of ``ptr`` on will be loaded soon; they may move into the L2.

    ptr     a block of pointers to memory of this GPU, each aligned to 16 bytes
    nbytes  int32, a block of the same shape: multiples of 16, or 0 for none

    It neither waits nor changes data, so it needs no order with writers: a later write of a prefetched line goes to the L2. All
    bytes must lie within an allocation. It takes effect on sm_90 and later, and does nothing elsewhere and in the simulator.
    """
    check_prefetch(ptr, nbytes)
    stock.prefetch(ptr, nbytes)
