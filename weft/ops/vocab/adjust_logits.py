"""adjust_logits: penalties, biases and masks of requests, applied to one rank's logits.

In vLLM's order, for token id n of row b, with the changes of r = rows[b]:

    x = logits[b, n] + bias[r, n]
    x = x / repetition[r] if x > 0 else x * repetition[r]           if seen[r, n] is not 0
    x = x - frequency[r] * count - presence[r] * (count > 0)        count = seen[r, n] // 2: in the answer
    x = -inf                                                        if `allowed` has no bit for n; if n is one of `ends` and
                                                                    position[b] < first_end[r]; if n completes a bad word

NaN stays NaN, and +inf stays +inf or becomes NaN, at excluded tokens too: sample_argmax then finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.arguments import quoted
from weft.kernels.operands import rows_contiguous
from weft.ops.case import BF16, FP16, FP32, Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_contiguous, check_like, check_shape
from weft.ops.op import INVARIANT, register
from weft.ops.registration import FLOATS, check_count, check_flag
from weft.ops.vocab.sample_argmax import CASES_FIRST, Chunks, LogitsOp
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.team.team import Team

BLOCK = 1024
NO_TOKEN, ANY_TOKEN = -1, -2
# Sizes of the tables that a program loads whole.
POWERS = tuple(1 << power for power in range(21))


class LogitChanges(NamedTuple):
    """Changes by slot [S], contiguous. N: token ids of this rank; E and W, L are powers of two.

    bias       [S, N] fp32
    seen       [S, N] int32: twice the token's count in the answer, 1 more if the prompt has it
    repetition, frequency, presence  [S] fp32
    ends       [S, E] int64: tokens that may not be chosen for positions before `first_end` [S] int64; NO_TOKEN: none
    bad_words  [S, W, L] int64: their tokens, right-aligned after ANY_TOKEN; unused words are NO_TOKEN and come last
    recent     [S, L - 1] int64: last tokens of the answer, NO_TOKEN before its first
    allowed    [S, M] int32: a bit for each token id, from a multiple of 32 on
    """

    bias: torch.Tensor
    seen: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    ends: torch.Tensor
    first_end: torch.Tensor
    bad_words: torch.Tensor
    recent: torch.Tensor
    allowed: torch.Tensor


@triton.jit
def _exclude(row, tokens, first, begin, end):
    """row[n] -= inf for the ``tokens`` that are first + begin .. first + end - 1."""
    local = tokens - first
    inside = (local >= begin) & (local < end)
    tl.store(row + local, tl.load(row + local, mask=inside, other=0.0) - float("inf"), mask=inside)


@triton.jit(do_not_specialize=["N", "first", "chunk"])
def adjust_logits_kernel(
    logits,
    stride,
    rows,
    position,
    changes,
    out,
    N,
    first,
    chunk,
    GUIDED: tl.constexpr,
    ENDS: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    ALLOWED: tl.constexpr,
    ANY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[B, N] fp32 as in the module's formula        grid: (B, chunks), chunks of ``chunk`` token ids

    A program first writes its ids, and then takes inf from the ones that are listed. GUIDED: by ``allowed`` too. Rounded as
    separate operations of fp32: launch without fused multiply-adds.
    """
    batch = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, N)
    wl.follow_previous_kernel()
    slot = tl.load(rows + batch)
    repetition = tl.load(changes.repetition + slot)
    frequency, presence = tl.load(changes.frequency + slot), tl.load(changes.presence + slot)
    for at in range(begin, end, BLOCK):
        here = at + tl.arange(0, BLOCK)
        inside = here < end
        x = tl.load(logits + batch * stride + here, mask=inside, other=0.0).to(tl.float32)
        x += tl.load(changes.bias + slot * N + here, mask=inside, other=0.0)
        seen = tl.load(changes.seen + slot * N + here, mask=inside, other=0)
        factor = tl.where(seen != 0, repetition, 1.0)
        x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)  # a plain division is approximate
        count = seen >> 1
        x -= frequency * count.to(tl.float32)
        x -= tl.where(count > 0, presence, 0.0)
        if GUIDED:
            token = first + here
            bits = tl.load(changes.allowed + slot * ALLOWED + token // 32 - first // 32, mask=inside, other=0)
            x -= tl.where((bits >> (token % 32)) & 1 == 0, float("inf"), 0.0)
        tl.store(out + batch * N + here, x, mask=inside)
    tl.debug_barrier()  # what was written above is written again below
    if tl.load(position + batch) < tl.load(changes.first_end + slot):
        _exclude(out + batch * N, tl.load(changes.ends + slot * ENDS + tl.arange(0, ENDS)), first, begin, end)
    word = changes.bad_words + slot * WORDS * LENGTH
    if tl.load(word + LENGTH - 1) >= 0:
        place = tl.arange(0, LENGTH)
        words = word + tl.arange(0, WORDS) * LENGTH
        tokens = tl.load(words[:, None] + place[None, :])
        before = tl.load(changes.recent + slot * (LENGTH - 1) + place, mask=place < LENGTH - 1, other=0)
        fits = (tokens == before[None, :]) | (tokens == ANY) | (place == LENGTH - 1)[None, :]
        completed = tl.min(fits.to(tl.int32), axis=1) == 1
        last = tl.load(words + LENGTH - 1)
        _exclude(out + batch * N, tl.where(completed, last, -1), first, begin, end)


def adjust_logits(
    logits: torch.Tensor,
    first: int,
    changes: LogitChanges,
    rows: torch.Tensor,
    position: torch.Tensor,
    guided: bool = False,
) -> torch.Tensor:
    """Changed logits [B, N] fp32 of this rank.

    logits    [B, N], fp16, bf16 or fp32, of token ids first .. first + N - 1. Rows may be strided
    rows      [B] int64: slot of each row
    position  [B] int64: index of the token to be chosen in its sequence
    guided    by ``changes.allowed`` too

    No backward. ValueError for shapes, dtypes or devices that do not fit.
    """
    check_changes("adjust_logits", changes)
    check_like("adjust_logits", "logits", logits, changes.bias.device, FLOATS, ("B", changes.bias.shape[1]))
    check_count("adjust_logits", "first", first)
    check_flag("adjust_logits", "guided", guided)
    for name, x in (("rows", rows), ("position", position)):
        check_like("adjust_logits", name, x, logits.device, (torch.int64,), (logits.shape[0],))
    words = (first + logits.shape[1] - 1) // 32 - first // 32 + 1
    if guided and changes.allowed.shape[1] < words:
        raise ValueError(
            f"adjust_logits: changes.allowed has shape {tuple(changes.allowed.shape)}; bits of {logits.shape[1]} token ids "
            f"from {first} on take {words} columns"
        )
    return ADJUST_LOGITS.dispatch(AdjustArguments(logits, rows, position, first, list(changes), guided))


class AdjustArguments(NamedTuple):
    """Arguments of adjust_logits. changes: the tensors of a ``LogitChanges``."""

    logits: torch.Tensor
    rows: torch.Tensor
    position: torch.Tensor
    first: int
    changes: list[torch.Tensor]
    guided: bool


def check_changes(op: str, changes: LogitChanges) -> None:
    """ValueError unless the tensors of ``changes`` are as LogitChanges says, on one device."""
    if not isinstance(changes, LogitChanges):
        raise ValueError(f"{op}: changes={quoted(changes)} is not a LogitChanges; pass weft.ops.LogitChanges(...)")
    check_like(op, "changes.bias", changes.bias, None, (torch.float32,), ("S", "N"))
    check_shape(op, "changes.bad_words", changes.bad_words, ("S", "W", "L"))
    (slots, vocab), length = changes.bias.shape, changes.bad_words.shape[2]
    shapes = {
        "bias": (torch.float32, vocab), "seen": (torch.int32, vocab), "repetition": (torch.float32,),
        "frequency": (torch.float32,), "presence": (torch.float32,), "ends": (torch.int64, "E"),
        "first_end": (torch.int64,), "bad_words": (torch.int64, "W", length), "recent": (torch.int64, length - 1),
        "allowed": (torch.int32, "M"),
    }  # fmt: skip
    for name, (dtype, *shape) in shapes.items():
        x = getattr(changes, name)
        check_like(op, f"changes.{name}", x, changes.bias.device, (dtype,), (slots, *shape))
        check_contiguous(op, f"changes.{name}", x)
        if name in ("ends", "bad_words") and not all(size in POWERS for size in x.shape[1:]):
            raise ValueError(f"{op}: changes.{name} has shape {tuple(x.shape)}; pad its rows to powers of two")


def adjusted(
    logits: torch.Tensor,
    first: int,
    changes: LogitChanges,
    rows: slice | torch.Tensor,
    position: torch.Tensor,
    guided: bool,
) -> torch.Tensor:
    """`adjust_logits` in plain torch, with the same bits."""
    x = logits.float() + changes.bias[rows]
    seen = changes.seen[rows]
    repetition = torch.where(seen != 0, changes.repetition[rows, None], 1.0)
    x = torch.where(x > 0, x / repetition, x * repetition)
    count = seen >> 1
    x -= changes.frequency[rows, None] * count
    x -= changes.presence[rows, None] * (count > 0)
    if guided:
        ids = torch.arange(first, first + x.shape[1], device=x.device)
        bits = changes.allowed[rows][:, ids // 32 - first // 32] >> (ids % 32).int()
        x -= torch.where(bits & 1 == 0, torch.inf, 0.0)
    before, words = changes.recent[rows], changes.bad_words[rows]
    fits = ((words[..., :-1] == before[:, None]) | (words[..., :-1] == ANY_TOKEN)).all(dim=-1)
    completed = torch.where(fits, words[..., -1], NO_TOKEN)
    ends = torch.where((position < changes.first_end[rows])[:, None], changes.ends[rows], NO_TOKEN)
    index, owned = local_index(torch.cat((completed, ends), dim=1), first, x.shape[1])
    return x.scatter_add_(1, index, torch.where(owned, -torch.inf, 0.0))


def local_index(tokens: torch.Tensor, first: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of each token among this rank's, 0 for the other ranks' tokens, and whether it is this rank's."""
    index = tokens - first
    owned = (index >= 0) & (index < vocab)
    return torch.where(owned, index, 0), owned


def case_changes(batch: int, vocab: int, draw: Draw) -> LogitChanges:
    """Changes of 2 * batch slots; of every third one the logits stay as they are."""
    slots, device = 2 * batch, draw.device
    slot, ids = torch.arange(slots, device=device), torch.arange(vocab, device=device)
    asks = slot % 3 != 1

    def token(factor: int, *shape: int) -> torch.Tensor:
        """Tokens of this rank and of its neighbours."""
        every = torch.arange(slots * max(1, torch.Size(shape).numel()), device=device).view(slots, *shape)
        return every * factor % (vocab + CASES_FIRST + 5)

    recent, words = token(7, 3), token(5, 4, 4)
    words[:, 0, :3] = recent
    words[:, 1, :2], words[:, 1, 2] = ANY_TOKEN, recent[:, 2]
    words[:, 3] = NO_TOKEN
    words[~asks] = NO_TOKEN
    bias = draw.own("bias", (slots, vocab), 2.0, FP32)
    bias[:, ::5] = -torch.inf
    shares = torch.linspace(0.4, 1.7, slots, device=device)
    return LogitChanges(
        bias=torch.where(asks[:, None], bias, 0.0),
        seen=((ids[None] * 3 + slot[:, None]) % 11 % 7).int(),
        repetition=torch.where(asks, shares, 1.0),
        frequency=torch.where(asks, shares - 1, 0.0),
        presence=torch.where(asks, 1 - shares, 0.0),
        ends=token(3, 4),
        first_end=torch.where(asks, 5, 0),
        bad_words=words,
        recent=recent,
        allowed=(slot[:, None] + torch.arange(cdiv(vocab + 31, 32) + 1, device=device)).int() * -0x31415927,
    )


class AdjustLogits(LogitsOp):
    name, alias = "adjust_logits", "adjust-logits"
    bits = f"{INVARIANT}: a logit is computed by itself"

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Logits, rows and positions, and the changes."""
        batch, vocab = case.sizes
        row = torch.arange(batch, device=draw.device)
        return draw.own("logits", case.sizes, 4.0), 2 * batch - 1 - row, row % 9, *case_changes(batch, vocab, draw)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        logits, rows, position, *changes = by_rank[rank]
        return adjusted(logits, CASES_FIRST, LogitChanges(*changes), rows, position, bool(case.field("guided")))

    def call(
        self, case: Case, team: Team, logits: torch.Tensor, rows: torch.Tensor, position: torch.Tensor, *changes: Any
    ) -> torch.Tensor:
        guided, changes = bool(case.field("guided")), [x.contiguous() for x in changes]
        if isinstance(case.design, str):
            return adjust_logits(logits, CASES_FIRST, LogitChanges(*changes), rows, position, guided)
        given = AdjustArguments(logits, rows, position, CASES_FIRST, changes, guided)
        return self.run(case.design, None, given)

    def cases(self) -> Iterator[Case]:
        for dtype in (FP16, BF16, FP32):
            yield self.case(1, dtype, (5, 300), layout="strided")
            yield self.case(1, dtype, (3, 1100), guided=True)
        yield self.case(1, FP32, (1, 1))
        design = Chunks(chunks=3, chunk=230)
        yield self.case(1, BF16, (4, 650), design=design, guided=True)

    def run(self, design: Chunks, team: None, given: AdjustArguments) -> torch.Tensor:
        """``adjust_logits`` of checked arguments."""
        self.check_design(design)
        logits, of, (batch, vocab) = rows_contiguous(given.logits), LogitChanges(*given.changes), given.logits.shape
        out = torch.empty((batch, vocab), dtype=torch.float32, device=logits.device)
        if batch > 0:
            adjust_logits_kernel[(batch, design.chunks)](
                logits,
                logits.stride(0),
                given.rows.contiguous(),
                given.position.contiguous(),
                of,
                out,
                vocab,
                given.first,
                design.chunk,
                GUIDED=given.guided,
                ENDS=of.ends.shape[1],
                WORDS=of.bad_words.shape[1],
                LENGTH=of.bad_words.shape[2],
                ALLOWED=of.allowed.shape[1],
                ANY=ANY_TOKEN,
                BLOCK=BLOCK,
                enable_fp_fusion=False,
                **launch_options(capabilities_of(logits.device)),
            )
        return out

    def forward(self, given: AdjustArguments) -> torch.Tensor:
        return self.run(self.plan_of(given.logits), None, given)

    def fake(self, given: AdjustArguments) -> torch.Tensor:
        return torch.empty_like(given.logits, dtype=torch.float32)


ADJUST_LOGITS = register(AdjustLogits())
