"""Cases of ops run and judged: by the op's own reference, inputs and accuracy, and the one tolerance (weft.ops.case)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from weft.errors import InvalidAccess
from weft.ops.case import Case, Draw, Inputs, error_bound, lay_out
from weft.ops.op import Op, find_op

Results = list[tuple[Case, int, Any]]


def inputs_of(case: Case, rank: int, call: int = 0, device: torch.device | str = "cpu") -> Inputs:
    """A rank's inputs of a case: the same in every process, other data at every rank and call."""
    return tuple(lay_out(x, case.layout) for x in find_op(case.op).inputs(case, rank, Draw(case, rank, call, device)))


def everyone_of(case: Case, call: int = 0, device: torch.device | str = "cpu") -> list[Inputs]:
    """All ranks' inputs of a case."""
    return [inputs_of(case, rank, call, device) for rank in range(case.world_size)]


def call_op(case: Case, team: Any, inputs: Inputs) -> Any:
    return find_op(case.op).call(case, team, *inputs)


def check(case: Case, rank: int, everyone: Sequence[Inputs], result: Any, *, what: str = "") -> None:
    """AssertionError unless ``result`` is what ``rank`` should get of everyone's inputs."""
    op, what = find_op(case.op), f"{case} rank {rank}{what and ' ' + what}"
    accuracy, expected = op.accuracy(case), op.reference(case, rank, everyone)
    several = isinstance(result, (tuple, list))
    for actual, wanted in zip(*((result, expected) if several else ((result,), (expected,))), strict=True):
        assert actual.is_contiguous(), f"{what}: the result is not contiguous"
        if accuracy.exact:
            assert_identical(actual, wanted, what=what)
        else:
            assert actual.dtype == case.dtype, f"{what}: dtype {actual.dtype}"
            assert_close(
                actual, wanted, accuracy.terms, partials=accuracy.partials, levels=accuracy.levels, by_row=accuracy.by_row,
                roundings=accuracy.roundings, what=what,
            )  # fmt: skip


def run_cases(team: Any, cases: Iterable[Case], calls: int = 3) -> Results:
    """Every case ``calls`` times, all on one team and without a host barrier between; then everything is checked."""
    results = []
    for case in cases:
        for call in range(calls):
            results.append((case, call, call_op(case, team, inputs_of(case, team.rank, call))))
    for case, call, result in results:
        check(case, team.rank, everyone_of(case, call), result, what=f"call {call}")
    return results


def a_case_fails(ops: Iterable[Op], field: str) -> bool:
    """True if a case of one rank with this field fails; the rest would only cost time."""
    for op in ops:
        for case in op.cases():
            if case.field(field):
                inputs = inputs_of(case, 0)
                try:
                    check(case, 0, [inputs], op.call(case, None, *inputs))
                except (AssertionError, InvalidAccess):
                    return True
    return False


def check_replicated(by_rank: Sequence[Results]) -> None:
    """Ops that give all ranks the same give them the same bits."""
    for others in by_rank[1:]:
        for (case, call, first), (_, _, other) in zip(by_rank[0], others, strict=True):
            if find_op(case.op).accuracy(case).replicated:
                assert_identical(other, first, what=f"{case} call {call}, another rank")


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    terms: int,
    *,
    partials: int = 0,
    levels: int = 3,
    by_row: bool = False,
    roundings: int = 1,
    what: str = "result",
) -> None:
    """``actual`` is the sum that ``expected`` holds in fp32 or wider, rounded. NaN and infinities must stand where
    they do there. ``by_row``: the tolerance is relative to the RMS of each row, not of the whole. ``levels``, ``roundings``: of
    ``Accuracy``.

    AssertionError with the largest error, the RMS of the errors and the first coordinates that are wrong.
    """
    assert tuple(actual.shape) == tuple(expected.shape), (
        f"{what}: shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    )
    dtype = actual.dtype
    actual, expected = actual.detach().double(), expected.detach().double()
    largest = torch.finfo(dtype).max
    # Beyond the type's range the rounded reference is infinite as well.
    expected = torch.where(expected.abs() > largest, expected.to(dtype).double(), expected)
    special = ~expected.isfinite()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = torch.where(same, 0.0, (actual - expected).abs())
    finite = torch.where(special, torch.nan, expected)
    bound = error_bound(finite, dtype, terms, partials, by_row, roundings=roundings, levels=levels)
    bad = torch.where(special, ~same, ~(error <= bound))
    if bad.any():
        raise AssertionError(f"{what}: {describe(actual, expected, error, bad)} of {dtype}, sum of {terms}")


def assert_identical(actual: torch.Tensor, expected: torch.Tensor, *, what: str = "result") -> None:
    """Every bit the same."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} != {expected.dtype}"
    assert tuple(actual.shape) == tuple(expected.shape), (
        f"{what}: shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    )
    bad = bits(actual) != bits(expected)
    if bad.any():
        a, e = actual.double(), expected.double()
        raise AssertionError(f"{what}: {describe(a, e, (a - e).abs(), bad.view(a.shape))}; every bit should be equal")


def bits(x: torch.Tensor) -> torch.Tensor:
    """``x`` as integers, flat."""
    word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    return x.detach().contiguous().view(-1).view(word)


def describe(actual: torch.Tensor, expected: torch.Tensor, error: torch.Tensor, bad: torch.Tensor) -> str:
    known = error[error.isfinite()]
    largest = known.max().item() if known.numel() else math.nan
    rms = known.square().mean().sqrt().item() if known.numel() else math.nan
    first = [tuple(at) for at in bad.nonzero()[:4].tolist()]
    shown = ", ".join(f"{list(at)}: {actual[at].item():.6g} != {expected[at].item():.6g}" for at in first)
    return f"{int(bad.sum())} of {bad.numel()} wrong, max error {largest:.3g}, RMS error {rms:.3g}, first {shown}"
