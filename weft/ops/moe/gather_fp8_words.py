"""Tokens of all ranks to all ranks in fp8: one kernel rounds and sends them.

The words are their own flag, as those of ``gather_words``. A tile is a message of BLOCK int words, in one of two forms:

    rows      blocks of 128 columns, 32 words each, and in the tile's last 32 words the scales of these blocks
    choices   ids, then weights (16 bits each are widened), of max_tokens tokens

So the program that has a block has its scale too, and no other kernel rounds the rows first. Bytes and scales are those of
``fp8_rows``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.moe.fp8_rows import COLUMNS, E4M3, quantized
from weft.ops.moe.gather_words import GatherWords, load_part, store_part
from weft.ops.registration import as_words
from weft.runtime.arithmetic import cdiv
from weft.transport.push import clears_in_order, is_rank, keep_epoch, launch, my_slot, receive, send

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Words of a block of columns, and so the most scales of a tile.
WORDS: tl.constexpr = tl.constexpr(COLUMNS.value // 4)


class Rows(NamedTuple):
    """Tokens of a rank: x [T, H], ids and weights as int words [T, k]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Blocks(NamedTuple):
    """Compile-time sizes of a rank's part: blocks of 128 columns of all rows, and of one; ids."""

    all: int
    of_row: int
    choices: int


def fits(design: GatherWords, width: int) -> bool:
    """True if rows of ``width`` are whole blocks, and a tile has a block and a place for each scale.

    A thread has at most eight words: of sixteen, code of ptxas 12.8 lost every eighth byte (sm_90).
    """
    slots, threads = design.row_bytes // (4 * WORDS.value), 32 * design.num_warps
    return width % COLUMNS.value == 0 and 2 <= slots <= WORDS.value + 1 and design.row_bytes <= 32 * threads


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
def load_tile(mine, T, tile, ROW_TILES: tl.constexpr, BLOCKS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK] words of tile ``tile`` of this rank's message; ids of -1 behind its T tokens."""
    if tile < ROW_TILES:
        words = quantized_tile(mine.x, T, tile, BLOCKS, BLOCK)
    else:
        at = (tile - ROW_TILES) * BLOCK + tl.arange(0, BLOCK)
        ids = load_part(mine.ids, at, 0, T, BLOCKS.choices // TOKENS, -1)
        weights = load_part(mine.weights, at, BLOCKS.choices, T, BLOCKS.choices // TOKENS, 0)
        words = tl.where(at < BLOCKS.choices, ids, weights)
    return words


@triton.jit
def store_tile(rows, scales, words, tile, BLOCKS: tl.constexpr, there):
    """Store the words [ROWS, BLOCK] of tile ``tile`` of all ranks' rows."""
    SLOTS: tl.constexpr = words.shape[1] // WORDS
    column, source = tl.arange(0, words.shape[1])[None, :], tl.arange(0, words.shape[0])[:, None].to(tl.int64)
    first, slot, lane = tile * (SLOTS - 1), column // WORDS, column % WORDS
    is_row = there & (slot < SLOTS - 1) & (first + slot < BLOCKS.all)
    tl.store(rows + (source * BLOCKS.all + first + slot) * WORDS + lane, words, mask=is_row)
    is_scale = there & (slot == SLOTS - 1) & (lane < SLOTS - 1) & (first + lane < BLOCKS.all)
    tl.store(scales + source * BLOCKS.all + first + lane, words, mask=is_scale)


@triton.jit(do_not_specialize=["T"])
def gather_fp8_words_kernel(
    mine,
    rows,
    T,
    buffer,
    epochs,
    team,
    ids,
    weights,
    scales,
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
):
    """rows, ids, weights, scales of all ranks [W, ...] = ``mine`` of each, its rows in fp8

    grid     (programs,), each over every programs-th tile of BLOCK words

    mine: ``Rows`` of this rank's T tokens; rows, scales, ids, weights as words; BLOCKS: ``Blocks`` of TOKENS tokens; buffer,
    epochs: ``Slots``

    One send and receive a tile; signals, order, reuse: weft.transport.push.

    every rank   | push tile 0 to all | push 1 | receive, store W tiles 0 | push 2 | receive, store W tiles 1 | ...
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    slot = my_slot(buffer, BLOCK, TRANSPORT, team)
    wl.follow_previous_kernel()
    epoch = wl.next_epoch(epochs + program)
    columns, there = tl.arange(0, BLOCK), is_rank(team, ROWS)
    ROW_TILES: tl.constexpr = (BLOCKS.all + BLOCK // WORDS - 2) // (BLOCK // WORDS - 1)
    TILES: tl.constexpr = ROW_TILES + (2 * BLOCKS.choices + BLOCK - 1) // BLOCK
    ordered = clears_in_order(slot, tl.cdiv(TILES, programs), BLOCK)
    own = load_tile(mine, T, program, ROW_TILES, BLOCKS, TOKENS, BLOCK)
    send(tl.broadcast_to(own[None, :], (ROWS, BLOCK)), slot, epoch, team, TRANSPORT, BLOCK)
    for tile in range(program, TILES, programs):
        following = own
        if tile + programs < TILES:
            following = load_tile(mine, T, tile + programs, ROW_TILES, BLOCKS, TOKENS, BLOCK)
            send(tl.broadcast_to(following[None, :], (ROWS, BLOCK)), slot, epoch + 1, team, TRANSPORT, BLOCK)
        words = receive(own, slot, epoch, epoch - 1, team, ordered, ROWS, TRANSPORT, BLOCK)
        if tile < ROW_TILES:
            store_tile(rows, scales, words, tile, BLOCKS, there)
        else:
            at = (tile - ROW_TILES) * BLOCK + columns
            store_part(ids, words, at, 0, BLOCKS.choices, there)
            store_part(weights, words, at, BLOCKS.choices, BLOCKS.choices, there)
        own = following
        epoch += 1
    keep_epoch(epochs, epoch - 1)


def gather_fp8_words(
    design: GatherWords, team: Team, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, most: int
) -> tuple[torch.Tensor, ...]:
    """(rows in fp8, ids, weights, scales) of all ranks, ``most`` tokens of each.

    Only where ``fits`` is True.
    """
    (T, H), k = x.shape, ids.shape[1]
    blocks = Blocks(most * H // COLUMNS.value, H // COLUMNS.value, most * k)
    rows = x.new_empty((team.size * most, H), dtype=E4M3)
    scales = x.new_empty((len(rows), blocks.of_row), dtype=torch.float32)
    all_ids, all_weights = (one.new_empty((len(rows), k)) for one in (ids, weights))
    narrow = torch.int32 if weights.itemsize == 4 else torch.int16
    mine = Rows(x.contiguous(), as_words(ids, torch.int32), as_words(weights, narrow))
    theirs = [as_words(all_ids, torch.int32), as_words(all_weights, narrow), as_words(scales, torch.int32)]
    slots = design.row_bytes // (4 * WORDS.value)
    tiles = cdiv(blocks.all, slots - 1) + cdiv(8 * blocks.choices, design.row_bytes)
    constants = {"BLOCKS": blocks, "TOKENS": most}
    words = as_words(rows, torch.int32)
    launch(gather_fp8_words_kernel, mine, words, T, tiles, team, design.push, *theirs, **constants)
    return rows, all_ids, all_weights, scales
