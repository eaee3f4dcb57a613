"""top_p_mass: probability mass above each of 16 thresholds, a step towards top-p's least logit.

mass[b, n] = int(2**40 * exp((logits[b, n] - best[b]) / temperature[b]))          integers, so sums are the same in any order
above[c, i, b] = sum of mass[b, n] over chunk c's n with key(logits[b, n]) >= low[b] + i * 2**shift,        i = 0 .. 15

key is the logit as an int32 that compares as the fp32 does. `narrow` raises `low` to the greatest of the 16 thresholds above
which all chunks and ranks together still have the wanted mass. After shift = 28, 24, .. 0 it is exactly the least key to keep.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.arguments import quoted
from weft.kernels.operands import rows_contiguous
from weft.ops.custom_op import custom_op
from weft.ops.local import capabilities_of, check_like, check_shape
from weft.ops.registration import FLOATS
from weft.ops.vocab.sample_argmax import chunks_of, ordered
from weft.runtime.capabilities import launch_options

BLOCK = 256
THRESHOLDS = 16
LOWEST = -(1 << 31)
SHIFTS = tuple(range(28, -1, -4))


@triton.jit(do_not_specialize=["N", "chunk", "shift"])
def top_p_mass_kernel(
    logits, stride, best, temperature, low, above, N, chunk, shift, THRESHOLDS: tl.constexpr, BLOCK: tl.constexpr
):
    """above[c, i, b] as in the module's formula, of logits c * chunk .. of row b.        grid: (B, chunks)"""
    row = tl.program_id(0)
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, N)
    wl.follow_previous_kernel()
    source = logits + row.to(tl.int64) * stride
    greatest, heat = tl.load(best + row), tl.maximum(tl.load(temperature + row), 1e-20)
    least = tl.load(low + row).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    index = tl.arange(0, THRESHOLDS)
    sums = tl.zeros([THRESHOLDS], tl.int64)
    for at in range(begin, end, BLOCK):
        here = at + columns
        logit = tl.load(source + here, mask=here < end, other=float("-inf")).to(tl.float32)
        mass = (tl.exp((logit - greatest) / heat) * 1099511627776.0).to(tl.int64)
        step = (ordered(logit).to(tl.int64) - least) >> shift
        sums += tl.sum(tl.where(step[:, None] >= index[None, :], mass[:, None], 0), axis=0)
    tl.store(above + (tl.program_id(1) * THRESHOLDS + index) * tl.num_programs(0) + row, sums)


@triton.jit(do_not_specialize=["chunks", "shift"])
def narrow_kernel(above, top_p, low, wanted, chunks, shift, FIRST: tl.constexpr, THRESHOLDS: tl.constexpr):
    """low[b] += 2**shift * the greatest i whose sum over chunks of above[c, i, b] >= wanted[b].

    grid: (B,)
    FIRST: wanted[b] = ceil(top_p[b] * all mass), at least 1. Where top_p is 1, low stays: all tokens are kept.
    """
    row, batch = tl.program_id(0), tl.num_programs(0)
    index = tl.arange(0, THRESHOLDS)
    wl.follow_previous_kernel()
    sums = tl.zeros([THRESHOLDS], tl.int64)
    for chunk in range(0, chunks):
        sums += tl.load(above + (chunk * THRESHOLDS + index) * batch + row)
    share = tl.load(top_p + row)
    if FIRST:
        total = tl.max(sums, axis=0)
        enough = tl.maximum(tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        tl.store(wanted + row, enough)
    else:
        enough = tl.load(wanted + row)
    step = tl.max(tl.where((sums >= enough) & (share < 1), index, 0), axis=0)
    before = tl.load(low + row)
    tl.debug_barrier()
    tl.store(low + row, (before.to(tl.int64) + (step.to(tl.int64) << shift)).to(tl.int32))


def top_p_mass(
    logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor, low: torch.Tensor, shift: int
) -> torch.Tensor:
    """`above` [chunks, 16, B] int64 of this rank's logits [B, N].

    logits             fp16, bf16 or fp32; -inf: never. Rows may be strided
    best, temperature  [B] fp32: the row's greatest logit over all ranks; temperature 0 counts as 1e-20
    low                [B] int32, LOWEST at first
    shift              one of SHIFTS, in this order

    No backward. ValueError for shapes, dtypes or devices that do not fit.
    """
    check_like("top_p_mass", "logits", logits, None, FLOATS)
    check_shape("top_p_mass", "logits", logits, ("B", "N"))
    for name, x, dtype in (
        ("best", best, torch.float32),
        ("temperature", temperature, torch.float32),
        ("low", low, torch.int32),
    ):
        check_like("top_p_mass", name, x, logits.device, (dtype,))
        check_shape("top_p_mass", name, x, (logits.shape[0],))
    if shift not in SHIFTS:
        raise ValueError(f"top_p_mass: shift={quoted(shift)} is not one of {', '.join(map(str, SHIFTS))}")
    return torch.ops.weft.top_p_mass.default(logits, best, temperature, low, shift)


def narrow(above: torch.Tensor, top_p: torch.Tensor, low: torch.Tensor, wanted: torch.Tensor, shift: int) -> None:
    """Raise `low` [B] int32 in place, by `above` [.., 16, B] of all chunks and ranks.

    wanted  [B] int64, set by the first shift for those that follow
    """
    torch.ops.weft.narrow.default(above, top_p, low, wanted, shift)


@custom_op("top_p_mass", backward=False)
def _top_p_mass(
    logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor, low: torch.Tensor, shift: int
) -> torch.Tensor:
    logits, (batch, vocab) = rows_contiguous(logits), logits.shape
    caps = capabilities_of(logits.device)
    chunks, chunk = chunks_of(max(1, batch), max(1, vocab), caps.sms)
    above = torch.empty((chunks, THRESHOLDS, batch), dtype=torch.int64, device=logits.device)
    if batch > 0:
        top_p_mass_kernel[(batch, chunks)](
            logits,
            logits.stride(0),
            best.contiguous(),
            temperature.contiguous(),
            low,
            above,
            vocab,
            chunk,
            shift,
            THRESHOLDS=THRESHOLDS,
            BLOCK=BLOCK,
            **launch_options(caps),
        )
    return above


@_top_p_mass.register_fake
def _(logits, best, temperature, low, shift):
    batch, vocab = logits.shape
    chunks, _ = chunks_of(max(1, batch), max(1, vocab), capabilities_of(logits.device).sms)
    return logits.new_empty((chunks, THRESHOLDS, batch), dtype=torch.int64)


@custom_op("narrow", mutates_args=("low", "wanted"), backward=False)
def _narrow(above: torch.Tensor, top_p: torch.Tensor, low: torch.Tensor, wanted: torch.Tensor, shift: int) -> None:
    batch = low.shape[0]
    if batch > 0:
        above, options = above.contiguous(), launch_options(capabilities_of(low.device))
        arguments = above, top_p.contiguous(), low, wanted, above.numel() // (THRESHOLDS * batch), shift
        narrow_kernel[(batch,)](*arguments, FIRST=shift == SHIFTS[0], THRESHOLDS=THRESHOLDS, num_warps=1, **options)


@_narrow.register_fake
def _(above, top_p, low, wanted, shift):
    return None
