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
