"""libdevice in the simulator, with torch in fp64 as the reference."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.cuda.libdevice as cuda_libdevice
from triton.language.extra import libdevice
from triton.language.extra.libdevice import exp as exp_by_name

import weft
from tests.compiling import compiled
from weft.errors import NotInterpretable

pytestmark = pytest.mark.triton_internals

X = [0.3, -0.7, 1.5, -2.5, 0.0, -0.0, 3.0, 20.0, -20.0, 0.5, 2.5, 0.9999, 1e-6, 100.5, float("inf"), float("nan")]
Y = [2.0, 3.0, -1.5, 2.0, 1.0, 0.5, -2.0, 0.1, 7.0, -0.5, 2.0, 1.0, 3.0, 8.0, 2.0, 1.0]

UNARY = {
    "exp": torch.exp, "exp2": torch.exp2, "exp10": lambda x: 10**x, "expm1": torch.expm1, "log": torch.log,
    "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "cbrt": lambda x: torch.sign(x) * x.abs() ** (1 / 3), "sin": torch.sin, "cos": torch.cos, "tan": torch.tan,
    "asin": torch.asin, "acos": torch.acos, "atan": torch.atan, "sinh": torch.sinh, "cosh": torch.cosh, "tanh": torch.tanh,
    "asinh": torch.asinh, "acosh": torch.acosh, "atanh": torch.atanh, "erf": torch.erf, "erfc": torch.erfc,
    "normcdf": torch.special.ndtr, "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "rint": torch.round,
    "nearbyint": torch.round, "round": lambda x: torch.sign(x) * torch.floor(x.abs() + 0.5), "abs": torch.abs,
    "rcp_rn": lambda x: 1 / x, "sqrt_rn": torch.sqrt, "sinpi": lambda x: torch.sin(math.pi * x),
}  # fmt: skip
FAST = {
    "fast_expf": torch.exp, "fast_exp10f": lambda x: 10**x, "fast_logf": torch.log, "fast_log2f": torch.log2,
    "fast_log10f": torch.log10, "fast_sinf": torch.sin, "fast_cosf": torch.cos, "fast_tanf": torch.tan,
    "saturatef": lambda x: torch.where(x.isnan(), 0.0, x.clamp(0, 1)),
}  # fmt: skip
BINARY = {
    "pow": torch.pow, "atan2": torch.atan2, "fmod": torch.fmod, "hypot": torch.hypot, "copysign": torch.copysign,
    "div_rn": torch.div, "add_rn": torch.add, "mul_rn": torch.mul, "fdim": lambda x, y: torch.where(x > y, x - y, (x - y) * 0),
}  # fmt: skip
FAST_BINARY = {"fast_powf": torch.pow, "fast_dividef": torch.div}
PREDICATES = {"isnan": torch.isnan, "isinf": torch.isinf, "signbit": torch.signbit}


@triton.jit
def unary(x, out, F: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, F(tl.load(x + at)))


@triton.jit
def binary(x, y, out, F: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, F(tl.load(x + at), tl.load(y + at)))


def run(kernel, *args) -> None:
    weft.simulate(lambda _: kernel[(1,)](*args), 1, heap_bytes=1 << 16)


def assert_close(name: str, got: torch.Tensor, x: torch.Tensor, want: torch.Tensor) -> None:
    want = want.to(got.dtype)
    if name == "sinpi":  # sin(pi * x) in fp64 is not exact at the integers, and pi * inf is no number
        got, want = got[:8], want[:8]
    tolerance = 1e-12 if got.dtype == torch.float64 else 1e-6
    torch.testing.assert_close(got, want, rtol=tolerance, atol=1e-14, equal_nan=True, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_of_one_and_of_two_numbers(dtype):
    x, y = torch.tensor(X, dtype=dtype), torch.tensor(Y, dtype=dtype)
    fast = {} if dtype == torch.float64 else FAST

    def main(team):
        for name, reference in (UNARY | fast).items():
            out = torch.zeros_like(x)
            unary[(1,)](x, out, getattr(libdevice, name), 16)
            assert_close(name, out, x, reference(x.double()))
        for name, reference in (BINARY | ({} if dtype == torch.float64 else FAST_BINARY)).items():
            out = torch.zeros_like(x)
            binary[(1,)](x, y, out, getattr(libdevice, name), 16)
            assert_close(name, out, x, reference(x.double(), y.double()))
        for name, reference in PREDICATES.items():
            out = torch.full((16,), 7, dtype=torch.int32)
            unary[(1,)](x, out, getattr(libdevice, name), 16)
            assert torch.equal(out != 0, reference(x)), name

    weft.simulate(main, 1)


@triton.jit
def others(x, n, floats, ints, bits, N: tl.constexpr):
    at = tl.arange(0, N)
    v, k = tl.load(x + at), tl.load(n + at)
    tl.store(floats + at, libdevice.fma(v, v, v))
    tl.store(floats + N + at, exp_by_name(v) - tl.extra.cuda.libdevice.exp(v) + cuda_libdevice.ldexp(v, k & 7))
    tl.store(floats + 2 * N + at, libdevice.int2float_rn(k))
    tl.store(floats + 3 * N + at, libdevice.int_as_float(libdevice.float_as_int(v)))
    tl.store(floats + 4 * N + at, libdevice.pow(v, k & 3))
    tl.store(ints + at, libdevice.ffs(k))
    tl.store(ints + N + at, libdevice.popc(k))
    tl.store(ints + 2 * N + at, libdevice.clz(k))
    tl.store(ints + 3 * N + at, libdevice.brev(k))
    tl.store(ints + 4 * N + at, libdevice.finitef(v).to(tl.int32))
    tl.store(ints + 5 * N + at, libdevice.abs(k))
    tl.store(ints + 6 * N + at, libdevice.float2int_rn(v))
    tl.store(bits + at, libdevice.popc(k.to(tl.int64)) + libdevice.llrint(v))
    tl.static_assert(libdevice.popc(k.to(tl.int64)).dtype == tl.int32)


def test_functions_of_integers_and_of_three_numbers():
    x = torch.tensor([0.5, -1.5, 2.5, 3.0, -0.25, 8.0, 1e-3, 7.5])
    n = torch.tensor([0, 1, -1, 6, 2**31 - 1, -(2**31), 40, 1024], dtype=torch.int32)
    floats, ints, bits = torch.zeros(5, 8), torch.zeros(7, 8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    assert compiled(others, x, n, floats, ints, bits, 8, arch="sm_90").asm["ptx"]
    run(others, x, n, floats, ints, bits, 8)
    unsigned = [int(v) % 2**32 for v in n]
    assert torch.equal(floats[0], (x.double() * x + x).float())
    assert (
        torch.equal(floats[1], x * 2.0 ** (n & 7)) and torch.equal(floats[2], n.float()) and torch.equal(floats[3], x)
    )
    torch.testing.assert_close(floats[4], x ** (n & 3))
    assert ints[0].tolist() == [(v & -v).bit_length() for v in unsigned]
    assert ints[1].tolist() == [bin(v).count("1") for v in unsigned]
    assert ints[2].tolist() == [32 - v.bit_length() for v in unsigned]
    assert [v % 2**32 for v in ints[3].tolist()] == [int(f"{v:032b}"[::-1], 2) for v in unsigned]
    assert ints[4].tolist() == [1] * 8 and torch.equal(ints[5], n.abs()) and torch.equal(ints[6], x.round().int())
    assert bits.tolist() == [bin(int(v) % 2**64).count("1") + round(float(f)) for v, f in zip(n, x, strict=True)]


@triton.jit
def mistaken(x, out, CASE: tl.constexpr):
    v = tl.load(x)
    if CASE == "unknown":
        tl.store(out, libdevice.cyl_bessel_i0(v))
    elif CASE == "rounding":
        tl.store(out, libdevice.add_rz(v, v))
    else:
        tl.store(out, libdevice.exp(v.to(tl.bfloat16)))


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("unknown", NotInterpretable, "the external function __nv_cyl_bessel_i0f of libdevice in mistaken"),
        ("rounding", NotInterpretable, "the external function __nv_fadd_rz of libdevice in mistaken"),
        ("type", TypeError, "libdevice.exp has no version for bf16; cast the arguments"),
    ],
)
def test_what_is_not_there_is_refused_by_name_in_one_line(case, error, text):
    with pytest.raises(error) as caught:
        run(mistaken, torch.ones(1), torch.ones(1), case)
    assert str(caught.value).startswith(text) and "\n" not in str(caught.value)
