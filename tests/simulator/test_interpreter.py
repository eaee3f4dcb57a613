"""Interpreter on a sequential port over plain memory, with torch on the CPU as the reference."""

from __future__ import annotations

import ctypes
import itertools
import traceback
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.cuda as cuda
from triton.compiler.errors import CompilationError
from triton.language import load as load_by_name
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.compiling import compiled
from weft.errors import Misaligned, NotInterpretable
from weft.simulator import interpreter as module
from weft.simulator.interpreter import Interpreter, addresses_of, block, element_dtype, scalar, value_of
from weft.simulator.ptx.threads import Position

pytestmark = pytest.mark.triton_internals

TORCH = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2,
    "int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
    "uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64,
}  # fmt: skip
OPS = {
    "add": lambda a, b: a + b, "fadd": lambda a, b: a + b, "xchg": lambda a, b: b, "min": min, "umin": min,
    "max": max, "umax": max, "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
}  # fmt: skip


class SequentialPort:
    """Sequential port on the memory of this process."""

    def __init__(self) -> None:
        self.index, self.grid = (0, 0, 0), (1, 1, 1)
        self.calls: list[tuple] = []
        self.interpreter = Interpreter(self)

    def _view(self, addresses: np.ndarray, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
        low, high = int(addresses.min()), int(addresses.max())
        memory = (ctypes.c_uint8 * (high - low + itemsize)).from_address(low)
        return np.frombuffer(memory, np.dtype(f"uint{8 * itemsize}")), (addresses - np.uint64(low)) // np.uint64(
            itemsize
        )

    def pointer(self, tensor):
        return tensor.data_ptr()

    def program(self):
        return self.index, self.grid

    def load(self, places, access):
        addresses, mask, itemsize = places.addresses, places.mask, places.itemsize
        assert addresses.dtype == np.uint64 and mask.dtype == np.bool_ and addresses.shape == mask.shape
        self.calls.append(("load", access))
        out = np.zeros(addresses.shape, np.dtype(f"uint{8 * itemsize}"))
        if mask.any():
            memory, at = self._view(addresses[mask], itemsize)
            out[mask] = memory[at]
        return out

    def store(self, places, bits, access):
        addresses, mask = places.addresses, places.mask
        assert addresses.shape == mask.shape == bits.shape and bits.dtype.kind == "u"
        self.calls.append(("store", access))
        if mask.any():
            memory, at = self._view(addresses[mask], bits.dtype.itemsize)
            memory[at] = bits[mask]

    def position(self):
        return Position(threads=128, index=self.index, grid=self.grid, sm=0)

    def active_threads(self):
        return None

    def diverge(self, taken):
        return False

    def atomic(self, op, addresses, values, mask, order):
        assert addresses.shape == mask.shape == values.shape
        self.calls.append(("atomic", op, order.sem, order.scope))
        dtype, bits = values.dtype, np.ascontiguousarray(values).view(f"uint{8 * values.itemsize}")
        old = np.zeros_like(bits)
        for i in np.ndindex(addresses.shape):
            if mask[i]:
                memory, at = self._view(addresses[i][None], bits.dtype.itemsize)
                old[i] = memory[at][0]
                a, b = (np.array([x[i]]).view(dtype)[0] for x in (old, bits))
                memory[at] = np.array([OPS[op](a, b)], dtype).view(bits.dtype)
        return old

    def cas(self, addresses, compare, bits, order):
        self.calls.append(("cas", order.sem, order.scope))
        old = np.zeros_like(bits)
        for i in np.ndindex(addresses.shape):
            memory, at = self._view(addresses[i][None], bits.dtype.itemsize)
            old[i] = memory[at][0]
            if old[i] == compare[i]:
                memory[at] = bits[i]
        return old

    def has_exact_dots(self):
        return False

    def computed(self, operations):
        self.calls.append(("computed", operations))

    def barrier(self):
        self.calls.append(("barrier",))

    def wait_for_previous_kernel(self):
        pass

    def let_next_kernel_start(self):
        pass

    def launch(self, jit_fn, grid, args, kwargs):
        launch = self.interpreter.prepare(jit_fn, grid, args, kwargs)
        self.grid = launch.grid
        for z, y, x in itertools.product(*(range(n) for n in reversed(launch.grid))):
            self.index = (x, y, z)
            launch.run()


