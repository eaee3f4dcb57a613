"""Rings of records that the programs of a traced team write, and what a record means.

The device half is ``weft/language/lowering/tracing.py``; ``weft.trace`` reads the rings.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Programs p and p + RINGS share a ring. A ring keeps the last RECORDS records, a power of two.
RINGS, RECORDS = 2048, 512
# Bytes of a record, and of a ring's head, whose first int32 counts the records ever written.
RECORD_BYTES = 32
RING_BYTES = (1 + RECORDS) * RECORD_BYTES
# Values of a record's field ``kind``.
KINDS = {"wait": 1, "notify": 2, "add": 3, "put": 4, "tile": 5, "words": 6}


class Record(NamedTuple):
    """A record's fields, 32 bytes.

    end       int64, bits 0..63: the GPU's clock in nanoseconds
    duration  int64, bits 0..31: nanoseconds before ``end``
    sm        bits 32..43 of the same
    kind      bits 44..47: ``KINDS``
    line      bits 48..62: line of the kernel's file
    address   int64, bits 0..47: address of the signal or the data at this rank; of a tile row | column << 32
    peer      bits 48..63: rank that the signal or the data are for, or this rank; of a put this rank: all other ranks
    value     int64, bits 0..31: value of the signal as it was set, added or awaited; bytes of a put, modulo 2**32
    kernel    bits 32..63: ``zlib.crc32`` of the kernel's name
    """

    program: int
    end: int
    duration: int
    sm: int
    kind: int
    line: int
    address: int
    peer: int
    value: int
    kernel: int


def records_of(rings: torch.Tensor) -> tuple[list[Record], int]:
    """Records in ``rings`` [RINGS, RING_BYTES], and the number that later ones have replaced."""
    words = rings.cpu().view(torch.int64).view(RINGS, 1 + RECORDS, RECORD_BYTES // 8)
    counts = words[:, 0, 0] & 0xFFFFFFFF
    records = []
    for program in torch.nonzero(counts).flatten().tolist():
        for end, what, where, value in words[program, 1 : 1 + min(int(counts[program]), RECORDS)].tolist():
            records.append(
                Record(
                    program=program,
                    end=end,
                    duration=what & 0xFFFFFFFF,
                    sm=what >> 32 & 0xFFF,
                    kind=what >> 44 & 0xF,
                    line=what >> 48 & 0x7FFF,
                    address=where & (1 << 48) - 1,
                    peer=where >> 48 & 0xFFFF,
                    value=value & 0xFFFFFFFF,
                    kernel=value >> 32 & 0xFFFFFFFF,
                )  # fmt: skip
            )
    return records, int((counts - RECORDS).clamp(min=0).sum())
