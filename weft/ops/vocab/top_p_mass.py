"""top_p_mass: probability mass above each of 16 thresholds, a step towards top-p's least logit.

mass[b, n] = int(2**40 * exp((logits[b, n] - best[b]) / temperature[b]))          integers, so sums are the same in any order
above[c, i, b] = sum of mass[b, n] over chunk c's n with key(logits[b, n]) >= low[b] + i * 2**shift,        i = 0 .. 15

key is the logit as an int32 that compares as the fp32 does. `narrow` raises `low` to the greatest of the 16 thresholds above
which all chunks and ranks together still have the wanted mass. After shift = 28, 24, .. 0 it is exactly the least key to keep.
For top-k the mass of each logit is 1, and the wanted mass is k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.arguments import quoted
from weft.kernels.operands import rows_contiguous
from weft.ops.case import BF16, FP16, FP32, Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_contiguous, check_like
from weft.ops.op import INVARIANT, Op, register
from weft.ops.registration import FLOATS, check_flag
from weft.ops.vocab.sample_argmax import Chunks, LogitsOp, ordered
from weft.runtime.capabilities import launch_options
from weft.runtime.team.team import Team

BLOCK = 256
THRESHOLDS = 16
# Chunks that `narrow` loads together: a load waits for memory once.
AT_ONCE = 64
LOWEST = -(1 << 31)
SHIFTS = tuple(range(28, -1, -4))


@triton.jit(do_not_specialize=["N", "chunk", "shift"])
def top_p_mass_kernel(
    logits,
    stride,
    best,
    temperature,
    low,
    floor,
    above,
    N,
    chunk,
    shift,
    COUNT: tl.constexpr,
    FLOORED: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """above[c, i, b] as in the module's formula, of logits c * chunk .. of row b.        grid: (B, chunks)

    COUNT    the mass of each logit but -inf is 1
    FLOORED  that of logits whose keys are below floor[b] is 0
    """
    row = tl.program_id(0)
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, N)
    wl.follow_previous_kernel()
    source = logits + row.to(tl.int64) * stride
    greatest, heat = tl.load(best + row), tl.maximum(tl.load(temperature + row), 1e-20)
    least = tl.load(low + row).to(tl.int64)
    if FLOORED:
        lowest = tl.load(floor + row)
    columns = tl.arange(0, BLOCK)
    index = tl.arange(0, THRESHOLDS)
    sums = tl.zeros([THRESHOLDS], tl.int64)
    for at in range(begin, end, BLOCK):
        here = at + columns
        logit = tl.load(source + here, mask=here < end, other=float("-inf")).to(tl.float32)
        if COUNT:
            mass = (logit > float("-inf")).to(tl.int64)
        else:
            mass = (tl.exp((logit - greatest) / heat) * 1099511627776.0).to(tl.int64)
        key = ordered(logit)
        if FLOORED:
            mass = tl.where(key >= lowest, mass, 0)
        step = (key.to(tl.int64) - least) >> shift
        sums += tl.sum(tl.where(step[:, None] >= index[None, :], mass[:, None], 0), axis=0)
    tl.store(above + (tl.program_id(1) * THRESHOLDS + index) * tl.num_programs(0) + row, sums)


@triton.jit(do_not_specialize=["chunks", "shift"])
def narrow_kernel(
    above, top_p, low, wanted, chunks, shift, FIRST: tl.constexpr, THRESHOLDS: tl.constexpr, AT_ONCE: tl.constexpr
):
    """low[b] += 2**shift * the greatest i whose sum over chunks of above[c, i, b] >= wanted[b].

    grid: (B,)
    FIRST    wanted[b] = ceil(top_p[b] * all mass), at least 1. Where top_p is 1, low stays: all tokens are kept
    AT_ONCE  chunks that are loaded together
    """
    row, batch = tl.program_id(0), tl.num_programs(0)
    index = tl.arange(0, THRESHOLDS)
    wl.follow_previous_kernel()
    sums = tl.zeros([THRESHOLDS], tl.int64)
    for first in range(0, chunks, AT_ONCE):
        chunk = first + tl.arange(0, AT_ONCE)[:, None]
        parts = above + (chunk * THRESHOLDS + index[None, :]) * batch + row
        sums += tl.sum(tl.load(parts, mask=chunk < chunks, other=0), axis=0)
    share = tl.load(top_p + row)
    if FIRST:
        total = tl.max(sums, axis=0)
        enough = tl.maximum(tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        tl.store(wanted + row, enough)
    else:
        enough = tl.load(wanted + row)
    step = tl.max(tl.where((sums >= enough) & (share < 1), index, 0), axis=0)
    before = tl.load(low + row)
    tl.debug_barrier()
    tl.store(low + row, (before.to(tl.int64) + (step.to(tl.int64) << shift)).to(tl.int32))


def top_p_mass(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    low: torch.Tensor,
    shift: int,
    count: bool = False,
    floor: torch.Tensor | None = None,
) -> torch.Tensor:
    """`above` [chunks, 16, B] int64 of this rank's logits [B, N].

    logits             fp16, bf16 or fp32; -inf: never. Rows may be strided
    best, temperature  [B] fp32: the row's greatest logit over all ranks; temperature 0 counts as 1e-20
    low                [B] int32, LOWEST at first
    shift              one of SHIFTS, in this order
    count              the mass of each logit but -inf is 1, for top-k; best and temperature do not count
    floor              [B] int32: the mass of logits with lesser keys is 0

    No backward. ValueError for shapes, dtypes or devices that do not fit.
    """
    check_like("top_p_mass", "logits", logits, None, FLOATS, ("B", "N"))
    for name, x, dtype in (
        ("best", best, torch.float32),
        ("temperature", temperature, torch.float32),
        ("low", low, torch.int32),
        *((("floor", floor, torch.int32),) if floor is not None else ()),
    ):
        check_like("top_p_mass", name, x, logits.device, (dtype,), (logits.shape[0],))
    check_flag("top_p_mass", "count", count)
    if shift not in SHIFTS:
        raise ValueError(f"top_p_mass: shift={quoted(shift)} is not one of {', '.join(map(str, SHIFTS))}")
    return TOP_P_MASS.dispatch(MassArguments(logits, best, temperature, low, shift, count, floor))


class MassArguments(NamedTuple):
    """Arguments of top_p_mass."""

    logits: torch.Tensor
    best: torch.Tensor
    temperature: torch.Tensor
    low: torch.Tensor
    shift: int
    count: bool
    floor: torch.Tensor | None


def narrow(
    above: torch.Tensor, top_p: torch.Tensor, low: torch.Tensor, wanted: torch.Tensor, shift: int, count: bool = False
) -> None:
    """Raise `low` [B] int32 in place, by `above` [.., 16, B] of all chunks and ranks.

    top_p   [B] fp32; where it is 1 `low` stays
    wanted  [B] int64, set by the first shift for the next ones
    count   `wanted` is given, for all shifts
    """
    for name, x in (("low", low), ("wanted", wanted)):
        check_contiguous("narrow", name, x)
    NARROW.dispatch(above, top_p, low, wanted, shift, count)


def ordered_keys(x: torch.Tensor) -> torch.Tensor:
    """Keys, int32, in the order of x as fp32."""
    bits = (x.float() + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


class TopPMass(LogitsOp):
    name, alias = "top_p_mass", "top-p-mass"
    bits = f"{INVARIANT}: masses are integers, whose sums have one value in any order"

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Logits, temperatures and top_p; numbers of tokens to keep in place of top_p, 0 for all."""
        logits = draw.own("logits", case.sizes, 4.0)
        if case.field("count"):
            logits[:, ::7] = logits[:, 3:4]  # equal ones
            k = torch.arange(case.sizes[0], device=logits.device) * 5 % (case.sizes[1] + 10)
            return logits, k.float(), k
        temperature, top_p = (
            torch.linspace(*ends, case.sizes[0], device=logits.device) for ends in ((0.5, 2), (0.3, 1))
        )
        return logits, temperature, top_p

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        """Key of each row's least logit to keep."""
        logits, temperature, top_p = by_rank[rank]
        if case.field("count"):
            last = (top_p.clamp(1, logits.shape[1]) - 1)[:, None]
            least = ordered_keys(logits.sort(descending=True).values.gather(1, last)[:, 0])
            return torch.where((top_p == 0) | (top_p > logits.shape[1]), LOWEST, least)
        if case.field("floor"):
            logits = logits.float().where(logits >= logits.amax(dim=1, keepdim=True).float() - 4, -torch.inf)
        shares, ids = (logits.double() / temperature.double()[:, None]).softmax(-1).sort(descending=True)
        last = (shares.cumsum(-1) - shares < top_p[:, None]).sum(-1, keepdim=True) - 1
        return torch.where(top_p == 1, LOWEST, ordered_keys(logits.gather(1, ids.gather(1, last))[:, 0]))

    def call(
        self, case: Case, team: Team, logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor
    ) -> torch.Tensor:
        """``low`` after all shifts."""
        best = logits.float().amax(dim=1)
        low = torch.full(best.shape, LOWEST, dtype=torch.int32, device=logits.device)
        count = bool(case.field("count"))
        wanted = top_p.clone() if count else torch.zeros(best.shape, dtype=torch.int64, device=logits.device)
        share = (top_p == 0).float() if count else top_p
        floor = ordered_keys(best - 4) if case.field("floor") else None
        for shift in SHIFTS:
            arguments = logits, best, temperature, low, shift, count, floor
            planned = isinstance(case.design, str)
            above = top_p_mass(*arguments) if planned else self.run(case.design, None, MassArguments(*arguments))
            narrow(above, share, low, wanted, shift, count)
        return low

    def cases(self) -> Iterator[Case]:
        for dtype in (FP16, BF16, FP32):
            for sizes in ((1, 5000), (3, 300), (17, 70)):
                yield self.case(1, dtype, sizes)
            yield self.case(1, dtype, (5, 300), count=True)
        yield self.case(1, BF16, (4, 310), floor=True)
        yield self.case(1, BF16, (3, 600), design=Chunks(chunks=4, chunk=190))

    def run(self, design: Chunks, team: None, given: MassArguments) -> torch.Tensor:
        """``top_p_mass`` of checked arguments."""
        self.check_design(design)
        logits, best, temperature, low, shift, count, floor = given
        logits, (batch, vocab) = rows_contiguous(logits), logits.shape
        above = torch.empty((design.chunks, THRESHOLDS, batch), dtype=torch.int64, device=logits.device)
        if batch > 0:
            top_p_mass_kernel[(batch, design.chunks)](
                logits,
                logits.stride(0),
                best.contiguous(),
                temperature.contiguous(),
                low.contiguous(),
                floor if floor is None else floor.contiguous(),
                above,
                vocab,
                design.chunk,
                shift,
                COUNT=count,
                FLOORED=floor is not None,
                THRESHOLDS=THRESHOLDS,
                BLOCK=BLOCK,
                **launch_options(capabilities_of(logits.device)),
            )
        return above

    def forward(self, given: MassArguments) -> torch.Tensor:
        return self.run(self.plan_of(given.logits), None, given)

    def fake(self, given: MassArguments) -> torch.Tensor:
        logits = given.logits
        return logits.new_empty((self.plan_of(logits).chunks, THRESHOLDS, logits.shape[0]), dtype=torch.int64)


