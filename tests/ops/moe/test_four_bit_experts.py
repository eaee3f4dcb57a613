"""Grouped GEMMs with experts in 4 bits: both formats, few and many pairs, planted mistakes, refused arguments, machine code."""

import pytest
import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import weft
from tests.compiling import SHARED, compiled, stack_bytes
from tests.ops.checking import assert_close, assert_identical
from tests.ops.layer_cases import DEVICES, everywhere, mutated
from weft import ops
from weft.kernels import four_bit_tile
from weft.kernels.four_bit import FourBit, int4, mxfp4
from weft.kernels.four_bit_tile import Grid
from weft.ops.case import BF16, FP16
from weft.ops.moe.grouped import four_bit as grouped_four_bit
from weft.ops.moe.grouped.four_bit import BLOCK_N, grouped_four_bit_kernel
from weft.ops.moe.routing import Schedule

FORMS = {"mxfp4": mxfp4, "int4": int4, "int4 with zeros": lambda weight: int4(weight, 128, False)}
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
    everywhere(lambda device: check_all(device, dtypes=(BF16, FP16)), device)


MUTANTS = {
    "the scales of the first expert": ("of_weight = begin + column", "of_weight = column"),
    "the scales of gate for up": ("of_weight + N, begin + 2 * N", "of_weight, begin + 2 * N"),
    "the weight of the next expert": (
        "weight.load([begin + column, k // 2])",
        "weight.load([begin + N + column, k // 2])",
    ),
    "a token's row for its pair's": ("source, target = pair // CHOICES, row", "source, target = pair * 0, row"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_cases_catch_a_planted_mistake(name, tmp_path, monkeypatch):
    mutant = mutated(grouped_four_bit, *MUTANTS[name], f"four_bit_experts_{len(name)}", tmp_path)
    monkeypatch.setattr(grouped_four_bit, "grouped_four_bit_kernel", mutant.grouped_four_bit_kernel)
    with pytest.raises((AssertionError, weft.errors.InvalidAccess)):
        weft.simulate(lambda team: check_all("cpu", forms=("mxfp4",)), 1)


def test_the_cases_catch_halves_that_are_swapped(tmp_path, monkeypatch):
    change = ("first = weight_of(bytes & 15,", "first = weight_of(bytes >> 4,")
    mutant = mutated(four_bit_tile, *change, "four_bit_experts_halves", tmp_path)
    monkeypatch.setattr(grouped_four_bit, "four_bit_dot", mutant.four_bit_dot)
    with pytest.raises(AssertionError):
        weft.simulate(lambda team: check_all("cpu", forms=("mxfp4",)), 1)


def test_wrong_arguments_are_refused():
    rows, _, ids, weight = drawn(*SIZES[0], "mxfp4", False)

    def main(team):
        schedule = ops.moe_schedule(ids, ops.Experts.slices(4))
        for x, one, message in (
            (rows.float(), weight, "x.dtype=torch.float32 is not one of float16"),
            (rows[:, :100], weight, "x has K=100 columns and weight has 144"),
            (rows[:4], weight, "x has 4 rows; this schedule of 5 tokens takes 5 with gather=True"),
            (rows, weight._replace(scales=weight.scales[:, :, :4].contiguous()), "weight.scales has shape"),
        ):
            with pytest.raises(ValueError, match=f"grouped_matmul: {message}"):
                ops.grouped_matmul(x, one, schedule, gather=True)
        with pytest.raises(ValueError, match="schedule=1 is not a Schedule"):
            ops.grouped_matmul(rows, weight, 1)

    weft.simulate(main, 1)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("columns", "block"), [(32, 16), (128, 32)])
def test_on_sm_90_without_spills_with_the_weight_in_registers(columns, block, gated, tmp_path):
    x, data, scales = torch.zeros((64, 64), dtype=BF16), torch.zeros((64, 64), dtype=torch.uint8), torch.zeros(64)
    integers = torch.zeros(64, dtype=torch.int32)
    schedule = Schedule(integers, integers, integers, integers, 8, block)
    grid = Grid(
        data if columns == 32 else scales, data, 2048 // columns, tl.constexpr(columns), tl.constexpr(columns != 32)
    )
    kernel = compiled(
        grouped_four_bit_kernel, x, TensorDescriptor(data, [64, 64], [64, 1], [BLOCK_N, 64]), grid, x, schedule, 768, 2048,
        arch="sm_90", CHOICES=8, GATED=gated, BLOCK_M=block, BLOCK_N=BLOCK_N, num_warps=4, num_stages=4,
    )  # fmt: skip
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64" in ptx and "cp.async.bulk.tensor" in ptx
    assert kernel.metadata.shared <= SHARED["sm_90"] // 3
    assert stack_bytes(kernel, tmp_path) == 0
