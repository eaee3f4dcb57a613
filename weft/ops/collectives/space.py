"""Search space of the collectives' designs: tiles that are pushed, and pieces for copy engines."""

from __future__ import annotations

from collections.abc import Iterator

from weft.ops.collectives.copy_engine import CopyEngine
from weft.ops.knobs import halved, moved
from weft.transport.plans import PushPlan

# row_bytes, num_warps, programs_per_sm, from many small programs (soonest start) to few large ones (fewest polls).
PUSHES = (
    (512, 1, 32), (1024, 1, 32), (1024, 2, 32), (2048, 2, 32), (2048, 2, 4), (2048, 4, 8), (2048, 4, 4), (4096, 4, 4),
    (4096, 4, 2), (4096, 8, 4), (4096, 8, 2), (8192, 8, 2), (8192, 16, 2),
)  # fmt: skip
QUICK_PUSHES = ((512, 1, 32), (1024, 2, 32), (2048, 4, 4), (4096, 4, 4), (4096, 8, 2), (4096, 8, 4), (8192, 16, 2))
# Bytes of a part of a row, and warps of a program, of the all-reduce with a norm.
ROW_PARTS = ((512, 1), (1024, 1), (1024, 2), (2048, 2), (2048, 4), (4096, 8))
# Pieces for copy engines, programs that copy them out, and the smallest message for which they are tried.
PIECES = ((1,), (1, 1), (3, 1), (7, 1), (12, 3, 1))
COPY_PROGRAMS = (64, 132)
COPIED_BYTES = 16 << 20


def pushes(transport: str, quick: bool) -> Iterator[PushPlan]:
    """Ways to cut a message into tiles."""
    for row_bytes, num_warps, per_sm in QUICK_PUSHES if quick else PUSHES:
        yield PushPlan(transport=transport, row_bytes=row_bytes, num_warps=num_warps, programs_per_sm=per_sm)


def pushes_around(push: PushPlan) -> Iterator[PushPlan]:
    """Neighbours of a way to cut a message."""
    yield from moved(
        push,
        row_bytes=halved(128)(push.row_bytes),
        num_warps=halved(1, 16)(push.num_warps),
        programs_per_sm=halved()(push.programs_per_sm),
    )


def copy_engines(whole: int) -> Iterator[CopyEngine]:
    """Copy-engine designs for a message of ``whole`` bytes; none if it is small."""
    if whole >= COPIED_BYTES:
        yield from (CopyEngine(pieces=pieces, programs=programs) for pieces in PIECES for programs in COPY_PROGRAMS)
