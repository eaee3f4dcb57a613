"""GEMMs with weights in 4 bits: both formats, planted mistakes, refused arguments, machine code."""

import pytest
import torch
import triton.language as tl

from tests.compiling import SHARED, compiled, stack_bytes
from tests.ops.checking import assert_identical
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
from weft import ops
from weft.kernels import four_bit_tile
from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.four_bit import FourBit, int4, mxfp4
from weft.kernels.four_bit_tile import Grid
from weft.kernels.gemm_tile import Sizes
from weft.kernels.operands import RowScales, ScaledMatrix, descriptor_or_self
from weft.ops.case import BF16, FP16
from weft.ops.gemm import small_m
from weft.ops.gemm.four_bit_operands import by_design
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.matmul import MATMUL
from weft.ops.gemm.matmul_silu_mul import MATMUL_SILU_MUL
from weft.ops.gemm.small_m_rule import SmallM
from weft.plan.planned import machine
from weft.runtime.capabilities import launch_options


def in_fp32(weight):
    """``weight`` with scales that bf16 does not have."""
    return weight._replace(scales=weight.scales.float() * 1.001)


FORMS = {
    "mxfp4": mxfp4,
    "mxfp4 of small scales": lambda weight: mxfp4(weight / 64),
    "int4": int4,
    "int4 with zeros": lambda weight: int4(weight, 128, False),
    "int4 of scales in fp32": lambda weight: in_fp32(int4(weight)),
    "int4 of rows": lambda weight: int4(weight, None),
    "int4 of 16 columns": lambda weight: int4(weight, 16, False),
}
# Ragged in every dimension; K within one block of 128, and beyond one.
SHAPES = ((5, 48, 272), (3, 200, 136), (33, 80, 400), (1, 24, 24))
DESIGNS = (
    SmallM(block_m=16, block_n=64, block_k=128, transposed=True, partials=2),
    SmallM(block_m=16, block_n=64, block_k=256, transposed=True),
    SmallM(block_m=32, block_n=16, block_k=32),
    SmallM(block_m=16, block_n=256, block_k=64, transposed=True, ahead=256),
)


