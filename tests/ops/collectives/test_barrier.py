"""Barrier: later work of every rank's stream comes after earlier work of all."""

import torch

import weft
from weft import ops


def test_barrier_orders_streams():
    """What a rank stored before the barrier is there after it."""

    def main(team):
        box = team.zeros((team.size,), torch.int32)
        seen = []
        for turn in range(3):
            for peer in range(team.size):
                team.at_peer(box, peer)[team.rank] = turn * 10 + team.rank
            ops.barrier(team)
            seen.append(box.tolist())
            ops.barrier(team)
        return seen

    for seen in weft.simulate(main, 3, seed=5, slow={2: 10.0}):
        assert seen == [[turn * 10 + r for r in range(3)] for turn in range(3)]


def test_barrier_orders_streams_of_several_nodes():
    """What a rank's rail and node have stored before the barrier may be written behind it, on all ranks."""

    def main(team):
        box, seen = team.node.zeros((team.node.size,), torch.int32), []
        for turn in range(2):
            for peer in range(team.node.size):
                team.node.at_peer(box, peer)[team.node.rank] = turn * 10 + team.rank
            ops.barrier(team)
            seen.append(box.tolist())
            ops.barrier(team)
        return seen

    for rank, seen in enumerate(weft.simulate(main, 4, node_size=2, seed=5, slow={2: 10.0})):
        first = rank - rank % 2
        assert seen == [[turn * 10 + first, turn * 10 + first + 1] for turn in range(2)]
