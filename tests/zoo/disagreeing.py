"""Collective calls that ranks make differently."""

import torch

from tests.zoo.exhibit import N, exhibit
from weft import ops


@exhibit("call-mismatch", "", "the last rank brings a shorter tensor to an all-reduce", schedules=4)
def rest_of_a_division(team, bug):
    rows = 2 * N + 1 if bug else 2 * N
    each = -(-rows // team.size)
    ops.all_reduce(torch.ones(each, N)[: rows - team.rank * each], team)  # here


@exhibit("call-mismatch", "", "one rank leaves out a collective call that all other ranks make", schedules=4)
def call_that_one_rank_leaves_out(team, bug):
    x = torch.ones(N)
    if not bug or team.rank == 0:
        x = ops.all_reduce(x, team)  # here
    ops.all_gather(x, team)  # here
