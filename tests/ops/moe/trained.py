"""Two layers of experts over ranks, forward and backward, and the same by torch on one; also of the GPU suite."""

import torch

from weft import ops

EXPERTS, K, HIDDEN, FEATURES, MOST = 12, 2, 16, 8, 5
NAMES = "x", "router", "gate_up", "down"


def by_torch(x, router, gate_up, down, k):
    """A whole layer in torch's operations."""
    scores = (x @ router.T).softmax(-1)
    weights, ids = scores.topk(k)
    weights = weights / weights.sum(-1, keepdim=True)
    total = torch.zeros_like(x)
    for e in range(len(router)):
        gate, up = (x @ gate_up[e].T).chunk(2, dim=-1)
        share = torch.where(ids == e, weights, 0.0).sum(-1, keepdim=True)
        total = total + (torch.nn.functional.silu(gate) * up) @ down[e].T * share
    return total


def model(skew=False):
    """(router, gate_up, down) in fp64. skew: tokens choose experts 1 and 7 only."""
    generator = torch.Generator().manual_seed(0)
    shapes = (EXPERTS, HIDDEN), (EXPERTS, 2 * FEATURES, HIDDEN), (EXPERTS, HIDDEN, FEATURES)
    router, gate_up, down = (
        torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5 for shape in shapes
    )
    if skew:
        router[:, 0] = -8.0
        router[[1, 7], 0] = 8.0
    return router, gate_up, down


def tokens_of(rank):
    """A rank's x, another number of rows on each and none on one, and the gradient of its result."""
    generator, count = torch.Generator().manual_seed(rank), (5, 3, 0, 4)[rank]
    x, grad = (torch.randn((count, HIDDEN), generator=generator, dtype=torch.float64) for _ in range(2))
    x[:, 0] = 1.0
    return x, grad


def over_ranks(team, skew=False, dispatch="auto", combine="auto", tp=1):
    """Gradients of this rank's tokens, the router and its experts, through two layers with residuals.

    tp  ranks that hold slices of the same experts
    """
    experts = ops.Experts.grouped(EXPERTS, team.rank, team.size // tp, tp)
    mine, slices = slice(experts.first, experts.first + experts.count), FEATURES // tp
    features = slice(team.rank % tp * slices, (team.rank % tp + 1) * slices)
    (x, grad), (router, gate_up, down) = tokens_of(team.rank), model(skew)
    gate_up = gate_up[mine].unflatten(1, (2, FEATURES))[:, :, features].flatten(1, 2)
    leaves = [w.float().to(team.device).requires_grad_() for w in (x, router, gate_up, down[mine][:, :, features])]
    x, router, gate_up, down = leaves
    for _ in range(2):
        routing = ops.route(x @ router.T, K)
        found = ops.moe_dispatch(x, routing, team, experts=experts, max_tokens=MOST, algorithm=dispatch)
        schedule = ops.moe_schedule(found.routing.ids, found.experts, start=team.rank * MOST)
        h = ops.grouped_matmul_silu_mul(found.rows, gate_up, schedule)
        y = ops.grouped_matmul(h, down, schedule)
        x = x + ops.moe_combine(y, found, len(x), team, algorithm=combine)
    x.backward(grad.float().T.contiguous().T.to(team.device))  # not contiguous
    return [leaf.grad for leaf in leaves]


def on_one(world_size, skew=False):
    """The same of an unsharded model in fp64, of all ranks' tokens."""
    x, grad = (torch.cat(parts) for parts in zip(*map(tokens_of, range(world_size)), strict=True))
    leaves = [w.requires_grad_() for w in (x, *model(skew))]
    x = leaves[0]
    for _ in range(2):
        x = x + by_torch(x, *leaves[1:], K)
    x.backward(grad)
    return [leaf.grad for leaf in leaves]


def joined(by_rank, tp=1):
    """Tokens and experts of all ranks; the router is the same on all, so its gradient is their sum."""
    x, router, gate_up, down = zip(*by_rank, strict=True)
    gate_up = [part.unflatten(1, (2, FEATURES // tp)) for part in gate_up]
    of_groups = range(0, len(by_rank), tp)
    gate_up = [torch.cat(gate_up[first : first + tp], dim=2).flatten(1, 2) for first in of_groups]
    down = [torch.cat(down[first : first + tp], dim=2) for first in of_groups]
    return torch.cat(x), sum(router), torch.cat(gate_up), torch.cat(down)


def check(by_rank, expected, tp=1):
    for name, one, other in zip(NAMES, joined(by_rank, tp), expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
