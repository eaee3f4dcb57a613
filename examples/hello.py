import torch
import triton
import triton.language as tl

import weft
import weft.language as wl


@triton.jit
def all_gather(x, gathered, arrived, team, n: tl.constexpr):
    me, at = wl.rank(team), tl.arange(0, n)
    tile = tl.load(x + at)
    for peer in tl.static_range(wl.num_ranks(team)):
        tl.store(wl.symm_at(gathered + me * n, peer, team) + at, tile)
        wl.notify(arrived + me, peer, 1, team)  # releases: the tile is visible before the 1 is
    for peer in tl.static_range(wl.num_ranks(team)):
        wl.wait(arrived + peer, 1, team)  # acquires: afterwards peer's tile is here


def main(team):
    x = torch.full((64,), float(team.rank), device=team.device)
    gathered = team.zeros((team.size, 64), dtype=torch.float32)  # symmetric: one on every rank, at a known address
    arrived = team.signals((team.size,))
    all_gather[(1,)](x, gathered, arrived, team.view, n=64)
    team.synchronize()
    return gathered[:, 0].tolist()


if __name__ == "__main__":
    print(weft.launch(main))  # GPUs if there are any, else four virtual ranks: [0.0, 1.0, 2.0, 3.0] from each
