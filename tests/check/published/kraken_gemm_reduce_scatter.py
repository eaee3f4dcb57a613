"""Driver of kraken's fused/gemm_reduce_scatter_fused.py."""

import os

import torch
import torch.distributed as dist
from stubs import folder, package

package("kraken", folder() / "kraken/kraken")
# The barrier before the reduction does not release the tiles stored before it.
RELEASE = [
    (r"world_size, hasSubsequentMemAccess=True", "world_size, hasPreviousMemAccess=True, hasSubsequentMemAccess=True")
]
package("kraken.fused", folder() / "kraken/kraken/fused", mend={"gemm_reduce_scatter_fused.py": RELEASE})
from kraken.fused.gemm_reduce_scatter_fused import gemm_reduce_scatter  # noqa: E402


def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.manual_seed(rank)
    a, b = torch.randn(32 * size, 32, device="cuda"), torch.randn(32, 32, device="cuda")
    expected = torch.empty(32, 32, device="cuda")
    dist.reduce_scatter_tensor(expected, a @ b)
    for _ in range(2):  # one after the other, without a rendezvous
        out = gemm_reduce_scatter(a, b, BLOCK_SIZE_M=32, BLOCK_SIZE_N=32)
        torch.testing.assert_close(out, expected)
    dist.barrier()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
