"""Matrix products against plain PyTorch, on virtual ranks: one table, several schedules, several calls in a row."""

import dataclasses
import importlib
import re

import pytest
import torch
from weft.ops.gemm.config import GemmConfig, configured

import weft
from tests.ops.cases import BF16, FP32, Case
from tests.ops.closeness import assert_close, assert_identical
from tests.ops.matmul_cases import MATMUL_OPS, MATMULS, OWN_FIRST, config
from tests.ops.test_collectives import check_replicated, run_cases
from weft import ops
from weft.errors import HeapExhausted
from weft.ops.gemm import cublas
from weft.plan import table as tuned
from weft.runtime import capabilities

FUSED = MATMUL_OPS[1:]


def test_every_field_of_the_config_moves():
    moved = {name for case in MATMULS for name, _ in case.config}
    assert moved == {field.name for field in dataclasses.fields(GemmConfig)}


@pytest.mark.parametrize("op", [*MATMUL_OPS, *OWN_FIRST])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_table(world_size, op):
    cases = [case for case in MATMULS if case.op == op and case.world_size == world_size]
    calls = 2 if world_size == 8 else 3
    check_replicated(weft.simulate(run_cases, world_size, seed=world_size, args=(cases, calls)))


def interleaved(world_size):
    """Calls of all ops that share workspaces, large after small and small after large; the last outgrow the first."""
    w = world_size
    for rows, N, K, block in ((w, 32, 16, 16), (w * 18, 40, 24, 16), (w * 2, 16, 32, 32), (w * 40, 64, 33, 32)):
        for op in FUSED:
            yield Case(op=op, world_size=w, dtype=BF16, shape=(rows, N, K), config=config(block, block, 16, group=2))
            yield Case(op="all_reduce", world_size=w, dtype=BF16, shape=(rows,))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("world_size", "slow"), [(2, {1: 20.0}), (3, None), (4, {0: 20.0})])
def test_mixed_shapes_back_to_back(world_size, slow, seed):
    results = weft.simulate(run_cases, world_size, seed=seed, slow=slow, args=(list(interleaved(world_size)), 2))
    check_replicated(results)


def test_a_workspace_grows():
    """More than the smallest capacity, then less again: the larger one is used from then on."""
    cases = [
        Case(op=op, world_size=2, dtype=FP32, shape=(rows, 512, 300), config=config(64, 256, 256))
        for rows in (64, 512, 32)
        for op in FUSED
    ]
    weft.simulate(run_cases, 2, args=(cases, 1))


@pytest.mark.parametrize("design", ["fused", "segments"])
@pytest.mark.parametrize("seed", range(4))
def test_a_replayed_graph_fills_the_same_half_each_time(seed, design):
    """A graph with one call writes the same half of A_full at every replay: the device must wait, not the parity."""
    gather = importlib.import_module("weft.ops.overlap.all_gather_matmul")
    chosen = GemmConfig(block_m=16, block_n=16, block_k=16, design=design)

    def main(team):
        results = []
        for call in range(5):
            a, b = (torch.full((20, 24), float(call + team.rank)), torch.ones(16, 24))
            results.append(gather.run(a, b, team, config=chosen))
            for workspace in team.workspace(("all_gather_matmul", FP32), dict).values():
                workspace.calls = 0
        for call, result in enumerate(results):
            expected = torch.arange(call, call + team.size).repeat_interleave(20)[:, None] * torch.full((1, 16), 24.0)
            assert_identical(result, expected, what=f"call {call}")

    weft.simulate(main, 3, seed=seed, slow={seed % 3: 20.0})


@pytest.mark.parametrize("seed", range(4))
def test_one_buffer_serves_call_after_call_where_two_are_too_large(monkeypatch, seed):
    module = importlib.import_module("weft.ops.overlap.matmul_all_reduce")
    monkeypatch.setattr(module, "MOST_HALVED", 0)
    cases = [
        Case(op="matmul_all_reduce", world_size=3, dtype=BF16, shape=shape, config=config(16, 16, 32, **fields))
        for shape in ((60, 24, 40), (31, 40, 24))
        for fields in ({"design": "segments"}, {"design": "segments", "chunks": 3, "lanes": 1})
    ]

    def main(team):
        found = run_cases(team, cases, 3)
        [workspace] = team.workspace(("matmul_all_reduce segments", BF16), dict).values()
        assert len(workspace.buffers) == 1
        return found

    check_replicated(weft.simulate(main, 3, seed=seed, slow={seed % 3: 20.0}))


