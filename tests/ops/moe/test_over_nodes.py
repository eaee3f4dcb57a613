"""Experts over several nodes: answers, bytes over the rails, gradients, what is refused."""

import pytest
import torch

import weft
import weft.check
from tests.ops.checking import assert_close, run_cases
from tests.ops.nodes import experts
from tests.sampled import sampled
from weft import ops

SHAPES = ((2, 1), (2, 2), (2, 4), (4, 2), (3, 2))


@pytest.mark.parametrize(
    ("nodes", "node_size", "seed"),
    sampled(
        ((*shape, seed) for shape in SHAPES for seed in range(2)), lambda n, size, seed: (n, size, seed) == (2, 2, 0)
    ),
)
def test_every_case(nodes, node_size, seed):
    """Every second case once, or all of them three times."""
    size = nodes * node_size
    cases, calls = (list(experts(nodes, size))[::2], 1) if seed == 0 else (list(experts(nodes, size)), 3)
    weft.simulate(run_cases, size, node_size=node_size, seed=seed, args=(cases, calls))


def drawn(rank, tokens, experts, most=4):
    """Rows of 16 elements, and choices of two experts."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn((tokens, 16), generator=generator)
    ids = torch.rand((tokens, experts), generator=generator).topk(2).indices.int()
    return x, ops.Routing(ids, torch.rand((tokens, 2), generator=generator))


def there_and_back(team, algorithm="auto"):
    """Rows to their experts, which double them, and back; bytes over the rail of both ways."""
    count = 2 * team.size
    x, routing = drawn(team.rank, 4, count)
    found = ops.moe_dispatch(x, routing, team, experts=count, max_tokens=4, algorithm=algorithm)
    sent = team.rail.sent_bytes
    y = (2 * found.rows).repeat_interleave(2, 0)
    out = ops.moe_combine(y, found, 4, team, algorithm=algorithm)
    expected = 2 * x * routing.weights.sum(1, keepdim=True)
    assert_close(out, expected, 2, partials=team.size)
    return sent, team.rail.sent_bytes - sent


@pytest.mark.parametrize(("nodes", "node_size"), [(2, 2), (3, 1)])
def test_a_token_crosses_to_each_node_once_and_back(nodes, node_size):
    """Four rows of 64 bytes, with two choices of 8 bytes each; then four sums."""
    least = 4 * (nodes - 1) * (64 + 2 * 8), 4 * (nodes - 1) * 64
    assert weft.simulate(there_and_back, nodes * node_size, node_size=node_size) == [least] * (nodes * node_size)


@pytest.mark.sweep
@pytest.mark.parametrize(("world_size", "schedules"), [(4, 8), (2, 24)])
@pytest.mark.parametrize("algorithm", ["push", "lamport"])
def test_no_schedule_shows_a_race(world_size, schedules, algorithm):
    def main(team):
        team = weft.init(node_size=world_size // 2)
        return [there_and_back(team, algorithm) for _ in range(3)]

    report = weft.check.check(main, world_size, schedules=schedules)
    assert report.ok, str(report)


@pytest.mark.parametrize("overlapped", [False, True])
def test_gradients_are_those_of_one_node(overlapped):
    def main(team):
        grads, count = [], 2 * team.size
        for members in (weft.init(node_size=1), weft.init()):
            x, (ids, weights) = drawn(team.rank, 4 - team.rank, count)
            x.requires_grad_(), weights.requires_grad_()
            routing = ops.Routing(ids, weights)
            generator = torch.Generator().manual_seed(10 + team.rank)
            up, down = (torch.randn(size, generator=generator) for size in ((2, 32, 16), (2, 16, 16)))
            up.requires_grad_(), down.requires_grad_()
            mine = ops.Experts.whole(count, team.rank, team.size)
            if overlapped:
                h, schedule, found = ops.all_gather_grouped_matmul_silu_mul(x, routing, up, mine, members, max_tokens=4)
                out = ops.grouped_matmul_reduce_scatter(h, down, schedule, found, len(x), members)
            else:
                found = ops.moe_dispatch(x, routing, members, experts=count, max_tokens=4)
                schedule = ops.moe_schedule(found.routing.ids, mine)
                h = ops.grouped_matmul_silu_mul(found.rows, up, schedule)
                out = ops.moe_combine(ops.grouped_matmul(h, down, schedule), found, len(x), members)
            (out * torch.arange(out.numel()).view_as(out)).sum().backward()
            grads.append((x.grad, weights.grad, up.grad, down.grad))
        return grads

    for over, within in weft.simulate(main, 2):
        for actual, expected in zip(over, within, strict=True):
            assert_close(actual, expected, 200, partials=4)


def test_what_is_of_one_node_is_refused():
    def main(team):
        x, routing = drawn(team.rank, 3, 4)
        up, mine = torch.ones((2, 32, 16)), ops.Experts.whole(4, team.rank, 2)
        with pytest.raises(ValueError, match="algorithm='fused' is of one node, and the team has 2; pass 'sequential'"):
            ops.all_gather_grouped_matmul_silu_mul(x, routing, up, mine, team, max_tokens=3, algorithm="fused")
        with pytest.raises(
            ValueError, match="is sent within one node, and the team has 2 nodes x 1 ranks; leave it out"
        ):
            ops.moe_dispatch(x, routing, team, experts=4, max_tokens=3, dtype=torch.float8_e4m3fn)
        with pytest.raises(ValueError, match="shared by 2 ranks, which node_size=1 is no multiple of"):
            ops.moe_dispatch(x, routing, team, experts=ops.Experts.slices(4), max_tokens=3)

    weft.simulate(main, 2, node_size=1)
