"""The primitives under OpenSHMEM's names, so that a kernel written for NVSHMEM ports line by line.

Names, argument orders and constants are as in NVSHMEM's device API, with ``team`` added at the end. Sizes of ``*mem`` calls
are ``nbytes``, bytes of any type. The scope is the block: the whole program makes every call. Signals are uint64, as in NVSHMEM
(``team.zeros(shape, torch.uint64)``), or of any other signal type of ``weft.language.signals``.
"""

import re

import triton
import triton.language as tl

from weft.language import bulk, coordinates, ordering, signals, waits
from weft.language.arguments import (
    check_constants,
    check_pointers,
    check_scalars,
    check_signal,
    check_signal_count,
    check_team,
    check_team_view,
    signed_type_of,
)
from weft.language.lowering import stock
from weft.triton_api import builtin

CMP_EQ: tl.constexpr = tl.constexpr(0)
CMP_NE: tl.constexpr = tl.constexpr(1)
CMP_GT: tl.constexpr = tl.constexpr(2)
CMP_LE: tl.constexpr = tl.constexpr(3)
CMP_LT: tl.constexpr = tl.constexpr(4)
CMP_GE: tl.constexpr = tl.constexpr(5)
SIGNAL_SET: tl.constexpr = tl.constexpr(9)
SIGNAL_ADD: tl.constexpr = tl.constexpr(10)
NVSHMEM_CMP_EQ, NVSHMEM_CMP_NE, NVSHMEM_CMP_GT = CMP_EQ, CMP_NE, CMP_GT
NVSHMEM_CMP_LE, NVSHMEM_CMP_LT, NVSHMEM_CMP_GE = CMP_LE, CMP_LT, CMP_GE
NVSHMEM_SIGNAL_SET, NVSHMEM_SIGNAL_ADD = SIGNAL_SET, SIGNAL_ADD


# Names of NVSHMEM, without "nvshmem_" and "nvshmemx_", that have no counterpart of the same name, and what to use. The remedies
# take the named groups of their pattern.
_TYPE, _SCOPE = r"([a-z]+\d*_)", r"(_block|_warp|_wave)?"
_ABSENT = (
    (
        r"(NVSHMEMX?_)?TEAM_\w+|team_\w+",
        "pass the argument that was team.view, of weft.init(group) or team.subset(ranks)",
    ),
    (r"\w+_on_stream", "use weft.ops, or send of a team.channel, which the host calls"),
    (
        rf"{_TYPE}?(?P<way>put|get)\d*(?P<nbi>_nbi)?{_SCOPE}",
        "use weft.language.{way}{nbi}, which takes elements of any type, or {way}mem{nbi}_block, which takes bytes",
    ),
    (
        rf"{_TYPE}?put\d*_signal(?P<nbi>_nbi)?{_SCOPE}",
        "use weft.language.put_signal{nbi}, which takes elements of any type, or putmem_signal{nbi}_block, which takes bytes",
    ),
    (rf"{_TYPE}?i(put|get)\d*{_SCOPE}", "use tl.load and tl.store through weft.language.symm_at"),
    (rf"{_TYPE}(?P<way>[pg])", "use int_{way}, which takes elements of any type"),
    (rf"{_TYPE}?wait_until_\w+_vector", "use signal_wait_until for each of the signals"),
    (rf"{_TYPE}wait_until_(?P<which>all|any)", "use wait_until_{which}, which takes signals of any type"),
    (rf"{_TYPE}?wait_until_some", "use wait_until_any, in a loop"),
    (rf"{_TYPE}?wait(_until)?", "use signal_wait_until, which takes a signal of any type"),
    (rf"{_TYPE}?test(_\w+)?", "use signal_fetch, which does not wait, and compare its result"),
    (rf"{_TYPE}?atomic_\w+", "use tl.atomic_add or another atomic through weft.language.symm_at, with scope='sys'"),
    (r"(barrier|sync)(_block)?", "use barrier_all_block or sync_all_block with the view of that team"),
    (r"\w*(broadcast|fcollect|alltoall|reduce)\w*", "use weft.ops, which launches a kernel for each collective"),
    (
        r"(?P<call>(put|get)mem(_signal)?(_nbi)?|(barrier|sync)_all|\w+(?=_warp|_wave))(_warp|_wave)?",
        "the whole program makes a call: use {call}_block",
    ),
    (r"ptr", "use remote_ptr"),
    (r"(remote_)?mc_ptr\w*", "use weft.language.multimem_store and multimem_load_reduce"),
    (r"malloc|calloc|align|free", "allocate on the host, by team.empty, team.zeros or team.signals"),
    (r"init\w*|finalize", "use weft.init on the host, which makes the team"),
)


