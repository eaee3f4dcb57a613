"""The kernel of grouped GEMMs: ragged tiles of pairs by blocks of columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.four_bit_tile import OF_WORD, weight_of
from weft.kernels.fp8 import COLUMNS, store_rows
from weft.kernels.fp8_tile import fp8_dot, row_scales, scaled, weight_scales
from weft.kernels.gemm_tile import halves
from weft.kernels.slices import shape_free_dots

# More rows than any operand has.
ALL_ROWS: tl.constexpr = tl.constexpr(2**31 - 1)


class Form(NamedTuple):
    """Compile-time form of a grouped GEMM.

    gated    gate and up, and silu(gate) * up of the results
    choices  k where rows of x are gathered: pair p is token p // k; 0 where they are in the order of the schedule
    block    pairs of a tile
    even     block_k divides K
    described  x is a descriptor, for rows in the order of the schedule that begin on 16 bytes
    turned   the weight is [experts, K, N], for gradients: dy @ weight[e]
    apart    gate and up are two products: of fp8 operands, and in tiles of few pairs where the weight is the first operand,
             which would pass through registers if one box brought both
    in_place this rank's rows are not in x but in ``Arriving.own``
    alpha, limit  of ``ClampedSwiGLU`` in place of silu(gate) * up; limit 0: silu
    fixed    a row's bits do not depend on the tile (``FixedTiles``)
    parts    equal parts of K, whose products lie apart in out
    """

    gated: bool
    choices: int
    block: int
    even: bool
    described: bool
    turned: bool
    apart: bool
    in_place: bool = False
    alpha: float = 0.0
    limit: float = 0.0
    fixed: bool = False
    parts: int = 1


class Biases(NamedTuple):
    """Biases of experts' weights. first: [experts, rows of a weight], stride: of an expert."""

    first: torch.Tensor
    stride: int


class Arriving(NamedTuple):
    """Rows that copy engines bring while a grouped GEMM runs, an argument of its kernel.

    own     [T, K]: this rank's rows, read in place if FORM.in_place, else they are in x too
    tokens  most of a rank: row t of rank s is x[s * tokens + t]
    chunk   rows under one flag: chunk c of a rank has rows from c * chunk on, and comes after chunk c - 1
    """

    own: torch.Tensor
    tokens: int
    chunk: int


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


@triton.jit
def x_tile(x, rows, row, deep, k, K, FORM: tl.constexpr):
    """Rows of x from column ``k`` on: from ``row`` on if FORM.described, else where ``rows`` points."""
    if FORM.described:
        return x.load([row, k])
    elif FORM.even:
        return tl.load(rows + k)
    else:
        return tl.load(rows + k, mask=(deep < K - k)[None, :], other=0.0)


@triton.jit
def weight_tile(weight, expert, UP: tl.constexpr, column, k, FORM: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, columns of a step] of an expert's weight from row ``column`` and column ``k`` on.

    UP  if FORM.apart 0: gate's rows, 1: up's. Else of a gated weight both, gate's first
    """
    if FORM.turned:
        tile = weight.load([expert, k, column])
        return tile.reshape(tile.shape[1], ROWS).T
    elif FORM.gated:
        tile = weight.load([expert, UP, column, k])
        return tile.reshape(ROWS, tile.shape[3])
    else:
        tile = weight.load([expert, column, k])
        return tile.reshape(ROWS, tile.shape[2])


@triton.jit
def scales_at(fp8, rows, expert, column, N, k, FORM: tl.constexpr, ROWS: tl.constexpr):
    """Scales at column k: of x's rows, of a weight's rows from ``column`` on, and of up's if gated."""
    of_weight = weight_scales(fp8, column, N, k, ROWS, expert)
    of_up = of_weight
    if FORM.gated:
        of_up = weight_scales(fp8, N + column, 2 * N, k, ROWS, expert, UP=True)
    return row_scales(fp8, rows, ALL_ROWS, k), of_weight, of_up