@pytest.fixture
def port():
    port = SequentialPort()
    with port.interpreter:
        yield port


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits; any NaN equals any NaN."""
    assert got.dtype == want.dtype
    if got.is_floating_point():
        nan = torch.isnan(got.double())
        assert torch.equal(nan, torch.isnan(want.double()))
        got, want = torch.where(nan, 0, bits(got).long()), torch.where(nan, 0, bits(want).long())
    assert torch.equal(got, want)


def patterns(name: str) -> torch.Tensor:
    """Every bit pattern of 8- and 16-bit types (65,536 elements), random ones of the others."""
    dtype = TORCH[name]
    if dtype.itemsize <= 2:
        return torch.arange(65536).to({1: torch.uint8, 2: torch.int16}[dtype.itemsize]).view(dtype)
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (65536 * dtype.itemsize // 4,), generator=generator).to(torch.int32)
    if dtype == torch.float32:
        special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 448.0, 449.0, 65504.0, 65520.0])
        words[: len(special)] = special.view(torch.int32)
        words[1000:30000] = torch.randn(29000, generator=generator).view(torch.int32)
    return words.view(dtype)


@triton.jit
def elementwise(x_ptr, y_ptr, out_ptr, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask)
    y = tl.load(y_ptr + at, mask=mask)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "lt":
        z = x < y
    elif OP == "eq":
        z = x == y
    elif OP == "ne":
        z = x != y
    elif OP == "max":
        z = tl.maximum(x, y)
    elif OP == "min":
        z = tl.minimum(x, y)
    elif OP == "and":
        z = x & y
    elif OP == "xor":
        z = x ^ y
    elif OP == "where":
        z = tl.where(at % 2 == 0, x, y)
    else:
        z = x
    tl.store(out_ptr + at, z, mask=mask)


def apply(op: str, x: torch.Tensor, y: torch.Tensor, out: torch.dtype | None = None) -> torch.Tensor:
    result = torch.empty(x.shape, dtype=out or x.dtype)
    elementwise[(triton.cdiv(x.numel(), 32768),)](x, y, result, x.numel(), op, 32768)
    return result


@pytest.mark.parametrize("name", list(TORCH))
def test_loads_and_stores_keep_every_bit(port, name):
    x = patterns(name)
    assert torch.equal(bits(apply("copy", x, x)), bits(x))
    y = bits(x).flip(0).contiguous().view(x.dtype)
    even = torch.arange(len(x)) % 2 == 0
    assert torch.equal(bits(apply("where", x, y)), torch.where(even, bits(x), bits(y)))


@pytest.mark.parametrize("op", ["add", "sub", "mul", "lt", "eq", "ne", "max", "min"])
@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32", "fp64"])
def test_float_operations(port, name, op):
    x = patterns(name)
    y = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    if op in ("lt", "eq", "ne"):
        assert torch.equal(apply(op, x, y, torch.bool), getattr(torch, op)(x, y))
        return
    wide = torch.float64 if name == "fp64" else torch.float32
    a, b = x.to(wide), y.to(wide)
    want = {"max": torch.maximum, "min": torch.minimum}.get(op, getattr(torch, op))(a, b)
    if op in ("max", "min"):  # not torch.fmax: a signalling NaN wins there
        want = torch.where(a.isnan(), b, torch.where(b.isnan(), a, want))
    want = want.to(x.dtype)
    got = apply(op, x, y)
    if op in ("max", "min"):  # torch does not order the zeros
        got, want = torch.where(got == 0, got.abs(), got), torch.where(want == 0, want.abs(), want)
    assert_same(got, want)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "lt", "max", "and", "xor"])
@pytest.mark.parametrize("name", ["int8", "int16", "int32", "int64", "uint8"])
def test_integer_operations_wrap(port, name, op):
    x = patterns(name)
    y = x.flip(0).contiguous()
    functions = {"max": torch.maximum, "and": torch.bitwise_and, "xor": torch.bitwise_xor}
    want = (functions.get(op) or getattr(torch, op))(x, y)
    assert torch.equal(apply(op, x, y, torch.bool if op == "lt" else None), want)


@triton.jit
def casting(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(out_ptr.dtype.element_ty))


WIDE = ("fp16", "bf16", "fp32")
CASTS = [  # casts that Triton supports on NVIDIA GPUs
    *((name, to) for name in (*WIDE, "int8", "int16", "int32") for to in (*WIDE, "fp64", "int32", "uint8")),
    *((name, to) for name in WIDE for to in ("fp8e4nv", "fp8e5")),
    *((name, to) for name in ("fp8e4nv", "fp8e5") for to in WIDE),
]


def castable(name: str, to: str) -> torch.Tensor:
    """Values of one type that another can hold, if either is an integer."""
    x = patterns(name)
    if "int" in to and x.is_floating_point():
        limit = 2 ** (8 if to == "uint8" else 31) - 129
        x = torch.where((x.float() > -1) & (x.float() < limit), x, torch.zeros_like(x))
    return x


@pytest.mark.parametrize(("name", "to"), CASTS)
def test_casts(port, name, to):
    x = castable(name, to)
    got = torch.empty(x.shape, dtype=TORCH[to])
    casting[(len(x) // 256,)](x, got, 256)
    if name == "int32" and to in ("fp16", "bf16"):  # torch goes through fp32 and rounds twice
        got, x = torch.where(x.abs() < 2**24, got, 0), torch.where(x.abs() < 2**24, x, 0)
    limit = {"fp8e4nv": 448.0, "fp8e5": 57344.0}.get(to)
    assert_same(got, (x if limit is None else x.float().clamp(-limit, limit)).to(TORCH[to]))


def test_fp8_and_integers_do_not_mix(port):
    with pytest.raises(TypeError, match="go through fp32"):
        casting[(1,)](torch.zeros(256, dtype=torch.int32), torch.zeros(256, dtype=torch.float8_e5m2), 256)


@triton.jit
def bitcasting(x_ptr, out_ptr, n: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, n))
    tl.store(out_ptr + tl.arange(0, n), (x.to(tl.int16, bitcast=True) ^ -32768).to(tl.bfloat16, bitcast=True))


def test_bitcasts_reach_the_sign_bit(port):
    x = patterns("bf16")[:1024].contiguous()
    got = torch.empty_like(x)
    bitcasting[(1,)](x, got, 1024)
    assert torch.equal(bits(got), bits(x) ^ -32768)


@triton.jit
def copy_2d(x_ptr, out_ptr, M, N, stride, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    x = tl.load(x_ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=7)
    tl.store(out_ptr + columns[None, :] * M + rows[:, None], x * 2, mask=mask)


def test_masks_and_two_dimensions(port):
    x = torch.randn(37, 50)
    out = torch.full((50, 37), -1.0)
    copy_2d[lambda meta: (triton.cdiv(meta["M"], meta["BM"]), triton.cdiv(meta["N"], meta["BN"]))](
        x, out, 37, 50, 50, BM=16, BN=32
    )
    assert torch.equal(out, 2 * x.T)


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pid = tl.program_id(0)
    m, n = pid // tl.cdiv(N, BN), pid % tl.cdiv(N, BN)
    rows, columns, inner = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        at = k * BK + inner
        a = tl.load(a_ptr + rows[:, None] * K + at[None, :], mask=(rows[:, None] < M) & (at[None, :] < K), other=0.0)
        b = tl.load(
            b_ptr + columns[None, :] * K + at[:, None], mask=(columns[None, :] < N) & (at[:, None] < K), other=0.0
        )
        acc = tl.dot(a, b, acc)
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_matmul(port, dtype):
    M, N, K = 50, 70, 100
    a, b = torch.randn(M, K).to(dtype), torch.randn(N, K).to(dtype)
    c = torch.empty(M, N)
    matmul[(triton.cdiv(M, 32) * triton.cdiv(N, 32),)](a, b, c, M, N, K, 32, 32, 64, num_warps=4, num_stages=3)
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-5, atol=1e-4)


@triton.jit
def descriptor_copy(x, out, BM: tl.constexpr, BN: tl.constexpr):
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    out.store([m, n], x.load([m, n]) + 1)


@triton.jit
def descriptor_made_inside(x_ptr, out_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    out = tl.make_tensor_descriptor(out_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    descriptor_copy(x, out, BM, BN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_descriptors_drop_what_is_out_of_bounds(port, dtype):
    memory = torch.randn(48, 56).mul(10).to(dtype)
    x, out = memory[:40], torch.zeros(48, 56, dtype=dtype)
    descriptor_copy[(2, 2)](
        TensorDescriptor.from_tensor(x, [32, 32]), TensorDescriptor.from_tensor(out[:40], [32, 32]), 32, 32
    )
    assert torch.equal(out[:40], x + 1) and not out[40:].any()
    again = torch.zeros_like(out)
    descriptor_made_inside[(2, 2)](x, again, 40, 56, 32, 32)
    assert torch.equal(again, out)
    assert ("load", "tma") in port.calls and ("store", "tma") in port.calls and ("load", "plain") not in port.calls


@triton.jit
def descriptor_outside(x, out_ptr, row):
    rows, columns = tl.arange(0, 16), tl.arange(0, 16)
    tl.store(out_ptr + rows[:, None] * 16 + columns[None, :], x.load([row, 8]))


def test_loads_out_of_bounds_through_a_descriptor_are_zeros_or_nan(port):
    x = torch.randn(16, 16)
    for padding, fill in (("zero", 0.0), ("nan", float("nan"))):
        out, want = torch.empty(16, 16), torch.full((16, 16), fill)
        want[4:, :8] = x[:12, 8:]
        descriptor_outside[(1,)](TensorDescriptor.from_tensor(x, [16, 16], padding), out, -4)
        torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


class Shape(NamedTuple):
    rows: int
    data: torch.Tensor
    BLOCK: tl.constexpr
    scale: float


@triton.jit
def scaled(x, shape, bias: tl.constexpr = 1):
    return x * shape.scale + bias


@triton.jit
def with_tuple(shape, nested, out_ptr):
    at = tl.arange(0, shape.BLOCK)
    if shape.BLOCK > 8:
        x = tl.load(shape.data + at, mask=at < shape.rows, other=0.0)
    y = scaled(x, shape) + scaled(x, shape, bias=nested[1][0])
    tl.store(out_ptr + at, y)


def test_nested_functions_and_named_tuples(port):
    data, out = torch.randn(16), torch.empty(16)
    with_tuple[(1,)](Shape(10, data, tl.constexpr(16), 2.0), (3, (4, None)), out)
    x = torch.where(torch.arange(16) < 10, data, 0.0)
    assert torch.equal(out, (x * 2 + 1) + (x * 2 + 4))


@triton.jit
def control(out_ptr, n, limit, STEPS: tl.constexpr):
    total = 0
    for i in range(n):
        if i % 2 == 0:
            total += i
        else:
            total -= 1
    for i in tl.range(1, n, 2, num_stages=2):
        total += i * 100
    for i in tl.static_range(STEPS):
        total += i * 10000
    steps = 0
    value = n
    while value < limit and steps < 1000:
        value *= 2
        steps += 1
    backwards = 0
    for i in range(3, 0, -1):
        backwards = backwards * 10 + i
    tl.store(out_ptr, total)
    tl.store(out_ptr + 1, steps)
    tl.store(out_ptr + 2, 1 if not (n > 3 or total == 0) else 0)
    tl.store(out_ptr + 3, min(n, 4) + max(n, 4))
    tl.store(out_ptr + 4, backwards)


def test_loops_and_conditions(port):
    out = torch.zeros(5, dtype=torch.int32)
    control[(1,)](out, 5, 100, 3)
    assert out.tolist() == [(0 + 2 + 4 - 2) + 400 + 30000, 5, 0, 9, 321]


@triton.jit
def bound_is_assigned(out_ptr, STEPS: tl.constexpr):
    steps = STEPS
    for i in tl.static_range(steps):
        tl.store(out_ptr + i, i)


@triton.jit
def bounds_are_assigned_together(out_ptr, STEPS: tl.constexpr):
    first, steps = 0, STEPS
    for i in tl.static_range(0, steps):
        tl.store(out_ptr + i, first)


@pytest.mark.parametrize(
    "kernel", [bound_is_assigned, bounds_are_assigned_together], ids=lambda kernel: kernel.__name__
)
def test_a_bound_of_static_range_that_an_assignment_made_a_tensor_is_refused(port, kernel):
    with pytest.raises(
        Exception, match=r"tl\.static_range: 4 \(int32\) is not a constexpr: .*write `NAME: tl\.constexpr"
    ):
        kernel[(1,)](torch.zeros(4), 4)


@pytest.mark.parametrize(
    "kernel", [bound_is_assigned, bounds_are_assigned_together], ids=lambda kernel: kernel.__name__
)
def test_the_compiler_refuses_such_a_bound_too(kernel):
    with pytest.raises(CompilationError, match="static_range .* is not a constexpr"):
        compiled(kernel, torch.zeros(4), arch="sm_90", STEPS=4)


@triton.jit
def chained(x_ptr, out_ptr, n):
    x = tl.load(x_ptr + tl.arange(0, 8))
    tl.store(out_ptr + tl.arange(0, 8), (1 < x <= n).to(tl.int32))


def test_comparisons_are_chained_elementwise(port):
    x, out = torch.arange(8), torch.zeros(8, dtype=torch.int32)
    chained[(1,)](x, out, 5)
    assert out.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


@triton.jit
def overflowing(out_ptr, n):
    for i in range(n - 1, n):
        tl.store(out_ptr, i * 65536)
        tl.store(out_ptr + 1, i.to(tl.int64) * 65536)
    k = 2147483647
    tl.store(out_ptr + 2, k + 1)


def test_loop_variables_and_numbers_have_32_bits(port):
    out = torch.zeros(3, dtype=torch.int64)
    overflowing[(1,)](out, 65538)
    assert out.tolist() == [65537 * 65536 - 2**32, 65537 * 65536, -(2**31)]


@triton.jit
def short_circuit(x_ptr, out_ptr, n):
    if n > 100 and tl.load(x_ptr) > 0:
        tl.store(out_ptr, 1)


def test_and_does_not_keep_a_tensor_from_being_evaluated(port):
    short_circuit[(1,)](torch.zeros(1), torch.zeros(1), 5)
    assert ("load", "plain") in port.calls and ("store", "plain") not in port.calls


@triton.jit
def block_condition(out_ptr):
    if tl.arange(0, 4) > 1:
        tl.store(out_ptr, 1)


def test_a_block_is_no_condition(port):
    with pytest.raises(ValueError, match="ambiguous"):
        block_condition[(1,)](torch.zeros(1))


@triton.jit
def integer_division(a_ptr, b_ptr, out_ptr, n: tl.constexpr):
    at = tl.arange(0, n)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(out_ptr + at, a // b)
    tl.store(out_ptr + n + at, a % b)
    tl.store(out_ptr + 2 * n + at, a >> 3)
    tl.store(out_ptr + 3 * n + at, (a.to(tl.uint32, bitcast=True) >> 3).to(tl.int32, bitcast=True))
    tl.store(out_ptr + 4 * n + at, (-a) << 2)
    tl.store(out_ptr + 5 * n + at, ~a)


def test_integer_division_and_shifts(port):
    a = torch.tensor([7, -7, 7, -7, 2**31 - 1, -(2**31), 0, 5], dtype=torch.int32)
    b = torch.tensor([2, 2, -2, -2, 3, 3, 5, 7], dtype=torch.int32)
    out = torch.empty(6, 8, dtype=torch.int32)
    integer_division[(1,)](a, b, out, 8)
    logical = torch.tensor([(v % 2**32) >> 3 for v in a.tolist()], dtype=torch.int32)
    assert out[0].tolist() == torch.div(a, b, rounding_mode="trunc").tolist()
    assert out[1].tolist() == torch.fmod(a, b).tolist()
    assert [r.tolist() for r in out[2:]] == [(a >> 3).tolist(), logical.tolist(), (-a << 2).tolist(), (~a).tolist()]


@triton.jit
def reductions(x_ptr, out_ptr, index_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + columns[None, :])
    tl.store(out_ptr + rows, tl.sum(x, axis=1))
    tl.store(out_ptr + M + rows, tl.max(x, axis=1))
    tl.store(out_ptr + 2 * M + rows, x.min(axis=1))
    tl.store(out_ptr + 3 * M + rows, tl.reduce(x, 1, first))
    tl.store(out_ptr + 4 * M + rows, tl.max(x - tl.sum(x, axis=0, keep_dims=True), 1) + tl.sum(x))
    tl.store(index_ptr + rows, tl.argmax(x, 1))
    tl.store(index_ptr + M + rows, tl.argmin(x, axis=1))


@triton.jit
def first(a, b):
    return a


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
def test_reductions(port, dtype):
    x = torch.randint(-64, 64, (8, 32)).to(dtype)
    out, index = torch.empty(5, 8, dtype=dtype), torch.empty(2, 8, dtype=torch.int32)
    reductions[(1,)](x, out, index, 8, 32)
    wide = x.float()
    assert torch.equal(out[0], wide.sum(1).to(dtype))
    assert torch.equal(out[1], x.amax(1)) and torch.equal(out[2], x.amin(1)) and torch.equal(out[3], x[:, 0])
    total = wide.sum().to(dtype)
    shifted = (wide - wide.sum(0, keepdim=True).to(dtype).float()).to(dtype).amax(1)
    # tl.max gives fp32 for 16-bit floats, so the sum with `total` is rounded once, by the store.
    assert torch.equal(out[4], (shifted.float() + total.float()).to(dtype))
    assert torch.equal(x.gather(1, index[:1].T.long())[:, 0], x.amax(1))
    assert [row.index(max(row)) for row in x.tolist()] == index[0].tolist()
    assert [row.index(min(row)) for row in x.tolist()] == index[1].tolist()


@triton.jit
def scans(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.cumsum(x, 0))
    tl.store(out_ptr + N + at, tl.cumsum(x, 0, reverse=True))
    tl.store(out_ptr + 2 * N + at, tl.associative_scan(x, 0, larger))
    tl.store(out_ptr + 3 * N + at, tl.sort(x))
    tl.store(out_ptr + 4 * N + at, tl.flip(x, 0))


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


def test_scans_sort_and_flip(port):
    x = torch.randint(-50, 50, (64,), dtype=torch.int32)
    out = torch.empty(5, 64, dtype=torch.int32)
    scans[(1,)](x, out, 64)
    want = [x.cumsum(0), x.flip(0).cumsum(0).flip(0), x.cummax(0).values, x.sort().values, x.flip(0)]
    assert torch.equal(out, torch.stack([w.int() for w in want]))


@triton.jit
def shapes(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    a, b = x.reshape(N // 2, 2).split()
    joined = tl.join(b, a).reshape(N)
    y = tl.trans(joined.reshape(4, N // 4)).reshape(N) + tl.broadcast_to(x.reshape(1, N), (1, N)).reshape([N])
    tl.store(out_ptr + tl.arange(0, N), y)


def test_shapes(port):
    x, out = torch.randn(32), torch.empty(32)
    shapes[(1,)](x, out, 32)
    assert torch.equal(out, x.reshape(16, 2).flip(1).reshape(4, 8).T.reshape(32) + x)


@triton.jit
def mathematics(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.exp(x))
    tl.store(out_ptr + N + at, tl.log(tl.abs(x)))
    tl.store(out_ptr + 2 * N + at, tl.sqrt(tl.abs(x)))
    tl.store(out_ptr + 3 * N + at, tl.sigmoid(x))
    tl.store(out_ptr + 4 * N + at, tl.softmax(x))
    tl.store(out_ptr + 5 * N + at, tl.fma(x, x, -x))
    tl.store(out_ptr + 6 * N + at, tl.clamp(x, -0.5, 0.5))
    tl.store(out_ptr + 7 * N + at, 1.0 / x)
    tl.store(out_ptr + 8 * N + at, tl.erf(x) + tl.floor(x) + tl.cos(x) + tl.math.rsqrt(tl.abs(x)))


def test_mathematics(port):
    x, out = torch.randn(64), torch.empty(9, 64)
    mathematics[(1,)](x, out, 64)
    fma = (x.double() * x.double() - x.double()).float()
    want = [
        x.exp(), x.abs().log(), x.abs().sqrt(), x.sigmoid(), x.softmax(0), fma,
        x.clamp(-0.5, 0.5), 1 / x, x.erf() + x.floor() + x.cos() + x.abs().rsqrt(),
    ]  # fmt: skip
    torch.testing.assert_close(out, torch.stack(want), rtol=2e-6, atol=2e-6)


@triton.jit
def atomics(p, floats, out_ptr):
    tl.store(out_ptr, tl.atomic_add(p, 5, sem="release", scope="sys"))
    tl.store(out_ptr + 1, tl.atomic_xchg(p, 9, sem="acquire"))
    tl.store(out_ptr + 2, tl.atomic_cas(p, 9, 11, sem="acq_rel", scope="cta"))
    tl.store(out_ptr + 3, tl.atomic_cas(p, 9, 13))
    tl.store(out_ptr + 4, tl.atomic_max(p, 100, sem="relaxed"))
    at = tl.arange(0, 4)
    tl.store(out_ptr + 5 + at, tl.atomic_add(p + 1 + at, at, mask=at != 2))
    tl.atomic_min(p + 1 + at, 1)
    tl.atomic_or(p + 1 + at, 64)
    tl.atomic_and(p + 1 + at, 67)
    tl.atomic_xor(p + 1 + at, 1)
    tl.atomic_add(floats + at, 0.5)
    tl.atomic_max(floats + 2 + at, -3.0)
    tl.atomic_min(floats + 2 + at, 2.0)


def test_atomics(port):
    p = torch.tensor([1, 10, 20, 30, 40], dtype=torch.int32)
    floats = torch.tensor([1.0, 2.0, -5.0, 7.0, -8.0, 1.0])
    out = torch.zeros(9, dtype=torch.int32)
    atomics[(1,)](p, floats, out)
    assert out.tolist() == [1, 6, 9, 11, 11, 10, 20, 0, 40]
    assert p.tolist() == [100, *((1 | 64) & 67 ^ 1 for _ in range(4))]
    assert floats.tolist() == [1.5, 2.5, -3.0, 2.0, -3.0, 1.0]
    assert port.calls[0] == ("atomic", "add", "release", "sys")
    assert ("atomic", "xchg", "acquire", "gpu") in port.calls and ("cas", "acq_rel", "cta") in port.calls
    assert ("cas", "acq_rel", "gpu") in port.calls and ("atomic", "max", "relaxed", "gpu") in port.calls


@triton.jit
def counting(p, N: tl.constexpr):
    tl.debug_barrier()
    tl.atomic_add(p, tl.program_id(0) + 10 * tl.program_id(1) + 100 * tl.num_programs(0))
    while tl.load(p, volatile=True) < 0:
        pass


def test_programs_barriers_and_volatile_loads(port):
    p = torch.zeros(1, dtype=torch.int32)
    counting[(2, 3)](p, 4)
    assert p.item() == sum(x + 10 * y + 200 for x in range(2) for y in range(3))
    assert port.calls.count(("barrier",)) == 6 and ("load", "volatile") in port.calls


@triton.jit
def waiting(signal, value, team):
    tl.static_assert(False, "this word has no body here")
    return value


@triton.jit
def uses_word(signal, out_ptr, team):
    token = waiting(signal + 3, 7, team)
    tl.store(out_ptr, token + team.rows)


def test_words_replace_jit_functions(port):
    seen = []

    def word(signal, value, team):
        seen.append(
            (int(addresses_of(signal)[0]), element_dtype(signal), value_of(value), value_of(team.rows), team.BLOCK)
        )
        assert value_of(tl.load(signal)) == 30 and value_of(scaled(scalar(3, tl.int32), team)) == 7
        assert value_of(block(np.arange(4), tl.int32) + 1).tolist() == [1, 2, 3, 4]
        return scalar(35, tl.int32)

    port.interpreter.replace(waiting, word)
    signal, out = torch.tensor([0, 10, 20, 30], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    uses_word[(1,)](signal, out, Shape(7, signal, tl.constexpr(16), 2.0))
    assert out.item() == 42
    assert seen == [(signal.data_ptr() + 12, tl.int32, 7, 7, 16)]


@tl.core.builtin
def twice(x, _semantic=None):
    return tl.core.add(x, x, _semantic=_semantic)


GLOBAL = tl.constexpr(3)


@triton.constexpr_function
def half(n):
    return n // 2


@triton.jit
def uses_builtin(x_ptr, n, out_ptr, BLOCK: tl.constexpr):
    WIDTH: tl.constexpr = half(BLOCK)
    at = tl.arange(0, WIDTH)
    if tl.target_info.is_cuda():
        tl.static_assert(False)
    tl.store(out_ptr + at, twice(tl.load(x_ptr + at)) * GLOBAL + (GLOBAL - n))


def test_builtins_of_other_modules_and_constexpr_globals(port):
    x, out = torch.randn(8), torch.empty(8)
    uses_builtin[(1,)](x, 1, out, 16)
    assert torch.equal(out, (x + x) * 3 + 2)


@triton.jit
def assembly(out_ptr):
    tl.inline_asm_elementwise("bfind.u32 $0, 5;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def assembly_of_two(out_ptr):
    at = tl.arange(0, 8)
    tl.inline_asm_elementwise("add.u32 $0, $1, $2;", "=r,r,r", [at, 1], dtype=tl.int32, is_pure=True, pack=2)


@pytest.mark.parametrize("kernel", [assembly, assembly_of_two])
def test_inline_assembly_is_refused_by_name(port, kernel):
    with pytest.raises(NotInterpretable, match=r"inline assembly in assembly.*twin"):
        kernel[(1,)](torch.zeros(8))


@triton.jit
def failing(x_ptr, n):
    x = tl.load(x_ptr)
    assert x < n, "too large"
    raises_inside(x)


@triton.jit
def raises_inside(x):
    y = x + 1
    return y.no_such_method()


def test_errors_point_at_the_kernel(port):
    with pytest.raises(AssertionError, match="too large"):
        failing[(1,)](torch.ones(1), 1)
    with pytest.raises(AttributeError) as caught:
        failing[(1,)](torch.zeros(1), 1)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.name, last.line) == (__file__, "raises_inside", "return y.no_such_method()")


@triton.jit
def locating(x_ptr):
    locate(  # a word
        tl.sum(tl.arange(0, 4)),
    )


@triton.jit
def locate(x):
    return x


def test_source_location_names_the_innermost_kernel_line(port):
    seen = []
    port.interpreter.replace(locate, lambda x: seen.append(port.interpreter.frames.source_location()))
    locating[(1,)](torch.zeros(1))
    assert seen == [(__file__, locating.starting_line_number + 2, "locating", "locate(  # a word")]
    assert port.interpreter.frames.source_location() is None


@triton.jit
def stopping(out_ptr, n):
    doubled = n * 2
    breakpoint()
    tl.store(out_ptr, doubled)


def test_breakpoint_stops_in_the_kernel(port, monkeypatch):
    frames = []
    monkeypatch.setattr("sys.breakpointhook", lambda: frames.append(__import__("sys")._getframe(1)))
    out = torch.zeros(1, dtype=torch.int32)
    stopping[(1,)](out, 21)
    assert out.item() == 42 and frames[0].f_code.co_name == "stopping"
    assert value_of(frames[0].f_locals["doubled"]) == 42 and frames[0].f_lineno == stopping.starting_line_number + 4


def test_kernels_may_be_closures(port):
    offset = tl.constexpr(5)

    @triton.jit
    def inner(out_ptr, n):
        tl.store(out_ptr, n + offset)

    out = torch.zeros(1, dtype=torch.int32)
    inner[(1,)](out, 1)
    assert out.item() == 6


@triton.jit
def tricky(
    out_ptr,
    n,
):
    """A docstring that says
    def nonsense(x): and more
    """
    values = [n * k for k in (1, 2, 3)]
    tl.store(out_ptr, values[2])


def test_a_docstring_that_holds_a_def(port):
    out = torch.zeros(1, dtype=torch.int32)
    tricky[(1,)](out, 3)
    assert out.item() == 9


@triton.jit
def every_kind(p, i, big, unsigned, f, b, nothing, fixed: tl.constexpr, typed: tl.int64, default=4):
    tl.static_assert(i.dtype == tl.int32 and big.dtype == tl.int64 and unsigned.dtype == tl.uint64)
    tl.static_assert(f.dtype == tl.float32 and b.dtype == tl.int1 and typed.dtype == tl.int64)
    tl.static_assert(nothing is None and fixed == "text")
    tl.store(p, f * default)


def test_arguments_have_the_types_that_triton_gives_them(port):
    out = torch.zeros(1)
    args = (out, 3, 2**40, 2**63, 0.5, True, None, "text")
    every_kind[(1,)](*args, typed=1, num_warps=8, launch_cooperative_grid=True)
    assert out.item() == 2.0
    launch = port.interpreter.prepare(every_kind, lambda meta: (meta["i"], 2), args, {"typed": 1})
    assert launch.name == "every_kind" and launch.grid == (3, 2, 1) and launch.tensors[0] is out
    for bad, match in (({"typo": 1, "typed": 1}, "typo"), ({}, "typed")):
        with pytest.raises(TypeError, match=match):
            every_kind[(1,)](*args, **bad)


@triton.jit
def through_integers(p, out_ptr, delta):
    moved = tl.multiple_of((p.to(tl.int64) + delta).to(p.dtype), 4)
    tl.store(out_ptr, load_by_name(moved))
    words = moved.to(tl.pointer_type(tl.int16))
    tl.store(out_ptr + 1, tl.load(words + 1).to(tl.int32))
    tl.store(out_ptr + 2, tl.load(p + tl.full((), 1, tl.uint8)) - tl.load(p + 2 - 1))


def test_pointers_go_through_integers(port):
    p, out = torch.tensor([1, 2, 0x30004], dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    through_integers[(1,)](p, out, 8)
    assert out.tolist() == [0x30004, 3, 0]
    with pytest.raises(Misaligned, match=r"multiple_of\(x, 4\)"):
        through_integers[(1,)](p, out, 2)


@triton.jit
def printing(x_ptr, n):
    cuda.gdc_wait()
    tl.device_print("x is", tl.load(x_ptr))
    tl.static_print("static", 3)
    tl.device_assert(n > 3, "n is small")


def test_prints_and_device_asserts(port, capsys):
    x = torch.tensor([7], dtype=torch.int32)
    printing[(1,)](x, 4)
    assert capsys.readouterr().out == "(0, 0, 0) x is: [7]\nstatic 3\n"
    with pytest.raises(AssertionError, match="n is small"):
        printing[(1,)](x, 3)


@triton.jit
def rarities(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.histogram(x, N))
    tl.store(out_ptr + N + at, tl.gather(x, (at + 1) % N, 0))
    tl.store(out_ptr + 2 * N + at, tl.interleave(x.reshape(2, N // 2).trans().split()[0], tl.arange(0, N // 2)))
    tl.store(out_ptr + 3 * N + at, tl.randint(7, at).to(tl.int32, bitcast=True))
    tl.store(out_ptr + 4 * N + at, tl.xor_sum(x, 0) + tl.zeros_like(x))
    tl.store(out_ptr + 5 * N + at, tl.reduce((x, at), 0, keep_later)[1] + tl.cumprod(x * 0 + 2, 0))
    tl.store(out_ptr + 6 * N + at, tl.umulhi(x, x - 7) + tl.where((at > 3) and (at < 6), 1, 0))


@triton.jit
def keep_later(value, index, other_value, other_index):
    """Combine associatively and commutatively, since a GPU's shuffles may swap the operands."""
    later = other_index > index
    return tl.where(later, other_value, value), tl.where(later, other_index, index)


