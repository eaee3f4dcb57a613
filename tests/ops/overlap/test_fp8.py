"""The overlapped ops with fp8 weights on virtual ranks, against plain torch, and what they refuse."""

from contextlib import nullcontext

import pytest
import torch

import weft
import weft.check
from tests.ops.checking import assert_close, assert_identical, check_replicated, run_cases
from tests.ops.layer_cases import mutated
from weft import ops
from weft.kernels.fp8 import Fp8, by_torch, quantized_weight
from weft.ops.case import BF16, Case
from weft.ops.gemm.gemm_op import fp8_scheme, rotated
from weft.ops.op import find_op
from weft.ops.overlap import all_gather_matmul, gathered
from weft.ops.overlap.all_gather_matmul import Pipelined


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
