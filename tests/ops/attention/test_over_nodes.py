"""Attention to a cache over several nodes: answers, bytes over the rails, schedules, what is refused."""

import pytest
import torch

import weft
from tests.ops.checking import assert_close, run_cases
from tests.ops.nodes import attentions, teams_of_nodes
from weft import ops


@pytest.mark.parametrize(("nodes", "node_size", "seed"), teams_of_nodes(1))
def test_every_case(nodes, node_size, seed):
    size = nodes * node_size
    weft.simulate(run_cases, size, node_size=node_size, seed=seed, args=(list(attentions(nodes, size)), 2))


def attended(team, algorithm="auto"):
    """Three calls of two sequences, four heads a rank; bytes over the rail of the last one."""
    heads, found, sent = 4 * team.size, [], 0
    generator = torch.Generator().manual_seed(team.rank)
    keys, values = (torch.randn(3, 2, 16, 16, generator=generator) for _ in range(2))
    pages = torch.tensor([[1], [2]], dtype=torch.int32)
    for length in (3, 16, 16 * team.size):
        q = torch.randn(2, heads, 16, generator=torch.Generator().manual_seed(length))
        lengths = torch.tensor([length, 1], dtype=torch.int32)
        sent = team.rail.sent_bytes if team.rail else 0
        found.append(ops.sharded_decode_attention(q, keys, values, pages, lengths, team, algorithm=algorithm))
    return found, team.rail.sent_bytes - sent if team.rail else 0


@pytest.mark.parametrize(("nodes", "node_size"), [(2, 1), pytest.param(3, 1, marks=pytest.mark.sweep)])
def test_each_head_has_one_part_of_each_node(nodes, node_size):
    """Two sequences with four heads of 16 elements, 4 bytes each, and their log of the sum of weights."""
    size = nodes * node_size
    alone = weft.simulate(attended, size)
    for (over, sent), (within, _) in zip(weft.simulate(attended, size, node_size=node_size), alone, strict=True):
        assert sent == (nodes - 1) * 2 * 4 * (16 + 1) * 4
        for actual, expected in zip(over, within, strict=True):
            assert_close(actual, expected, 16, partials=size)


def test_one_kernel_is_of_one_node():
    with pytest.raises(
        ValueError, match="algorithm='one_kernel' is of one node, and the team has 2; pass 'two_kernels'"
    ):
        weft.simulate(attended, 2, node_size=1, args=("one_kernel",))
