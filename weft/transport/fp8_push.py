"""Push transport "fp8": weft.transport.push of a tile of e4m3 words and their scales.

    stage     [W, WORDS] words (weft.kernels.fp8_words), then [W, GROUPS] fp32 scales as int words: rows s by rank s

Words and scales are their own flags, the scales because they are positive. ``receive_groups`` waits for both, in the same
round trips to memory, so values never meet the scales of another epoch. Order, reuse and progress are weft.transport.push's.
"""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl
from weft.transport.push import is_sent, row_bytes_of, send_order, stage_words, stages_of


@triton.jit
def send_groups(words, scales, slot, epoch, team):
    """Send row i of ``words`` [ROWS, WORDS] and of ``scales`` [ROWS, GROUPS] to ``send_order(team)[i]``.

    It does not wait. ``slot``, ``epoch``: as of ``push.send``.
    """
    ROWS: tl.constexpr = words.shape[0]
    WIDTH: tl.constexpr = words.shape[1]
    GROUPS: tl.constexpr = scales.shape[1]
    world: tl.constexpr = wl.num_ranks(team)
    sent = is_sent(team, ROWS)
    began = wl.begin_put(team)
    stage = slot + (epoch % stages_of(row_bytes_of(tl.int32, WIDTH))) * stage_words(tl.int32, WIDTH, "fp8", world)
    there = wl.symm_at(stage, send_order(team, ROWS), team)[:, None]
    wl.lamport_store(there + wl.rank(team) * WIDTH + tl.arange(0, WIDTH)[None, :], words, sent)
    of_scales = there + (world * WIDTH + wl.rank(team) * GROUPS) + tl.arange(0, GROUPS)[None, :]
    wl.lamport_store(of_scales, scales.to(tl.int32, bitcast=True), sent)
    wl.end_put(began, stage, (world - 1) * (row_bytes_of(tl.int32, WIDTH) + 4 * GROUPS), wl.rank(team), team)


@triton.jit
def send_to_all(words, scales, slot, epoch, team, ROWS: tl.constexpr):
    """Send ``words`` [WORDS] and ``scales`` [GROUPS] to all ranks, as ``send_groups``."""
    rows = tl.broadcast_to(words[None, :], (ROWS, words.shape[0]))
    send_groups(rows, tl.broadcast_to(scales[None, :], (ROWS, scales.shape[0])), slot, epoch, team)


@triton.jit
def receive_groups(own_words, own_scales, slot, epoch, before, team, ordered, ROWS: tl.constexpr):
    """(words [ROWS, WORDS], scales [ROWS, GROUPS]), row s from rank s, the own ones as this rank's.

    Rows beyond W are 0. ``epoch``, ``before``, ``ordered``: as of ``push.receive``.
    """
    WIDTH: tl.constexpr = own_words.shape[0]
    GROUPS: tl.constexpr = own_scales.shape[0]
    world: tl.constexpr = wl.num_ranks(team)
    STAGE: tl.constexpr = stage_words(tl.int32, WIDTH, "fp8", world)
    OF_SLOT: tl.constexpr = stages_of(row_bytes_of(tl.int32, WIDTH))
    me, ranks = wl.rank(team), tl.arange(0, ROWS)[:, None]
    from_others = (ranks < world) & (ranks != me)
    here = ranks * WIDTH + tl.arange(0, WIDTH)[None, :]
    of_scales = world * WIDTH + ranks * GROUPS + tl.arange(0, GROUPS)[None, :]
    stage = slot + (epoch % OF_SLOT) * STAGE
    old = slot + ((before + OF_SLOT) % OF_SLOT) * STAGE
    words, scales = wl.lamport_receive_keyed(
        stage + here, old + here, tl.broadcast_to(from_others, (ROWS, WIDTH)),
        stage + of_scales, old + of_scales, tl.broadcast_to(from_others, (ROWS, GROUPS)), team, ordered, stage,
    )  # fmt: skip
    scales = tl.where(ranks == me, own_scales[None, :], scales.to(tl.float32, bitcast=True))
    return tl.where(ranks == me, own_words[None, :], words), scales
