"""A program of one small kernel, for benchmarks.start_up --launch. It leaves torch to main, as weft.launch advises."""

import weft


def add_one(team: "weft.Team") -> int:
    """Sum of a one of each rank, by a kernel that exchanges them."""
    import torch

    ones = team.zeros((256,), torch.float32)
    ones.fill_(1.0)
    team.synchronize()
    print(f"start: rank {team.rank} has run torch's first kernel", flush=True)
    all_reduce = weft.ops.all_reduce
    print(f"start: rank {team.rank} has weft.ops", flush=True)
    total = all_reduce(ones, team)
    print(f"start: rank {team.rank} has launched weft's first kernel", flush=True)
    return int(total[0])
