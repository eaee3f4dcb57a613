"""Ring exchange of halos: a stencil over rows that are spread over the ranks, on a channel of team.channel.

out[i] = (x[i - 1] + x[i] + x[i + 1]) / 3        rows of all ranks in a ring
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from running import compare, run

import weft
import weft.language as wl


@triton.jit
def stencil(x, halos, out, landed, team, m, N, COLUMNS: tl.constexpr):
    """grid: (programs,), each some rows; the first one sends, the edges come last

    x, out   [m, N]   this rank's rows
    halos    [2, 2, N] symmetric: halves by call; the row above mine, and the one below
    landed   channel of two chunks: 0 the row above, from the left rank; 1 the row below, from the right one

    signals  program 0: chunk 1 to the left rank, chunk 0 to the right rank, behind the rows
    waits    the program that computes row 0: chunk 0 of the left rank; row m - 1: chunk 1 of the right rank
    reuse    a rank writes half h at its neighbour in calls e and e + 2. In call e + 1 it waited for that neighbour's halo,
             which was sent after the neighbour's call e, in which it read half h
    progress program 0 sends before it waits; all programs of all ranks are resident

    sends     | rows |
    interior  | 1 | 2 | … |
    edges                 | 0, m - 1 |
    """
    world: tl.constexpr = wl.num_ranks(team)
    me, program, programs = wl.rank(team), tl.program_id(0), tl.num_programs(0)
    left, right = (me + world - 1) % world, (me + 1) % world
    call = wl.next_call(landed)
    half = halos + (call.now & 1) * 2 * N
    if program == 0:
        wl.put(half + N, x, N, left, team)
        wl.chunk_notify(call, left, 1, team)
        wl.put(half, x + (m - 1) * N, N, right, team)
        wl.chunk_notify(call, right, 0, team)
    column = tl.arange(0, COLUMNS)
    inside = column < N
    for place in range(program, m, programs):
        row = (place + 1) % m  # 1, 2, … m - 1, 0
        above, below = x + (row - 1) * N, x + (row + 1) * N
        if row == 0:
            wl.chunk_wait(call, left, 0, team)
            above = half
        if row == m - 1:
            wl.chunk_wait(call, right, 1, team)
            below = half + N
        total = tl.load(above + column, mask=inside, other=0.0) + tl.load(x + row * N + column, mask=inside, other=0.0)
        total += tl.load(below + column, mask=inside, other=0.0)
        tl.store(out + row * N + column, total / 3, mask=inside)
    wl.advance_call(call)


class Stencil:
    """The stencil of rows of N elements, with the buffers of its calls."""

    def __init__(self, team: weft.Team, N: int) -> None:
        self.team, self.halos, self.landed = team, team.empty((2, 2, N), torch.float32, name="halos"), team.channel(2)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        (m, N), out = x.shape, torch.empty_like(x)
        programs = min(m, self.team.caps.sms, self.team.max_programs())
        constants = {"COLUMNS": triton.next_power_of_2(N), "launch_cooperative_grid": True}
        stencil[(programs,)](x, self.halos, out, self.landed.view, self.team.view, m, N, **constants)
        return out


def reference(rows: torch.Tensor) -> torch.Tensor:
    return (rows.roll(1, 0) + rows + rows.roll(-1, 0)) / 3


def main(team: weft.Team, bench: bool = False) -> str | dict[str, float]:
    m, N = (6, 20) if team.is_simulated else (4096, 4096)
    step = Stencil(team, N)
    rows = torch.randn(team.size * m, N, generator=torch.Generator().manual_seed(0)).to(team.device)
    mine = slice(team.rank * m, (team.rank + 1) * m)
    x, wanted = rows[mine].contiguous(), rows
    for _ in range(4):
        x, wanted = step(x), reference(wanted)
    torch.testing.assert_close(x, wanted[mine])
    if not bench:
        return "right"
    edges = torch.empty(2, N, device=team.device)

    def one_after_the_other() -> torch.Tensor:
        edges[0], edges[1] = x[0], x[-1]
        every = team.library.all_gather(edges)
        above, below = every[2 * team.rank - 1], every[(2 * team.rank + 2) % len(every)]
        padded = torch.cat((above[None], x, below[None]))
        return (padded[:-2] + padded[1:-1] + padded[2:]) / 3

    torch.testing.assert_close(one_after_the_other(), step(x))
    return compare(team, {"weft": lambda: step(x), "torch": one_after_the_other})


if __name__ == "__main__":
    run(main)