def philox(seed: int, counter: int) -> int:
    c, k = [counter, 0, 0, 0], [seed, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[0]


def test_rarer_functions(port):
    x = torch.randint(-4, 16, (16,), dtype=torch.int32)
    out = torch.empty(7, 16, dtype=torch.int32)
    rarities[(1,)](x, out, 16)
    assert out[0].tolist() == [(x == i).sum().item() for i in range(16)]
    assert torch.equal(out[1], x.roll(-1))
    assert torch.equal(out[2], torch.stack([x[:8], torch.arange(8)], 1).reshape(-1).int())
    assert [v % 2**32 for v in out[3].tolist()] == [philox(7, i) for i in range(16)]
    assert set(out[4].tolist()) == {np.bitwise_xor.reduce(x.numpy())}
    assert out[5].tolist() == [15 + 2 ** (i + 1) for i in range(16)]
    high = [((v % 2**32) * ((v - 7) % 2**32)) >> 32 for v in x.tolist()]
    assert [v % 2**32 for v in out[6].tolist()] == [(h + (3 < i < 6)) % 2**32 for i, h in enumerate(high)]


@triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"])})
@triton.jit
def heuristic(out_ptr, n, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), n, mask=tl.arange(0, BLOCK) < n)


def test_heuristics(port):
    out = torch.zeros(8, dtype=torch.int32)
    heuristic[(1,)](out, 5)
    assert out.tolist() == [5] * 5 + [0] * 3


