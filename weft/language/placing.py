"""``zero_here``: say where in a kernel something is computed."""

import triton

from weft.language.lowering import stock


@triton.jit
def zero_here():
    """An int32 zero that the compiler cannot fold.

    Add ``16 * wl.zero_here()``, which keeps alignments up to 16, to an address to have it computed at this point and not
    hoisted out of a loop, where it would occupy registers and spill. A plain 0 on targets other than NVIDIA's.
    """
    return stock.zero_here()
