"""sample_argmax: the next token id of each row of logits, greedy or drawn, before the ranks' results are joined.

score[b, n] = logits[b, n] + temperature[b] * g,   g = -log(-log u),   u uniform in (0, 1) by (seed[b], position[b], first + n)

The greatest score is at each word with the probability that softmax(logits / temperature) gives it (the Gumbel-max trick);
temperature 0 is the best word. The random numbers are splitmix64's (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, 2014), so they do not depend on how words are split over ranks, parts or blocks.
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
MAX_PARTS = 64


@triton.jit
def mix(x):
    """64 well mixed bits of an int64, a bijection."""
    x += GAMMA
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def gumbel(stream, words):
    """-log(-log u) of the upper 32 bits of stream's number `words`, fp32. From 1 - u, since u next to 1 is what wins."""
    bits = (mix(stream + words * GAMMA) >> 32) & 0xFFFFFFFF
    rest = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604644775390625e-08)
    u = 1.0 - rest
    # log1p(-rest): the correction gives back what rounding took from u.
    return -tl.log(((u - 1.0) + rest) / u - tl.log(u))


@triton.jit
def ordered(x):
    """int32 that compare as the fp32 x do; -0.0 is 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit(do_not_specialize=["N", "first", "part"])
def sample_argmax_kernel(
    logits, stride, temperature, seed, position, floor, pairs, N, first, part,
    SAMPLED: tl.constexpr, FLOORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """pairs[p, b] = (score, word) of the greatest score among words p * part .. of row b, of equals the lowest word.

    grid: (B, parts). Words whose logits are below what `floor` (as `ordered` integers) allows count as -inf.
    """
    row = tl.program_id(0)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, N)
    wl.follow_previous_kernel()
    source = logits + row.to(tl.int64) * stride
    if SAMPLED:
        heat = tl.load(temperature + row)
        stream = mix(mix(tl.load(seed + row)) + tl.load(position + row))
    if FLOORED:
        least = tl.load(floor + row)
    columns = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    word = begin + columns
    for at in range(begin, end, BLOCK):
        here = at + columns
        score = tl.load(source + here, mask=here < end, other=float("-inf")).to(tl.float32)
        if FLOORED:
            score = tl.where(ordered(score) >= least, score, float("-inf"))
        if SAMPLED:
            score += heat * gumbel(stream, (first + here).to(tl.int64))
        better = score > best
        best = tl.where(better, score, best)
        word = tl.where(better, here, word)
    greatest = tl.max(best, axis=0)
    chosen = tl.min(tl.where(best == greatest, word, 2147483647), axis=0)
    place = pairs + (tl.program_id(1) * tl.num_programs(0) + row) * 2
    tl.store(place, greatest)
    tl.store(place + 1, (first + chosen).to(tl.float32))


def sample_argmax(
    logits: torch.Tensor, first: int, temperature: torch.Tensor | None = None, seed: torch.Tensor | None = None,
    position: torch.Tensor | None = None, floor: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """(score, word) [parts, B, 2] fp32: of each part of the words the best one of each row; join them by `join_argmax`.

    logits          [B, N], fp16, bf16 or fp32, of words first .. first + N - 1 < 2**24; -inf: never. Rows may be strided
    temperature     [B] fp32; None: the best word of each row, whatever the next two are
    seed, position  [B] int64: what the random numbers are a function of, with the word
    floor           [B] int32, as `likeliest` gives it: words with lesser logits are left out

    Of equal scores the lowest word. No backward. ValueError for shapes, dtypes or devices that do not fit.
    """
    check_like("sample_argmax", "logits", logits, None, FLOATS)
    check_count("sample_argmax", "first", first)
    check_shape("sample_argmax", "logits", logits, ("B", "N"))
    batch, words = logits.shape
    if first < 0 or first + words > 1 << 24:
        raise ValueError(
            f"sample_argmax: words {first} .. {first + words - 1} are not in 0 .. 2**24 - 1: fp32 carries them"
        )
    for name, x, dtype in (
        ("temperature", temperature, torch.float32), ("seed", seed, torch.int64), ("position", position, torch.int64),
        ("floor", floor, torch.int32),
    ):  # fmt: skip
        if x is not None:
            check_like("sample_argmax", name, x, logits.device, (dtype,))
            check_shape("sample_argmax", name, x, (batch,))
        elif temperature is not None and name in ("seed", "position"):
            raise ValueError(f"sample_argmax: a temperature draws words, which takes {name}")
    return torch.ops.weft.sample_argmax.default(logits, first, temperature, seed, position, floor)


@triton.jit(do_not_specialize=["parts"])
def join_argmax_kernel(pairs, words, parts, BLOCK: tl.constexpr):
    """words[b] = the word of the greatest score among pairs[:, b], of equal scores the first part's.        grid: (B,)"""
    row, batch = tl.program_id(0), tl.num_programs(0)
    part = tl.arange(0, BLOCK)
    wl.follow_previous_kernel()
    place = pairs + (part * batch + row) * 2
    score = tl.load(place, mask=part < parts, other=float("-inf"))
    word = tl.load(place + 1, mask=part < parts, other=0.0)
    # Parts and ranks come in the order of their words.
    first = tl.min(tl.where(score == tl.max(score, axis=0), part, BLOCK), axis=0)
    tl.store(words + row, tl.sum(tl.where(part == first, word, 0.0), axis=0).to(tl.int64))