def all_but_four(configs, named, **_):
    return [config for config in configs if config.kwargs["BLOCK"] != 4]


@triton.autotune(
    [triton.Config({"BLOCK": size}) for size in (4, 8, 2)], ["n"], prune_configs_by={"early_config_prune": all_but_four}
)
@triton.heuristics({"TWICE": lambda args: args["n"] > 2})
@triton.jit
def tuned(out_ptr, n, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + at, BLOCK * (1 + TWICE), mask=at < n)


def test_an_autotuned_kernel_runs_once_with_the_first_configuration_that_is_left(port):
    out = torch.zeros(16, dtype=torch.int32)
    tuned[lambda meta: (triton.cdiv(12, meta["BLOCK"]),)](out, 12)
    assert out.tolist() == [16] * 12 + [0] * 4 and tuned.best_config.kwargs == {"BLOCK": 8}


@triton.autotune([triton.Config({"BLOCK": size}) for size in (4, 8, 2)], ["n"], reset_to_zero=["out_ptr"])
@triton.jit
def of_eight(out_ptr, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 8, "eight at a time")
    tl.atomic_add(out_ptr + tl.arange(0, BLOCK), n)


def test_a_configuration_that_does_not_compile_is_passed_over(port):
    out = torch.ones(8, dtype=torch.int32)
    for total in (5, 10):  # zeroed before the key's first launch only
        of_eight[(1,)](out, 5)
        assert out.tolist() == [total] * 8
    assert list(of_eight.cache) == [(5, "torch.int32")] and of_eight.best_config.kwargs == {"BLOCK": 8}
    none_left = triton.autotune([triton.Config({"BLOCK": size}) for size in (4, 2)], ["n"])(of_eight.fn)
    with pytest.raises(AssertionError, match="eight at a time"):
        none_left[(1,)](out, 5)
    assert not none_left.cache


