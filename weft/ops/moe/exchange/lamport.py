"""Designs "lamport" of moe_dispatch and moe_combine: one kernel, one hop, words as flags.

rows of x's dtype  a message is int words of max_tokens tokens: all rows, all ids, all weights (16 bits each are widened),
                   all scales of fp8 rows. Any bits arrive as they are: the words are keyed (weft.transport.push)
rows in fp8        a tile of the message has one of two forms of BLOCK int words, so that the program that has a block of
                   columns has its scale too, and no kernel rounds the rows before:
                     rows     blocks of 128 columns, 32 words each, and in the last 32 words the scales of these blocks
                     choices  ids, then weights, of max_tokens tokens
sums               of what a rank has for each token of a peer, zeros for tokens without an expert here
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fp8 import COLUMNS, E4M3, quantized
from weft.ops.knobs import design_type, halved, knob
from weft.ops.moe.exchange.exchange_op import CombineArguments, DispatchArguments, dense
from weft.ops.registration import as_words
from weft.runtime.arithmetic import cdiv
from weft.transport.exchange import Body, launch
from weft.transport.plans import PushPlan
from weft.transport.push import is_rank, send_order

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


# Int words of a block of columns in fp8, and so the most scales of a tile.
WORDS: tl.constexpr = tl.constexpr(COLUMNS.value // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """One kernel whose words are their own flags. row_bytes, num_warps: of ``PushPlan``."""

    row_bytes: int = knob(512, near=halved(128))
    num_warps: int = knob(1, near=halved(1, 16))
    transport: ClassVar[str] = "keyed"

    @property
    def push(self) -> PushPlan:
        return PushPlan(transport=self.transport, row_bytes=self.row_bytes, num_warps=self.num_warps)


@design_type
class GatherWords(Words):
    """Everything of each token to all ranks, by one kernel."""


@design_type
class DispatchWords(GatherWords):
    """All rows to all ranks, by one kernel.

    rounds  the kernel rounds rows of whole blocks of 128 columns to fp8; False: fp8 rows are rounded before
    """

    rounds: bool = False

    def __post_init__(self) -> None:
        # A tile has a block and a place for each scale. With sixteen words a thread, code of ptxas 12.8 lost every eighth byte.
        block = 4 * WORDS.value
        low, high = 2 * block, min(block * (WORDS.value + 1), 1024 * self.num_warps)
        if self.rounds and not low <= self.row_bytes <= high:
            raise ValueError(
                f"row_bytes={self.row_bytes} with rounds=True and num_warps={self.num_warps} is not in {low} .. {high}"
            )


class Tokens(NamedTuple):
    """Tokens of a rank, or of all, as int words: rows, ids, weights, and scales of fp8 rows or None."""

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None


class Lengths(NamedTuple):
    """Compile-time sizes: words of a token in each part of a message.

    A message has words of ``most`` tokens; prompts have many numbers of tokens, and each would be compiled for.
    """

    row: int
    choices: int
    scales: int

    @property
    def total(self) -> int:
        return self.row + 2 * self.choices + self.scales


@triton.jit
def load_part(part, at, first, T, LENGTH: tl.constexpr, other):
    """Words of the part from word ``first`` of the message on; ``other`` elsewhere, and after T tokens.

    LENGTH  words of a token
    """
    local = at - first
    return tl.load(part + local, mask=(local >= 0) & (local < T * LENGTH), other=other).to(tl.int32)


@triton.jit
def load_words(message, tile, team, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """[BLOCK] words of this rank's message; ids of -1 after its T tokens."""
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
GATHER = Body(name="gather_words_kernel", send=load_words, own=None, store=store_words)


