"""Forms of the gated delta rule's scan over prompts on one GPU: what the sequential kernel does, and how its state lies.

    python -m benchmarks.lab.delta_variants OUT.json [--heads 2x8,8x24] [--only turned64/2]

One sequence of 8,192 tokens, heads of 128, bf16. Each variant is compared with the recurrence in fp64 (first tokens) and with
the op (all tokens, and the final state). "op" is ``weft.ops.gated_delta_rule``: prepare, then a scan with the outputs. The
variants leave the outputs to a third kernel, which takes all chunks at once:

    turned C/S   the scan holds S.T, C columns of the values by K, in registers, where tensor instructions read it as their
                 first operand, so that it goes through no shared memory; S stages
    straight C/S the scan holds S, K by C columns, as the op does
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import weft.language as wl
from benchmarks.delta_and_latents import PROMPT, copies, draw, error_of, gates
from benchmarks.fp8_gemm import timed
from weft import ops
from weft.ops.linear_attention.delta_rule import L2_EPS, DeltaSizes, decay_and_rate, kernel_gates
from weft.ops.linear_attention.gated_delta_rule import inverse_of_unit_lower
from weft.ops.linear_attention.sequence_chunks import CHUNK
from weft.runtime.files import put

# (state turned, columns of a program, stages of the scan, warps of the scan)
VARIANTS = (
    (True, 64, 2, 4), (True, 64, 3, 4), (True, 128, 2, 8), (True, 128, 3, 8), (False, 32, 2, 4), (False, 64, 2, 4),
)  # fmt: skip


class Parts(NamedTuple):
    """Parts of the chunks. w [T, H, K]; u, news [chunks, H, V, CHUNK]; p [T, H, CHUNK]; states [chunks, H, V, K]; factors
    fp32 [3, T, H]."""

    w: torch.Tensor
    u: torch.Tensor
    p: torch.Tensor
    factors: torch.Tensor
    news: torch.Tensor
    states: torch.Tensor


@triton.jit(do_not_specialize=["tokens"])
def prepare(
    qkv, stride, gates, strides, rows, chunks, parts, scale, tokens, SIZES: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The op's ``prepare_kernel``, with U stored as [chunks, H, V, ROWS]."""
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    H: tl.constexpr = SIZES.value_heads
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    dtype: tl.constexpr = qkv.dtype.element_ty
    wl.follow_previous_kernel()
    sequence, begin = tl.load(chunks + 2 * place), tl.load(chunks + 2 * place + 1)
    first = (tl.load(rows + 3 * sequence) + begin).to(tl.int64)
    at, of_key, of_value = tl.arange(0, ROWS), tl.arange(0, K), tl.arange(0, V)
    exists = begin + at < tl.load(rows + 3 * sequence + 1)
    g, beta = decay_and_rate(gates, strides, first + at, exists, head)
    G = tl.cumsum(g, 0)
    total = tl.sum(g, 0)
    qkv += first * stride
    queries = qkv + head // (H // SIZES.key_heads) * K + at[:, None] * stride + of_key[None, :]
    q = tl.load(queries, mask=exists[:, None], other=0)
    k = tl.load(queries + SIZES.key_heads * K, mask=exists[:, None], other=0)
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
    T = inverse_of_unit_lower(tl.where(at[:, None] > at[None, :], L, 0.0), ROWS, tl.float16, PRECISION)
    W = tl.dot((T * (beta * of_k * tl.exp(G))[None, :]).to(dtype), k, input_precision=PRECISION)
    tl.store(parts.w + cell * K + at[:, None] * (H * K) + of_key[None, :], W.to(dtype), mask=exists[:, None])
    values = qkv + 2 * SIZES.key_heads * K + head * V
    v = tl.load(values + at[:, None] * stride + of_value[None, :], mask=exists[:, None], other=0)
    U = tl.dot((T * beta[None, :]).to(dtype), v, input_precision=PRECISION)
    tl.store(parts.u + (place * H + head) * V * ROWS + of_value[None, :] * ROWS + at[:, None], U.to(dtype))


