"""``weft.ops.explain``: what a call would get on this machine, from which row or rule, and why."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import weft.ops
from weft.arguments import check_bool, check_instance, check_optional, is_integer, quoted
from weft.ops.collectives.all_reduce_rms_norm import check_row
from weft.ops.collectives.all_reduce_rms_norm import choose as choose_norm
from weft.ops.dispatch import COLLECTIVES, MATMULS, choose, choose_matmul, whole_of
from weft.ops.gemm import cublas, small_m_config
from weft.ops.gemm.config import GemmConfig, configured, row_for
from weft.ops.overlap.matmul_all_reduce import MOST_ELEMENTS, slots_for
from weft.ops.registration import FLOATS, ITEM_SIZES, check_choice, check_divides
from weft.plan import table as tuned
from weft.runtime import capabilities
from weft.runtime.cublaslt import Algorithm
from weft.transport.plans import Plan

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

# What the command line calls them.
SHORT = {
    "gemm": "matmul", "ag_gemm": "all_gather_matmul", "gemm_rs": "matmul_reduce_scatter", "gemm_ar": "matmul_all_reduce",
}  # fmt: skip
NORM = "all_reduce_rms_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What one call gets.

    algorithm  of a collective ("one_shot", …), or the design of a matrix product ("fused", "segments", "library", "skinny")
    transport  of a collective
    plan       all that was chosen: a collective's tiles, a GEMM's, or the library's algorithm
    row        the row of ``weft tune`` that it was taken from; None: the op's own rule
    reason     a sentence: the row's file, key and microseconds, or the rule
    call       what was asked about, for a person
    """

    op: str
    call: str
    algorithm: str
    transport: str | None
    plan: Plan | GemmConfig | small_m_config.SkinnyConfig | Algorithm | None
    row: tuned.Row | None
    reason: str

    def __str__(self) -> str:
        source = "row" if self.row is not None else "rule"
        return f"{self.call}\n  gets  {self._chosen()}\n  {source:4}  {self.reason}"

    def _chosen(self) -> str:
        if self.plan is None or (self.algorithm in ("library", "copy") and not isinstance(self.plan, Algorithm)):
            return self.algorithm
        fields = self.plan.in_use() if isinstance(self.plan, GemmConfig) else dataclasses.asdict(self.plan)
        shown = ", ".join(f"{name}={value}" for name, value in fields.items())
        return f"{self.algorithm}: {shown}"


