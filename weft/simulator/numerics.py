"""NVIDIA GPU arithmetic on NumPy arrays: rounding, saturation, signed zeros and NaN of every type.

bf16 and fp8 values are stored in ``ml_dtypes`` arrays. All functions are pure and independent of Triton. Casts, bitcasts, add,
sub, mul, fma, comparisons and integer operations are exact to the last bit. Where the GPU approximates (fp32 division and
square root, exp, log, sin …) results are IEEE-rounded. Dot products are summed in fp32 in NumPy's order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = {
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "fp8e4b8": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "fp8e5b16": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
# NumPy dtype of each of Triton's element types, by Triton's name.
DTYPES = {
    "int1": np.dtype(np.bool_),
    "fp16": np.dtype(np.float16),
    "bf16": BF16,
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    **{f"{kind}{bits}": np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **FP8,
}
BITS = {size: np.dtype(f"uint{8 * size}") for size in (1, 2, 4, 8)}
_FP8 = frozenset(FP8.values())
_NARROW = _FP8 | {BF16, np.dtype(np.float16)}
FLOATS = _NARROW | {np.dtype(np.float32), np.dtype(np.float64)}
_F32, _F64, _BOOL = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.bool_)


# --- casts ------------------------------------------------------------------------------------------------------------


def convert(x: np.ndarray, to: np.dtype, toward_zero: bool = False) -> np.ndarray:
    """``x`` cast to dtype ``to``.

    Floats round to nearest even (or toward zero), fp8 saturates, integers wrap around. Float to integer is ``cvt.rzi``:
    truncated, clamped to 16, 32 or 64 bits, then cut to 8.
    """
    source = x.dtype
    return x if source is to or source == to else _conversion(source, to, toward_zero)(x)


@cache
def _conversion(source: np.dtype, to: np.dtype, toward_zero: bool) -> Callable[[np.ndarray], np.ndarray]:
    if to == _BOOL:
        return lambda x: x != np.zeros((), source)
    if to not in FLOATS:
        return partial(_float_to_int, to=to) if source in FLOATS else lambda x: x.astype(to)
    if source == BF16 or source in _FP8:  # fp32 is exact, NaN's bits too
        after = _conversion(_F32, to, toward_zero) if to != _F32 else lambda x: x
        return lambda x: after(x.astype(_F32))
    if toward_zero and source == _F64 and to == _F32:
        return _f64_to_f32_toward_zero
    if to in (_F32, _F64) or (to == np.float16 and source == _F64 and not toward_zero):
        return lambda x: x.astype(to)
    widen, narrow = _to_decisive_f32(source), _from_f32(to, toward_zero)
    return narrow if source == _F32 else lambda x: narrow(widen(x))


def _to_decisive_f32(source: np.dtype) -> Callable[[np.ndarray], np.ndarray]:
    """Conversion to fp32 that keeps the bits that decide a rounding to 16 or 8 bits."""
    if source.kind in "iu" and source.itemsize == 8:
        return _i64_to_f32_odd
    if source == _F64 or (source.kind in "iu" and source.itemsize == 4):
        return lambda x: f64_to_f32_odd(x.astype(np.float64))
    return lambda x: x.astype(np.float32)


def _from_f32(to: np.dtype, toward_zero: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Conversion from fp32 to 16 or 8 bits."""
    if toward_zero:
        return partial(_toward_zero, to=to)
    if to == BF16:
        return f32_to_bf16
    if to not in _FP8:
        return lambda x: x.astype(to)
    limit = np.float32(ml_dtypes.finfo(to).max)
    return lambda x: np.where(np.isnan(x), x, np.clip(x, -limit, limit)).astype(to)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    rounded = x.astype(BF16)
    least = np.minimum.reduce(x, axis=None, initial=0.0)
    if least != least:  # ml_dtypes drops a NaN's payload
        bits = (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40)
        rounded = np.where(np.isnan(x), bits, rounded.view(np.uint16)).view(BF16)
    return rounded


