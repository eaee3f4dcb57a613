"""Grouped GEMMs: each expert's weight times the rows of its pairs, in one persistent kernel.

Tiles are ragged: at most ``Schedule.block`` pairs of one expert by a block of columns. Nothing is padded in memory. The weight
is read through a tensor descriptor of experts and rows, so no coordinate grows with experts * N * K. Rows of x are gathered by
token as they are loaded, or lie in the order of the pairs. Gathered rows may be fp8 with scales (``weft.kernels.fp8``): they
are multiplied as they are loaded and rounded to the weight's dtype.

    grouped_matmul_silu_mul   h[i] = silu(x[t] @ gate.T) * (x[t] @ up.T)      pair i of the schedule is pair p, of token t
    grouped_matmul            y[p] = h[i] @ weight.T

A gated tile reads a block of gate's rows and the same of up's as one operand, so one product gives both halves of its columns.
With few pairs a tile is computed transposed: the weight's rows fill the tensor instruction, which has at least 64 rows. The
first operand of that instruction must come from shared memory as it was loaded, so there gate and up are two products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import weft.language as wl
from weft.kernels.fp8 import COLUMNS
from weft.kernels.gemm_tile import halves
from weft.kernels.operands import can_describe
from weft.ops.knobs import check_knobs, flipped, halved, knob, powers, stepped
from weft.ops.local import capabilities_of
from weft.ops.moe.routing import Schedule
from weft.plan.planned import AUTO
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.codec import exchangeable
from weft.runtime.recording import traced_view

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities
    from weft.runtime.team.channel import ChannelView
    from weft.runtime.team.view import TeamView

# Pairs from which on tiles of 16 pairs are enough for two programs an SM: 256 are faster so, 64 are not. Not measured between.
MANY_PAIRS = 256


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedTiles:
    """Persistent programs, each over every programs-th tile.

    block_n     rows of the weight in a tile, gate's and up's together: a power of two of at least 16
    transposed  products are computed as weight @ x.T, for tiles of few pairs
    per_sm      programs of an SM
    columns     of the result, about, by which all tiles of pairs go before the next ones are begun
    """

    block_n: int = knob(256, powers(16), halved(32, 256))
    block_k: int = knob(64, powers(16), halved(high=256))
    transposed: bool = knob(False, near=flipped)
    per_sm: int = knob(1, near=stepped())
    columns: int = knob(1024, near=halved(128))
    num_warps: int = knob(8, near=halved(2, 8))
    num_stages: int = knob(3, near=stepped())
    __post_init__ = check_knobs


class GroupedCall(NamedTuple):
    """Sizes that the plan of a grouped GEMM depends on.

    block   pairs of a tile
    pairs   of all tiles at most
    gather  a row for each token, else rows in the order of the pairs
    """

    block: int
    pairs: int
    N: int
    K: int
    dtype: torch.dtype
    gather: bool
    design: str = AUTO


class Form(NamedTuple):
    """Compile-time form of a grouped GEMM.

    gated    gate and up, and silu(gate) * up of the results
    choices  k where rows of x are gathered: pair p is token p // k; 0 where they are in the order of the schedule
    block    pairs of a tile
    even     block_k divides K
    described  x is a descriptor, for rows in the order of the schedule that begin on 16 bytes
    turned   the weight is [experts, K, N], for gradients: dy @ weight[e]
    in_place this rank's rows are not in x but in ``Arriving.own``
    """

    gated: bool
    choices: int
    block: int
    even: bool
    described: bool
    turned: bool
    in_place: bool = False


class Arriving(NamedTuple):
    """Rows that copy engines bring while a grouped GEMM runs, an argument of its kernel.

    own     [T, K]: this rank's rows, read in place if FORM.in_place, else they are in x too
    tokens  most of a rank: row t of rank s is x[s * tokens + t]
    chunk   rows under one flag: chunk c of a rank has rows from c * chunk on, and comes after chunk c - 1
    """

    own: torch.Tensor
    tokens: int
    chunk: int


class Coming(NamedTuple):
    """Rows of tokens that copy engines bring into x while a grouped GEMM runs. in_place: of ``Form``."""

    rows: Arriving | None = None
    landed: ChannelView | None = None
    team: TeamView | None = None
    in_place: bool = False


NOTHING_COMES = Coming()


class GroupedArguments(NamedTuple):
    """Arguments of a grouped GEMM. gather: x has a row for each token; scales: of fp8 rows."""

    x: torch.Tensor
    weight: torch.Tensor
    schedule: Schedule
    gather: bool
    scales: torch.Tensor | None


@triton.jit
def await_rows(first, last, arriving, landed, team):
    """Acquire: return once all rows from ``first`` to ``last`` are here.

    Rows are in the order of ranks me, me + 1, … (mod W). It waits for the last chunk of each rank between the two, and of
    ``last``'s rank for the one that has it: a rank's chunks arrive in their order, so all before it are here too.
    """
    world: tl.constexpr = wl.num_ranks(team)
    me, call = wl.rank(team), wl.current_call(landed)
    begin = (first // arriving.tokens + world - me) % world
    end = (last // arriving.tokens + world - me) % world
    for step in range(tl.maximum(begin, 1), end + 1):
        row = tl.where(step == end, last % arriving.tokens, arriving.tokens - 1)
        wl.chunk_wait(call, (me + step) % world, row // arriving.chunk, team)


@triton.jit(do_not_specialize=["slab"])
def grouped_matmul_kernel(
    x,
    scales,
    arriving,
    weight,
    out,
    schedule,
    N,
    K,
    slab,
    landed,
    team,
    FORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """out[row] = x[row] @ weight[e].T of each pair of expert e, gated as FORM says    grid: (programs,)

    x         [T, K] if FORM.choices, and rows of out are in the order of the schedule; else rows in that order, and row p of
              out is pair p's. A descriptor if FORM.described
    scales    [T, ceil(K / 128)] of fp8 rows of x, gathered; or None
    arriving  ``Arriving`` of gathered rows of x, with their channel ``landed``, and each expert's pairs in the order of ranks
              me, me + 1, … (mod W); or None, where landed is None too
    team      of arriving rows, or in a trace (``traced_view``); else None
    weight    descriptor of [experts, N, K] in blocks of BLOCK_N rows, or if FORM.turned of [experts, K, N]; if FORM.gated of
              [experts, 2, N, K] in blocks of BLOCK_N // 2 rows of both, or if TRANSPOSED of one
    schedule  ``Schedule``; out [pairs, N]: rows of pairs that are not in it are not written
    slab      tiles along N that go before the next ones are begun

    signals   none: a tile is one program's. Copy engines of the peers, after each chunk of their rows
    waits     with ``arriving``, before a tile's first load of x: for the ranks from its first pair's to its last pair's, but
              this one (``await_rows``). Other pairs of the tile lie between the two. This rank's rows are read from ``own``
    progress  programs wait for copy engines only, so they need not all be resident
    """
    BLOCK_M: tl.constexpr = FORM.block
    WIDTH: tl.constexpr = BLOCK_N // 2 if FORM.gated else BLOCK_N
    wl.follow_previous_kernel()
    tile_rows, tile_columns = tl.load(schedule.tile_count), tl.cdiv(N, WIDTH)
    local, deep = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    # A flattened loop loads rows of a tile before it has waited for them.
    FLATTEN: tl.constexpr = not TRANSPOSED and arriving is None
    tl.assume(K > 0)
    for tile in tl.range(tl.program_id(0), tile_rows * tile_columns, tl.num_programs(0), flatten=FLATTEN):
        first_column = tile // (tile_rows * slab) * slab
        width = tl.minimum(slab, tile_columns - first_column)
        place = tile - first_column * tile_rows
        entry = schedule.tiles + place // width * 4
        column = (first_column + place % width) * WIDTH
        expert, first = tl.load(entry), tl.load(entry + 1)
        row, count = tl.load(entry + 2), tl.load(entry + 3)
        # Rows after the last pair repeat it: they are not stored.
        pair = tl.load(schedule.pairs + first + tl.minimum(local, count - 1))
        if FORM.choices > 0:
            source = pair // FORM.choices
        else:
            source = row + tl.minimum(local, count - 1)
        if arriving is not None:
            begin, end = tl.load(schedule.pairs + first), tl.load(schedule.pairs + first + count - 1)
            await_rows(begin // FORM.choices, end // FORM.choices, arriving, landed, team)
        began = wl.begin_tile(team)
        if FORM.in_place:
            local_token = source - wl.rank(team) * arriving.tokens
            own = (local_token >= 0) & (local_token < arriving.tokens)
            # Of whole pointers: of a choice of rows newer compilers forget that 16 bytes are together.
            here = arriving.own + local_token.to(tl.int64)[:, None] * K + deep[None, :]
            there = x + source.to(tl.int64)[:, None] * K + deep[None, :]
            rows = tl.where(own[:, None], here, there)
        elif FORM.described:
            rows = x
        else:
            rows = x + source.to(tl.int64)[:, None] * K + deep[None, :]
        if scales is not None:
            scale = scales + source.to(tl.int64) * tl.cdiv(K, COLUMNS)
        if TRANSPOSED:
            acc = tl.zeros((WIDTH, BLOCK_M), dtype=tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = acc
        for k in tl.range(0, K, BLOCK_K):
            if FORM.described:
                a = x.load([row, k])
            elif FORM.even:
                a = tl.load(rows + k)
            else:
                a = tl.load(rows + k, mask=(deep < K - k)[None, :], other=0.0)
            if scales is not None:
                a = (a.to(tl.float32) * tl.load(scale + k // COLUMNS)[:, None]).to(out.dtype.element_ty)
            if FORM.turned:
                b = weight.load([expert, k, column]).reshape(BLOCK_K, BLOCK_N).T
            elif FORM.gated:
                b = weight.load([expert, 0, column, k])
            else:
                b = weight.load([expert, column, k])
            if TRANSPOSED:
                acc = tl.dot(b.reshape(WIDTH, BLOCK_K), a.T, acc, input_precision="ieee")
                if FORM.gated:
                    of_up = weight.load([expert, 1, column, k]).reshape(WIDTH, BLOCK_K)
                    up = tl.dot(of_up, a.T, up, input_precision="ieee")
            else:
                acc = tl.dot(a, b.reshape(BLOCK_N, BLOCK_K).T, acc, input_precision="ieee")
        if FORM.gated:
            if TRANSPOSED:
                gate = acc
            else:
                gate, up = halves(acc)
            acc = gate / (1.0 + tl.exp(-gate)) * up
        if TRANSPOSED:
            result = acc.T
        else:
            result = acc
        if FORM.choices > 0:
            target = row + local
        else:
            target = pair
        n = column + tl.arange(0, WIDTH)
        at = out + target.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=(local < count)[:, None] & (n < N)[None, :])
        wl.end_tile(began, place // width, column // WIDTH, team)


def grouped_tiles_for(call: GroupedCall, caps: Capabilities, *, gated: bool) -> GroupedTiles:
    """The fastest designs of probes on one H200 (Qwen3-30B-A3B, Qwen3-235B-A22B, Mixtral), for bf16.

    up to 32  pairs a tile: 4 stages of 32 KB in one program an SM, or of 16 KB in two, so that all programs have room at once.
              From MANY_PAIRS on, of 16 pairs a tile, 3 stages of 32 KB in two. A layer of half of 128 experts takes at most 4 %
              longer than with the best design, of all 128 6 % (benchmarks/lab/h200-grouped-designs.json)
    gathered  128 x 256 in 4 stages; 3 stages take 7 % longer at 256 rows an expert, 128 x 128 27 %, its loads of rows being
              half of all
    in order  128 x 128 with 2 programs an SM; for N of 8192 and more 128 x 256
    """
    if call.dtype == torch.float32:
        return GroupedTiles(block_n=32, block_k=32, transposed=call.block < 64, num_warps=8, num_stages=2)
    if caps.arch.startswith("gfx") or caps.arch == "sm_80":  # less shared memory, and no descriptors in hardware
        return GroupedTiles(block_n=64, block_k=64, transposed=call.block < 64, num_warps=4, num_stages=2)
    if call.block == 16 and call.pairs >= MANY_PAIRS:
        return GroupedTiles(block_n=128, block_k=128, transposed=True, per_sm=2, num_warps=4, num_stages=3)
    if call.block < 64:
        if gated:
            return GroupedTiles(block_n=128, block_k=128, transposed=True, num_warps=4, num_stages=4)
        return GroupedTiles(block_n=64, block_k=128, transposed=True, per_sm=2, num_warps=4, num_stages=4)
    if call.gather:
        return GroupedTiles(num_stages=4)
    if call.N * (2 if gated else 1) >= 8192:
        return GroupedTiles()
    return GroupedTiles(block_n=128, per_sm=2, num_warps=4)


@triton.jit
def grouped_weight_grad_kernel(
    dy,
    x,
    grad,
    schedule,
    T,
    N,
    K,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEP: tl.constexpr,
):
    """grad[e] = sum over the pairs of expert e of dy[row].T @ x[row]    grid: (EXPERTS * tiles of [N, K],)

    dy, x  if CHOICES, row i of dy [pairs, N] is of the i-th pair of the schedule, and row t of x [T, K] of token t; else row p
           of dy is pair p's, and x is in the order of the schedule. STEP pairs at a time, in that order; T: tokens

    signals, waits  none
    """
    across = tl.cdiv(K, BLOCK_K)
    of_expert = tl.cdiv(N, BLOCK_N) * across
    expert, tile = tl.program_id(0) // of_expert, tl.program_id(0) % of_expert
    n = tile // across * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tile % across * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    wl.follow_previous_kernel()
    every = tl.arange(0, triton.next_power_of_2(EXPERTS))
    before = tl.sum(tl.load(schedule.counts + every, mask=every < expert, other=0), axis=0)
    count = tl.load(schedule.counts + expert)
    pairs = schedule.pairs + expert.to(tl.int64) * T
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for begin in range(0, count, STEP):
        local = begin + tl.arange(0, STEP)
        inside = (local < count)[:, None]
        pair = tl.load(pairs + local, mask=local < count, other=0)
        if CHOICES > 0:
            of_y, of_x = before + local, pair // CHOICES
        else:
            of_y, of_x = pair, before + local
        a = tl.load(dy + of_y.to(tl.int64)[:, None] * N + n, mask=inside & (n < N), other=0.0)
        b = tl.load(x + of_x.to(tl.int64)[:, None] * K + k, mask=inside & (k < K), other=0.0)
        acc = tl.dot(a.T, b, acc, input_precision="ieee")
    n = n.T
    rows = expert.to(tl.int64) * N + n
    tl.store(grad + rows * K + k, acc.to(grad.dtype.element_ty), mask=(n < N) & (k < K))


def run(
    design: GroupedTiles,
    given: GroupedArguments,
    *,
    gated: bool = False,
    turned: bool = False,
    each_pair: bool = False,
    coming: Coming = NOTHING_COMES,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of checked arguments, in ``out`` or a new tensor; see ``grouped_matmul_kernel``.

    each_pair  x has a row for each pair, and rows of the result are in the order of the schedule
    """
    x, weight, schedule, by_token, scales = given
    gather = 1 if each_pair else schedule.choices if by_token else 0
    experts, rows, columns = weight.shape
    N, K = (columns, rows) if turned else (rows // (2 if gated else 1), columns)
    caps, out = capabilities_of(x.device), weight.new_empty((schedule.all_pairs, N)) if out is None else out
    if schedule.all_pairs == 0:
        return out
    x = x if x.is_contiguous() else x.contiguous()
    if not can_describe_experts(weight):
        weight = weight.clone(memory_format=torch.contiguous_format)
    if scales is not None:
        if design.block_k > COLUMNS.value:
            raise ValueError(
                f"block_k={design.block_k} is more than the {COLUMNS.value} columns of a scale of fp8 rows"
            )
        scales = scales.contiguous()
    block_k, width = design.block_k, design.block_n // (2 if gated else 1)
    described = not gather and can_describe(x)
    form = Form(gated, gather, schedule.block, K % block_k == 0, described, turned, coming.in_place)
    across = cdiv(N, width)
    grouped_matmul_kernel[(min(schedule.tiles.shape[0] * across, caps.sms * design.per_sm),)](
        TensorDescriptor(x, list(x.shape), [K, 1], [schedule.block, block_k]) if described else x,
        scales,
        coming.rows,
        weight_descriptor(design, weight, form),
        out,
        schedule,
        N,
        K,
        max(1, min(across, design.columns // width)),
        coming.landed,
        coming.team or traced_view(),
        FORM=form,
        BLOCK_N=design.block_n,
        BLOCK_K=block_k,
        TRANSPOSED=design.transposed,
        num_warps=design.num_warps,
        num_stages=design.num_stages,
        **launch_options(caps),
    )
    return out


def weight_descriptor(design: GroupedTiles, weight: torch.Tensor, form: Form) -> TensorDescriptor:
    """Descriptor of ``weight`` [experts, rows, columns], as ``grouped_matmul_kernel`` takes it."""
    experts, rows, columns = weight.shape
    apart, block_n, block_k = weight.stride(0) if experts > 1 else rows * columns, design.block_n, design.block_k
    if form.gated:
        N, both = rows // 2, 1 if design.transposed else 2
        return TensorDescriptor(
            weight, [experts, 2, N, columns], [apart, N * columns, columns, 1], [1, both, block_n // 2, block_k]
        )
    block = [1, block_k, block_n] if form.turned else [1, block_n, block_k]
    return TensorDescriptor(weight, [experts, rows, columns], [apart, columns, 1], block)


def can_describe_experts(weight: torch.Tensor) -> bool:
    """True if a tensor descriptor can read ``weight`` [experts, N, K]: each dense, on 16 bytes."""
    on_lines = weight.data_ptr() % 16 == 0 and weight.shape[2] * weight.itemsize % 16 == 0
    return on_lines and weight[0].is_contiguous() and weight.stride(0) * weight.itemsize % 16 == 0


def weight_grad(dy: torch.Tensor, x: torch.Tensor, schedule: Schedule, *, gather: bool) -> torch.Tensor:
    """Gradient of the weight [experts, N, K] in x's dtype; zeros for experts without pairs."""
    (N, K), (experts, T), caps = (dy.shape[1], x.shape[1]), schedule.pairs.shape, capabilities_of(x.device)
    grad = x.new_empty((experts, N, K))
    block = 32 if x.dtype == torch.float32 else 128 if caps.arch == "sm_90" else 64
    block_n, block_k = (max(16, min(block, next_power_of_2(size))) for size in (N, K))
    grouped_weight_grad_kernel[(experts * cdiv(N, block_n) * cdiv(K, block_k),)](
        dy.contiguous(),
        x.contiguous(),
        grad,
        schedule,
        T,
        N,
        K,
        CHOICES=schedule.choices if gather else 0,
        EXPERTS=experts,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STEP=32,
        num_warps=8 if block == 128 else 4,
        **launch_options(caps),
    )
    return grad
