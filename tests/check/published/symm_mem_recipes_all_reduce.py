"""Driver of symm-mem-recipes' triton_one_shot_all_reduce.py."""

import os

import torch
import torch.distributed as dist
from stubs import folder, package
from torch._C._distributed_c10d import _SymmetricMemory

package("torch.testing._internal.common_utils", get_cycles_per_ms=lambda: 1.0)
# After the barrier every program acquires the first program's words.
WORDS = [(r"local_signal_pad_addr \+ remote_rank\]", "local_signal_pad_addr + block_id * WORLD_SIZE + remote_rank]")]
package("symm_mem_recipes", folder() / "symm-mem-recipes/symm_mem_recipes", mend={"triton_barrier.py": WORDS})
from symm_mem_recipes.triton_one_shot_all_reduce import one_shot_all_reduce  # noqa: E402


def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    device, name = torch.device("cuda", rank), dist.group.WORLD.group_name
    x = _SymmetricMemory.empty_strided_p2p(  # two programs
        size=(8192,), stride=(1,), dtype=torch.bfloat16, device=device, group_name=name
    )
    x.fill_(rank + 1)
    for _ in range(2):
        assert one_shot_all_reduce(x).eq(size * (size + 1) // 2).all()
    dist.barrier()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
