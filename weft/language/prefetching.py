"""``prefetch``: bring memory nearer before it is needed."""

import triton

from weft.language.arguments import check_prefetch
from weft.language.lowering import stock


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