@triton.jit
def biases_at(biases, expert, row, there, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Biases of an expert's ``there`` rows from ``row`` on, in fp32: a row, or if TRANSPOSED a column."""
    offset = tl.arange(0, ROWS)
    bias = tl.load(
        biases.first + expert.to(tl.int64) * biases.stride + row + offset, mask=offset < there, other=0.0
    ).to(tl.float32)
    if TRANSPOSED:
        return bias[:, None]
    else:
        return bias[None, :]


@triton.jit
def activated(gate, up, FORM: tl.constexpr):
    """silu(gate) * up, or the clamped SwiGLU. NaN stays NaN."""
    if FORM.limit > 0:
        gate = tl.where(gate > FORM.limit, FORM.limit, gate)
        up = tl.where(up > FORM.limit, FORM.limit, tl.where(up < -FORM.limit, -FORM.limit, up))
        return gate / (1.0 + tl.exp(-FORM.alpha * gate)) * (up + 1.0)
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def store_results(result, out, target, there, column, N, written):
    """Store results in the rows ``target`` that are ``there``, from ``column`` on, maybe in fp8."""
    n = column + tl.arange(0, result.shape[1])
    at, mask = target.to(tl.int64)[:, None] * N + n[None, :], there[:, None] & (n < N)[None, :]
    if written is None:
        tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)
    else:
        store_rows(result.to(written.dtype), out, at, mask, written, target, there, column, N)


