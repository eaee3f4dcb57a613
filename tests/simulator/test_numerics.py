"""numerics.py against torch and exact rationals, over every bit pattern of the 16-bit types."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from weft.simulator import numerics

TORCH = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2,
    "int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8,
}  # fmt: skip
FLOATS = ["fp16", "bf16", "fp32", "fp64"]
INTS = ["int8", "int16", "int32", "int64", "uint8"]
FINITE_MAX = {"fp8e4nv": 448.0, "fp8e5": 57344.0}


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def to_torch(x: np.ndarray, name: str) -> torch.Tensor:
    signed = np.dtype(f"int{8 * x.dtype.itemsize}")
    return torch.from_numpy(np.ascontiguousarray(x).view(signed)).view(TORCH[name])


def bits(x: np.ndarray | torch.Tensor) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        x = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]).numpy()
    return x.view(numerics.BITS[x.dtype.itemsize])


def assert_same(got: np.ndarray, want: torch.Tensor) -> None:
    """Equal bits; any NaN equals any NaN."""
    nan = np.isnan(got.astype(np.float64))
    np.testing.assert_array_equal(nan, torch.isnan(want.double()).numpy())
    np.testing.assert_array_equal(bits(got)[~nan], bits(want)[~nan])


def samples(name: str) -> np.ndarray:
    dtype = numerics.DTYPES[name]
    if dtype.itemsize <= 2:
        return np.arange(2 ** (8 * dtype.itemsize)).astype(numerics.BITS[dtype.itemsize]).view(dtype)
    rng = np.random.default_rng(0)
    random = rng.integers(0, 2**63, 20_000, dtype=np.uint64) * np.uint64(2) + rng.integers(
        0, 2, 20_000, dtype=np.uint64
    )
    if dtype.kind in "iu":
        small = np.arange(-600, 600)
        return np.concatenate([random.view(np.int64), small, random.view(np.int64) >> 40]).astype(dtype)
    everywhere = (random >> np.uint64(64 - 8 * dtype.itemsize)).astype(numerics.BITS[dtype.itemsize]).view(dtype)
    special = [
        0.0, -0.0, np.inf, -np.inf, np.nan, 448, 464, 465, 480, 57344, 61440, 65504, 65519, 65520, 2.0**-149, 2**-24,
    ]  # fmt: skip
    ties = np.arange(1, 2000) * np.float64(2**-9) + 1
    near = rng.normal(size=20_000) * 10.0 ** rng.integers(-6, 6, 20_000)
    return np.concatenate(
        [everywhere, np.array(special + [-s for s in special], dtype), ties.astype(dtype), near.astype(dtype)]
    )


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("source", ["fp16", "bf16", "fp32", "fp8e4nv", "fp8e5", *INTS])
def test_casts_to_floats_round_as_torch_does(source, to):
    x = samples(source)
    if source in ("int32", "int64") and to in ("fp16", "bf16"):
        x = x[np.abs(x.astype(np.float64)) < 2**24]  # torch goes through fp32 and rounds twice
    assert_same(numerics.convert(x, numerics.DTYPES[to]), to_torch(x, source).to(TORCH[to]))


@pytest.mark.parametrize("to", ["fp8e4nv", "fp8e5"])
@pytest.mark.parametrize("source", ["fp16", "bf16", "fp32"])
def test_casts_to_fp8_saturate(source, to):
    x = samples(source)
    limit = FINITE_MAX[to]
    assert_same(
        numerics.convert(x, numerics.DTYPES[to]), to_torch(x, source).float().clamp(-limit, limit).to(TORCH[to])
    )


@pytest.mark.parametrize("to", INTS)
@pytest.mark.parametrize("source", FLOATS)
def test_floats_become_integers_by_truncation(source, to):
    x = samples(source)
    info = np.iinfo(numerics.DTYPES[to])
    wide = x.astype(np.float64)
    x = x[(wide > float(info.min) - 1) & (wide < float(info.max))]
    assert_same(numerics.convert(x, numerics.DTYPES[to]), to_torch(x, source).to(TORCH[to]))


@pytest.mark.parametrize(
    ("source", "to", "values"),
    [
        # results of cvt.rzi for NaN, inf, -inf, 3e9 and -3e9
        ("fp32", "int32", [0, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31)]),
        ("fp32", "uint32", [0, 2**32 - 1, 0, 3_000_000_000, 0]),
        ("fp32", "uint8", [0, 255, 0, 255, 0]),  # clamped to 16 bits, then cut
        ("fp32", "int8", [0, -1, 0, -1, 0]),
        ("fp32", "int64", [-(2**63), 2**63 - 1, -(2**63), 3_000_000_000, -3_000_000_000]),
        ("fp64", "int32", [-(2**31), 2**31 - 1, -(2**31), 2**31 - 1, -(2**31)]),
        ("fp64", "uint64", [2**63, 2**64 - 1, 0, 3_000_000_000, 0]),
    ],
)
def test_floats_beyond_the_range_of_an_integer_clamp(source, to, values):
    x = np.array([np.nan, np.inf, -np.inf, 3e9, -3e9], numerics.DTYPES[source])
    assert numerics.convert(x, numerics.DTYPES[to]).tolist() == values


@pytest.mark.parametrize("source", INTS)
@pytest.mark.parametrize("to", INTS)
def test_integers_wrap_around(source, to):
    x = samples(source)
    assert_same(numerics.convert(x, numerics.DTYPES[to]), to_torch(x, source).to(TORCH[to]))


def nearest(value: Fraction, dtype: np.dtype, candidate: np.ndarray) -> bool:
    """True if no neighbour of ``candidate`` is nearer to ``value`` and a tie went to the even one."""
    unsigned = numerics.BITS[dtype.itemsize]
    code = int(candidate.view(unsigned))
    mine = abs(Fraction(float(candidate)) - value)
    for other in (code - 1, code + 1):
        neighbour = np.array([other], unsigned).view(dtype)[0].astype(np.float64)
        if np.isfinite(neighbour):
            gap = abs(Fraction(float(neighbour)) - value)
            if gap < mine or (gap == mine and code % 2 == 1):
                return False
    return True


@pytest.mark.parametrize("to", ["bf16", "fp16", "fp32"])
def test_wide_values_are_rounded_once(to):
    rng = np.random.default_rng(1)
    dtype = numerics.DTYPES[to]
    base = (
        np.abs(rng.normal(size=200)).astype(ml_dtypes.bfloat16 if to != "fp32" else np.float32).astype(np.float64) + 0.5
    )
    halves = base + 2.0 ** (np.floor(np.log2(base)) - ml_dtypes.finfo(dtype).nmant - 1)
    for x in np.concatenate([halves, halves * (1 + 2**-50), halves * (1 - 2**-50)]):
        assert nearest(Fraction(float(x)), dtype, numerics.convert(np.array([x]), dtype)[0]), x
    integers = [2**k + (1 << (k - ml_dtypes.finfo(dtype).nmant - 1)) + d for k in range(27, 62) for d in (-1, 0, 1)]
    if to != "fp16":
        for n in integers:
            assert nearest(Fraction(n), dtype, numerics.convert(np.array([n], np.int64), dtype)[0]), n
            assert nearest(Fraction(-n), dtype, numerics.convert(np.array([-n], np.int64), dtype)[0]), n


@pytest.mark.parametrize("to", ["fp16", "bf16", "fp8e4nv", "fp8e5"])
def test_rounding_toward_zero_never_grows(to):
    x = samples("fp32")
    x = x[np.isfinite(x)]
    near, cut = (numerics.convert(x, numerics.DTYPES[to], toward_zero=z).astype(np.float64) for z in (False, True))
    assert (np.abs(cut) <= np.abs(x)).all()
    exact = (near == x) | (cut == near)
    assert (np.abs(near[~exact]) > np.abs(x[~exact])).all()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("op", ["add", "subtract", "multiply"])
def test_16_bit_arithmetic_rounds_once(name, op):
    x = samples(name)
    y = np.random.default_rng(2).permutation(x)
    want = getattr(torch, op)(to_torch(x, name).float(), to_torch(y, name).float()).to(TORCH[name])
    assert_same(getattr(np, op)(x, y), want)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint32])
def test_integer_division_is_that_of_c(dtype):
    rng = np.random.default_rng(3)
    info = np.iinfo(dtype)
    a = rng.integers(info.min, info.max, 2000, dtype=dtype)
    b = np.where(
        a % 3 == 0, rng.integers(1, 9, 2000).astype(dtype), rng.integers(info.min, info.max, 2000, dtype=dtype)
    )
    b = np.where(b == 0, dtype(1), b)
    for x, y, q, r in zip(
        *(v.tolist() for v in (a, b, numerics.divide_int(a, b), numerics.remainder_int(a, b))), strict=True
    ):
        want = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        assert (q, r) == (want if want <= info.max else info.min, x - want * y)


@pytest.mark.parametrize("other", [6, -7])
def test_division_by_zero_gives_zero_whatever_is_beside_it(other):
    with np.errstate(divide="ignore"):
        found = numerics.divide_int(np.array([-5, 5, 0, other], np.int32), np.array([0, 0, 0, 2], np.int32))
    assert found.tolist() == [0, 0, 0, int(other / 2)]


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_upper_half_of_a_product(dtype):
    rng = np.random.default_rng(4)
    width = 8 * np.dtype(dtype).itemsize
    a, b = (rng.integers(0, 2**63, 500, dtype=np.uint64).astype(dtype) for _ in range(2))
    want = [((int(x) % 2**width) * (int(y) % 2**width)) >> width for x, y in zip(a, b, strict=True)]
    assert [int(x) % 2**width for x in numerics.multiply_high(a, b)] == want


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_fma_rounds_once(dtype):
    rng = np.random.default_rng(5)
    a, b = (rng.normal(size=500).astype(dtype) for _ in range(2))
    c = (-(a * b) * dtype(1 + 2**-9) + rng.normal(size=500) * 1e-3).astype(dtype)
    for x, y, z, got in zip(a, b, c, numerics.fma(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert nearest(exact, np.dtype(dtype), got)


@pytest.mark.parametrize("name", FLOATS)
def test_extremes_tell_the_zeros_apart_and_pass_over_nan(name):
    dtype = numerics.DTYPES[name]
    a, b = (np.array(v).astype(dtype) for v in ([0.0, -0.0, 1, np.nan, -0.0], [-0.0, 0.0, np.nan, np.nan, -0.0]))
    low, high = numerics.minimum(a, b), numerics.maximum(a, b)
    assert np.signbit(low.astype(float))[[0, 1, 4]].all() and not np.signbit(high.astype(float))[:2].any()
    assert np.signbit(high.astype(float))[4]
    assert float(low[2]) == float(high[2]) == 1 and np.isnan(float(low[3])) and np.isnan(float(high[3]))
    assert np.isnan(float(numerics.maximum(a, b, True)[2]))
    assert np.signbit(float(numerics.reduce_extreme(a[:2], 0, False)[0]))
    assert not np.signbit(float(numerics.reduce_extreme(a[:2], 0, True)[0]))


def test_sums_of_bf16_are_taken_in_fp32():
    x = np.full((4, 512), 1.0 + 2**-7).astype(numerics.BF16)
    assert numerics.reduce_sum(x, 1).astype(float).ravel().tolist() == [516.0] * 4


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8e4nv", "fp8e5", "fp32"])
def test_dot_multiplies_exactly_and_sums_in_fp32(name):
    rng = np.random.default_rng(6)
    a, b = (
        numerics.convert(rng.integers(-8, 9, shape).astype(np.float32), numerics.DTYPES[name])
        for shape in ((16, 32), (32, 8))
    )
    got = numerics.dot(a, b, np.full((16, 8), 0.5, np.float32))
    np.testing.assert_array_equal(got, a.astype(np.float64) @ b.astype(np.float64) + 0.5)


def test_dot_of_int8_is_exact():
    rng = np.random.default_rng(7)
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((16, 64), (64, 16)))
    got = numerics.dot(a, b, np.ones((16, 16), np.int32))
    np.testing.assert_array_equal(got, a.astype(np.int64) @ b.astype(np.int64) + 1)


def test_histogram_counts_only_its_bins():
    x = np.array([0, 1, 1, 5, -1, 3], np.int32)
    assert numerics.histogram(x, 4, None).tolist() == [1, 2, 0, 1]
    assert numerics.histogram(x, 4, np.array([1, 1, 0, 1, 1, 1], bool)).tolist() == [1, 1, 0, 1]
