"""Driver of vLLM's models/inkling/nvidia/ops/lamport.py."""

import logging
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from stubs import folder, package

TP = SimpleNamespace()
package("vllm.distributed", get_tp_group=lambda: TP)
package("vllm.distributed.parallel_state", in_the_same_node_as=lambda group: [True])
package("vllm.logger", init_logger=logging.getLogger)
package("vllm.triton_utils", HAS_TRITON=True, tl=tl, triton=triton)
package("vllm.models.inkling.nvidia.ops", folder() / "vllm/vllm/models/inkling/nvidia/ops")
from vllm.models.inkling.nvidia.ops.lamport import LamportRSConv  # noqa: E402

HIDDEN, WINDOW, TOKENS, BLOCK = 32, 4, 2, 4


def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.manual_seed(rank)
    group = dist.group.WORLD

    def all_reduce(x):
        dist.all_reduce(x)
        return x

    TP.__dict__.update(
        device_group=group, cpu_group=group, world_size=size, rank_in_group=rank, device=f"cuda:{rank}",
        barrier=dist.barrier, all_reduce=all_reduce,
    )  # fmt: skip
    state = LamportRSConv(HIDDEN, WINDOW, max_tokens=TOKENS)
    shard = HIDDEN // size
    weight, norm = torch.zeros(shard, WINDOW, dtype=torch.bfloat16), torch.ones(HIDDEN, dtype=torch.bfloat16)
    residual = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    cache = torch.zeros(4, 1, BLOCK, shard, dtype=torch.bfloat16)
    table = torch.arange(4, dtype=torch.int32).view(1, 4)
    x = torch.randn(4, TOKENS, HIDDEN, dtype=torch.bfloat16)
    total = x.float()
    dist.all_reduce(total)
    for call in range(4):  # one after the other, without a rendezvous
        positions = torch.arange(call * TOKENS, (call + 1) * TOKENS, dtype=torch.int64)
        _, out = state.rs_sconv_ag_add_norm(
            x[call], residual, weight, norm, 1e-6, cache, positions, table, torch.zeros(TOKENS, dtype=torch.int32),
            positions, 0, shard, BLOCK,
        )  # fmt: skip
        torch.testing.assert_close(out.float(), total[call], rtol=3e-2, atol=3e-2)
    dist.barrier()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
