"""A program on torch's symmetric memory, in the words of its authors: ``weft check FILE --torch`` runs it as it stands."""

import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

CALLS = []  # a list for each process


@triton.jit
def thread():
    return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def meet(pads, RANK: tl.constexpr, WORLD: tl.constexpr, SEND: tl.constexpr, WAIT: tl.constexpr):
    """Barrier of the programs of equal number: one thread for each peer."""
    peers = tl.arange(0, WORLD)
    pads = pads.to(tl.pointer_type(tl.uint64))
    block = tl.program_id(0) * WORLD
    to = tl.load(pads + peers).to(tl.pointer_type(tl.uint32)) + block + RANK
    own = tl.load(pads + RANK).to(tl.pointer_type(tl.uint32)) + block + peers
    tl.debug_barrier()
    if thread() < WORLD:
        tl.inline_asm_elementwise(
            f"""{{
                .reg .u32 %old; .reg .pred %p;
                send: atom.global.{SEND}.sys.cas.b32 %old, [$1], 0, 1;
                setp.eq.u32 %p, %old, 0;
                @!%p bra send;
            }}""",
            "=r, l", [to], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        tl.inline_asm_elementwise(
            f"""{{
                .reg .u32 %old; .reg .pred %p;
                wait: atom.global.sys.{WAIT}.cas.b32 %old, [$1], 1, 0;
                setp.eq.u32 %p, %old, 1;
                @!%p bra wait;
            }}""",
            "=r, l", [own], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    tl.debug_barrier()


@triton.jit
def all_reduce(
    x, buffers, pads, out, N: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, SEND: tl.constexpr, WAIT: tl.constexpr
):  # fmt: skip
    """out[N] = sum over ranks of x[N].        grid: (1,)"""
    at = tl.arange(0, N)
    table = buffers.to(tl.pointer_type(tl.uint64))
    tl.store(tl.load(table + RANK).to(tl.pointer_type(tl.float32)) + at, tl.load(x + at))
    meet(pads, RANK, WORLD, SEND, WAIT)
    total = tl.zeros((N,), tl.float32)
    for peer in range(WORLD):
        total += tl.load(tl.load(table + peer).to(tl.pointer_type(tl.float32)) + at)
    tl.store(out + at, total)
    meet(pads, RANK, WORLD, "release", "acquire")


def run(rank, size, send="release", wait="acquire"):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    CALLS.append(rank)
    assert [rank] == CALLS
    x = torch.full((32,), 1.0 + rank, device="cuda")
    handle = symm_mem.rendezvous(symm_mem.empty(32, device=f"cuda:{rank}"), dist.group.WORLD)
    for _ in range(2):
        out = torch.empty_like(x)
        all_reduce[(1,)](
            x, handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, out, 32, handle.rank, handle.world_size, send, wait
        )
        assert (out == size * (size + 1) / 2).all()
    dist.barrier()
    dist.destroy_process_group()


def no_release(rank, size):
    run(rank, size, send="relaxed")


def no_acquire(rank, size):
    run(rank, size, wait="relaxed")


if __name__ == "__main__":
    run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
