"""Which algorithm a call gets, and why: the one place that chooses, from rows of ``weft tune`` (weft.plan.table) where
there are any for this GPU, world size and shape, else by the rules here, from measured crossovers.

The limits are crossovers measured on H200s linked by NVLink 4 without multicast: docs/decisions.md has the figures of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from weft.plan import table as tuned
from weft.plan.memo import remembered
from weft.transport.plans import LINE_BYTES, CopyPlan, Plan, word_of

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

# Largest message that one-shot pushes faster than two-shot, by world size. W=3 and W=8 are not measured: one-shot's bytes grow
# with W - 1.
ONE_SHOT_LIMIT = {2: 512 << 10, 3: 192 << 10, 4: 256 << 10, 8: 64 << 10}
# How tiles travel: (largest message, row_bytes, num_warps, programs_per_sm), the first that the message fits. Many small
# programs start soonest and have all of a small message under way at once; in large ones a program that sends a tile
# ahead keeps the links busy, and fewer and larger ones poll less.
ENDLESS = 1 << 62
TWO_SHOT = {
    2: ((2 << 20, 512, 1, 32), (ENDLESS, 8192, 16, 2)),
    8: ((2 << 20, 512, 1, 32), (128 << 20, 4096, 8, 2), (ENDLESS, 4096, 4, 2)),
}
# One crossing: one-shot all-reduce, and all-gather, all-to-all and reduce-scatter by the bytes of all parts together.
ONE_CROSSING = {
    2: ((2 << 20, 512, 1, 32), (32 << 20, 4096, 8, 4), (ENDLESS, 8192, 16, 2)),
    8: ((1 << 20, 512, 1, 32), (128 << 20, 4096, 8, 2), (ENDLESS, 4096, 4, 4)),
}

# Bytes of all parts together from which copy engines carry them (weft.ops.collectives.copy_engine), by world size. W=3 is taken
# to be like W=4; W=8 is not measured.
COPY_ENGINE = {
    "all_gather": {2: 256 << 20, 4: 128 << 20, 8: ENDLESS},
    "all_to_all": {2: 256 << 20, 4: 256 << 20, 8: ENDLESS},
    "reduce_scatter": {2: ENDLESS, 4: 256 << 20, 8: ENDLESS},
    "all_reduce": {2: 256 << 20, 4: 256 << 20, 8: ENDLESS},
}
# The pieces, and the programs beside copy engines (CopyPlan), by what is done with the parts. A smaller last piece is copied
# out sooner; one more piece is one more flag. Two ranks' parts are long, and the engines wait for their sum: more programs.
COPY_PLANS = {
    "exchange": {2: {"pieces": (3, 1), "programs": 64}},
    "add": {2: {"pieces": (3, 1), "programs": 132}, 8: {"pieces": (3, 1), "programs": 64}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a call of ``op`` gets. ``reason`` is a sentence for a person, ``row`` what it was taken from, if from a row."""

    op: str
    algorithm: str
    transport: str
    reason: str
    plan: Plan | CopyPlan | None = None
    row: tuned.Row | None = None


@remembered
def choose(
    op: str, nbytes: int, dtype: torch.dtype, world_size: int, caps: Any = None, *, algorithm: str = "auto"
) -> Decision:
    """The decision for one call. ``nbytes``: of the input at each rank. ``algorithm``: what the caller asked for.

    ``caps``: ``team.caps``, which names the GPU; without it, or without a row for it, the rules decide. ValueError for
    an unknown op, and for a row whose fields are not those of now.
    """
    decision = choose_by_rule(op, nbytes, world_size, algorithm=algorithm)
    whole = whole_of(op, nbytes, world_size)
    found = tuned.find(op, (whole,), dtype, world_size, caps)
    if found is None or world_size == 1:
        return decision
    chosen, tuned_for, plan = found.row.as_config(tuned_plan)
    # What fits the alignment of this very message; an algorithm that was asked for runs.
    transport = transport_of(op, whole, world_size, chosen)
    fits = tuned_for == transport and (transport != "flags" or has_even_lines(whole, world_size))
    if not fits or algorithm not in ("auto", chosen):
        return decision
    return Decision(op=op, algorithm=chosen, transport=transport, reason=found.reason, plan=plan, row=found.row)


