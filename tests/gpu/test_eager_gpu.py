"""Eager calls of the overlapped ops on real GPUs: what is replayed has the bits of what is launched."""

import pytest
import torch

import weft
from weft import ops
from weft.kernels.fp8 import quantized_weight
from weft.transport import replays
from weft.transport.replays import replays_of

WORLD_SIZES = [pytest.param(w, marks=pytest.mark.gpu(w)) for w in (2, 4)]
# M, N and K of a rank: sequential, pipelined and fused designs, decode steps and prompts.
SHAPES = ((16, 512, 1024), (512, 2048, 1024), (2048, 1024, 1024), (4096, 2048, 2048))


def calls_of(team, M, N, K):
    """The ops at a shape, as functions of (a_shard, a), with b and fresh results."""
    torch.manual_seed(team.rank)
    make = {"device": team.device, "dtype": torch.bfloat16}
    b, two = torch.randn(N, K, **make), [torch.randn(N // 2, K, **make) for _ in range(2)]
    fp8 = quantized_weight(b, "block")
    a_shard, a = torch.empty(M // team.size, K, **make), torch.empty(M, K, **make)
    return (a_shard, a), {
        "gather": lambda: [ops.all_gather_matmul(a_shard, b, team)],
        "own first": lambda: [ops.all_gather_matmul(a_shard, b, team, own_first=True)],
        "several": lambda: ops.all_gather_matmul(a_shard, two, team),
        "gathered": lambda: list(ops.all_gather_matmul(a_shard, b, team, return_gathered=True)),
        "scatter": lambda: [ops.matmul_reduce_scatter(a, b, team)],
        "total": lambda: [ops.matmul_all_reduce(a, b, team)],
        "gather fp8": lambda: [ops.all_gather_matmul(a_shard, fp8, team)],
        "scatter fp8": lambda: [ops.matmul_reduce_scatter(a, fp8, team)],
        "total fp8": lambda: [ops.matmul_all_reduce(a, fp8, team)],
    }


def without_replays(team, call):
    graphs, team._workspaces["replays"] = team._workspaces["replays"], None
    try:
        return call()
    finally:
        team._workspaces["replays"] = graphs


def bits(team, replaying):
    """Names of calls whose bits differ, and (captures, replays, failures); ranks outside ``replaying`` launch."""
    graphs, wrong = replays_of(team), []
    if team.rank not in replaying:
        team._workspaces["replays"] = None
    for shape in SHAPES:
        inputs, calls = calls_of(team, *shape)
        for name, call in calls.items():
            for turn in range(8):
                for x in inputs:
                    x.normal_()
                replayed = call()
                launched = without_replays(team, call)
                if not all(map(torch.equal, replayed, launched)):
                    wrong.append((shape, name, turn))
                del replayed, launched  # so that the allocator gives out the same addresses again
    team._workspaces["replays"] = graphs
    return wrong, (graphs.captures, graphs.replays, graphs.failures)


def burst(team):
    """Distance of two sums over 200 calls without a wait of the host, replayed and launched, of inputs that change."""
    (a_shard, a), calls = calls_of(team, 2048, 1024, 1024)

    def sums():
        a_shard.fill_(0.01)
        a.fill_(0.01)
        totals = [torch.zeros((), device=team.device, dtype=torch.float64) for _ in calls]
        for _ in range(200):
            for total, call in zip(totals, calls.values(), strict=True):
                total += sum(out.double().sum() for out in call())
            a_shard.mul_(1.01).clamp_(max=1)
            a.mul_(1.01).clamp_(max=1)
        return torch.stack(totals)

    launched = without_replays(team, sums)
    return float((sums() - launched).abs().max())


def gradients(team):
    """True where gradients of replayed calls have the bits of launched ones."""
    torch.manual_seed(team.rank)
    make = {"device": team.device, "dtype": torch.bfloat16}
    up, down = (torch.randn(2048, 1024, **make).requires_grad_(), torch.randn(1024, 2048, **make).requires_grad_())
    x = torch.randn(4096 // team.size, 1024, **make).requires_grad_()

    def of_once():
        hidden = ops.all_gather_matmul(x, up, team).relu()
        ops.matmul_reduce_scatter(hidden, down, team).float().square().mean().backward()
        taken = [p.grad for p in (x, up, down)]
        for p in (x, up, down):
            p.grad = None
        return taken

    launched = without_replays(team, of_once)
    return all(all(map(torch.equal, of_once(), launched)) for _ in range(6))


def captured(team):
    """True where a graph of the program's own, which holds calls that are replayed outside, has their bits."""
    inputs, calls = calls_of(team, 2048, 1024, 1024)
    for x in inputs:
        x.normal_()
    for _ in range(3):
        eager = [call() for call in calls.values()]
    graph, before = torch.cuda.CUDAGraph(), replays_of(team).replays
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outs = [call() for call in calls.values()]
    equal = replays_of(team).replays == before
    for _ in range(3):
        graph.replay()
        again = [call() for call in calls.values()]
        equal &= all(
            torch.equal(*of)
            for one in (outs, again)
            for pair in zip(one, eager, strict=True)
            for of in zip(*pair, strict=True)
        )
    return equal


def dropped(team):
    """Bits after more graphs than are kept, in a team of its own that is closed."""
    other = weft.init(heap_bytes=team.size * 256 << 20)
    most, replays.MOST_GRAPHS = replays.MOST_GRAPHS, 8
    try:
        wrong, counts = bits(other, {*range(other.size)})
    finally:
        replays.MOST_GRAPHS = most
    other.close()
    return wrong, counts


def run_all(team):
    everyone = {*range(team.size)}
    return {
        "all ranks replay": bits(team, everyone), "rank 0 replays": bits(team, {0}), "burst": burst(team),
        "gradients": gradients(team), "captured": captured(team), "dropped": dropped(team),
    }  # fmt: skip


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_replayed_calls_have_the_bits_of_launched_ones(world_size):
    for rank, told in enumerate(weft.launch(run_all, world_size, "cuda", heap_bytes=2 << 30)):
        print(f"rank {rank}: {told}")
        for name in ("all ranks replay", "rank 0 replays", "dropped"):
            wrong, (captures, played, failures) = told[name]
            assert not wrong and not failures and 0 < captures < played, (rank, name, told[name])
        assert told["burst"] == 0.0 and told["gradients"] and told["captured"], (rank, told)