def __getattr__(name: str) -> object:
    short = re.sub("^nvshmemx?_", "", name)
    if short != name and short in globals():
        raise AttributeError(f"weft.language.shmem has no {name}: use {short}, without the prefix")
    for pattern, remedy in _ABSENT:
        if match := re.fullmatch(pattern, short):
            raise AttributeError(f"weft.language.shmem has no {name}: {remedy.format(**match.groupdict(''))}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@triton.jit
def my_pe(team):
    """Number of this rank, an int32 scalar: ``weft.language.rank``."""
    return coordinates.rank(team)


@builtin
def n_pes(team, _semantic=None):
    """World size, a compile-time constant: ``weft.language.num_ranks``."""
    check_team_view("n_pes", team)
    return team.size


@triton.jit
def remote_ptr(dest, pe, team):
    """``nvshmem_ptr``: ``dest`` in ``pe``'s memory, for ordinary loads and stores."""
    return coordinates.symm_at(dest, pe, team)


@triton.jit
def _bytes(primitive: tl.constexpr, dest, source, nbytes):
    """``dest`` and ``source`` as pointers to bytes."""
    check_pointers(primitive, dest=dest, source=source)
    check_scalars(primitive, nbytes=nbytes)
    byte: tl.constexpr = tl.pointer_type(tl.uint8)
    return dest.to(byte, bitcast=True), source.to(byte, bitcast=True)


@triton.jit
def putmem_block(dest, source, nbytes, pe, team):
    """Copy ``nbytes`` bytes of ``source`` to ``dest`` at ``pe``; ``source`` may be reused on return."""
    dest, source = _bytes("putmem_block", dest, source, nbytes)
    bulk.put(dest, source, nbytes, pe, team, 16384)


@triton.jit
def putmem_nbi_block(dest, source, nbytes, pe, team):
    """``putmem_block`` that may return early: ``source`` may be reused after ``quiet`` only."""
    dest, source = _bytes("putmem_nbi_block", dest, source, nbytes)
    bulk.put_nbi(dest, source, nbytes, pe, team, 16384)


@triton.jit
def getmem_block(dest, source, nbytes, pe, team):
    """Copy ``nbytes`` bytes of ``source`` at ``pe`` to ``dest``, which this program may read on return."""
    dest, source = _bytes("getmem_block", dest, source, nbytes)
    bulk.get(dest, source, nbytes, pe, team, 16384)


@triton.jit
def getmem_nbi_block(dest, source, nbytes, pe, team):
    """``getmem_block`` that may return early: ``dest`` may be read after ``quiet`` only."""
    dest, source = _bytes("getmem_nbi_block", dest, source, nbytes)
    bulk.get_nbi(dest, source, nbytes, pe, team, 16384)


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
def putmem_signal_block(dest, source, nbytes, sig_addr, signal, sig_op: tl.constexpr, pe, team):
    """``putmem_block``, then ``signal_op``: a wait for the signal makes the data visible."""
    check_signal("putmem_signal_block", sig_addr, signal)
    check_constants("putmem_signal_block", sig_op=sig_op)
    dest, source = _bytes("putmem_signal_block", dest, source, nbytes)
    bulk.put(dest, source, nbytes, pe, team, 16384)
    signal_op(sig_addr, signal, sig_op, pe, team)


@triton.jit
def putmem_signal_nbi_block(dest, source, nbytes, sig_addr, signal, sig_op: tl.constexpr, pe, team):
    """``putmem_signal_block`` that may return early: ``source`` may be reused after ``quiet`` only."""
    check_signal("putmem_signal_nbi_block", sig_addr, signal)
    check_constants("putmem_signal_nbi_block", sig_op=sig_op)
    dest, source = _bytes("putmem_signal_nbi_block", dest, source, nbytes)
    bulk.put_before_signal(dest, source, nbytes, pe, team, 16384)
    signal_op(sig_addr, signal, sig_op, pe, team)


@triton.jit
def signal_wait_until(sig_addr, cmp: tl.constexpr, cmp_value, team):
    """Wait for a signal of this rank; returns the value seen. Acquires, as ``weft.language.wait`` does.

    ``cmp``, a compile-time constant: ``CMP_GE`` and ``CMP_GT``, which compare the signed difference, where NVSHMEM compares
    the unsigned numbers, or ``CMP_EQ`` and ``CMP_NE``. Prefer ``CMP_GE``. A wait for ``CMP_EQ`` misses its value, and never
    ends, if the next notify comes before its next look; it is correct only where that notify is ordered after the wait, by
    an answer. ``weft check`` reports other waits as ``equality-wait``. ``CMP_NE`` ends at any other value, an old or a later
    one.
    """
    check_signal("signal_wait_until", sig_addr, cmp_value)
    check_constants("signal_wait_until", cmp=cmp)
    wanted = _bound("signal_wait_until", sig_addr, cmp, cmp_value)
    return signals.wait_until(sig_addr, wanted, _comparison("signal_wait_until", cmp), team)


@triton.jit
def signal_fetch(sig_addr, team):
    """Value of a signal of this rank at present. Acquires, as ``signal_wait_until`` does, without waiting."""
    check_signal("signal_fetch", sig_addr, 0)
    check_team("signal_fetch", team)
    seen = stock.load_acquire(sig_addr)
    stock.fence_before_tma_loads()
    return seen


@triton.jit
def wait_until_all(ivars, nelems: tl.constexpr, status, cmp: tl.constexpr, cmp_value, team):
    """Wait until each of ``nelems`` signals of this rank has met the comparison, as ``wait_all`` does.

    ``ivars``: pointer to the first signal. ``nelems``: compile-time constant. ``status``: None, or a pointer to ``nelems``
    int32 of which all but 0 leave out their signal. ``cmp``: as in ``signal_wait_until``.
    """
    left, wanted = _asked("wait_until_all", ivars, nelems, status, cmp, cmp_value, team)
    waits.await_all(ivars, left, wanted, _comparison("wait_until_all", cmp), team)


@triton.jit
def wait_until_any(ivars, nelems: tl.constexpr, status, cmp: tl.constexpr, cmp_value, team):
    """Wait until one of ``nelems`` signals of this rank meets the comparison; returns its index.

    Where several do, it is the first index; where ``status`` leaves out all, it is -1, OpenSHMEM's SIZE_MAX. Arguments as in
    ``wait_until_all``. It acquires the signal that it returns and no other, as ``weft.language.wait_any`` does.
    """
    left, wanted = _asked("wait_until_any", ivars, nelems, status, cmp, cmp_value, team)
    return waits.await_any(ivars, left, wanted, _comparison("wait_until_any", cmp), team)


@triton.jit
def _asked(primitive: tl.constexpr, ivars, nelems: tl.constexpr, status, cmp: tl.constexpr, cmp_value, team):
    """Signals that ``status`` does not leave out, as a block of booleans, and the value to compare with."""
    check_signal(primitive, ivars, cmp_value)
    check_signal_count(primitive, nelems, 1024)
    check_constants(primitive, cmp=cmp)
    check_team(primitive, team)
    BLOCK: tl.constexpr = triton.next_power_of_2(nelems)
    at = tl.arange(0, BLOCK)
    left = at < nelems
    if status is not None:
        check_pointers(primitive, status=status)
        # Another thread of the program may have stored it.
        tl.debug_barrier()
        left = left & (tl.load(status + at, mask=left, other=1) == 0)
    return left, _bound(primitive, ivars, cmp, cmp_value)


@builtin
def _comparison(primitive, cmp, _semantic=None):
    """Comparison of a wait by its OpenSHMEM constant: ``CMP_GT`` is ">=" of the next number."""
    known = {CMP_GE.value: ">=", CMP_GT.value: ">=", CMP_EQ.value: "==", CMP_NE.value: "!="}
    primitive, cmp = (getattr(x, "value", x) for x in (primitive, cmp))
    if cmp not in known:
        raise ValueError(
            f"{primitive}: cmp={cmp}; pass CMP_GE, CMP_GT, CMP_EQ or CMP_NE: signals only grow, so CMP_LE and CMP_LT hold "
            f"before any notify"
        )
    return tl.constexpr(known[cmp])


@triton.jit
def _bound(primitive: tl.constexpr, sig_addr, cmp: tl.constexpr, cmp_value):
    # In the signal's width: one more than the largest number of a narrower type is not its smallest.
    wanted = tl.cast(cmp_value, signed_type_of(primitive, sig_addr))
    if cmp == CMP_GT:
        return wanted + 1
    else:
        return wanted


@triton.jit
def int_p(dest, value, pe, team):
    """Store one element to ``dest`` at ``pe``; the next ``quiet`` or ``signal_op`` delivers it."""
    tl.store(coordinates.symm_at(dest, pe, team), value)


@triton.jit
def int_g(source, pe, team):
    """Load one element of ``source`` at ``pe``."""
    return stock.load_volatile(coordinates.symm_at(source, pe, team))


@triton.jit
def fence(team):
    """Order deliveries: puts and stores to any PE before it are delivered before later ones."""
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