def gather_words(design: GatherWords, team: Team, given: Tokens, most: int) -> list[torch.Tensor]:
    """[rows, ids, weights, scales or None] of all ranks, ``most`` tokens of each.

    given  of this rank, as they are

    ValueError for rows that are no whole int words.
    """
    x, ids, weights, scales = given
    if x.shape[1] * x.itemsize % 4:
        raise ValueError(
            f"moe_dispatch: algorithm='lamport' for rows of {x.shape[1]} {x.dtype}, which are no whole 4-byte words; use 'push'"
        )
    out = [None if one is None else one.new_empty((team.size * most, one.shape[1])) for one in given]
    kinds = torch.int32, torch.int32, torch.int32 if weights.itemsize == 4 else torch.int16, torch.int32
    own, of_all = (
        Tokens(*(None if one is None else as_words(one, kind) for one, kind in zip(tensors, kinds, strict=True)))
        for tensors in (given, out)
    )
    lengths = Lengths(x.shape[1] * x.itemsize // 4, ids.shape[1], 0 if scales is None else scales.shape[1])
    words = most * lengths.total
    launch(GATHER, (own, of_all, words), torch.int32, team, design.push, tokens=(len(x), most), sizes=lengths)
    return out


class Unrounded(NamedTuple):
    """Tokens of a rank: x [T, H], ids and weights as int words [T, k]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Blocks(NamedTuple):
    """Compile-time sizes of a rank's part: blocks of 128 columns and ids, of all tokens and of one."""

    all: int
    of_row: int
    choices: int
    of_token: int


@triton.jit
def quantized_tile(x, T, tile, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK] words of tile ``tile`` of rows: the blocks' bytes, then their scales.

    Behind T rows zeros, with a scale of 1.
    """
    SLOTS: tl.constexpr = BLOCK // WORDS
    slot, lane = tl.arange(0, SLOTS)[:, None], tl.arange(0, WORDS)[None, :]
    block = tile * (SLOTS - 1) + slot
    there = (slot < SLOTS - 1) & (block < T * BLOCKS.of_row)
    at = block.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    rows, scales = quantized(tl.load(x + at, mask=there, other=0.0))
    # The four bytes of a word, the lowest first.
    bytes = rows.to(tl.uint8, bitcast=True).to(tl.int32).reshape(SLOTS, WORDS, 4)
    words = tl.sum(bytes << (8 * tl.arange(0, 4))[None, None, :], axis=2)
    # Scales lie along the slots; in their words they lie along the lanes.
    turned = tl.sum(tl.where(slot == lane, scales.to(tl.int32, bitcast=True), 0), axis=0)
    return tl.where(slot == SLOTS - 1, turned[None, :], words).reshape(BLOCK)


@triton.jit
def store_rows(rows, scales, words, tile, BLOCKS: tl.constexpr, there):
    """Store the words [ROWS, BLOCK] of tile ``tile`` of all ranks' rows."""
    SLOTS: tl.constexpr = words.shape[1] // WORDS
    column, source = tl.arange(0, words.shape[1])[None, :], tl.arange(0, words.shape[0])[:, None].to(tl.int64)
    first, slot, lane = tile * (SLOTS - 1), column // WORDS, column % WORDS
    is_row = there & (slot < SLOTS - 1) & (first + slot < BLOCKS.all)
    tl.store(rows + (source * BLOCKS.all + first + slot) * WORDS + lane, words, mask=is_row)
    is_scale = there & (slot == SLOTS - 1) & (lane < SLOTS - 1) & (first + lane < BLOCKS.all)
    tl.store(scales + source * BLOCKS.all + first + lane, words, mask=is_scale)


@triton.constexpr_function
def row_tiles(blocks, block):
    """Number of tiles of ``blocks`` blocks of rows, before tiles of choices."""
    return -(-blocks // (block // WORDS.value - 1))


@triton.jit
def load_tile(message, tile, team, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """[BLOCK] words of this rank's message; ids of -1 after its T tokens."""
    BLOCKS: tl.constexpr = message.SIZES
    ROW_TILES: tl.constexpr = row_tiles(BLOCKS.all, BLOCK)
    columns = tl.arange(0, BLOCK)  # here, so that the compiler makes it once for all branches
    if tile < ROW_TILES:
        words = quantized_tile(message.x.x, message.tokens, tile, BLOCKS, BLOCK)
    else:
        at = (tile - ROW_TILES) * BLOCK + columns
        ids = load_part(message.x.ids, at, 0, message.tokens, BLOCKS.of_token, -1)
        weights = load_part(message.x.weights, at, BLOCKS.choices, message.tokens, BLOCKS.of_token, 0)
        words = tl.where(at < BLOCKS.choices, ids, weights)
    return words


@triton.jit
def store_tile(words, message, tile, team):
    """Store the words [ROWS, BLOCK] of all ranks' messages: rows and their scales, or choices."""
    BLOCKS: tl.constexpr = message.SIZES
    ROW_TILES: tl.constexpr = row_tiles(BLOCKS.all, words.shape[1])
    there = is_rank(team, words.shape[0])
    if tile < ROW_TILES:
        store_rows(message.out.rows, message.out.scales, words, tile, BLOCKS, there)
    else:
        at = (tile - ROW_TILES) * words.shape[1] + tl.arange(0, words.shape[1])
        store_part(message.out.ids, words, at, 0, BLOCKS.choices, there)
        store_part(message.out.weights, words, at, BLOCKS.choices, BLOCKS.choices, there)


# rows, ids, weights, scales of all ranks [W, ...] = each rank's, its rows in fp8     x: ``Unrounded`` of this rank
# every rank   | push tile 0 to all | push 1 | receive, store W tiles 0 | push 2 | receive, store W tiles 1 | ...
GATHER_FP8 = Body(name="gather_fp8_words_kernel", send=load_tile, own=None, store=store_tile)


def gather_fp8_words(design: DispatchWords, team: Team, given: DispatchArguments) -> tuple[torch.Tensor, ...]:
    """(rows in fp8, ids, weights, scales) of all ranks. ValueError if rows are not whole blocks."""
    x, (ids, weights), most = given.x, given.routing, given.max_tokens
    (T, H), k = x.shape, ids.shape[1]
    if H % COLUMNS.value:
        raise ValueError(
            f"moe_dispatch: rounds=True for rows of {H}, no multiple of {COLUMNS.value} columns; pass rounds=False"
        )
    blocks = Blocks(most * H // COLUMNS.value, H // COLUMNS.value, most * k, k)
    rows = x.new_empty((team.size * most, H), dtype=E4M3)
    scales = x.new_empty((len(rows), blocks.of_row), dtype=torch.float32)
    all_ids, all_weights = (one.new_empty((len(rows), k)) for one in (ids, weights))
    narrow = torch.int32 if weights.itemsize == 4 else torch.int16
    own = Unrounded(x.contiguous(), as_words(ids, torch.int32), as_words(weights, narrow))
    words = torch.int32, torch.int32, narrow, torch.int32
    of_all = Tokens(*map(as_words, (rows, all_ids, all_weights, scales), words))
    block = design.row_bytes // 4
    count = (row_tiles(blocks.all, block) + cdiv(2 * blocks.choices, block)) * block
    launch(GATHER_FP8, (own, of_all, count), torch.int32, team, design.push, tokens=(T, most), sizes=blocks)
    return rows, all_ids, all_weights, scales


@design_type
class CombineWords(Words):
    """All partial sums, by one kernel."""

    row_bytes: int = knob(256, near=halved(128))
    transport: ClassVar[str] = "lamport"


class Pairs(NamedTuple):
    """y [W * most * k, H], ids and weights [W * most, k] of all ranks' tokens, up to ``most`` of each.

    weights  None: y has a row for each token [W * most, H], which is sent as it is
    """

    y: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None


class PairLengths(NamedTuple):
    """Compile-time sizes: elements of a row, k, experts of a rank.

    Numbers of tokens are not: prompts have many, and each would be compiled for.
    tp  neighbouring ranks that hold slices of the same experts
    """

    width: int
    choices: int
    experts: int
    tp: int = 1


@triton.jit
def choice_of(pairs, token, j, LENGTHS: tl.constexpr, there, team):
    """(pair, whether its expert is here, its weight or 0) of choice j of tokens."""
    pair = token.to(tl.int64) * LENGTHS.choices + j
    id = tl.load(pairs.ids + pair, mask=there, other=-1)
    held = (id >= 0) & (id // LENGTHS.experts == wl.rank(team) // LENGTHS.tp)
    weight = 0.0
    if pairs.weights is not None:
        weight = tl.load(pairs.weights + pair, mask=there, other=0.0).to(tl.float32)
    return pair, held, weight


@triton.jit
def sums_of_token(pairs, token, column, LENGTHS: tl.constexpr, there, team):
    """[owners, BLOCK] weighted sums in fp32 of a tile's columns, which lie in one token of each owner

    token, there  [owners]

    All ids are loaded, then all rows, then they are added up: one after the other takes k times the memory's latency.
    """
    CHOICES: tl.constexpr = LENGTHS.choices
    choices, rows, chosen = (), (), there & (token < 0)
    for j in tl.static_range(CHOICES):
        choices += (choice_of(pairs, token, j, LENGTHS, there, team),)
    if pairs.weights is None:
        for j in tl.static_range(CHOICES):
            chosen = chosen | choices[j][1]
        at = pairs.y + token.to(tl.int64)[:, None] * LENGTHS.width + column
        total = tl.load(at, mask=chosen[:, None], other=0.0).to(tl.float32)
    else:
        for j in tl.static_range(CHOICES):
            at = pairs.y + choices[j][0][:, None] * LENGTHS.width + column
            rows += (tl.load(at, mask=choices[j][1][:, None], other=0.0),)
        total = tl.zeros((token.shape[0], column.shape[1]), tl.float32)
        for j in tl.static_range(CHOICES):
            weighted = rows[j].to(tl.float32) * choices[j][2][:, None]
            total += tl.where(choices[j][1][:, None], weighted, 0.0)
    return total


@triton.jit
def sums_of_elements(pairs, token, column, LENGTHS: tl.constexpr, there, team):
    """``sums_of_token`` of tiles that go across tokens: token, column, there [owners, BLOCK]."""
    total, chosen = tl.zeros(there.shape, tl.float32), there & (token < 0)
    # Not unrolled: ids and weights of each element and choice would not fit the registers.
    for j in range(LENGTHS.choices):
        pair, held, weight = choice_of(pairs, token, j, LENGTHS, there, team)
        chosen = chosen | held
        if pairs.weights is not None:
            row = tl.load(pairs.y + pair * LENGTHS.width + column, mask=held, other=0.0).to(tl.float32)
            total += tl.where(held, row * weight, 0.0)
    if pairs.weights is None:
        total = tl.load(pairs.y + token.to(tl.int64) * LENGTHS.width + column, mask=chosen, other=0.0).to(tl.float32)
    return total


@triton.jit
def partials_of(pairs, most, owner, tile, there, LENGTHS: tl.constexpr, BLOCK: tl.constexpr, team):
    """[owners, BLOCK] weighted sums in fp32 of what this rank has for tile ``tile`` of their tokens

    owner, there  [owners]: a rank, and whether its sums are wanted
    """
    first, columns = tile * BLOCK, tl.arange(0, BLOCK)[None, :]
    if LENGTHS.width % BLOCK == 0:
        # Not a remainder, of which the compiler forgets that 16 bytes are together.
        local = first // LENGTHS.width
        token, column = owner * most + local, first - local * LENGTHS.width + columns
        there = there & (first < most * LENGTHS.width)
        total = sums_of_token(pairs, token, column, LENGTHS, there, team)
    else:
        place = first + columns
        token, column = owner[:, None] * most + place // LENGTHS.width, place % LENGTHS.width
        there = there[:, None] & (place < most * LENGTHS.width)
        total = sums_of_elements(pairs, token, column, LENGTHS, there, team)
    return total


@triton.jit
def partials_for_each(message, tile, team, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, BLOCK] sums for the tile of each peer's tokens."""
    owners, sent = send_order(team, ROWS), tl.arange(0, ROWS) < wl.num_ranks(team) - 1
    return partials_of(message.x, message.most, owners, tile, sent, message.SIZES, BLOCK, team)


@triton.jit
def own_partials(message, tile, team, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """[BLOCK] sums for the tile of this rank's tokens."""
    me = tl.full((1,), wl.rank(team), tl.int32)
    return partials_of(message.x, message.most, me, tile, me >= 0, message.SIZES, BLOCK, team).reshape(BLOCK)


@triton.jit
def store_sum(received, message, tile, team):
    """Store the sum of the ranks' partial sums, ranks ascending."""
    ranks = tl.arange(0, received.shape[0])[:, None]
    place = tile * received.shape[1] + tl.arange(0, received.shape[1])
    received, total = received.to(tl.float32), tl.zeros((received.shape[1],), tl.float32)
    for source in tl.static_range(wl.num_ranks(team)):
        # Each rank's row alone: a sum over all ranks would have an order of the compiler's choice.
        total += tl.sum(tl.where(ranks == source, received, 0.0), axis=0)
    inside = place < message.tokens * message.SIZES.width
    tl.store(message.out + place, total.to(message.out.dtype.element_ty), mask=inside)


# out[t] = sum over ranks, ascending, of their weighted sums for token t of this rank's tokens        x: ``Pairs``, out [T, H]
# Zeros are sent for tokens without an expert here.
# every rank   | push tile 0, one row to each | push 1 | receive, sum, store 0 | push 2 | receive, sum, store 1 | ...
COMBINE = Body(name="combine_words_kernel", send=partials_for_each, own=own_partials, store=store_sum)


def combine_words(design: CombineWords, team: Team, given: CombineArguments) -> torch.Tensor:
    """[tokens, H] of this rank's tokens."""
    (rows, k), H = given.ids.shape, given.y.shape[1]
    out, most = given.y.new_empty((given.tokens, H)), rows // team.size
    pairs, lengths = (
        Pairs(*dense(given.y, given.ids, given.weights)),
        PairLengths(H, k, given.held(team).count, given.tp),
    )
    message, tokens = (pairs, out, most * H), (given.tokens, most)
    launch(COMBINE, message, given.y.dtype, team, design.push, tokens=tokens, sizes=lengths)
    return out
