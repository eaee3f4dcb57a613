"""Designs of matmul_route_schedule, and those of a call for which no row decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.ops.knobs import check_knobs, counts, halved, knob, powers, stepped
from weft.plan.planned import AUTO
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.codec import exchangeable

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

# Logits that the last program can hold, tokens and experts rounded up to powers of two: 32 a thread of 8 warps.
MOST_LOGITS = 8192
# Tokens that a program multiplies at once: 16 fp32 sums a thread of 4 warps.
MOST_TOKENS = 128
# Partial sums that the last program reads, at most: 64 KiB, which one SM reads from the L2 in about 0.6 us (by its width).
MOST_PARTIALS = 16384
# Bytes of the router that a program reads at least.
LEAST_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterParts:
    """The router's GEMM in parts of H.

    parts    programs that share a tile of logits, each with its share of H: 1 .. 32
    rows_of  rows of the router that a program multiplies, ``step`` columns at a time: powers of two, at least 16
    num_warps, num_stages  compiler options
    """

    parts: int = knob(8, counts(32), halved())
    rows_of: int = knob(16, powers(16), halved(high=64))
    step: int = knob(128, powers(16), halved(high=512))
    num_warps: int = knob(4, near=halved(1, 16))
    num_stages: int = knob(3, near=stepped())
    __post_init__ = check_knobs


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class OneLaunch(RouterParts):
    """One kernel: the last program to end adds up the parts, chooses and schedules."""


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOfParts(RouterParts):
    """Three launches: route adds up the parts as it loads them, and moe_schedule follows."""


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class ThreeLaunches:
    """matmul, route and moe_schedule, each by its own plan."""


class RouterCall(NamedTuple):
    """Sizes that the plan depends on: T, H, E, and k choices."""

    tokens: int
    hidden: int
    experts: int
    k: int
    dtype: torch.dtype
    design: str = AUTO

    @property
    def logits(self) -> int:
        """Logits, with tokens and experts rounded up as the kernel does."""
        return next_power_of_2(max(1, self.tokens)) * max(16, next_power_of_2(self.experts))


def parts_for(call: RouterCall, caps: Capabilities, kind: type[RouterParts]) -> RouterParts:
    """Design of a ``kind`` of parts where no row decides."""
    # A part is 4 KiB of the router or more, and there are as many as the programs that add them up can load quickly.
    step = 128 if call.dtype.itemsize == 2 else 32
    bytes_of_tile = 16 * call.hidden * call.dtype.itemsize
    parts = min(16, cdiv(bytes_of_tile, LEAST_BYTES), cdiv(call.hidden, step))
    if kind is RouteOfParts:
        return kind(parts=parts, step=step)
    warps = max(1, min(8, call.logits // 256))
    return kind(parts=max(1, min(parts, MOST_PARTIALS // call.logits)), step=step, num_warps=warps)