def explain(
    op: str, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.bfloat16, world_size: int | None = None,
    caps: Capabilities | None = None, *, M: int | None = None, N: int | None = None, K: int | None = None,
    algorithm: str = "auto", own_first: bool = False,
) -> Explanation:  # fmt: skip
    """Print what a call of ``op`` gets and why, and return it.

    op          a collective or matrix product of weft.ops; "gemm", "ag_gemm", "gemm_rs" and "gemm_ar" are understood
    shape       of a collective's input at each rank; of all_reduce_rms_norm's x
    M, N, K     of a matrix product: rows of the whole product, N and K of one rank's GEMM
    world_size  the number of GPUs here if None; at least 1
    caps        ``team.caps``; this machine's if None
    algorithm   what a collective would be asked for
    own_first   as of all_gather_matmul

        weft.ops.explain("ag_gemm", M=4096, N=12800, K=5120, world_size=4)
        weft.ops.explain("all_reduce", (16, 5120), world_size=4)

    ValueError for an unknown op, or sizes or a dtype that do not fit it.
    """
    name = op.replace("-", "_") if isinstance(op, str) else ""
    name = SHORT.get(name, name)
    names = tuple(dict.fromkeys((*COLLECTIVES, NORM, *MATMULS, *small_m_config.OPS)))
    if name not in names:
        known = ", ".join(map(repr, (*names, *SHORT)))
        raise ValueError(f"explain: op={quoted(op)} is not one of {known}")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"explain: dtype={quoted(dtype)} is no torch.dtype; pass torch.bfloat16")
    if world_size is None:
        world_size = max(1, torch.cuda.device_count())
    if not is_integer(world_size) or world_size < 1:
        raise ValueError(f"explain: world_size={quoted(world_size)} is not positive; pass 1 or more")
    check_optional(check_instance, "explain: caps", caps, capabilities.Capabilities, "a Capabilities; team.caps is one")
    check_bool("explain: own_first", own_first)
    sizes = [(label, size) for label, size in (("M", M), ("N", N), ("K", K)) if size is not None]
    if name in ("all_gather", "all_to_all"):
        if dtype.itemsize not in ITEM_SIZES:
            raise ValueError(f"explain: {name} is for elements of 1, 2, 4 or 8 bytes, not {tuned.name_of(dtype)}")
    elif dtype not in FLOATS:
        allowed = ", ".join(map(tuned.name_of, FLOATS))
        raise ValueError(f"explain: {name} is for {allowed}, not {tuned.name_of(dtype)}")
    if name in (*COLLECTIVES, NORM):
        if shape is None or sizes or own_first:
            raise ValueError(f"explain: {name} needs shape=, the input of each rank, and no M, N, K or own_first")
        _check_collective(name, shape, dtype.itemsize, world_size, algorithm)
        found = _collective(name, shape, dtype, world_size, caps or _here(world_size), algorithm)
    else:
        if len(sizes) != 3 or shape is not None or algorithm != "auto":
            raise ValueError(f"explain: {name} needs M=, N= and K=, and no shape or algorithm")
        _check_sizes(name, sizes, world_size)
        if own_first and name != "all_gather_matmul":
            raise ValueError(
                f"explain: own_first=True changes what all_gather_matmul gets, and nothing of {name}; leave it out"
            )
        found = _matmul(name, (M, N, K), dtype, world_size, caps or _here(world_size), own_first)
    print(found)
    return found


def _check_collective(op: str, shape: Sequence[int], itemsize: int, world_size: int, algorithm: str) -> None:
    if not isinstance(shape, Sequence) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"explain: shape={quoted(shape)} is no shape; pass a tuple of sizes")
    check_choice(op, "algorithm", algorithm, importlib.import_module(getattr(weft.ops, op).__module__).ALGORITHMS)
    if op == NORM:
        check_row(shape[-1] if shape else 0, itemsize)
    if op in ("reduce_scatter", "all_to_all"):
        check_divides(op, "shape[0]", shape[0] if shape else 1, world_size)


def _check_sizes(op: str, sizes: Sequence[tuple[str, int]], world_size: int) -> None:
    for label, size in sizes:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"explain: {label}={quoted(size)} is no positive integer; pass 1 or more")
    if op in ("all_gather_matmul", "matmul_reduce_scatter"):
        check_divides(op, "M", sizes[0][1], world_size)


def _collective(
    op: str, shape: Sequence[int], dtype: torch.dtype, world_size: int, caps: Capabilities, algorithm: str
) -> Explanation:
    nbytes = math.prod(shape) * dtype.itemsize
    if op == NORM:
        row_bytes = shape[-1] * dtype.itemsize
        decision = choose_norm(nbytes, row_bytes, world_size, caps.sms, algorithm)
    else:
        decision = choose(op, nbytes, dtype, world_size, caps, algorithm=algorithm)
    reason = decision.reason
    if decision.row is None and op != NORM:
        reason += _no_row(op, (whole_of(op, nbytes, world_size),), dtype, world_size, caps)
    return Explanation(
        op=op, call=f"{op} of {tuple(shape)} {_on(dtype, world_size, caps)}", algorithm=decision.algorithm,
        transport=decision.transport, plan=decision.plan, row=decision.row, reason=reason,
    )  # fmt: skip


