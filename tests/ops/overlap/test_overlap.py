"""What the overlapped GEMMs share: workspaces from call to call, designs that are asked for, agreement of the ranks."""

import re

import pytest
import torch

import weft
from tests.ops.checking import assert_close, assert_identical, check_replicated, run_cases
from tests.sampled import sampled
from weft import ops
from weft.errors import HeapExhausted
from weft.ops.case import BF16, FP32, Case
from weft.ops.collectives.collective import OneShot
from weft.ops.gemm import matmul as matmul_module
from weft.ops.gemm.matmul import MATMUL
from weft.ops.gemm.tile import Tile
from weft.ops.op import registered
from weft.ops.overlap import all_gather_matmul, matmul_reduce_scatter
from weft.ops.overlap.sequential import Overlapped
from weft.plan.planned import machine
from weft.runtime import capabilities
from weft.runtime.team.team import COMPARING
from weft.transport.plans import PushPlan

OPS = [op for op in registered() if isinstance(op, Overlapped)]
NAMES = [op.name for op in OPS]
GEMMS = ["matmul", *NAMES]


def design_of(op, tile):
    """The fused design on ``tile``, or the pipelined one of an op without."""
    return op.designs["fused"](tile=tile) if "fused" in op.designs else op.designs["pipelined"]()


def interleaved(world_size):
    """Calls of all ops that share workspaces, large after small and small after large; the last outgrow the first."""
    w = world_size
    for rows, N, K, block in ((w, 32, 16, 16), (w * 18, 40, 24, 16), (w * 2, 16, 32, 32), (w * 40, 64, 33, 32)):
        tile = Tile(block_m=block, block_n=block, block_k=16, group=2)
        for op in OPS:
            yield Case(op=op.name, world_size=w, dtype=BF16, sizes=(rows, N, K), design=design_of(op, tile))
            yield Case(op="all_reduce", world_size=w, dtype=BF16, sizes=(rows,))


@pytest.mark.parametrize(
    ("world_size", "slow", "seed"),
    sampled(
        ((*ranks, seed) for ranks in ((2, {1: 20.0}), (3, None), (4, {0: 20.0})) for seed in range(3)),
        lambda world_size, slow, seed: seed == world_size - 2 and world_size < 4,
    ),
)
def test_mixed_shapes_back_to_back(world_size, slow, seed):
    cases = list(interleaved(world_size))
    results = weft.simulate(run_cases, world_size, seed=seed, slow=slow, sms=8, args=(cases, 2))
    check_replicated(results)


def test_a_workspace_grows():
    """More than the smallest capacity, then less again: the larger one is used from then on."""
    tile = Tile(block_m=64, block_n=256, block_k=256)
    cases = [
        Case(op=op.name, world_size=2, dtype=FP32, sizes=(rows, 512, 300), design=design_of(op, tile))
        for rows in (64, 512, 32)
        for op in OPS
    ]
    weft.simulate(run_cases, 2, sms=8, args=(cases, 1))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_design_that_was_asked_for_is_not_replaced(op, monkeypatch):
    """One rank has no rows but its own, whose GEMM is cuBLAS's in the pipelined design."""
    here = machine(capabilities.simulated(1), 1)
    planned = op.plan(op.call_of((4, 3, 8), FP32, here, "pipelined"), here)
    assert planned.name == "sequential" and planned.design.gemm.name == "cublas"
    monkeypatch.setattr(matmul_module, "matmul_kernel", None)

    def main(team):
        assert_identical(op.run(planned.design, team, torch.ones(4, 8), torch.ones(3, 8)), torch.full((4, 3), 8.0))

    weft.simulate(main, 1)


