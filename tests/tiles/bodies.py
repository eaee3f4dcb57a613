"""Tile bodies of the tests: GEMM tiles over gathered rows, and partial ones; softmax parts of a log-sum-exp."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Matrices(NamedTuple):
    """Operands of both GEMM bodies; ``a`` is of the partial one alone."""

    a: Any
    b: Any
    N: int
    K: int
    BLOCK_K: tl.constexpr


@triton.jit
def product(a, row, rows, tile, o, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r, c = tl.arange(0, ROWS), tile.column * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(tile.share * o.BLOCK_K, o.K, tile.shares * o.BLOCK_K):
        ks = k + tl.arange(0, o.BLOCK_K)
        x = tl.load(
            a + (row + r)[:, None] * o.K + ks[None, :], mask=(r < rows)[:, None] & (ks < o.K)[None, :], other=0.0
        )
        y = tl.load(o.b + c[None, :] * o.K + ks[:, None], mask=(c < o.N)[None, :] & (ks < o.K)[:, None], other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    return acc


@triton.jit
def gemm_tile(shard, out, tile, o, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out = gathered rows @ b.T"""
    acc = product(shard.data, tile.owner_row, tile.rows, tile, o, ROWS, COLUMNS)
    r, c = tl.arange(0, ROWS), tile.column * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < tile.rows)[:, None] & (c < o.N)[None, :]
    tl.store(out + (tile.row + r)[:, None] * o.N + c[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def described_tile(shard, out, tile, o, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The same with a tensor descriptor of the rows."""
    r, c = tl.arange(0, ROWS), tile.column * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, o.K, o.BLOCK_K):
        ks = k + tl.arange(0, o.BLOCK_K)
        y = tl.load(o.b + c[None, :] * o.K + ks[:, None], mask=(c < o.N)[None, :] & (ks < o.K)[:, None], other=0.0)
        acc = tl.dot(shard.data.load([shard.first + tile.owner_row, k]), y, acc, input_precision="ieee")
    inside = (r < tile.rows)[:, None] & (c < o.N)[None, :]
    tl.store(out + (tile.row + r)[:, None] * o.N + c[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def partial_tile(tile, o, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """a @ b.T of this rank's share of K"""
    return product(o.a, tile.row, tile.rows, tile, o, ROWS, COLUMNS)


@triton.jit
def reversed_owner(number, o):
    """Two tiles a rank, the last rank's first."""
    return o.WORLD - 1 - number // 2


@triton.jit
def reversed_rows(number, o):
    half = (o.rows + 1) // 2
    first = number % 2 * half
    owner = o.WORLD - 1 - number // 2
    return owner * o.rows + first, tl.minimum(half, o.rows - first), 0


class Reversed(NamedTuple):
    """``Matrices`` with what the reversed map reads."""

    a: Any
    b: Any
    N: int
    K: int
    BLOCK_K: tl.constexpr
    rows: int
    WORLD: tl.constexpr


class Parts(NamedTuple):
    """This rank's means [H, B, D] and log-sum-exps [H, B]."""

    outs: Any
    lses: Any


@triton.jit
def attention_part(tile, o, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tile.row + tl.arange(0, ROWS)
    inside = tl.arange(0, ROWS) < tile.rows
    mean = tl.load(o.outs + r[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], mask=inside[:, None], other=0.0)
    return mean, tl.load(o.lses + r, mask=inside, other=0.0)


@triton.jit
def merge_attention(total, part):
    mean, lse = total
    other, more = part
    largest = tl.maximum(lse, more)
    one, two = tl.exp(lse - largest), tl.exp(more - largest)
    return (mean * one[:, None] + other * two[:, None]) / (one + two)[:, None], largest + tl.log(one + two)


@triton.jit
def store_mean(part, source, out, tile, o, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    mean, lse = part
    r = tl.arange(0, ROWS)
    at = (tile.owner_row + r)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + at, mean, mask=(r < tile.rows)[:, None])


@triton.jit
def store_of_source(part, source, out, tile, o, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out [W * m, N]: each rank's part below the one before."""
    r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = (source * o.rows + tile.row % o.rows + r)[:, None] * COLUMNS + c[None, :]
    tl.store(out + at, part[0].to(out.dtype.element_ty), mask=(r < tile.rows)[:, None])


class Dealt(NamedTuple):
    """This rank's x [W * rows, N]; rank o gets rows o * rows .. of it."""

    x: Any
    rows: int


@triton.jit
def dealt_part(tile, o, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = (tile.row + r)[:, None] * COLUMNS + c[None, :]
    return (tl.load(o.x + at, mask=(r < tile.rows)[:, None], other=0.0),)


@triton.jit
def dealt_owner(number, o):
    return number


@triton.jit
def dealt_rows(number, o):
    return number * o.rows, o.rows, 0
