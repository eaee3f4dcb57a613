"""What the drivers of gathers share."""

import torch
import torch.distributed as dist


def check_all_gather(create_state, all_gather_inner, rank, size):
    """Check three calls, one after the other without a rendezvous, of a gather along the last dimension."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.manual_seed(rank)
    state = create_state(dist.group.WORLD, rank, 4, 64 * size)
    x = torch.randn(3, 4, 64, dtype=torch.bfloat16, device="cuda")
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x)
    expected = torch.cat(parts, dim=2)
    for call in range(3):
        torch.testing.assert_close(all_gather_inner(state, x[call], 64 * size), expected[call])
    dist.barrier()