def test_a_single_configuration_is_not_pruned(port):
    only = triton.autotune(
        [triton.Config({"BLOCK": 8})], ["n"], prune_configs_by={"early_config_prune": lambda *_, **__: []}
    )(of_eight.fn)
    out = torch.zeros(8, dtype=torch.int32)
    only[(1,)](out, 5)
    assert out.tolist() == [5] * 8


def test_a_launch_and_a_warm_up_give_a_compiled_kernel(port):
    out = torch.zeros(8, dtype=torch.int32)
    made = heuristic.fn.warmup(out, 3, BLOCK=8, num_warps=8, grid=(1,))
    made._init_handles()
    assert out.tolist() == [0] * 8 and made.n_regs == 255 and made.n_spills == 0 and made.metadata.num_warps == 8
    assert 228 * 1024 // made.metadata.shared > 0
    assert heuristic.fn.warmup(out, 3, BLOCK=8, num_warps=32, grid=(1,)).n_regs == 64
    launched = made[(1, 1, 1)](out, 3, 8)
    assert out.tolist() == [3] * 3 + [0] * 5 and launched.n_regs == made.n_regs
    with pytest.raises(NotInterpretable, match="assembly of kernel heuristic .asm. is not there"):
        launched.asm  # noqa: B018


def test_builtins_imported_in_one_scope_run_in_a_later_one_and_compile_after_it():
    with SequentialPort().interpreter:
        from triton.language import where
        from triton.language.math import rsqrt

    @triton.jit
    def inverse(x_ptr, out_ptr):
        at = tl.arange(0, 4)
        tl.store(out_ptr + at, where(at < 3, rsqrt(tl.load(x_ptr + at)), 7.0))

    x, out = torch.tensor([1.0, 4.0, 16.0, 64.0]), torch.zeros(4)
    with SequentialPort().interpreter:
        inverse[(1,)](x, out)
    assert out.tolist() == [1.0, 0.5, 0.25, 7.0]
    assert "rsqrt.approx" in compiled(inverse, x, out, arch="sm_90").asm["ptx"]


