"""Driver of Megatron-LM's torch_symm_triton: collectives by multicast. The second argument names one."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from stubs import folder, package, plain

COLLECTIVES = "megatron.core.inference.communication.torch_symm_triton"
package("megatron.core.utils", null_decorator=plain)
# The barrier before a reduction acquires what the peers' kernels have written.
ACQUIRE = [("hasPreviousMemAccess=False,(\\s+)hasSubsequentMemAccess=False", "hasSubsequentMemAccess=True")]
package(
    COLLECTIVES, folder() / "megatron-lm" / COLLECTIVES.replace(".", "/"),
    mend={name: ACQUIRE for name in ("collectives.py", "fused_collectives.py", "variable_collectives.py")},
)  # fmt: skip
from megatron.core.inference.communication.torch_symm_triton import (  # noqa: E402
    collectives,
    fused_collectives,
    variable_collectives,
)

WARPS = {"num_warps": 4, "BLOCK_SIZE": 128}


def symmetric(*sizes, dtype=torch.bfloat16):
    buffer = symm_mem.empty(*sizes, dtype=dtype, device="cuda")
    return buffer, symm_mem.rendezvous(buffer, dist.group.WORLD)


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def summed(x):
    total = x.float().clone()
    dist.all_reduce(total)
    return total


def gather(rank, size):
    buffer, handle = symmetric(4 * size, 64)
    calls = [torch.randn(4, 64, dtype=torch.bfloat16) for _ in range(3)]
    expected = [gathered(x) for x in calls]
    for call, x in enumerate(calls):
        collectives.multimem_all_gather(buffer, x, handle, barrier_before=call > 0, **WARPS)
        torch.testing.assert_close(buffer, expected[call])


def gather_three(rank, size):
    (buffer, handle), row = symmetric(3, 4 * size, 64), 4 * size * 64 * 2
    x = [torch.randn(4, 64, dtype=torch.bfloat16) for _ in range(3)]
    expected = [gathered(one) for one in x]
    operands = [item for i in range(3) for item in (buffer[i], x[i], i * row)]
    collectives.multimem_all_gather_fused(*operands, handle, **WARPS)
    for i in range(3):
        torch.testing.assert_close(buffer[i], expected[i])


def layer(rank, size):
    """The order of a layer: a GEMM writes the buffer, which is reduced, scattered and gathered again."""
    for dtype in (torch.bfloat16, torch.float32):
        (buffer, handle), out = symmetric(4 * size, 64, dtype=dtype), torch.empty(4, 64, dtype=dtype)
        calls = [torch.randn(4 * size, 64).to(dtype) for _ in range(2)]
        expected = [summed(x).to(dtype) for x in calls]
        for x, total in zip(calls, expected, strict=True):
            buffer.copy_(x)
            collectives.multimem_reduce_scatter(out, buffer, handle, **WARPS)
            torch.testing.assert_close(out, total[4 * rank : 4 * rank + 4])
            collectives.multimem_all_gather(buffer, out, handle, **WARPS)
            torch.testing.assert_close(buffer, total)


def norm(rank, size):
    (buffer, handle), tokens, hidden = symmetric(2 * size, 256), 2, 256
    weights, residual = torch.randn(hidden).bfloat16(), torch.randn(tokens, hidden).bfloat16()
    dist.broadcast(weights, 0)
    calls = [torch.randn(2 * size, hidden).bfloat16() for _ in range(2)]
    expected = [summed(x)[tokens * rank : tokens * (rank + 1)].bfloat16() + residual for x in calls]
    rows = [gathered(added).float() for added in expected]
    for x, added, row in zip(calls, expected, rows, strict=True):
        buffer.copy_(x)
        out = torch.empty_like(residual)
        fused_collectives.fused_multimem_rs_add_norm_ag(out, buffer, handle, residual, weights, 1e-5)
        torch.testing.assert_close(out, added)
        normed = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + 1e-5) * weights.float()
        torch.testing.assert_close(buffer, normed.bfloat16(), atol=2e-2, rtol=2e-2)


def experts(rank, size):
    """The order of a layer of experts, whose ranks have different numbers of tokens."""
    tokens, most, hidden, total = rank + 1, size, 64, size * (size + 1) // 2
    offset = torch.tensor([rank * (rank + 1) // 2], dtype=torch.int32)
    largest = torch.tensor([most], dtype=torch.int32)
    (buffer, handle), (sums, sums_handle) = symmetric(total, hidden), symmetric(total, hidden)
    for x in [torch.randn(tokens, hidden).bfloat16() for _ in range(2)]:
        variable_collectives.multimem_all_gather_v(buffer, x, handle, offset, largest, most)
        sums.copy_(buffer * (rank + 1))
        out = torch.empty_like(x)
        variable_collectives.multimem_reduce_scatter_v(out, sums, sums_handle, offset, largest, most)
        torch.testing.assert_close(out.float(), x.float() * total, atol=2e-2, rtol=2e-2)


def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.manual_seed(rank)
    torch.set_default_device("cuda")
    globals()[sys.argv[2]](rank, size)
    dist.barrier()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
