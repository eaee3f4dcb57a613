"""``zero_here``: say where in a kernel something is computed."""

import triton

from weft.language.lowering import stock


@triton.jit
def zero_here():
    """0, an int32 scalar, which the compiler does not know: what it is added to is computed here, and not before.

    Compilers move what a loop does not change out of it, addresses above all. Kept in registers along an inner loop that
    needs them all, such as the one over K of a matrix product, they are spilled. ``x + 16 * wl.zero_here()`` is ``x``, of
    the same alignment up to 16, and moves above nothing that stands before it. Nothing but 0 on GPUs other than NVIDIA's
    and in the simulator.
    """
    return stock.zero_here()
