"""Block-wide bulk copies to and from a peer. Over NVLink they are the program's own loads and stores.

``n`` counts elements of the pointers' type; ``BLOCK`` is how many the program moves at a time. All threads take part.
"""

import triton
import triton.language as tl

from weft.language.arguments import check_constants, check_pointers, check_scalars, check_signal
from weft.language.coordinates import symm_at
from weft.language.signals import SET, notify


@triton.jit
def _copy(target, source, n, BLOCK: tl.constexpr):
    """Between two CTA barriers: what any thread stored to ``source`` before is copied, and what any thread does next with
    either comes after all threads' share of the copy."""
    tl.debug_barrier()
    offsets = tl.arange(0, BLOCK)
    whole = n // BLOCK
    # Whole blocks without a mask, so that they move 16 bytes a thread; a mask would split them into single elements.
    for block in range(whole):
        at = block.to(tl.int64) * BLOCK + offsets
        tl.store(target + at, tl.load(source + at))
    at = whole.to(tl.int64) * BLOCK + offsets
    rest = at < n
    tl.store(target + at, tl.load(source + at, mask=rest), mask=rest)
    tl.debug_barrier()


@triton.jit
def copy_later(target, source, n, BLOCK: tl.constexpr, WHAT: tl.constexpr):
    """``_copy`` that promises nothing before ``quiet``. The simulator makes it at some time until then.

    WHAT  "put", "get", or "put_signal": a put whose data are delivered before this program's next signal
    """
    _copy(target, source, n, BLOCK)


@triton.jit
def put(dst, src, n, peer, team, BLOCK: tl.constexpr = 4096):
    """``dst[0:n]`` at ``peer`` = ``src[0:n]`` here. ``dst`` is symmetric.

    On return ``src`` may be overwritten. The peer may read after a ``notify`` (or ``quiet`` and any other release) of this
    program that it waited for.
    """
    check_pointers("put", dst=dst, src=src)
    check_scalars("put", n=n, peer=peer)
    check_constants("put", BLOCK=BLOCK)
    _copy(symm_at(dst, peer, team), src, tl.cast(n, tl.int64), BLOCK)


@triton.jit
def get(dst, src, n, peer, team, BLOCK: tl.constexpr = 4096):
    """``dst[0:n]`` here = ``src[0:n]`` at ``peer``. ``src`` is symmetric.

    On return this program may read ``dst``.
    """
    check_pointers("get", dst=dst, src=src)
    check_scalars("get", n=n, peer=peer)
    check_constants("get", BLOCK=BLOCK)
    _copy(dst, symm_at(src, peer, team), tl.cast(n, tl.int64), BLOCK)


@triton.jit
def put_signal(dst, src, n, signal, value, peer, team, op: tl.constexpr = SET, BLOCK: tl.constexpr = 4096):
    """``put``, then ``notify(signal, peer, value, team, op)``: who waits for the signal sees the data."""
    check_signal("put_signal", signal, value)
    check_pointers("put_signal", dst=dst, src=src)
    check_scalars("put_signal", n=n, peer=peer)
    check_constants("put_signal", op=op, BLOCK=BLOCK)
    put(dst, src, n, peer, team, BLOCK)
    notify(signal, peer, value, team, op)


@triton.jit
def put_nbi(dst, src, n, peer, team, BLOCK: tl.constexpr = 4096):
    """``put`` that may return before it has read ``src``: ``src`` may be overwritten after ``quiet(team)`` only.

    A later ``notify`` does not wait for the data, nor does a later store to the same place: put ``fence(team)``, which orders
    deliveries, or ``quiet(team)`` in between. The kernel's end completes it too.
    """
    check_pointers("put_nbi", dst=dst, src=src)
    check_scalars("put_nbi", n=n, peer=peer)
    check_constants("put_nbi", BLOCK=BLOCK)
    copy_later(symm_at(dst, peer, team), src, tl.cast(n, tl.int64), BLOCK, "put")


@triton.jit
def get_nbi(dst, src, n, peer, team, BLOCK: tl.constexpr = 4096):
    """``get`` that may return before the data are here: read ``dst`` after ``quiet(team)`` only.

    Until then ``src`` must stay as it is, and a later ``notify`` or ``fence`` does not say that it has been read. The kernel's
    end completes it too.
    """
    check_pointers("get_nbi", dst=dst, src=src)
    check_scalars("get_nbi", n=n, peer=peer)
    check_constants("get_nbi", BLOCK=BLOCK)
    copy_later(dst, symm_at(src, peer, team), tl.cast(n, tl.int64), BLOCK, "get")


@triton.jit
def put_before_signal(dst, src, n, peer, team, BLOCK: tl.constexpr):
    """The first half of ``put_signal_nbi``."""
    copy_later(symm_at(dst, peer, team), src, tl.cast(n, tl.int64), BLOCK, "put_signal")


@triton.jit
def put_signal_nbi(dst, src, n, signal, value, peer, team, op: tl.constexpr = SET, BLOCK: tl.constexpr = 4096):
    """``put_signal`` that may return early: ``src`` may be overwritten after ``quiet(team)`` only.

    A program that waits for the signal sees these data and what this program stored before, not what an earlier ``put_nbi``
    brings.
    """
    check_signal("put_signal_nbi", signal, value)
    check_pointers("put_signal_nbi", dst=dst, src=src)
    check_scalars("put_signal_nbi", n=n, peer=peer)
    check_constants("put_signal_nbi", op=op, BLOCK=BLOCK)
    put_before_signal(dst, src, n, peer, team, BLOCK)
    notify(signal, peer, value, team, op)