def test_designs_of_other_ops_are_refused():
    for op in (MATMUL, *OPS):
        with pytest.raises(ValueError, match=f"{op.name}: design=.* is not one of {', '.join(op.designs)}"):
            op.run(OneShot(push=PushPlan(transport="lamport", row_bytes=64, num_warps=1)), None, None, None)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_the_same_bits_whatever_the_schedule(op):
    tile = Tile(block_m=16, block_n=16, block_k=32)
    case = Case(op=op.name, world_size=3, dtype=BF16, sizes=(27, 40, 64), design=design_of(op, tile))
    first, second = (
        weft.simulate(run_cases, 3, seed=seed, sms=sms, args=([case], 1)) for seed, sms in ((1, 8), (2, 2))
    )
    for rank in range(3):
        assert_identical(first[rank][0][2], second[rank][0][2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda team: ops.matmul_reduce_scatter(torch.ones(1001, 4), torch.ones(3, 4), team),
            r"M=1001 is not divisible by world_size=2; pad M to 1002",
        ),
        (lambda team: ops.matmul(torch.ones(2, 4), torch.ones(4, 3)), r"a has K=4 columns and b has 3"),
        (lambda team: ops.matmul(torch.ones(4), torch.ones(4, 4)), r"a has shape \(4,\); pass a matrix"),
        (lambda team: ops.matmul_all_reduce(torch.ones(0, 4), torch.ones(4, 4), team), r"a has shape \(0, 4\)"),
        (
            lambda team: ops.all_gather_matmul(torch.ones(2, 4), torch.ones(4, 4).half(), team),
            r"a_shard.dtype=.*float16",
        ),
        (
            lambda team: ops.matmul(torch.ones(2, 4).double(), torch.ones(4, 4).double()),
            r"must be the same one of float16",
        ),
        (
            lambda team: ops.all_gather_matmul(torch.ones(2, 4, device="meta"), torch.ones(4, 4), team),
            r"is on meta, not on",
        ),
        (lambda team: all_gather_matmul.Pipelined(chunks=2, span=2), r"span=2 joins what chunks=2 cuts"),
        (
            lambda team: matmul_reduce_scatter.Pipelined(local_pieces=2, accumulate=True),
            r"local_pieces=2 is for sums after a GEMM, and accumulate=True has none",
        ),
        (lambda team: matmul_reduce_scatter.Pipelined(local_pieces=0), r"local_pieces=0 is not positive"),
        (lambda team: Tile(block_m=48, block_n=16, block_k=16), r"block_m=48 is not a power of two"),
        (lambda team: all_gather_matmul.Pipelined(chunks=9), r"chunks=9 is not in 1 \.\. 8"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    def main(team):
        with pytest.raises(ValueError, match=message):
            call(team)

    weft.simulate(main, 2)


def test_ranks_may_hold_different_shares_of_K():
    def main(team):
        parts = [torch.randn(12, K, generator=torch.Generator().manual_seed(K)) for K in (5, 16, 40)]
        a = b = parts[team.rank]
        expected = sum(part.double() @ part.double().T for part in parts)
        assert_close(ops.matmul_all_reduce(a, b, team), expected, 61, partials=2)
        assert_close(ops.matmul_reduce_scatter(a, b, team), expected[4 * team.rank :][:4], 61, partials=2)

    weft.simulate(main, 3)


@pytest.mark.parametrize("op", NAMES)
def test_ranks_must_bring_what_the_others_do(op):
    rows = "a_shard.shape[0]" if op == "all_gather_matmul" else "a.shape[0]"

    def main(team):
        COMPARING.discard(team.name)  # as on GPUs without debug

        def call(M=4, N=16, dtype=FP32, **more):
            return getattr(ops, op)(torch.ones(M, 8, dtype=dtype), torch.ones(N, 8, dtype=dtype), team, **more)

        for given, message in (
            ({"M": 16 + 16 * team.rank}, f"{rows} is 16 on rank 0, 32 on rank 1"),
            ({"N": 16 + 8 * team.rank}, "b.shape[0] is 16 on rank 0, 24 on rank 1"),
            ({"dtype": (BF16, FP32)[team.rank]}, "dtype is torch.bfloat16 on rank 0, torch.float32 on rank 1"),
            ({"own_first": team.rank == 0}, "own_first is True on rank 0, False on rank 1"),
        ):
            if op == "matmul_all_reduce" and "own_first" in given:
                continue
            for _ in range(2):
                with pytest.raises(ValueError, match=re.escape(f"{op}: {message}; pass the same on all ranks")):
                    call(**given)
        return call().shape

    rows_of_result = {"all_gather_matmul": 8, "matmul_reduce_scatter": 2, "matmul_all_reduce": 4}[op]
    assert weft.simulate(main, 2) == [(rows_of_result, 16)] * 2


def test_ranks_meet_once_for_what_they_bring(monkeypatch):
    def main(team):
        def call():
            for op in NAMES:
                getattr(ops, op)(torch.ones(4, 8), torch.ones(16, 8), team)

        call()
        monkeypatch.setattr(team, "exchange", None)
        call()

    weft.simulate(main, 2)


def test_a_heap_that_is_too_small_says_so():
    def main(team):
        with pytest.raises(HeapExhausted, match=r"rank \d: .* bytes wanted .* heap_bytes="):
            ops.matmul_all_reduce(torch.ones(512, 16), torch.ones(512, 16), team)

    weft.simulate(main, 2, heap_bytes=1 << 19)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(backend):
    def mlp(x, up, down, team):
        h = torch.relu(ops.all_gather_matmul(x, up, team))
        return ops.matmul_reduce_scatter(h, down, team) + ops.matmul_all_reduce(x, ops.matmul(up, up), team)

    def main(team):
        compiled = torch.compile(lambda x, up, down: mlp(x, up, down, team), fullgraph=True, backend=backend)
        for call in range(2):
            generator = torch.Generator().manual_seed(10 * call + team.rank)
            x, up, down = (torch.randn(shape, generator=generator) for shape in ((8, 16), (16, 16), (16, 16)))
            assert_identical(compiled(x, up, down), mlp(x, up, down, team), what=f"call {call}")

    weft.simulate(main, 2)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("op", "own_first"),
    [*((op, False) for op in GEMMS), ("all_gather_matmul", True), ("matmul_reduce_scatter", True)],
)
def test_backward(op, own_first):
    """Gradients of the sum over ranks of <weights_r, op_r> against autograd through the reference in one process."""
    shapes = ((4, 5), (3, 5))

    def inputs(rank):
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]

    def main(team):
        a, b = inputs(team.rank)
        more = {"own_first": True} if own_first else {}
        y = ops.matmul(a, b) if op == "matmul" else getattr(ops, op)(a, b, team, **more)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(100 + team.rank))
        (y * weights).sum().backward()
        return a.grad, b.grad, weights

    by_rank = weft.simulate(main, 2)
    everyone = [inputs(rank) for rank in range(2)]
    a = [a for a, _ in everyone]

    def in_order(x, rank):
        """Of W = 2 halves, rank 1's own comes first."""
        return torch.cat(x.chunk(2)[::-1]) if own_first and rank == 1 else x

    products = [in_order(x @ y.T, rank) for rank, (x, y) in enumerate(everyone)]
    results = {
        "matmul": products,
        "all_gather_matmul": [in_order(torch.cat(a), rank) @ b.T for rank, (_, b) in enumerate(everyone)],
        "matmul_reduce_scatter": sum(products).chunk(2),
        "matmul_all_reduce": [sum(products)] * 2,
    }[op]
    sum((y * weights).sum() for y, (*_, weights) in zip(results, by_rank, strict=True)).backward()
    for rank, (grad_a, grad_b, _) in enumerate(by_rank):
        assert_close(grad_a, everyone[rank][0].grad, 6, partials=1, what=f"gradient of rank {rank}'s a")
        assert_close(grad_b, everyone[rank][1].grad, 8, partials=1, what=f"gradient of rank {rank}'s b")
