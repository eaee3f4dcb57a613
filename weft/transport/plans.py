"""Plan of a push: its transport, the bytes of a row, and the programs that send it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.runtime.codec import exchangeable

# Alignment of pieces and receive buffers.
LINE_BYTES = 16

TRANSPORTS = ("lamport", "keyed", "fp8")


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class PushPlan:
    """Transport and tile sizes of a push (weft.transport.push).

    transport        "lamport", "keyed" or "fp8"
    row_bytes        bytes sent to one peer at once: a power of two of at least 16; in all_reduce_rms_norm, which cuts rows
                     into even parts, a multiple of 16
    num_warps        warps of a program, a power of two
    programs_per_sm  most programs of an SM; fewer where registers do not suffice
    """

    transport: str
    row_bytes: int
    num_warps: int
    programs_per_sm: int = 32

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport={self.transport!r} is not one of {', '.join(map(repr, TRANSPORTS))}")
        if self.row_bytes < 16 or self.row_bytes % 16:
            raise ValueError(f"row_bytes={self.row_bytes} is not a positive multiple of 16")
        if self.transport == "fp8" and self.row_bytes % 128:
            raise ValueError(f"row_bytes={self.row_bytes} cuts a group of 128 columns; pass a multiple of 128")
        if self.num_warps < 1 or self.num_warps & (self.num_warps - 1):
            raise ValueError(f"num_warps={self.num_warps} is not a power of two")
        if self.programs_per_sm < 1:
            raise ValueError(f"programs_per_sm={self.programs_per_sm} is not positive; pass 1 or more")


def word_of(nbytes: int) -> torch.dtype:
    """Widest integer dtype whose size divides ``nbytes``, one rank's part; it moves data bit for bit.

    Single bytes are sent widened to two, which never read as unwritten.
    """
    return torch.int32 if nbytes % 4 == 0 else torch.int16 if nbytes % 2 == 0 else torch.int8