def test_a_design_that_was_asked_for_is_not_replaced(monkeypatch):
    """One rank has no segments but its own, which are the library's."""
    module, asked = (
        importlib.import_module("weft.ops.gemm.matmul"),
        GemmConfig(block_m=16, block_n=16, block_k=16),
    )
    segments = dataclasses.replace(asked, design="segments")
    monkeypatch.setattr(module, "matmul_kernel", None)

    def main(team):
        a, b = torch.ones(4, 8), torch.ones(3, 8)
        with pytest.raises(ValueError, match="matmul: design='segments' is not one of 'fused', 'library'"):
            module.run(a, b, segments)
        for op in FUSED:
            assert_identical(
                importlib.import_module(getattr(weft.ops, op).__module__).run(a, b, team, segments),
                torch.full((4, 3), 8.0),
            )

    weft.simulate(main, 1)


def test_many_rows_a_rank_are_all_reduced_in_two_blocks():
    h200 = dataclasses.replace(capabilities.simulated(4, 132), device_name="Some GPU", arch="sm_90")
    for world_size, rows, blocks in (
        (2, 2**15, 0),
        (3, 6144, 2),
        (3, 6143, 0),
        (4, 8192, 2),
        (4, 8191, 0),
        (8, 8192, 0),
    ):
        for K in (1024, 8192):
            found = configured("matmul_all_reduce", rows, 5120, K, BF16, world_size, h200)
            assert (found.chunks if found.design == "segments" else 0) == blocks, (world_size, rows, K)


def test_sums_that_32_bits_cannot_count_go_by_segments(monkeypatch):
    module = importlib.import_module("weft.ops.overlap.matmul_all_reduce")
    monkeypatch.setattr(module, "MOST_ELEMENTS", 1)

    def main(team):
        generator = torch.Generator().manual_seed(team.rank)
        a, b = (torch.randn(size, generator=generator) for size in ((40, 24), (20, 24)))
        found = module.run(a, b, team)
        with pytest.raises(
            ValueError, match="design='fused' has slots of .* for M=40, N=20, .* pass design='segments'"
        ):
            module.run(a, b, team, GemmConfig(block_m=16, block_n=16, block_k=16))
        assert ("matmul_all_reduce segments", torch.float32) in team._workspaces
        return found, a @ b.T

    results = weft.simulate(main, 3)
    for found, _ in results:
        torch.testing.assert_close(found, sum(product for _, product in results), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("op", "chunks"), [("matmul_reduce_scatter", 1), ("matmul_all_reduce", 1), ("matmul_all_reduce", 3)]
)
@pytest.mark.parametrize("seed", range(4))
def test_replayed_segments_of_a_sum_fill_the_same_half_each_time(seed, op, chunks):
    module = importlib.import_module(getattr(weft.ops, op).__module__)
    chosen = GemmConfig(block_m=16, block_n=16, block_k=16, design="segments", chunks=chunks)
    rows, place = 60 if op == "matmul_all_reduce" else 20, torch.arange(60.0)[:, None].expand(60, 24)

    def main(team):
        results = []
        for call in range(5):
            a, b = place + float(call + team.rank), torch.ones(16, 24)
            results.append(module.run(a, b, team, config=chosen))
            for workspace in team.workspace((f"{op} segments", FP32), dict).values():
                workspace.calls = 0
        for call, result in enumerate(results):
            mine = slice(0, 60) if rows == 60 else slice(20 * team.rank, 20 * team.rank + 20)
            expected = (24.0 * (3 * call + 3) + 72.0 * place[mine, :1]).expand(rows, 16)
            assert_identical(result, expected.contiguous(), what=f"call {call}")

    weft.simulate(main, 3, seed=seed, slow={seed % 3: 20.0})


def test_own_pieces_are_products_of_their_own(monkeypatch):
    products = []

    def noted(a, b, out=None, **words):
        products.append(len(a))
        return multiply(a, b, out, **words)

    multiply = cublas.matmul
    monkeypatch.setattr(cublas, "matmul", noted)

    def main(team, chosen):
        module = importlib.import_module("weft.ops.overlap.matmul_reduce_scatter")
        return module.run(torch.ones(57, 24), torch.ones(16, 24), team, chosen)

    for fields, expected in (
        ({}, [19] * 9),
        ({"own_pieces": 2}, [19] * 6 + [10, 9] * 3),
        ({"own_pieces": 40}, [19] * 6 + [1] * 57),
    ):
        products.clear()
        chosen = GemmConfig(block_m=16, block_n=16, block_k=16, design="segments", **fields)
        for result in weft.simulate(main, 3, args=(chosen,)):
            assert_identical(result, torch.full((19, 16), 72.0))
        assert sorted(products) == sorted(expected)


