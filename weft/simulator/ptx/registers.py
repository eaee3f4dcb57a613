"""PTX instructions that touch no memory, on arrays with one element of 64 raw bits for each thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from weft.simulator import numerics

# NumPy dtype of each type of PTX; "pred" holds 0 or 1.
TYPES = {
    **{f"{kind}{bits}": np.dtype(f"uint{bits}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    "f16": np.dtype(np.float16), "bf16": numerics.BF16, "f32": np.dtype(np.float32), "f64": np.dtype(np.float64),
    "e4m3": numerics.DTYPES["fp8e4nv"], "e5m2": numerics.DTYPES["fp8e5"], "pred": np.dtype(np.uint8),
}  # fmt: skip
# Types of several values in one register, the first in the low bits: the type and number of the values.
PACKED = {f"{kind}x2": (kind, 2) for kind in ("f16", "bf16", "f32", "s16", "u16", "e4m3", "e5m2")}

Bits = np.ndarray


def typed(bits: Bits, kind: str) -> np.ndarray:
    """Values of raw bits in a type of PTX."""
    dtype = TYPES[kind]
    return bits.astype(numerics.BITS[dtype.itemsize]).view(dtype)


def raw(values: np.ndarray) -> Bits:
    """Raw bits of values, widened with zeros."""
    values = values.astype(np.uint8) if values.dtype == np.bool_ else values
    return values.view(numerics.BITS[values.dtype.itemsize]).astype(np.uint64)


def parts_of(bits: Bits, count: int, width: int) -> list[Bits]:
    """Raw bits of the ``count`` values of ``width`` bits in each register, the lowest first."""
    mask = np.uint64(2**width - 1)
    return [bits >> np.uint64(width * i) & mask for i in range(count)]


def packed(parts: list[Bits], width: int) -> Bits:
    """Register of values of ``width`` bits each, the first in the low bits."""
    return functools.reduce(np.bitwise_or, [part << np.uint64(width * i) for i, part in enumerate(parts)])


_EQUALITIES = {"eq": np.equal, "ne": np.not_equal}
_COMPARISONS = {**_EQUALITIES, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
# Comparisons of integers, by the first letter of their type.
_OF_INTEGERS = {
    "b": _EQUALITIES, "s": _COMPARISONS,
    "u": {**_COMPARISONS, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal},
}  # fmt: skip
# With a final "u" a comparison holds if a value is NaN.
_OF_FLOATS = {*_COMPARISONS, *(f"{name}u" for name in _COMPARISONS), "num", "nan"}
LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_SUMS = {"add": np.add, "sub": np.subtract}
_EXTREMES = {"min": numerics.minimum, "max": numerics.maximum}
# Functions that round to integers.
_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
# Functions of floats, in fp64 and rounded once.
_FUNCTIONS: dict[str, Callable] = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt,
    "sin": np.sin, "cos": np.cos, "tanh": np.tanh, "div": np.divide,
}  # fmt: skip
_ROUND = frozenset({"rn", "ftz"})
_FUNCTION = frozenset({"approx", "rn", "ftz"})
_PRODUCT = _ROUND | {"lo", "wide", "sat"}
# Modifiers, apart from types, of each instruction; one that is not here has none. What is rounded is rounded to nearest, and
# subnormals are kept with .ftz too.
_MODIFIERS = {
    "add": _ROUND | {"sat"}, "sub": _ROUND | {"sat"}, "mul": _PRODUCT, "mul24": frozenset({"lo"}),
    "mad": _PRODUCT, "fma": _ROUND | {"sat", "relu"}, "neg": frozenset({"ftz"}), "abs": frozenset({"ftz"}),
    **dict.fromkeys(_EXTREMES, frozenset({"ftz", "NaN", "relu"})),
    **dict.fromkeys(_FUNCTIONS, _FUNCTION), "div": _FUNCTION | {"full"},
    "setp": frozenset({*_OF_INTEGERS["u"], *_OF_FLOATS, "ftz"}), "cvta": frozenset({"to", "global"}),
    "cvt": frozenset({"rn", "rz", "ftz", "sat", "satfinite", "relu", *_INTEGRAL}),
}  # fmt: skip
# Least and greatest number of operands of each instruction, the result among them.
OPERANDS = {
    **dict.fromkeys(("mov", "cvta", "not", "neg", "abs", *_FUNCTIONS), (2, 2)),
    **dict.fromkeys(("add", "sub", "mul", "mul24", "div", "shl", "shr", *LOGIC, *_EXTREMES), (3, 3)),
    **dict.fromkeys(("mad", "fma", "selp", "prmt"), (4, 4)), "lop3": (5, 5), "cvt": (2, 3), "setp": (3, 4),
}  # fmt: skip


def _bounded(values: np.ndarray, modifiers: tuple[str, ...]) -> np.ndarray:
    """Values of which ``.relu`` makes negative ones 0, and ``.sat`` clamps to [0, 1], NaN to 0."""
    zero = np.zeros_like(values)
    if "relu" in modifiers:
        values = numerics.maximum(values, zero, propagate_nan=True)
    return numerics.minimum(numerics.maximum(values, zero), zero + zero.dtype.type(1)) if "sat" in modifiers else values


def _setp(modifiers: tuple[str, ...], kind: str, a: Bits, b: Bits) -> Bits | None:
    """Comparison; None where the type does not have it."""
    names = [name for name in modifiers[:-1] if name != "ftz"]
    left, right, name = typed(a, kind), typed(b, kind), names[0] if len(names) == 1 else ""
    if left.dtype.kind in "iu":
        compare = _OF_INTEGERS.get(kind[0], {}).get(name)
        return None if compare is None else raw(compare(left, right))
    if name not in _OF_FLOATS:
        return None
    unordered = (left != left) | (right != right)
    if name in ("num", "nan"):
        return raw(unordered == (name == "nan"))
    return raw(np.where(unordered, name.endswith("u"), _COMPARISONS[name.removesuffix("u")](left, right)))


def _mul(modifiers: tuple[str, ...], kind: str, a: Bits, b: Bits) -> Bits | None:
    """Product: all of floats, the low half of integers, or of double width."""
    left, right = typed(a, kind), typed(b, kind)
    if "wide" in modifiers:
        wider = np.dtype(f"{left.dtype.kind}{2 * left.dtype.itemsize}")
        return raw(left.astype(wider) * right.astype(wider))
    return raw(_bounded(left * right, modifiers)) if "lo" in modifiers or left.dtype.kind not in "iu" else None


def _shift(modifiers: tuple[str, ...], kind: str, name: str, a: Bits, by: Bits) -> Bits:
    values, width = typed(a, kind), 8 * TYPES[kind].itemsize
    amount = np.minimum(by & np.uint64(0xFFFFFFFF), np.uint64(width))
    inside = np.minimum(amount, np.uint64(width - 1)).astype(values.dtype)
    shifted = values << inside if name == "shl" else values >> inside
    beyond = np.where(values < 0, values.dtype.type(-1), 0) if name == "shr" and kind[0] == "s" else 0
    return raw(np.where(amount == width, beyond, shifted).astype(values.dtype))


def _lop3(a: Bits, b: Bits, c: Bits, table: Bits) -> Bits:
    """Logic of three operands: bit 4 a + 2 b + c of the table for each of their bits."""
    result = np.zeros_like(a)
    for row in range(8):
        here = np.full_like(a, 2**32 - 1)
        for operand, bit in ((a, 4), (b, 2), (c, 1)):
            here &= operand if row & bit else ~operand
        result |= np.where(table >> np.uint64(row) & np.uint64(1) != 0, here, np.uint64(0))
    return result


def _prmt(a: Bits, b: Bits, selectors: Bits) -> Bits:
    """Four of the bytes of a and b, by selectors of 4 bits, whose highest takes the byte's sign."""
    both, bytes_ = a & np.uint64(2**32 - 1) | b << np.uint64(32), []
    for selector in parts_of(selectors, 4, 4):
        byte = both >> (selector % np.uint64(8) * np.uint64(8)) & np.uint64(0xFF)
        sign = np.where(byte >= 0x80, np.uint64(0xFF), np.uint64(0))
        bytes_.append(np.where(selector >= 8, sign, byte))
    return packed(bytes_, 8)


