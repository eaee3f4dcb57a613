"""causal_conv1d: short convolution of each channel over a sequence's tokens, then SiLU.

out[t, c] = silu(sum over lag < K of weight[c, K - 1 - lag] * x[t - lag, c])        computed in fp32

Rows before a sequence's first new token are in its state [ring, C], in x's dtype: that of token p at p % ring. So a row is
written where an old one ends, and no row moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs
from weft.ops.linear_attention.sequence_chunks import CHUNK, SequenceChunks, check_chunks, check_columns
from weft.ops.local import capabilities_of, check_like
from weft.ops.op import INVARIANT, Op, register
from weft.ops.registration import FLOATS
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.team.team import Team

MAX_TAPS = 4
CHANNELS = 64


@triton.jit
def causal_conv1d_kernel(
    x, stride, weight, state, rows, slots, chunks, out, CHANNELS: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Convolution of ROWS new tokens of one sequence, BLOCK channels; the module has the equation.

    grid: (chunks, cdiv(CHANNELS, BLOCK))
    x [T, CHANNELS] with rows ``stride`` apart, weight [CHANNELS, TAPS], state [slots, RING, CHANNELS], out [T, CHANNELS]

    The program of a sequence's first chunk is the only one that reads its state, and writes the last rows after that: other
    chunks begin ROWS >= TAPS - 1 tokens after it.
    """
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < CHANNELS
    wl.follow_previous_kernel()
    sequence, begin = tl.load(chunks + 2 * place), tl.load(chunks + 2 * place + 1)
    first = tl.load(rows + 3 * sequence).to(tl.int64)
    length, before = tl.load(rows + 3 * sequence + 1), tl.load(rows + 3 * sequence + 2)
    old = state + tl.load(slots + sequence).to(tl.int64) * (RING * CHANNELS)
    at = begin + tl.arange(0, ROWS)
    exists = (at < length)[:, None] & inside[None, :]
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for lag in tl.static_range(TAPS):
        token = (at - lag)[:, None]
        value = tl.load(x + (first + token) * stride + column[None, :], mask=exists & (token >= 0), other=0).to(
            tl.float32
        )
        if lag > 0:
            kept = exists & (token < 0) & (before + token >= 0)
            value += tl.load(old + (before + token) % RING * CHANNELS + column[None, :], mask=kept, other=0).to(
                tl.float32
            )
        acc += value * tl.load(weight + column * TAPS + (TAPS - 1 - lag), mask=inside, other=0).to(tl.float32)[None, :]
    result = acc * tl.sigmoid(acc)
    tl.store(out + (first + at)[:, None] * CHANNELS + column[None, :], result.to(out.dtype.element_ty), mask=exists)
    if begin == 0:
        tl.debug_barrier()  # all threads have read the state
        for row in tl.static_range(1, TAPS):
            last = length - row
            newest = tl.load(x + (first + last) * stride + column, mask=inside & (last >= 0), other=0)
            tl.store(old + (before + last) % RING * CHANNELS + column, newest, mask=inside & (last >= 0))


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, sequences: SequenceChunks
) -> torch.Tensor:
    """Causal convolution of prompts with SiLU, [T, C]: of each channel over a sequence's last K tokens.

    x          [T, C], fp16, bf16 or fp32; it may be columns of a wider tensor
    weight     [C, K] of x's dtype, K at most 4: the last column for the token itself
    state      [slots, ring, C] of x's dtype, ring at least K - 1: of each sequence its last rows of x, that of token p at
               p % ring; read and written in place, rows before the last K - 1 tokens left as they are
    sequences  the T tokens, by sequence, and the slots

    A token's bits depend neither on other sequences nor on where calls cut its sequence. No backward. ValueError for shapes,
    dtypes or devices that do not fit.
    """
    check_convolution("causal_conv1d", x, weight, state)
    check_chunks("causal_conv1d", sequences, x.device)
    return CAUSAL_CONV1D.dispatch(x, weight, state, sequences)


def check_convolution(op: str, x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> None:
    """ValueError for tensors that do not fit each other."""
    check_like(op, "x", x, None, FLOATS)
    check_columns(op, "x", x)
    check_like(op, "weight", weight, x.device, (x.dtype,), (x.shape[1], "K"))
    taps = weight.shape[1]
    if not 2 <= taps <= MAX_TAPS:
        raise ValueError(f"{op}: weight has K={taps} columns, not 2 to {MAX_TAPS}; use torch's conv1d")
    check_like(op, "state", state, x.device, (x.dtype,), ("slots", "ring", x.shape[1]))
    if state.shape[1] < taps - 1:
        raise ValueError(
            f"{op}: state has {state.shape[1]} rows of a sequence; a convolution over {taps} tokens needs {taps - 1}"
        )
    if not state.is_contiguous():
        raise ValueError(f"{op}: state has strides {state.stride()}; it is written in place, so pass it contiguous")


def rows_before(state: torch.Tensor, before: int, count: int) -> torch.Tensor:
    """Rows [count, C] of the tokens before ``before``, from one sequence's state; zeros before the first."""
    rows = [state[at % len(state)] if at >= 0 else torch.zeros_like(state[0]) for at in range(before - count, before)]
    return torch.stack(rows)


def convolved(x: torch.Tensor, weight: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """out [n, C] of rows [n, C] of one sequence after rows [K - 1, C], in plain torch."""
    whole = torch.cat((before, x))
    acc = sum(whole[i : i + len(x)] * weight[:, i] for i in range(weight.shape[1]))
    return acc * acc.sigmoid()


class CausalConv1d(Op):
    name, alias = "causal_conv1d", "causal-conv1d"
    bits = INVARIANT
    no_plan = "one kernel; a program takes 64 tokens of 64 channels"
    mutates = ("state",)
    collective = False

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Tensors of a call. sizes: channels, taps; field ``spans``: (before, length) of each sequence."""
        channels, taps = case.sizes
        spans = case.field("spans")
        x = draw.own("x", (sum(length for _, length in spans), channels))
        state = draw.own("state", (len(spans) + 1, case.field("ring"), channels))
        return x, draw.own("weight", (channels, taps)), state

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, state = (x.double() for x in by_rank[rank])
        outs, state = [], state.clone()
        for first, length, before, slot in chunks_of(case).spans():
            kept = rows_before(state[slot], before, weight.shape[1] - 1)
            outs.append(convolved(x[first : first + length], weight, kept))
            for token in range(max(0, length - len(kept)), length):
                state[slot, (before + token) % state.shape[1]] = x[first + token]
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
                for ring in (sizes[1] - 1, 10)[-1 if dtype is FP16 else 0 :]:
                    yield self.case_of(sizes, dtype, 1, spans=spans, ring=ring)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, sequences: SequenceChunks
    ) -> torch.Tensor:
        out, (channels, taps) = self.fake(x, weight, state, sequences), weight.shape
        grid = len(sequences.chunks), cdiv(channels, CHANNELS)
        if out.numel() > 0:
            constants = {"CHANNELS": channels, "TAPS": taps, "RING": state.shape[1], "BLOCK": CHANNELS, "ROWS": CHUNK}
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


CAUSAL_CONV1D = register(CausalConv1d())
