"""Driver of vLLM's models/deepseek_v41/nvidia/ops/engram_peer.py."""

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from stubs import folder, package

DP = SimpleNamespace()
package("vllm.distributed", get_engram_dp_group=lambda: DP)
package("vllm.platforms", current_platform=None)
package("vllm.triton_utils", tl=tl, triton=triton)
package("vllm.models.deepseek_v41.nvidia.ops", folder() / "vllm/vllm/models/deepseek_v41/nvidia/ops")
from vllm.models.deepseek_v41.nvidia.ops.engram_peer import EngramPeerExchange  # noqa: E402

TOKENS, HEADS, DIM, VOCABULARY = 3, 4, 32, 8


def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    DP.__dict__.update(world_size=size, rank_in_group=rank, device_group=dist.group.WORLD)
    weight = torch.arange(VOCABULARY * DIM, dtype=torch.int64).to(torch.uint8).view(VOCABULARY, DIM)
    scale = torch.full((VOCABULARY, DIM // 32), 7, dtype=torch.uint8)
    table = SimpleNamespace(
        n_hash_cols=HEADS, dim=DIM, vocab_start_idx=0, vocab_end_idx=VOCABULARY, _storage=lambda: (weight, scale)
    )
    layer = SimpleNamespace(staged_rows=weight, layer_hash_index=0, embed_tokens=table)
    peers = EngramPeerExchange([layer], TOKENS)
    heads = HEADS // size
    for call in range(2):
        hashes = torch.tensor([[[(t + h + call) % VOCABULARY for h in range(HEADS)]] for t in range(TOKENS)])
        peers.exchange(hashes.to(torch.int32), TOKENS)
        for peer in range(size):
            rows = peers.row_handle.get_buffer(peer, (size, TOKENS, 1, heads, DIM + 1), torch.uint8)[rank]
            expected = weight[hashes[:, :, peer * heads : (peer + 1) * heads].long()]
            assert torch.equal(rows[..., :DIM], expected) and (rows[..., DIM] == 7).all()
    dist.barrier()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
