"""What tests of GEMMs with quantized weights share."""

import torch

import weft
from tests.ops.checking import assert_close, assert_identical, check, inputs_of
from weft import ops
from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.operands import ScaledMatrix
from weft.ops.gemm.matmul import MATMUL
from weft.ops.gemm.matmul_silu_mul import MATMUL_SILU_MUL
from weft.runtime.capabilities import Capabilities

H200 = Capabilities(device_name="NVIDIA H200", arch="sm_90", sms=132, memory_bytes=0, peer_access=(True,))


def alone(main):
    return weft.simulate(lambda team: main(), 1)[0]


def close(out, expected, K, what):
    assert_close(out, expected, K, by_row=True, what=what)


def check_ops(x, weight, expected, what, **after_norm):
    """Check all ops of one shape against the product in fp64. after_norm: how exact the product of normed rows is."""
    M, K = x.shape
    out = ops.matmul(x, weight)
    assert out.dtype == x.dtype and out.is_contiguous()
    close(out, expected, K, what)
    parts = ops.matmul_parts(x, weight)
    close(parts if parts.dim() == 2 else parts.sum(0).to(x.dtype), expected, K, f"{what} in parts")
    squares = torch.rand(M, 3)
    factor = (squares.double().sum(1, keepdim=True) + 1e-6).rsqrt()
    normed = ops.matmul(DeferredNorm(x, squares, 1e-6), weight)
    assert_close(normed, expected * factor, K, by_row=True, what=f"{what} after a norm", **after_norm)
    gate, up = expected.chunk(2, 1)
    gated = torch.nn.functional.silu(gate) * up
    assert_close(ops.matmul_silu_mul(x, weight), gated, 16 * K, partials=2, by_row=True, what=f"{what} gated")


def check_rows_alone(by_design, designs, x, weight):
    """AssertionError unless rows of the result do not depend on the other rows of ``x``, of 20."""
    for design in designs:
        out = by_design(design, ScaledMatrix(x), weight)
        for rows in (slice(0, 1), slice(7, 19)):
            assert_identical(by_design(design, ScaledMatrix(x[rows]), weight), out[rows], what=f"{design} {rows}")


def check_compiled(x, up, down):
    """An MLP of both weights compiles into one graph, and gives the same bits."""
    mlp = torch.compile(
        lambda x, up, down: ops.matmul(ops.matmul_silu_mul(x, up), down), fullgraph=True, backend="aot_eager"
    )
    assert_identical(mlp(x, up, down), ops.matmul(ops.matmul_silu_mul(x, up), down))


def cases_that_fail(is_of):
    """Cases of matmul and matmul_silu_mul by weft's kernel that fail, of those that ``is_of`` names."""
    failing = []
    for op in (MATMUL, MATMUL_SILU_MUL):
        for case in op.cases():
            if is_of(case) and case.design != "cublas":
                inputs = inputs_of(case, 0)
                try:
                    check(case, 0, [inputs], op.call(case, None, *inputs))
                except (AssertionError, weft.errors.InvalidAccess):
                    failing.append(str(case))
    return failing
