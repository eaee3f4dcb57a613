"""Attention in runs of positions: the design ``fixed_runs`` of two ops, and its kernel.

``paged_attention`` and ``paged_prefill_attention`` have it. A token's row has the same bits in a decode step, in a prefill cut
in any way, beside drafts, and in any batch (weft.kernels.fixed_runs).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fixed_runs import (
    NOTHING,
    RunPartials,
    RunTile,
    arrive_at_pair,
    fold_run,
    load_run,
    run_partial,
    runs_between,
    store_run,
)
from weft.kernels.online_softmax import ScoreRule, before_keys, sinks_at
from weft.kernels.paged_cache import CacheSizes, PagedCache, as_values, scale_of_scores
from weft.kernels.slices import shape_free_dots
from weft.ops.knobs import check_knobs, counts, design_type, halved, knob, powers, stepped
from weft.ops.local import capabilities_of, compiler_options
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.launching import launch_on

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities


# Positions of a run, and the first positions, whose runs are half as long.
RUN, EARLY = 512, 2048


@design_type
class FixedRuns:
    """Attention in runs of positions.

    The bits depend on block_n, run, early and num_warps, which ``fixed_runs_for`` sets by the head.

    block_n  keys of a step, a power of two of at least 16
    run      positions of a run, a multiple of block_n
    early    positions, a multiple of run, whose runs are half as long, also a multiple of block_n
    programs that share out the runs of a tile, at most; the bits do not depend on it
    """

    block_n: int = knob(64, powers(16))
    run: int = knob(RUN)
    programs: int = knob(1, counts(), halved())
    num_warps: int = knob(4)
    num_stages: int = knob(3, near=stepped())
    early: int = knob(0)

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.run < 1 or self.run % self.block_n:
            raise ValueError(f"run={self.run} is not a multiple of block_n={self.block_n}")
        if self.early < 0 or self.early % self.run or (self.early and self.run // 2 % self.block_n):
            raise ValueError(
                f"early={self.early} with run={self.run} and block_n={self.block_n}: pass 0, or a multiple of run, which is a "
                f"multiple of twice block_n"
            )


def runs_of(tokens: int, run: int, early: int) -> int:
    """Number of runs of the first ``tokens`` positions, at least one."""
    first, late = min(tokens, early), max(tokens - early, 0)
    return max(1, -(-first // max(1, run // 2)) - (-late // run))  # both round up


# Reason of the design.
IN_RUNS = f"invariant: runs of {RUN} positions, of half of it up to {EARLY}, folded in order"


class Rows(NamedTuple):
    """Positions of a call's rows.

    first  decode: int32 [B * queries], tokens that each new token attends to; prefill: ``SequenceRanges.spans``
    tiles  prefill: ``SequenceRanges.tiles``; decode: any tensor
    """

    first: torch.Tensor
    tiles: torch.Tensor


class Attended(NamedTuple):
    """Keys and values that the rows of a call attend to, and how.

    cache, pages, scores  as of ``fixed_runs_kernel``
    window  tokens that a token attends to, itself the last one; None: all up to itself
    """

    cache: PagedCache
    pages: torch.Tensor
    scores: ScoreRule
    window: int | None = None


@triton.jit(do_not_specialize=["max_pages", "runs_of_pair"])
def fixed_runs_kernel(
    q,
    cache,
    pages,
    out,
    rows,
    max_pages,
    runs_of_pair,
    partials,
    scores,
    SIZES: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """out[t, h, :] = softmax(scores of q[t, h, :] . keys of t's sequence up to t) @ its values

    grid: (pairs, programs), a pair a tile of rows of one KV head

    q, out   [T, heads * group, D]
    rows     ``Rows``. QUERIES = 0: a tile is one of ``SequenceRanges``; else of up to TILE.queries of the QUERIES new tokens of
             a sequence, token t of sequence b row b * QUERIES + t, which attends to rows.first of it, 0: none
    pages    [B, max_pages]: key i of sequence b lies in page pages[b, i // page]
    partials ``RunPartials`` with ``runs_of_pair`` runs of a pair, not touched unless TILE.split
    scores   ``ScoreRule``; a sink is folded before the first run
    signals, waits  none: the program of a pair that arrives last folds all runs

    Rows without a key: 0. The bits of a row depend on its query, its keys and values up to its position, SIZES.dim, block_m,
    block_n, run, early and the number of warps; never on the grid, further rows, QUERIES or SIZES.heads.
    """
    D: tl.constexpr = SIZES.dim
    GROUP: tl.constexpr = TILE.group
    ROWS: tl.constexpr = TILE.block_m
    USED: tl.constexpr = ROWS if QUERIES == 0 else GROUP * TILE.queries
    pair, program, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    head, tile = pair % SIZES.heads, pair // SIZES.heads
    shape_free_dots()
    wl.follow_previous_kernel()
    if QUERIES == 0:
        sequence, number = tl.load(rows.tiles + 2 * tile), tl.load(rows.tiles + 2 * tile + 1)
        of_sequence = rows.first + 3 * sequence
        first_token, length, before = tl.load(of_sequence), tl.load(of_sequence + 1), tl.load(of_sequence + 2)
    else:
        PARTS: tl.constexpr = (QUERIES + TILE.queries - 1) // TILE.queries
        sequence, number, length = tile // PARTS, tile % PARTS, QUERIES
        first_token = sequence * QUERIES
    new, of_head, exists = rows_at(tl.arange(0, ROWS), number * USED, length, USED, GROUP)
    if QUERIES == 0:
        position = tl.maximum(tl.where(exists, before + new, -1), -1)
    else:
        position = tl.load(rows.first + first_token + new, mask=exists, other=0) - 1
        position = tl.minimum(position, max_pages * SIZES.page - 1)
    at = cells_of(first_token + new, head, of_head, SIZES, GROUP)
    x = tl.load(q + at, mask=exists[:, None], other=0.0)
    end = tl.max(position, axis=0) + 1
    begin = 0
    if TILE.window is not None:
        least = tl.min(tl.where(position >= 0, position, end), axis=0)
        begin = tl.maximum(least + 1 - TILE.window, 0)
    first_run, runs = runs_between(begin, end, TILE)
    table = pages + sequence.to(tl.int64) * max_pages
    scale, inner = scores.scale, scores.inner
    if inner is None:
        scale = scale_of_scores(scale, cache)
    else:
        inner = scale_of_scores(inner, cache)
    if not TILE.split:
        state = run_start(scores, head * GROUP + of_head, ROWS, D)
        for run in range(first_run, runs):
            partial = run_partial(x, position, cache, table, head, run, begin, end, scale, SIZES, TILE, inner)
            state = fold_run(state, partial)
        store_rows(state, out + at, exists, cache)
    else:
        # Programs without a run end here, but for the first, which stores rows without keys.
        count = tl.minimum(programs, tl.maximum(runs - first_run, 1))
        if program < count:
            for run in range(first_run + program, runs, programs):
                partial = run_partial(x, position, cache, table, head, run, begin, end, scale, SIZES, TILE, inner)
                store_run(partial, runs_of_pair, run - first_run, partials, USED)
            if arrive_at_pair(partials, count):
                FEW: tl.constexpr = triton.next_power_of_2(USED)
                kept = tl.arange(0, FEW)
                new_kept, head_kept, kept_exists = rows_at(kept, number * USED, length, USED, GROUP)
                whole = run_start(scores, head * GROUP + head_kept, FEW, D)
                for run in range(first_run, runs):
                    whole = fold_run(whole, load_run(runs_of_pair, run - first_run, partials, kept, USED, D))
                store_rows(
                    whole, out + cells_of(first_token + new_kept, head, head_kept, SIZES, GROUP), kept_exists, cache
                )


@triton.jit
def rows_at(row, first, length, USED: tl.constexpr, GROUP: tl.constexpr):
    """(new token of the sequence, query head of the KV head, True where it exists) of rows of a tile.

    first  the tile's first row of the sequence; length: new tokens of the sequence; USED: rows of a tile
    """
    new = (first + row) // GROUP
    return new, (first + row) % GROUP, (row < USED) & (new < length)


@triton.jit
def cells_of(token, head, of_head, SIZES: tl.constexpr, GROUP: tl.constexpr):
    """Element offsets [R, D] of rows in tensors [T, heads * group, D]."""
    row = (token.to(tl.int64) * SIZES.heads + head) * GROUP + of_head
    return row[:, None] * SIZES.dim + tl.arange(0, SIZES.dim)[None, :]


@triton.jit
def run_start(scores, head, ROWS: tl.constexpr, D: tl.constexpr):
    """State of rows of query heads ``head`` before their first run."""
    largest, total = tl.full((ROWS,), NOTHING, tl.float32), tl.zeros((ROWS,), tl.float32)
    if scores.sinks is not None:
        largest, total = before_keys(sinks_at(scores.sinks, head, head >= 0))
    return largest, total, tl.zeros((ROWS, D), tl.float32)


@triton.jit
def store_rows(state, out, exists, cache):
    """Store the weighted means of ``state``; 0 where there is no key."""
    _, total, acc = state
    mean = as_values(acc / tl.where(total > 0, total, 1.0)[:, None], cache)
    tl.store(out, mean.to(out.dtype.element_ty), mask=exists[:, None])


def block_m_of(dtype: torch.dtype, group: int) -> int:
    """Rows of a tile: of one instruction of the tensor cores of sm_90 and sm_100; fp32 uses none.

    All query heads of a KV head fit, which are 64 at most.
    """
    return next_power_of_2(max(16, group)) if dtype == torch.float32 else 64


def parts_in_runs(group: int, queries: int, dtype: torch.dtype) -> int:
    """Programs that share out the ``queries`` new tokens of one sequence and KV head."""
    return cdiv(queries, tokens_in_tile(group, queries, dtype))


def tokens_in_tile(group: int, queries: int, dtype: torch.dtype) -> int:
    """New tokens of a program, of ``queries`` of a sequence."""
    return min(queries, block_m_of(dtype, group) // group)


def fixed_runs_for(head_dim: int, dtype: torch.dtype, caps: Capabilities, pairs: int, tokens: int) -> FixedRuns:
    """The design for heads of ``head_dim``; of ``pairs`` tiles that attend to up to ``tokens`` each.

    All fields but ``programs`` depend on the head, the dtype and the kind of GPU alone. A run of 512 positions is eight steps
    of 64 keys, enough for loads to overlap; early runs are half as long, since few programs share short contexts. One H200,
    8 KV heads, two stages: with runs of 256 throughout one sequence of 1,024 tokens takes 8.0 us in place of 12.3, of 16,384
    30.8 in place of 26.1, and 128 of 1,024 tokens 143.7 in place of 141.2 (benchmarks/lab/h200-fixed-runs.json). With three
    stages, as here, only runs of 512 were timed.
    """
    itemsize = max(2, dtype.itemsize)
    block_n = max(16, min(128, (16 << 10) // (head_dim * itemsize)))
    stages = 2 if dtype == torch.float32 or caps.arch.startswith("gfx") else 3
    programs = max(1, min(2 * caps.sms // max(1, pairs), runs_of(tokens, RUN, EARLY)))
    warps = 8 if head_dim > 128 else 4
    return FixedRuns(block_n=block_n, programs=programs, num_warps=warps, num_stages=stages, early=EARLY)


def attend_in_runs(
    design: FixedRuns,
    q: torch.Tensor,
    attended: Attended,
    rows: Rows,
    *,
    queries: int = 0,
    tickets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernel on checked arguments of ``paged_attention``, or with queries=0 of a prefill."""
    cache, pages, scores, window = attended
    out, (T, q_heads, D) = torch.empty_like(q, memory_format=torch.contiguous_format), q.shape
    sizes = CacheSizes.of(cache.key_pages)
    group, caps = q_heads // sizes.heads, capabilities_of(q.device)
    block_m = block_m_of(q.dtype, group)
    if queries == 0:
        per, used, tiles = 0, block_m, rows.tiles.shape[0]
    else:
        per = tokens_in_tile(group, queries, q.dtype)
        used, tiles = group * per, T // queries * cdiv(queries, per)
    pairs = tiles * sizes.heads
    if pairs == 0:
        return out
    room = pages.shape[1] * sizes.page
    # Positions of a tile's rows are neighbours, so that the windows of all rows touch no more runs.
    runs = runs_of(room if window is None else min(room, window + design.run + used), design.run, design.early)
    programs = min(design.programs, runs)
    tile = RunTile(group, block_m, design.block_n, design.run, per, programs > 1, window, design.early)

    launch = launch_on(
        q.device,
        fixed_runs_kernel,
        (tile, sizes, queries, design.num_warps, design.num_stages),
        lambda: {"SIZES": sizes, "TILE": tile, "QUERIES": queries, **compiler_options(design, caps)},
    )
    scratch = RunPartials(out, out, out)
    if programs > 1:
        fp32 = {"dtype": torch.float32, "device": q.device}
        arrivals = torch.zeros(pairs, dtype=torch.int32, device=q.device) if tickets is None else tickets
        scratch = RunPartials(
            torch.empty((pairs, runs, used, D), **fp32), torch.empty((pairs, runs, 2, used), **fp32), arrivals
        )
    launch(
        (pairs, programs), q.contiguous(), cache, pages.contiguous(), out, rows, pages.shape[1], runs, scratch, scores
    )
    return out
