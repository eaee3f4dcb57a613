"""How far a result may be from its reference: one function of dtype and reduction length."""

from __future__ import annotations

import math

import torch

FP32_EPS = torch.finfo(torch.float32).eps


def tolerance(dtype: torch.dtype, length: int, *, partials: int = 0) -> tuple[float, float]:
    """(relative to the element, relative to the reference's RMS) for a sum of ``length`` terms in fp32 rounded to
    ``dtype``.

    Half a unit in the last place of the rounding, doubled; the fp32 sum's error grows like a random walk, six of its
    standard deviations are allowed. ``partials``: so many partial sums were rounded to ``dtype`` on the way, each as
    large as the whole over the root of their number.
    """
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    return eps, 6 * FP32_EPS * math.sqrt(max(length, 1)) + (3 * eps if partials else 0.0)


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, length: int, *, partials: int = 0, what: str = "result"
) -> None:
    """``actual`` is the sum that ``expected`` holds in fp32 or wider, rounded. NaN and infinities must stand where
    they do there.

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
    finite = expected[~special]
    rms = finite.square().mean().sqrt().item() if finite.numel() else 0.0
    relative, absolute = tolerance(dtype, length, partials=partials)
    # The smallest step of the type, where rounding is no longer relative.
    bound = relative * expected.abs() + absolute * rms + torch.finfo(dtype).smallest_normal * relative
    bad = torch.where(special, ~same, ~(error <= bound))
    if bad.any():
        raise AssertionError(f"{what}: {describe(actual, expected, error, bad)} of {dtype}, sum of {length}")


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