def join_argmax(pairs: torch.Tensor) -> torch.Tensor:
    """[.., B, 2] of all parts, and of all ranks in their order → the best word [B] int64; of equal ones the lowest."""
    check_like("join_argmax", "pairs", pairs, None, (torch.float32,))
    if pairs.dim() < 3 or pairs.shape[-1] != 2 or pairs.numel() == 0:
        raise ValueError(
            f"join_argmax: pairs has shape {tuple(pairs.shape)}; it must be (.., B, 2), as of sample_argmax"
        )
    return torch.ops.weft.join_argmax.default(pairs)


def parts_of(batch: int, words: int, sms: int) -> tuple[int, int]:
    """(parts of a row, words of a part): about two programs for an SM."""
    part = cdiv(words, min(MAX_PARTS, cdiv(2 * sms, batch)))
    part = cdiv(part, BLOCK) * BLOCK
    return cdiv(words, part), part


@custom_op("sample_argmax", backward=False)
def _sample_argmax(
    logits: torch.Tensor, first: int, temperature: torch.Tensor | None, seed: torch.Tensor | None,
    position: torch.Tensor | None, floor: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    logits, (batch, words) = rows_contiguous(logits), logits.shape
    caps = capabilities_of(logits.device)
    parts, part = parts_of(max(1, batch), max(1, words), caps.sms)
    pairs = torch.empty((parts, batch, 2), dtype=torch.float32, device=logits.device)
    if batch > 0:
        sample_argmax_kernel[(batch, parts)](
            logits, logits.stride(0), *(x if x is None else x.contiguous() for x in (temperature, seed, position, floor)),
            pairs, words, first, part,
            SAMPLED=temperature is not None, FLOORED=floor is not None, BLOCK=BLOCK, **launch_options(caps),
        )  # fmt: skip
    return pairs


@_sample_argmax.register_fake
def _(logits, first, temperature, seed, position, floor):
    batch, words = logits.shape
    parts, _ = parts_of(max(1, batch), max(1, words), capabilities_of(logits.device).sms)
    return logits.new_empty((parts, batch, 2), dtype=torch.float32)


@custom_op("join_argmax", backward=False)
def _join_argmax(pairs: torch.Tensor) -> torch.Tensor:
    pairs = pairs.contiguous()
    batch = pairs.shape[-2]
    parts = pairs.numel() // (2 * batch)
    words = torch.empty((batch,), dtype=torch.int64, device=pairs.device)
    options = launch_options(capabilities_of(pairs.device))
    join_argmax_kernel[(batch,)](pairs, words, parts, BLOCK=next_power_of_2(parts), num_warps=1, **options)
    return words


@_join_argmax.register_fake
def _(pairs):
    return pairs.new_empty((pairs.shape[-2],), dtype=torch.int64)
