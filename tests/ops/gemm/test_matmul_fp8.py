"""GEMMs with fp8 weights: forms of scales, planted mistakes, refused arguments, machine code."""

import itertools
from dataclasses import replace

import pytest
import torch
import triton.language as tl

from tests.compiling import SHARED, compiled, stack_bytes
from tests.ops.checking import assert_close, assert_identical, check, inputs_of
from tests.ops.gemm.quantized import (
    H200,
    alone,
    cases_that_fail,
    check_compiled,
    check_ops,
    check_rows_alone,
    close,
)
from tests.ops.layer_cases import DEVICES, everywhere, mutated
from tests.sampled import sampled
from weft import ops
from weft.kernels import fp8_tile
from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.fp8 import E4M3, Fp8, RowFormat, by_torch, quantized_weight, rows_argument
from weft.kernels.fp8_tile import Fp8Scales
from weft.kernels.gemm_tile import Sizes
from weft.kernels.operands import RowScales, ScaledMatrix, descriptor_or_self
from weft.ops.case import BF16, FP16, FP32
from weft.ops.gemm import fp8_operands, matmul_fp8, small_m
from weft.ops.gemm.fp8_operands import by_design
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.matmul import MATMUL
from weft.ops.gemm.matmul_silu_mul import MATMUL_SILU_MUL
from weft.ops.gemm.small_m_rule import SmallM
from weft.plan.planned import machine
from weft.runtime.capabilities import launch_options

SCHEMES = ("block", "channel", "tensor")
# Ragged in every dimension; K and N beyond one block of 128, and in one.
SHAPES = ((5, 48, 272), (3, 200, 136), (33, 80, 400), (1, 24, 96))
DESIGNS = (
    SmallM(block_m=16, block_n=64, block_k=128, transposed=True, partials=2),
    SmallM(block_m=32, block_n=16, block_k=32),
    SmallM(block_m=16, block_n=256, block_k=64, transposed=True, ahead=128),
)


def operands(M, N, K, scheme, dtype=BF16, seed=0):
    """Rows of very different sizes, and a weight whose blocks are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((M, K), generator=generator) * 2.0 ** torch.randint(-6, 6, (M, 1), generator=generator)
    weight = (
        torch.randn((N, K), generator=generator)
        * 2.0 ** torch.randint(-6, 6, (-(-N // 16), 1), generator=generator)[:, :].repeat_interleave(16, 0)[:N]
    )
    return x.to(dtype), quantized_weight(weight, scheme)


def rows_of(x, weight):
    """``x`` as the weight's scales ask for it."""
    if weight.input_scale is not None:
        return Fp8((x.float() * (1 / weight.input_scale)).clamp(-448, 448).to(E4M3), weight.input_scale)
    return Fp8(*by_torch(x, 128 if weight.scales.shape[1] > 1 else x.shape[1]))


