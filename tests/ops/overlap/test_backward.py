"""Backward of the overlapped GEMMs: one gather, beside a GEMM; operands by their strides; gradients of weights in fp32."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import weft
import weft.check
from tests.ops.checking import assert_close
from weft import ops
from weft.ops.case import BF16, FP32
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.matmul import MATMUL
from weft.ops.overlap import all_gather_matmul_backward
from weft.ops.overlap.all_gather_matmul import ALL_GATHER_MATMUL
from weft.ops.overlap.all_gather_matmul_backward import (
    ALL_GATHER_MATMUL_BACKWARD,
    AllGatherMatmulBackward,
    BackwardArguments,
)
from weft.ops.overlap.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER
from weft.plan import table
from weft.plan.memo import forget
from weft.plan.planned import machine
from weft.runtime import capabilities

H200 = dataclasses.replace(capabilities.simulated(2), is_simulated=False)
SWEEP = pytest.mark.sweep


class Names(TorchDispatchMode):
    """Names of weft's ops that run."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "weft":
            self.found.append(operation.name().removeprefix("weft::"))
        return operation(*args, **(kwargs or {}))


def leaves(rank, *shapes, dtype=FP32):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def test_a_backward_gathers_once():
    """One op gathers, and gives both gradients or hands its rows to the other GEMM; a frozen operand costs nothing."""
    expected = {
        ("all_gather_matmul", True, True): ["all_gather_matmul_backward"],
        ("all_gather_matmul", True, False): ["matmul_reduce_scatter"],
        ("all_gather_matmul", False, True): ["all_gather", "weight_gradient"],
        ("matmul_reduce_scatter", True, True): ["all_gather_matmul_several", "weight_gradient"],
        ("matmul_reduce_scatter", True, False): ["all_gather_matmul"],
        ("matmul_reduce_scatter", False, True): ["all_gather", "weight_gradient"],
        ("matmul_all_reduce", True, False): ["all_reduce", "matmul"],
        ("matmul_all_reduce", False, True): ["all_reduce", "weight_gradient"],
    }

    def main(team):
        for (op, of_a, of_b), names in expected.items():
            a, b = leaves(team.rank, (4, 8), (6, 8))
            a.requires_grad_(of_a), b.requires_grad_(of_b)
            y = getattr(ops, op)(a, b, team)
            with Names() as ran:
                y.backward(torch.ones_like(y))
            assert ran.found == names, (op, of_a, of_b)
            assert (a.grad is not None, b.grad is not None) == (of_a, of_b)

    weft.simulate(main, 2)


@pytest.mark.parametrize(
    ("op", "own_first"),
    [
        ("all_gather_matmul", True),
        ("matmul_reduce_scatter", False),
        *(
            pytest.param(op, first, marks=SWEEP)
            for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul")
            for first in (False, True)[: 2 if "all" not in op[-10:] and op != "matmul" else 1]
        ),
    ],
)
def test_weights_get_gradients_in_fp32_where_they_ask_for_it(op, own_first):
    """Of operands in bf16; two backwards add up in fp32, which bf16 sums would round away."""

    def main(team):
        a, b = leaves(team.rank, (8, 24), (6, 24), dtype=BF16)
        b.grad_dtype = FP32
        more = (team,) if op != "matmul" else ()
        y = getattr(ops, op)(a, b, *more, **({"own_first": True} if own_first else {}))
        ways = torch.randn(y.shape, generator=torch.Generator().manual_seed(9 + team.rank)).to(BF16)
        for _ in range(2):
            y.backward(ways, retain_graph=True)
        wide = [x.detach().double().requires_grad_() for x in (a, b)]
        return a, b, ways, wide

    by_rank = weft.simulate(main, 2)
    wide = [wide for *_, wide in by_rank]

    def in_order(x, rank):
        return torch.cat(x.chunk(2)[::-1]) if own_first and rank == 1 else x

    products = [in_order(x @ w.T, rank) for rank, (x, w) in enumerate(wide)]
    results = {
        "matmul": products,
        "all_gather_matmul": [
            in_order(torch.cat([x for x, _ in wide]), rank) @ w.T for rank, (_, w) in enumerate(wide)
        ],
        "matmul_reduce_scatter": sum(products).chunk(2),
        "matmul_all_reduce": [sum(products)] * 2,
    }[op]
    sum((2 * y * ways.double()).sum() for y, (_, _, ways, _) in zip(results, by_rank, strict=True)).backward()
    for (a, b, *_), (_, w) in zip(by_rank, wide, strict=True):
        assert (a.grad.dtype, b.grad.dtype) == (BF16, FP32)
        # GEMM-AR's gradient is summed over the ranks in bf16 first.
        bound = 1e-2 if op == "matmul_all_reduce" else 1e-6
        assert (b.grad - w.grad).abs().max() <= bound * w.grad.abs().max()


