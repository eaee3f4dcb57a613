"""The overlapped ops with fp8 weights on virtual ranks, against plain torch, and what they refuse."""

from contextlib import nullcontext

import pytest
import torch

import weft
import weft.check
from tests.ops.checking import assert_close, assert_identical, check_replicated, run_cases
from tests.ops.layer_cases import mutated
from weft import ops
from weft.kernels.fp8 import E4M3, Fp8, by_torch, quantized_rows, quantized_weight
from weft.ops.case import BF16, Case
from weft.ops.gemm.gemm_op import fp8_scheme, rotated
from weft.ops.op import find_op
from weft.ops.overlap import (
    all_gather_matmul,
    gathered,
    matmul_all_reduce,
    matmul_reduce_scatter,
    operands,
    pipelined,
)
from weft.ops.overlap.all_gather_matmul import ALL_GATHER_MATMUL, Pipelined
from weft.plan.memo import forget
from weft.plan.planned import machine
from weft.runtime import capabilities


def random(name, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(name))


def exact(x, weight):
    rows = Fp8(*by_torch(x, 128 if weight.scales.shape[1] > 1 else x.shape[1]))
    return rows.dequantized(torch.float64) @ weight.dequantized(torch.float64).T


@pytest.mark.parametrize("scheme", ["block", "channel"])
@pytest.mark.parametrize("W", [2, 3, 4])
def test_against_plain_torch(W, scheme):
    M, N, K = 5, 48, 144

    def main(team):
        rank, whole = team.rank, random(0, W * M, K).bfloat16()
        weights = [quantized_weight(random(1 + 10 * rank, N, K), scheme), quantized_weight(random(2, 16, K), scheme)]
        shard = whole[rank * M : (rank + 1) * M].contiguous()
        both = ops.all_gather_matmul(shard, weights, team)
        for out, weight in zip(both, weights, strict=True):
            assert_close(out, exact(whole, weight), K, what="gathered")
            assert_identical(ops.all_gather_matmul(shard, weight, team), out, what="one weight")
        turned = ops.all_gather_matmul(shard, weights[0], team, own_first=True)
        assert_identical(turned, rotated(both[0], rank, W), what="own rows first")

        inputs = [random(100 + r, W * M, K).bfloat16() for r in range(W)]
        shares = [quantized_weight(random(200 + r, N, K), scheme) for r in range(W)]
        total = sum(exact(x, weight) for x, weight in zip(inputs, shares, strict=True))
        reduced = ops.matmul_all_reduce(inputs[rank], shares[rank], team)
        assert_close(reduced, total, K * W, partials=W - 1, what="all-reduced")
        scattered = ops.matmul_reduce_scatter(inputs[rank], shares[rank], team)
        assert_close(scattered, total[rank * M : (rank + 1) * M], K * W, partials=W - 1, what="scattered")
        mine = rotated(inputs[rank], rank, W)
        assert_identical(
            ops.matmul_reduce_scatter(mine, shares[rank], team, own_first=True), scattered, what="own rows first"
        )
        return reduced

    results = weft.simulate(main, W)
    for result in results[1:]:
        assert_identical(result, results[0], what="the same bits on all ranks")