_OF_WORDS = {"lop3": _lop3, "prmt": _prmt}


def compute(name: str, modifiers: tuple[str, ...], sources: list[Bits]) -> Bits | None:
    """Result of an instruction; None for one that is not known."""
    kind = modifiers[-1] if modifiers else ""
    if not _MODIFIERS.get(name, frozenset()).issuperset(modifiers[: -2 if name == "cvt" else -1]):
        return None
    if name == "cvt" and len(modifiers) >= 2:
        with np.errstate(all="ignore"):
            return _convert(modifiers, sources)
    if kind in PACKED and name != "mov":
        if name in ("setp", "selp"):
            return None
        one, count = PACKED[kind]
        width = 8 * TYPES[one].itemsize
        lanes = zip(*(parts_of(bits, count, width) for bits in sources), strict=True)
        results = [compute(name, (*modifiers[:-1], one), list(lane)) for lane in lanes]
        return None if any(part is None for part in results) else packed(results, width)
    if name in _OF_WORDS:
        return _OF_WORDS[name](*sources) if kind == "b32" else None
    if kind not in TYPES:
        return None
    with np.errstate(all="ignore"):
        return _typed_result(name, modifiers, kind, sources)


def reduced(op: str, kind: str, values: Sequence[Bits], in_f32: bool) -> Bits | None:
    """Reduction of values in their order; None for one that is not known.

    ``in_f32``: of a sum, in fp32 and rounded once.
    """
    if not in_f32:
        total: Bits | None = values[0]
        for value in values[1:]:
            total = None if total is None else compute(op, (kind,), [total, value])
        return total
    one, count = PACKED.get(kind, (kind, 1))
    width = 8 * TYPES[one].itemsize
    lanes = zip(*(parts_of(bits, count, width) for bits in values), strict=True)
    sums = [np.sum([typed(bits, one).astype(np.float32) for bits in lane], axis=0, dtype=np.float32) for lane in lanes]
    return packed([raw(numerics.convert(total, TYPES[one])) for total in sums], width)


