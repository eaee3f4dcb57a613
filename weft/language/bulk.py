"""Block-wide bulk copies to and from a peer. Over NVLink they are the program's own loads and stores.

``nelems`` counts elements of the pointers' type; the copies of ``weft.language.shmem`` count bytes. The program moves
``BLOCK`` at a time, with all its threads.
"""

import triton
import triton.language as tl

from weft.language.arguments import check_constants, check_pointers, check_scalars, check_signal
from weft.language.coordinates import symm_at
from weft.language.lowering import tracing
from weft.language.signals import SET, notify


@triton.jit
def _copy(target, source, n, BLOCK: tl.constexpr):
    """Copy ``n`` elements between two CTA barriers.

    Stores of any thread to ``source`` before the call are copied. Accesses of any thread to either side after the call come
    after the whole copy.
    """
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
def _record_put(began, dst, n, peer, team):
    nbytes = tl.cast(n, tl.int64) * (dst.dtype.element_ty.primitive_bitwidth // 8)
    tracing.record("put", began, dst, peer, nbytes, True, team)


@triton.jit
def copy_later(target, source, n, BLOCK: tl.constexpr, WHAT: tl.constexpr):
    """``_copy`` without a guarantee before ``quiet``: the simulator performs it at any time until then.

    WHAT  "put", "get", or "put_signal": a put whose data are delivered before this program's next signal
    """
    _copy(target, source, n, BLOCK)


@triton.jit
def put(dst, src, nelems, peer, team, BLOCK: tl.constexpr = 4096):
    """``dst[0:nelems]`` at ``peer`` = ``src[0:nelems]`` here. ``dst`` is symmetric.

    On return ``src`` may be overwritten. The peer may read after a ``notify`` (or ``quiet`` and any other release) of this
    program that it waited for.
    """
    check_pointers("put", dst=dst, src=src)
    check_scalars("put", nelems=nelems, peer=peer)
    check_constants("put", BLOCK=BLOCK)
    began = tracing.begin(team)
    _copy(symm_at(dst, peer, team), src, tl.cast(nelems, tl.int64), BLOCK)
    _record_put(began, dst, nelems, peer, team)


@triton.jit
def get(dst, src, nelems, peer, team, BLOCK: tl.constexpr = 4096):
    """``dst[0:nelems]`` here = ``src[0:nelems]`` at ``peer``. ``src`` is symmetric.

    On return this program may read ``dst``.
    """
    check_pointers("get", dst=dst, src=src)
    check_scalars("get", nelems=nelems, peer=peer)
    check_constants("get", BLOCK=BLOCK)
    _copy(dst, symm_at(src, peer, team), tl.cast(nelems, tl.int64), BLOCK)


@triton.jit
def put_signal(dst, src, nelems, signal, value, peer, team, op: tl.constexpr = SET, BLOCK: tl.constexpr = 4096):
    """``put``, then ``notify(signal, peer, value, team, op)``: after a wait for it the data are visible."""
    check_signal("put_signal", signal, value)
    check_pointers("put_signal", dst=dst, src=src)
    check_scalars("put_signal", nelems=nelems, peer=peer)
    check_constants("put_signal", op=op, BLOCK=BLOCK)
    put(dst, src, nelems, peer, team, BLOCK)
    notify(signal, peer, value, team, op)


@triton.jit
def put_nbi(dst, src, nelems, peer, team, BLOCK: tl.constexpr = 4096):
    """``put`` that may return early: ``src`` may be overwritten after ``quiet(team)`` only.

    A later ``notify`` does not wait for the data, nor does a later store to the same place: call ``fence(team)``, which orders
    deliveries, or ``quiet(team)`` in between. The end of the kernel completes the copy too. An answer of the receiver does not
    give ``src`` back, also if it depends on the data: OpenSHMEM asks for ``quiet``, and ``weft check`` with it.
    """
    check_pointers("put_nbi", dst=dst, src=src)
    check_scalars("put_nbi", nelems=nelems, peer=peer)
    check_constants("put_nbi", BLOCK=BLOCK)
    began = tracing.begin(team)
    copy_later(symm_at(dst, peer, team), src, tl.cast(nelems, tl.int64), BLOCK, "put")
    _record_put(began, dst, nelems, peer, team)


@triton.jit
def get_nbi(dst, src, nelems, peer, team, BLOCK: tl.constexpr = 4096):
    """``get`` that may return before the data have arrived: read ``dst`` after ``quiet(team)`` only.

    Until then ``src`` must not change, and a later ``notify`` or ``fence`` does not imply that it has been read. The end of the
    kernel completes the copy too.
    """
    check_pointers("get_nbi", dst=dst, src=src)
    check_scalars("get_nbi", nelems=nelems, peer=peer)
    check_constants("get_nbi", BLOCK=BLOCK)
    copy_later(dst, symm_at(src, peer, team), tl.cast(nelems, tl.int64), BLOCK, "get")


@triton.jit
def put_before_signal(dst, src, nelems, peer, team, BLOCK: tl.constexpr):
    """First half of ``put_signal_nbi``."""
    began = tracing.begin(team)
    copy_later(symm_at(dst, peer, team), src, tl.cast(nelems, tl.int64), BLOCK, "put_signal")
    _record_put(began, dst, nelems, peer, team)


@triton.jit
def put_signal_nbi(dst, src, nelems, signal, value, peer, team, op: tl.constexpr = SET, BLOCK: tl.constexpr = 4096):
    """``put_signal`` that may return early: ``src`` may be overwritten after ``quiet(team)`` only.

    A program that waits for the signal sees these data and this program's earlier stores, but not the data of an earlier
    ``put_nbi``.
    """
    check_signal("put_signal_nbi", signal, value)
    check_pointers("put_signal_nbi", dst=dst, src=src)
    check_scalars("put_signal_nbi", nelems=nelems, peer=peer)
    check_constants("put_signal_nbi", op=op, BLOCK=BLOCK)
    put_before_signal(dst, src, nelems, peer, team, BLOCK)
    notify(signal, peer, value, team, op)
