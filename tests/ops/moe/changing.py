"""Layers of experts whose tokens and routing change from call to call, by several ways; also of the GPU suite."""

import random
from contextlib import contextmanager

import torch

from tests.ops.checking import bits
from tests.ops.moe.trained import by_torch
from weft import ops

K = 3


def weights_of(team, hidden, features):
    """(router, gate_up, down) of four experts a rank, in fp32."""
    generator, experts = torch.Generator().manual_seed(0), 4 * team.size
    shapes = (experts, hidden), (experts, 2 * features, hidden), (experts, hidden, features)
    return [(torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(team.device) for shape in shapes]


def tokens_of(team, rank, dataset, hidden, most):
    """Another number of tokens at each rank and in each dataset, none at some; of every second one all choose alike."""
    draw = random.Random(f"{rank} {dataset}")
    count = draw.choice((0, 1, most // 3, most, draw.randrange(most)))
    x = torch.randn((count, hidden), generator=torch.Generator().manual_seed(97 * rank + dataset))
    if dataset % 2:
        x[:, 1:] *= 1e-3
    return x.to(team.device)


def exchanged(dispatch, combine, shared=False):
    """Layer by moe_dispatch and moe_combine. shared: all ranks hold slices of each expert."""

    def layer(team, x, routing, gate_up, down, most):
        total, width = len(gate_up), down.shape[2] // team.size
        experts = ops.Experts.slices(total) if shared else ops.Experts.whole(total, team.rank, team.size)
        if shared:
            mine = slice(team.rank * width, (team.rank + 1) * width)
            gate_up = torch.cat([part[:, mine] for part in gate_up.chunk(2, dim=1)], dim=1)
            down = down[:, :, mine].contiguous()
        held = slice(experts.first, experts.first + experts.count)
        found = ops.moe_dispatch(x, routing, team, experts=experts, max_tokens=most, algorithm=dispatch)
        schedule = ops.moe_schedule(found.routing.ids, found.experts, start=team.rank * most)
        h = ops.grouped_matmul_silu_mul(found.rows, gate_up[held], schedule)
        y = ops.grouped_matmul(h, down[held], schedule)
        return ops.moe_combine(y, found, len(x), team, algorithm=combine)

    return layer


def overlapped(team, x, routing, gate_up, down, most):
    experts = ops.Experts.whole(len(gate_up), team.rank, team.size)
    held, named = slice(experts.first, experts.first + experts.count), {"max_tokens": most, "algorithm": "fused"}
    h, schedule, found = ops.all_gather_grouped_matmul_silu_mul(x, routing, gate_up[held], experts, team, **named)
    return ops.grouped_matmul_reduce_scatter(h, down[held], schedule, found, len(x), team, algorithm="slabs")


WAYS = {
    "push": exchanged("push", "push"),
    "lamport": exchanged("lamport", "lamport"),
    "lamport and sum_then_scatter": exchanged("lamport", "sum_then_scatter"),
    "pipelined": exchanged("pipelined", "pipelined"),
    "push, slices of experts": exchanged("push", "push", shared=True),
    "overlapped": overlapped,
}


@contextmanager
def no_host_sync(team):
    """Let torch raise where the host would wait for the device. On virtual ranks it does nothing."""
    on_gpu = team.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")


def run(team, way, calls, datasets, hidden, features, most, delay=lambda: None):
    """(result of each dataset, number of elements that differ from it in ``calls`` calls in a changing order)."""
    router, *experts = weights_of(team, hidden, features)
    given = [tokens_of(team, team.rank, dataset, hidden, most) for dataset in range(datasets)]

    def layer(x):
        return WAYS[way](team, x, ops.route(x @ router.T, K), *experts, most)

    first = [layer(x) for x in given]  # compiled, and with workspaces
    wrong = torch.zeros((), dtype=torch.int64, device=team.device)
    team.synchronize()
    draw = random.Random(way)
    with no_host_sync(team):
        for _ in range(calls):
            dataset = draw.randrange(datasets)
            wrong.add_((bits(layer(given[dataset])) != bits(first[dataset])).sum())
            delay()
    return first, wrong


def check(team, made, hidden, features, most):
    first, wrong = made
    assert wrong.item() == 0, f"{wrong.item()} elements differ from the first call's"
    whole = [weight.double().cpu() for weight in weights_of(team, hidden, features)]
    for dataset, found in enumerate(first):
        x = tokens_of(team, team.rank, dataset, hidden, most).double().cpu()
        torch.testing.assert_close(found.double().cpu(), by_torch(x, *whole, K), rtol=1e-4, atol=1e-5)
