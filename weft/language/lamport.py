"""Data that are their own flag: L. Lamport's one-word messages, as in TensorRT-LLM's all-reduce.

A buffer is cleared to the bit pattern of -0.0. A writer stores numbers, never -0.0; a reader loads until no -0.0 is left.
This takes one NVLink hop in place of two (data, then flag), and no fence. An element is the signal of itself only: it orders no
other store of the writer. For fp16, bf16 and fp32.

Reuse: rotate stages by epoch. ``lamport_receive`` loads one stage and clears the one before, and returns once it has *seen* the
cleared values in memory. Data that the program sends afterwards therefore tell its peers that the stage is free. With strict
turns (send, receive, send, ...) three stages suffice: a peer sends epoch e + 2 after it has received this rank's data of
e + 1, which left after e - 1 was cleared.

``words``, a scalar pointer to symmetric memory, names an exchange in the timeline of ``weft.trace``: an arrow joins the put
that ``end_put`` marked with the same element and the load that waited for it. Without it a GPU's timeline lacks the wait.
"""

import triton
import triton.language as tl

from weft.language.arguments import check_lamport
from weft.language.coordinates import rank
from weft.language.lowering import stock, tracing


@triton.jit
def lamport_store(ptr, x, mask):
    """Store ``x`` so that a ``lamport_load`` of the same elements sees it arrive.

    ``x`` is rounded to the buffer's dtype first; a result of -0.0 is sent as +0.0.
    """
    check_lamport("lamport_store", mask, ptr=ptr)
    x = x.to(ptr.dtype.element_ty)
    stock.store_flagged(ptr, tl.where(x == 0, tl.zeros_like(x), x), mask)


@triton.jit
def lamport_load(ptr, mask, team, words=None):
    """Load the elements at ``ptr``, once each has been written since it was cleared.

    Masked-off elements are 0. Debug builds give up like ``wait``.
    """
    check_lamport("lamport_load", mask, ptr=ptr)
    began, rounds = tracing.begin(team), 0
    x = stock.load_flagged(ptr, mask)
    if team.patience_us > 0:
        started, least = stock.microseconds(), tl.min(ptr.to(tl.int64))
        missing = stock.count_unwritten(x)
        while missing > 0:
            if team.trace is not None:
                rounds += 1
            x = stock.load_flagged(ptr, mask)
            missing = stock.count_unwritten(x)
            if (missing > 0) & (stock.microseconds() - started > team.patience_us):
                stock.give_up(least, 0, ">=", -missing, team)
    else:
        while stock.count_unwritten(x) > 0:
            if team.trace is not None:
                rounds += 1
            x = stock.load_flagged(ptr, mask)
    x = _seen_by_all(x, ptr, mask)
    _record_wait(words, began, rounds, team)
    return x


@triton.jit
def _record_wait(words, began, rounds, team):
    """Record a load that had to poll, ``rounds`` times."""
    if words is not None:
        tracing.record("words", began, words, rank(team), 0, rounds > 0, team)


@triton.jit
def _seen_by_all(x, ptr, mask):
    """``x``, the arrived elements at ``ptr``, once all warps have them and they may be cleared."""
    if stock.is_loaded_by_several_warps(x):
        # Several warps load the same element of a small block, and a warp may continue after another warp saw it arrive. So
        # each loads once more, and none may clear the block before all have seen it.
        tl.debug_barrier()
        x = stock.load_flagged(ptr, mask)
        tl.debug_barrier()
    return x


@triton.jit
def lamport_receive(ptr, old, mask, team, ordered=True, words=None):
    """``lamport_load`` of ``ptr`` and ``lamport_clear`` of ``old``, which no other program touches.

    If ``ordered`` (a bool, at compile time or at run time), all later stores of this program come after the clearing: it polls
    ``old`` until it reads as cleared. This suffices because a thread loads what it has itself stored, and because a volatile
    load is served by the L2 of this GPU, which is also where peers' stores arrive. PTX alone does not promise it. A fence
    would, but it also waits for all stores to peers. If not ``ordered``, the clearing is complete when the kernel ends.
    """
    check_lamport("lamport_receive", mask, ptr=ptr, old=old)
    lamport_clear(old, mask)
    if ordered:
        while stock.count_written(stock.load_flagged(old, mask), mask) > 0:
            pass
    return lamport_load(ptr, mask, team, words)


@triton.jit
def lamport_receive_keyed(ptr, old, mask, key, old_key, key_mask, team, ordered=True, words=None):
    """``lamport_receive`` of a block and of the few elements at ``key`` that were stored after it.

    Both arrive in the same round trips to memory. Returns a pair of blocks.
    """
    check_lamport("lamport_receive_keyed", mask, ptr=ptr, old=old)
    check_lamport("lamport_receive_keyed", key_mask, key=key, old_key=old_key)
    lamport_clear(old, mask)
    lamport_clear(old_key, key_mask)
    if ordered:
        y = stock.load_flagged(old_key, key_mask)
        while stock.count_written(stock.load_flagged(old, mask), mask) > 0:
            pass
        left = stock.count_written(y, key_mask)
        while left > 0:
            left = stock.count_written(stock.load_flagged(old_key, key_mask), key_mask)
    return lamport_load_keyed(ptr, mask, key, key_mask, team, words)


@triton.jit
def lamport_load_keyed(ptr, mask, key, key_mask, team, words=None):
    """``lamport_load`` of a block and of the few elements at ``key`` that were stored after it.

    Both arrive in the same round trips to memory. Returns a pair of blocks.
    """
    check_lamport("lamport_load_keyed", mask, ptr=ptr)
    check_lamport("lamport_load_keyed", key_mask, key=key)
    if team.patience_us > 0:
        x = lamport_load(ptr, mask, team, words)
        y = lamport_load(key, key_mask, team)
    else:
        began, rounds = tracing.begin(team), 0
        x = stock.load_flagged(ptr, mask)
        y = stock.load_flagged(key, key_mask)
        while stock.count_unwritten(x) > 0:
            if team.trace is not None:
                rounds += 1
            x = stock.load_flagged(ptr, mask)
            y = stock.load_flagged(key, key_mask)
        x = _seen_by_all(x, ptr, mask)
        # Apart from the block: a warp continues after what it has itself seen of few keys.
        while stock.count_unwritten(y) > 0:
            if team.trace is not None:
                rounds += 1
            y = stock.load_flagged(key, key_mask)
        if stock.is_counted_by_several_warps(y):
            tl.debug_barrier()
            y = stock.load_flagged(key, key_mask)
        _record_wait(words, began, rounds, team)
    # A fast warp gets here while a slow one still loads the key, which must not be cleared yet.
    tl.debug_barrier()
    return x, y


@triton.jit
def lamport_clear(ptr, mask):
    """Mark the elements at ``ptr`` as unwritten."""
    check_lamport("lamport_clear", mask, ptr=ptr)
    # From its bits: Triton 3.6 turns the constant -0.0 into +0.0.
    dtype: tl.constexpr = ptr.dtype.element_ty
    if dtype.primitive_bitwidth == 32:
        unwritten = tl.full(ptr.shape, -2147483648, tl.int32).to(dtype, bitcast=True)
    else:
        unwritten = tl.full(ptr.shape, -32768, tl.int16).to(dtype, bitcast=True)
    stock.store_flagged(ptr, unwritten, mask)