def _matmul(
    op: str, size: tuple, dtype: torch.dtype, world_size: int, caps: Capabilities, own_first: bool
) -> Explanation:
    call = f"{op} M={size[0]} N={size[1]} K={size[2]} {_on(dtype, world_size, caps)}"
    if op in small_m_config.OPS:
        few_rows, reason = small_m_config.configured(op, *size, dtype, caps)
        if few_rows is not None or op not in MATMULS:
            design = "library" if few_rows is None else "skinny"
            return Explanation(
                op=op, call=call, algorithm=design, transport=None, plan=few_rows, row=None, reason=reason
            )
    kept = 1 if op == "matmul" else world_size  # a plain GEMM knows of no other ranks
    if kept == 1 and (found := cublas.row_for(*size, dtype, caps)) is not None:
        return Explanation(
            op=op, call=call, algorithm="library", transport=None, plan=found.row.as_config(Algorithm), row=found.row,
            reason=found.reason,
        )  # fmt: skip
    config = configured(op, *size, dtype, kept, caps, own_first)
    found = row_for(op, *size, dtype, kept, caps, own_first)
    reason = found.reason if found else choose_matmul(op, *size, dtype, kept, caps).reason
    if found is None:
        reason += _no_row(op, size, dtype, kept, caps)
    if op == "matmul_all_reduce" and config.design == "fused":
        _, elements = slots_for(*size[:2], kept, config)
        if elements > MOST_ELEMENTS:
            config = dataclasses.replace(config, design="segments")
            reason = f"{elements:,} elements > {MOST_ELEMENTS:,}, which is what the one kernel can count in its slots"
    if kept > 1 and config.design == "library":
        reason += _one_after_the_other(op, size, dtype, kept, caps)
    return Explanation(
        op=op, call=call, algorithm=config.design, transport=None, plan=config, row=found and found.row, reason=reason
    )


def _one_after_the_other(op: str, size: tuple, dtype: torch.dtype, world_size: int, caps: Capabilities) -> str:
    """Which collective and which product, as the end of a sentence."""
    M, N, K = size
    gathers, product = op == "all_gather_matmul", "the library's product"
    collective = "all_gather" if gathers else op.removeprefix("matmul_")
    sent = M // world_size * K if gathers else M * N
    algorithm = choose(collective, sent * dtype.itemsize, dtype, world_size, caps).algorithm
    if K * dtype.itemsize % 16 == 0:
        few_rows, _ = small_m_config.configured("matmul", *size, dtype, caps, in_parts=algorithm == "one_shot")
        if few_rows is not None:
            parts = small_m_config.parts_of(few_rows, K)
            product = "the product of few rows (weft.ops.gemm.small_m)" + (
                f" in {parts} parts of K" if parts > 1 else ""
            )
    collective = f"{collective} ({algorithm})"
    return f"; {collective}, then {product}" if gathers else f"; {product}, then {collective}"


def _no_row(op: str, shape: tuple, dtype: torch.dtype, world_size: int, caps: Capabilities) -> str:
    """Why no row decided, as the end of a sentence."""
    if caps.is_simulated or (world_size == 1 and op != "matmul"):
        return ""
    file = tuned.file_for(caps.device_name, world_size)
    if not file.is_file():
        return f" (no {file.name}: run weft tune)"
    if tuned.find(op, shape, dtype, world_size, caps) is None:
        return f" ({file.name} has no row of {tuned.name_of(dtype)} near this shape)"
    return f" (the row of {file.name} is for another algorithm, alignment or size)"


def _on(dtype: torch.dtype, world_size: int, caps: Capabilities) -> str:
    return f"{tuned.name_of(dtype)}, world_size={world_size}, {caps.device_name}"


def _here(world_size: int) -> Capabilities:
    """This machine's GPU; simulated ranks where there is none."""
    if torch.cuda.is_available():
        return capabilities.probe(torch.cuda.current_device(), [])
    return capabilities.simulated(world_size, 8)