def tuned_plan(*, algorithm: str, transport: str, **fields: Any) -> tuple[str, str, Plan | CopyPlan]:
    """The algorithm, the transport and the plan of a row's config, whose tuples JSON has made lists."""
    if algorithm != "copy_engine":
        return algorithm, transport, Plan(transport=transport, **fields)
    return algorithm, transport, CopyPlan(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


def choose_by_rule(op: str, nbytes: int, world_size: int, *, algorithm: str = "auto") -> Decision:
    """What a call gets where nothing was tuned. Arguments as of ``choose``."""
    if op not in COLLECTIVES:
        raise ValueError(f"choose: op={op!r} is not one of {', '.join(map(repr, COLLECTIVES))}")
    if world_size == 1:
        nothing = Plan(transport="none", row_bytes=0, num_warps=0)
        return Decision(op=op, algorithm="copy", transport="none", reason="one rank: nothing to send", plan=nothing)
    whole = whole_of(op, nbytes, world_size)
    if algorithm == "auto":
        algorithm, reason = fastest(op, whole, world_size)
    else:
        reason = f"asked for algorithm={algorithm!r}"
    transport = transport_of(op, whole, world_size, algorithm)
    if algorithm == "copy_engine":
        copies = CopyPlan(**of_world(COPY_PLANS["add" if "reduce" in op else "exchange"], world_size))
        return Decision(op=op, algorithm=algorithm, transport=transport, reason=reason, plan=copies)
    table = of_world(TWO_SHOT if algorithm == "two_shot" else ONE_CROSSING, world_size)
    _, row_bytes, num_warps, per_sm = next(row for row in table if whole <= row[0])
    plan = Plan(transport=transport, row_bytes=row_bytes, num_warps=num_warps, programs_per_sm=per_sm)
    return Decision(op=op, algorithm=algorithm, transport=transport, reason=reason, plan=plan)


def fastest(op: str, whole: int, world_size: int) -> tuple[str, str]:
    """The algorithm for ``whole`` bytes, and why."""
    if whole >= of_world(COPY_ENGINE[op], world_size) and has_even_lines(whole, world_size):
        why = "copy engines fill the links, one peer at a time"
        return "copy_engine", compare(whole, COPY_ENGINE[op], world_size, why, ">=")
    if op != "all_reduce":
        return "push", "one crossing, no flags"
    if whole <= of_world(ONE_SHOT_LIMIT, world_size):
        return "one_shot", compare(whole, ONE_SHOT_LIMIT, world_size, "one crossing beats two", "<=")
    why = f"fewer bytes beat fewer crossings at world_size={world_size}"
    return "two_shot", compare(whole, ONE_SHOT_LIMIT, world_size, why, ">")


def transport_of(op: str, whole: int, world_size: int, algorithm: str) -> str:
    """How the peers learn what has come: "flags" behind it, or the data themselves, as numbers or as any bits."""
    if algorithm == "copy_engine":
        return "flags"
    if op in ("all_reduce", "reduce_scatter") or word_of(whole // world_size).itemsize == 1:
        return "lamport"
    return "keyed"


def has_even_lines(whole: int, world_size: int) -> bool:
    """Every rank's part is of whole lines, so that kernels copy 16 bytes a thread."""
    return whole % (LINE_BYTES * world_size) == 0


def whole_of(op: str, nbytes: int, world_size: int) -> int:
    """The bytes of all parts together: of the output of all_gather, of the input of the others."""
    return nbytes * world_size if op == "all_gather" else nbytes


def of_world(table: dict[int, Any], world_size: int) -> Any:
    """The entry of the next measured world size that is at least this one, else of the largest."""
    return next((entry for size, entry in table.items() if size >= world_size), table[max(table)])


def compare(nbytes: int, limits: dict[int, int], world_size: int, why: str, sign: str) -> str:
    return f"{nbytes:,} bytes {sign} {of_world(limits, world_size):,}: {why}"


MATMULS = ("matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")

# Rows of the whole product up to which the library's GEMM and weft's collective, one after the other, win: the overlap
# saves less than smaller GEMMs lose.
LIBRARY_ROWS = 512
# The same of matmul_all_reduce on two ranks.
LIBRARY_ROWS_OF_TWO = 1024
# From so many rows a rank on matmul_all_reduce of more than two ranks goes by blocks of rows. Measured on four.
ROWS_IN_BLOCKS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Design of a GEMM, "fused", "segments" or "library" (weft.ops.gemm.config), and the reason for it."""

    op: str
    design: str
    reason: str


def choose_matmul(op: str, M: int, N: int, K: int, dtype: torch.dtype, world_size: int, caps: Any = None) -> Design:
    """The design of a matrix product. M: rows of the whole product; N, K: of one rank's GEMM.

    ``K`` moves nothing, since ranks may hold different shares of it and must agree. ValueError for an unknown op.
    """
    if op not in MATMULS:
        raise ValueError(f"choose_matmul: op={op!r} is not one of {', '.join(map(repr, MATMULS))}")
    if caps is not None and caps.is_simulated:
        return Design(op=op, design="fused", reason="simulated: the kernel is what is to be seen")
    if op == "matmul" or world_size == 1:
        return Design(
            op=op, design="library", reason="cuBLAS is faster than weft's plain GEMM where both were measured"
        )
    if M <= LIBRARY_ROWS:
        return Design(op=op, design="library", reason=f"M={M} <= {LIBRARY_ROWS}: too little to overlap")
    if op == "matmul_all_reduce":
        if world_size == 2 and M <= LIBRARY_ROWS_OF_TWO:
            reason = f"two ranks, M={M} <= {LIBRARY_ROWS_OF_TWO}: too little to overlap"
            return Design(op=op, design="library", reason=reason)
        if world_size > 2 and M // world_size >= ROWS_IN_BLOCKS:
            reason = f"M={M}, at least {ROWS_IN_BLOCKS} a rank: half of the sums travel under the other half's GEMMs"
            return Design(op=op, design="segments", reason=reason)
        return Design(op=op, design="fused", reason="one kernel sends what is done and gives the sums to all")
    return Design(
        op=op, design="segments", reason="cuBLAS computes each rank's rows while copy engines carry the others'"
    )
