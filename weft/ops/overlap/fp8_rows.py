"""Partial results that copy engines carry in fp8: kernels that put rows in words and add them up.

A row of ``words`` has 33 int words for each group of 128 columns: all groups' words (weft.kernels.fp8_words), then their fp32
scales. So any run of rows is one piece of memory, which a copy engine carries at once, scales and all, before the flag.

    out = own + sum over the peers of r(x_s)          r: put in fp8 and read back; own as it is, in 16 bits; rounded to out

A peer's rows err by e(x_s) of weft.kernels.fp8_words, at most 1/28 of the largest of their group, and nothing else does but the
rounding to 16 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fp8 import COLUMNS, scales_of
from weft.kernels.fp8_words import WORDS, group_place, values_of, words_of
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_of

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Groups that a program takes, and its warps: 16 columns a thread.
GROUPS, WARPS = 16, 4


@triton.jit
def word_place(group, width):
    """(offsets of the words [G * 32], of the scales [G]) of ``group`` [G] in rows of words, int64."""
    of_row = tl.cdiv(width, COLUMNS)
    row = (group // of_row).to(tl.int64) * (of_row * (WORDS + 1))
    within = group % of_row
    words = (row + within * WORDS)[:, None] + tl.arange(0, WORDS)[None, :]
    return words.reshape(group.shape[0] * WORDS), row + of_row * WORDS + within


@triton.jit(do_not_specialize=["groups"])
def to_words_kernel(words, x, groups, n, width, GROUPS: tl.constexpr):
    """words = x [n] in fp8, rows of ``width`` columns        grid: (cdiv(groups, GROUPS),)

    signals, waits  none: the copy engine sends after it
    """
    wl.follow_previous_kernel()
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    at, inside = group_place(group, n, width)
    rounded, scales = words_of(tl.load(x + at, mask=inside, other=0.0))
    to, of_scales = word_place(group, width)
    exists = tl.broadcast_to((group < groups)[:, None], (GROUPS, WORDS)).reshape(GROUPS * WORDS)
    tl.store(words + to, rounded, mask=exists)
    tl.store(words + of_scales, scales.to(tl.int32, bitcast=True), mask=group < groups)


@triton.jit(do_not_specialize=["groups"])
def words_sum_kernel(out, own, received, stride, groups, n, width, BUFFERS: tl.constexpr, GROUPS: tl.constexpr):
    """out[n] = own[n] + the sum of received[BUFFERS, stride]        grid: (cdiv(groups, GROUPS),)

    signals, waits  none: wait_kernel comes before it
    order           own + received 0, 1, … , summed in fp32, rounded once: the same every run
    """
    wl.follow_previous_kernel()
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    at, inside = group_place(group, n, width)
    total = tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
    source, of_scales = word_place(group, width)
    exists = tl.broadcast_to((group < groups)[:, None], (GROUPS, WORDS)).reshape(GROUPS * WORDS)
    for buffer in tl.static_range(BUFFERS):
        first = received + tl.cast(buffer, tl.int64) * stride
        words = tl.load(first + source, mask=exists, other=0)
        scales = tl.load(first + of_scales, mask=group < groups, other=0).to(tl.float32, bitcast=True)
        total += values_of(words, scales)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def words_of_row(width: int) -> int:
    """Number of words of a row of ``width`` columns."""
    return scales_of(width) * (WORDS.value + 1)


def put_in_words(x: torch.Tensor, words: torch.Tensor, team: Team) -> None:
    """Write the rows of ``x`` [rows, N] in fp8 to ``words`` [rows, words_of_row(N)]; both contiguous."""
    rows, width = x.shape
    launch = launch_of(team, to_words_kernel, (), lambda: _constants(team))
    groups = rows * scales_of(width)
    launch(cdiv(groups, GROUPS), words, x, groups, rows * width, width)


def add_words_up(own: torch.Tensor, received: torch.Tensor, out: torch.Tensor, team: Team, early: bool = True) -> None:
    """Compute out = own + the sum of ``received`` [W - 1, …], each the words of rows like ``out``.

    early: programs may occupy SMs before the previous kernel in the stream ends.
    """
    buffers, (rows, width) = received.shape[0], out.shape
    launch = launch_of(
        team, words_sum_kernel, (buffers, early), lambda: {"BUFFERS": buffers, **_constants(team, early)}
    )
    groups = rows * scales_of(width)
    launch(cdiv(groups, GROUPS), out, own, received, received.stride(0), groups, rows * width, width)


def _constants(team: Team, early: bool = True) -> dict[str, int | bool]:
    return {"GROUPS": GROUPS, "num_warps": WARPS, **(launch_options(team.caps) if early else {})}
