"""ngram_drafts: tokens that followed the longest earlier n-gram of a sequence, as drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.arguments import check_int
from weft.ops.case import FP32, Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_contiguous, check_like
from weft.ops.op import UNCHANGED, Op, register
from weft.runtime.capabilities import launch_options
from weft.runtime.team.team import Team

# Tokens of an n-gram, and drafts, at most.
MOST_TOKENS, MOST_DRAFTS = 16, 16
BLOCK, WARPS = 1024, 4


@triton.jit(do_not_specialize=["length"])
def ngram_drafts_kernel(
    history,
    newest,
    positions,
    drafts,
    length,
    DRAFTS: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """history[b, p] = newest[b];  drafts[b, i] = history[b, f + i % (p + 1 - f)], p = positions[b]

    grid: (B,). f - 1 < p is the place of the last token of the longest n-gram of LEAST .. MOST tokens that ends at p, too; of
    equally long ones the last. Without one, and where p is -1, drafts are -1. The history stays where p is -1.

    order  the newest token is used from its register: no thread loads what this program stores
    """
    sequence = tl.program_id(0)
    place = tl.arange(0, PLACES)
    wl.follow_previous_kernel()
    position = tl.load(positions + sequence)
    row = history + sequence.to(tl.int64) * length
    out = drafts + sequence * DRAFTS + place
    if position >= 0:
        token = tl.load(newest + sequence).to(tl.int32)
        best = tl.full([BLOCK], -1, tl.int64)
        for start in range(0, position, BLOCK):
            at = start + tl.arange(0, BLOCK)
            equal = at < position
            count = tl.zeros([BLOCK], tl.int64)
            for back in tl.static_range(MOST):
                there = equal & (at >= back) & (position >= back)
                wanted = token
                if back > 0:
                    wanted = tl.load(row + position - back, mask=position >= back, other=0)
                equal = there & (tl.load(row + at - back, mask=there, other=0) == wanted)
                count += equal.to(tl.int64)
            best = tl.maximum(best, tl.where(count >= LEAST, count * length + at, -1))
        longest = tl.max(best, axis=0)
        first = tl.maximum(longest, 0) % length + 1
        followed = first + place % tl.maximum(position + 1 - first, 1)
        drafted = tl.load(row + followed, mask=(place < DRAFTS) & (followed < position), other=0)
        drafted = tl.where(followed == position, token, drafted)
        tl.store(out, tl.where(longest < 0, -1, drafted).to(tl.int64), mask=place < DRAFTS)
        tl.debug_barrier()  # all threads have loaded what is written below
        tl.store(row + position, token, mask=position < length)
    else:
        tl.store(out, tl.full([PLACES], -1, tl.int64), mask=place < DRAFTS)


def ngram_drafts(
    history: torch.Tensor, newest: torch.Tensor, positions: torch.Tensor, drafts: int, least: int, most: int
) -> torch.Tensor:
    """Drafts [B, drafts] int64 by prompt look-up; -1: none. Notes the newest tokens in the history.

    history    [B, length] int32, contiguous: tokens 0 .. positions[b] - 1 of each sequence
    newest     [B] int64, the token at each sequence's position; positions [B] int64, below length, -1: no sequence
    least, most  tokens of an n-gram that ends with the newest token, 1 .. 16. Of the longest ones that stand earlier the last
               counts, and the drafts are the tokens after it; where they are too few, up to the newest one, they are repeated
    """
    check_like("ngram_drafts", "history", history, None, (torch.int32,), ("B", "length"))
    for name, x in (("newest", newest), ("positions", positions)):
        check_like("ngram_drafts", name, x, history.device, (torch.int64,), (len(history),))
    check_int("ngram_drafts: drafts", drafts, 1, MOST_DRAFTS)
    check_int("ngram_drafts: most", most, 1, MOST_TOKENS)
    check_int("ngram_drafts: least", least, 1, most)
    check_contiguous("ngram_drafts", "history", history)
    return NGRAM_DRAFTS.dispatch(history, newest, positions, drafts, least, most)


def look_up(
    history: torch.Tensor, newest: torch.Tensor, positions: torch.Tensor, drafts: int, least: int, most: int
) -> torch.Tensor:
    """`ngram_drafts` in plain torch."""
    length, at = history.shape[1], torch.arange(history.shape[1], device=history.device)
    place = positions[:, None]
    history.copy_(torch.where(at == place, newest[:, None].to(torch.int32), history))
    equal, count = at < place, torch.zeros_like(history)
    for back in range(most):
        same = history.roll(back, 1) == history.gather(1, (place - back).clamp(min=0))
        equal = equal & same & (at >= back) & (place >= back)
        count += equal
    best = (count.long() * length + at).masked_fill_(count < least, -1).amax(1, keepdim=True)
    first = best.clamp(min=0) % length + 1
    followed = first + torch.arange(drafts, device=history.device) % (place + 1 - first).clamp(min=1)
    return torch.where(best < 0, -1, history.gather(1, followed.clamp(max=length - 1)).long())


class NgramDrafts(Op):
    name, alias = "ngram_drafts", "ngram-drafts"
    bits = UNCHANGED
    no_plan = "one kernel; a program takes one sequence"
    mutates = ("history",)

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """History, newest tokens, positions. sizes: sequences, places; field "tokens": different tokens."""
        batch, length = case.sizes
        shapes = (("history", (batch, length)), ("newest", (batch,)))
        history, newest = (draw.own(*named, dtype=torch.int64) % case.field("tokens") + 1 for named in shapes)
        row = torch.arange(batch, device=draw.device)
        # The first has no sequence, the last a whole one.
        positions = row * 37 % length - (row % 3 == 0).long()
        positions[-1] = length - 1
        return history.to(torch.int32), newest, positions

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, torch.Tensor]:
        history, newest, positions = by_rank[rank]
        history = history.clone()
        return look_up(history, newest, positions, *case.field("options")), history

    def call(
        self, case: Case, team: Team, history: torch.Tensor, newest: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return ngram_drafts(history, newest, positions, *case.field("options")), history

    def cases(self) -> Iterator[Case]:
        for sizes, tokens, options in (
            ((1, 1), 2, (1, 1, 1)),
            ((3, 2), 2, (4, 1, 3)),
            ((3, 20), 1, (4, 2, 3)),
            ((7, 40), 3, (4, 2, 5)),
            ((5, 33), 2, (8, 3, 16)),
            ((4, BLOCK + 70), 9, (3, 1, 4)),
        ):
            yield self.case(1, FP32, sizes, tokens=tokens, options=options)

    def forward(
        self, history: torch.Tensor, newest: torch.Tensor, positions: torch.Tensor, drafts: int, least: int, most: int
    ) -> torch.Tensor:
        drafted = torch.empty(len(history), drafts, dtype=torch.int64, device=history.device)
        if len(history) > 0:
            constants = {
                "DRAFTS": drafts,
                "LEAST": least,
                "MOST": most,
                "PLACES": triton.next_power_of_2(drafts),
                "BLOCK": BLOCK,
            }
            arguments = history, newest.contiguous(), positions.contiguous(), drafted, history.shape[1]
            options = launch_options(capabilities_of(history.device))
            ngram_drafts_kernel[(len(history),)](*arguments, **constants, num_warps=WARPS, **options)
        return drafted

    def fake(self, history, newest, positions, drafts, least, most):
        return newest.new_empty(len(history), drafts)


NGRAM_DRAFTS = register(NgramDrafts())