OPS = [find_op(name) for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")]


def fp8_cases(op, W):
    return [case for case in op.cases() if case.world_size == W and fp8_scheme(case)]


@pytest.mark.parametrize("W", [1, 2, 3, 4])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_case_on_slow_ranks(op, W):
    cases = fp8_cases(op, W)
    check_replicated(weft.simulate(run_cases, W, seed=W, slow={W - 1: 20.0}, args=(cases, 2 if W == 2 else 1)))


def test_gradients_are_refused_in_all_gather_matmul():
    def main(team):
        x, weight = random(0, 4, 144).bfloat16().requires_grad_(), quantized_weight(random(1, 32, 144), "block")
        with pytest.raises(RuntimeError, match="all_gather_matmul: fp8 weights have no backward"):
            ops.all_gather_matmul(x, weight, team)
        with torch.no_grad():
            assert ops.all_gather_matmul(x, weight, team).shape == (8, 32)

    weft.simulate(main, 2)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_plans_of_fp8_weights(op):
    """Rows of 16-bit GEMMs do not decide them, and no plan takes a kernel that multiplies 16 bits."""
    for W in (2, 4, 8):
        here = machine(capabilities.simulated(W), W)
        for M in (W, 512, 4096, 16384):
            for form in ("block_fp8", "channel_fp8"):
                planned = op.plan(op.call_of((M, 5120, 2560), BF16, here, **{form: True}), here)
                assert planned.name == ("pipelined" if M > 512 else "sequential")
                designs = list(op.space(op.call_of((M, 5120, 2560), BF16, here, **{form: True}), here))
                assert designs and {op.name_of(design) for design in designs} <= {"pipelined", "sequential"}
    explained = ops.explain(f"{op.alias}+block_fp8", M=4096, N=5120, K=2560, world_size=2)
    assert explained.algorithm == "pipelined" and "+block_fp8 M=4096" in str(explained)
    with pytest.raises(
        ValueError, match="has the variants .*block_fp8, channel_fp8(, invariant)?(, fp8_wire)?, not 'fp8'"
    ):
        ops.explain(f"{op.alias}+fp8", M=4096, N=5120, K=2560, world_size=2)
    if "fused" in op.designs:
        with pytest.raises(ValueError, match="design='fused' multiplies rows of 16 bits"):
            ops.explain(f"{op.alias}+block_fp8", M=4096, N=5120, K=2560, world_size=2, algorithm="fused")


@pytest.mark.parametrize("op", [ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce])
def test_ranks_with_other_scales_are_refused(op):
    """They would send other bytes."""

    def main(team):
        weight = quantized_weight(torch.ones(16, 256), ("block", "channel")[team.rank])
        op(torch.ones(2, 256).bfloat16(), weight, team)

    with pytest.raises(ValueError, match=r"scales is \[\(1, .*on rank 0, \[\(16, .*on rank 1"):
        weft.simulate(main, 2)


def test_rows_that_come_in_fp8():
    """Of all forms, with rows that norms write: results are those of the 16-bit rows."""

    def main(team):
        x = random(team.rank, 10, 144).bfloat16()
        for scheme in ("block", "channel", "static"):
            weight = quantized_weight(random(7, 32, 144), "tensor" if scheme == "static" else scheme)
            if scheme == "static":
                weight = weight._replace(input_scale=torch.tensor([[0.02]]))
            rows = quantized_rows(x, weight.row_format, team.caps)
            for call in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce):
                assert_identical(call(rows, weight, team), call(x, weight, team), what=f"{call.__name__} {scheme}")
            for design in (Pipelined(chunks=2), Pipelined(span=2)):
                for local_first in (False, True):
                    found = ALL_GATHER_MATMUL.run(design, team, rows, weight, local_first)
                    wanted = ops.all_gather_matmul(x, weight, team, own_first=local_first)
                    assert_identical(found, wanted, what=f"{design} {scheme} {local_first}")
        one = Fp8(x.to(E4M3), torch.tensor([[1.0 + team.rank]]))  # a scale for all rows of this rank
        weight = quantized_weight(random(7, 32, 144), "channel")
        each = one._replace(scales=one.scales.expand(10, 1).contiguous())
        for design in (Pipelined(), None):
            if design is None:
                found, wanted = (ops.all_gather_matmul(rows, weight, team) for rows in (one, each))
            else:
                found, wanted = (ALL_GATHER_MATMUL.run(design, team, rows, weight) for rows in (one, each))
            assert_identical(found, wanted, what="a scale for all rows")

    weft.simulate(main, 2)


@pytest.mark.parametrize(("nodes", "node_size"), [(2, 2), (3, 1)])
def test_over_nodes(nodes, node_size, monkeypatch):
    W = nodes * node_size
    monkeypatch.setattr(matmul_all_reduce, "rows_overlap", lambda rows: True)
    forget()

    def main(team):
        cases = [
            Case(op=op.name, world_size=W, dtype=BF16, sizes=(M, 24, 144), fields=((form, True),))
            for op in OPS
            for form in ("block_fp8", "channel_fp8")
            for M in ((W * 5, W * 3 - 1) if op.replicated else (W * 5,))
        ]
        found = run_cases(team, cases, 1)
        weight = quantized_weight(random(5 + team.rank, 24, 144), "block")
        x = random(team.rank, W, 144).bfloat16()
        rows = quantized_rows(x, weight.row_format, team.caps)
        for call in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce):
            assert_identical(call(rows, weight, team), call(x, weight, team), what=call.__name__)
        return found

    check_replicated(weft.simulate(main, W, node_size=node_size))
    forget()


def test_compiles_without_a_graph_break():
    def main(team):
        x = random(team.rank, 6, 144).bfloat16()
        up, down = (
            quantized_weight(random(number, *size), "block") for number, size in enumerate(((32, 144), (16, 32)))
        )

        def both(x, up, down):
            y = ops.all_gather_matmul(x, up, team, own_first=True)
            return ops.matmul_reduce_scatter(y, down, team, own_first=True), ops.matmul_all_reduce(y, down, team)

        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
        for found, wanted in zip(compiled(x, up, down), both(x, up, down), strict=True):
            assert_identical(found, wanted)

    weft.simulate(main, 1)
    torch._dynamo.reset()


