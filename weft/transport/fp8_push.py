"""Push transport "fp8": weft.transport.push of a tile of e4m3 words and their scales.

    stage     [W, WIDTH] words (weft.kernels.fp8_words), then [W, WIDTH / 32] fp32 scales as int words: rows s by rank s

Words and scales are their own flags, the scales because they are positive. ``receive_groups`` waits for both, in the same
round trips to memory, so values never meet the scales of another epoch. Order, reuse and progress are weft.transport.push's.
"""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl
from weft.transport.push import WORDS_OF_SCALE, is_sent, row_bytes_of, send_order, stage_words, stages_of


@triton.jit
def send_groups(words, scales, slot, epoch, team, WIDTH: tl.constexpr):
    """Send row i of ``words`` [ROWS, WIDTH] and of ``scales`` to ``send_order(team)[i]``.

    scales: [ROWS, WIDTH / 32]. It does not wait. ``slot``, ``epoch``: as of ``push.send``.
    """
    ROWS: tl.constexpr = words.shape[0]
    GROUPS: tl.constexpr = WIDTH // WORDS_OF_SCALE
    world: tl.constexpr = wl.num_ranks(team)
    STAGE: tl.constexpr = stage_words(tl.int32, WIDTH, "fp8", world)
    OF_SLOT: tl.constexpr = stages_of(row_bytes_of(tl.int32, WIDTH))
    sent = is_sent(team, ROWS)
    began = wl.begin_put(team)
    stage = slot + (epoch % OF_SLOT) * STAGE
    there = wl.symm_at(stage, send_order(team, ROWS), team)[:, None]
    columns, groups = tl.arange(0, WIDTH)[None, :], tl.arange(0, GROUPS)[None, :]
    wl.lamport_store(there + wl.rank(team) * WIDTH + columns, words, sent & (columns < WIDTH))
    of_scales = there + (world * WIDTH + wl.rank(team) * GROUPS) + groups
    wl.lamport_store(of_scales, scales.to(tl.int32, bitcast=True), sent & (groups < GROUPS))
    wl.end_put(began, stage, (world - 1) * (row_bytes_of(tl.int32, WIDTH) + 4 * GROUPS), wl.rank(team), team)


@triton.jit
def receive_groups(own_words, own_scales, slot, epoch, before, team, ordered, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(words [ROWS, WIDTH], scales [ROWS, WIDTH / 32]), row s from rank s, the own ones as this rank's.

    Rows beyond W are 0. ``epoch``, ``before``, ``ordered``: as of ``push.receive``.
    """
    GROUPS: tl.constexpr = WIDTH // WORDS_OF_SCALE
    world: tl.constexpr = wl.num_ranks(team)
    STAGE: tl.constexpr = stage_words(tl.int32, WIDTH, "fp8", world)
    OF_SLOT: tl.constexpr = stages_of(row_bytes_of(tl.int32, WIDTH))
    me = wl.rank(team)
    ranks, columns, groups = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :], tl.arange(0, GROUPS)[None, :]
    from_others = (ranks < world) & (ranks != me)
    here, of_scales = ranks * WIDTH + columns, world * WIDTH + ranks * GROUPS + groups
    stage = slot + (epoch % OF_SLOT) * STAGE
    old = slot + ((before + OF_SLOT) % OF_SLOT) * STAGE
    words, scales = wl.lamport_receive_keyed(
        stage + here, old + here, from_others & (columns < WIDTH),
        stage + of_scales, old + of_scales, from_others & (groups < GROUPS), team, ordered, stage,
    )  # fmt: skip
    scales = tl.where(ranks == me, own_scales[None, :], scales.to(tl.float32, bitcast=True))
    return tl.where(ranks == me, own_words[None, :], words), scales
