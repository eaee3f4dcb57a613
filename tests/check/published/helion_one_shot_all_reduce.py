"""Driver of helion's one-shot all-reduce, as helion_generate.py wrote it."""

import os
import sys
from importlib import import_module

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from stubs import folder, package


def launch(kernel, grid, *arguments, **options):
    kernel[grid](*arguments, **options)


package("helion.language", constexpr=int)
package("helion.runtime", default_launcher=launch)
package("all_reduce", _=None)
sys.path.insert(0, str(folder() / "helion/generated"))


def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.manual_seed(rank)
    all_reduce = import_module(f"w{size}_r{rank}").one_shot_all_reduce_kernel
    x = symm_mem.empty(16384, dtype=torch.float32, device=f"cuda:{rank}")
    memory = symm_mem.rendezvous(x, dist.group.WORLD.group_name)
    inputs = torch.randn(2, 16384, device="cuda")
    expected = inputs.clone()
    dist.all_reduce(expected)
    for call in range(2):  # one after the other, without a rendezvous
        x.copy_(inputs[call])
        out = all_reduce(memory.signal_pad_ptrs_dev, x, rank, dist.group.WORLD.group_name, size)
        torch.testing.assert_close(out, expected[call])
    dist.barrier()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