@pytest.mark.parametrize(
    ("design", "world_size", "own_first", "dtype"),
    [
        ("by_shards", 3, True, BF16),
        ("by_shards", 2, False, FP32),
        *(
            pytest.param(design, world_size, own_first, dtype, marks=SWEEP)
            for design in AllGatherMatmulBackward.designs
            for world_size in (2, 3, 4)
            for own_first in (False, True)
            for dtype in (BF16, FP32)
        ),
    ],
)
def test_every_design_gives_the_gradients(design, world_size, own_first, dtype):
    """A's in the operands' dtype, B's in fp32, which every design adds up in; twice, in both halves of the workspace."""
    shapes = (5, 24), (6, 24), (5 * world_size, 6)

    def main(team):
        for call in range(2):
            a, b, grad = (x.detach() for x in leaves(team.rank + 10 * call, *shapes, dtype=dtype))
            given = BackwardArguments(grad, a, b, team.name, own_first, FP32)
            found = ALL_GATHER_MATMUL_BACKWARD.run(design, team, given)
        return found, (a, b, grad)

    by_rank = weft.simulate(main, world_size)
    orders = [[(rank * own_first + place) % world_size for place in range(world_size)] for rank in range(world_size)]
    summands = [(grad.double() @ b.double()).chunk(world_size) for _, (_, b, grad) in by_rank]
    for rank, ((of_a, of_b), (_, _, grad)) in enumerate(by_rank):
        whole = torch.cat([by_rank[s][1][0] for s in orders[rank]]).double()
        of_shard = sum(summands[r][orders[r].index(rank)] for r in range(world_size))
        assert (of_a.dtype, of_b.dtype) == (dtype, FP32)
        assert_close(of_a, of_shard, 6, partials=world_size, what=f"rank {rank}: of A")
        assert_close(of_b, grad.double().T @ whole, 5 * world_size, partials=world_size, what=f"rank {rank}: of B")


