"""One-shot all-reduce on torch's symmetric memory, without weft: what `weft check --torch` runs without a GPU.

On GPUs: torchrun --nproc-per-node 2 examples/torch_all_reduce.py
Without: weft check examples/torch_all_reduce.py --torch --world-size 2,4
"""

import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl


@triton.jit
def all_reduce(x, buffers, signals, out, call, N: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """out[N] = sum over ranks of x[N].        grid: (1,)

    signals  at every rank: signals[RANK] = call, once x is in this rank's buffer
    reuse    buffers have two halves; a peer that has sent call has read the half of call - 1
    """
    at, half = tl.arange(0, N), call % 2 * N
    buffers, signals = buffers.to(tl.pointer_type(tl.uint64)), signals.to(tl.pointer_type(tl.uint64))
    tl.store(tl.load(buffers + RANK).to(tl.pointer_type(tl.float32)) + half + at, tl.load(x + at))
    tl.debug_barrier()
    for peer in tl.static_range(WORLD):
        tl.atomic_xchg(tl.load(signals + peer).to(tl.pointer_type(tl.int32)) + RANK, call, sem="release", scope="sys")
    total = tl.zeros((N,), tl.float32)
    own = tl.load(signals + RANK).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(WORLD):
        while tl.atomic_add(own + peer, 0, sem="acquire", scope="sys") < call:
            pass
        total += tl.load(tl.load(buffers + peer).to(tl.pointer_type(tl.float32)) + half + at)
    tl.store(out + at, total)


def main(rank, size, n=128):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    handle = symm_mem.rendezvous(symm_mem.empty(2 * n, device=f"cuda:{rank}"), dist.group.WORLD)
    for call in range(1, 5):
        x = torch.full((n,), float(call + rank), device="cuda")
        out = torch.empty_like(x)
        all_reduce[(1,)](x, handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, out, call, n, rank, size)
        assert (out == sum(call + r for r in range(size))).all()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