def test_wrong_arguments_are_refused():
    def main(team):
        x = torch.ones(2, 256).bfloat16()
        block, channel = (quantized_weight(torch.ones(16, 256), scheme) for scheme in ("block", "channel"))
        for call, message in (
            (lambda: ops.all_gather_matmul(x, [block, channel], team), "rows of different scales"),
            (
                lambda: ops.all_gather_matmul(x, block, team, return_gathered=True),
                "return_gathered=True with an fp8 weight",
            ),
            (lambda: ops.all_gather_matmul(x[:, :128], block, team), "x has K=128 columns and weight has 256"),
            (lambda: ops.matmul_reduce_scatter(x[:1], block, team), "M=1 is not divisible by world_size=2"),
            (lambda: ops.matmul_all_reduce(x.float(), block, team), "x.dtype=torch.float32 is not one of"),
        ):
            with pytest.raises(ValueError, match=message):
                call()

    weft.simulate(main, 2)


# --- planted mistakes ---------------------------------------------------------------------------------------------------

SENT = """            for target, source in before:
                team.copy_engine.put(target, source, peer)
            channel.send(team, *last, first_flags + place, number, peer)
"""
MUTANTS = {
    "rows before their scales": (
        SENT,
        """            channel.send(team, *(before or [last])[0], first_flags + place, number, peer)
            for target, source in [last] if before else []:
                team.copy_engine.put(target, source, peer)
""",
    ),
    "scales before their rows": (
        SENT,
        """            channel.send(team, *last, first_flags + place, number, peer)
            for target, source in before:
                team.copy_engine.put(target, source, peer)
""",
    ),
    "scales of the call before": (
        SENT,
        "            channel.send(team, *(before or [last])[0], first_flags + place, number, peer)\n",
    ),
    "scales of another rank": (
        "scales = self.scales[first * self.groups : last * self.groups]",
        "scales = self.scales.roll(self.rows * self.groups)[first * self.groups : last * self.groups]",
    ),
    "scales by rows": ("shard.scales[piece].t().contiguous().view(-1)", "shard.scales[piece].contiguous().view(-1)"),
    "the first piece's scales for every piece": (
        "shard.scales[piece].t()",
        "shard.scales[: piece.stop - piece.start].t()",
    ),
    "scales one row off": ("shard.scales[piece].t()", "shard.scales[piece].roll(1, 0).t()"),
}


@pytest.mark.parametrize("name", [None, *MUTANTS])
def test_a_planted_mistake_is_caught(name, tmp_path, monkeypatch):
    """By a wrong result, or as a race; without one neither shows."""
    mutant = mutated(gathered, *MUTANTS.get(name, (SENT, SENT)), f"gathered_mutant_{len(name or '')}", tmp_path)
    monkeypatch.setattr(all_gather_matmul, "begin_gather", mutant.begin_gather)
    case = Case(
        op="all_gather_matmul", world_size=2, dtype=BF16, sizes=(2 * 8, 24, 272),
        design=Pipelined(chunks=2), fields=(("block_fp8", True),),
    )  # fmt: skip
    with pytest.raises((AssertionError, weft.errors.WeftError)) if name else nullcontext():
        weft.simulate(run_cases, 2, seed=1, slow={1: 20.0}, args=([case], 3))
        report = weft.check.check(lambda team: run_cases(team, [case], 2), 2, schedules=8)
        assert report.ok, report


OF_PIECES = {
    "scales of the first rows for every piece": ("else a.scales[at]", "else a.scales[: at.stop - at.start]"),
    "a piece's scales one row off": ("else a.scales[at]", "else a.scales.roll(1, 0)[at]"),
    "scales of the pieces swapped": ("else a.scales[at]", "else a.scales.flip(0)[at]"),
}


@pytest.mark.parametrize("name", [None, *OF_PIECES])
@pytest.mark.parametrize("op", OPS[1:], ids=lambda op: op.name)
def test_a_mistake_in_the_scales_of_a_piece_is_caught(op, name, tmp_path, monkeypatch):
    """Of GEMM-RS and GEMM-AR, whose pieces are multiplied while earlier sums travel."""
    mutant = mutated(operands, *OF_PIECES.get(name, ("else a.scales[at]",) * 2), f"pieces_{len(name or '')}", tmp_path)
    for module in (pipelined, matmul_reduce_scatter, matmul_all_reduce):
        monkeypatch.setattr(module, "rows_at", mutant.rows_at)
    design = op.designs["pipelined"](chunks=2)
    case = Case(
        op=op.name, world_size=2, dtype=BF16, sizes=(2 * 8, 24, 272), design=design, fields=(("block_fp8", True),)
    )
    with pytest.raises(AssertionError) if name else nullcontext():
        weft.simulate(run_cases, 2, args=([case], 1))
