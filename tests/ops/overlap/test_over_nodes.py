"""Overlapped GEMMs and norms over several nodes: answers, bytes over the rails, gradients, what is refused."""

import pytest
import torch

import weft
from tests.ops.checking import assert_close, check_replicated, run_cases
from tests.ops.nodes import gemms, norms, teams_of_nodes
from weft import ops
from weft.ops.case import BF16, Case


@pytest.mark.parametrize(("nodes", "node_size", "seed"), teams_of_nodes(2))
def test_every_case(nodes, node_size, seed):
    """Every second case once, or all of them twice."""
    size = nodes * node_size
    cases, calls = [*gemms(size), *norms(nodes, size)][:: 2 - seed], 1 + seed
    check_replicated(weft.simulate(run_cases, size, node_size=node_size, seed=seed, args=(cases, calls)))


@pytest.mark.parametrize("design", ["fused", "pipelined", "sequential"])
def test_a_node_may_use_any_design(design):
    def main(team):
        ops = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")[design == "fused" :]
        run_cases(team, [Case(op=op, world_size=4, dtype=BF16, sizes=(24, 16, 32), design=design) for op in ops], 1)

    weft.simulate(main, 4, node_size=2)


def all_three(team):
    a, up, down = torch.ones(3, 8), torch.ones(6, 8), torch.ones(5, 6)
    y = ops.all_gather_matmul(a * (team.rank + 1), up, team)
    gathered, sent = team.rail.sent_bytes, a.nbytes
    z = ops.matmul_reduce_scatter(y, down, team)
    scattered = team.rail.sent_bytes
    whole = ops.matmul_all_reduce(y, down, team)
    part = whole.nbytes // team.size
    return gathered / sent, (scattered - gathered) / z.nbytes, (team.rail.sent_bytes - scattered) / part, z, whole


@pytest.mark.parametrize(("nodes", "node_size"), [(2, 2), (3, 1)])
def test_a_shard_and_a_sum_cross_to_each_node_once(nodes, node_size):
    size = nodes * node_size
    for rank, (gathered, summed, both, z, whole) in enumerate(weft.simulate(all_three, size, node_size=node_size)):
        assert (gathered, summed, both) == (nodes - 1, nodes - 1, 2 * (nodes - 1))
        assert torch.equal(z, torch.full((3, 5), 8.0 * (rank + 1) * 6 * size))
        assert torch.equal(whole[3 * rank : 3 * rank + 3], z)


def test_gradients_are_those_of_one_node():
    def main(team):
        grads = []
        for members in (team, weft.init()):
            generator = torch.Generator().manual_seed(team.rank)
            a, up, down = (
                torch.randn(shape, generator=generator, requires_grad=True) for shape in ((3, 8), (6, 8), (8, 6))
            )
            y = ops.matmul_reduce_scatter(ops.all_gather_matmul(a, up, members), down, members)
            z = ops.matmul_all_reduce(y, up[:, :8], members)
            ((y * torch.randn(y.shape, generator=generator)).sum() + z.square().sum() / 4096).backward()
            grads.append((a.grad, up.grad, down.grad))
        return grads

    def nodes(team):
        return main(weft.init(node_size=2))

    for over, within in weft.simulate(nodes, 4):
        for actual, expected in zip(over, within, strict=True):
            assert_close(actual, expected, 200, partials=4)


def test_own_first_is_of_one_node():
    x = torch.ones(4, 8)

    def main(team):
        for call in (lambda: ops.all_gather_matmul(x, x, team, own_first=True),
                     lambda: ops.matmul_reduce_scatter(x, x, team, own_first=True)):  # fmt: skip
            with pytest.raises(ValueError, match="own_first=True orders the rows of one node's ranks.* 2 nodes"):
                call()

    weft.simulate(main, 2, node_size=1)


def test_what_a_kernel_of_one_node_does_is_refused():
    x, weight = torch.ones(4, 8), torch.ones(8)

    def main(team):
        with pytest.raises(ValueError, match="factored=True is for a norm within .* 2 nodes x 1 ranks; leave it out"):
            ops.all_reduce_rms_norm(x, x, weight, 1e-6, team, factored=True)
        with pytest.raises(ValueError, match="all_reduce_rms_norm: algorithm='two_shot' is of one node"):
            ops.all_reduce_rms_norm(x, x, weight, 1e-6, team, "two_shot")

    weft.simulate(main, 2, node_size=1)


def test_few_rows_take_the_sum_behind_the_gemm():
    few, many = (ops.explain("gemm-ar", M=m, N=64, K=64, world_size=4, node_size=2) for m in (512, 513))
    assert few.planned.name == "sequential" and few.plan.collective.name == "over_nodes"
    assert many.planned.name == "over_nodes" and many.plan.scatter.name == "over_nodes"
    text = str(ops.explain("moe-ar-rms-norm", T=4, k=2, H=64, world_size=4, node_size=2))
    assert "sequential" in text and "no part of the all-reduce's kernels" in text
