"""Driver of torchtitan's minimal_async_ep: tokens to the ranks of their experts and back, with the backward pass."""

import logging
import os

import torch
import torch.distributed as dist
from stubs import folder, package

package("torchtitan.tools.logging", logger=logging.getLogger("torchtitan"))
package("torchtitan.distributed.minimal_async_ep", folder() / "torchtitan/torchtitan/distributed/minimal_async_ep")
from torchtitan.distributed.minimal_async_ep import api  # noqa: E402

TOKENS, DIM, TOP_K, LOCAL_EXPERTS = 5, 16, 2, 2


def layer(x, ids, scores, size):
    """Sum of scores * (1 + expert) * x over a token's experts."""
    counts = torch.bincount(ids.reshape(-1), minlength=size * LOCAL_EXPERTS)
    hidden, *places, tokens = api.dispatch_op(x, ids, counts, size * TOKENS * TOP_K, size)
    ranks, rows, origin_ranks, origin_rows, valid, to_tokens, to_experts = places
    first = dist.get_rank() * LOCAL_EXPERTS
    factors = torch.repeat_interleave(torch.arange(first + 1.0, first + 1 + LOCAL_EXPERTS), tokens)
    done = torch.zeros_like(hidden)
    done[: len(factors)] = hidden[: len(factors)] * factors[:, None]
    out, _ = api.combine_op(
        done, ranks, rows, origin_ranks, origin_rows, valid, to_experts, to_tokens, scores.reshape(-1), TOKENS, TOP_K
    )
    return out


def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.manual_seed(rank)
    torch.set_default_device("cuda")
    device = torch.device("cuda", rank)
    api.init_buffer(dist.group.WORLD, DIM, TOKENS, LOCAL_EXPERTS, TOP_K, torch.float32, device)
    for buffer in api._buffer_state.hidden_recv_buffers:
        buffer.zero_()  # the experts of this driver read all rows, a grouped GEMM only those that came
    dist.barrier()
    for _ in range(3):
        x = torch.randn(TOKENS, DIM).requires_grad_()
        ids = torch.rand(TOKENS, size * LOCAL_EXPERTS).topk(TOP_K).indices
        scores = torch.rand(TOKENS, TOP_K).requires_grad_()
        layer(x, ids, scores, size).sum().backward()
        mine, weights = x.detach().clone().requires_grad_(), scores.detach().clone().requires_grad_()
        expected = ((weights * (1 + ids)).sum(1, keepdim=True) * mine).sum(1)
        expected.sum().backward()
        torch.testing.assert_close(x.grad, mine.grad)
        torch.testing.assert_close(scores.grad, weights.grad)
    dist.barrier()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