def test_a_design_of_the_backward_is_taken_by_name_or_refused_in_one_line():
    call = GemmCall(8192, 5120, 4096, BF16, dense=False)
    plan = ALL_GATHER_MATMUL_BACKWARD.plan
    named = plan(call._replace(design="by_shards"), machine(H200, 2))
    assert (named.name, named.reason) == ("by_shards", "asked for design='by_shards'")
    assert named.design.scatter == plan(call, machine(H200, 2)).design.scatter
    for design, ranks, message in (
        ("by_shards", 1, "design='by_shards' needs several ranks of one node; take in_turn"),
        ("k_shards", 2, "design='k_shards' is not one of under_scatter, by_shards, in_turn"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(call._replace(design=design), machine(H200, ranks))


@pytest.mark.parametrize("own_first", [False, pytest.param(True, marks=SWEEP)])
def test_the_gradients_of_all_gather_matmul_have_gradients(own_first):
    """Of <u, dA> + <v, dB> by the result's gradient and both operands, against torch in one process."""
    shapes = (4, 8), (6, 8), (8, 6), (4, 8), (6, 8)

    def main(team):
        a, b, grad, u, v = leaves(team.rank, *shapes)
        y = ops.all_gather_matmul(a, b, team, own_first=own_first)
        first = torch.autograd.grad(y, (a, b), grad, create_graph=True)
        return torch.autograd.grad((first[0] * u).sum() + (first[1] * v).sum(), (a, b, grad))

    found = weft.simulate(main, 2)
    ranks = [[x.detach().double().requires_grad_() for x in leaves(rank, *shapes)] for rank in range(2)]
    order = [(0, 1), (1, 0) if own_first else (0, 1)]
    loss = sum(
        (torch.cat([ranks[s][0] for s in order[r]]) @ b.T * grad).sum() for r, (_, b, grad, _, _) in enumerate(ranks)
    )
    firsts = torch.autograd.grad(loss, [x for one in ranks for x in one[:2]], create_graph=True)
    second = sum((d * w).sum() for d, w in zip(firsts, [w for one in ranks for w in one[3:]], strict=True))
    expected = torch.autograd.grad(second, [x for one in ranks for x in one[:3]])
    for rank, grads in enumerate(found):
        for grad, wanted in zip(grads, expected[3 * rank : 3 * rank + 3], strict=True):
            assert_close(grad, wanted, 24, partials=1, what=f"rank {rank}")


@pytest.mark.parametrize(("design", "reader"), [("auto", "_run"), ("by_shards", "widened")])
def test_the_check_sees_a_backward_that_does_not_wait_for_the_gather(design, reader, monkeypatch):
    def main(team):
        a, b = leaves(team.rank, (16, 16), (16, 16))
        for _ in range(2):  # the first call's allocations are a rendezvous
            y, grad = ops.all_gather_matmul(a, b, team), torch.ones(32, 16)
            if design == "auto":
                y.backward(grad)
            else:
                given = BackwardArguments(grad, a.detach(), b.detach(), team.name, False, FP32)
                ALL_GATHER_MATMUL_BACKWARD.run(design, team, given)

    monkeypatch.setattr(all_gather_matmul_backward, "rows_overlap", lambda rows: True)
    forget()
    monkeypatch.setattr(all_gather_matmul_backward, "await_chunk", lambda *arguments: None)
    report = weft.check.check(main, 2, schedules=1)
    forget()
    assert not report.ok and reader in str(report), report


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_backward_by_shards_between_forwards_has_no_findings(world_size):
    """Forward, backward and forward share one channel."""

    def main(team):
        for own_first in (False, True, False):
            a, b = (x.detach() for x in leaves(team.rank, (6, 16), (24, 16)))
            y = ops.all_gather_matmul(a, b, team, own_first=own_first)
            given = BackwardArguments(y, a, b, team.name, own_first, FP32)
            ALL_GATHER_MATMUL_BACKWARD.run("by_shards", team, given)

    report = weft.check.check(main, world_size, schedules=8)
    assert report.ok, report


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_on_gpus_no_plan_copies_a_weight_by_columns(world_size):
    """cuBLAS reads it by its strides, also at the shapes of which a row of the table names a kernel of weft's."""
    here, rows = machine(H200, world_size), table.read(table.file_for("NVIDIA H200", world_size)).rows
    for op in (MATMUL, ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER):
        shapes = {row.shape for row in rows if row.op == op.name} | {(256, 5120, 4096), (8192, 5120, 12800)}
        for M, N, K in shapes:
            planned = op.plan(GemmCall(M, N, K, BF16, dense=False), here)
            design = planned.design
            assert planned.name in ("cublas", "pipelined", "sequential"), (op.name, M, N, K, planned)
            if planned.name == "sequential":
                assert design.gemm.name == "cublas", (op.name, M, N, K, design)


def test_the_plan_of_a_backward_overlaps_the_gather_of_many_rows():
    op, here = AllGatherMatmulBackward(), machine(H200, 2)
    found = [op.plan(GemmCall(M, 5120, 4096, BF16, dense=False), here) for M in (256, 8192)]
    assert [planned.name for planned in found] == ["in_turn", "under_scatter"]
    assert found[1].design.scatter.name == "pipelined"
