"""causal_conv1d: short convolution of each channel over a sequence's tokens, then SiLU.

out[t, c] = silu(sum over lag < K of weight[c, K - 1 - lag] * x[t - lag, c])        computed in fp32

Rows before a sequence's first new token are in its state [K - 1, C], the last one at the end, in x's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs
from weft.ops.linear_attention.sequence_chunks import CHUNK, SequenceChunks, Step, check_chunks, check_columns
from weft.ops.local import capabilities_of, check_like, check_shape
from weft.ops.op import Op, register
from weft.ops.registration import FLOATS
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.team.team import Team

MAX_TAPS = 4
CHANNELS, STEP_CHANNELS = 64, 256


@triton.jit
def causal_conv1d_kernel(
    x, stride, weight, state, rows, slots, chunks, out, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Convolution of ROWS new tokens of one sequence, BLOCK channels; the module has the equation.

    grid: (chunks, cdiv(CHANNELS, BLOCK))
    x [T, CHANNELS] with rows ``stride`` apart, weight [CHANNELS, TAPS], state [slots, TAPS - 1, CHANNELS], out [T, CHANNELS]

    The program of a sequence's first chunk is the only one that reads its state, and writes the new one after its reads: other
    chunks begin ROWS >= TAPS - 1 tokens after it.
    """
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < CHANNELS
    wl.follow_previous_kernel()
    sequence, begin = tl.load(chunks + 2 * place), tl.load(chunks + 2 * place + 1)
    first = tl.load(rows + 3 * sequence).to(tl.int64)
    length, before = tl.load(rows + 3 * sequence + 1), tl.load(rows + 3 * sequence + 2)
    old = state + tl.load(slots + sequence).to(tl.int64) * ((TAPS - 1) * CHANNELS)
    at = begin + tl.arange(0, ROWS)
    exists = (at < length)[:, None] & inside[None, :]
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for lag in tl.static_range(TAPS):
        token = (at - lag)[:, None]
        value = tl.load(x + (first + token) * stride + column[None, :], mask=exists & (token >= 0), other=0).to(
            tl.float32
        )
        if lag > 0:
            kept = exists & (token < 0) & (before > 0)
            value += tl.load(old + (TAPS - 1 + token) * CHANNELS + column[None, :], mask=kept, other=0).to(tl.float32)
        acc += value * tl.load(weight + column * TAPS + (TAPS - 1 - lag), mask=inside, other=0).to(tl.float32)[None, :]
    result = acc * tl.sigmoid(acc)
    tl.store(out + (first + at)[:, None] * CHANNELS + column[None, :], result.to(out.dtype.element_ty), mask=exists)
    if begin == 0:
        tl.debug_barrier()  # all threads have read the state
        for row in tl.static_range(TAPS - 1):
            # A row of the old state moves up: every thread reads it before any thread writes it.
            new = length - (TAPS - 1) + row
            from_x = tl.load(x + (first + new) * stride + column, mask=inside & (new >= 0), other=0)
            from_state = inside & (new < 0) & (before > 0)
            from_x += tl.load(old + (length + row) * CHANNELS + column, mask=from_state, other=0)
            tl.debug_barrier()
            tl.store(old + row * CHANNELS + column, from_x, mask=inside)


@triton.jit
def causal_conv1d_update_kernel(
    x, stride, weight, state, lengths, slots, after, out, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """Convolution of QUERIES new tokens of one sequence, BLOCK channels, with the state after each.

    grid: (sequences, cdiv(CHANNELS, BLOCK)). Tensors as of ``causal_conv1d_kernel``, with lengths, after [sequences * QUERIES]

    Rows before are read once, so a state may be written where it was read. Rows of length 0 are left as they are.
    """
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < CHANNELS
    wl.follow_previous_kernel()
    old = state + tl.load(slots + sequence).to(tl.int64) * ((TAPS - 1) * CHANNELS) + column
    kept = inside & (tl.load(lengths + sequence * QUERIES) > 1)
    # The last rows before the token, from the nearest on; TAPS is at most 4.
    one = tl.load(old + (TAPS - 2) * CHANNELS, mask=kept & (TAPS > 1), other=0)
    two = tl.load(old + (TAPS - 3) * CHANNELS, mask=kept & (TAPS > 2), other=0)
    three = tl.load(old + (TAPS - 4) * CHANNELS, mask=kept & (TAPS > 3), other=0)
    tl.debug_barrier()  # all threads have read the state
    taps = weight + column * TAPS + (TAPS - 1)
    of_token = tl.load(taps, mask=inside, other=0).to(tl.float32)
    of_one = tl.load(taps - 1, mask=inside & (TAPS > 1), other=0).to(tl.float32)
    of_two = tl.load(taps - 2, mask=inside & (TAPS > 2), other=0).to(tl.float32)
    of_three = tl.load(taps - 3, mask=inside & (TAPS > 3), other=0).to(tl.float32)
    for query in range(QUERIES):
        row = sequence * QUERIES + query
        exists = inside & (tl.load(lengths + row) > 0)
        token = tl.load(x + row * stride + column, mask=exists, other=0)
        acc = token.to(tl.float32) * of_token + one.to(tl.float32) * of_one
        acc += two.to(tl.float32) * of_two + three.to(tl.float32) * of_three
        tl.store(out + row * CHANNELS + column, (acc * tl.sigmoid(acc)).to(out.dtype.element_ty), mask=exists)
        three, two, one = two, one, token
        new = state + tl.load(after + row).to(tl.int64) * ((TAPS - 1) * CHANNELS) + column
        tl.store(new + (TAPS - 2) * CHANNELS, one, mask=exists & (TAPS > 1))
        tl.store(new + (TAPS - 3) * CHANNELS, two, mask=exists & (TAPS > 2))
        tl.store(new + (TAPS - 4) * CHANNELS, three, mask=exists & (TAPS > 3))


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, sequences: SequenceChunks
) -> torch.Tensor:
    """Causal convolution of prompts with SiLU, [T, C]: of each channel over a sequence's last K tokens.

    x          [T, C], fp16, bf16 or fp32; it may be columns of a wider tensor
    weight     [C, K] of x's dtype, K at most 4: the last column for the token itself
    state      [slots, K - 1, C] of x's dtype: of each sequence its last rows of x; read and written in place
    sequences  the T tokens, by sequence, and the slots

    No backward. ValueError for shapes, dtypes or devices that do not fit.
    """
    _check("causal_conv1d", x, weight, state)
    check_chunks("causal_conv1d", sequences, x.device)
    return CAUSAL_CONV1D.dispatch(x, weight, state, sequences)