def f64_to_f32_odd(x: np.ndarray) -> np.ndarray:
    """fp64 to fp32 rounded to odd, so that a second rounding gives the same result as one from fp64."""
    near = x.astype(np.float32)
    back = near.astype(np.float64)
    fix = (back != x) & np.isfinite(near) & ((near.view(np.uint32) & np.uint32(1)) == 0)
    # The odd neighbour on the other side of x; bits of both signs grow away from zero.
    toward = np.where(np.abs(back) > np.abs(x), -1, 1).astype(np.int32)
    return np.where(fix, (near.view(np.int32) + toward).view(np.float32), near)


def _i64_to_f32_odd(x: np.ndarray) -> np.ndarray:
    """64-bit integers to fp32 rounded to odd: upper bits and a sticky bit, which fp64 holds exactly."""
    low = x & x.dtype.type(0x7FF)
    kept = (x - low) | (low != 0).astype(x.dtype) << x.dtype.type(11)
    return f64_to_f32_odd(np.where(np.abs(x.astype(np.float64)) < 2.0**52, x, kept).astype(np.float64))


def _f64_to_f32_toward_zero(x: np.ndarray) -> np.ndarray:
    near = x.astype(np.float32)
    over = (np.abs(near.astype(np.float64)) > np.abs(x)) & ~np.isnan(x)
    return np.where(over, np.nextafter(near, np.float32(0)), near)


def _toward_zero(x: np.ndarray, to: np.dtype) -> np.ndarray:
    """fp32 to 16 or 8 bits, truncated. Larger finite magnitudes become the largest finite value."""
    if to == BF16:
        return f32_to_bf16((x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32))
    limit = np.float32(ml_dtypes.finfo(to).max)
    bounded = np.where(np.isinf(x) & (to not in _FP8), x, np.clip(x, -limit, limit))
    near = np.where(np.isnan(x), x, bounded).astype(to)
    unsigned = BITS[to.itemsize]
    over = np.abs(near.astype(np.float32)) > np.abs(bounded)
    return (near.view(unsigned) - over.astype(unsigned)).view(to)


def _float_to_int(x: np.ndarray, to: np.dtype) -> np.ndarray:
    wide = np.dtype(f"{'int' if to.kind == 'i' else 'uint'}{8 * max(2, to.itemsize)}")
    # PTX: NaN gives 0, or the top bit alone where 64 bits are on either side.
    of_nan = 1 << (8 * wide.itemsize - 1) if 8 in (x.dtype.itemsize, to.itemsize) else 0
    x = x.astype(np.float64)
    info = np.iinfo(wide)
    nan, high = np.isnan(x), x >= float(info.max)
    inside = np.where(nan | high, 0.0, np.maximum(x, float(info.min)))
    out = np.where(high, wide.type(info.max), inside.astype(wide))
    return np.where(nan, np.array(of_nan, BITS[wide.itemsize]).view(wide), out).astype(to)


# --- integers ---------------------------------------------------------------------------------------------------------


