"""Driver of kraken's fused/gemm_reduce_scatter_ce_persistent.py, whose tiles the copy engine sends."""

import os

import torch
import torch.distributed as dist
from stubs import folder, package

package("kraken", folder() / "kraken/kraken")
# A tile is counted before its descriptor store has landed, and the last count acquires none of the others.
DRAIN = '\\1tl.inline_asm_elementwise("cp.async.bulk.wait_group 0;", "=r", [], tl.int32, False, 1)\\1tl.debug_barrier()'
ORDER = [(r"(\n +)c_desc\.store\(.*\)", f"\\g<0>{DRAIN}"), (r"1, sem=\"release\"", '1, sem="acq_rel"')]
package("kraken.fused", folder() / "kraken/kraken/fused", mend={"gemm_reduce_scatter_ce_persistent.py": ORDER})
from kraken.fused.gemm_reduce_scatter_ce_persistent import gemm_reduce_scatter_ce_persistent  # noqa: E402


def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.manual_seed(rank)
    for _ in range(2):
        a, b = (torch.randn(256 * n, 64, device="cuda").bfloat16() for n in (size, 1))
        out = gemm_reduce_scatter_ce_persistent(a, b[:64], block_size_n=64)
        expected = torch.empty(256, 64, device="cuda")
        dist.reduce_scatter_tensor(expected, a.float() @ b[:64].float())
        torch.testing.assert_close(out.float(), expected, atol=0.25, rtol=2**-7)
        dist.barrier()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
