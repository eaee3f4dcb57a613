"""Tokens of all ranks to all ranks, in one kernel: words that are their own flag.

    message   int words of max_tokens tokens: all rows, all ids, all weights (16 bits each are widened), all scales of fp8 rows

Any bits arrive as they are: the words are keyed (weft.transport.push). Against three all-gathers this takes one launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from weft.kernels.fp8 import COLUMNS
from weft.ops.knobs import halved, knob
from weft.ops.registration import as_words
from weft.runtime.codec import exchangeable
from weft.transport.exchange import Body, launch
from weft.transport.plans import PushPlan
from weft.transport.push import is_rank

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


# Int words of a block of columns in fp8, and so the most scales of a tile.
WORDS: tl.constexpr = tl.constexpr(COLUMNS.value // 4)


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class GatherWords:
    """All rows to all ranks, by one kernel.

    row_bytes, num_warps  of ``PushPlan``
    rounds                the kernel rounds rows of whole blocks of 128 columns to fp8; False: fp8 rows are rounded before
    """

    row_bytes: int = knob(512, near=halved(128))
    num_warps: int = knob(1, near=halved(1, 16))
    rounds: bool = False

    def __post_init__(self) -> None:
        # A tile has a block and a place for each scale. With sixteen words a thread, code of ptxas 12.8 lost every eighth byte.
        slots, most = (
            self.row_bytes // (4 * WORDS.value),
            min(4 * WORDS.value * (WORDS.value + 1), 1024 * self.num_warps),
        )
        if self.rounds and (slots < 2 or self.row_bytes > most):
            raise ValueError(
                f"row_bytes={self.row_bytes} with rounds=True and num_warps={self.num_warps} is not in "
                f"{8 * WORDS.value} .. {most}"
            )

    @property
    def push(self) -> PushPlan:
        return PushPlan(transport="keyed", row_bytes=self.row_bytes, num_warps=self.num_warps)


class Tokens(NamedTuple):
    """Tokens of a rank, or of all, as int words: rows, ids, weights, and scales of fp8 rows or None."""

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None


class Lengths(NamedTuple):
    """Compile-time sizes: words of a token in each part of a message.

    A message has those of ``most`` tokens; prompts have many numbers of tokens, and each would be compiled for.
    """

    row: int
    choices: int
    scales: int

    @property
    def total(self) -> int:
        return self.row + 2 * self.choices + self.scales


@triton.jit
def load_part(part, at, first, T, LENGTH: tl.constexpr, other):
    """Words of the part from word ``first`` of the message on; ``other`` elsewhere, and behind T tokens.

    LENGTH  words of a token
    """
    local = at - first
    return tl.load(part + local, mask=(local >= 0) & (local < T * LENGTH), other=other).to(tl.int32)


@triton.jit
def load_words(message, tile, team, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """[BLOCK] words of this rank's message; ids of -1 behind its T tokens."""
    LENGTHS: tl.constexpr = message.SIZES
    T, at = message.tokens, tile * BLOCK + tl.arange(0, BLOCK)
    ids, weights = message.most * LENGTHS.row, message.most * (LENGTHS.row + LENGTHS.choices)
    words = load_part(message.x.rows, at, 0, T, LENGTHS.row, 0)
    words = tl.where(at < ids, words, load_part(message.x.ids, at, ids, T, LENGTHS.choices, -1))
    words = tl.where(at < weights, words, load_part(message.x.weights, at, weights, T, LENGTHS.choices, 0))
    if LENGTHS.scales > 0:
        scales = message.most * (LENGTHS.row + 2 * LENGTHS.choices)
        words = tl.where(at < scales, words, load_part(message.x.scales, at, scales, T, LENGTHS.scales, 0))
    return words


@triton.jit
def store_part(part, words, at, first, length, there):
    """Store the words of ranks' messages [ROWS, BLOCK] that belong to a part of ``length`` words."""
    local, source = (at - first)[None, :], tl.arange(0, words.shape[0])[:, None]
    mask = there & (local >= 0) & (local < length)
    tl.store(part + source.to(tl.int64) * length + local, words.to(part.dtype.element_ty), mask=mask)


@triton.jit
def store_words(words, message, tile, team):
    """Store the words of ranks' messages [ROWS, BLOCK] to rows, ids, weights and scales of all ranks."""
    LENGTHS: tl.constexpr = message.SIZES
    at, there = tile * words.shape[1] + tl.arange(0, words.shape[1]), is_rank(team, words.shape[0])
    row, choices = message.most * LENGTHS.row, message.most * LENGTHS.choices
    store_part(message.out.rows, words, at, 0, row, there)
    store_part(message.out.ids, words, at, row, choices, there)
    store_part(message.out.weights, words, at, row + choices, choices, there)
    if LENGTHS.scales > 0:
        store_part(message.out.scales, words, at, row + 2 * choices, message.most * LENGTHS.scales, there)


# rows, ids, weights, scales of all ranks [W, ...] = what each rank has        x: ``Tokens`` of this rank, out: of all
# every rank   | push tile 0 to all | push 1 | receive, store W tiles 0 | push 2 | receive, store W tiles 1 | ...
BODY = Body(name="gather_words_kernel", send=load_words, own=None, store=store_words)


def gather_words(
    design: GatherWords,
    team: Team,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    scales: torch.Tensor | None,
    most: int,
) -> list[torch.Tensor]:
    """[rows, ids, weights, scales or None] of all ranks, ``most`` tokens of each.

    ValueError for rows that are no whole int words.
    """
    if x.shape[1] * x.itemsize % 4:
        raise ValueError(
            f"moe_dispatch: algorithm='lamport' for rows of {x.shape[1]} {x.dtype}, which are no whole 4-byte words; use 'push'"
        )
    given = Tokens(x, ids, weights, scales)
    out = [None if one is None else one.new_empty((team.size * most, one.shape[1])) for one in given]
    kinds = torch.int32, torch.int32, torch.int32 if weights.itemsize == 4 else torch.int16, torch.int32
    mine, theirs = (
        Tokens(*(None if one is None else as_words(one, kind) for one, kind in zip(tensors, kinds, strict=True)))
        for tensors in (given, out)
    )
    lengths = Lengths(x.shape[1] * x.itemsize // 4, ids.shape[1], 0 if scales is None else scales.shape[1])
    words = most * lengths.total
    launch(BODY, (mine, theirs, words), torch.int32, team, design.push, tokens=(len(x), most), sizes=lengths)
    return out
