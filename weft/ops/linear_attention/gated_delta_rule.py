"""gated_delta_rule: the gated delta rule over prompts, in chunks of 64 tokens.

With G the sum of g from a chunk's begin on, the updates of its tokens are the solution of a triangular system (the WY form of
Yang et al., 2024):

    L[i, j] = beta[i] (k[i] . k[j]) exp(G[i] - G[j]), j < i        T = (I + L)^-1
    W = T (beta exp(G) k), U = T (beta v)                          of a chunk alone
    N = U - W S                                                    S: the state before the chunk
    out = exp(G) q S + P N, P[i, j] = (q[i] . k[j]) exp(G[i] - G[j]), j <= i
    S = exp(G[-1]) S + k.T (exp(G[-1] - G) N)

Three launches: ``prepare`` makes T, W, U and P of all chunks at once, ``scan`` goes from chunk to chunk and leaves N and S of
each, from which ``outputs`` makes ``out`` of all chunks at once. No dot takes the transposed result of a dot: Triton 3.4 to
3.7.0 miscompiles that on Hopper at 64 rows. The scan holds S.T: a tensor instruction reads it and N.T from registers, as its
first operand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.operands import descriptor_or_self
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs
from weft.ops.linear_attention.causal_conv1d import chunks_of
from weft.ops.linear_attention.delta_rule import (
    L2_EPS,
    DeltaSizes,
    Gates,
    Recurrence,
    check_delta_rule,
    decay_and_rate,
    kernel_gates,
    sizes_of,
)
from weft.ops.linear_attention.sequence_chunks import CHUNK, SequenceChunks, check_chunks
from weft.ops.local import capabilities_of
from weft.ops.op import Op, register
from weft.runtime.capabilities import Capabilities, launch_options
from weft.runtime.team.team import Team

LEVELS = tl.constexpr(6)  # CHUNK = 2^LEVELS


class Prepared(NamedTuple):
    """Intermediate tensors: p and factors of tokens, the rest of chunks; missing tokens are zeros.

    p        [T, value heads, CHUNK], in the inputs' dtype as all but factors are
    factors  fp32 [3, T, value heads]: of q before it reads the state, of a token's update as it enters the state at the
             chunk's end, of the state over the chunk
    keys     [chunks * key heads * CHUNK, K]; w [chunks * value heads * CHUNK, K]
    u        [chunks * value heads * V, CHUNK], transposed, as updates are: N
    states   [chunks * value heads * V, K]: S.T before the chunks
    """

    p: torch.Tensor
    factors: torch.Tensor
    keys: torch.Tensor
    w: torch.Tensor
    u: torch.Tensor
    updates: torch.Tensor
    states: torch.Tensor


@triton.jit
def inverse_of_unit_lower(L, ROWS: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 of a strictly lower triangular L [ROWS, ROWS] in fp32; dots of ``dtype``.

    By blocks that double: with D the inverse of the blocks of s rows on the diagonal, and C what L has below them in blocks of
    2 s rows, the inverse of the latter is D - D C D. No power of L is taken: those would grow.
    """
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    D = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, L, 0.0)
    for level in tl.static_range(1, LEVELS):
        between = (row >> (level + 1) == column >> (level + 1)) & (row >> level != column >> level)
        C = tl.where(between, L, 0.0).to(dtype)
        rounded = D.to(dtype)
        CD = tl.dot(C, rounded, input_precision=PRECISION).to(dtype)
        D -= tl.dot(rounded, CD, input_precision=PRECISION)
    return D


