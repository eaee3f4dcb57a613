"""sample_argmax: the next token id of each row of logits, greedy or drawn, on one rank.

score[b, n] = logits[b, n] + temperature[b] * g,   g = -log(-log u),   u uniform in (0, 1) by (seed[b], position[b], first + n)

Token n has the greatest score with the probability that softmax(logits / temperature) gives it (the Gumbel-max trick); at
temperature 0 it is the greedy token. The random numbers are splitmix64's (Steele, Lea, Flood: Fast splittable pseudorandom
number generators, 2014), so they do not depend on how the vocabulary is split over ranks, chunks or blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.operands import rows_contiguous
from weft.ops.custom_op import custom_op
from weft.ops.local import capabilities_of, check_like, check_shape
from weft.ops.registration import FLOATS, check_count
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options

GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))
BLOCK = 1024
MAX_CHUNKS = 64


@triton.jit
def mix(x):
    """64 well mixed bits of an int64, a bijection."""
    x += GAMMA
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def gumbel(stream, tokens):
    """-log(-log u), fp32, of the stream's numbers ``tokens``. From 1 - u, since u near 1 wins."""
    bits = (mix(stream + tokens * GAMMA) >> 32) & 0xFFFFFFFF
    rest = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604644775390625e-08)
    u = 1.0 - rest
    # log1p(-rest): the correction gives back what rounding took from u.
    return -tl.log(((u - 1.0) + rest) / u - tl.log(u))


