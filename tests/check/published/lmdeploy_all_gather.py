"""Driver of LMDeploy's kernels/cuda/symm_mem_allgather.py."""

import os

import torch
import torch.distributed as dist
from stubs import folder, package

package("lmdeploy.pytorch.kernels.cuda", folder() / "lmdeploy/lmdeploy/pytorch/kernels/cuda")
from lmdeploy.pytorch.kernels.cuda.symm_mem_allgather import all_gather_inner, create_state  # noqa: E402


def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.manual_seed(rank)
    state = create_state(dist.group.WORLD, rank, 4, 64 * size)
    x = torch.randn(3, 4, 64, dtype=torch.bfloat16, device="cuda")
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x)
    expected = torch.cat(parts, dim=2)
    for call in range(3):  # one after the other, without a rendezvous
        torch.testing.assert_close(all_gather_inner(state, x[call], 64 * size), expected[call])
    dist.barrier()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
