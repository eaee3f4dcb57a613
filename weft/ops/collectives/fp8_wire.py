"""All-reduces whose rows travel in fp8, e4m3 with a scale for 128 columns: half of the bytes.

    out = round(sum over s of r(x_s))         one_shot     r: put in fp8 and read back (weft.kernels.fp8_words)
    out = round(r(sum over s of r(x_s)))      two_shot     sums in fp32 from rank 0 on; round: to x's dtype

A rank reads back what it sends, and all ranks add in the same order: the same bits on all ranks and from run to run. A group is
128 columns of a row (the last dimension), the last one ragged, so a row's result depends on no other row.
On one rank nothing travels and nothing is rounded.

Error of an element, by e(x) of weft.kernels.fp8_words, at most L / 28 + 2**-22 L for the largest magnitude L of the group:

    one_shot   E = sum over s of e(x_s) + (W - 1) * 2**-24 * sum over s of |r(x_s)|
    two_shot   E + e(the sum), where the sum's L is at most the sum of the ranks' (1 + 1/28)
    and half a unit in the last place of x's dtype

so one_shot errs by at most the sum of the ranks' largest over 28 (3.6 %), two_shot by 2.04 times that.

two_shot sends the sums in fp8 too. In 16 bits they would leave 3/4 of bf16's bytes in place of 1/2, and would not lessen the
first term, of W roundings; the second rounding is one more, of a number as large as its summands. Two ranks send as much in
one hop as in two, so their all-reduce takes one_shot.

NaN and infinities become NaN, as e4m3 has no infinity; a sum beyond x's dtype is infinite, in two shots a sum beyond fp32 is
NaN. -0.0 may come out as +0.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from weft.costs.pushes import FP8_SHARE
from weft.kernels.fp8 import COLUMNS, by_torch, check_e4m3, read_back, scales_of
from weft.ops.case import Accuracy, Case
from weft.ops.collectives.collective import CollectiveCall, NormCall, OneShot, TwoShot
from weft.ops.collectives.fp8_kernels import fp8_all_reduce_kernel
from weft.ops.registration import HALVES
from weft.plan.memo import once
from weft.plan.planned import AUTO, Machine
from weft.runtime.arithmetic import cdiv
from weft.transport.push import launch

if TYPE_CHECKING:
    from weft.ops.gemm.gemm_op import GemmCall
    from weft.runtime.team.team import Team

WIRES = ("same", "fp8", "auto")
DESIGNS = (AUTO, "one_shot", "two_shot")
# Elements up to which rows of whole groups are one row: the kernel counts a row's columns in 32 bits.
MOST_COLUMNS = 2**31 - 2**20
Call = TypeVar("Call", "CollectiveCall", "NormCall", "GemmCall")


class Timed(Protocol):
    """An op whose designs are judged by predicted times."""

    name: str

    def times(self, call: Call, machine: Machine) -> dict[str, float]:
        """Predicted µs by design."""


def asked(op: Timed, wire: str, call: Call, machine: Machine) -> Call:
    """``call`` of ``op`` with the rows' format: "auto" takes fp8 where that is predicted to be faster.

    ValueError for "fp8" on ranks whose GPUs have no e4m3.
    """
    if wire == "same":
        return call
    in_fp8 = call._replace(fp8_wire=True)
    if wire == "fp8":
        if machine.world_size > 1:
            check_e4m3(op.name, machine.caps)
        return in_fp8
    return once(("wire", op.name, call, machine), lambda: in_fp8 if _pays(op, call, in_fp8, machine) else call)


def _pays(op: Timed, call: Call, in_fp8: Call, machine: Machine) -> bool:
    if machine.world_size == 1 or call.design != AUTO or getattr(call, "invariant", False):
        return False
    try:
        check_machine(op.name, call.dtype, machine)
        check_e4m3(op.name, machine.caps)
    except ValueError:
        return False
    return min(op.times(in_fp8, machine).values()) < min(op.times(call, machine).values())


def check_call(op: str, call: CollectiveCall | NormCall, machine: Machine) -> None:
    """ValueError unless rows of ``call`` can travel in fp8 on ``machine``."""
    check_machine(op, call.dtype, machine)
    if call.invariant:
        raise ValueError(f"{op}: wire='fp8' with invariant=True, whose sums are rounded to x's dtype; leave out one")
    if call.design not in DESIGNS:
        raise ValueError(
            f"{op}: algorithm={call.design!r} sends rows in x's dtype; with wire='fp8' pass one of {DESIGNS}"
        )


def check_machine(op: str, dtype: torch.dtype, machine: Machine) -> None:
    """ValueError unless rows of ``dtype`` can travel in fp8 on ``machine``."""
    if dtype not in HALVES:
        raise ValueError(
            f"{op}: wire='fp8' rounds rows of 16 bits, not of {str(dtype).removeprefix('torch.')}; leave wire out"
        )
    if machine.nodes > 1:
        raise ValueError(f"{op}: wire='fp8' is for one node, and the team has {machine.nodes}; leave wire out")


def all_reduce(design: OneShot | TwoShot, team: Team, x: torch.Tensor, out: torch.Tensor) -> None:
    """Compute out = the all-reduce of ``x``, contiguous and not empty, in fp8."""
    check_e4m3("all_reduce", team.caps)
    n, width, plan = x.numel(), x.shape[-1] if x.dim() else 1, design.push
    groups = n // width * scales_of(width)
    if width % COLUMNS.value == 0 and n <= MOST_COLUMNS:
        width = n  # rows of whole groups lie side by side, and one row needs no division
    two_shot = isinstance(design, TwoShot)
    tiles = cdiv(groups, plan.row_bytes // COLUMNS.value * (team.size if two_shot else 1))
    launch(fp8_all_reduce_kernel, x, out, n, tiles, team, plan, width, TWO_SHOT=two_shot)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """``x`` put in fp8 and read back, fp32, by torch."""
    return read_back(*by_torch(x.reshape(-1, x.shape[-1] if x.dim() else 1)), torch.float32).view(x.shape)


def sum_by_torch(parts: Sequence[torch.Tensor], two_shot: bool) -> torch.Tensor:
    """Sum of all ranks' rows with the kernel's roundings, fp32."""
    total = rounded(parts[0])
    for part in parts[1:]:
        total = total + rounded(part)
    return rounded(total) if two_shot else total


def reference(case: Case, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of all ranks' rows, with the roundings of the case's design where it says one; fp64."""
    total = parts[0].double()
    if case.world_size == 1 or case.design == AUTO:
        for part in parts[1:]:
            total = total + part
        return total
    return sum_by_torch(parts, case.design == "two_shot" or isinstance(case.design, TwoShot)).double()


def accuracy(case: Case, terms: int) -> Accuracy:
    """Accuracy of a case with rows in fp8.

    Where "auto" chooses the design the reference is the exact sum.
    """
    exact = Accuracy(terms=terms, replicated=True)
    return exact if case.design != AUTO else loosened(exact, case)


def sent(nbytes: int, case: Case) -> int:
    """Bytes that a case sends, of ``nbytes`` in 16 bits."""
    return int(nbytes * FP8_SHARE) if case.field("fp8_wire") else nbytes


def loosened(exact: Accuracy, case: Case) -> Accuracy:
    """Accuracy of sums in fp8 against exact sums.

    The bound of two roundings of normal draws, whose largest are some five times their RMS, is 0.8 of the result's.
    """
    if case.world_size == 1:
        return exact
    return replace(exact, partials=case.world_size, levels=math.ceil(0.8 / torch.finfo(case.dtype).eps))
