"""Grouped GEMMs with experts in 4 bits: both formats, few and many pairs, planted mistakes, refused arguments, machine code."""

import pytest
import torch
import triton.language as tl

import weft
from tests.compiling import SHARED, TARGETS, compiled, stack_bytes
from tests.ops.checking import a_case_fails, assert_close, assert_identical
from tests.ops.gemm.quantized import H200, alone
from tests.ops.layer_cases import DEVICES, everywhere, mutated
from tests.ops.test_compile_layer_kernels import caps_of, check_compiles
from weft import ops
from weft.kernels import four_bit_tile
from weft.kernels.four_bit import FourBit, int4, mxfp4
from weft.kernels.four_bit_tile import Grid
from weft.ops.case import BF16
from weft.ops.moe.grouped import gemms, kernel
from weft.ops.moe.grouped.gemms import GroupedCall, weight_descriptor
from weft.ops.moe.grouped.kernel import Form, grouped_matmul_kernel
from weft.ops.moe.grouped.rule import four_bit_tiles_for
from weft.ops.moe.grouped_matmul import GROUPED_MATMUL, GROUPED_MATMUL_SILU_MUL
from weft.ops.moe.routing import Schedule
from weft.plan.planned import machine
from weft.runtime.capabilities import launch_options

FORMS = {
    "mxfp4": mxfp4,
    "mxfp4 of large scales": lambda weight: mxfp4(64 * weight),
    "int4": int4,
    "int4 of scales in fp32": lambda weight: int4(weight)._replace(scales=int4(weight).scales.float() * 1.001),
    "int4 with zeros": lambda weight: int4(weight, 128, False),
}
# T, k, experts, N, K: ragged; tiles of 16, 32 and 128 pairs.
SIZES = ((5, 2, 4, 72, 144), (20, 3, 6, 72, 272), (70, 4, 4, 40, 136), (1, 2, 4, 24, 24))


