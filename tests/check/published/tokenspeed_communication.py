"""Driver of TokenSpeed's ops/communication/triton.py on NVIDIA GPUs. The second argument names a set of calls."""

import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from stubs import folder, package

COMMUNICATION = "tokenspeed-kernel/python/tokenspeed_kernel/ops/communication"
package("tokenspeed_kernel._triton", tl=tl, triton=triton)
package("tokenspeed_kernel.platform", current_platform=lambda: SimpleNamespace(is_amd=False, is_nvidia=True))
# The barrier before a reduction acquires what the peers' streams have written.
SUM = r'(def nvidia_rsag_reduce_scatter_kernel\((?:.|\n)*?sem=)"relaxed"'
package(
    "tokenspeed_kernel.ops.communication", folder() / "tokenspeed" / COMMUNICATION,
    mend={"triton.py": [(SUM, r'\1"acq_rel"')]},
)  # fmt: skip
from tokenspeed_kernel.ops.communication import triton as ops  # noqa: E402


def layers(rank, size):
    """The order of layers: sums are scattered over tokens, and tokens gathered, in one buffer."""
    tokens, hidden = size + 1, 64
    state = ops.create_state(dist.group.WORLD, rank, max_tokens=tokens, hidden_size=hidden)
    counts = ops.get_token_dist(state, tokens)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    calls = [torch.randint(-8, 9, (tokens, hidden)).bfloat16() for _ in range(3)]
    sums = [x.float().clone() for x in calls]
    for total in sums:
        dist.all_reduce(total)
    for x, total in zip(calls, sums, strict=True):
        part = ops.reduce_scatter(state, x, tp_num_tokens=tokens)
        assert part.float().equal(total[own])
        assert ops.all_gather(state, part, tp_num_tokens=tokens).float().equal(total)


def inner(rank, size):
    state = ops.create_state(dist.group.WORLD, rank, max_tokens=3, hidden_size=16 * size)
    calls = [torch.randn(3, 16).bfloat16() for _ in range(3)]
    expected = []
    for x in calls:
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x)
        expected.append(torch.cat(parts, 1))
    for x, whole in zip(calls, expected, strict=True):
        assert ops.all_gather_inner(state, x, tp_hidden_dim=16 * size).equal(whole)


def sampling(rank, size):
    """Speculative tokens: logits by vocabulary to logits by request, and the verified tokens back to all ranks."""
    requests, drafts, vocabulary = 2 * size, 2, 16 * size
    state = ops.create_dp_sampling_state(
        group=dist.group.WORLD, rank_in_group=rank, tp_size=size, max_pad_bs=requests, num_tokens_per_req=drafts,
        vocab_size=vocabulary, logits_dtype=torch.float32, device=torch.device("cuda", rank),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        logits = torch.randn(requests * drafts, vocabulary, generator=generator, device="cpu")
        local = logits[:, 16 * rank : 16 * (rank + 1)].contiguous()
        own = ops.dp_sampling_swap(state, local, pad_bs=requests)
        assert own.equal(logits[2 * drafts * rank : 2 * drafts * (rank + 1)])
        best = own.argmax(1).int().view(2, drafts)
        predicted, accepted, lengths = ops.dp_sampling_gather(state, best, best + 1, best[:, 0] + 2, pad_bs=requests)
        expected = logits.argmax(1).int().view(requests, drafts)
        assert predicted.equal(expected) and accepted.equal(expected + 1) and lengths.equal(expected[:, 0] + 2)


def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.manual_seed(rank)
    torch.set_default_device("cuda")
    globals()[sys.argv[2]](rank, size)
    dist.barrier()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
