"""gated_delta_net_step: convolution, gated delta rule and gated norm of a few new tokens a sequence.

    qkv = silu(conv(qkv)); S, out = rule(S, qkv, a, b); out = RMSNorm(out) * norm * silu(z)         token by token

A sequence's state S is kept after the first new token: later ones may be drafts that turn out wrong. Their inputs are kept,
which are few bytes: ``pending`` says how many drafts were right, and the next step begins with their updates. So a step reads
and writes S once, whatever the number of its tokens, and nothing is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.arguments import quoted
from weft.kernels.fp8 import (
    COLUMNS,
    Fp8,
    RowFormat,
    by_given_scale,
    by_scale,
    check_e4m3,
    empty_rows,
    fp8_of,
    quantized_parts,
    rows_argument,
    scale_for,
)
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs, agreed, format_of
from weft.ops.linear_attention.causal_conv1d import check_convolution, convolved, rows_before
from weft.ops.linear_attention.delta_rule import (
    L2_EPS,
    DeltaSizes,
    Gates,
    Recurrence,
    check_delta_rule,
    kernel_gates,
    sizes_of,
    softplus,
)
from weft.ops.linear_attention.gated_delta_rule import delta_inputs
from weft.ops.linear_attention.sequence_chunks import check_columns
from weft.ops.local import capabilities_of, check_dtype, check_like, check_row_format, check_shape
from weft.ops.op import Op, define, register
from weft.ops.registration import check_count, check_scalar
from weft.runtime.arithmetic import next_power_of_2
from weft.runtime.capabilities import Capabilities, launch_options
from weft.runtime.team.team import Team

# Of a block of a state: threads of a column, and columns of a warp.
LANES, PIECE = tl.constexpr(8), tl.constexpr(16)
# Layouts give dimensions to lanes, then to warps, then to registers: the last one, then of equal ones in Triton 3.6 the first,
# the second and the third, from 3.7 on the third, the second and the first. The second one should be the warps'.
LANES_FIRST = tl.constexpr(triton.__version__.startswith("3.6."))
# Sequences up to which the kernel writes fp8 itself. Steps of Qwen3.6-27B on two H200s, with a kernel more and without: 1
# sequence 5.7 and 5.6 ms, 8 6.4 and 6.7, 32 9.1 and 8.5, 128 15.2 and 16.3; on two machines, and attention with heads of 256
# changed too (benchmarks/lab/h200-x2-fp8-delta-steps.json).
MOST_IN_FP8 = 64
# Most programs of a launch along its second dimension.
MOST_SEQUENCES = 65535


class DeltaSlots(NamedTuple):
    """States of sequences by slot, written in place.

    inputs  [slots, ring, columns] of the dtype of q, k and v: elements of token p before the convolution, at row p % ring
    rates   [slots, ring, 2 * value heads] of that dtype: a and b of token p
    state   fp32 [slots, value heads, K, V]
    """

    inputs: torch.Tensor
    rates: torch.Tensor
    state: torch.Tensor


class DeltaTokens(NamedTuple):
    """Few new tokens of each of B sequences, in rows that follow each other. All tensors int32.

    lengths  [T]: tokens of the sequence up to and with a row's; 1: its state begins as zeros; 0: padding, after its sequence's
             new tokens, whose row of the result is undefined
    slots    [B]: index of a sequence's state; no two sequences with tokens have the same
    pending  [B]: tokens before the new ones that the state does not have yet, whose inputs are in the slot; None: none
    most_pending  the largest number that ``pending`` may have
    """

    lengths: torch.Tensor
    slots: torch.Tensor
    pending: torch.Tensor | None = None
    most_pending: int = 0

    def to(self, device: torch.device) -> DeltaTokens:
        return self.mapped(lambda x: x.to(device))

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> DeltaTokens:
        pending = None if self.pending is None else change(self.pending)
        return DeltaTokens(change(self.lengths), change(self.slots), pending, self.most_pending)

    @property
    def queries(self) -> int:
        """New tokens of a sequence."""
        return len(self.lengths) // len(self.slots)

    def spans(self) -> list[tuple[int, int, int, int, int]]:
        """(first row, new tokens, tokens before, pending tokens, slot) of each sequence; waits for the device."""
        lengths = self.lengths.view(-1, self.queries).tolist()
        pending = [0] * len(lengths) if self.pending is None else self.pending.tolist()
        return [
            (at * self.queries, sum(one > 0 for one in of), of[0] - 1, pending[at] if of[0] > 1 else 0, slot)
            for at, (of, slot) in enumerate(zip(lengths, self.slots.tolist(), strict=True))
            if of[0] > 0
        ]


@triton.jit
def convolved_tokens(
    x,
    stride,
    inputs,
    position,
    before,
    end,
    conv,
    column,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """silu of the convolution at ``position`` [n]: [n, columns] in fp32.

    x  row ``before`` of the sequence: rows from there to ``end`` are new, the ones before are kept in ``inputs``
    """
    inside = column[None, :] >= 0
    acc = tl.zeros([position.shape[0], column.shape[0]], tl.float32)
    for lag in tl.static_range(TAPS):
        at = position[:, None] - lag
        new, old = inside & (at >= before) & (at < end), inside & (at >= 0) & (at < before)
        value = tl.load(x + (at - before) * stride + column[None, :], mask=new, other=0).to(tl.float32)
        value += tl.load(inputs + at % RING * COLUMNS + column[None, :], mask=old, other=0).to(tl.float32)
        acc += value * tl.load(conv + column * TAPS + (TAPS - 1 - lag)).to(tl.float32)[None, :]
    return acc * tl.sigmoid(acc)


@triton.jit
def keep_inputs(x, stride, inputs, position, before, end, column, writes, RING: tl.constexpr, COLUMNS: tl.constexpr):
    """Keep elements of the new tokens among ``position``, if ``writes``; arguments as above."""
    at = position[:, None]
    new = (column[None, :] >= 0) & (at >= before) & (at < end) & writes
    value = tl.load(x + (at - before) * stride + column[None, :], mask=new, other=0)
    tl.store(inputs + at % RING * COLUMNS + column[None, :], value, mask=new)


@triton.jit
def sum_over_keys(x):
    """[V // PIECE, PIECE] of products of a block's elements: first in each thread, then in each warp."""
    if LANES_FIRST:
        return tl.sum(tl.sum(x, 2), 0)
    return tl.sum(tl.sum(x, 0), 1)


@triton.jit
def gated_delta_net_step_kernel(
    qkv, stride, z, z_stride, gates, strides, conv, norm, kept, tokens, mixed, out, scale, eps, fp8, SIZES: tl.constexpr,
    TAPS: tl.constexpr, RING: tl.constexpr, QUERIES: tl.constexpr, SOME: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """New tokens of one sequence and value head, after the pending ones: the module has the equations.

    grid: (value heads, sequences): in the order in which states lie in memory
    qkv, z, gates.a, gates.b  [sequences * QUERIES, …] with rows ``stride``, ``z_stride`` and ``strides`` apart
    conv [columns, TAPS], norm [V], out [sequences * QUERIES, value heads, V]; kept, tokens: ``DeltaSlots``, ``DeltaTokens``
    mixed  [sequences, value heads, MOST, 2 * K + V]: of each token k, q and v after the convolution, written and read by one
           program
    fp8    ``Fp8Rows`` of ``out`` as rows of V elements a value head, whose groups are the heads; else None
    SOME, MOST  powers of two: at least QUERIES, and at least QUERIES and the most pending tokens

    signals, waits  none, except the wait for the previous kernel, after which inputs, ``pending`` and earlier steps' states
                    are complete. The CTA barrier lies between the stores of ``mixed`` and its loads by other threads
    reuse           programs share no element of a state. They read inputs and rates that are kept of tokens before the new
                    ones, and keep the new ones, each column by one program: the ring holds both, so no program overwrites what
                    another one reads. ``mixed`` is new in each call

    A sum over keys crosses no warp: of a block of a state a warp has PIECE columns, whose rows are in LANES of its threads and
    in their registers (``LANES_FIRST``).
    """
    H: tl.constexpr = SIZES.value_heads
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    C: tl.constexpr = 2 * SIZES.key_heads * K + H * V
    WIDTH: tl.constexpr = 2 * K + V
    dtype: tl.constexpr = qkv.dtype.element_ty
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    of_key, of_value = tl.arange(0, K), tl.arange(0, V)
    key_head = head // (H // SIZES.key_heads)
    q_at, k_at = key_head * K + of_key, (SIZES.key_heads + key_head) * K + of_key
    v_at = 2 * SIZES.key_heads * K + head * V + of_value
    if LANES_FIRST:
        key = tl.arange(0, LANES)[:, None, None] + LANES * tl.arange(0, K // LANES)[None, None, :]
    else:
        key = LANES * tl.arange(0, K // LANES)[:, None, None] + tl.arange(0, LANES)[None, None, :]
    value = tl.arange(0, V // PIECE)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    wl.follow_previous_kernel()
    begin, some = sequence * QUERIES, tl.arange(0, SOME)
    before = tl.load(tokens.lengths + begin) - 1
    new = tl.sum((tl.load(tokens.lengths + begin + some, mask=some < QUERIES, other=0) > 0).to(tl.int32), 0)
    slot = tl.load(tokens.slots + sequence).to(tl.int64)
    state = kept.state + (slot * H + head) * (K * V) + (key[:, :, :, None] * V + value[None, :, None, :])
    pending = 0
    if tokens.pending is not None:
        pending = tl.where(before > 0, tl.load(tokens.pending + sequence), 0)
    end, count = before + new, tl.where(new > 0, pending + new, 0)
    x, inputs, rates = qkv + begin * stride, kept.inputs + slot * (RING * C), kept.rates + slot * (RING * 2 * H) + head
    position = before - pending + tl.arange(0, MOST)
    k_rows = convolved_tokens(x, stride, inputs, position, before, end, conv, k_at, TAPS, RING, C)
    q_rows = convolved_tokens(x, stride, inputs, position, before, end, conv, q_at, TAPS, RING, C)
    v_rows = convolved_tokens(x, stride, inputs, position, before, end, conv, v_at, TAPS, RING, C)
    mixed += (sequence * H + head) * (MOST * WIDTH)
    rows = mixed + tl.arange(0, MOST)[:, None] * WIDTH
    tl.store(rows + of_key[None, :], k_rows.to(dtype))
    tl.store(rows + K + of_key[None, :], q_rows.to(dtype))
    tl.store(rows + 2 * K + of_value[None, :], v_rows.to(dtype))
    first_of_key = head % (H // SIZES.key_heads) == 0
    keep_inputs(x, stride, inputs, position, before, end, q_at, first_of_key, RING, C)
    keep_inputs(x, stride, inputs, position, before, end, k_at, first_of_key, RING, C)
    keep_inputs(x, stride, inputs, position, before, end, v_at, True, RING, C)
    rate, bias = tl.exp(tl.load(gates.A_log + head)), tl.load(gates.dt_bias + head)
    S = tl.load(state, mask=(key[:, :, :, None] >= 0) & (before > 0), other=0.0)
    tl.debug_barrier()  # all threads have stored their part of the rows; of the state a thread stores what it has read
    for token in range(count):
        row, its_rates = begin + token - pending, rates + (before - pending + token) % RING * (2 * H)
        a = tl.load(gates.a + row * strides[0] + head, mask=token >= pending, other=0)
        b = tl.load(gates.b + row * strides[1] + head, mask=token >= pending, other=0)
        a += tl.load(its_rates, mask=token < pending, other=0)
        b += tl.load(its_rates + H, mask=token < pending, other=0)
        k = tl.load(mixed + token * WIDTH + key).to(tl.float32)[:, :, :, None]
        v = tl.load(mixed + token * WIDTH + 2 * K + value).to(tl.float32)
        k *= tl.rsqrt(sum_over_keys(k * k)[None, :, None, :] + L2_EPS)
        S *= tl.exp(-rate * softplus(a.to(tl.float32) + bias))
        delta = (v - sum_over_keys(S * k)) * tl.sigmoid(b.to(tl.float32))
        S += k * delta[None, :, None, :]
        if token >= pending:
            if token == pending:
                tl.store(state, S)
            q = tl.load(mixed + token * WIDTH + K + key).to(tl.float32)[:, :, :, None]
            q *= tl.rsqrt(sum_over_keys(q * q)[None, :, None, :] + L2_EPS) * scale
            gate = tl.load(z + row * z_stride + head * V + value).to(tl.float32)
            result = sum_over_keys(S * q).to(dtype).to(tl.float32)
            squares = tl.sum(tl.sum(result * result, 1), 0)
            normed = result * tl.rsqrt(squares / V + eps) * tl.load(norm + value).to(tl.float32)
            gated, at = (normed * gate * tl.sigmoid(gate)).to(dtype), (row * H + head) * V + value
            if fp8 is None:
                tl.store(out + at, gated)
            elif fp8.group == 0:
                tl.store(out + at, by_given_scale(gated, tl.load(fp8.scales)))
            else:
                size = tl.abs(gated.to(tl.float32))
                of_head = scale_for(tl.max(tl.max(tl.where(size < float("inf"), size, 0.0), 1), 0))
                tl.store(fp8.scales + row * fp8.row + head * fp8.column, of_head)
                tl.store(out + at, by_scale(gated.to(tl.float32), of_head))
            tl.store(its_rates, a)
            tl.store(its_rates + H, b)


def gated_delta_net_step(
    qkv: torch.Tensor,
    z: torch.Tensor,
    gates: Gates,
    conv: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    kept: DeltaSlots,
    tokens: DeltaTokens,
    *,
    fp8: RowFormat | None = None,
) -> torch.Tensor | Fp8:
    """A gated delta net between its projections, of few new tokens of each of B sequences.

    qkv     [T, 2 * key heads * K + value heads * V] before the convolution, fp16, bf16 or fp32: heads of q, of k, and of v. T
            is a multiple of B. Value heads h share key head h // (value heads / key heads)
    z       [T, value heads * V], the gate of the norm
    gates   a, b [T, value heads] of qkv's dtype, A_log, dt_bias [value heads] fp32
    conv    [columns of qkv, taps], the last column for the token itself; at most 4 taps
    norm    weight [V] and epsilon of the RMSNorm of each head
    kept    the sequences' states, read and written in place: after the first new token of a sequence, with the inputs of all
    tokens  which rows and slots are whose, and how many tokens each state has yet to take
    fp8     rows of the result are put in fp8 so, after they are rounded to 16 bits; ``row_format`` of the weight that
            follows. By a kernel more with a scale for each token, with scales of groups unless V is 128, and for more than
            64 sequences

    Returns [T, value heads * V] of qkv's dtype. qkv, z, a and b may be columns of a wider tensor. Tokens that turn out wrong
    are not counted in ``pending`` the next time, and the next tokens are kept in their place.

    No backward. ValueError for shapes, dtypes or devices that do not fit.
    """
    name = "gated_delta_net_step"
    if not isinstance(kept, DeltaSlots):
        raise ValueError(f"{name}: kept={quoted(kept)} are not DeltaSlots; pass DeltaSlots(inputs, rates, state)")
    check_delta_rule(name, qkv, gates, kept.state)
    check_convolution(name, qkv, conv, kept.inputs)
    weight, eps = _norm_of(name, norm)
    check_scalar(name, "norm[1]", eps)
    heads, V = kept.state.shape[1], kept.state.shape[3]
    for what, tensor, shape in (("z", z, (qkv.shape[0], heads * V)), ("norm[0]", weight, (V,))):
        check_like(name, what, tensor, qkv.device, (qkv.dtype,), shape)
    check_columns(name, "z", z)
    _check_tokens(name, qkv, tokens)
    ring = kept.inputs.shape[1]
    check_like(name, "kept.rates", kept.rates, qkv.device, (qkv.dtype,), (kept.state.shape[0], ring, 2 * heads))
    check_shape(name, "kept.inputs", kept.inputs, (kept.state.shape[0], ring, qkv.shape[1]))
    if not kept.rates.is_contiguous():
        raise ValueError(
            f"{name}: kept.rates has strides {kept.rates.stride()}; it is written in place, so pass it contiguous"
        )
    new, most = (tokens.queries, tokens.most_pending) if len(tokens.slots) else (0, 0)
    if ring < (needed := conv.shape[1] - 1 + new + most):
        raise ValueError(
            f"{name}: kept.inputs has {ring} rows of a sequence; {new} new tokens, most_pending={most} and a convolution over "
            f"{conv.shape[1]} need {needed}"
        )
    given = StepArguments(qkv, z, gates, conv, weight, eps, kept, tokens)
    if fp8 is None:
        return GATED_DELTA_NET_STEP.dispatch(given)
    check_row_format(name, fp8, qkv.device)
    check_dtype(name, qkv.dtype)
    return fp8_of(*_FP8.dispatch(given, fp8), fp8)


class StepArguments(NamedTuple):
    """Arguments of gated_delta_net_step. norm, eps: of the RMSNorm of each head."""

    qkv: torch.Tensor
    z: torch.Tensor
    gates: Gates
    conv: torch.Tensor
    norm: torch.Tensor
    eps: float
    kept: DeltaSlots
    tokens: DeltaTokens


def _norm_of(op: str, norm: tuple[torch.Tensor, float]) -> tuple[torch.Tensor, float]:
    if not isinstance(norm, tuple) or len(norm) != 2:
        raise ValueError(f"{op}: norm={quoted(norm)} is not (weight, eps)")
    return norm


def _check_tokens(op: str, qkv: torch.Tensor, tokens: DeltaTokens) -> None:
    if not isinstance(tokens, DeltaTokens):
        raise ValueError(
            f"{op}: tokens={quoted(tokens)} are not DeltaTokens; pass DeltaTokens(lengths, slots, pending)"
        )
    count = qkv.shape[0]
    for name, shape in (("lengths", (count,)), ("slots", ("B",)), ("pending", ("B",))):
        tensor = getattr(tokens, name)
        if tensor is not None or name != "pending":
            check_like(op, f"tokens.{name}", tensor, qkv.device, (torch.int32,), shape)
    batch = len(tokens.slots)
    if batch > MOST_SEQUENCES:
        raise ValueError(f"{op}: {batch} sequences, and a launch has {MOST_SEQUENCES} at most; pass some at a time")
    if count % batch if batch else count:
        raise ValueError(f"{op}: {count} rows of {batch} slots; pass as many rows of every sequence")
    check_count(op, "tokens.most_pending", tokens.most_pending)
    if tokens.pending is not None:
        check_shape(op, "tokens.pending", tokens.pending, (batch,))
        if tokens.most_pending == 0:
            raise ValueError(
                f"{op}: tokens.most_pending=0 beside pending ones; pass the largest number that they may have"
            )


class GatedDeltaNetStep(Op):
    name, alias = "gated_delta_net_step", "gated-delta-net-step"
    bits = "depend on the most new and pending tokens of a sequence, for which the kernel is compiled"
    no_plan = "one kernel; a program has a sequence and value head, whose size decides its warps"
    mutates = ("inputs", "rates", "state")
    collective = False

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Tensors of a call. sizes: key heads, value heads, K, V, taps, new tokens of a sequence."""
        *heads, taps, _ = case.sizes
        sizes, tokens, ring = DeltaSizes(*heads), tokens_of(case), case.field("ring")
        slots = len(tokens.slots) + 1
        qkv, a, b, A_log, dt_bias, state = delta_inputs(sizes, len(tokens.lengths), slots, draw, case)
        columns, values = sizes.columns, sizes.value_heads * sizes.V
        return (
            qkv, draw.own("z", (len(qkv), values)), a, b, A_log, dt_bias, draw.own("conv", (columns, taps)),
            1 + draw.own("norm", (sizes.V,)) / 8, draw.own("inputs", (slots, ring, columns)),
            draw.own("rates", (slots, ring, 2 * sizes.value_heads)), state,
        )  # fmt: skip

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> Inputs:
        return self.of_tokens(case, tokens_of(case), [x.double() for x in by_rank[rank]])

    def of_tokens(self, case: Case, tokens: DeltaTokens, given: Sequence[torch.Tensor]) -> Inputs:
        """The reference of these tokens; ``given`` in fp64."""
        qkv, z, a, b, A_log, dt_bias, conv, norm, *kept = given
        sizes, out, (inputs, rates, state) = DeltaSizes(*case.sizes[:4]), torch.zeros_like(z), (x.clone() for x in kept)
        for row, new, before, pending, slot in tokens.spans():
            rows = slice(row, row + new)
            for token in range(new):
                at = (before + token) % inputs.shape[1]
                inputs[slot, at], rates[slot, at] = qkv[row + token], torch.cat((a[row + token], b[row + token]))
            first, count = before - pending, pending + new
            places = [at % inputs.shape[1] for at in range(first, first + count)]
            mixed = convolved(inputs[slot, places], conv, rows_before(inputs[slot], first, conv.shape[1] - 1))
            mixed = mixed.to(case.dtype).double()
            both = rates[slot, places].split(sizes.value_heads, dim=1)
            whole = Recurrence.of(mixed, Gates(*both, A_log, dt_bias), sizes)
            outs, states = whole.run(state[slot] if before else torch.zeros_like(state[slot]))
            normed = case.exact_norm(outs[pending:].to(case.dtype), norm)
            gate = z[rows].view(new, sizes.value_heads, sizes.V)
            out[rows], state[slot] = (normed * gate * gate.sigmoid()).flatten(1), states[pending]
        return out, inputs, rates, state

    def accuracy(self, case: Case) -> Accuracy:
        # A convolution near the middle of two values of 16 bits may be rounded to the other one, and a result before its norm.
        return Accuracy(terms=16 * case.sizes[2], partials=2, levels=8)

    def call(self, case: Case, team: Team, *tensors: torch.Tensor) -> Inputs:
        qkv, z, a, b, A_log, dt_bias, conv, norm, *kept = tensors
        kept = DeltaSlots(*(x.clone(memory_format=torch.contiguous_format) for x in kept))
        tokens = tokens_of(case).to(qkv.device)
        qkv, z = (torch.cat((x, x), dim=1)[:, : x.shape[1]] for x in (qkv, z))  # columns of a wider tensor
        arguments = qkv, z, Gates(a, b, A_log, dt_bias), conv, (norm, case.eps)
        again = DeltaSlots(*(x.clone() for x in kept))
        out = gated_delta_net_step(*arguments, kept, tokens)
        if format := format_of(case, out):
            new = tokens.lengths > 0
            rows = gated_delta_net_step(*arguments, again, tokens, fp8=format)
            part = Fp8(rows.data[new], rows.scales[new] if rows.scales.numel() > 1 else rows.scales)
            out[new] = agreed(out[new], part, format)
        out = torch.where((tokens.lengths > 0)[:, None], out, 0)
        return out, kept.inputs, kept.rates, kept.state.to(case.dtype)

    def cases(self) -> Iterator[Case]:
        for dtype in (FP32, BF16, FP16):
            for sizes, ring, lengths in (
                ((1, 2, 16, 16, 4, 1), 4, ((0, 0), (7, 0), (-1, 0), (1, 0))),
                ((2, 2, 32, 128, 4, 3), 9, ((5, 2), (0, 0), (14, 3))),
                ((1, 3, 128, 64, 2, 2), 5, ((9, 1),)),
                ((2, 4, 64, 16, 3, 5), 11, ((1, 0), (-1, 0), (4, 4))),
            ):
                yield self.case_of(sizes, dtype, 1, ring=ring, lengths=lengths)
        for kind in ("group", "token", "static"):
            lengths = (5, 2), (0, 0), (14, 3)
            yield self.case_of((2, 4, 32, 128, 4, 3), BF16, 1, ring=9, lengths=lengths, fp8_rows=kind)
        yield self.case_of((1, 8, 16, 16, 4, 1), BF16, 1, ring=4, lengths=((7, 0), (1, 0)), fp8_rows="group")

    def large_cases(self) -> Iterator[Case]:
        sequences = tuple((7 * at, at % 4 if at else 0) for at in range(33))
        for dtype in (BF16, FP32):
            for queries, ring in ((1, 7), (4, 10)):
                yield self.case_of((8, 24, 128, 128, 4, queries), dtype, 1, ring=ring, lengths=sequences)

    def examine(self, given: Mapping[str, Any]) -> None:
        """ValueError for more pending tokens than there may be."""
        if (pending := given["pending"]) is None or given["lengths"].numel() == 0:
            return
        before = given["lengths"].view(len(pending), -1)[:, 0] - 1
        most = torch.where(before > 0, before.clamp(max=given["most_pending"]), pending)
        if ((pending < 0) | (pending > most)).any():
            raise ValueError(
                f"gated_delta_net_step: tokens.pending={quoted(pending.tolist())} are not in 0 .. "
                f"most_pending={given['most_pending']}, or more than the tokens before"
            )

    def forward(self, given: StepArguments) -> torch.Tensor:
        return self.run(given)

    def run(
        self, given: StepArguments, format: RowFormat | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``gated_delta_net_step`` of checked arguments; in a ``format`` of fp8 its rows and scales."""
        qkv, z, gates, conv, norm, eps, kept, tokens = given
        sizes = sizes_of(qkv, kept.state)
        if format is not None and not writes_heads(format, sizes.V, len(tokens.slots)):
            return quantized_parts(self.run(given), format, capabilities_of(qkv.device))
        if format is None:
            results, fp8 = (self.fake(given),), None
        else:
            results = empty_rows(z, *z.shape, format)
            fp8 = rows_argument(results[1], format, z.dtype, COLUMNS.value)
        out = results[0]
        if out.numel() > 0:
            taps, ring, queries = conv.shape[1], kept.inputs.shape[1], tokens.queries
            most = queries + (0 if tokens.pending is None else tokens.most_pending)
            constants = {"SIZES": sizes, "TAPS": taps, "RING": ring, "QUERIES": queries}
            constants |= {"SOME": next_power_of_2(queries), "MOST": next_power_of_2(most)}
            rows = qkv, qkv.stride(0), z, z.stride(0), *kernel_gates(gates), conv.contiguous(), norm.contiguous()
            places = tokens.mapped(torch.Tensor.contiguous)
            options = step_options(sizes, capabilities_of(qkv.device))
            grid, shape = (sizes.value_heads, len(tokens.slots)), (constants["MOST"], 2 * sizes.K + sizes.V)
            mixed = qkv.new_empty((len(tokens.slots), sizes.value_heads, *shape))
            arguments = *rows, kept, places, mixed, out, sizes.K**-0.5, eps, fp8
            gated_delta_net_step_kernel[grid](*arguments, **constants, **options)
        return out if format is None else results

    def fake(self, given):
        return given.z.new_empty(given.z.shape)


def writes_heads(format: RowFormat, V: int, sequences: int) -> bool:
    """True if the kernel writes rows in fp8: a program sees all that shares a scale, and programs are few."""
    of_head = format.kind == "static" or (format.kind == "group" and COLUMNS.value == V)
    return of_head and sequences <= MOST_IN_FP8


class GatedDeltaNetStepFp8(Op):
    """GatedDeltaNetStep with rows in fp8: a torch op by itself, since it has two results."""

    name = alias = "gated_delta_net_step_fp8"
    mutates = GatedDeltaNetStep.mutates

    def forward(self, given: StepArguments, format: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
        check_e4m3("gated_delta_net_step", capabilities_of(given.qkv.device))
        return GATED_DELTA_NET_STEP.run(given, format)

    def fake(self, given, format):
        return empty_rows(given.z, *given.z.shape, format)


def step_options(sizes: DeltaSizes, caps: Capabilities) -> dict[str, Any]:
    """Options of a launch: of a state of 128 x 128 a thread holds 64 elements, and two programs fit an SM.

    So one loads while another one computes or stores, at the price of some 20 registers that spill before the first token.
    """
    large = sizes.K * sizes.V >= 8192
    limit = {"maxnreg": 128} if large and caps.arch.startswith("sm_") else {}
    return {"num_warps": 8 if large else 4, **limit, **launch_options(caps)}


def tokens_of(case: Case) -> DeltaTokens:
    """Tokens of a case; slots in falling order.

    Field ``lengths``: (tokens before, pending ones) of each sequence; -1: padding. The last of more than two new tokens is
    padding.
    """
    sequences, queries = case.field("lengths"), case.sizes[-1]
    lengths = [
        0 if before < 0 or (queries > 2 and query == queries - 1) else before + query + 1
        for before, _ in sequences for query in range(queries)
    ]  # fmt: skip
    pending = [one for _, one in sequences]
    slots = range(len(sequences), 0, -1)
    lengths, slots, pending = (torch.tensor(x, dtype=torch.int32) for x in (lengths, slots, pending))
    return DeltaTokens(lengths, slots, *((pending, int(pending.max())) if pending.any() else ()))


GATED_DELTA_NET_STEP = register(GatedDeltaNetStep())
_FP8 = define(GatedDeltaNetStepFp8())