@triton.jit
def ordered(x):
    """int32 keys that compare as the fp32 x do; -0.0 is 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit(do_not_specialize=["N", "first", "chunk"])
def sample_argmax_kernel(
    logits,
    stride,
    temperature,
    seed,
    position,
    floor,
    pairs,
    N,
    first,
    chunk,
    SAMPLED: tl.constexpr,
    FLOORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """pairs[c, b] = (score, token id) of the greatest score in chunk c of row b; ties: lowest id.

    grid: (B, chunks), chunks of ``chunk`` logits. FLOORED: logits whose ``ordered`` keys are below floor[b] count as -inf.
    """
    row = tl.program_id(0)
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, N)
    wl.follow_previous_kernel()
    source = logits + row.to(tl.int64) * stride
    if SAMPLED:
        heat = tl.load(temperature + row)
        stream = mix(mix(tl.load(seed + row)) + tl.load(position + row))
    if FLOORED:
        least = tl.load(floor + row)
    columns = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = begin + columns
    for at in range(begin, end, BLOCK):
        here = at + columns
        score = tl.load(source + here, mask=here < end, other=float("-inf")).to(tl.float32)
        if FLOORED:
            score = tl.where(ordered(score) >= least, score, float("-inf"))
        if SAMPLED:
            score += heat * gumbel(stream, (first + here).to(tl.int64))
        better = score > best
        best = tl.where(better, score, best)
        token = tl.where(better, here, token)
    greatest = tl.max(best, axis=0)
    chosen = tl.min(tl.where(best == greatest, token, 2147483647), axis=0)
    pair = pairs + (tl.program_id(1) * tl.num_programs(0) + row) * 2
    tl.store(pair, greatest)
    tl.store(pair + 1, (first + chosen).to(tl.float32))


def sample_argmax(
    logits: torch.Tensor,
    first: int,
    temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
    floor: torch.Tensor | None = None,
) -> torch.Tensor:
    """(score, token id) [chunks, B, 2] fp32 of the best token of each row's chunks, for `join_argmax`.

    logits          [B, N], fp16, bf16 or fp32, of token ids first .. first + N - 1 < 2**24; -inf: never. Rows may be strided
    temperature     [B] fp32; None: the greedy token of each row, whatever the next two are
    seed, position  [B] int64: with the token id, the input of the random numbers
    floor           [B] int32, as `narrow` leaves `low`: tokens with lesser logits are excluded

    Of equal scores the lowest token id wins. No backward. ValueError for shapes, dtypes or devices that do not fit.
    """
    check_like("sample_argmax", "logits", logits, None, FLOATS)
    check_count("sample_argmax", "first", first)
    check_shape("sample_argmax", "logits", logits, ("B", "N"))
    batch, vocab = logits.shape
    if first < 0 or first + vocab > 1 << 24:
        raise ValueError(
            f"sample_argmax: token ids {first} .. {first + vocab - 1} are not in 0 .. 2**24 - 1, which fp32 can hold"
        )
    for name, x, dtype in (
        ("temperature", temperature, torch.float32),
        ("seed", seed, torch.int64),
        ("position", position, torch.int64),
        ("floor", floor, torch.int32),
    ):
        if x is not None:
            check_like("sample_argmax", name, x, logits.device, (dtype,))
            check_shape("sample_argmax", name, x, (batch,))
        elif temperature is not None and name in ("seed", "position"):
            raise ValueError(f"sample_argmax: a temperature needs random numbers; pass {name}")
    return torch.ops.weft.sample_argmax.default(logits, first, temperature, seed, position, floor)


@triton.jit(do_not_specialize=["chunks"])
def join_argmax_kernel(pairs, tokens, chunks, BLOCK: tl.constexpr):
    """tokens[b] = the id of the greatest score among pairs[:, b]; ties: first chunk.    grid: (B,)"""
    row, batch = tl.program_id(0), tl.num_programs(0)
    chunk = tl.arange(0, BLOCK)
    wl.follow_previous_kernel()
    pair = pairs + (chunk * batch + row) * 2
    score = tl.load(pair, mask=chunk < chunks, other=float("-inf"))
    token = tl.load(pair + 1, mask=chunk < chunks, other=0.0)
    # Chunks and ranks come in the order of their token ids.
    first = tl.min(tl.where(score == tl.max(score, axis=0), chunk, BLOCK), axis=0)
    tl.store(tokens + row, tl.sum(tl.where(chunk == first, token, 0.0), axis=0).to(tl.int64))


def join_argmax(pairs: torch.Tensor) -> torch.Tensor:
    """Token ids [B] int64 of the greatest scores, of equal scores the lowest token id.

    pairs  [.., B, 2] of `sample_argmax`: of all chunks, and of all ranks in their order

    No backward. ValueError for another shape or dtype.
    """
    check_like("join_argmax", "pairs", pairs, None, (torch.float32,))
    if pairs.dim() < 3 or pairs.shape[-1] != 2 or pairs.numel() == 0:
        raise ValueError(
            f"join_argmax: pairs has shape {tuple(pairs.shape)}; it must be (.., B, 2), as of sample_argmax"
        )
    return torch.ops.weft.join_argmax.default(pairs)


def chunks_of(batch: int, vocab: int, sms: int) -> tuple[int, int]:
    """(chunks of a row, logits of a chunk): about two programs for an SM."""
    chunk = cdiv(vocab, min(MAX_CHUNKS, cdiv(2 * sms, batch)))
    chunk = cdiv(chunk, BLOCK) * BLOCK
    return cdiv(vocab, chunk), chunk


@custom_op("sample_argmax", backward=False)
def _sample_argmax(
    logits: torch.Tensor,
    first: int,
    temperature: torch.Tensor | None,
    seed: torch.Tensor | None,
    position: torch.Tensor | None,
    floor: torch.Tensor | None,
) -> torch.Tensor:
    logits, (batch, vocab) = rows_contiguous(logits), logits.shape
    caps = capabilities_of(logits.device)
    chunks, chunk = chunks_of(max(1, batch), max(1, vocab), caps.sms)
    pairs = torch.empty((chunks, batch, 2), dtype=torch.float32, device=logits.device)
    if batch > 0:
        optional = (x if x is None else x.contiguous() for x in (temperature, seed, position, floor))
        sample_argmax_kernel[(batch, chunks)](
            logits,
            logits.stride(0),
            *optional,
            pairs,
            vocab,
            first,
            chunk,
            SAMPLED=temperature is not None,
            FLOORED=floor is not None,
            BLOCK=BLOCK,
            **launch_options(caps),
        )
    return pairs


@_sample_argmax.register_fake
def _(logits, first, temperature, seed, position, floor):
    batch, vocab = logits.shape
    chunks, _ = chunks_of(max(1, batch), max(1, vocab), capabilities_of(logits.device).sms)
    return logits.new_empty((chunks, batch, 2), dtype=torch.float32)


@custom_op("join_argmax", backward=False)
def _join_argmax(pairs: torch.Tensor) -> torch.Tensor:
    pairs = pairs.contiguous()
    batch = pairs.shape[-2]
    chunks = pairs.numel() // (2 * batch)
    tokens = torch.empty((batch,), dtype=torch.int64, device=pairs.device)
    options = launch_options(capabilities_of(pairs.device))
    join_argmax_kernel[(batch,)](pairs, tokens, chunks, BLOCK=next_power_of_2(chunks), num_warps=1, **options)
    return tokens


@_join_argmax.register_fake
def _(pairs):
    return pairs.new_empty((pairs.shape[-2],), dtype=torch.int64)
