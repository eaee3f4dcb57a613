"""Driver of FlashInfer's comm/quantized_allreduce.py."""

import os

import torch
import torch.distributed as dist
from stubs import folder, package, plain

package("flashinfer", folder() / "flashinfer/flashinfer")
# With p2p_phase3 the next call may write a buffer that a peer still reads.
BARRIER = (
    r"(            block_start \+= tl.num_programs\(0\) \* stride_per_program\n)(    else:\n        block_start = pid)",
    r"\1        symm_mem_sync(signal_pad_ptrs, None, rank, world_size, hasPreviousMemAccess=True)\n\2",
)
package("flashinfer.comm", folder() / "flashinfer/flashinfer/comm", mend={"quantized_allreduce.py": [BARRIER]})
package("flashinfer.api_logging", flashinfer_api=plain)
package("flashinfer.utils", register_custom_op=lambda *_, **__: plain)
from flashinfer.comm.quantized_allreduce import quantized_all_reduce  # noqa: E402


def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.manual_seed(rank)
    # e4m3 holds them: small integers, and 448 in each group, so that scales are powers of two.
    x = torch.randint(-2, 3, (512,), device=f"cuda:{rank}").to(torch.bfloat16)
    x[::32] = 448
    expected = x.float()
    dist.all_reduce(expected)
    for call, p2p in enumerate((False, True, True, False)):  # one after the other, without a rendezvous
        sign = 1 - 2 * (call % 2)
        out = quantized_all_reduce(
            sign * x, dist.group.WORLD, block_size=64, scale_group=32, num_warps=1, max_num_blocks=2, p2p_phase3=p2p
        )
        assert (out.float() == sign * expected).all()
    dist.barrier()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
