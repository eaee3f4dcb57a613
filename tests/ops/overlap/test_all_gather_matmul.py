"""all_gather_matmul: replays, rows in the order of arrival, several b, the gathered rows."""

import dataclasses
import itertools

import pytest
import torch

import weft
from tests.ops.checking import assert_close, assert_identical
from tests.sampled import sampled
from weft import ops
from weft.ops.case import BF16, FP32
from weft.ops.overlap.all_gather_matmul import ALL_GATHER_MATMUL, Pipelined
from weft.ops.overlap.operands import call_of
from weft.plan import table
from weft.plan.planned import machine, machine_of
from weft.runtime import capabilities


def test_local_first_has_rows_of_its_own_for_their_bucket_alone(monkeypatch, tmp_path):
    path = table.file_for("Some GPU", 4, tmp_path)
    monkeypatch.setattr(table, "file_for", lambda gpu, world_size: path)
    made = (
        table.Row(op=op, dtype="bfloat16", shape=(M, 512, 256), design="pipelined", config={"span": span}, us=1.0)
        for op, M, span in (("all_gather_matmul", 4096, 1), ("all_gather_matmul+local_first", 4096, 3))
    )
    table.write(path, table.Table(gpu="Some GPU", world_size=4, rows=tuple(made)))
    here = machine(dataclasses.replace(capabilities.simulated(4), device_name="Some GPU", is_simulated=False), 4)

    def span(M, local_first):
        call = ALL_GATHER_MATMUL.call_of((M, 512, 256), BF16, here, local_first=local_first)
        return ALL_GATHER_MATMUL.plan(call, here).design.span

    assert [span(4096, local_first) for local_first in (False, True)] == [1, 3]
    assert [span(M, True) for M in (3000, 2048, 8192)] == [3, 1, 1]


DESIGNS = {"pipelined": Pipelined(chunks=2), "sequential": None}


def operands(rank, columns=(24, 10, 33), dtype=BF16):
    """A shard, and several b: with rows contiguous, then with columns, then with rows again."""
    generator = torch.Generator().manual_seed(rank)
    shard = torch.randn((6, 40), generator=generator).to(dtype)
    bs = [torch.randn((N, 40), generator=generator).to(dtype) for N in columns]
    bs[1] = bs[1].t().contiguous().t()
    return shard, bs


def gathered_at(rank, world_size, local_first):
    shards = [operands(source)[0] for source in range(world_size)]
    return torch.cat([*shards[rank:], *shards[:rank]] if local_first else shards)


@pytest.mark.parametrize(
    ("world_size", "local_first"),
    sampled(
        itertools.product((1, 2, 3), (False, True)), lambda world_size, local_first: (world_size == 3) is local_first
    ),
)
def test_several_b_of_either_stride_share_one_gather(world_size, local_first):
    """Every design: the results are those of a call for each b, and the gathered rows come bit for bit."""

    def main(team):
        shard, bs = operands(team.rank)
        expected = gathered_at(team.rank, team.size, local_first)
        here = machine(team.caps, team.size)
        for name in DESIGNS if team.size > 1 else ("sequential",):
            call = ALL_GATHER_MATMUL.call_of((6 * team.size, 24, 40), BF16, here, name, local_first=local_first)
            design = DESIGNS[name] or ALL_GATHER_MATMUL.plan(call, here).design
            for _ in range(2):
                *outs, gathered = ALL_GATHER_MATMUL.run_several(design, team, shard, bs, local_first, gathers=True)
                assert_identical(gathered, expected, what=name)
                for out, b in zip(outs, bs, strict=True):
                    assert_close(out, expected.double() @ b.double().T, 40, what=name)
                    assert_identical(ALL_GATHER_MATMUL.run(design, team, shard, b, local_first), out, what=name)
        outs, gathered = ops.all_gather_matmul(shard, bs, team, own_first=local_first, return_gathered=True)
        assert_identical(gathered, expected)
        assert isinstance(outs, list) and len(outs) == len(bs)
        one, again = ops.all_gather_matmul(shard, bs[1], team, own_first=local_first, return_gathered=True)
        assert_identical(again, expected)
        for out, b in zip((*outs, one), (*bs, bs[1]), strict=True):
            assert_close(out, expected.double() @ b.double().T, 40)
        [alone] = ops.all_gather_matmul(shard, bs[:1], team, own_first=local_first)
        assert_identical(alone, ops.all_gather_matmul(shard, bs[0], team, own_first=local_first))

    weft.simulate(main, world_size, seed=world_size)


@pytest.mark.parametrize("local_first", [False, True], ids=["ranks", "local first"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_backward_of_several_b_and_the_gathered_rows(world_size, local_first):
    """Gradients of the sum over ranks of <weights, (results, gathered rows)> against autograd through the reference."""

    def leaves(rank):
        shard, bs = operands(rank, columns=(6, 9), dtype=FP32)
        return [x.detach().requires_grad_() for x in (shard, *bs)]

    def weights(rank, results):
        generator = torch.Generator().manual_seed(100 + rank)
        return [torch.randn(result.shape, generator=generator) for result in results]

    def loss(rank, results):
        return sum((x * weight).sum() for x, weight in zip(results, weights(rank, results), strict=True))

    def main(team):
        shard, *bs = leaves(team.rank)
        outs, gathered = ops.all_gather_matmul(shard, bs, team, own_first=local_first, return_gathered=True)
        loss(team.rank, [*outs, gathered]).backward()
        return [x.grad for x in (shard, *bs)]

    found = weft.simulate(main, world_size)
    everyone = [leaves(rank) for rank in range(world_size)]
    total = 0.0
    for rank, (_, *bs) in enumerate(everyone):
        shards = [shard for shard, *_ in everyone]
        gathered = torch.cat([*shards[rank:], *shards[:rank]] if local_first else shards)
        total = total + loss(rank, [*(gathered @ b.T for b in bs), gathered])
    total.backward()
    for rank, grads in enumerate(found):
        for grad, leaf in zip(grads, everyone[rank], strict=True):
            assert_close(grad, leaf.grad, 40, partials=1, what=f"rank {rank}")


def test_a_b_that_no_descriptor_reaches_beside_one_that_the_small_m_kernel_takes():
    """The narrow b begins between two multiples of 16 bytes."""
    K = 4096

    def main(team):
        shard, wide = torch.zeros(2, K, dtype=BF16), torch.zeros(1100, K, dtype=BF16)
        shard[:, 0] = torch.arange(2) + 10 * team.rank
        apart = torch.ones(16 * K + 1, dtype=BF16)[1:].view(16, K)
        call = call_of(2 * team.size, shard, wide)
        assert ALL_GATHER_MATMUL.plan(call, machine_of(team)).design.gemm.name == "small_m"
        out, narrow = ops.all_gather_matmul(shard, [wide, apart], team)
        assert torch.equal(out, torch.zeros(4, 1100, dtype=BF16))
        return narrow[:, 3].tolist()

    assert weft.simulate(main, 2) == [[0, 1, 10, 11]] * 2


def test_wrong_operands_among_several_are_refused():
    def main(team):
        shard, bs = operands(team.rank)
        with pytest.raises(ValueError, match=r"a_shard has K=40 columns and b has 8"):
            ops.all_gather_matmul(shard, [bs[0], torch.ones(4, 8).bfloat16()], team)
        with pytest.raises(ValueError, match="all_gather_matmul: b"):
            ops.all_gather_matmul(shard, [], team)

    weft.simulate(main, 2)
