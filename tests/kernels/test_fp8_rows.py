"""Rows in fp8 that kernels write in place of rows of 16 bits: the same bits as of two kernels, and planted mistakes."""

import pytest
import torch

import weft
from tests.ops.checking import assert_identical, check, inputs_of
from tests.ops.layer_cases import DEVICES, check_refused, everywhere, mutated, random
from tests.ops.test_compile_layer_kernels import caps_of
from weft import ops
from weft.kernels import fp8, split_kv
from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.fp8 import Fp8, RowFormat, by_torch, quantized_rows, quantized_weight
from weft.kernels.operands import RowScales, ScaledMatrix
from weft.ops.attention import paged_prefill_attention
from weft.ops.case import BF16, FP16, FP32
from weft.ops.collectives import norm_kernel
from weft.ops.elementwise import add_rms_norm, silu_mul
from weft.ops.gemm import cublas, small_m
from weft.ops.gemm.cublas import Cublas
from weft.ops.gemm.fp8_operands import by_design
from weft.ops.gemm.small_m_rule import SmallM
from weft.ops.local import capabilities_of
from weft.ops.op import find_op

GROUP, TOKEN = RowFormat("group"), RowFormat("token")
WRITERS = {
    "silu_mul": silu_mul,
    "matmul_silu_mul": small_m,
    "all_reduce_rms_norm": norm_kernel,
}
ROW_WRITERS = {"add_rms_norm": add_rms_norm}
BESIDE_WRITERS = {"all_reduce_rms_norm": norm_kernel, "add_rms_norm": add_rms_norm}
HEAD_WRITERS = {"decode_attention": split_kv, "paged_prefill_attention": paged_prefill_attention}


def formats(device):
    return GROUP, TOKEN, RowFormat("static", torch.full((1, 1), 0.03, device=device))


def assert_rows(rows, plain, format, what):
    """``rows`` are those that a kernel of its own makes of ``plain``, laid out for cuBLAS."""
    wanted = quantized_rows(plain, format, capabilities_of(plain.device))
    assert_identical(rows.data, wanted.data, what=f"{what} {format.kind}, bytes")
    assert_identical(rows.scales, wanted.scales, what=f"{what} {format.kind}, scales")
    assert rows.data.is_contiguous() and rows.scales.stride() == wanted.scales.stride()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_norms_and_activations_write_the_bits_of_two_kernels(device, dtype):
    def main(device):
        for T, H in ((5, 400), (1, 96), (6, 1280)):
            x, residual = (random((T, H), dtype, device, seed) for seed in (1, 2))
            weight, squares = random((H,), dtype, device, 3), random((T, 3), FP32, device).square()
            for format in formats(device):
                plain, hidden = ops.add_rms_norm(x, residual, weight, 1e-6)
                rows, beside = ops.add_rms_norm(x, residual, weight, 1e-6, fp8=format)
                assert_rows(rows, plain, format, f"norm {T}x{H}")
                assert_identical(beside, hidden)
                both, _ = ops.add_rms_norm(x, residual, weight, 1e-6, fp8=format._replace(beside=True))
                assert_identical(both.fp8.data, rows.data, what=f"norm {T}x{H} {format.kind}, with rows beside")
                assert_identical(both.rows, plain, what=f"norm {T}x{H} {format.kind}, rows beside")
                for given in (x, DeferredNorm(x, squares, 1e-6)):
                    assert_rows(ops.silu_mul(given, fp8=format), ops.silu_mul(given), format, f"silu {T}x{H}")

    everywhere(main, device)


