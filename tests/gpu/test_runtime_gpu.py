"""Teams, primitives and debug-mode waits on real GPUs: the same mains as on virtual ranks."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.runtime import behaviour
from tests.runtime.sockets import listening
from weft import ops
from weft.errors import ArgumentMismatch, CallMismatch, PeerSilent, WaitTimeout
from weft.ops import Routing

WORLD_SIZES = [pytest.param(w, marks=pytest.mark.gpu(w)) for w in (1, 2, 4)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_teams_and_primitives_keep_their_promises(world_size):
    for rank, wrong in enumerate(weft.launch(behaviour.run_all, world_size, "cuda", heap_bytes=64 << 20)):
        assert not any(wrong.values()), f"rank {rank}: {wrong}"


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_a_wait_in_vain_ends_on_every_rank_with_its_kernel_signal_and_values(world_size, tmp_path):
    with pytest.raises(WaitTimeout) as caught:
        weft.launch(behaviour.wait_in_vain, world_size, "cuda", args=(str(tmp_path),), heap_bytes=64 << 20, debug=1.0)
    assert (caught.value.rank, caught.value.kernel, caught.value.program) == (0, "wait_for_nobody", 0)
    assert (caught.value.signal, caught.value.wanted, caught.value.seen) == ("landed[1]", 5, 0)
    for rank in range(world_size):
        said = (tmp_path / f"rank{rank}").read_text()
        assert "kernel wait_for_nobody, program 0" in said and "landed[1] >= 5" in said and "saw 0" in said


def on_a_mesh_dimension(team):
    """Pairs of ranks, each a team of its own with its own heap and signals."""
    mesh = init_device_mesh("cuda", (team.size // 2, 2), mesh_dim_names=("dp", "tp"))
    pair = weft.init(mesh["tp"], heap_bytes=8 << 20)
    assert (pair.size, pair.rank) == (2, team.rank % 2)
    shared = weft.Team.of(mesh["tp"], heap_bytes=8 << 20)
    assert weft.Team.of(mesh["tp"]) is shared is not pair and weft.Team.of() is team
    return behaviour.run_all(pair)


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_a_device_mesh_dimension_is_a_team(world_size):
    for rank, wrong in enumerate(weft.launch(on_a_mesh_dimension, world_size, "cuda", heap_bytes=8 << 20)):
        assert not any(wrong.values()), f"rank {rank}: {wrong}"


def told(call, kind):
    """The message of the ``kind`` of error that ``call`` raises."""
    try:
        call()
    except kind as error:
        return str(error)
    return None


def differ(team):
    """Calls that differ between ranks, eager and captured, in a debug build; after each the team goes on."""
    x = torch.ones(4 + team.rank, device=team.device)
    same = torch.ones(4, device=team.device)
    ops.all_reduce(same, team)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = told(lambda: ops.all_reduce(x, team), ArgumentMismatch)
        out = ops.all_reduce(same, team)
    graph.replay()
    twice = Routing(torch.zeros((1, 2), dtype=torch.int32, device=team.device), torch.ones((1, 2), device=team.device))
    found = [
        captured,
        told(lambda: ops.all_reduce(x, team), ArgumentMismatch),
        told(lambda: (ops.all_reduce if team.rank else ops.all_gather)(same, team), CallMismatch),
        told(lambda: ops.moe_dispatch(same[None], twice, team, experts=team.size, max_tokens=1), ValueError),
    ]
    return out.tolist(), found


@pytest.mark.gpu(2)
def test_a_debug_build_compares_the_calls_of_ranks():
    for rank, (summed, found) in enumerate(weft.launch(differ, 2, "cuda", heap_bytes=64 << 20, debug=3.0)):
        assert summed == [2.0] * 4
        sizes = f"rank {rank}: weft.ops.all_reduce: x is (4,) float32 on rank 0, (5,) float32 on rank 1"
        assert found[0].startswith(sizes) and found[1].startswith(sizes)
        assert "rank 0 is in weft.ops.all_gather, rank 1 is in weft.ops.all_reduce" in found[2]
        assert "ids[0] names expert 0 twice" in found[3]


def alone(team):
    if team.rank == 0:
        ops.all_reduce(torch.ones(4, device=team.device), team)
    time.sleep(3)


@pytest.mark.gpu(2)
def test_a_debug_build_does_not_wait_for_a_rank_without_a_call():
    with pytest.raises(PeerSilent, match=r"rank 1 did not reach weft.ops.all_reduce .* within 0.5 s"):
        weft.launch(alone, 2, "cuda", heap_bytes=64 << 20, debug=0.5)


def lonely(team):
    """Rank 1 fails on the host while the others are in a collective host call."""
    if team.rank == 1:
        raise KeyError("rank 1 tripped")
    team.empty(16)


def its_gpu(team):
    return team.device.index


@pytest.mark.gpu(1)
def test_ranks_that_share_a_gpu_do_what_others_do():
    gpus = torch.cuda.device_count()
    assert weft.launch(its_gpu, gpus + 1, "cuda", heap_bytes=8 << 20, share_gpus=True) == [*range(gpus), 0]
    for rank, wrong in enumerate(weft.launch(behaviour.run_all, gpus + 1, heap_bytes=64 << 20, share_gpus=True)):
        assert not any(wrong.values()), f"rank {rank}: {wrong}"


@pytest.mark.gpu(2)
def test_a_rank_that_raises_ends_the_others_and_its_error_is_raised():
    with pytest.raises(KeyError, match="rank 1 tripped"):
        weft.launch(lonely, 2, "cuda", heap_bytes=8 << 20)


def sockets_of_a_collective(team):
    """(the parent's, this rank's) addresses that listen, once torch's own collectives have run, on the GPU and on the CPU."""
    x = torch.ones(4, device=team.device)
    dist.all_reduce(x)
    on_cpu = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(4), group=on_cpu)
    team.barrier()
    found = listening(os.getppid()), listening()
    team.barrier()
    assert x.tolist() == [team.size] * 4
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_parent_and_ranks_listen_on_loopback_only(world_size, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth")
    before = listening()
    for parents, ranks in weft.launch(sockets_of_a_collective, world_size, "cuda", heap_bytes=8 << 20):
        assert parents == before
        assert ranks and set(ranks) <= {"127.0.0.1", "::1"}, ranks


@pytest.mark.gpu(1)
def test_ranks_that_share_a_gpu_listen_on_loopback_only():
    size = torch.cuda.device_count() + 1
    for _, ranks in weft.launch(sockets_of_a_collective, size, "cuda", heap_bytes=8 << 20, share_gpus=True):
        assert ranks and set(ranks) <= {"127.0.0.1", "::1"}, ranks