def reference(x, weight):
    """The product in fp64, by the definition: every byte times its scale."""
    rows = x if isinstance(x, Fp8) else rows_of(x, weight)
    (M, K), N = rows.shape, weight.shape[0]
    at_m, at_n, at_k = (torch.arange(size) for size in (M, N, K))
    of_rows = rows.scales[at_m.clamp(max=len(rows.scales) - 1)][
        :, at_k // 128 if rows.scales.shape[1] > 1 else at_k * 0
    ]
    down, across = (step_of(size, count) for size, count in zip((N, K), weight.scales.shape, strict=True))
    of_weight = weight.scales[at_n // down][:, at_k // across]
    return (rows.data.double() * of_rows) @ (weight.data.double() * of_weight).T


def step_of(size, count):
    """Rows or columns of a scale."""
    return next(step for step in (size, 128, 64, 32, 16, 8, 4, 2, 1) if -(-size // step) == count)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("design", DESIGNS, ids=range(len(DESIGNS)))
def test_every_form_of_scales_in_the_kernel(design, scheme):
    def main():
        for seed, (M, N, K) in enumerate(SHAPES):
            x, weight = operands(M, N, K, scheme, seed=seed)
            out, what = by_design(design, ScaledMatrix(x), weight), f"{M}x{N}x{K}"
            close(out, reference(x, weight), K, what)
            assert_identical(
                by_design(design, ScaledMatrix(rows_of(x, weight)), weight), out, what=f"{what} of fp8 rows"
            )

    alone(main)


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    sampled(itertools.product(SCHEMES, (BF16, FP16)), lambda scheme, dtype: (dtype == FP16) is (scheme == "channel")),
    ids=str,
)
def test_ops_of_any_shape(scheme, dtype):
    def main():
        for M, N, K in (*SHAPES, (150, 64, 256), (4, 34, 141)):
            x, weight = operands(M, N, K, scheme, dtype)
            if dtype == FP16:
                x = x / 64
            check_ops(x, weight, reference(x, weight), f"{M}x{N}x{K}")

    alone(main)


def test_blocks_that_a_rank_cuts():
    """A scale that is repeated: the shard's dequantized weight is that of the whole."""

    def main():
        x, whole = operands(6, 384, 512, "block")
        wide = whole.dequantized(FP32)
        everything = slice(None)
        shards = {
            "rows from 64 on": (slice(64, 256), everything, whole.scales.repeat_interleave(2, 0)[1:4]),
            "columns from 192 on": (everything, slice(192, 384), whole.scales.repeat_interleave(2, 1)[:, 3:6]),
            "a scale for each row": (slice(5, 200), everything, whole.scales.repeat_interleave(128, 0)[5:200]),
        }
        for name, (rows, columns, scales) in shards.items():
            shard = Fp8(whole.data[rows, columns].contiguous(), scales.contiguous())
            assert_identical(shard.dequantized(FP32), wide[rows, columns], what=name)
            of = x[:, columns].contiguous()
            close(ops.matmul(of, shard), reference(of, shard), of.shape[1], name)
            for design in DESIGNS[1:]:
                close(by_design(design, ScaledMatrix(of), shard), reference(of, shard), of.shape[1], f"{name} {design}")

    alone(main)


def test_static_scales():
    def main():
        x, weight = operands(5, 48, 272, "tensor")
        for scale in (0.01, 30.0):  # some rows saturate, some vanish
            static = weight._replace(input_scale=torch.tensor([[scale]]))
            close(ops.matmul(x, static), reference(x, static), 272, f"scale {scale}")

    alone(main)


def test_a_row_is_the_same_alone_and_among_others():
    def main():
        x, weight = operands(20, 48, 272, "block")
        check_rows_alone(by_design, DESIGNS, x, weight)

    alone(main)


def test_compiles_without_a_graph_break():
    def main():
        x, up = operands(6, 48, 256, "block")
        _, down = operands(6, 32, 24, "channel")
        check_compiled(x, up, down)

    alone(main)
    torch._dynamo.reset()


# --- planted mistakes ---------------------------------------------------------------------------------------------------

MUTANTS = {
    "the block of the neighbour's columns": ("source += k // fp8.columns", "source += tl.maximum(k // fp8.columns - 1, 0)"),
    "the block of the first rows": ("source += first // fp8.weight_rows * fp8.weight_row", "source += 0"),
    "scales of the weight transposed": (
        "source + n // fp8.weight_rows * fp8.weight_row", "source + n // fp8.weight_rows"),
    "scales of the rows transposed": (
        "rows * fp8.x_row + k // 128 * fp8.x_column", "rows * fp8.x_column + k // 128 * fp8.x_row"),
    "scales one token off": ("fp8.x + rows * fp8.x_row", "fp8.x + tl.minimum(rows + 1, M - 1) * fp8.x_row"),
    "scales of the step before": ("            scales = next_scales", "            pass"),
    "scales of the step after": ("N, start, BLOCK_N, GATED)", "N, start + 128, BLOCK_N, GATED)"),
    "second scales of the step before": ("second = next_second", "pass"),
    "the first step twice": ("column, k + 128, second, acc", "column, k, second, acc"),
    "gate's scales for up": ("of_up = weight_scales(fp8, N + column", "of_up = weight_scales(fp8, column"),
    "one scale for up's tile": ("tl.arange(0, acc.shape[0]) < under_low", "tl.arange(0, acc.shape[0]) >= 0"),
    "up's second scale a row late": (" * fp8.weight_rows - first", " * fp8.weight_rows - first + 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_the_cases_catch_a_planted_mistake(name, tmp_path, monkeypatch):
    mutant = mutated(fp8_tile, *MUTANTS[name], f"fp8_mutant_{len(name)}", tmp_path)
    monkeypatch.setattr(small_m, "fp8_tile", mutant.fp8_tile)
    assert alone(lambda: cases_that_fail(lambda case: case.field("block_fp8")))


def test_the_cases_catch_rows_with_the_scales_of_the_call_before(monkeypatch):
    """Stale scales: new bytes beside what the buffer of scales held."""
    kept = []

    def stale(weight, x, caps):
        rows = quantized(weight, x, caps)
        kept.append(rows.scales)
        return rows._replace(scales=torch.full_like(rows.scales, 0.01))

    quantized = fp8_operands.quantized_for
    monkeypatch.setattr(fp8_operands, "quantized_for", stale)

    def main():
        case = next(case for case in MATMUL.cases() if case.field("block_fp8"))
        inputs = inputs_of(case, 0)
        with pytest.raises(AssertionError):
            check(case, 0, [inputs], MATMUL.call(case, None, *inputs))

    alone(main)
    assert kept


# --- refused arguments --------------------------------------------------------------------------------------------------


def weight_of(N, K, scales, **fields):
    return Fp8(torch.zeros(N, K).to(E4M3), torch.ones(scales), **fields)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.matmul(torch.ones(2, 256), weight_of(4, 256, (1, 2))), r"x.dtype=torch.float32 is not one of float16"),
        (lambda: ops.matmul(torch.ones(2, 128).half(), weight_of(4, 256, (1, 2))), r"x has K=128 columns and weight has 256"),
        (lambda: ops.matmul(torch.ones(2, 256).half(), weight_of(300, 256, (2, 2))), r"scales has shape \(2, 2\).*300 x 256"),
        (lambda: ops.matmul(torch.ones(2, 256).half(), weight_of(4, 256, (1, 256))), r"scales has shape \(1, 256\)"),
        (
            lambda: ops.matmul(torch.ones(2, 256).half(), Fp8(torch.zeros(4, 256), torch.ones(1, 2))),
            "weight.dtype=torch.float32 is not one of float8_e4m3fn",
        ),
        (
            lambda: ops.matmul(torch.ones(2, 256).half(), Fp8(torch.zeros(4, 256).to(E4M3), torch.ones(1, 2).half())),
            r"weight.scales is torch.float16 \(1, 2\)",
        ),
        (
            lambda: ops.matmul(Fp8(torch.zeros(2, 256).to(E4M3), torch.ones(2, 1)), weight_of(4, 256, (1, 2))),
            r"x.scales has shape \(2, 1\).*asks for \[2, 2\]",
        ),
        (lambda: ops.matmul(torch.ones(2, 256).half(), weight_of(4, 256, (1, 2))._replace(data=None)), "weight.data=None"),
        (lambda: ops.matmul(torch.ones(2, 256).half(), weight_of(4, 256, (1, 2))._replace(scales=None)), "weight.scales=None"),
        (lambda: ops.matmul_silu_mul(torch.ones(2, 256).half(), weight_of(5, 256, (1, 2))), r"5 rows, an odd number"),
        (
            lambda: ops.matmul(torch.ones(2, 256).half(), weight_of(4, 256, (1, 2), input_scale=torch.ones(1, 1))),
            r"input_scale.*no scales for blocks",
        ),
        (lambda: ops.matmul_parts(torch.ones(256).half(), weight_of(4, 256, (1, 2))), r"x has shape \(256,\)"),
        (
            lambda: ops.matmul(DeferredNorm(torch.ones(2, 256).half(), torch.ones(3, 1), 0.0), weight_of(4, 256, (1, 2))),
            r"squares is torch.float32 \(3, 1\)",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_refused_where_triton_has_no_e4m3(monkeypatch):
    monkeypatch.setattr(matmul_fp8, "capabilities_of", lambda device: replace(H200, arch="sm_80"))
    x, weight = operands(2, 16, 256, "block")
    with pytest.raises(ValueError, match="sm_80, which has no conversion"):
        ops.matmul(x, weight)


def test_there_is_no_backward():
    def main():
        x, weight = operands(2, 16, 256, "block")
        with pytest.raises(RuntimeError, match="no backward"):
            ops.matmul(x.requires_grad_(), weight).sum().backward()

    alone(main)


# --- plans and machine code ---------------------------------------------------------------------------------------------


def test_which_design_an_fp8_weight_gets():
    for op, M, N, K, fields, name in (
        (MATMUL, 1, 25600, 5120, {}, "small_m"),
        (MATMUL, 64, 25600, 5120, {}, "small_m"),
        (MATMUL, 128, 25600, 5120, {}, "cublas"),
        (MATMUL, 128, 5120, 12800, {}, "small_m"),
        (MATMUL, 129, 5120, 12800, {}, "cublas"),
        (MATMUL_SILU_MUL, 128, 12800, 5120, {}, "cublas"),
        (MATMUL_SILU_MUL, 1919, 2880, 2880, {}, "cublas"),
        (MATMUL, 4096, 5120, 4096, {"aligned": False}, "small_m"),  # blocks that cuBLAS does not take
    ):
        planned = op.plan(GemmCall(M, N, K, BF16, block_fp8=True, **fields), machine(H200, 1))
        assert planned.name == name, (M, N, K, planned.reason)
    for K, taken in ((6400, True), (6464, True), (6432, False)):  # 50 groups, and a half or a quarter of one
        weight = Fp8(torch.zeros(256, K).to(E4M3), torch.ones(2, -(-K // 128)))
        assert fp8_operands.suits_cublas(weight) == taken
        assert MATMUL.call_of((4096, 256, K), BF16, machine(H200, 1), block_fp8=True).aligned == taken
    planned = MATMUL.plan(GemmCall(4096, 5120, 4096, FP16, channel_fp8=True), machine(H200, 1))
    assert planned.name == "small_m" and "bfloat16" in planned.reason


@pytest.mark.parametrize(("M", "N", "K", "gated", "rows"), [
    (1, 25600, 5120, False, False), (16, 12800, 5120, True, False), (64, 25600, 5120, False, False),
    (128, 5120, 12800, False, False), (4096, 5120, 4096, False, False), (1, 12800, 5120, True, True),
    (32, 12800, 5120, True, True),
])  # fmt: skip
def test_on_sm_90_without_spills_by_fp8_instructions(M, N, K, gated, rows, tmp_path):
    call = GemmCall(M, N, K, BF16, block_fp8=True, fp8_rows=rows, design="small_m")
    design = (MATMUL_SILU_MUL if gated else MATMUL).plan(call, machine(H200, 1)).design
    x, scales = torch.zeros((64, 64)).to(E4M3), torch.zeros(64)
    out = torch.zeros(8) if design.partials > 1 else torch.zeros(8, dtype=BF16)
    forms, written = map(tl.constexpr, (128, 128, N % 128 == 0)), None
    if rows:
        assert small_m.writes(design, K, RowFormat("group")) and design.partials == 1
        out, written = x, rows_argument(torch.zeros(100, 64).t(), RowFormat("group"), BF16, 128)
    kernel = compiled(
        small_m.small_m_kernel, *(descriptor_or_self(x, size, 128, True) for size in (design.block_m, design.block_n)),
        x, out, M, Sizes(N, K, K, K), design.partials, design.ahead, RowScales(scales, 1e-6), small_m.block_of(design), None,
        Fp8Scales(scales, 1, 64, scales, K // 128, *forms), None, written, arch="sm_90", SQUARES=0,
        **small_m.constants(design, gated), **launch_options(H200),
    )  # fmt: skip
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64" in ptx and ".f32.e4m3.e4m3" in ptx and "cp.async.bulk.tensor" in ptx
    assert kernel.metadata.shared <= SHARED["sm_90"]
    assert stack_bytes(kernel, tmp_path) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_run_to_run(device):
    def main(device):
        for M in (1, 20, 150):
            x, weight = operands(M, 256, 512, "block")[0], quantized_weight(torch.randn(256, 512), "block")
            x, weight = x.to(device), Fp8(*(t.to(device) for t in weight[:2]))
            out = ops.matmul(x, weight)
            expected = reference(x.cpu(), Fp8(*(t.cpu() for t in weight[:2])))
            # As accurate as the op says: tensor cores add fp8 terms in some 14 bits.
            assert_close(out.cpu(), expected, 512, partials=1, levels=1, by_row=True, what=f"M={M}")
            assert_identical(ops.matmul(x, weight), out, what=f"M={M}")

    everywhere(main, device)