DESIGNS = (
    SmallM(block_m=16, block_n=128, block_k=128, transposed=True),
    SmallM(block_m=32, block_n=256, block_k=64, num_warps=8),
    SmallM(block_m=16, block_n=64, block_k=128, transposed=True, partials=2),
    SmallM(block_m=16, block_n=64, block_k=64),
    Cublas(),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("design", DESIGNS, ids=range(len(DESIGNS)))
def test_gated_gemms_write_the_bits_of_two_kernels(device, design):
    def main(device):
        for M, N, K in ((5, 200, 256), (20, 144, 384)):
            x, scheme = random((M, K), BF16, device), "channel" if N == 200 else "block"
            weight = quantized_weight(random((2 * N, K), BF16, device, 1), scheme)
            operand = ScaledMatrix(x, RowScales(random((M, 3), FP32, device, 2).square(), 1e-6) if M == 5 else None)
            plain = by_design(design, operand, weight, gated=True)
            for format in formats(device):
                assert_rows(
                    by_design(design, operand, weight, gated=True, format=format), plain, format, f"{M}x{N}x{K}"
                )

    everywhere(main, device)


def test_which_designs_write_fp8():
    """Tiles of whole groups; split-K partials, which a kernel adds up anyway; all with a static scale."""
    static = RowFormat("static", torch.ones(1, 1))
    for format, wanted in ((GROUP, (1, 1, 1, 0)), (TOKEN, (0, 0, 1, 0)), (static, (1, 1, 1, 1))):
        assert tuple(map(int, (small_m.writes(design, 256, format) for design in DESIGNS[:4]))) == wanted


@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_of_its_own_is_bit_for_bit_by_torch(device):
    def main(device):
        for T, H in ((5, 400), (1, 96), (6, 1280), (3, 5000), (130, 256)):
            x = random((T, H), BF16, device) * 2.0 ** torch.randint(-9, 9, (T, 1)).to(device)
            for format in formats(device):
                rows = quantized_rows(x, format, capabilities_of(x.device))
                static = format.static_scale is not None
                by = (
                    fp8.by_static_scale(x, format.static_scale)
                    if static
                    else Fp8(*by_torch(x, 128 if format == GROUP else H))
                )
                assert_identical(rows.data, by.data, what=f"bytes {T}x{H} {format.kind}")
                assert_identical(rows.scales, by.scales, what=f"scales {T}x{H} {format.kind}")

    everywhere(main, device)


def test_rows_have_room_for_cublas():
    def main(team):
        for T in (1, 3, 4, 9):
            rows = quantized_rows(torch.ones(T, 300).bfloat16(), GROUP, team.caps)
            room = -(-T // 4) * 4
            data, scales = cublas._in_fours(rows.data), cublas._in_fours(rows.scales)
            assert data.shape == (room, 300) and data.data_ptr() == rows.data.data_ptr()
            assert scales.stride() == (1, room) and scales.data_ptr() == rows.scales.data_ptr()
            copied = cublas._in_fours(rows.data.clone())
            assert copied.shape == (room, 300) and (T % 4 == 0 or not copied.view(torch.uint8)[T:].any())

    weft.simulate(main, 1)


def test_compiles_without_a_graph_break():
    def main(team):
        x, weight, format = random((6, 512), BF16, "cpu"), torch.ones(512).bfloat16(), GROUP

        def two(x):
            rows, hidden = ops.add_rms_norm(x, x, weight, 1e-6, fp8=format)
            return *rows[:2], *ops.silu_mul(hidden, fp8=format)[:2]

        def three(x):
            rows = ops.matmul_silu_mul(x, up, fp8=format)
            return *two(x), *rows[:2], ops.matmul(rows, down)

        up, down = (
            quantized_weight(random((96, 512), BF16, "cpu"), "block"),
            quantized_weight(torch.ones(16, 48), "block"),
        )
        for eager, compiled in zip(three(x), torch.compile(three, fullgraph=True, backend="aot_eager")(x), strict=True):
            assert_identical(compiled, eager)
            assert compiled.stride() == eager.stride()

    weft.simulate(main, 1)
    torch._dynamo.reset()


# --- planted mistakes ---------------------------------------------------------------------------------------------------

MUTANTS = {
    "the group before": ("group = first // fp8.group + tl.arange", "group = first // fp8.group - 1 + tl.arange"),
    "scales transposed": (
        "fp8.scales + token.to(tl.int64)[:, None] * fp8.row + group[None, :] * fp8.column",
        "fp8.scales + token.to(tl.int64)[:, None] * fp8.column + group[None, :] * fp8.row"),
    "scales one token off": (
        "fp8.scales + token.to(tl.int64)[:, None] * fp8.row", "fp8.scales + (token ^ 1).to(tl.int64)[:, None] * fp8.row"),
    "stale scales": ("tl.store(to, scales, mask=exists[:, None]", "tl.store(to, scales, mask=(exists & (token < 0))[:, None]"),
    "scales rounded to powers of two": ("tl.store(to, scales,", "tl.store(to, tl.exp2(tl.ceil(tl.log2(scales))),"),
}  # fmt: skip


# Of kernels that store heads, by groups.
OF_HEADS = {
    "groups swapped": ("column // 128 * fp8.column", "(column // 128 ^ 1) * fp8.column"),
    "scales of heads transposed": (
        "token * fp8.row + column // 128 * fp8.column", "token * fp8.column + column // 128 * fp8.row"),
    "scales of heads one token off": ("to = fp8.scales + token * fp8.row", "to = fp8.scales + (token ^ 1) * fp8.row"),
    "stale scales of heads": (
        "scales, mask=exists[:, None])\n\n\n@triton", "scales, mask=(exists & (token < 0))[:, None])\n\n\n@triton"),
}  # fmt: skip


# Of the kernel that stores a whole row.
OF_A_ROW = {
    "scales of a row swapped": ("scales + group * fp8.column", "scales + (group ^ 1) * fp8.column"),
    "scales of the row before": ("scales = fp8.scales + row * fp8.row", "scales = fp8.scales + (row ^ 1) * fp8.row"),
    "stale scales of a row": ("mask=group * fp8.group < WIDTH)", "mask=group * fp8.group < 0)"),
    "scales of a row rounded": (
        "tl.store(scales + group * fp8.column, scale,",
        "tl.store(scales + group * fp8.column, tl.exp2(tl.ceil(tl.log2(scale))),"),
    "a token's scale by its first group": ("scale_for(tl.max(largest, axis=0, keep_dims=True))", "scale_for(tl.sum(tl.where("
        "tl.arange(0, x.shape[0])[:, None] == 0, largest, 0.0), axis=0, keep_dims=True))"),
}  # fmt: skip


# Of rows in 16 bits beside those in fp8.
BESIDE = {
    "rows beside doubled": ("tl.store(fp8.beside + at, x, mask=mask)", "tl.store(fp8.beside + at, x + x, mask=mask)"),
    "rows beside not written": ("tl.store(fp8.beside + at, x, mask=mask", "tl.store(fp8.beside + at, x, mask=mask & (at < 0)"),
    "rows beside a column off": ("tl.store(fp8.beside + at, x,", "tl.store(fp8.beside + (at ^ 1), x,"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*MUTANTS, *OF_HEADS, *OF_A_ROW, *BESIDE])
def test_the_cases_catch_a_planted_mistake(name, tmp_path, monkeypatch):
    writers, function = next(
        (writers, function)
        for mistakes, writers, function in (
            (MUTANTS, WRITERS, "store_rows"),
            (OF_HEADS, HEAD_WRITERS, "store_groups"),
            (OF_A_ROW, ROW_WRITERS, "store_row"),
            (BESIDE, BESIDE_WRITERS, "store_beside"),
        )
        if name in mistakes
    )
    mutant, caught = (
        mutated(fp8, *{**MUTANTS, **OF_HEADS, **OF_A_ROW, **BESIDE}[name], f"fp8_rows_mutant_{len(name)}", tmp_path),
        {},
    )
    for module in writers.values():
        for one in ("store_rows", "store_row") if function == "store_beside" else (function,):
            if hasattr(module, one):
                monkeypatch.setattr(module, one, getattr(mutant, one))

    def main(team):
        for op in writers:
            caught[op] = False
            for case in find_op(op).cases():
                formed = case.world_size == 1 and case.field("fp8_rows") in (True, "group", "token")
                if formed and not caught[op]:
                    inputs = inputs_of(case, 0)
                    try:
                        check(case, 0, [inputs], find_op(op).call(case, team, *inputs))
                    except (AssertionError, weft.errors.WeftError):
                        caught[op] = True

    weft.simulate(main, 1)
    assert all(caught.values()), caught


# --- refused arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "x", "format"),
    [
        ("fp8='group' is no RowFormat", torch.ones(2, 8).half(), "group"),
        ("kind='static' and static_scale=None", torch.ones(2, 8).half(), RowFormat("static")),
        ("kind='group' and static_scale=", torch.ones(2, 8).half(), RowFormat("group", torch.ones(1, 1))),
        ("fp8 has beside=True, which add_rms_norm", torch.ones(2, 8).half(), GROUP._replace(beside=True)),
        ("fp8.static_scale has shape (1,)", torch.ones(2, 8).half(), RowFormat("static", torch.ones(1))),
        ("a result of torch.float32 with fp8", torch.ones(2, 8), GROUP),
        ("N=40000 > 32768 with a scale for each token", torch.ones(1, 80000).half(), TOKEN),
    ],
)
def test_wrong_formats_are_refused(message, x, format):
    check_refused(lambda: ops.silu_mul(x, fp8=format), (), message)


def test_rows_of_more_dimensions_are_refused():
    x = torch.ones(2, 3, 8).half()
    check_refused(
        lambda: ops.add_rms_norm(x, x, x[0, 0], 1e-6, fp8=GROUP), (), "x has shape (2, 3, 8) with fp8; pass rows"
    )


def test_gpus_without_e4m3_are_refused(monkeypatch):
    for module in (add_rms_norm, silu_mul):
        monkeypatch.setattr(module, "capabilities_of", lambda device: caps_of("sm_80"))
    x = torch.ones(2, 8).half()
    for call in (lambda: ops.silu_mul(x, fp8=GROUP), lambda: ops.add_rms_norm(x, x, x[0], 1e-6, fp8=GROUP)):
        check_refused(call, (), "on sm_80, which has no conversion to it")