TOP_P_MASS = register(TopPMass())


class Narrow(Op):
    name = alias = "narrow"
    bits = f"{INVARIANT}: sums are of integers"
    no_plan = "one kernel; the plan of top_p_mass decides how many sums a sequence has"
    mutates = ("low", "wanted")

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """``above`` [*sizes], top_p, ``low`` and ``wanted``."""
        above = draw.own("above", case.sizes).abs().sort(dim=-2, descending=True).values
        batch = case.sizes[-1]
        low = torch.full((batch,), LOWEST, dtype=torch.int32, device=above.device)
        return above, torch.linspace(0.1, 1, batch, device=above.device), low, draw.own("wanted", (batch,)).abs() + 1

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, torch.Tensor]:
        above, top_p, low, wanted = by_rank[rank]
        sums, shift = above.flatten(0, -3).sum(0), case.field("shift")
        if shift == SHIFTS[0]:
            wanted = (top_p.double() * sums.amax(0)).ceil().long().clamp(min=1)
        index = torch.arange(THRESHOLDS, device=above.device)[:, None]
        step = torch.where((sums >= wanted) & (top_p < 1), index, 0).amax(0)
        return (low + (step << shift)).int(), wanted

    def call(
        self, case: Case, team: Team, above: torch.Tensor, top_p: torch.Tensor, low: torch.Tensor, wanted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        narrow(above, top_p, low, wanted, case.field("shift"))
        return low, wanted

    def cases(self) -> Iterator[Case]:
        for sizes, shift in (((1, 16, 1), 28), ((3, 16, 5), 28), ((2, 3, 16, 4), 24), ((70, 16, 3), 28)):
            yield self.case(1, torch.int64, sizes, shift=shift)

    def forward(
        self, above: torch.Tensor, top_p: torch.Tensor, low: torch.Tensor, wanted: torch.Tensor, shift: int, count: bool
    ) -> None:
        batch = low.shape[0]
        if batch > 0:
            above, options = above.contiguous(), launch_options(capabilities_of(low.device))
            arguments = above, top_p.contiguous(), low, wanted, above.numel() // (THRESHOLDS * batch), shift
            narrow_kernel[(batch,)](
                *arguments, FIRST=shift == SHIFTS[0] and not count, THRESHOLDS=THRESHOLDS, AT_ONCE=AT_ONCE, **options
            )

    def fake(self, above, top_p, low, wanted, shift, count):
        return None


NARROW = register(Narrow())
