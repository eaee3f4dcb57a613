"""Which algorithm a call gets, and why: the one place that chooses, from measured crossovers.

The numbers are medians inside CUDA graphs on H200s linked by NVLink 4 without multicast (torch 2.11, Triton 3.6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

# Largest message that one-shot pushes faster than two-shot, by world size. bf16, one-shot / two-shot in microseconds:
# W=2: 256 KiB 3.6 / -, 1 MiB 6.0 / 5.7.   W=4: 256 KiB 5.9 / 6.3, 512 KiB - / 7.4, 1 MiB 13.0 / 9.2, 2 MiB 23.1 / 13.1.
# W=3 and W=8 are not measured: one-shot's bytes grow with W - 1.
ONE_SHOT_LIMIT = {2: 768 << 10, 3: 512 << 10, 4: 256 << 10, 8: 128 << 10}
# Largest message for the lamport transport of two-shot. W=4: 8 MiB 44.5 against 49.6 of torch's signalled two-shot,
# 16 MiB 103 against 91: beyond, clearing a third buffer costs more than a flag.
LAMPORT_LIMIT = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a call of ``op`` gets. ``reason`` is a sentence for a person."""

    op: str
    algorithm: str
    transport: str
    reason: str


def choose(
    op: str, nbytes: int, dtype: torch.dtype, world_size: int, caps: Any = None, *, algorithm: str = "auto"
) -> Decision:
    """The decision for one call. ``nbytes``: of the input at each rank. ``algorithm``: what the caller asked for.

    ``dtype`` and ``caps`` (``team.caps``) do not move a crossover yet; every caller has them. ValueError for an
    unknown op.
    """
    if op not in COLLECTIVES:
        raise ValueError(f"choose: op={op!r} is not one of {', '.join(map(repr, COLLECTIVES))}")
    transport = "lamport" if nbytes <= LAMPORT_LIMIT else "signals"
    if world_size == 1:
        algorithm, transport, reason = "copy", "none", "one rank: nothing to send"
    elif op in ("all_gather", "all_to_all"):
        algorithm, transport, reason = "push", "signals", "every bit pattern must arrive as it was sent"
    elif op == "reduce_scatter":
        why = "no flags, one crossing" if transport == "lamport" else "flags cost less than clearing"
        algorithm, reason = "push", compare(nbytes, LAMPORT_LIMIT, why)
    elif algorithm != "auto":
        reason = f"asked for algorithm={algorithm!r}"
    elif nbytes <= one_shot_limit(world_size):
        algorithm, reason = "one_shot", compare(nbytes, one_shot_limit(world_size), "one crossing beats two")
    else:
        why = f"fewer bytes beat fewer crossings at world_size={world_size}"
        algorithm, reason = "two_shot", compare(nbytes, one_shot_limit(world_size), why)
    return Decision(op=op, algorithm=algorithm, transport=transport, reason=reason)


def explain(
    op: str, shape: tuple[int, ...], dtype: torch.dtype, world_size: int, caps: Any = None, *, algorithm: str = "auto"
) -> Decision:
    """``choose`` for an input of this shape.

    ``print(weft.ops.explain("all_reduce", (16, 5120), torch.bfloat16, 4).reason)``
    """
    elements = 1
    for length in shape:
        elements *= length
    return choose(op, elements * dtype.itemsize, dtype, world_size, caps, algorithm=algorithm)


def one_shot_limit(world_size: int) -> int:
    """The limit of the next measured world size that is at least this one."""
    return next((limit for size, limit in ONE_SHOT_LIMIT.items() if size >= world_size), min(ONE_SHOT_LIMIT.values()))


def compare(nbytes: int, limit: int, why: str) -> str:
    return f"{nbytes:,} bytes {'<=' if nbytes <= limit else '>'} {limit:,}: {why}"
