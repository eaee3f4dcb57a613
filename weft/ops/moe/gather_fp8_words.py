"""Tokens of all ranks to all ranks in fp8: one kernel rounds and sends them.

The words are their own flag, as those of ``gather_words``. A tile is a message of BLOCK int words, in one of two forms:

    rows      blocks of 128 columns, 32 words each, and in the tile's last 32 words the scales of these blocks
    choices   ids, then weights (16 bits each are widened), of max_tokens tokens

So the program that has a block has its scale too, and no other kernel rounds the rows first. Bytes and scales are those of
``weft.kernels.fp8``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from weft.kernels.fp8 import COLUMNS, E4M3, quantized
from weft.ops.moe.gather_words import WORDS, GatherWords, load_part, store_part
from weft.ops.registration import as_words
from weft.runtime.arithmetic import cdiv
from weft.transport.exchange import Body, launch
from weft.transport.push import is_rank

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


class Rows(NamedTuple):
    """Tokens of a rank: x [T, H], ids and weights as int words [T, k]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Tokens(NamedTuple):
    """Tokens of all ranks as int words."""

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor


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
    """Number of tiles of ``blocks`` blocks of rows, before those of choices."""
    return -(-blocks // (block // WORDS.value - 1))


@triton.jit
def load_tile(message, tile, team, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """[BLOCK] words of this rank's message; ids of -1 behind its T tokens."""
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


# rows, ids, weights, scales of all ranks [W, ...] = those of each rank, its rows in fp8     x: ``Rows`` of this rank
# every rank   | push tile 0 to all | push 1 | receive, store W tiles 0 | push 2 | receive, store W tiles 1 | ...
BODY = Body(name="gather_fp8_words_kernel", send=load_tile, own=None, store=store_tile)


def gather_fp8_words(
    design: GatherWords, team: Team, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, most: int
) -> tuple[torch.Tensor, ...]:
    """(rows in fp8, ids, weights, scales) of all ranks, ``most`` tokens of each.

    ValueError for rows that are no whole blocks of columns.
    """
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
    mine = Rows(x.contiguous(), as_words(ids, torch.int32), as_words(weights, narrow))
    theirs = Tokens(
        as_words(rows, torch.int32),
        as_words(all_ids, torch.int32),
        as_words(all_weights, narrow),
        as_words(scales, torch.int32),
    )
    block = design.row_bytes // 4
    words = (row_tiles(blocks.all, block) + cdiv(2 * blocks.choices, block)) * block
    launch(BODY, (mine, theirs, words), torch.int32, team, design.push, tokens=(T, most), sizes=blocks)
    return rows, all_ids, all_weights, scales