@triton.jit
def recursive(n, LEVEL: tl.constexpr):
    if LEVEL > 0:
        return recursive(n + 1, LEVEL - 1)
    return n


@triton.jit
def calls_itself(out_ptr, n, WHICH: tl.constexpr):
    x = 1 if WHICH else n
    x += recursive(n, 3) if not WHICH else 0
    tl.store(out_ptr, x)


def test_recursion_over_constants(port):
    out = torch.zeros(1, dtype=torch.int32)
    calls_itself[(1,)](out, 10, False)
    assert out.item() == 23


@triton.jit
def through_block_pointers(x_ptr, out_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (M, N), (N, 1), (0, 0), (BM, BN), (1, 0))
    out = tl.make_block_ptr(out_ptr, (M, N), (N, 1), (0, 0), (BM, BN), (1, 0))
    for _ in range(0, N, BN):
        tl.store(out, tl.load(x, boundary_check=(0, 1), padding_option="zero") + 1, boundary_check=(0, 1))
        x, out = tl.advance(x, (0, BN)), tl.advance(out, (0, BN))


@pytest.mark.skipif(triton.__version__ >= "3.9", reason="Triton 3.9 has no block pointers")
@pytest.mark.filterwarnings("ignore:.*make_block_ptr")
def test_block_pointers(port):
    x, out = torch.randn(20, 40), torch.zeros(20, 40)
    through_block_pointers[(1,)](x, out, 20, 40, 32, 16)
    assert torch.equal(out, x + 1)


