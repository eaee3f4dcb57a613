"""NVIDIA's libdevice in NumPy, by symbol.

Triton's own code chooses the symbol and the type of the result, and refuses unsupported types. fp32 functions are computed in
fp64 and rounded once, which differs from libdevice by a few units in the last place. Missing functions (Bessel functions,
directed rounding, inverse error functions and so on) are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from weft.simulator import numerics

Function = Callable[..., np.ndarray]


def _each(function: Callable[..., float]) -> Function:
    """Elementwise NumPy function from one on Python numbers."""
    return np.vectorize(function, otypes=[np.float64])


def _round(x: np.ndarray) -> np.ndarray:
    """Round to nearest, halves away from zero."""
    whole = np.trunc(x)
    return np.copysign(np.abs(whole) + (np.abs(x - whole) >= 0.5), x)


def _tgamma(x: float) -> float:
    if x == 0:
        return math.copysign(math.inf, x)
    try:
        return math.gamma(x)
    except OverflowError:
        return math.inf
    except ValueError:  # a negative integer, or -inf
        return math.nan


def _lgamma(x: float) -> float:
    try:
        return math.lgamma(x)
    except (OverflowError, ValueError):
        return math.inf


def _remainder(x: float, y: float) -> float:
    try:
        return math.remainder(x, y)
    except ValueError:
        return math.nan


def _bits(function: Callable[[int, int], int]) -> Function:
    """Elementwise function of an integer's bits and their number, with int32 results."""

    def apply(x: np.ndarray) -> np.ndarray:
        width = 8 * x.dtype.itemsize
        flat = [function(int(v) & ((1 << width) - 1), width) for v in x.ravel()]
        return np.array(flat, np.uint64).astype(x.dtype).reshape(x.shape)

    return apply


def _logb(x: np.ndarray) -> np.ndarray:
    exponent = np.frexp(x)[1] - 1.0
    return np.where(x == 0, -np.inf, np.where(np.isfinite(x), exponent, np.abs(x)))


def _norm(*parts: np.ndarray) -> np.ndarray:
    return np.sqrt(sum(part * part for part in parts))


_FLOAT: dict[str, Function] = {
    "exp": np.exp, "exp2": np.exp2, "exp10": partial(np.power, 10.0), "expm1": np.expm1,
    "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p, "logb": _logb,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt, "rcbrt": lambda x: 1 / np.cbrt(x),
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "sinpi": lambda x: np.sin(np.pi * np.fmod(x, 2)), "cospi": lambda x: np.cos(np.pi * np.fmod(x, 2)),
    "erf": _each(math.erf), "erfc": _each(math.erfc), "normcdf": _each(lambda x: math.erfc(-x / math.sqrt(2)) / 2),
    "tgamma": _each(_tgamma), "lgamma": _each(_lgamma),
    "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint, "nearbyint": np.rint, "round": _round,
    "fabs": np.abs, "saturate": lambda x: np.where(np.isnan(x), 0, np.clip(x, 0, 1)),
    "pow": np.power, "atan2": np.arctan2, "fmod": np.fmod, "remainder": _each(_remainder), "hypot": np.hypot,
    "rhypot": lambda x, y: 1 / np.hypot(x, y), "copysign": np.copysign,
    "fdim": lambda x, y: np.where(np.isnan(x) | np.isnan(y), np.nan, np.where(x > y, x - y, 0.0)),
    "norm3d": _norm, "norm4d": _norm, "rnorm3d": lambda *x: 1 / _norm(*x), "rnorm4d": lambda *x: 1 / _norm(*x),
    "ldexp": np.ldexp, "scalbn": np.ldexp, "ilogb": _logb, "powi": np.power,
    "llrint": np.rint, "llround": _round,
}  # fmt: skip
_PLAIN: dict[str, Function] = {
    # Rounded to nearest, as their names say.
    "add_rn": np.add, "sub_rn": np.subtract, "mul_rn": np.multiply, "div_rn": np.divide, "sqrt_rn": np.sqrt,
    "rcp_rn": lambda x: 1 / x, "rsqrt_rn": lambda x: 1 / np.sqrt(x), "dividef": np.divide,
}  # fmt: skip
_EXACT: dict[str, Function] = {
    "isnanf": np.isnan, "isnand": np.isnan, "isinff": np.isinf, "isinfd": np.isinf, "finitef": np.isfinite,
    "isfinited": np.isfinite, "signbitf": np.signbit, "signbitd": np.signbit, "nextafterf": np.nextafter,
    "nextafter": np.nextafter, "fmaf": numerics.fma, "fma": numerics.fma, "fmaf_rn": numerics.fma, "fma_rn": numerics.fma,
    "abs": np.abs, "llabs": np.abs, "popc": _bits(lambda x, _: x.bit_count()), "popcll": _bits(lambda x, _: x.bit_count()),
    "clz": _bits(lambda x, width: width - x.bit_length()), "clzll": _bits(lambda x, width: width - x.bit_length()),
    "ffs": _bits(lambda x, _: (x & -x).bit_length()), "ffsll": _bits(lambda x, _: (x & -x).bit_length()),
    "brev": _bits(lambda x, width: int(f"{x:0{width}b}"[::-1], 2)),
    "brevll": _bits(lambda x, width: int(f"{x:0{width}b}"[::-1], 2)),
    "umulhi": numerics.multiply_high, "umul64hi": numerics.multiply_high,
    "float_as_int": lambda x: x.view(np.int32), "float_as_uint": lambda x: x.view(np.uint32),
    "int_as_float": lambda x: x.view(np.float32), "uint_as_float": lambda x: x.view(np.float32),
    "double_as_longlong": lambda x: x.view(np.int64), "longlong_as_double": lambda x: x.view(np.float64),
}  # fmt: skip


def _widened(function: Function) -> Function:
    """Function computed in fp64. Integer arguments (an exponent) stay integers."""
    return lambda *xs: function(*(x.astype(np.float64) if x.dtype.kind == "f" else x for x in xs))


# Conversions to an integer by each rounding (Triton knows the result's type), and from an integer to the nearest float.
_TO_INTEGER = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}
_INTEGERS, _FLOATS = ("int", "uint", "ll", "ull"), ("float", "double")


def _table() -> dict[str, Function]:
    table = dict(_EXACT)
    for real in _FLOATS:
        for whole in _INTEGERS:
            table[f"{whole}2{real}_rn"] = lambda x: x
            for name, function in _TO_INTEGER.items():
                table[f"{real}2{whole}_{name}"] = function
    table["double2float_rn"] = lambda x: x
    for name, function in _FLOAT.items():
        table[name] = table[f"{name}f"] = table[f"fast_{name}f"] = _widened(function)
    for name, function in _PLAIN.items():
        table[f"f{name}"] = table[f"d{name}"] = table[f"fast_f{name}"] = _widened(function)
    return table


_SYMBOLS = _table()


def function_of(symbol: str) -> Function | None:
    """Function of a libdevice symbol such as ``__nv_expf``; None if it is missing."""
    return _SYMBOLS.get(symbol.removeprefix("__nv_"))
