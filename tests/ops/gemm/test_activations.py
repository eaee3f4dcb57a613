"""matmul_silu_mul with another activation than silu: quantized weights, planted bugs, code of each target."""

import pytest
import torch

import weft
from tests.compiling import SHARED, TARGETS, compiled, stack_bytes
from tests.ops.checking import assert_identical
from tests.ops.gemm.test_small_m import capabilities_of
from tests.ops.layer_cases import check_refused, mutated
from weft import ops
from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.four_bit import int4, mxfp4
from weft.kernels.fp8 import quantized_weight
from weft.kernels.gemm_tile import Sizes
from weft.kernels.operands import RowScales, ScaledMatrix, descriptor_or_self
from weft.ops.case import BF16
from weft.ops.gemm import small_m
from weft.ops.gemm.gemm_cases import SMALL_M
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.matmul_silu_mul import MATMUL_SILU_MUL
from weft.plan.planned import machine
from weft.runtime.capabilities import launch_options

GELU = {"activation": "gelu_tanh"}


def operands(M=5, N=48, K=256):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).to(BF16) for shape in ((M, K), (2 * N, K)))
    return x, weight / 16


def exact(x, weight):
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def alone(main):
    weft.simulate(lambda team: main(), 1)


def test_of_a_quantized_weight_it_is_matmul_then_silu_mul():
    def main():
        x, weight = operands()
        for quantized in (quantized_weight(weight, "block"), mxfp4(weight), int4(weight)):
            expected = ops.silu_mul(ops.matmul(x, quantized), **GELU)
            assert_identical(ops.matmul_silu_mul(x, quantized, **GELU), expected, what=type(quantized).__name__)
        weight = quantized_weight(weight, "block")
        rows = ops.matmul_silu_mul(x, weight, fp8=weight.row_format, **GELU)
        again = ops.silu_mul(ops.matmul(x, weight), fp8=weight.row_format, **GELU)
        assert_identical(rows.data.view(torch.uint8), again.data.view(torch.uint8), what="rows in fp8")

    alone(main)


def test_a_deferred_rms_scale_comes_before_the_activation():
    def main():
        x, weight = operands()
        squares = x.float().square().mean(1, keepdim=True)
        expected = exact(x.double() * (squares.double() + 1e-6).rsqrt(), weight)
        found = ops.matmul_silu_mul(DeferredNorm(x, squares, 1e-6), weight, **GELU)
        assert (found.double() - expected).abs().max() < 0.05

    alone(main)


def test_wrong_arguments_are_refused():
    x, weight = operands()
    message = "matmul_silu_mul: activation='gelu' is not one of 'silu', 'gelu_tanh'; did you mean gelu_tanh?"
    check_refused(lambda: ops.matmul_silu_mul(x, weight, activation="gelu"), (), message)
    format = quantized_weight(weight, "block").row_format
    message = "matmul_silu_mul: fp8 with a weight that is no Fp8; leave fp8 out"
    check_refused(lambda: ops.matmul_silu_mul(x, mxfp4(weight), fp8=format, **GELU), (), message)


# Where the small-M kernel applies the activation: of whole tiles, and of sums of split-K partials.
MUTANTS = {
    "tiles": ("gated_by(acc, up, ACTIVATION)", 'gated_by(acc, up, "silu")'),
    "partials": ("gated_by(total, up, ACTIVATION)", 'gated_by(total, up, "silu")'),
}


@pytest.mark.parametrize("name", [None, *MUTANTS])
def test_a_planted_bug_is_far_beyond_the_tolerance(name, tmp_path):
    old, new = MUTANTS.get(name, ("gated_by(acc, up, ACTIVATION)", ""))
    kernel = mutated(small_m, old, new, f"small_m_gelu_{name}", tmp_path)
    x, weight = operands()

    def main():
        errors = {}
        for design in SMALL_M:
            out = kernel.run(ScaledMatrix(x), weight, design, **GELU)
            error = (out.double() - exact(x, weight)).abs().mean() / exact(x, weight).abs().mean()
            errors[design.partials > 1] = max(errors.get(design.partials > 1, 0), float(error))
        assert errors.keys() == {False, True}
        assert (errors[False] > 0.05) == (name == "tiles")
        assert (errors[True] > 0.05) == (name == "partials")

    alone(main)


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles_and_fits(arch, tmp_path):
    caps, N, K = capabilities_of(arch), 21504, 5376
    for M in (1, 32):
        design = MATMUL_SILU_MUL.plan(GemmCall(M, N, K, BF16, design="small_m"), machine(caps, 1)).design
        x = torch.zeros((64, 64), dtype=BF16)
        rows, weight = (
            descriptor_or_self(x, block, design.block_k, True) for block in (design.block_m, design.block_n)
        )
        kernel = compiled(
            small_m.small_m_kernel, rows, weight, x, x, M, Sizes(N, K, K, K), 1, design.ahead,
            RowScales(torch.zeros(8), 1e-6), small_m.block_of(design), None, None, None, None, arch=arch, SQUARES=20,
            **small_m.constants(design, True, "gelu_tanh"), **launch_options(caps),
        )  # fmt: skip
        assert kernel.metadata.shared <= SHARED[arch], design
        if arch.startswith("sm_"):
            assert stack_bytes(kernel, tmp_path) == 0, design
