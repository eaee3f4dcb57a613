"""Choice of the overlapped ops by predicted times where no row decides."""

import pytest
import torch

from weft.costs import gemms
from weft.ops.op import find_op
from weft.plan.planned import machine
from weft.runtime import capabilities

OVERLAPPED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def plan(name, M, N, K, world_size=2, **fields):
    op, here = find_op(name), machine(capabilities.simulated(world_size), world_size)
    return op.plan(op.call_of((M, N, K), torch.bfloat16, here, **fields), here)


@pytest.mark.parametrize("name", OVERLAPPED)
def test_few_rows_are_computed_in_sequence_and_many_overlap_with_times_in_the_reason(name):
    op, here = find_op(name), machine(capabilities.simulated(2), 2)
    few, many = (op.rule(op.call_of((M, 4352, 3328), torch.bfloat16, here), here) for M in (64, 6144))
    assert few[0] == "sequential" != many[0]
    for design, reason in (few, many):
        assert reason.startswith(f"predicted µs in a row: {design} ")
    assert "pipelined" in few[1]


@pytest.mark.parametrize("name", OVERLAPPED[1:])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_ranks_with_other_shares_of_k_choose_alike(name, world_size):
    op, here = find_op(name), machine(capabilities.simulated(world_size), world_size)
    for M in (24, 384, 768, 1200, 2400, 9600):
        for N in (2304, 4096, 5120):
            shares = [op.call_of((M, N, K), torch.bfloat16, here) for K in (64, 1984, 2048, 4096, 12800)]
            assert len({op.rule(call, here)[0] for call in shares}) == 1
            assert len({op.plan(call, here).name for call in shares}) == 1


@pytest.mark.parametrize("form", ["block_fp8", "channel_fp8"])
def test_fp8_weights_choose_by_predicted_times_too(form):
    for name in OVERLAPPED:
        for world_size in (2, 4):
            few, many = (plan(name, M, 4352, 2560, world_size, **{form: True}) for M in (64, 6144))
            assert (few.name, many.name) == ("sequential", "pipelined")
            assert few.reason.startswith("predicted µs in a row: sequential ") and "fused" not in few.reason
    assert "sequential" not in plan("matmul_all_reduce", 6144, 4352, 2560, 4, block_fp8=True).reason.split(";")[0]


def test_a_design_is_chosen_only_among_the_judged_ones():
    op = find_op("matmul_reduce_scatter")
    assert set(op.judged) < set(op.designs) and "fused" not in op.judged and op.predict is gemms.gemm_rs