@triton.jit(do_not_specialize=["slab", "part_stride"])
def grouped_matmul_kernel(
    x,
    scales,
    fp8,
    four_bit,
    arriving,
    weight,
    biases,
    out,
    written,
    schedule,
    N,
    K,
    slab,
    landed,
    team,
    part_stride,
    FORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """out[row] = x[row] @ weight[e].T + bias[e] of expert e's pairs, gated by FORM    grid: (programs,)

    x         [T, K] if FORM.choices, and rows of out are in the order of the schedule; else rows in that order, and row p of
              out is pair p's. A descriptor if FORM.described
    scales    [T, ceil(K / 128)] of fp8 rows of x, gathered, beside a weight of 16 bits; or None
    fp8       ``Fp8Scales`` of x and the weight, both in e4m3; or None
    four_bit  ``Grid`` of all experts' scales, of a weight in 4 bits, whose int16 words the weight's descriptor has; or None
    arriving  ``Arriving`` of gathered rows of x, with their channel ``landed``, and each expert's pairs in the order of ranks
              me, me + 1, … (mod W); or None, where landed is None too
    team      of arriving rows, or in a trace (``traced_view``); else None
    weight    descriptor of [experts, N, K] in blocks of BLOCK_N rows, or if FORM.turned of [experts, K, N]; if FORM.gated of
              [experts, 2, N, K] in blocks of BLOCK_N // 2 rows of both. If FORM.apart its blocks have half as many rows
    biases    ``Biases`` of the weight's rows, added in fp32; or None
    schedule  ``Schedule``; out [pairs, N]: rows of pairs that are not in it are not written
    written   ``Fp8Rows`` where out is in fp8; else None
    slab      tiles along N that go before the next ones are begun
    part_stride  elements of out from the product of a part of K to the next part's, if FORM.parts > 1

    signals   none: a tile is one program's. Copy engines of the peers, after each chunk of their rows
    waits     with ``arriving``, before a tile's first load of x: for the ranks from its first pair's to its last pair's, but
              this one (``await_rows``). Other pairs of the tile lie between the two. This rank's rows are read from ``own``
    progress  programs wait for copy engines only, so they need not all be resident
    """
    BLOCK_M: tl.constexpr = FORM.block
    WIDTH: tl.constexpr = BLOCK_N // 2 if FORM.gated else BLOCK_N
    # Rows of the weight in a product.
    ROWS: tl.constexpr = BLOCK_N // 2 if FORM.apart else BLOCK_N
    # Rows of an expert's weight for a column of N, and columns that a column of its tile holds.
    OF_N: tl.constexpr = 2 if FORM.gated else 1
    PACKED: tl.constexpr = 1 if four_bit is None else OF_WORD
    # Each step along K has scales.
    BY_STEP: tl.constexpr = False if fp8 is None else fp8.columns > 0
    if FORM.fixed:
        shape_free_dots()
    wl.follow_previous_kernel()
    tile_rows, tile_columns = tl.load(schedule.tile_count), tl.cdiv(N, WIDTH)
    local, deep = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    # A flattened loop loads rows of a tile before it has waited for them. Of few pairs the second fp8 GEMM alone gains by it:
    # Triton flattens no loop beside another one (``in_one_layout``, of results in fp8).
    SECOND_FP8: tl.constexpr = fp8 is not None and not FORM.gated and BLOCK_N >= 128
    # With two scales of up's rows a flattened loop would spill 80 registers.
    TWO: tl.constexpr = False if fp8 is None else fp8.two
    FLATTEN: tl.constexpr = arriving is None and not TWO and (not TRANSPOSED or SECOND_FP8)
    tl.assume(K > 0)
    for number in tl.range(
        tl.program_id(0), tile_rows * tile_columns * FORM.parts, tl.num_programs(0), flatten=FLATTEN
    ):
        if FORM.parts > 1:
            part, tile = number // (tile_rows * tile_columns), number % (tile_rows * tile_columns)
            begin_k, end_k = part * (K // FORM.parts), (part + 1) * (K // FORM.parts)
            product = out + part * tl.cast(part_stride, tl.int64)
        else:
            tile, begin_k, end_k, product = number, 0, K, out
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
            acc = tl.zeros((ROWS, BLOCK_M), dtype=tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, ROWS), dtype=tl.float32)
        up = acc
        if four_bit is not None:
            # Of a ragged tile the last row again; gate's rows, then up's, unless they are two products.
            row_of_tile = tl.arange(0, ROWS)
            of_half = tl.minimum(column + row_of_tile % WIDTH, N - 1)
            scale_row = expert * N * OF_N + row_of_tile // WIDTH * N + of_half
        if BY_STEP:
            # Loaded a step ahead, so that the tensor cores do not wait for them.
            of_rows, of_weight, of_up = scales_at(fp8, source, expert, column, N, begin_k, FORM, ROWS)
        for k in tl.range(begin_k, end_k, BLOCK_K):
            a = x_tile(x, rows, row, deep, k, K, FORM)
            if scales is not None:
                a = (a.to(tl.float32) * tl.load(scale + k // COLUMNS)[:, None]).to(out.dtype.element_ty)
            b = weight_tile(weight, expert, 0, column, k // PACKED, FORM, ROWS)
            if four_bit is not None:
                b = weight_of(b, four_bit, scale_row, k, K, a.dtype)
            if BY_STEP:
                next_rows, next_weight, next_up = scales_at(
                    fp8, source, expert, column, N, tl.minimum(k + BLOCK_K, K - 1), FORM, ROWS
                )
                acc += scaled(fp8_dot(a, b, TRANSPOSED), of_rows, of_weight, fp8, TRANSPOSED)
                if FORM.gated:
                    b = weight_tile(weight, expert, 1, column, k, FORM, ROWS)
                    up += scaled(fp8_dot(a, b, TRANSPOSED), of_rows, of_up, fp8, TRANSPOSED, UP=True)
                of_rows, of_weight, of_up = next_rows, next_weight, next_up
            elif fp8 is not None:
                acc += fp8_dot(a, b, TRANSPOSED)
                if FORM.gated:
                    up += fp8_dot(a, weight_tile(weight, expert, 1, column, k, FORM, ROWS), TRANSPOSED)
            elif TRANSPOSED:
                acc = tl.dot(b, a.T, acc, input_precision="ieee")
                if FORM.gated:
                    b = weight_tile(weight, expert, 1, column, k // PACKED, FORM, ROWS)
                    if four_bit is not None:
                        b = weight_of(b, four_bit, scale_row + N, k, K, a.dtype)
                    up = tl.dot(b, a.T, up, input_precision="ieee")
            else:
                acc = tl.dot(a, b.T, acc, input_precision="ieee")
        if fp8 is not None and not BY_STEP:
            of_rows, of_weight, of_up = scales_at(fp8, source, expert, column, N, 0, FORM, ROWS)
            acc = scaled(acc, of_rows, of_weight, fp8, TRANSPOSED)
            if FORM.gated:
                up = scaled(up, of_rows, of_up, fp8, TRANSPOSED, UP=True)
        if FORM.gated:
            if FORM.apart:
                gate = acc
            else:
                gate, up = halves(acc)
            if biases is not None:
                gate += biases_at(biases, expert, column, N - column, WIDTH, TRANSPOSED)
                up += biases_at(biases, expert, N + column, N - column, WIDTH, TRANSPOSED)
            acc = activated(gate, up, FORM)
        elif biases is not None:
            acc += biases_at(biases, expert, column, N - column, WIDTH, TRANSPOSED)
        if TRANSPOSED:
            result = acc.T
        else:
            result = acc
        if FORM.choices > 0:
            target = row + local
        else:
            target = pair
        exists = local < count
        store_results(result, product, target, exists, column, N, written)
        wl.end_tile(began, place // width, column // WIDTH, team)
