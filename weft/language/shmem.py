"""The primitives under OpenSHMEM's names, so that a kernel written for NVSHMEM ports line by line.

Names, argument orders and constants are those of NVSHMEM's device API, with ``team`` added at the end. Sizes of ``*mem`` calls
are bytes. The scope is the block: the whole program makes every call. Signals are uint64, as in NVSHMEM
(``team.zeros(shape, torch.uint64)``), or of any other signal type of ``weft.language.signals``.
"""

import triton
import triton.language as tl

from weft.language import bulk, coordinates, ordering, signals
from weft.language.arguments import check_constants, check_pointers, check_signal, check_team_view, signed_type_of

CMP_EQ: tl.constexpr = tl.constexpr(0)
CMP_NE: tl.constexpr = tl.constexpr(1)
CMP_GT: tl.constexpr = tl.constexpr(2)
CMP_LE: tl.constexpr = tl.constexpr(3)
CMP_LT: tl.constexpr = tl.constexpr(4)
CMP_GE: tl.constexpr = tl.constexpr(5)
SIGNAL_SET: tl.constexpr = tl.constexpr(9)
SIGNAL_ADD: tl.constexpr = tl.constexpr(10)


@triton.jit
def my_pe(team):
    """Number of this rank, an int32 scalar: ``weft.language.rank``."""
    return coordinates.rank(team)


@tl.core.builtin
def n_pes(team, _semantic=None):
    """World size, a compile-time constant: ``weft.language.num_ranks``."""
    check_team_view("n_pes", team)
    return team.size


@triton.jit
def remote_ptr(dest, pe, team):
    """``nvshmem_ptr``: ``dest`` in ``pe``'s memory, for ordinary loads and stores."""
    return coordinates.symm_at(dest, pe, team)


@triton.jit
def _bytes(ptr, primitive: tl.constexpr):
    check_pointers(primitive, ptr=ptr)
    return ptr.to(tl.pointer_type(tl.uint8), bitcast=True)


@triton.jit
def putmem_block(dest, source, nelems, pe, team):
    """Copy ``nelems`` bytes of ``source`` to ``dest`` at ``pe``; ``source`` may be reused on return."""
    bulk.put(_bytes(dest, "putmem_block"), _bytes(source, "putmem_block"), nelems, pe, team, 16384)


@triton.jit
def putmem_nbi_block(dest, source, nelems, pe, team):
    """``putmem_block`` that may return early: ``source`` may be reused after ``quiet`` only."""
    bulk.put_nbi(_bytes(dest, "putmem_nbi_block"), _bytes(source, "putmem_nbi_block"), nelems, pe, team, 16384)


@triton.jit
def getmem_block(dest, source, nelems, pe, team):
    """Copy ``nelems`` bytes of ``source`` at ``pe`` to ``dest``, which this program may read on return."""
    bulk.get(_bytes(dest, "getmem_block"), _bytes(source, "getmem_block"), nelems, pe, team, 16384)


@triton.jit
def getmem_nbi_block(dest, source, nelems, pe, team):
    """``getmem_block`` that may return early: ``dest`` may be read after ``quiet`` only."""
    bulk.get_nbi(_bytes(dest, "getmem_nbi_block"), _bytes(source, "getmem_nbi_block"), nelems, pe, team, 16384)


@triton.jit
def signal_op(sig_addr, signal, sig_op: tl.constexpr, pe, team):
    """Set or add to the signal at ``pe``, and release this program's earlier stores, as ``notify`` does.

    ``sig_op``: ``SIGNAL_SET`` or ``SIGNAL_ADD``, a compile-time constant.
    """
    check_signal("signal_op", sig_addr, signal)
    check_constants("signal_op", sig_op=sig_op)
    if sig_op == SIGNAL_ADD:
        signals.notify(sig_addr, pe, signal, team, "add")
    else:
        tl.static_assert(sig_op == SIGNAL_SET, "signal_op: sig_op must be SIGNAL_SET or SIGNAL_ADD")
        signals.notify(sig_addr, pe, signal, team, "set")


@triton.jit
def putmem_signal_block(dest, source, nelems, sig_addr, signal, sig_op: tl.constexpr, pe, team):
    """``putmem_block``, then ``signal_op``: a wait for the signal makes the data visible."""
    check_signal("putmem_signal_block", sig_addr, signal)
    check_constants("putmem_signal_block", sig_op=sig_op)
    putmem_block(dest, source, nelems, pe, team)
    signal_op(sig_addr, signal, sig_op, pe, team)


@triton.jit
def putmem_signal_nbi_block(dest, source, nelems, sig_addr, signal, sig_op: tl.constexpr, pe, team):
    """``putmem_signal_block`` that may return early: ``source`` may be reused after ``quiet`` only."""
    check_signal("putmem_signal_nbi_block", sig_addr, signal)
    check_constants("putmem_signal_nbi_block", sig_op=sig_op)
    name: tl.constexpr = "putmem_signal_nbi_block"
    bulk.put_before_signal(_bytes(dest, name), _bytes(source, name), nelems, pe, team, 16384)
    signal_op(sig_addr, signal, sig_op, pe, team)


@triton.jit
def signal_wait_until(sig_addr, cmp: tl.constexpr, cmp_value, team):
    """Wait for a signal of this rank; returns the value seen.

    ``cmp``: ``CMP_GE`` or ``CMP_GT``, a compile-time constant. Signals grow, so a wait for equality may miss its value. Both
    compare the signed difference, as ``wait`` does, where NVSHMEM compares the unsigned numbers.
    """
    check_signal("signal_wait_until", sig_addr, cmp_value)
    check_constants("signal_wait_until", cmp=cmp)
    if cmp == CMP_GT:
        # In the signal's width: one more than the largest number of a narrower type is not its smallest.
        return signals.wait(sig_addr, tl.cast(cmp_value, signed_type_of("signal_wait_until", sig_addr)) + 1, team)
    else:
        tl.static_assert(cmp == CMP_GE, "signal_wait_until: signals only grow, so cmp must be CMP_GE or CMP_GT")
        return signals.wait(sig_addr, cmp_value, team)


@triton.jit
def int_p(dest, value, pe, team):
    """Store one element to ``dest`` at ``pe``; the next ``quiet`` or ``signal_op`` delivers it."""
    tl.store(coordinates.symm_at(dest, pe, team), value)


@triton.jit
def int_g(source, pe, team):
    """Load one element of ``source`` at ``pe``."""
    return tl.load(coordinates.symm_at(source, pe, team), volatile=True)


@triton.jit
def fence(team):
    """Order deliveries: puts and stores to any PE before it are delivered before those after it."""
    ordering.fence(team)


@triton.jit
def quiet(team):
    """Complete this program's earlier puts and gets, ``_nbi_`` included; their targets are visible."""
    ordering.quiet(team)


@triton.jit
def barrier_all_block(team):
    """``quiet``, then a barrier of every rank's program of this id."""
    ordering.quiet(team)
    signals.barrier(team)


@triton.jit
def sync_all_block(team):
    """Barrier of every rank's program of this id: ``weft.language.barrier``."""
    signals.barrier(team)
