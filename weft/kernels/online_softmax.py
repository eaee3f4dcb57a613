"""The tile of paged_attention: the query heads of one KV head over some of a sequence's tokens, and parts of it joined.

The method is FlashAttention's online softmax (Dao et al., 2022) with Flash-Decoding's splits (Dao et al., 2023).
"""

import triton
import triton.language as tl


@triton.jit
def pages_at(table, start, bound, BLOCK_N: tl.constexpr, WAYS: tl.constexpr, PAGE: tl.constexpr):
    """The pages of tokens start .. start + BLOCK_N - 1, 0 where not before ``bound``: one where one page holds them
    all, else [WAYS, BLOCK_N // WAYS]. ``start`` is a multiple of BLOCK_N."""
    if BLOCK_N <= PAGE:
        return tl.load(table + start // PAGE, mask=start < bound, other=0)
    else:
        token = start + ways(BLOCK_N, WAYS)
        return tl.load(table + token // PAGE, mask=token < bound, other=0)


@triton.jit
def ways(BLOCK_N: tl.constexpr, WAYS: tl.constexpr):
    """0 .. BLOCK_N - 1 as [WAYS, BLOCK_N // WAYS]."""
    PER: tl.constexpr = BLOCK_N // WAYS
    return tl.arange(0, WAYS)[:, None] * PER + tl.arange(0, PER)[None, :]


@triton.jit
def sum_ways(x):
    """[WAYS, ...] -> [...], by halves. Each split brings two ways into one thread, 16 bytes at a time; the sum along
    axis 0 of values that lie in different warps would move each alone."""
    if x.shape[0] == 1:
        return tl.reshape(x, (x.shape[1], x.shape[2]))
    else:
        halves = tl.reshape(x, (2, x.shape[0] // 2, x.shape[1], x.shape[2]))
        a, b = tl.split(tl.permute(halves, (1, 2, 3, 0)))
        return sum_ways(a + b)


@triton.jit
def attend(
    x, keys, values, table, page, head, first, length, stride, scale,
    HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, WAYS: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Rows of ``x`` [ROWS, D] over the tokens of one KV head: (mean of values [KEPT, D], log2 of the sum of weights [ROWS])

    A token's weight is 2 ** (score * scale), so ``scale`` holds log2(e). BLOCK_N tokens are taken at a time: from first,
    first + stride, ... as far as they lie before ``length``. None at all: zeros, and no meaning.
    table  the sequence's pages; page  those of the first BLOCK_N tokens, already loaded
    KEPT   ROWS, or half of it where the other half only fills up a tile

    Each of WAYS warps takes its own share of the tokens and keeps its own maximum and sums, which come together at the
    end: no step waits for more than its loads. Shared out by rows or columns, as a plain dot is, a step has 4 CTA barriers.
    """
    ROWS: tl.constexpr = x.shape[0]
    column = tl.arange(0, D)[None, None, :]
    local = ways(BLOCK_N, WAYS)
    x = tl.broadcast_to(x[None, :, :], (WAYS, ROWS, D))
    # Not -inf: a way without a token has a difference of two of them to take.
    largest = tl.full((WAYS, ROWS), -1e30, tl.float32)
    total = tl.zeros((WAYS, ROWS), tl.float32)
    acc = tl.zeros((WAYS, ROWS, D), tl.float32)
    for start in tl.range(first, length, stride):
        there = local < length - start
        cell = ((page.to(tl.int64) * HEADS + head) * PAGE + (start % PAGE if BLOCK_N <= PAGE else 0)) * D
        within = local if BLOCK_N <= PAGE else (start + local) % PAGE
        # A step ahead: a load that waits for another would take a stage of the pipeline for itself.
        page = pages_at(table, start + stride, length, BLOCK_N, WAYS, PAGE)
        at = (cell + within * D)[:, :, None] + column
        k = tl.load(keys + at, mask=there[:, :, None], other=0.0)
        v = tl.load(values + at, mask=there[:, :, None], other=0.0)
        score = tl.dot(x, tl.permute(k, (0, 2, 1)), input_precision="ieee") * scale
        score = tl.where(there[:, None, :], score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, axis=2))
        p = tl.exp2(score - new[:, :, None])
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(p, axis=2)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, :, None], input_precision="ieee")
        largest = new
    top = tl.max(largest, axis=0)
    share = tl.exp2(largest - top[None, :])
    whole = tl.sum(total * share, axis=0)
    # No tokens: 0 / 1.
    acc *= (share / tl.where(whole > 0, whole, 1.0)[None, :])[:, :, None]
    if KEPT < ROWS:
        halves = tl.reshape(acc, (WAYS, 2, KEPT, D))
        acc, _ = tl.split(tl.permute(halves, (0, 2, 3, 1)))
    return sum_ways(acc), top + tl.log2(whole)


@triton.jit
def join_parts(parts, weights, out, count, GROUP: tl.constexpr, D: tl.constexpr, JOINED: tl.constexpr):
    """out[GROUP, D] = the ``count`` parts of one sequence and KV head together, in order.

    parts [count, GROUP, D], each a softmax of its own; weights [count, GROUP], log2 of the sums it was divided by.
    JOINED of them are in flight at a time.
    """
    ROWS: tl.constexpr = triton.next_power_of_2(GROUP)
    row = tl.arange(0, ROWS)
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    exists = row < GROUP
    # Rows beyond GROUP have no weight at all: any finite number keeps them from NaN.
    largest = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for start in tl.range(0, count, JOINED, num_stages=1):
        for i in tl.static_range(JOINED):
            there = exists & (start + i < count)
            part = (start + i) * GROUP
            weight = tl.load(weights + part + row, mask=there, other=float("-inf"))
            x = tl.load(parts + part * D + at, mask=there[:, None], other=0.0)
            new = tl.maximum(largest, weight)
            share, shrink = tl.exp2(weight - new), tl.exp2(largest - new)
            total = total * shrink + share
            acc = acc * shrink[:, None] + x * share[:, None]
            largest = new
    joined = acc / tl.where(exists, total, 1.0)[:, None]
    tl.store(out + at, joined.to(out.dtype.element_ty), mask=exists[:, None])