@tl.core._aggregate
class Pair:
    a: tl.tensor
    b: tl.tensor

    def __init__(self, a, b):
        self.a = a
        self.b = b

    @triton.jit
    def total(self):
        return self.a + self.b


@triton.jit
def uses_aggregate(out_ptr, n):
    tl.store(out_ptr, Pair(n, n * 2).total())


@pytest.mark.skipif(triton.__version__ < "3.8", reason="aggregates before Triton 3.8 take no annotations as strings")
def test_aggregates_with_jit_methods(port):
    out = torch.zeros(1, dtype=torch.int32)
    uses_aggregate[(1,)](out, 5)
    assert out.item() == 15


@triton.jit
def constant_pointer(p: tl.const, out_ptr):
    tl.store(out_ptr, tl.load(p))
    tl.store(p, 1)


def test_stores_to_constant_pointers_are_refused(port):
    out = torch.zeros(1)
    with pytest.raises(ValueError, match="constant"):
        constant_pointer[(1,)](torch.full((1,), 3.0), out)
    assert out.item() == 3.0


def here_and_on_the_gpu(kernel, grid, *args) -> None:
    """Run a kernel compiled and interpreted; all tensors must hold the same bits afterwards."""
    there = [arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args]
    kernel[grid](*there)
    port = SequentialPort()
    with port.interpreter:
        kernel[grid](*args)
    for mine, theirs in zip(args, there, strict=True):
        if isinstance(mine, torch.Tensor):
            assert_same(mine, theirs.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["copy", "where", "add", "sub", "mul", "lt", "eq", "ne", "max", "min", "and", "xor"])
