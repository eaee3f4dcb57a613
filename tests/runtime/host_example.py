"""The example of docs/host.md: what ``main`` returns on each rank is checked by test_host_page.py."""

import torch
import triton
import triton.language as tl

import weft.language as wl


@triton.jit
def sum_shards(shards, out, landed, team, N: tl.constexpr):
    """out[N] = sum of the shards of all other ranks, each as soon as it is here"""
    call, at, total = wl.current_call(landed), tl.arange(0, N), tl.zeros((N,), tl.float32)
    for step in tl.static_range(1, wl.num_ranks(team)):
        source = (wl.rank(team) + step) % wl.num_ranks(team)
        wl.chunk_wait(call, source, 0, team)
        total += tl.load(shards + source * N + at)
    tl.store(out + at, total)


def main(team):
    n = 64
    # Symmetric: every rank has one, at the same offset of its heap.
    shards = team.empty((team.size, n), torch.float32, name="shards")
    landed = team.channel(1)
    shard, out = torch.full((n,), float(team.rank), device=team.device), torch.empty(n, device=team.device)
    for _ in range(2):
        landed.begin()
        team.copy_engine.fork()
        for step in range(1, team.size):
            landed.send(shards[team.rank], shard, (team.rank + step) % team.size, 0)
        sum_shards[(1,)](shards, out, landed.view, team.view, n)
        team.copy_engine.join()
        team.barrier()  # all ranks have read their shards: the next call may overwrite them
    return out[0].item()
