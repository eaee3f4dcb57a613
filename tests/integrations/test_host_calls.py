"""Python frames of a call through a door, beside the frames of the op; a frame takes the host about 0.1 us."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.ops.host_calls import counted_team
from weft import ops
from weft.integrations import fallback
from weft.integrations import torch as door
from weft.runtime.team import team as team_module
from weft.transport.replays import Replays, all_halves

# Rows of all ranks, N of a rank, K.
M, N, K = 512, 1024, 512


def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)


@pytest.fixture
def counted(monkeypatch):
    """(team, host, mesh) of two ranks, whose groups compute nothing; every call pays, and is replayed once it comes again."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"]
    team, host = counted_team(monkeypatch)
    monkeypatch.setitem(team_module._SHARED, mesh.get_group(), team)
    monkeypatch.setattr(fallback, "EAGER_FROM", dict.fromkeys(fallback.EAGER_FROM, 0))
    yield team, host, mesh
    door.uninstall()
    dist.destroy_process_group()


def replaying(team, monkeypatch):
    """The team's graphs; results lie at the same address again and again, as an allocator gives them out in a loop."""
    made, results = torch.empty, {}
    monkeypatch.setattr(torch, "empty", lambda *shape, **of: results.setdefault(str(shape), made(*shape, **of)))
    team._workspaces["replays"] = graphs = Replays(lambda run: (run(), lambda: None)[1], all_halves(team), lambda: None)
    return graphs


def frames_of(counted, monkeypatch, call):
    """(Python frames of a replayed call, True if all counted calls were replays)"""
    team, host, _ = counted
    graphs = replaying(team, monkeypatch)
    for _ in range(6):
        call()
    before = graphs.launches
    return host.counted(call)["frames"], graphs.launches == before and not graphs.failures


# Of a call; the most Python frames beside the frames of the op.
FUSED = {
    "gather": (
        lambda fused, a, b, group: fused.fused_all_gather_matmul(a[: M // 2], [b.T], 0, group),
        lambda a, b, team: ops.all_gather_matmul(a[: M // 2], [b], team, return_gathered=True),
        17,
    ),
    "scatter": (
        lambda fused, a, b, group: fused.fused_matmul_reduce_scatter(a, b.T, "sum", 0, group),
        lambda a, b, team: ops.matmul_reduce_scatter(a, b, team),
        14,
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_op_of_torch_s_adds_few_frames_to_the_op(counted, monkeypatch, name):
    team, _, mesh = counted
    through, alone, most = FUSED[name]
    assert door.install(mesh)
    a, b, fused, group = empty(M, K), empty(N, K), torch.ops.symm_mem, mesh.get_group().group_name
    of_op, replayed = frames_of(counted, monkeypatch, lambda: alone(a, b, team))
    assert replayed
    frames, replayed = frames_of(counted, monkeypatch, lambda: through(fused, a, b, group))
    assert replayed and frames - of_op <= most


def test_a_layer_by_styles_takes_few_frames(counted, monkeypatch):
    team, _, mesh = counted

    class FeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(K, 2 * N, bias=False), nn.Linear(2 * N, K, bias=False)

        def forward(self, x):
            return self.down(self.up(x))

    plan = {
        "up": door.WeftColwiseParallel(input_layouts=Shard(0)),
        "down": door.WeftRowwiseParallel(output_layouts=Shard(0)),
    }
    model = parallelize_module(FeedForward().bfloat16(), mesh, plan)
    x = empty(M // 2, K)

    def forward():
        with torch.no_grad():
            model(x)

    frames, replayed = frames_of(counted, monkeypatch, forward)
    assert replayed and frames <= 104
