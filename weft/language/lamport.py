"""Data that are their own flag (L. Lamport's one-word messages; TensorRT-LLM's and FlashInfer's all-reduce use them so).

A buffer is cleared to the bit pattern of -0.0. A writer stores numbers, never -0.0; a reader loads until no -0.0 is left.
One NVLink crossing in place of two (data, then flag), and no fence: an element is its own signal, so nothing else that
the writer stored is ordered by it. For fp16, bf16 and fp32.

Reuse: rotate three buffers by epoch and clear, in epoch e, the one that epoch e - 1 read. A peer writes into it again in
epoch e + 2, which it can reach only after it has this rank's data of epoch e + 1. Send those after the clearing and a
``fence`` (or in a later launch): nothing else keeps a slow clearing from wiping out what the peer has written since.
"""

import triton
import triton.language as tl

from weft.language.lowering import stock


@triton.jit
def lamport_store(ptr, x, mask):
    """Store ``x`` so that a ``lamport_load`` of the same elements sees it arrive; -0.0 is sent as +0.0."""
    stock.store_flagged(ptr, tl.where(x == 0, tl.zeros_like(x), x), mask)


@triton.jit
def lamport_load(ptr, mask, team):
    """The elements behind ``ptr`` (0 where masked off), once every one of them has been written since it was cleared.

    In debug builds gives up like ``wait``.
    """
    x = tl.load(ptr, mask=mask, other=0.0, volatile=True)
    if team.patience_us > 0:
        started = stock.microseconds()
        missing = stock.count_unwritten(x)
        while missing > 0:
            x = tl.load(ptr, mask=mask, other=0.0, volatile=True)
            missing = stock.count_unwritten(x)
            if stock.microseconds() - started > team.patience_us:
                stock.give_up(
                    tl.min(ptr.to(tl.int64)), 0, -missing, (team.coords >> 1) - 1, team.patience_us, team.record
                )
    else:
        while stock.count_unwritten(x) > 0:
            x = tl.load(ptr, mask=mask, other=0.0, volatile=True)
    return x


@triton.jit
def lamport_clear(ptr, mask):
    """Make the elements behind ``ptr`` unwritten."""
    # By its bits: Triton 3.6 turns the constant -0.0 into +0.0.
    dtype: tl.constexpr = ptr.dtype.element_ty
    if dtype.primitive_bitwidth == 32:
        unwritten = tl.full(ptr.shape, -2147483648, tl.int32).to(dtype, bitcast=True)
    else:
        unwritten = tl.full(ptr.shape, -32768, tl.int16).to(dtype, bitcast=True)
    stock.store_flagged(ptr, unwritten, mask)
