"""An all-to-all of rows and their scales, with the mistake that `weft check` finds here: a signal that covers the scales alone.

    weft check examples/scales_after_rows.py --world-size 2 --schedules 8

The rows travel by `putmem_nbi_block`, the scales by `putmem_signal_nbi_block`, whose signal the receiver awaits. NVSHMEM
orders that signal after its own put, and not after the puts before it: the rows may still be on their way. The all-to-all in
the README of Triton-distributed (0e20c8d) has this order of calls if WITH_SCALE is set; this kernel is written anew.
`main(team, True)` has a fence between the two puts, and no finding.
"""

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from weft.language.shmem import NVSHMEM_CMP_GE, NVSHMEM_SIGNAL_SET

ROWS, HIDDEN = 4, 16


@triton.jit
def send_and_sum(rows, scales, rows_in, scales_in, landed, out, team, FENCE: tl.constexpr, N: tl.constexpr):
    """out[p] = the scaled sum of peer p's rows for this rank        grid: (W - 1,)

    rows [W, N], scales [W] for each peer; rows_in [W, N], scales_in [W] from each peer, whose signal is landed[peer]
    """
    me, at = wl.rank(team), tl.arange(0, N)
    peer = (me + 1 + tl.program_id(0)) % wl.num_ranks(team)
    wl.shmem.putmem_nbi_block(rows_in + me * N, rows + peer * N, N * 4, peer, team)
    if FENCE:
        wl.shmem.fence(team)
    wl.shmem.putmem_signal_nbi_block(scales_in + me, scales + peer, 4, landed + me, 1, NVSHMEM_SIGNAL_SET, peer, team)
    wl.shmem.signal_wait_until(landed + peer, NVSHMEM_CMP_GE, 1, team)
    tl.store(out + peer, tl.sum(tl.load(rows_in + peer * N + at)) * tl.load(scales_in + peer))


def main(team, fence=False):
    n = ROWS * HIDDEN
    rows = team.empty((team.size, n), dtype=torch.float32, name="rows").fill_(1.0)
    scales = team.empty((team.size,), dtype=torch.float32, name="scales").fill_(team.rank + 1.0)
    rows_in = team.zeros((team.size, n), dtype=torch.float32, name="rows_in")
    scales_in = team.zeros((team.size,), dtype=torch.float32, name="scales_in")
    landed = team.signals((team.size,), name="landed")
    out = torch.zeros(team.size, device=team.device)
    send_and_sum[(team.size - 1,)](rows, scales, rows_in, scales_in, landed, out, team.view, FENCE=fence, N=n)
    team.synchronize()
    return out.tolist()


if __name__ == "__main__":
    print(weft.launch(main, world_size=2, args=(True,)))
