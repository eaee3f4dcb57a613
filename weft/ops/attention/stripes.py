"""Kernel of gathered_prefill_attention: attention to stripes as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.online_softmax import LOG2_E, PrefillTile, over_keys
from weft.kernels.paged_cache import CacheSizes, PagedCache
from weft.kernels.tile_schedule import buffer_of
from weft.ops.attention.gathered_plan import GatheredArguments
from weft.ops.attention.paged_prefill_attention import KeyBlocks
from weft.ops.local import compiler_options
from weft.runtime.launching import launch_of

if TYPE_CHECKING:
    from weft.runtime.team.team import Team
    from weft.transport.copy_channel import CopyChannel

LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


class Stripes(NamedTuple):
    """Keys and values of the stripes (ZigzagRanges), the argument ``keys`` of the kernel.

    own, others  ``PagedCache`` without pages: this rank's [T, heads, D], and receive buffers [W - 1, room, heads, D], where
                 rank me + 1 + d (mod W) has panel d
    table        ZigzagRanges.stripes
    batch        sequences
    room, chunk  rows of a panel, and of a chunk of it
    """

    own: PagedCache
    others: PagedCache
    table: torch.Tensor
    batch: int
    room: int
    chunk: int


@triton.jit
def over_stripe(
    x, position, cache, row, first, end, seen, head, scale, largest, total, acc, SIZES: tl.constexpr, TILE: tl.constexpr
):
    """The online softmax of rows ``x`` over keys at positions first .. end - 1 more.

    row   of ``cache``, where the first key lies
    seen  all rows see the keys before this position; ``first`` is one of these, or the state is of earlier keys
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    shift = row.to(tl.int64) - first
    whole = first + tl.maximum(tl.minimum(seen, end) - first, 0) // BLOCK_N * BLOCK_N
    state = largest, total, acc
    state = over_keys(x, position, cache, shift, head, first, whole, scale, state, False, SIZES, TILE)
    # Rows after the stripe see all of it, and no more.
    position = tl.minimum(position, end - 1)
    return over_keys(x, position, cache, shift, head, whole, end, scale, state, True, SIZES, TILE)