def operands(M, N, K, form, dtype=BF16, seed=0):
    """Rows of very different sizes, and a weight whose rows are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((M, K), generator=generator) * 2.0 ** torch.randint(-6, 6, (M, 1), generator=generator)
    weight = torch.randn((N, K), generator=generator) * 2.0 ** torch.randint(-6, 6, (N, 1), generator=generator)
    return (x / (64 if dtype == FP16 else 1)).to(dtype), FORMS[form](weight)


def reference(x, weight):
    """The product in fp64 with every number, less its zero, times its scale, rounded to the dtype of x."""
    N, K = weight.shape
    at = torch.arange(K)
    # Of 128 columns i, 32 + i, 64 + i, 96 + i share two bytes.
    words, place = weight.data.view(torch.int16)[:, at // 128 * 32 + at % 32].int() & 0xFFFF, at % 128 // 32
    numbers = words >> 4 * place & 15
    group = at * 0 if weight.scales.shape[1] == 1 else at // weight.group
    if weight.is_mxfp4:
        down = (6 - 3 * place).clamp(min=0)
        numbers = torch.where(
            place == 3, words >> 10 & 3 | words >> 11 & 12, words >> down & 7 | words >> (6 + down) & 8
        )
        exponent, mantissa = numbers >> 1 & 3, numbers & 1
        size = torch.where(exponent == 0, mantissa / 2, 2.0 ** (exponent.double() - 1) * (1 + mantissa / 2))
        values = torch.where(numbers > 7, -size, size)
        scales = 2.0 ** (weight.scales.view(torch.uint8).double() - 127)
    else:
        zeros = torch.full_like(weight.scales, 8) if weight.zeros is None else weight.zeros
        values, scales = numbers.double() - zeros.double()[:, group], weight.scales.double()
    return x.double() @ (values.double() * scales[:, group]).to(x.dtype).double().T


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("design", [*DESIGNS, "cublas"], ids=range(len(DESIGNS) + 1))
def test_every_format_by_every_design(design, form):
    def main():
        for seed, (M, N, K) in enumerate(SHAPES):
            x, weight = operands(M, N, K, form, seed=seed)
            close(by_design(design, ScaledMatrix(x), weight), reference(x, weight), K, f"{M}x{N}x{K}")

    alone(main)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_ops_of_any_shape(form, dtype):
    def main():
        for M, N, K in (*SHAPES, (150, 64, 256), (4, 34, 141)):
            x, weight = operands(M, N, K, form, dtype)
            # Before cuBLAS the normed rows are rounded.
            check_ops(x, weight, reference(x, weight), f"{M}x{N}x{K}", partials=2, levels=6)

    alone(main)


def test_both_designs_multiply_the_same_weight():
    """One row that has a single 1: its result is a column of the weight, bit for bit."""

    def main():
        for form in FORMS:
            _, weight = operands(1, 48, 272, form)
            for column in (0, 63, 64, 127, 128, 200, 271):
                x = torch.zeros(1, 272).to(BF16)
                x[0, column] = 1.0
                wanted = weight.dequantized(BF16)[None, :, column] + 0.0  # a sum has no -0
                for design in (*DESIGNS, "cublas"):
                    assert_identical(by_design(design, ScaledMatrix(x), weight), wanted, what=f"{form} {column}")

    alone(main)


def test_a_row_is_the_same_alone_and_among_others():
    def main():
        x, weight = operands(20, 48, 272, "mxfp4")
        check_rows_alone(by_design, DESIGNS, x, weight)

    alone(main)


def test_compiles_without_a_graph_break():
    def main():
        x, up = operands(6, 48, 256, "mxfp4")
        _, down = operands(6, 32, 24, "int4 with zeros")
        check_compiled(x, up, down)

    alone(main)
    torch._dynamo.reset()


# --- planted mistakes ---------------------------------------------------------------------------------------------------

MUTANTS = {
    "quarters swapped": ("first = quarter_of(words, scales, 0,", "first = quarter_of(words, scales, 1,"),
    "halves swapped": ("side_by_side(first, second), side_by_side(third, fourth)",
                       "side_by_side(third, fourth), side_by_side(first, second)"),
    "the scale of the quarter before": ("of_block >> (8 * PLACE)", "of_block >> (8 * max(PLACE - 1, 0))"),
    "the scales of the first block": ("grid.row + k // COLUMNS", "grid.row + 0 * k"),
    "scales one row off": (
        "at = grid.scales + rows.to(tl.int64) * grid.row", "at = grid.scales + (rows ^ 1).to(tl.int64) * grid.row"),
    "gate's scales for up": ("grid, N + n, k, K", "grid, n, k, K"),
    "the sign is dropped": ("(numbers & 8).to(tl.uint32) << 28 |", "(numbers & 8).to(tl.uint32) << 0 |"),
    "a place's bits one off": ("bits >> 10 & 3", "bits >> 9 & 3"),
}  # fmt: skip
OF_INT4 = {
    "no zero": ("zero = of_quarter(grid.zeros, grid, rows, k, K).to(tl.float32)", "zero = tl.full((1, 1), 8, tl.float32)"),
    "the zero of the group before": (
        "of_quarter(grid.zeros, grid, rows, k, K)",
        "of_quarter(grid.zeros, grid, rows, tl.maximum(k - 128, 0), K)",
    ),
}  # fmt: skip
# Mistakes that no case of the ops shows: in steps of 256 columns, and in groups of less than a quarter, of a rank's edge.
FURTHER = {
    "the scales of the first two blocks": ("block = k // COLUMNS + tl.arange", "block = 0 * k + tl.arange"),
    "blocks swapped": ("left, right = tl.split(words", "right, left = tl.split(words"),
    "the scale of the group before": ("k // grid.columns + tl.arange", "tl.maximum(k // grid.columns - 1, 0) + tl.arange"),
    "groups of a row all the first": ("(ROWS, GROUPS, grid.columns)).reshape(ROWS, QUARTER)",
                                      "(ROWS, GROUPS, grid.columns)).permute(0, 2, 1).reshape(ROWS, QUARTER)"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*MUTANTS, *OF_INT4])
def test_the_cases_catch_a_planted_mistake(name, tmp_path, monkeypatch):
    form = "int4" if name in OF_INT4 else "mxfp4"
    mutant = mutated(four_bit_tile, *{**MUTANTS, **OF_INT4}[name], f"four_bit_mutant_{len(name)}", tmp_path)
    monkeypatch.setattr(small_m, "four_bit_tile", mutant.four_bit_tile)
    assert alone(lambda: cases_that_fail(lambda case: case.field("four_bit") == form))


@pytest.mark.parametrize("name", FURTHER)
def test_further_designs_and_groups_catch_a_planted_mistake(name, tmp_path, monkeypatch):
    mutant = mutated(four_bit_tile, *FURTHER[name], f"four_bit_further_{len(name)}", tmp_path)
    monkeypatch.setattr(small_m, "four_bit_tile", mutant.four_bit_tile)

    def main():
        x, weight = operands(5, 48, 528, "mxfp4" if "block" in name else "int4 of 16 columns")
        with pytest.raises(AssertionError):
            close(by_design(DESIGNS[1], ScaledMatrix(x), weight), reference(x, weight), 528, name)

    alone(main)


# --- refused arguments --------------------------------------------------------------------------------------------------


def weight_of(N, K, scales, dtype=torch.uint8, **fields):
    data = torch.zeros(N, -(-K // 128) * 64, dtype=torch.uint8)
    return FourBit(data, torch.ones(scales, dtype=dtype), K, **fields)


X = torch.ones(2, 256).half()
ZEROS = torch.zeros(4, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.matmul(X.float(), weight_of(4, 256, (4, 8))), r"x.dtype=torch.float32 is not one of float16"),
        (lambda: ops.matmul(X[:, :128], weight_of(4, 256, (4, 8))), r"x has K=128 columns and weight has 256"),
        (lambda: ops.matmul(X, weight_of(4, 256, (2, 8))), r"weight.scales has shape \(2, 8\) for a weight of 4 x 256"),
        (lambda: ops.matmul(X, weight_of(4, 256, (4, 9))), r"weight.scales has shape \(4, 9\)"),
        (lambda: ops.matmul(X, weight_of(4, 256, (4, 256))), r"a power of two from 2 to 128"),
        (lambda: ops.matmul(X, weight_of(4, 256, (4, 2), FP16)), "float16 is not one of uint8, int8, float32, bfloat16"),
        (lambda: ops.matmul(X, weight_of(4, 256, (4, 8))._replace(columns=512)), r"x has K=256 columns and weight has 512"),
        (
            lambda: ops.matmul(X, FourBit(ZEROS.repeat(1, 32), torch.ones(4, 8, dtype=torch.uint8), 256)),
            r"weight.data has shape \(4, 64\) for 256 columns",
        ),
        (lambda: ops.matmul(X, weight_of(4, 256, (4, 2), zeros=ZEROS)), "zeros has shape .* for int4 alone"),
        (lambda: ops.matmul(X, weight_of(4, 256, (4, 1), torch.float32, zeros=ZEROS)), r"pass that of the scales, \(4, 1\)"),
        (lambda: ops.matmul(X, weight_of(4, 256, (4, 8))._replace(data=None)), "weight.data=None is not a tensor"),
        (lambda: ops.matmul(X, weight_of(4, 256, (4, 8))._replace(scales=None)), "weight.scales=None is not a tensor"),
        (lambda: ops.matmul(X, weight_of(4, 256, (4, 16))._replace(scales=torch.ones(4, 16, dtype=torch.uint8)[:, ::2])),
         r"pass weight.scales.contiguous\(\)"),
        (lambda: ops.matmul_silu_mul(X, weight_of(5, 256, (5, 8))), r"5 rows, an odd number"),
        (lambda: ops.matmul_parts(X[0], weight_of(4, 256, (4, 8))), r"x has shape \(256,\)"),
        (
            lambda: ops.matmul(DeferredNorm(X, torch.ones(3, 1), 0.0), weight_of(4, 256, (4, 8))),
            r"squares is torch.float32 \(3, 1\)",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_there_is_no_backward():
    def main():
        x, weight = operands(2, 16, 256, "mxfp4")
        with pytest.raises(RuntimeError, match="no backward"):
            ops.matmul(x.requires_grad_(), weight).sum().backward()

    alone(main)


# --- plans and machine code ---------------------------------------------------------------------------------------------


def test_which_design_a_4_bit_weight_gets():
    for op, M, name in (
        (MATMUL, 1, "small_m"),
        (MATMUL, 128, "small_m"),
        (MATMUL, 129, "cublas"),
        (MATMUL_SILU_MUL, 4096, "cublas"),
    ):
        planned = op.plan(GemmCall(M, 25600, 5120, BF16, four_bit="mxfp4"), machine(H200, 1))
        assert planned.name == name, (M, planned.reason)
        assert ("in 4 bits" if name == "small_m" else "to 16 bits") in planned.reason


@pytest.mark.parametrize(
    ("form", "columns"),
    [("mxfp4", 32), ("mxfp4 of small scales", 32), ("int4", 128), ("int4 of scales in bf16", 128), ("int4", 0)],
)
@pytest.mark.parametrize(("M", "N", "K", "gated"), [
    (1, 25600, 5120, False), (16, 12800, 5120, True), (64, 25600, 5120, False), (128, 5120, 12800, False),
])  # fmt: skip
def test_on_sm_90_without_spills_with_the_weight_in_registers(M, N, K, gated, form, columns, tmp_path):
    call = GemmCall(M, N, K, BF16, four_bit=form.split()[0], design="small_m")
    design = (MATMUL_SILU_MUL if gated else MATMUL).plan(call, machine(H200, 1)).design
    x, words, squares = torch.zeros((64, 256), dtype=BF16), torch.zeros((64, 64), dtype=torch.int16), torch.zeros(64)
    out = torch.zeros(8) if design.partials > 1 else torch.zeros(8, dtype=BF16)
    if form.startswith("mxfp4"):
        scales = torch.zeros(64, dtype=torch.int32)
        grid = Grid(scales, scales, K // 128, *map(tl.constexpr, (32, False, True, form != "mxfp4")))
    else:
        scales = squares.bfloat16() if "bf16" in form else squares
        grid = Grid(scales, words, K // (columns or K), *map(tl.constexpr, (columns, True)))
    kernel = compiled(
        small_m.small_m_kernel, descriptor_or_self(x, design.block_m, design.block_k, True),
        descriptor_or_self(words, design.block_n, design.block_k // 4, True), words, out, M, Sizes(N, K, K, K // 4),
        design.partials, design.ahead, RowScales(squares, 1e-6), small_m.block_of(design), None, None, grid, None, arch="sm_90",
        SQUARES=0, **small_m.constants(design, gated), **launch_options(H200),
    )  # fmt: skip
    ptx = kernel.asm["ptx"]
    product = "wgmma.mma_async.sync.aligned.m64" if design.transposed else "mma.sync.aligned.m16n8k16"
    assert product in ptx and ".f32.bf16.bf16" in ptx and "cp.async.bulk.tensor" in ptx
    assert kernel.metadata.shared <= SHARED["sm_90"]
    assert stack_bytes(kernel, tmp_path) == 0
    # Through shared memory each thread would store 128 numbers of the weight. Results pass through it.
    assert ptx.count("st.shared") <= (40 if design.block_m == 128 else 24)


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_run_to_run(device):
    def main(device):
        for form in FORMS:
            for M in (1, 20, 150):
                x, weight = operands(M, 256, 512, form)
                on_device = FourBit(*(t.to(device) if isinstance(t, torch.Tensor) else t for t in weight))
                out = ops.matmul(x.to(device), on_device)
                close(out.cpu(), reference(x, weight), 512, f"{form} M={M}")
                assert_identical(ops.matmul(x.to(device), on_device), out, what=f"{form} M={M}")

    everywhere(main, device)
