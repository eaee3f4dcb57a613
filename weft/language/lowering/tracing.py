"""Records of a traced team (``weft.trace``), each by one thread and without a barrier.

A view has no rings unless its team is traced. Each leaf tests that at compile time, so that the kernels of other teams compile
to the same code as without the call. ``weft/runtime/team/trace_rings.py`` has the format.
"""

import triton
import triton.language as tl

from weft.language.lowering import ptx
from weft.language.lowering.debug_site import kernel_crc, kernel_line
from weft.runtime.team.trace_rings import KINDS, RECORDS, RING_BYTES, RINGS
from weft.triton_api import builtin, target_info


@builtin
def _number_of(kind, _semantic=None):
    return tl.constexpr(KINDS[getattr(kind, "value", kind)])


@builtin
def _format(_semantic=None):
    """(rings, bytes of a ring, records of a ring). As globals they would make callers' cache keys vary."""
    return tl.tuple([tl.constexpr(RINGS), tl.constexpr(RING_BYTES), tl.constexpr(RECORDS)])


@builtin
def _is_traced(team, _semantic=None):
    """True if ``team`` is a traced team's view; False for None too.

    A separate test: Triton 3.6 fails to compare a tuple that has a None in it with None.
    """
    rings = getattr(team, "trace", None)
    return tl.constexpr(getattr(rings, "value", rings) is not None)


@triton.jit
def begin(team):
    """Start of a span: the low half of the clock, for ``record``; 0 without a traced team."""
    if _is_traced(team):
        tl.static_assert(target_info.is_cuda(), "weft.trace records on NVIDIA GPUs and virtual ranks")
        return ptx.globaltimer_low()
    else:
        return 0


@triton.jit
def record(kind: tl.constexpr, began, address, peer, value, happened, team):
    """Record the span from ``began`` to now, if ``happened``.

    kind     "wait", "words" (a wait for Lamport words), "notify" (which sets), "add" (one that adds), "put" or "tile"
    address  pointer to the signal or the data in this rank's memory; of a tile its row | column << 32
    """
    if _is_traced(team):
        program = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
        ring = team.trace + (program % _format()[0]).to(tl.int64) * _format()[1]
        what: tl.constexpr = _number_of(kind)
        of_code = tl.full((), (kernel_line() & 32767) << 48 | what << 44, tl.int64)
        where = tl.cast(address, tl.int64) & 0xFFFFFFFFFFFF | tl.cast(peer, tl.int64) << 48
        seen = tl.cast(value, tl.int64) & 0xFFFFFFFF | tl.full((), kernel_crc() << 32, tl.int64)
        ptx.record(ring, _format()[2], began, of_code, where, seen, tl.cast(happened, tl.int32))
