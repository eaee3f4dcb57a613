"""Team.of: one team of a group for everything in a process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft import Team
from weft.errors import NoTeam, Unsupported
from weft.runtime import capabilities
from weft.runtime.platforms.cuda import CudaPlatform, process_group
from weft.runtime.team import team
from weft.runtime.team.shape import Shape
from weft.runtime.team.view import RECORD_WORDS


def test_on_virtual_ranks_it_is_main_s_team_until_that_is_closed():
    def main(team):
        assert Team.of() is Team.of(None, heap_bytes=1 << 20) is team
        team.close()
        with pytest.raises(ValueError, match="positive|in 1"):
            Team.of(heap_bytes=0)
        second = Team.of(heap_bytes=1 << 16)
        assert second is not team and Team.of() is second and weft.init() is not second
        return second.exchange(second.rank), second.largest_free_bytes() < 1 << 16

    assert weft.simulate(main, 3, heap_bytes=1 << 20) == [([0, 1, 2], True)] * 3


def test_another_heap_size_is_refused_with_both_sizes():
    def main(team):
        with pytest.raises(
            ValueError, match=r"heap_bytes=4096, but the shared team of this group has heap_bytes=65536; l"
        ):
            Team.of(heap_bytes=4096)

    weft.simulate(main, 2, heap_bytes=1 << 16)


def test_groups_of_torch_are_refused_on_virtual_ranks():
    def main(team):
        for ask in (Team.of, weft.init):
            with pytest.raises(ValueError, match=r"group='tp' needs torch.distributed; in the simulator leave it out"):
                ask("tp")

    weft.simulate(main, 1)


def test_two_simulations_share_no_team():
    found = [weft.simulate(lambda team: (team, Team.of()), 2) for _ in range(2)]
    assert len({id(shared) for ranks in found for _, shared in ranks}) == 4
    assert all(given is shared for ranks in found for given, shared in ranks)


class OneRank:
    """Platform of one rank in plain memory."""

    rank, size, deltas, device = 0, 1, (0,), torch.device("cpu")
    caps, shape, multimem = capabilities.simulated(1), Shape(1, 1), 2

    def __init__(self, group, heap_bytes):
        self.group, self.name = group, f"one rank {id(self)}"
        self.heap, self.record = torch.zeros(heap_bytes or 1 << 16, dtype=torch.uint8), torch.zeros(RECORD_WORDS)

    def exchange(self, what, item):
        return [item]

    def is_capturing(self):
        return False

    def nothing(self, *_):
        pass

    carved = synchronize = close = nothing


@pytest.fixture
def world(monkeypatch):
    """torch.distributed of one rank, and no shared team yet. Yields the groups for which a team was made."""
    made = []

    def join(group, heap_bytes, node_size):
        made.append(process_group(group))
        return OneRank(made[-1], heap_bytes)

    monkeypatch.setattr(team, "_SHARED", {})
    monkeypatch.setattr(CudaPlatform, "join", join)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield made
    dist.destroy_process_group()


def test_a_group_and_every_slice_of_a_mesh_have_one_team(world):
    mesh, group = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")), dist.new_group([0])
    assert mesh["tp"] is not mesh["tp"]
    of_mesh, of_group = Team.of(mesh["tp"], heap_bytes=1 << 15), Team.of(group)
    assert Team.of(mesh["tp"]) is Team.of(mesh.get_group("tp")) is of_mesh
    assert Team.of(group) is of_group is not of_mesh
    assert Team.of() is Team.of(dist.group.WORLD)
    assert Team.of(dist.new_group([0])) is not of_group, "torch makes another group of the same ranks"
    assert world[:2] == [mesh.get_group("tp"), group] and len(world) == len(set(world))


def test_a_closed_team_is_replaced(world):
    first = Team.of()
    first.close()
    second = Team.of(heap_bytes=1 << 15)
    assert second is not first and Team.of() is second and world == [dist.group.WORLD] * 2


def test_what_is_no_group_of_this_rank_is_refused(world):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    for group, message in (
        (mesh, r"group=DeviceMesh\(.* has 2 dimensions; pass one of them, such as mesh\['tp'\]"),
        (dist.GroupMember.NON_GROUP_MEMBER, "this rank does not belong to"),
        ("tp", "group='tp' is not a torch.distributed group, a one-dimensional DeviceMesh or None"),
        (0, "group=0 is not"),
        (Team.of(), "group=<Team> is not"),
    ):
        with pytest.raises(ValueError, match=message):
            Team.of(group)
    assert len(world) == 1


def test_no_team_is_made_while_a_graph_is_captured(monkeypatch, world):
    shared, group = Team.of(), dist.new_group([0])
    monkeypatch.undo()
    monkeypatch.setattr(team, "_SHARED", {dist.group.WORLD: shared})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert Team.of() is shared
    with pytest.raises(Unsupported, match=r"captured; call weft.init\(\) or Team.of\(group\) once before capturing"):
        Team.of(group)
    assert {dist.group.WORLD: shared} == team._SHARED, "the next call makes it"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_on_amd_gpus_weft_runs_only_where_it_is_asked_to(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(Unsupported, match=r"weft.init\(untested=True\)"):
        weft.init()
    with pytest.raises(NoTeam, match="finds no GPU here"):
        weft.init(untested=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_without_ranks_there_is_no_team():
    with pytest.raises(NoTeam, match="finds no GPU here"):
        Team.of()