def divide_int(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Quotient rounded toward zero, as in C; NumPy's own rounds down.

    Division by 0, which is undefined on GPUs, gives 0, whatever the other elements are.
    """
    quotient = a // b
    if (quotient.item() if quotient.size == 1 else np.minimum.reduce(quotient, axis=None)) < 0:
        quotient = quotient + ((quotient < 0) & (quotient * b != a))
    return quotient


def remainder_int(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Remainder of ``divide_int``, with the sign of ``a``."""
    return np.fmod(a, b)


def shift_right_logical(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    unsigned = BITS[a.dtype.itemsize]
    return (a.view(unsigned) >> b.view(unsigned)).view(a.dtype)


def shift_right_arithmetic(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    signed = np.dtype(f"int{8 * a.dtype.itemsize}")
    return (a.view(signed) >> b.view(signed)).view(a.dtype)


def multiply_high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Upper half of the unsigned product of two 32- or 64-bit integers."""
    unsigned = BITS[a.dtype.itemsize]
    a_bits, b_bits = a.view(unsigned), b.view(unsigned)
    if unsigned.itemsize < 8:
        width = 8 * unsigned.itemsize
        high = (a_bits.astype(np.uint64) * b_bits.astype(np.uint64)) >> np.uint64(width)
        return high.astype(unsigned).view(a.dtype)
    low32, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a_low, a_high, b_low, b_high = a_bits & low32, a_bits >> shift, b_bits & low32, b_bits >> shift
    middle = a_high * b_low + ((a_low * b_low) >> shift)
    high = a_high * b_high + (middle >> shift) + ((a_low * b_high + (middle & low32)) >> shift)
    return high.view(a.dtype)


# --- floats -----------------------------------------------------------------------------------------------------------


def wrap_bool(op: np.ufunc, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sum or product of int1 modulo 2, where NumPy's bool saturates."""
    return np.logical_and(a, b) if op is np.multiply else np.logical_xor(a, b)


def maximum(a: np.ndarray, b: np.ndarray, propagate_nan: bool = False) -> np.ndarray:
    """Greater value, +0 above -0. NaN only if both are NaN, or with ``propagate_nan`` if one is."""
    return _extreme(np.maximum, a, b, propagate_nan, np.bitwise_and)


def minimum(a: np.ndarray, b: np.ndarray, propagate_nan: bool = False) -> np.ndarray:
    """Lesser value, -0 below +0. NaN only if both are NaN, or with ``propagate_nan`` if one is."""
    return _extreme(np.minimum, a, b, propagate_nan, np.bitwise_or)


def _extreme(op: np.ufunc, a: np.ndarray, b: np.ndarray, propagate_nan: bool, of_zeros: np.ufunc) -> np.ndarray:
    out = op(a, b)
    if out.dtype not in FLOATS:
        return out
    # Not np.fmax and np.fmin: a signalling NaN makes them return NaN, and the GPU's max and min do not.
    lost = np.isnan(out)
    if lost.any() and not propagate_nan:
        out = np.where(lost, np.where(np.isnan(a), b, a), out)
    zero = (a == 0) & (b == 0)
    if zero.any():
        bits = BITS[out.dtype.itemsize]
        out = np.where(zero, of_zeros(a.view(bits), b.view(bits)).view(out.dtype), out)
    return out


def absolute(x: np.ndarray) -> np.ndarray:
    if x.dtype not in FLOATS:
        return np.abs(x)
    bits = BITS[x.dtype.itemsize]
    return (x.view(bits) & bits.type((1 << (8 * bits.itemsize - 1)) - 1)).view(x.dtype)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``a * b + c`` rounded once (fp64: by Python's exact integers, slow)."""
    kind = np.result_type(a, b, c) if a.dtype == b.dtype == c.dtype else c.dtype
    if kind == _F64:
        return np.vectorize(_fma64, otypes=[np.float64])(a, b, c)
    product = convert(a, _F64) * convert(b, _F64)  # exact: at most 48 significant bits
    addend = convert(c, _F64)
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)
    fix = (error != 0) & np.isfinite(total) & ((total.view(np.int64) & 1) == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where(fix, (total.view(np.int64) + step).view(np.float64), total)
    return odd.astype(np.float32) if kind == _F32 else convert(odd, kind)


def _fma64(a: float, b: float, c: float) -> float:
    from fractions import Fraction

    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return float(exact) if exact else a * b + c


erf = np.vectorize(math.erf, otypes=[np.float64])


def round_to_tf32(x: np.ndarray) -> np.ndarray:
    """fp32 rounded to nearest even at 10 mantissa bits, as by a TMA load through a TF32 descriptor."""
    bits = x.view(np.uint32)
    rounded = (bits + (np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1)))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, bits).view(np.float32)


def dot(a: np.ndarray, b: np.ndarray, accumulator: np.ndarray, exact: bool = False) -> np.ndarray:
    """``a @ b + accumulator`` in the accumulator's dtype.

    Floats of up to 32 bits are multiplied and summed in fp32 (TF32 inputs keep their fp32 bits), fp64 in fp64, int8 exactly
    in int32.
    exact  products of 16 and 8 bits are summed in fp64 and rounded to fp32 once, so that an element's bits do not depend on the
           blocks' shapes: in fp32 NumPy's order of a sum depends on them
    """
    if a.dtype.kind in "iu" and a.dtype not in _FP8:
        product = np.matmul(a.astype(np.float64), b.astype(np.float64))  # exact below 2**53, and BLAS takes it
        return accumulator + product.astype(np.int64).astype(accumulator.dtype)
    if a.dtype == _F64:
        return np.matmul(a, b) + accumulator
    if exact:
        wide = np.matmul(a.astype(_F64), b.astype(_F64))
        return convert(convert(wide, _F32) + convert(accumulator, _F32), accumulator.dtype)
    product = np.matmul(a.astype(_F32, copy=False), b.astype(_F32, copy=False))
    if accumulator.dtype == _F32:
        return np.add(product, accumulator, out=product)
    return convert(product + convert(accumulator, _F32), accumulator.dtype)


# --- reductions -------------------------------------------------------------------------------------------------------


def reduce_sum(x: np.ndarray, axis: int) -> np.ndarray:
    """Sum along ``axis``, kept as length 1.

    16- and 8-bit floats are summed in fp32 and rounded once; integers wrap.
    """
    if x.dtype == _BOOL:
        return np.logical_xor.reduce(x, axis=axis, keepdims=True)
    if x.dtype in _NARROW:
        return convert(np.add.reduce(convert(x, _F32), axis=axis, keepdims=True), x.dtype)
    return np.add.reduce(x, axis=axis, keepdims=True, dtype=x.dtype)


def reduce_extreme(x: np.ndarray, axis: int, greatest: bool) -> np.ndarray:
    """Maximum or minimum along ``axis``, kept as length 1. NaN is ignored, +0 is above -0."""
    if x.dtype not in FLOATS:
        return (np.maximum if greatest else np.minimum).reduce(x, axis=axis, keepdims=True)
    wide = convert(x, _F32) if x.dtype in _NARROW else x
    nan = np.isnan(wide)
    least = wide.dtype.type(-np.inf if greatest else np.inf)
    out = (np.maximum if greatest else np.minimum).reduce(np.where(nan, least, wide), axis=axis, keepdims=True)
    out = np.where(nan.all(axis=axis, keepdims=True), wide.dtype.type(np.nan), out)
    if (out == 0).any():
        zeros = (wide == 0) & (np.signbit(wide) != greatest)
        preferred = zeros.any(axis=axis, keepdims=True)
        out = np.where(out == 0, np.where(preferred == greatest, wide.dtype.type(0.0), wide.dtype.type(-0.0)), out)
    return convert(out, x.dtype)


def scan_sum(x: np.ndarray, axis: int) -> np.ndarray:
    if x.dtype in _NARROW:
        return convert(np.cumsum(convert(x, _F32), axis=axis, dtype=np.float32), x.dtype)
    return np.cumsum(x, axis=axis, dtype=x.dtype)


def histogram(x: np.ndarray, bins: int, mask: np.ndarray | None) -> np.ndarray:
    """Counts (int32) of the values 0 … bins-1 of an integer array.

    Other values and masked elements are not counted.
    """
    inside = (x >= 0) & (x < bins)
    if mask is not None:
        inside = inside & mask
    return np.bincount(x[inside].astype(np.int64), minlength=bins).astype(np.int32)
