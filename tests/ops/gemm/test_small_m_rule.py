"""Designs of small-M GEMMs: the rows of the table, and the rule for other shapes."""

import dataclasses

import pytest
import torch

import weft
from weft.kernels.four_bit import mxfp4
from weft.kernels.fp8 import quantized_weight
from weft.ops.gemm import matmul_four_bit, matmul_fp8
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.matmul import MATMUL
from weft.ops.gemm.matmul_silu_mul import MATMUL_SILU_MUL
from weft.ops.gemm.small_m_rule import LEAST_WEIGHT, default_small_m
from weft.ops.op import find_op
from weft.plan import table
from weft.plan.planned import machine
from weft.runtime import capabilities

H200 = dataclasses.replace(capabilities.simulated(1), is_simulated=False)
OTHER = dataclasses.replace(H200, device_name="Some GPU")
# Of the projections of Qwen3-32B, 8B and 0.6B and of Llama-3-70B over 1, 2, 4 and 8 ranks.
ROWS = [row for row in table.read(table.file_for(H200.device_name, 1)).rows if row.op.startswith("matmul")]


def planned(row, M, caps, dtype=torch.bfloat16):
    name, *variants = row.op.split("+")
    call = GemmCall(M, *row.shape[1:], dtype, **dict.fromkeys(variants, True))
    return find_op(name).plan(call, machine(caps, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_measured_shapes_get_their_rows(dtype):
    """From the fewest rows of a call on that a row of the table is for; cuBLAS computes what lies between two."""
    measured = [row for row in ROWS if row.design == "small_m"]
    assert len(measured) > 500
    for row in measured:
        for M in {row.shape[0], table.SMALL_M_ROWS[row.shape[0]][0]}:
            found = planned(row, M, H200, dtype)
            assert found.row is not None and found.design == row.as_design(MATMUL.designs), (row, M)
        assert planned(row, 80, H200, dtype).name == "cublas", row


@pytest.mark.parametrize("N", [3072, 6400, 12800])
@pytest.mark.parametrize("form", ["block_fp8", "channel_fp8"])
def test_more_than_64_rows_of_a_gated_gemm_in_fp8_are_cublas_s(form, N):
    for M, name in ((64, "small_m"), (65, "cublas"), (128, "cublas")):
        assert MATMUL_SILU_MUL.plan(GemmCall(M, N, 5120, torch.bfloat16, **{form: True}), machine(H200, 1)).name == name
    narrow = MATMUL.plan(GemmCall(128, N, 5120, torch.bfloat16, **{form: True}), machine(H200, 1)).name
    assert narrow == ("cublas" if N == 12800 else "small_m")


def test_the_rule_is_near_the_rows():
    """On a GPU without rows: the same GEMMs up to 64 rows, by a third of the programs to three times as many.

    Of weights below LEAST_WEIGHT only rows know that the kernel pays.
    """
    for row in ROWS:
        M, N, K = row.shape
        if row.op == "matmul+partials" and N * K < LEAST_WEIGHT:
            continue
        found = planned(row, M, OTHER)
        assert found.row is None
        assert (found.name == "small_m") == (row.design == "small_m" and M <= 64), row
        if found.name == "small_m":
            measured = row.as_design(MATMUL.designs)
            assert (found.design.block_m, found.design.transposed) == (measured.block_m, measured.transposed)
            one, other = (design.block_n / design.partials for design in (measured, found.design))
            assert 1 / 3 <= one / other <= 3, (row, found.design)


def test_any_size_on_any_target_has_a_design():
    for arch in ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942"):
        caps = dataclasses.replace(OTHER, arch=arch)
        for M in (1, 17, 64, 128, 300):
            for N, K in ((16, 16), (1000, 64), (5120, 25600), (151936, 1024)):
                for gated in (False, True):
                    for call in (
                        GemmCall(M, N, K, torch.bfloat16),
                        GemmCall(M, N, K, torch.bfloat16, partials=True, deferred_norm=True),
                    ):
                        design = default_small_m(call, caps, gated=gated)
                        stage = (design.block_m + design.block_n * (2 if gated else 1)) * design.block_k * 2
                        most = 64 if arch in ("sm_80", "sm_120", "gfx942") else 227
                        assert stage * design.num_stages <= most << 10, (call, arch, design)


@pytest.mark.parametrize(
    ("op", "M", "N", "K", "kind"),
    [
        ("matmul+four_bit", 100, 512, 512, mxfp4),
        ("matmul+four_bit", 60, 512, 512, mxfp4),
        ("matmul+channel_fp8", 512, 520, 512, "channel"),
        ("matmul_silu_mul+channel_fp8", 512, 520, 512, "channel"),
        ("matmul+block_fp8", 512, 520, 512, "block"),
        ("matmul+block_fp8", 512, 512, 528, "block"),
        ("matmul+block_fp8", 512, 512, 512, "block"),
    ],
)
def test_explain_names_the_design_that_a_call_gets(op, M, N, K, kind):
    gated = op.startswith("matmul_silu_mul")
    x, weight = torch.zeros(M, K, dtype=torch.bfloat16), torch.ones(N * (1 + gated), K)

    def main(team):
        if kind is mxfp4:
            return matmul_four_bit.plan_of(x, mxfp4(weight), False, gated, False)
        return matmul_fp8.plan_of(x, quantized_weight(weight, kind), False, gated, False)

    assert weft.simulate(main, 1) == [weft.ops.explain(op, M=M, N=N, K=K).plan]


def test_rows_are_for_what_the_kernel_takes():
    shape = {"op": "matmul", "N": 5120, "K": 5120}
    for options in ({"dtype": torch.float32}, {"aligned": False}):
        call = GemmCall(16, shape["N"], shape["K"], **{"dtype": torch.bfloat16, **options})
        assert find_op("matmul").plan(call, machine(H200, 1)).name == "cublas"
        with pytest.raises(
            ValueError, match="design='small_m' reads float16 or bfloat16 in rows that begin on 16 bytes"
        ):
            find_op("matmul").plan(call._replace(design="small_m"), machine(H200, 1))
