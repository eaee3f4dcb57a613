"""The view of a team: one NamedTuple, passed to kernels as the argument ``team``."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

# Most programs of a grid that call `barrier(team)`: each owns a row of counters.
MAX_BARRIER_PROGRAMS = 1024
# Int64 words of the record of a debug-mode wait: see runtime/wait_record.py.
RECORD_WORDS = 16


class TakenByView:
    """Base of objects that kernels take as ``view``. One passed itself is refused with the remedy.

    Triton reads ``data_ptr`` and ``dtype`` of an argument to find its type, on GPUs as in the simulator. Without them its
    message would be that it has no type for the object.
    """

    __slots__ = ()

    def data_ptr(self) -> int:
        raise TypeError(self._advice())

    @property
    def dtype(self) -> torch.dtype:
        raise TypeError(self._advice())

    def _advice(self) -> str:
        kind = type(self).__name__
        name = kind.lower()
        return f"a kernel takes a {name}'s view, not the {kind} itself: pass {name}.view, not {name}"


class TeamView(NamedTuple):
    """Kernel argument for a team, ``team.view``; primitives read its fields.

    coords       2 * rank + 3: an odd number above 1, since Triton compiles another kernel for an integer that is 1 or a
                 multiple of 16, and every rank should run the same one
    size         world size, a compile-time constant
    deltas       int64 [size]: bytes from an address in my heap to the same object in each peer's; 0 for myself
    barriers     int32 [MAX_BARRIER_PROGRAMS, size + 1], symmetric: the count that each rank announced, then my own
    patience_us  compile-time constant: 0, or the microseconds after which a wait gives up (debug builds)
    record       int64 [RECORD_WORDS], readable by the host: rank, kernel, line and signal of a wait that gave up
    multicast    compile-time constant: 0, multimem primitives are refused; 1, they are multimem instructions, and ``deltas``
                 has one more, the bytes to the multicast address; 2, they load and store at every rank (the simulator)
    remote_atomics  compile-time constant: 1 if atomics on peers' memory are atomic
    trace        uint8 [RINGS, RING_BYTES] of a traced team (trace_rings.py); else None, which is no argument of the kernel
    """

    coords: int
    size: tl.constexpr
    deltas: torch.Tensor
    barriers: torch.Tensor
    patience_us: tl.constexpr
    record: torch.Tensor
    multicast: tl.constexpr
    remote_atomics: tl.constexpr
    trace: torch.Tensor | None = None


def make_view(
    rank: int,
    size: int,
    deltas: torch.Tensor,
    barriers: torch.Tensor,
    record: torch.Tensor,
    patience_us: int = 0,
    multicast: int = 0,
    remote_atomics: bool = True,
) -> TeamView:
    return TeamView(
        2 * rank + 3,
        tl.constexpr(size),
        deltas,
        barriers,
        tl.constexpr(patience_us),
        record,
        tl.constexpr(multicast),
        tl.constexpr(int(remote_atomics)),
    )
