"""Driver of kraken's fused/all_gather_matmul.py."""

import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from stubs import folder, package

# A chunk that the copy engine has brought is loaded through a descriptor.
FENCE = [(r"bar\.sync 0;", "bar.sync 0; fence.proxy.async.global;")]
package("kraken", folder() / "kraken/kraken", mend={"_ptx_utils/gmem_barrier_arrive_wait.py": FENCE})
package("kraken._logging", log_triton_kernel=print)
package("kraken.fused", folder() / "kraken/kraken/fused", mend={"none": []})
from kraken.fused.all_gather_matmul import all_gather_matmul  # noqa: E402


def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.manual_seed(rank)
    a = symm_mem.empty((64, 32), dtype=torch.bfloat16, device="cuda").normal_()
    b = torch.randn(32, 32, dtype=torch.bfloat16, device="cuda").T
    whole = torch.empty(64 * size, 32, dtype=torch.bfloat16, device="cuda")
    dist.all_gather_into_tensor(whole, a)
    for _ in range(2):  # one after the other, without a rendezvous
        gathered, c = all_gather_matmul(a, b, block_size_m=32, block_size_n=32, block_size_k=32, group_size_m=1)
        torch.testing.assert_close(gathered, whole)
        torch.testing.assert_close(c, whole @ b, rtol=2e-2, atol=2e-2)
    dist.barrier()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