def as_bits(kind: str) -> str:
    """Untyped type of the size of ``kind``."""
    return f"b{8 * TYPES[kind].itemsize}" if kind in TYPES else f"b{_layout(kind)[0] * _layout(kind)[1]}"


def _typed_result(name: str, modifiers: tuple[str, ...], kind: str, sources: list[Bits]) -> Bits | None:
    if "sat" in modifiers and TYPES[kind].kind in "iu":
        return None
    values: list[Callable] = [lambda i=i: typed(sources[i], kind) for i in range(len(sources))]
    if name in ("mov", "cvta"):
        return raw(values[0]())
    if name == "setp":
        return _setp(modifiers, kind, *sources)
    if name == "selp":
        return np.where(sources[2] != 0, raw(values[0]()), raw(values[1]()))
    if name in LOGIC:
        return raw(LOGIC[name](values[0](), values[1]()))
    if name in _SUMS or name in _EXTREMES:
        a, b = (value() for value in values)
        made = _SUMS[name](a, b) if name in _SUMS else _EXTREMES[name](a, b, "NaN" in modifiers)
        return raw(_bounded(made, modifiers))
    if name == "not":
        return raw(values[0]() ^ np.uint8(1) if kind == "pred" else ~values[0]())
    if name in ("neg", "abs"):
        return raw(-values[0]() if name == "neg" else numerics.absolute(values[0]()))
    if name in _FUNCTIONS and TYPES[kind].kind not in "iu":
        wide = [np.asarray(value(), np.float64) for value in values]
        return raw(numerics.convert(_FUNCTIONS[name](*wide), TYPES[kind]))
    if name in ("mul", "mul24"):
        return _mul(modifiers, kind, *sources[:2])
    if name in ("mad", "fma") and TYPES[kind].kind not in "iu":
        return raw(_bounded(numerics.fma(*(value() for value in values)), modifiers))
    if name == "mad":
        product = _mul(modifiers, kind, *sources[:2])
        wide = f"{kind[0]}{2 * int(kind[1:])}" if "wide" in modifiers else kind
        return None if product is None else raw(typed(product, wide) + typed(sources[2], wide))
    if name in ("shl", "shr"):
        return _shift(modifiers, kind, name, *sources)
    return None


def _convert(modifiers: tuple[str, ...], sources: list[Bits]) -> Bits | None:
    """Conversion of a value, of the values of a register, or of two values into one register.

    The first of two sources goes to the high bits.
    """
    to, source = modifiers[-2:]
    if to in PACKED:
        one, count = PACKED[to]
        inputs = parts_of(sources[0], *_layout(source)) if source in PACKED else sources[::-1]
        if len(inputs) != count:
            return None
        made = [_convert((*modifiers[:-2], one, PACKED.get(source, (source,))[0]), [part]) for part in inputs]
        return None if any(part is None for part in made) else packed(made, 8 * TYPES[one].itemsize)
    if to not in TYPES or source not in TYPES:
        return None
    values = _rounded(typed(sources[0], source), TYPES[to], modifiers)
    if values is None:
        return None
    made = numerics.convert(values, TYPES[to], "rz" in modifiers)
    if "satfinite" in modifiers:
        made = np.where(np.isinf(made), np.copysign(ml_dtypes.finfo(made.dtype).max, made), made)
    return raw(made)


def _rounded(values: np.ndarray, to: np.dtype, modifiers: tuple[str, ...]) -> np.ndarray | None:
    """Values for a conversion, rounded to integers and limited by modifiers of ``cvt``; None: not known."""
    integral = next((_INTEGRAL[one] for one in modifiers if one in _INTEGRAL), None)
    is_float = values.dtype in numerics.FLOATS
    if not is_float and "rz" in modifiers or is_float and to.kind in "iu" and integral is None:
        return None
    if integral is not None and is_float:
        values = numerics.convert(integral(numerics.convert(values, np.dtype(np.float64))), values.dtype)
    if to in numerics.FLOATS:
        return _bounded(values, modifiers)
    if "sat" not in modifiers:
        return values
    least, most = np.iinfo(to).min, np.iinfo(to).max
    if not is_float:
        own = np.iinfo(values.dtype)
        least, most = max(least, own.min), min(most, own.max)
    return np.clip(values, values.dtype.type(least), values.dtype.type(most))


def _layout(kind: str) -> tuple[int, int]:
    one, count = PACKED[kind]
    return count, 8 * TYPES[one].itemsize