@pytest.mark.parametrize("op", FUSED)
def test_the_same_bits_whatever_the_schedule(op):
    case = Case(op=op, world_size=3, dtype=BF16, shape=(27, 40, 64), config=config(16, 16, 32))
    first, second = (
        weft.simulate(run_cases, 3, seed=seed, sms=sms, args=([case], 1)) for seed, sms in ((1, 8), (2, 2))
    )
    for rank in range(3):
        assert_identical(first[rank][0][2], second[rank][0][2])


def test_own_rows_first_has_rows_of_its_own_for_their_bucket_alone(monkeypatch, tmp_path):
    path = tuned.file_for("Some GPU", 4, tmp_path)
    monkeypatch.setattr(tuned, "file_for", lambda gpu, world_size: path)
    tile = {"block_m": 128, "block_n": 256, "block_k": 64, "design": "segments"}
    made = (
        tuned.Row(op=op, dtype="bfloat16", shape=(M, 512, 256), config=tile | {"span": span}, us=1.0)
        for op, M, span in (("all_gather_matmul", 4096, 1), ("all_gather_matmul+own_first", 4096, 3))
    )
    tuned.write(path, tuned.Table(gpu="Some GPU", world_size=4, rows=tuple(made)))
    caps = dataclasses.replace(capabilities.simulated(4, 132), device_name="Some GPU", arch="sm_90")

    def span(M, own_first):
        return configured("all_gather_matmul", M, 512, 256, BF16, 4, caps, own_first).span

    assert [span(4096, own_first) for own_first in (False, True)] == [1, 3]
    assert [span(M, True) for M in (3000, 2048, 8192)] == [3, 1, 1]


def test_ranks_may_hold_different_shares_of_K():
    def main(team):
        parts = [torch.randn(12, K, generator=torch.Generator().manual_seed(K)) for K in (5, 16, 40)]
        a = b = parts[team.rank]
        expected = sum(part.double() @ part.double().T for part in parts)
        assert_close(ops.matmul_all_reduce(a, b, team), expected, 61, partials=2)
        assert_close(ops.matmul_reduce_scatter(a, b, team), expected[4 * team.rank :][:4], 61, partials=2)

    weft.simulate(main, 3)


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
        (
            lambda team: GemmConfig(block_m=16, block_n=16, block_k=16, design="segments", chunks=2, span=2),
            r"span=2 joins what chunks=2 cuts",
        ),
        (
            lambda team: GemmConfig(block_m=16, block_n=16, block_k=16, own_pieces=2, accumulate=True),
            r"own_pieces=2 is for sums behind a GEMM, which accumulate=True has none of",
        ),
        (lambda team: GemmConfig(block_m=16, block_n=16, block_k=16, own_pieces=0), r"own_pieces=0 is not positive"),
        (lambda team: GemmConfig(block_m=48, block_n=16, block_k=16), r"block_m=48 is not a power of two"),
        (lambda team: GemmConfig(block_m=16, block_n=16, block_k=16, chunks=9), r"chunks=9 is not in 1 \.\. 8"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    def main(team):
        with pytest.raises(ValueError, match=message):
            call(team)

    weft.simulate(main, 2)


@pytest.mark.parametrize("op", FUSED)
def test_ranks_must_bring_what_the_others_do(op):
    rows = "a_shard.shape[0]" if op == "all_gather_matmul" else "a.shape[0]"

    def main(team):
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
            for op in FUSED:
                getattr(ops, op)(torch.ones(4, 8), torch.ones(16, 8), team)

        call()
        monkeypatch.setattr(team, "exchange", None)
        call()

    weft.simulate(main, 2)


def test_a_heap_that_is_too_small_says_so():
    def main(team):
        with pytest.raises(HeapExhausted, match=r"rank \d: .* bytes wanted .* heap_bytes="):
            ops.matmul_all_reduce(torch.ones(512, 16), torch.ones(512, 16), team)

    weft.simulate(main, 2, heap_bytes=1 << 20)


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


def test_schemas_and_fakes_tell_the_truth():
    def main(team):
        a, b = torch.randn(4, 6), torch.randn(8, 6).t().contiguous().t()
        for op in MATMUL_OPS:
            args = (a, b) if op == "matmul" else (a, b, team.name)
            tests = ("test_schema", "test_faketensor", "test_autograd_registration")
            torch.library.opcheck(getattr(torch.ops.weft, op).default, args, test_utils=tests)

    weft.simulate(main, 2)


@pytest.mark.parametrize(
    ("op", "own_first"),
    [*((op, False) for op in MATMUL_OPS), ("all_gather_matmul", True), ("matmul_reduce_scatter", True)],
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
