"""Driver of kraken's comm/one_shot_all_reduce.py."""

import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from stubs import folder, package

package("kraken", folder() / "kraken/kraken")
package("kraken.comm", folder() / "kraken/kraken/comm")
from kraken.comm.one_shot_all_reduce import one_shot_all_reduce  # noqa: E402


def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.manual_seed(rank)
    x = symm_mem.empty(256, dtype=torch.bfloat16, device=f"cuda:{rank}")
    inputs = torch.randn(3, 256, dtype=torch.bfloat16, device="cuda")
    expected = inputs.float()
    dist.all_reduce(expected)
    for call in range(3):  # one after the other, without a rendezvous
        x.copy_(inputs[call])
        out = one_shot_all_reduce(x, BLOCK_SIZE=128, num_warps=1)
        torch.testing.assert_close(out.float(), expected[call], rtol=2e-2, atol=2e-2)
    dist.barrier()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