def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """``causal_conv1d`` of few new tokens of each of B sequences, [T, C].

    x, weight, state  as for ``causal_conv1d``; T is a multiple of B, tokens of a sequence in rows that follow each other
    lengths  [T] int32: tokens of the sequence up to and with a row's; 1: its state begins as zeros; 0: padding, its row of
             the result is undefined
    slots    [B] int32: index of a sequence's state before the step
    after    [T] int32: where the state after a token goes, each index once in a step, and none that is another sequence's
             slot, which may not have been read yet; None: all in ``slots``, for one token each. So tokens that turn out
             wrong are undone by going on from another index

    No backward. ValueError for shapes, dtypes or devices that do not fit.
    """
    name = "causal_conv1d_update"
    _check(name, x, weight, state)
    return CAUSAL_CONV1D_UPDATE.dispatch(x, weight, state, Step.checked(name, x, lengths, slots, after))


def _check(op: str, x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> None:
    check_like(op, "x", x, None, FLOATS)
    check_columns(op, "x", x)
    check_like(op, "weight", weight, x.device, (x.dtype,))
    check_shape(op, "weight", weight, (x.shape[1], "K"))
    taps = weight.shape[1]
    if not 2 <= taps <= MAX_TAPS:
        raise ValueError(f"{op}: weight has K={taps} columns, not 2 to {MAX_TAPS}; use torch's conv1d")
    check_like(op, "state", state, x.device, (x.dtype,))
    check_shape(op, "state", state, ("slots", taps - 1, x.shape[1]))
    if not state.is_contiguous():
        raise ValueError(f"{op}: state has strides {state.stride()}; it is written in place, so pass it contiguous")


def convolved(x: torch.Tensor, weight: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [n, C], rows [n + K - 1, C] that it is made from) of one sequence, in plain torch."""
    taps, whole = weight.shape[1], torch.cat((before, x))
    acc = sum(whole[i : i + len(x)] * weight[:, i] for i in range(taps))
    return acc * acc.sigmoid(), whole


class CausalConv1d(Op):
    name, alias = "causal_conv1d", "causal-conv1d"
    no_plan = "one kernel; a program takes 64 tokens of 64 channels"
    mutates = ("state",)
    collective = False

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Tensors of a call. sizes: channels, taps; field ``spans``: (before, length) of each sequence."""
        channels, taps = case.sizes
        spans = case.field("spans")
        x = draw.own("x", (sum(length for _, length in spans), channels))
        state = draw.own("state", (len(spans) + 1, taps - 1, channels))
        return x, draw.own("weight", (channels, taps)), state

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, state = (x.double() for x in by_rank[rank])
        outs, state = [], state.clone()
        for first, length, before, slot in chunks_of(case).spans():
            kept = state[slot] if before else torch.zeros_like(state[slot])
            out, whole = convolved(x[first : first + length], weight, kept)
            outs.append(out)
            state[slot] = whole[len(whole) - len(kept) :]
        return torch.cat(outs), state

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(terms=16 * case.sizes[1])

    def call(self, case: Case, team: Team, x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> Inputs:
        state = state.clone(memory_format=torch.contiguous_format)
        wide = torch.cat((x, x), dim=1)[:, : x.shape[1]]  # columns of a wider tensor
        return causal_conv1d(wide, weight, state, chunks_of(case).to(x.device)), state

    def cases(self) -> Iterator[Case]:
        for dtype in (FP16, BF16, FP32):
            for sizes, spans in (
                ((32, 4), ((0, 5), (3, 1), (70, 2), (0, 130))),
                ((100, 4), ((64, 64), (0, 65))),
                ((8, 2), ((0, 1), (1, 1))),
                ((72, 3), ((9, 200),)),
            ):
                yield self.case_of(sizes, dtype, 1, spans=spans)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, sequences: SequenceChunks
    ) -> torch.Tensor:
        out, (channels, taps) = self.fake(x, weight, state, sequences), weight.shape
        grid = len(sequences.chunks), cdiv(channels, CHANNELS)
        if out.numel() > 0:
            constants = {"CHANNELS": channels, "TAPS": taps, "BLOCK": CHANNELS, "ROWS": CHUNK}
            places = (one.contiguous() for one in sequences)
            arguments = x, x.stride(0), weight.contiguous(), state, *places, out
            causal_conv1d_kernel[grid](*arguments, **constants, **launch_options(capabilities_of(x.device)))
        return out

    def fake(self, x, weight, state, sequences):
        return x.new_empty(x.shape)


def chunks_of(case: Case) -> SequenceChunks:
    """Sequences of a case; their slots in falling order."""
    spans = case.field("spans")
    return SequenceChunks.make(spans, range(len(spans), 0, -1))


class CausalConv1dUpdate(Op):
    name, alias = "causal_conv1d_update", "causal-conv1d-update"
    no_plan = "one kernel; a program takes a sequence's new tokens of 256 channels"
    mutates = ("state",)
    collective = False

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Tensors of a call. sizes: channels, taps, new tokens of each sequence."""
        channels, taps, _ = case.sizes
        after = step_of(case).after
        state = draw.own("state", (int(after.max()) + 1, taps - 1, channels))
        return draw.own("x", (len(after), channels)), draw.own("weight", (channels, taps)), state

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, old = (x.double() for x in by_rank[rank])
        step, out, state = step_of(case), torch.zeros_like(x), old.clone()
        for row, first, kept in step.rows(old):
            every, whole = convolved(x[first : row + 1], weight, kept)
            out[row], state[step.after[row]] = every[-1], whole[len(whole) - len(kept) :]
        return out, state

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(terms=16 * case.sizes[1])

    def call(self, case: Case, team: Team, x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> Inputs:
        state = state.clone(memory_format=torch.contiguous_format)
        step, wide = step_of(case).to(x.device), torch.cat((x, x), dim=1)[:, : x.shape[1]]
        return defined_rows(causal_conv1d_update(wide, weight, state, *step), step.lengths), state

    def cases(self) -> Iterator[Case]:
        for dtype in (FP16, BF16, FP32):
            for sizes, lengths in (
                ((100, 4, 1), (0, 7, -1, 1)),
                ((300, 4, 3), (5, 0)),
                ((8, 2, 2), (0,)),
                ((8, 3, 5), (1, -1)),
            ):
                yield self.case_of(sizes, dtype, 1, lengths=lengths)

    def forward(self, x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, step: Step) -> torch.Tensor:
        out, (channels, taps) = self.fake(x, weight, state, step), weight.shape
        if out.numel() > 0:
            grid = len(step.slots), cdiv(channels, STEP_CHANNELS)
            constants = {"CHANNELS": channels, "TAPS": taps, "BLOCK": STEP_CHANNELS, "QUERIES": step.queries}
            places = (one.contiguous() for one in step)
            arguments = x, x.stride(0), weight.contiguous(), state, *places, out
            causal_conv1d_update_kernel[grid](*arguments, **constants, **launch_options(capabilities_of(x.device)))
        return out

    def fake(self, x, weight, state, step):
        return x.new_empty(x.shape)


def step_of(case: Case) -> Step:
    """Step of a case.

    Field ``lengths``: tokens of each sequence before the step; -1: padding. Sequences begin in their second state where they
    have one, and have a padded last token where they have more than two.
    """
    before, queries = case.field("lengths"), case.sizes[-1]
    lengths = [
        0 if held < 0 or (queries > 2 and query == queries - 1) else held + query + 1
        for held in before for query in range(queries)
    ]  # fmt: skip
    after = torch.arange(1, len(lengths) + 1, dtype=torch.int32)
    slots = after.view(-1, queries)[:, min(1, queries - 1)].contiguous()
    return Step(torch.tensor(lengths, dtype=torch.int32), slots, after)


def defined_rows(out: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """``out`` with zeros in rows of padding."""
    return torch.where((lengths > 0).view(-1, *[1] * (out.dim() - 1)), out, 0)


CAUSAL_CONV1D = CausalConv1d()
register(CAUSAL_CONV1D)
CAUSAL_CONV1D_UPDATE = CausalConv1dUpdate()
register(CAUSAL_CONV1D_UPDATE)
