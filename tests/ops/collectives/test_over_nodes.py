"""Collectives over several nodes: answers, bits, bytes over the rails, gradients, what is refused."""

import pytest
import torch

import weft
import weft.check
from tests.ops.checking import assert_close, assert_identical, check_replicated, run_cases
from tests.ops.nodes import collectives, teams_of_nodes
from weft import ops
from weft.ops.case import BF16, FP32, Case
from weft.ops.collectives.over_nodes import leaves_room


@pytest.mark.parametrize(("nodes", "node_size", "seed"), teams_of_nodes(3))
def test_every_case(nodes, node_size, seed):
    size = nodes * node_size
    cases = list(collectives(nodes, size))
    check_replicated(weft.simulate(run_cases, size, node_size=node_size, seed=seed, args=(cases, 2)))


def drawn(rank, rows, dtype=BF16):
    return torch.randn((rows, 6), generator=torch.Generator().manual_seed(rank)).to(dtype)


def bytes_sent(team):
    """Bytes over the rail of each op, for an input of 24 rows of 6 at each rank."""
    sent, found = 0, {}
    for op in (ops.all_gather, ops.reduce_scatter, ops.all_reduce, ops.all_to_all):
        op(drawn(team.rank, 24), team)
        found[op.__name__], sent = team.rail.sent_bytes - sent, team.rail.sent_bytes
    return found


@pytest.mark.parametrize(("nodes", "node_size"), [(2, 2), (3, 2)])
def test_each_part_crosses_to_a_node_once(nodes, node_size):
    size, x = nodes * node_size, 24 * 6 * 2
    least = {
        "all_gather": (nodes - 1) * x,
        "reduce_scatter": (nodes - 1) * x // size,
        "all_reduce": 2 * (nodes - 1) * x // size,
        "all_to_all": (nodes - 1) * x // nodes,
    }
    assert weft.simulate(bytes_sent, size, node_size=node_size) == [least] * size


def test_the_same_bits_from_run_to_run():
    case = Case(op="all_reduce", world_size=4, dtype=BF16, sizes=(300,), fields=(("nodes", 2),))
    first, second = (weft.simulate(run_cases, 4, node_size=2, seed=seed, args=([case], 1)) for seed in (11, 12))
    assert_identical(first[0][0][2], second[0][0][2])


def every_op(team):
    """Twice in a row, the second call with other data in the buffers of the first."""
    team = weft.init(node_size=team.size // 2)
    for call in range(2):
        x = torch.arange(12, dtype=torch.float32) + 100 * (team.rank + call)
        others = [x + 100 * (rank - team.rank) for rank in range(team.size)]
        part = 12 // team.size
        mine = slice(team.rank * part, (team.rank + 1) * part)
        assert torch.equal(ops.all_gather(x, team), torch.cat(others))
        assert torch.equal(ops.reduce_scatter(x, team), sum(others)[mine])
        assert torch.equal(ops.all_reduce(x, team), sum(others))
        assert torch.equal(ops.all_to_all(x, team), torch.cat([other[mine] for other in others]))


@pytest.mark.parametrize(
    ("world_size", "schedules"),
    [(2, 2), *(pytest.param(*run, marks=pytest.mark.sweep) for run in ((4, 20), (2, 50)))],
)
def test_no_schedule_shows_a_race(world_size, schedules):
    report = weft.check.check(every_op, world_size, schedules=schedules)
    assert report.ok, str(report)


def test_gradients():
    """Of sum over ranks of <weights_r, op(x)_r>, against the transposed map by hand."""
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

    def main(team):
        found = []
        for name in names:
            x = drawn(team.rank, 4, FP32).requires_grad_()
            y = getattr(ops, name)(x, team)
            weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(100 + team.rank))
            (y * weights).sum().backward()
            found.append((x.grad, weights))
        return found

    by_rank = weft.simulate(main, 4, node_size=2)
    for number, name in enumerate(names):
        weights = [found[number][1] for found in by_rank]
        for rank, found in enumerate(by_rank):
            expected = {
                "all_reduce": lambda r, w=weights: sum(w),
                "all_gather": lambda r, w=weights: sum(one.chunk(4)[r] for one in w),
                "reduce_scatter": lambda r, w=weights: torch.cat(w),
                "all_to_all": lambda r, w=weights: torch.cat([one.chunk(4)[r] for one in w]),
            }[name](rank)
            assert_close(found[number][0], expected, 4, partials=2, what=f"{name} gradient of rank {rank}")


def test_ops_within_a_node_refuse_several_by_name():
    x, heads = torch.ones(4, 8), torch.ones(4, 4, 16)

    def main(team):
        said = []
        for call in (
            lambda team: ops.sequence_to_heads(heads, team),
            lambda team: ops.heads_to_sequence(heads, team),
        ):
            with pytest.raises(
                ValueError, match="team has 2 nodes x 2 ranks, and this op works within a node"
            ) as caught:
                call(team)
            said.append(str(caught.value))
            call(team.node)
        with pytest.raises(ValueError, match="all_reduce: algorithm='two_shot' is of one node, and the team has 2"):
            ops.all_reduce(x, team, "two_shot")
        return said

    said = weft.simulate(main, 4, node_size=2)[0]
    assert [text.split(":")[0] for text in said] == ["sequence_to_heads", "heads_to_sequence"]


def test_full_grids_that_wait_for_peers_take_turns_with_the_rails():
    cases = {"push": False, "copy_engine": True}
    for design, room in cases.items():
        planned = ops.explain("all_gather", (1 << 20,), world_size=4, node_size=2, algorithm=design).plan.node
        assert planned.name == design and leaves_room(planned) is room
    for design, room in {"pipelined": True, "sequential": False}.items():
        explained = ops.explain("ag_gemm", M=64, N=64, K=64, world_size=4, node_size=2, algorithm=design)
        assert leaves_room(explained.plan.node) is room
    assert leaves_room(ops.explain("ag_gemm", M=64, N=64, K=64, world_size=2, node_size=1).plan.node)


def test_a_plan_has_the_plan_of_a_node_within():
    text = str(ops.explain("all_reduce", (64, 5120), world_size=16, node_size=8))
    assert "world_size=16, 2 nodes" in text and "1 / 8 of the bytes" in text
    assert "scatter  over_nodes" in text and "gather  over_nodes" in text and text.count("node  push") == 2
    with pytest.raises(ValueError, match="node_size=3 does not divide world_size=16"):
        ops.explain("all_reduce", (64, 5120), world_size=16, node_size=3)
    with pytest.raises(ValueError, match="sample_argmax works within a node; leave node_size out"):
        ops.explain("sample_argmax", batch=8, vocab=640, world_size=16, node_size=8)