@triton.jit(do_not_specialize=["tokens"])
def prepare_kernel(
    qkv, stride, gates, strides, rows, chunks, parts, scale, tokens, SIZES: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``Prepared`` of one chunk and value head, by the equations above.      grid: (chunks, value heads)

    qkv     [T, columns] with rows ``stride`` apart: heads of q, of k and of v
    strides  of gates.a and gates.b; tokens: T
    """
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    H: tl.constexpr = SIZES.value_heads
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    dtype: tl.constexpr = qkv.dtype.element_ty
    wl.follow_previous_kernel()
    sequence, begin = tl.load(chunks + 2 * place), tl.load(chunks + 2 * place + 1)
    first = (tl.load(rows + 3 * sequence) + begin).to(tl.int64)  # rows are counted from here, in 32 bits
    at, of_key, of_value = tl.arange(0, ROWS), tl.arange(0, K), tl.arange(0, V)
    exists = begin + at < tl.load(rows + 3 * sequence + 1)
    g, beta = decay_and_rate(gates, strides, first + at, exists, head)
    G = tl.cumsum(g, 0)
    total = tl.sum(g, 0)
    qkv += first * stride
    queries = qkv + head // (H // SIZES.key_heads) * K + at[:, None] * stride + of_key[None, :]
    q = tl.load(queries, mask=exists[:, None], other=0)
    k = tl.load(queries + SIZES.key_heads * K, mask=exists[:, None], other=0)
    if head % (H // SIZES.key_heads) == 0:
        key_head = place * SIZES.key_heads + head // (H // SIZES.key_heads)
        tl.store(parts.keys + key_head * (ROWS * K) + (at[:, None] * K + of_key[None, :]), k)
    of_q = tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + L2_EPS) * scale
    of_k = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + L2_EPS)
    cell = first * H + head
    factors = parts.factors + cell + at * H
    kept = tokens.to(tl.int64) * H
    tl.store(factors, of_q * tl.exp(G), mask=exists)
    tl.store(factors + kept, of_k * tl.exp(total - G), mask=exists)
    tl.store(factors + 2 * kept, tl.exp(total) + tl.zeros_like(G), mask=exists)

    decay = tl.exp(tl.where(at[:, None] >= at[None, :], G[:, None] - G[None, :], float("-inf"))) * of_k[None, :]
    P = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay * of_q[:, None]
    tl.store(parts.p + cell * ROWS + at[:, None] * (H * ROWS) + at[None, :], P.to(dtype), mask=exists[:, None])
    L = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * (beta * of_k)[:, None]
    # Elements of T, and of the inverses on the way, are products of contractions: none exceeds 1, so fp16 rounds less than the
    # bf16 that T goes to.
    of_inverse: tl.constexpr = tl.float32 if dtype.primitive_bitwidth == 32 else tl.float16
    T = inverse_of_unit_lower(tl.where(at[:, None] > at[None, :], L, 0.0), ROWS, of_inverse, PRECISION)
    # Factors of a token go into T, so that inputs are not rounded a second time.
    W = tl.dot((T * (beta * of_k * tl.exp(G))[None, :]).to(dtype), k, input_precision=PRECISION)
    tl.store(parts.w + (place * H + head) * (ROWS * K) + (at[:, None] * K + of_key[None, :]), W.to(dtype))
    values = qkv + 2 * SIZES.key_heads * K + head * V
    v = tl.load(values + at[:, None] * stride + of_value[None, :], mask=exists[:, None], other=0)
    U = tl.dot((T * beta[None, :]).to(dtype), v, input_precision=PRECISION)
    tl.store(parts.u + (place * H + head) * (V * ROWS) + (of_value[None, :] * ROWS + at[:, None]), U.to(dtype))


@triton.jit
def chunks_before(rows, sequence, ROWS: tl.constexpr):
    """Number of chunks of the sequences before ``sequence``."""
    number = 0
    for first in range(0, sequence, 128):
        some = first + tl.arange(0, 128)
        number += tl.sum(tl.cdiv(tl.load(rows + 3 * some + 1, mask=some < sequence, other=0), ROWS), 0)
    return number


@triton.jit(do_not_specialize=["tokens"])
def scan_kernel(
    keys, w, u, parts, rows, slots, state, tokens, SIZES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Updates and states of a sequence and value head, COLUMNS elements of its values.

    grid: (value heads * V / COLUMNS, sequences). state fp32 [slots, value heads, K, V]
    keys, w, u  descriptors of ``Prepared``, whose updates and states are stored by pointers: a program would wait for the
                stores of a descriptor

    A program reads its part of the state before its first chunk and writes it after its last: no other program has it.
    """
    H: tl.constexpr = SIZES.value_heads
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    dtype: tl.constexpr = keys.dtype
    head, sequence = tl.program_id(0) // (V // COLUMNS), tl.program_id(1)
    first_column = tl.program_id(0) % (V // COLUMNS) * COLUMNS
    column, of_key, at = first_column + tl.arange(0, COLUMNS), tl.arange(0, K), tl.arange(0, ROWS)
    wl.follow_previous_kernel()
    begin, length = tl.load(rows + 3 * sequence), tl.load(rows + 3 * sequence + 1)
    place = (tl.load(slots + sequence).to(tl.int64) * H + head) * K * V
    S = tl.load(state + place + (of_key[None, :] * V + column[:, None]))
    S = tl.where(tl.load(rows + 3 * sequence + 2) > 0, S, 0.0)
    kept = tokens.to(tl.int64) * H
    factors = parts.factors + kept + begin.to(tl.int64) * H + head
    # Loaded a chunk ahead: the compiler pipelines the operands of dots alone.
    of_update = tl.load(factors + at * H, mask=at < length, other=0)
    of_state = tl.load(factors + kept, mask=length > 0, other=0)
    number = chunks_before(rows, sequence, ROWS)
    for chunk in range(0, length, ROWS):
        place_of_chunk = number + chunk // ROWS
        cell = (place_of_chunk * H + head) * V + first_column
        w_tile = w.load([(place_of_chunk * H + head) * ROWS, 0])
        k = keys.load([(place_of_chunk * SIZES.key_heads + head // (H // SIZES.key_heads)) * ROWS, 0])
        u_tile = u.load([cell, 0]).to(tl.float32)
        after = tl.minimum(chunk + ROWS, length - 1)
        next_update = tl.load(factors + (after + at) * H, mask=after + at < length, other=0)
        next_state = tl.load(factors + kept + after * H)
        read = S.to(dtype)
        tl.store(parts.states + cell.to(tl.int64) * K + (tl.arange(0, COLUMNS)[:, None] * K + of_key[None, :]), read)
        update = u_tile - tl.dot(read, w_tile.T, input_precision=PRECISION)
        updates = parts.updates + cell.to(tl.int64) * ROWS
        tl.store(updates + (tl.arange(0, COLUMNS)[:, None] * ROWS + at[None, :]), update.to(dtype))
        S = tl.dot((update * of_update[None, :]).to(dtype), k, S * of_state, input_precision=PRECISION)
        of_update, of_state = next_update, next_state
    if length > 0:
        tl.debug_barrier()  # all threads have read the state
        # Addresses are made anew: those of before the loop would stay in registers.
        place += wl.zero_here()
        tl.store(state + place + (of_key[None, :] * V + column[:, None]), S)


@triton.jit
def outputs_kernel(
    qkv, stride, rows, chunks, parts, out, SIZES: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr
):
    """out [T, value heads, V] of one chunk and value head, from the chunk's parts and the state before it.

    grid: (chunks, value heads)

    signals, waits  none, except the wait for the previous kernel, the scan, which stored states and updates
    """
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    H: tl.constexpr = SIZES.value_heads
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    dtype: tl.constexpr = qkv.dtype.element_ty
    at, of_key, of_value = tl.arange(0, ROWS), tl.arange(0, K), tl.arange(0, V)
    wl.follow_previous_kernel()
    sequence, begin = tl.load(chunks + 2 * place), tl.load(chunks + 2 * place + 1)
    row = (tl.load(rows + 3 * sequence) + begin).to(tl.int64) + at
    exists = (begin + at < tl.load(rows + 3 * sequence + 1))[:, None]
    queries = qkv + head // (H // SIZES.key_heads) * K
    q = tl.load(queries + row[:, None] * stride + of_key[None, :], mask=exists, other=0)
    cell, values = (row * H + head)[:, None], ((place * H + head) * V + of_value)[:, None]
    of_q = tl.load(parts.factors + cell, mask=exists, other=0)
    S = tl.load(parts.states + values * K + of_key[None, :])
    update = tl.load(parts.updates + values * ROWS + at[None, :])
    P = tl.load(parts.p + cell * ROWS + at[None, :], mask=exists, other=0)
    result = tl.dot(q, tl.trans(S), input_precision=PRECISION) * of_q
    result = tl.dot(P, tl.trans(update), result, input_precision=PRECISION)
    tl.store(out + cell * V + of_value[None, :], result.to(dtype), mask=exists)


def gated_delta_rule(qkv: torch.Tensor, gates: Gates, state: torch.Tensor, sequences: SequenceChunks) -> torch.Tensor:
    """The gated delta rule over prompts, [T, value heads, V] of qkv's dtype.

    qkv        [T, 2 * key heads * K + value heads * V], fp16, bf16 or fp32: heads of q, of k, and of v, not yet normed;
               it may be columns of a wider tensor. Value heads h share key head h // (value heads / key heads)
    gates      a, b [T, value heads] of qkv's dtype, A_log, dt_bias [value heads] fp32
    state      fp32 [slots, value heads, K, V], read and written in place; K and V are 16, 32, 64 or 128
    sequences  the T tokens, by sequence, and the slots; a sequence without tokens before begins with a state of zeros

    A token's bits depend on where calls cut its sequence, not on other sequences. No backward. ValueError for shapes, dtypes or
    devices that do not fit.
    """
    check_delta_rule("gated_delta_rule", qkv, gates, state)
    check_chunks("gated_delta_rule", sequences, qkv.device)
    return GATED_DELTA_RULE.dispatch(qkv, gates, state, sequences)


def precision_of(caps: Capabilities) -> str:
    """Precision of dots of fp32: that of fp32, on tensor cores where they have a form for it."""
    return "tf32x3" if caps.arch.startswith("sm_") else "ieee"


def columns_of(sizes: DeltaSizes, dtype: torch.dtype) -> int:
    """Columns of a program of the scan; each program of a head reads all of k and w."""
    return min(sizes.V, 64 if dtype.itemsize == 2 else 16)


class GatedDeltaRule(Op):
    name, alias = "gated_delta_rule", "gated-delta-rule"
    bits = "depend on where calls cut a sequence, whose chunks of 64 tokens begin with a call, and on nothing else"
    no_plan = "three kernels; chunks of 64 tokens, and the dtype decides the columns of a program of the scan"
    mutates = ("state",)
    collective = False

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Tensors of a call. sizes: key heads, value heads, K, V."""
        spans = case.field("spans")
        return delta_inputs(DeltaSizes(*case.sizes), sum(length for _, length in spans), len(spans) + 1, draw, case)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, torch.Tensor]:
        qkv, *gates, state = (x.double() for x in by_rank[rank])
        whole, outs = Recurrence.of(qkv, Gates(*gates), DeltaSizes(*case.sizes)), []
        for first, length, before, slot in chunks_of(case).spans():
            out, states = whole.rows(first, length).run(state[slot] if before else torch.zeros_like(state[slot]))
            outs.append(out)
            state[slot] = states[-1]
        return torch.cat(outs), state

    def accuracy(self, case: Case) -> Accuracy:
        # T, W, U, P, the updates and the state that a chunk reads are rounded; the error of a state goes from chunk to chunk.
        return Accuracy(terms=4 * CHUNK * case.sizes[2], partials=4, levels=12)

    def call(self, case: Case, team: Team, *tensors: torch.Tensor) -> Inputs:
        qkv, *gates, state = tensors
        state, wide = state.clone(memory_format=torch.contiguous_format), torch.cat((qkv, qkv), dim=1)
        out = gated_delta_rule(wide[:, : qkv.shape[1]], Gates(*gates), state, chunks_of(case).to(qkv.device))
        return out, state.to(case.dtype)

    def cases(self) -> Iterator[Case]:
        for dtype in (FP32, BF16, FP16):
            for sizes, spans in (
                ((1, 2, 16, 16), ((0, 1), (5, 64), (0, 65))),
                ((2, 2, 32, 64), ((0, 130),)),
                ((1, 3, 64, 32), ((7, 3), (0, 192))),
            ):
                yield self.case_of(sizes, dtype, 1, spans=spans)
            for kind in ("slow", "same_keys"):
                yield self.case_of((1, 1, 16, 16), dtype, 1, spans=((3, 150),), kind=kind)

    def large_cases(self) -> Iterator[Case]:
        spans = ((0, 2048), (100, 1), (64, 777))
        for dtype, sizes in ((BF16, (2, 8, 128, 128)), (FP32, (1, 2, 128, 128)), (BF16, (8, 24, 128, 128))):
            yield self.case_of(sizes, dtype, 1, spans=spans)

    def forward(self, qkv: torch.Tensor, gates: Gates, state: torch.Tensor, sequences: SequenceChunks) -> torch.Tensor:
        out, sizes, caps = self.fake(qkv, gates, state, sequences), sizes_of(qkv, state), capabilities_of(qkv.device)
        if out.numel() == 0:
            return out
        rows, slots, chunks = (x.contiguous() for x in sequences)
        tokens, heads = len(qkv), sizes.value_heads
        of_keys, cells = CHUNK * len(chunks) * sizes.key_heads, len(chunks) * heads
        parts = Prepared(
            p=qkv.new_empty((tokens, heads, CHUNK)),
            factors=qkv.new_empty((3, tokens, heads), dtype=torch.float32),
            keys=qkv.new_empty((of_keys, sizes.K)),
            w=qkv.new_empty((cells * CHUNK, sizes.K)),
            u=qkv.new_empty((cells * sizes.V, CHUNK)),
            updates=qkv.new_empty((cells * sizes.V, CHUNK)),
            states=qkv.new_empty((cells * sizes.V, sizes.K)),
        )
        shared = {"SIZES": sizes, "ROWS": CHUNK, "PRECISION": precision_of(caps), **launch_options(caps)}
        given = qkv, qkv.stride(0)
        inputs = *given, *kernel_gates(gates), rows, chunks, parts, sizes.K**-0.5, tokens
        prepare_kernel[len(chunks), heads](*inputs, **shared, **prepare_options(sizes, qkv.dtype, caps))
        columns = columns_of(sizes, qkv.dtype)
        arguments = *scanned(parts, sizes, columns), parts, rows, slots, state, tokens
        grid = heads * (sizes.V // columns), len(rows)
        scan_kernel[grid](*arguments, COLUMNS=columns, **shared, **scan_options(sizes, qkv.dtype, caps))
        outputs_kernel[len(chunks), heads](
            *given, rows, chunks, parts, out, **shared, **outputs_options(sizes, qkv.dtype)
        )
        return out

    def fake(self, qkv, gates, state, sequences):
        return qkv.new_empty((qkv.shape[0], state.shape[1], state.shape[3]))


def prepare_options(sizes: DeltaSizes, dtype: torch.dtype, caps: Capabilities) -> dict[str, Any]:
    """Warps of ``prepare``: two programs of 16 bits fit an SM's registers.

    On sm_80 operands of dots lie in registers too.
    """
    return {"num_warps": warps_of(sizes, dtype, 4 if dtype.itemsize == 2 and caps.arch != "sm_80" else 8)}


def warps_of(sizes: DeltaSizes, dtype: torch.dtype, warps: int) -> int:
    """``warps``, but two with heads of fewer than 64 elements in 16 bits.

    Two are too few for the tensor instructions that read shared memory: of their descriptors ptxas 12.8 makes code with a
    register that nothing has written, and they read out of range.
    """
    return 2 if dtype.itemsize == 2 and min(sizes.K, sizes.V) < 64 else warps


def scanned(parts: Prepared, sizes: DeltaSizes, columns: int) -> tuple[Any, ...]:
    """Descriptors that the scan takes."""
    blocks, tensors = ((CHUNK, sizes.K), (CHUNK, sizes.K), (columns, CHUNK)), (parts.keys, parts.w, parts.u)
    return tuple(descriptor_or_self(x, *block, True) for x, block in zip(tensors, blocks, strict=True))


def scan_options(sizes: DeltaSizes, dtype: torch.dtype, caps: Capabilities) -> dict[str, Any]:
    """Warps and stages of the scan: three chunks of heads of 128 elements hide the time of a load."""
    warps = warps_of(sizes, dtype, 8 if caps.arch == "sm_80" else 4)
    return {"num_warps": warps, "num_stages": 3 if dtype.itemsize == 2 else 1 if sizes.K > 64 else 2}


def outputs_options(sizes: DeltaSizes, dtype: torch.dtype) -> dict[str, Any]:
    """Warps of ``outputs``."""
    return {"num_warps": warps_of(sizes, dtype, 4 if dtype.itemsize == 2 else 8)}


def delta_inputs(sizes: DeltaSizes, tokens: int, slots: int, draw: Draw, case: Case) -> Inputs:
    """qkv, gates and states of a case: heads of other lengths, and decays near 0 and 1.

    Field ``kind``: "slow" has decays near 1 and rates near 1, so that states grow old; "same_keys" has in addition one key for
    all tokens, where powers of L would be large.
    """
    heads, kind = sizes.value_heads, case.field("kind")
    qkv, a, b = (draw.own(name, (tokens, n)) for name, n in (("qkv", sizes.columns), ("a", heads), ("b", heads)))
    A_log, dt_bias = (draw.own(name, (heads,), dtype=FP32) for name in ("A_log", "dt_bias"))
    if kind is not None:
        A_log, b = A_log - 8, b + 4
    if kind == "same_keys":
        keys = slice(sizes.key_heads * sizes.K, 2 * sizes.key_heads * sizes.K)
        qkv[:, keys] = qkv[:1, keys]
    return qkv, a, b, A_log, dt_bias, draw.own("state", (slots, heads, sizes.K, sizes.V), dtype=FP32)


GATED_DELTA_RULE = register(GatedDeltaRule())