@triton.jit(do_not_specialize=["tokens"])
def scan(
    qkv, w, u, news, states, factors, rows, slots, state, tokens, SIZES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """News and the states before all chunks, of one value head and COLUMNS columns.     grid: (H * V / COLUMNS, 1)

    qkv, w, u, news, states  descriptors of [T, columns], [T, H * K], and [chunks * H * V, ROWS or K]
    """
    H: tl.constexpr = SIZES.value_heads
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    dtype: tl.constexpr = qkv.dtype
    head, sequence = tl.program_id(0) // (V // COLUMNS), tl.program_id(1)
    first_column = tl.program_id(0) % (V // COLUMNS) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    of_key, at = tl.arange(0, K), tl.arange(0, ROWS)
    wl.follow_previous_kernel()
    begin = tl.load(rows + 3 * sequence)
    length, before = tl.load(rows + 3 * sequence + 1), tl.load(rows + 3 * sequence + 2)
    place = (tl.load(slots + sequence).to(tl.int64) * H + head) * K * V
    if TURNED:
        S = tl.load(state + place + (of_key[None, :] * V + column[:, None]))
    else:
        S = tl.load(state + place + (of_key[:, None] * V + column[None, :]))
    S = tl.where(before > 0, S, 0.0)
    key_column, kept = (SIZES.key_heads + head // (H // SIZES.key_heads)) * K, tokens.to(tl.int64) * H
    factors += kept + begin * H + head
    # Read a chunk ahead: they are no operands of a dot, whose loads the compiler pipelines.
    factor = tl.load(factors + at * H, mask=at < length, other=0)
    decay = tl.load(factors + kept)
    chunks = tl.cdiv(length, ROWS)
    for number in range(0, chunks):
        row, cell = begin + number * ROWS, number * H * V + head * V + first_column
        of_w = w.load([row, head * K])
        k = qkv.load([row, key_column])
        of_u = u.load([cell, 0]).to(tl.float32)
        after = tl.minimum(number + 1, chunks - 1) * ROWS
        next_factor = tl.load(factors + (after + at) * H, mask=after + at < length, other=0)
        next_decay = tl.load(factors + kept + after * H)
        rounded = S.to(dtype)
        if TURNED:
            states.store([cell, 0], rounded)
            new = of_u - tl.dot(rounded, of_w.T, input_precision=PRECISION)
            news.store([cell, 0], new.to(dtype))
            S = tl.dot((new * factor[None, :]).to(dtype), k, S * decay, input_precision=PRECISION)
        else:
            states.store([cell, 0], rounded.T)
            new = of_u.T - tl.dot(of_w, rounded, input_precision=PRECISION)
            news.store([cell, 0], new.to(dtype).T)
            S = tl.dot(k.T, (new * factor[:, None]).to(dtype), S * decay, input_precision=PRECISION)
        factor, decay = next_factor, next_decay
    # Offsets made anew: those from before the loop would stay in registers.
    place += wl.zero_here()
    if TURNED:
        tl.store(state + place + (of_key[None, :] * V + column[:, None]), S)
    else:
        tl.store(state + place + (of_key[:, None] * V + column[None, :]), S)


@triton.jit(do_not_specialize=["tokens"])
def outputs(
    qkv, stride, rows, chunks, parts, out, tokens, SIZES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out of one chunk, value head and COLUMNS columns.      grid: (chunks, H * V / COLUMNS)"""
    place = tl.program_id(0).to(tl.int64)
    H: tl.constexpr = SIZES.value_heads
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    dtype: tl.constexpr = qkv.dtype.element_ty
    head = tl.program_id(1) // (V // COLUMNS)
    column = tl.program_id(1) % (V // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    at, of_key = tl.arange(0, ROWS), tl.arange(0, K)
    wl.follow_previous_kernel()
    sequence, begin = tl.load(chunks + 2 * place), tl.load(chunks + 2 * place + 1)
    row = (tl.load(rows + 3 * sequence) + begin).to(tl.int64) + at
    exists = begin + at < tl.load(rows + 3 * sequence + 1)
    queries = qkv + head // (H // SIZES.key_heads) * K
    q = tl.load(queries + row[:, None] * stride + of_key[None, :], mask=exists[:, None], other=0)
    cell = row * H + head
    factor = tl.load(parts.factors + cell, mask=exists, other=0)
    S = tl.load(parts.states + (place * H + head) * V * K + column[:, None] * K + of_key[None, :])
    new = tl.load(parts.news + (place * H + head) * V * ROWS + column[:, None] * ROWS + at[None, :])
    P = tl.load(parts.p + cell[:, None] * ROWS + at[None, :], mask=exists[:, None], other=0)
    result = tl.dot(q, tl.trans(S), input_precision=PRECISION) * factor[:, None]
    result = tl.dot(P, tl.trans(new), result, input_precision=PRECISION)
    tl.store(out + cell[:, None] * V + column[None, :], result.to(dtype), mask=exists[:, None])


def by_three(p: Problem, variant: tuple[bool, int, int, int], qkv: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """``gated_delta_rule`` of one sequence by a variant."""
    turned, columns, stages, warps = variant
    (_, heads, _, V), tokens, chunks = p.sizes, len(qkv), len(p.sequence.chunks)
    parts = Parts(
        w=qkv.new_empty((tokens, heads, 128)),
        u=qkv.new_empty((chunks, heads, V, CHUNK)),
        p=qkv.new_empty((tokens, heads, CHUNK)),
        factors=qkv.new_empty((3, tokens, heads), dtype=torch.float32),
        news=qkv.new_empty((chunks, heads, V, CHUNK)),
        states=qkv.new_empty((chunks, heads, V, 128)),
    )
    out = qkv.new_empty((tokens, heads, V))
    shared = {"SIZES": p.sizes, "ROWS": CHUNK, "PRECISION": "ieee", "launch_pdl": True}
    given = qkv, qkv.stride(0)
    rows, slots, at = p.sequence
    prepare[chunks, heads](*given, *kernel_gates(p.of), rows, at, parts, 128**-0.5, tokens, **shared, num_warps=4)
    scan[heads * V // columns, 1](
        described(qkv, CHUNK, 128), described(parts.w.flatten(1), CHUNK, 128), described(parts.u.flatten(0, 2), columns, CHUNK),
        described(parts.news.flatten(0, 2), columns, CHUNK), described(parts.states.flatten(0, 2), columns, 128),
        parts.factors, rows, slots, state, tokens, **shared, COLUMNS=columns, TURNED=turned, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    outputs[chunks, heads](*given, rows, at, parts, out, tokens, **shared, COLUMNS=V, num_warps=4, num_stages=1)
    return out


def name_of(variant: tuple[bool, int, int, int]) -> str:
    turned, columns, stages, _ = variant
    return f"{'turned' if turned else 'straight'} {columns}/{stages}"


def described(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


class Problem:
    """One prompt of 8,192 tokens, and the op's answer."""

    def __init__(self, key_heads: int, heads: int) -> None:
        self.sizes = DeltaSizes(key_heads, heads, 128, 128)
        self.sequence = ops.SequenceChunks.make([(0, PROMPT)], [0]).to(torch.device("cuda"))
        self.qkv, self.of = draw(PROMPT, self.sizes.columns), gates(PROMPT, heads)
        self.given = copies(lambda: draw(PROMPT, self.sizes.columns), 2 * PROMPT * self.sizes.columns)
        self.state = torch.zeros(1, heads, 128, 128, device="cuda")
        self.expected = self.by_op(self.qkv, self.state)

    def by_op(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return ops.gated_delta_rule(x, self.of, state, self.sequence)

    def measured(self, run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """Errors against the recurrence and against the op, of the state too, and the time."""
        state = torch.zeros_like(self.state)
        out = run(self.qkv, state)
        torch.cuda.synchronize()
        expected = self.expected.float()
        return {
            "error": error_of(out, self.qkv, self.of, self.sizes, torch.zeros_like(state[0])),
            "apart": ((out.float() - expected).abs().max() / expected.abs().max()).item(),
            "state": ((state - self.state).abs().max() / self.state.abs().max()).item(),
            **timed(lambda x: run(x, state), self.given, None),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--heads", default="2x8,8x24")
    parser.add_argument("--only", default="", help="variants by name, between commas")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for of_heads in options.heads.split(","):
        p = Problem(*map(int, of_heads.split("x")))
        for variant in (None, *VARIANTS):
            name = "op" if variant is None else name_of(variant)
            if options.only and name not in ("op", *options.only.split(",")):
                continue
            row: dict[str, Any] = {"heads": of_heads, "variant": name}
            run = p.by_op if variant is None else partial(by_three, p, variant)
            try:
                row |= p.measured(run)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
            rows.append(row)
            print(row, flush=True)
            put(options.out, json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