def drawn(T, k, experts, N, K, form, gated, dtype=BF16, seed=0):
    """(rows of tokens, rows of pairs, ids, the weight in 4 bits)."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn((experts, N * (2 if gated else 1), K), generator=generator) / K**0.5
    rows, of_pairs = (torch.randn((count, K), generator=generator).to(dtype) for count in (T, T * k))
    ids = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(T)]).int()
    return rows, of_pairs, ids, FORMS[form](weight)


def reference(rows, ids, weight, gated, gather):
    """Results in fp64: rows of the pairs in the order of the experts, or of all pairs."""
    wide, k = weight.dequantized(rows.dtype).double(), ids.shape[1]
    pairs = torch.cat([(ids.flatten() == e).nonzero().flatten() for e in range(len(wide))])
    of_pairs = rows[pairs // k] if gather else rows
    result = torch.einsum("pk,pnk->pn", of_pairs.double(), wide[ids.flatten()[pairs].long()])
    if gated:
        gate, up = result.chunk(2, 1)
        result = torch.nn.functional.silu(gate) * up
    return result if gather else torch.zeros_like(result).index_copy(0, pairs, result)


def check_all(device, forms=FORMS, dtypes=(BF16,)):
    for number, (sizes, form, dtype) in enumerate((s, f, d) for s in SIZES for f in forms for d in dtypes):
        for gated in (False, True):
            rows, of_pairs, ids, weight = drawn(*sizes, form, gated, dtype, number)
            there = FourBit(*(one.to(device) if isinstance(one, torch.Tensor) else one for one in weight))
            schedule = ops.moe_schedule(ids.to(device), ops.Experts.slices(sizes[2]))
            if gated:
                call = lambda x, there=there, schedule=schedule: ops.grouped_matmul_silu_mul(x, there, schedule)  # noqa: E731
            else:
                call = lambda x, there=there, schedule=schedule: ops.grouped_matmul(x, there, schedule, gather=True)  # noqa: E731
            out, what = call(rows.to(device)), f"{sizes} {form} gated={gated}"
            assert out.dtype == dtype
            terms = sizes[4] * (16 if gated else 1)
            assert_close(out.cpu(), reference(rows, ids, weight, gated, True), terms, what=what)
            assert_identical(call(rows.to(device)), out, what=f"{what} again")
            if not gated:
                out = ops.grouped_matmul(of_pairs.to(device), there, schedule)
                assert_close(out.cpu(), reference(of_pairs, ids, weight, False, False), terms, what=f"{what} in order")


@pytest.mark.parametrize("device", DEVICES)
def test_few_and_many_pairs(device):
    everywhere(check_all, device)


def test_the_plan_says_which_tiles_read_4_bits():
    """Of many pairs it is that of the weight in 16 bits."""
    here = machine(H200, 1)
    for op in (GROUPED_MATMUL, GROUPED_MATMUL_SILU_MUL):
        for tokens, name, reason in (
            (8, "four_bit", "is read in 4 bits"),
            (4096, "tiles", "converts the weight to 16"),
        ):
            call = op.call_of((tokens, 8, 128, 768, 2048), BF16, here, four_bit=True)
            planned = op.plan(call, here)
            assert planned.name == name and reason in planned.reason
            designs = [planned.design, *op.space(call, here), *op.around(planned.design, here)]
            assert all(type(one) is op.designs[name] for one in designs) and len({*designs}) > 4
        assert planned.design == op.plan(call._replace(four_bit=False), here).design
    sizes = {"T": 8, "k": 8, "experts": 128, "N": 768, "K": 2048}
    explained = ops.explain("grouped-gemm-silu+four_bit", caps=H200, **sizes)
    assert "four_bit" in str(explained) and "block_n=128" in str(explained)


# --- planted mistakes ---------------------------------------------------------------------------------------------------

MUTANTS = {
    "the scales of the first expert": (kernel, "scale_row = expert * N * OF_N", "scale_row = 0 * N"),
    "the scales of gate for up": (kernel, "four_bit, scale_row + N, k, K", "four_bit, scale_row, k, K"),
    "gate twice": (kernel, "expert, 1, column, k // PACKED", "expert, 0, column, k // PACKED"),
    "quarters swapped": (four_bit_tile, "first = quarter_of(words, scales, 0,", "first = quarter_of(words, scales, 1,"),
    "scales of the first step": (four_bit_tile, "block = k // COLUMNS + tl.arange", "block = 0 * k + tl.arange"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_the_cases_catch_a_planted_mistake(name, tmp_path, monkeypatch):
    module, old, new = MUTANTS[name]
    mutant = mutated(module, old, new, f"four_bit_experts_{len(name)}", tmp_path)
    if module is four_bit_tile:  # functions of the kernel of grouped GEMMs
        place = f"from {four_bit_tile.__name__} import"
        mutant = mutated(kernel, place, f"from {mutant.__name__} import", "experts_by_mutant_of_4_bits", tmp_path)
    monkeypatch.setattr(gemms, "grouped_matmul_kernel", mutant.grouped_matmul_kernel)
    assert alone(lambda: a_case_fails((GROUPED_MATMUL_SILU_MUL, GROUPED_MATMUL), "four_bit"))


def test_wrong_arguments_are_refused():
    rows, _, ids, weight = drawn(*SIZES[0], "mxfp4", False)

    def main(team):
        schedule = ops.moe_schedule(ids, ops.Experts.slices(4))
        for x, one, message in (
            (rows.float(), weight, "x.dtype=torch.float32 is not one of float16"),
            (rows[:, :100], weight, "x has K=100 columns and weight has 144"),
            (rows[:4], weight, "x has 4 rows; with gather=True a schedule of 5 tokens with 2 choices each takes 5"),
            (rows, weight._replace(scales=weight.scales[:, :, :4].contiguous()), "weight.scales has shape"),
            (rows, weight._replace(scales=weight.scales[:3]), "weight.scales has shape"),
        ):
            with pytest.raises(ValueError, match=f"grouped_matmul: {message}"):
                ops.grouped_matmul(x, one, schedule, gather=True)
        with pytest.raises(ValueError, match="scales of fp8 rows beside a weight in 4 bits"):
            ops.grouped_matmul(rows, weight, schedule, gather=True, scales=torch.ones(5, 2))
        with pytest.raises(ValueError, match="schedule=1 is not a Schedule"):
            ops.grouped_matmul(rows, weight, 1)

    weft.simulate(main, 1)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("columns", "block", "small"), [(32, 16, True), (32, 32, False), (128, 32, False)])
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles_and_on_sm_90_without_spills_with_the_weight_in_registers(
    arch, columns, block, small, gated, tmp_path
):
    x, words, scales = (
        torch.zeros((64, 2048), dtype=BF16),
        torch.zeros((8, 1536, 512), dtype=torch.int16),
        torch.zeros(64),
    )
    call, caps = GroupedCall(block, 8 * block, 768, 2048, BF16, True, four_bit=True), caps_of(arch)
    integers, design = torch.zeros(64, dtype=torch.int32), four_bit_tiles_for(call, caps, gated=gated)
    schedule, form = Schedule(*[integers] * 4, 8, block), Form(gated, 8, block, True, False, False, gated)
    mxfp4 = columns == 32
    of_form = map(tl.constexpr, (columns, not mxfp4, mxfp4, small))
    grid = Grid(integers if mxfp4 else scales, words, 2048 // (128 if mxfp4 else columns), *of_form)
    built = compiled(
        grouped_matmul_kernel, x, None, None, grid, None, weight_descriptor(design, words, form), None, x, None, schedule, 768,
        2048, 16, None, None, 0, arch=arch, FORM=form, BLOCK_N=design.block_n, BLOCK_K=design.block_k, TRANSPOSED=True,
        num_warps=design.num_warps, num_stages=design.num_stages, **launch_options(caps),
    )  # fmt: skip
    check_compiles(built, arch)
    assert built.metadata.shared <= SHARED[arch]
    if arch == "sm_90":
        ptx = built.asm["ptx"]
        assert "wgmma.mma_async.sync.aligned.m64" in ptx and "cp.async.bulk.tensor" in ptx
        assert built.metadata.shared <= SHARED[arch] // design.per_sm
        assert stack_bytes(built, tmp_path) == 0
