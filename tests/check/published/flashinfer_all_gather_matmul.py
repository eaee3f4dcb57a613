"""Driver of FlashInfer's comm/all_gather_matmul, the Triton design of Hopper."""

import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from stubs import folder, package, plain

# The barrier's compare-and-swap is of GPU scope, the wait for a chunk has no acquire order.
SCOPE = (r"(tl\.atomic_cas\([^)]*)\)", r"\1, scope='sys')")
ACQUIRE = (
    r"tl\.load\((signal_ptr \+ signal_off), volatile=True\) == 0:\n(\s+)pass\n",
    r"tl.atomic_add(\1, 0, sem='acquire', scope='sys') == 0:\n\2pass\n"
    r"                tl.inline_asm_elementwise('fence.proxy.async.global;', '=r', [], tl.int32, False, 1)\n",
)
package("flashinfer", folder() / "flashinfer/flashinfer")
package(
    "flashinfer.comm", folder() / "flashinfer/flashinfer/comm",
    mend={"all_gather_matmul/all_gather_matmul_triton.py": [SCOPE, ACQUIRE]},
)  # fmt: skip
package("flashinfer.utils", register_custom_op=lambda *_, **__: plain)
from flashinfer.comm.all_gather_matmul import all_gather_matmul  # noqa: E402


def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    symm_mem.set_backend("NVSHMEM")
    torch.manual_seed(rank)
    # Small integers: sums of 128 products are exact in fp32, and rounded once.
    x = symm_mem.empty(128, 128, device=f"cuda:{rank}", dtype=torch.bfloat16).random_(-2, 3)
    w = torch.randint(-2, 3, (128, 128), device="cuda").to(torch.bfloat16)
    whole = torch.empty(128 * size, 128, dtype=torch.bfloat16, device="cuda")
    dist.all_gather_into_tensor(whole, x)
    for _ in range(2):  # one after the other, without a rendezvous
        out = all_gather_matmul(x, w, dist.group.WORLD)
        assert (out == whole @ w).all()
    dist.barrier()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
