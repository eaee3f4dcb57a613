"""Driver of kraken's fused/gemm_one_shot_all_reduce_fused.py."""

import os

import torch
import torch.distributed as dist
from stubs import folder, package

package("kraken", folder() / "kraken/kraken")
# The barrier before the reduction does not release the tiles stored before it.
RELEASE = [(r"world_size, hasSubsequent", "world_size, hasPreviousMemAccess=True, hasSubsequent")]
package("kraken.fused", folder() / "kraken/kraken/fused", mend={"gemm_one_shot_all_reduce_fused.py": RELEASE})
from kraken.fused.gemm_one_shot_all_reduce_fused import gemm_one_shot_all_reduce  # noqa: E402


def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.manual_seed(rank)
    for _ in range(2):  # one after the other, without a rendezvous
        a, b = torch.randn(64, 32, device="cuda"), torch.randn(32, 64, device="cuda")
        out = gemm_one_shot_all_reduce(a, b, BLOCK_SIZE_M=32, BLOCK_SIZE_N=32, BLOCK_SIZE_K=32)
        expected = a @ b
        dist.all_reduce(expected)
        torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-3)
    dist.barrier()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