@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32", "fp64", "int8", "int16", "int32", "int64", "uint8"])
def test_gpu_elementwise(name, op):
    x = patterns(name)
    if op in ("and", "xor") and x.is_floating_point():
        pytest.skip("integers only")
    y = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    out = torch.zeros(x.shape, dtype=torch.bool if op in ("lt", "eq", "ne") else x.dtype)
    here_and_on_the_gpu(elementwise, (64,), x, y, out, x.numel(), op, 1024)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "to"), CASTS)
def test_gpu_casts(name, to):
    x = patterns(name)
    if (name, to) == ("fp8e5", "bf16"):  # Triton makes 65536 and more of infinity and NaN there; here they stay
        x = x[torch.isfinite(x.float())][: 65536 * 7 // 8]
    if (
        to == "uint8" and x.is_floating_point()
    ):  # past its range LLVM's fptoui is undefined: a byte spills into the next
        x = torch.where(x.float() < 256, x.float(), 0.0).to(x.dtype)
    here_and_on_the_gpu(casting, (len(x) // 256,), x, torch.zeros(x.shape, dtype=TORCH[to]), 256)


@pytest.mark.gpu
def test_gpu_integers_shapes_and_order():
    x = torch.randint(-50, 50, (64,), dtype=torch.int32)
    a = torch.tensor([7, -7, 7, -7, 2**31 - 1, -(2**31), 0, 5], dtype=torch.int32)
    b = torch.tensor([2, 2, -2, -2, 3, 3, 5, 7], dtype=torch.int32)
    here_and_on_the_gpu(integer_division, (1,), a, b, torch.zeros(6, 8, dtype=torch.int32), 8)
    here_and_on_the_gpu(scans, (1,), x, torch.zeros(5, 64, dtype=torch.int32), 64)
    # Within the bins: Triton does not define a histogram of other values.
    here_and_on_the_gpu(rarities, (1,), x[:16].abs() % 16, torch.zeros(7, 16, dtype=torch.int32), 16)
    here_and_on_the_gpu(shapes, (1,), torch.randn(32), torch.zeros(32), 32)
    here_and_on_the_gpu(overflowing, (1,), torch.zeros(3, dtype=torch.int64), 65538)
    here_and_on_the_gpu(control, (1,), torch.zeros(5, dtype=torch.int32), 5, 100, 3)
    here_and_on_the_gpu(bitcasting, (1,), patterns("bf16")[:1024].contiguous(), torch.zeros(1024).bfloat16(), 1024)


def snapshot() -> dict:
    owners = [tl, tl.core, tl.math, tl.standard, tl.target_info, tl.tensor, tl.constexpr, tl.dtype, tl.pointer_type]
    owners += [tl.block_type, tl.core.tensor_descriptor_base, tl.core.tensor_descriptor, JITFunction]
    return {(id(owner), name): value for owner in owners for name, value in vars(owner).items()}


def test_everything_is_restored_even_after_an_exception():
    before = snapshot()
    names = set(globals())
    port = SequentialPort()
    with pytest.raises(ValueError, match="ambiguous"), port.interpreter:
        assert snapshot() != before
        with pytest.raises(RuntimeError, match="simulates kernels already"):
            Interpreter(port).__enter__()
        block_condition[(1,)](torch.zeros(1))
    after = snapshot()
    assert after.keys() == before.keys() and all(after[k] is before[k] for k in before)
    assert set(globals()) == names
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        scaled(1, 2)
    with port.interpreter:  # it can be entered again
        x = torch.ones(16)
        assert torch.equal(apply("add", x, x), x + x)


def test_numbers_of_values():
    assert module.value_of(tl.constexpr(3)) == 3 and value_of(4) == 4