@triton.jit
def gathered_prefill_attention_kernel(
    q,
    keys,
    out,
    lse,
    ranges,
    tiles,
    landed,
    scale,
    team,
    SIZES: tl.constexpr,
    TILE: tl.constexpr,
    GATHERED: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """out[t, h, :] = softmax(q[t, h, :] . keys of t's sequence up to t * scale) @ its values

    grid: (N * heads,)

    q, out    [T, heads * group, D]: this rank's tokens, or with GATHERED False all ranks' one after the other
    lse       fp32 [T, heads * group]: log of the sum of exp(score * scale); unused unless WITH_LSE
    keys      ``Stripes``; with GATHERED False all keys are in ``own``
    ranges    int32 [segments, 3]: (first token, length, position of the first) of each segment; segments of GATHERED are
              (half, sequence), else (rank, half, sequence)
    tiles     int32 [N, 2]: (segment, tile of its rows) of program i * heads + KV head

    signals   copy engine of rank s, after each chunk of its keys and values: chunk c of the channel ``landed``
    waits     before the first load of a chunk: chunk c of rank s. No chunk is awaited that rank s does not send: a stripe
              after the queries has no keys for them
    order     own stripe, the other own one, then stripes of ranks me + 1, me + 2, … (mod W), each from its first key on: the
              same bits every run, whatever arrives first. Every row sees the first key of its stripe, so no maximum is
              -inf after the first step
    reuse     of ``others``: CopyChannel
    progress  programs wait for copy engines only, which wait for begin_kernel, so they need not all be resident

    copy  | s1 chunk 0 | s1 chunk 1 | s2 chunk 0 | ..
    attn  | s0 | s1 chunk 0 | s1 chunk 1 | s2 chunk 0 | ..                                           rank 0
    """
    D: tl.constexpr = SIZES.dim
    GROUP: tl.constexpr = TILE.group
    BLOCK_M: tl.constexpr = TILE.block_m
    world: tl.constexpr = wl.num_ranks(team)
    wl.follow_previous_kernel()
    me = wl.rank(team)
    head = tl.program_id(0) % SIZES.heads
    tiles += 2 * (tl.program_id(0) // SIZES.heads)
    segment, tile = tl.load(tiles), tl.load(tiles + 1)
    ranges += 3 * segment
    first_token, length, before = tl.load(ranges), tl.load(ranges + 1), tl.load(ranges + 2)
    sequence = segment % keys.batch
    owner = me if GATHERED else segment // (2 * keys.batch)
    is_second = segment // keys.batch % 2
    stripe = tl.where(is_second == 1, 2 * world - 1 - owner, owner)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    exists = row < length * GROUP
    # Heads of a row, in q and lse.
    of_row = (first_token.to(tl.int64) + token) * (SIZES.heads * GROUP) + head * GROUP + row % GROUP
    at = of_row[:, None] * D + tl.arange(0, D)[None, :]
    position = before + token
    seen = before + tile * BLOCK_M // GROUP + 1
    end = before + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, length)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    x = tl.load(q + at, mask=exists[:, None], other=0.0)
    began = wl.begin_tile(team)
    largest, total, acc = over_stripe(
        x, position, keys.own, first_token, before, end, seen, head, scale, largest, total, acc, SIZES, TILE
    )
    # Before this stripe come further ones in memory of this rank: its first one, or all.
    begin = me if GATHERED else 0
    for other in range(begin, tl.where(is_second == 1, me + 1, begin) if GATHERED else stripe):
        table = keys.table + (other * keys.batch + sequence) * 4
        there = tl.load(table) if GATHERED else tl.load(table + 1)
        largest, total, acc = over_stripe(
            x, position, keys.own, there, tl.load(table + 2), tl.load(table + 3), seen, head, scale, largest, total, acc,
            SIZES, TILE,
        )  # fmt: skip
    wl.end_tile(began, tl.program_id(0) // SIZES.heads, head, team)
    if GATHERED:
        call = wl.current_call(landed)
        for place in range(2, 2 * world):
            source = (me + place // 2) % world
            other = tl.where(place % 2 == 0, source, 2 * world - 1 - source)
            table = keys.table + (other * keys.batch + sequence) * 4
            there, first = tl.load(table), tl.load(table + 2)
            past = there + tl.where(other < stripe, tl.load(table + 3) - first, 0)
            last_chunk = tl.where(past > there, tl.cdiv(past, keys.chunk), 0)
            panel = buffer_of(source, me, world).to(tl.int64) * keys.room
            for chunk in range(there // keys.chunk, last_chunk):
                wl.chunk_wait(call, source, chunk, team)
                began = wl.begin_tile(team)
                low, high = tl.maximum(there, chunk * keys.chunk), tl.minimum(past, (chunk + 1) * keys.chunk)
                largest, total, acc = over_stripe(
                    x, position, keys.others, panel + low, first + low - there, first + high - there, seen, head, scale,
                    largest, total, acc, SIZES, TILE,
                )  # fmt: skip
                wl.end_tile(began, tl.program_id(0) // SIZES.heads, head, team)
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=exists[:, None])
    if WITH_LSE:
        tl.store(lse + of_row, (largest + tl.log2(total)) * LN_2, mask=exists)


def attend(
    blocks: KeyBlocks,
    team: Team,
    given: GatheredArguments,
    keys: Stripes,
    tables: Sequence[torch.Tensor],
    channel: CopyChannel | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel on the rows of ``tables``: (ranges, tiles). channel: None, if all keys are here."""
    q, return_lse = given.q, given.return_lse
    (T, q_heads, D), heads = q.shape, keys.own.key_pages.shape[1]
    out, lse = torch.empty_like(q), q.new_empty((T, q_heads) if return_lse else 0, dtype=torch.float32)
    sizes, tile = CacheSizes(heads, 0, D), PrefillTile(q_heads // heads, given.block_m, blocks.block_n)
    ranges, tiles = tables

    def constants() -> dict[str, Any]:
        own = {"SIZES": sizes, "TILE": tile, "GATHERED": channel is not None, "WITH_LSE": return_lse}
        return {**own, **compiler_options(blocks, team.caps)}

    programs = tiles.shape[0] * heads
    if programs:
        key = blocks, sizes, tile, channel is not None, return_lse
        launch = launch_of(team, gathered_prefill_attention_kernel, key, constants)
        landed = keys.table if channel is None else channel.landed.view  # unused without one
        launch(programs, q, keys, out, lse, ranges, tiles, landed, given.scale * LOG2_E, team.view)
    return out, lse
