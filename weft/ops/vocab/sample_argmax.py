"""sample_argmax: the next token id of each row of logits, greedy or drawn, on one rank.

score[b, n] = logits[b, n] + temperature[b] * g,   g = -log(-log u),   u uniform in (0, 1) by (seed[b], position[b], first + n)

Token n has the greatest score with the probability that softmax(logits / temperature) gives it (the Gumbel-max trick); at
temperature 0 it is the greedy token. The random numbers are splitmix64's (Steele, Lea, Flood: Fast splittable pseudorandom
number generators, 2014), so they do not depend on how the vocabulary is split over ranks, chunks or blocks.

A row has no such token if a logit is NaN or +inf, or if all are -inf. It then gets NOT_FINITE or EXCLUDED in place of a token
id: negative numbers, which no embedding reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.operands import rows_contiguous
from weft.ops.case import BF16, FP16, FP32, Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_like, check_shape, machine_on
from weft.ops.op import UNCHANGED, Op, register
from weft.ops.registration import FLOATS, check_count
from weft.plan.planned import AUTO, Machine, Planned
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.team.team import Team

GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))
BLOCK = 1024
MAX_CHUNKS = 64
# A program reads its blocks one after the other: with two an SM, 128 rows of Qwen3's 151,936 logits take 46 us on an H200, at
# 840 GB/s.
PROGRAMS_PER_SM = 8
# The first token id in cases.
CASES_FIRST = 7
# In place of a token id: every logit is -inf, and one is NaN or +inf.
EXCLUDED, NOT_FINITE = tl.constexpr(-1), tl.constexpr(-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """A program for each chunk of a row. chunks: of a row; chunk: logits of each, the last one's included."""

    chunks: int
    chunk: int


class LogitsCall(NamedTuple):
    """Inputs of the plan of an op on logits [batch, vocab] of one rank."""

    batch: int
    vocab: int
    dtype: torch.dtype
    design: str = AUTO


class LogitsOp(Op):
    """Op whose programs divide the logits of a row. sizes: rows of logits, and token ids of this rank."""

    designs = {"chunks": Chunks}
    calls = LogitsCall
    sizes = ("batch", "vocab")
    dtypes = FLOATS

    def choose(self, call: LogitsCall, machine: Machine) -> Planned:
        batch, vocab = max(1, call.batch), max(1, call.vocab)
        chunk = cdiv(vocab, min(MAX_CHUNKS, cdiv(PROGRAMS_PER_SM * machine.caps.sms, batch)))
        chunk = cdiv(chunk, BLOCK) * BLOCK
        reason = (
            f"about {PROGRAMS_PER_SM} programs for each of {machine.caps.sms} SMs, at most {MAX_CHUNKS} chunks of a row"
        )
        return Planned("chunks", Chunks(chunks=cdiv(vocab, chunk), chunk=chunk), reason)

    def plan_of(self, logits: torch.Tensor) -> Chunks:
        """The design for ``logits`` [batch, vocab]."""
        return self.plan(LogitsCall(*logits.shape, logits.dtype), machine_on(logits.device)).design


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

    (+inf, NOT_FINITE) where a logit of the chunk is NaN or +inf.

    grid: (B, chunks), chunks of ``chunk`` logits. FLOORED: finite logits whose ``ordered`` keys are below floor[b] count as
    -inf.
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
    finite = tl.full([BLOCK], 1, tl.int32)
    for at in range(begin, end, BLOCK):
        here = at + columns
        score = tl.load(source + here, mask=here < end, other=float("-inf")).to(tl.float32)
        finite = tl.where(score < float("inf"), finite, 0)  # NaN is not less
        if FLOORED:
            score = tl.where(ordered(score) >= least, score, float("-inf"))
        if SAMPLED:
            score += heat * gumbel(stream, (first + here).to(tl.int64))
        better = score > best
        best = tl.where(better, score, best)
        token = tl.where(better, here, token)
    greatest = tl.max(best, axis=0)
    chosen = tl.min(tl.where(best == greatest, token, 2147483647), axis=0)
    all_finite = tl.min(finite, axis=0) == 1
    pair = pairs + (tl.program_id(1) * tl.num_programs(0) + row) * 2
    tl.store(pair, tl.where(all_finite, greatest, float("inf")))
    tl.store(pair + 1, tl.where(all_finite, first + chosen, NOT_FINITE).to(tl.float32))


