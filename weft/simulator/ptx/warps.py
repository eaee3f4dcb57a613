"""PTX instructions by which the threads of a warp exchange values: ``shfl.sync`` and ``elect.sync``."""

from __future__ import annotations

import numpy as np

from weft.simulator.ptx.registers import Bits

_WARP = 32


def reach(masks: Bits, active: np.ndarray) -> bool:
    """True if each active thread is in its mask, and all threads of the masks are active."""
    lanes = _lanes(active.size)
    executing = (active.reshape(-1, _WARP).astype(np.uint64) << lanes[:_WARP]).sum(1, dtype=np.uint64).repeat(_WARP)
    inside = (masks >> lanes & np.uint64(1) != 0) & (masks & ~executing == 0)
    return bool(inside[active].all())


def elected(masks: Bits) -> tuple[Bits, Bits]:
    """Lane of each thread's mask that is elected, the lowest one, and 1 for the thread of that lane."""
    lowest = masks & (~masks + np.uint64(1))
    lane = np.log2(np.maximum(lowest, np.uint64(1)).astype(np.float64)).astype(np.uint64)
    return lane, (lane == _lanes(masks.size)).astype(np.uint64)


def shuffled(mode: str, values: Bits, by: Bits, bounds: Bits) -> tuple[Bits, Bits, np.ndarray]:
    """Values of other threads, whether the source of each is within its segment, and the sources' numbers.

    mode    "up", "down", "bfly" or "idx"
    bounds  operand c of ``shfl``: a bound of source lanes, and in bits 8 to 12 a mask that divides a warp into segments
    """
    low = np.uint64(_WARP - 1)
    operands = _lanes(values.size), by & low, bounds & low, bounds >> np.uint64(8) & low
    lanes, by, bound, segment = (operand.astype(np.int64) for operand in operands)
    first = lanes & segment
    last = first | bound & ~segment
    wanted = {"up": lanes - by, "down": lanes + by, "bfly": lanes ^ by, "idx": first | by & ~segment}[mode]
    inside = wanted >= last if mode == "up" else wanted <= last
    sources = np.arange(values.size) - lanes + np.where(inside, wanted, lanes)
    return values[sources], inside.astype(np.uint64), sources


def _lanes(threads: int) -> Bits:
    return np.arange(threads, dtype=np.uint64) % np.uint64(_WARP)