def sample_argmax(
    logits: torch.Tensor,
    first: int,
    temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
    floor: torch.Tensor | None = None,
) -> torch.Tensor:
    """(score, token id) [chunks, B, 2] fp32 of the best token of each row's chunks, for `join_argmax`.

    Where a logit of a chunk is NaN or +inf, the pair says so: (+inf, -2).

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
    if first + vocab > 1 << 24:
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
            check_like("sample_argmax", name, x, logits.device, (dtype,), (batch,))
        elif temperature is not None and name in ("seed", "position"):
            raise ValueError(f"sample_argmax: a temperature needs random numbers; pass {name}")
    return SAMPLE_ARGMAX.dispatch(SamplingArguments(logits, first, temperature, seed, position, floor))


class SamplingArguments(NamedTuple):
    """Arguments of sample_argmax."""

    logits: torch.Tensor
    first: int
    temperature: torch.Tensor | None
    seed: torch.Tensor | None
    position: torch.Tensor | None
    floor: torch.Tensor | None


@triton.jit(do_not_specialize=["chunks"])
def join_argmax_kernel(pairs, tokens, chunks, BLOCK: tl.constexpr):
    """tokens[b] = the id of the greatest score among pairs[:, b]; ties: first chunk.    grid: (B,)

    EXCLUDED where that score is -inf.
    """
    row, batch = tl.program_id(0), tl.num_programs(0)
    chunk = tl.arange(0, BLOCK)
    wl.follow_previous_kernel()
    pair = pairs + (chunk * batch + row) * 2
    score = tl.load(pair, mask=chunk < chunks, other=float("-inf"))
    token = tl.load(pair + 1, mask=chunk < chunks, other=0.0)
    # Chunks and ranks come in the order of their token ids.
    greatest = tl.max(score, axis=0)
    first = tl.min(tl.where(score == greatest, chunk, BLOCK), axis=0)
    chosen = tl.sum(tl.where(chunk == first, token, 0.0), axis=0).to(tl.int64)
    tl.store(tokens + row, tl.where(greatest == float("-inf"), EXCLUDED, chosen))


def join_argmax(pairs: torch.Tensor) -> torch.Tensor:
    """Token ids [B] int64 of the greatest scores, of equal scores the lowest token id.

    -1 where all scores are -inf, -2 where a logit is NaN or +inf.

    pairs  [.., B, 2] of `sample_argmax`: of all chunks, and of all ranks in their order

    No backward. ValueError for another shape or dtype.
    """
    check_like("join_argmax", "pairs", pairs, None, (torch.float32,))
    if pairs.dim() < 3 or pairs.shape[-1] != 2 or 0 in pairs.shape[:-2]:
        raise ValueError(
            f"join_argmax: pairs has shape {tuple(pairs.shape)}; it must be (.., B, 2), as of sample_argmax"
        )
    return JOIN_ARGMAX.dispatch(pairs)


def gumbel_noise(seed: torch.Tensor, position: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise -log(-log u), [B, n] fp32, in plain torch.

    u: 32 random bits of (seed[B], position[B], ids[n])
    """
    stream = _mix(_mix(seed) + position)
    bits = (_mix(stream[:, None] + ids * GAMMA.value) >> 32) & 0xFFFFFFFF
    # 1 - u instead of u: the greatest noise, which wins, comes from the u closest to 1.
    rest = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-rest))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Mix the 64 bits of each int64 (finaliser of splitmix64, a bijection)."""
    x = x + GAMMA.value
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * MIX_1.value
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * MIX_2.value
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def break_rows(logits: torch.Tensor) -> None:
    """Take the token to choose from rows of ``logits`` [B, N], in place; every fourth one stays as it is.

    By NaN of either sign or +inf at some places, alone among -inf too, and by -inf at all places.
    """
    batch, vocab = logits.shape
    for row in range(batch):
        if row % 4 == 0:
            logits[row] = -torch.inf
        if row % 8 == 4:
            logits[row, vocab - 1] = torch.nan
        elif row % 4 == 1:
            logits[row, row * 37 % vocab] = torch.nan if row % 8 == 1 else -torch.nan
        elif row % 4 == 2:
            logits[row, row * 91 % vocab] = torch.inf


class SampleArgmax(LogitsOp):
    name, alias = "sample_argmax", "sample-argmax"
    bits = UNCHANGED

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Logits, two of each row equal and the greatest; if sampled, temperatures, seeds and positions.

        With the field "broken" rows without a token to choose, beside rows with one.
        """
        batch, vocab = case.sizes
        logits = draw.own("logits", case.sizes, 4.0)
        logits[:, vocab // 3 : vocab // 3 + 2] = logits.amax(dim=1, keepdim=True)
        if case.field("broken"):
            break_rows(logits)
        if not case.field("sampled"):
            return (logits,)
        row = torch.arange(batch, device=logits.device)
        return logits, torch.linspace(0, 2, batch, device=logits.device), row * 12_345_678_901, row

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        logits, *sampling = by_rank[rank]
        scores = logits.float()
        if sampling:
            temperature, seed, position = sampling
            ids = CASES_FIRST + torch.arange(logits.shape[1], device=logits.device)
            scores = scores + temperature[:, None] * gumbel_noise(seed, position, ids)
        tokens = CASES_FIRST + scores.argmax(dim=1)
        tokens = tokens.where(scores.amax(dim=1) > -torch.inf, EXCLUDED.value)
        return tokens.where((logits.float() < torch.inf).all(dim=1), NOT_FINITE.value)

    def call(self, case: Case, team: Team, logits: torch.Tensor, *sampling: torch.Tensor) -> torch.Tensor:
        """The joined token ids."""
        if isinstance(case.design, str):
            return join_argmax(sample_argmax(logits, CASES_FIRST, *sampling))
        optional = (*sampling, None) if sampling else (None,) * 4
        return join_argmax(self.run(case.design, None, SamplingArguments(logits, CASES_FIRST, *optional)))

    def cases(self) -> Iterator[Case]:
        for dtype in (FP16, BF16, FP32):
            for sizes in ((1, 1), (1, 5000), (3, 1024), (5, 1025), (40, 70)):
                yield self.case(1, dtype, sizes, layout="strided")
                yield self.case(1, dtype, sizes, sampled=True)
            for sampled in (False, True):
                yield self.case(1, dtype, (9, 1100), sampled=sampled, broken=True)
        design = Chunks(chunks=3, chunk=384)
        yield self.case(1, BF16, (3, 1025), design=design, sampled=True)
        yield self.case(1, BF16, (9, 1025), design, sampled=True, broken=True)

    def run(self, design: Chunks, team: None, given: SamplingArguments) -> torch.Tensor:
        """``sample_argmax`` of checked arguments."""
        self.check_design(design)
        logits, first, *optional = given
        logits, (batch, vocab) = rows_contiguous(logits), logits.shape
        pairs = torch.empty((design.chunks, batch, 2), dtype=torch.float32, device=logits.device)
        if batch > 0:
            sample_argmax_kernel[(batch, design.chunks)](
                logits,
                logits.stride(0),
                *(x if x is None else x.contiguous() for x in optional),
                pairs,
                vocab,
                first,
                design.chunk,
                SAMPLED=given.temperature is not None,
                FLOORED=given.floor is not None,
                BLOCK=BLOCK,
                **launch_options(capabilities_of(logits.device)),
            )
        return pairs

    def forward(self, given: SamplingArguments) -> torch.Tensor:
        return self.run(self.plan_of(given.logits), None, given)

    def fake(self, given: SamplingArguments) -> torch.Tensor:
        logits = given.logits
        return logits.new_empty((self.plan_of(logits).chunks, logits.shape[0], 2), dtype=torch.float32)


SAMPLE_ARGMAX = register(SampleArgmax())


class JoinArgmax(Op):
    name, alias = "join_argmax", "join-argmax"
    bits = UNCHANGED
    no_plan = "one kernel; the plan of sample_argmax decides how many pairs a sequence has"

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Pairs [*sizes, 2] with many equal scores; token ids count up."""
        scores = draw.own("scores", case.sizes).round()
        return (torch.stack((scores, torch.arange(scores.numel(), device=scores.device).view_as(scores)), dim=-1),)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        scores, ids = (x.flatten(0, 1) for x in by_rank[rank][0].unbind(-1))
        return ids.gather(0, scores.argmax(dim=0)[None])[0].long()

    def call(self, case: Case, team: Team, pairs: torch.Tensor) -> torch.Tensor:
        return join_argmax(pairs)

    def cases(self) -> Iterator[Case]:
        for sizes in ((1, 1, 1), (4, 3, 5), (2, 64, 2), (2, 3, 0)):
            yield self.case(1, FP32, sizes)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        pairs = pairs.contiguous()
        tokens, batch = self.fake(pairs), pairs.shape[-2]
        if batch > 0:
            chunks, options = pairs.numel() // (2 * batch), launch_options(capabilities_of(pairs.device))
            join_argmax_kernel[(batch,)](pairs, tokens, chunks, BLOCK=next_power_of_2(chunks), num_warps=1, **options)
        return tokens

    def fake(self, pairs: torch.Tensor) -> torch.Tensor:
        return pairs.new_empty((pairs.shape[-2],), dtype=torch.int64)


JOIN_ARGMAX = register(JoinArgmax())
