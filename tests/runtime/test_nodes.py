"""Teams of several nodes: their shape, the team of a node, what is refused between nodes."""

import runpy

import pytest
import torch

import weft
from tests.documents import ROOT, blocks
from weft import Piece, ops
from weft.errors import NoPeerAccess, SeveralNodes
from weft.runtime import environment
from weft.runtime.platforms import cuda
from weft.runtime.team.shape import Shape, shape_of


def coordinates_of(team):
    node = team.node
    return team.shape, team.rail.index, node.rank, node.size, team.rank, team.size


@pytest.mark.parametrize(("nodes", "node_size"), [(2, 1), (2, 2), (3, 2)])
def test_a_rank_has_a_node_and_a_rail(nodes, node_size):
    found = weft.simulate(coordinates_of, nodes * node_size, node_size=node_size)
    size = nodes * node_size
    assert found == [((nodes, node_size), r // node_size, r % node_size, node_size, r, size) for r in range(size)]


def test_one_node_is_a_team_as_ever():
    def main(team):
        same = weft.init(node_size=2)
        return team.shape, same.shape, team.node is team, team.rail, same.empty(4).shape

    assert weft.simulate(main, 2) == [((1, 2), (1, 2), True, None, (4,))] * 2


def test_the_node_is_a_whole_team():
    def main(team):
        x = team.node.zeros(4, torch.float32)
        return ops.all_reduce(x + team.rank, team.node).tolist(), team.exchange(team.rank), team.heap_changes

    assert weft.simulate(main, 4, node_size=2) == [([s] * 4, [0, 1, 2, 3], 0) for s in (1.0, 1.0, 5.0, 5.0)]


@pytest.mark.parametrize("use", [
    lambda team: team.view, lambda team: team.copy_engine, lambda team: team.signals(2), lambda team: team.empty(4),
    lambda team: team.channel(2), lambda team: team.at_peer(torch.ones(1), 3), lambda team: team.free(torch.ones(1)),
])  # fmt: skip
def test_memory_and_kernels_do_not_cross_nodes(use):
    said = r"rank \d: .* of a team of 2 nodes x 2 ranks: memory, kernels and copy engines reach .*; use team.node"
    with pytest.raises(SeveralNodes, match=said):
        weft.simulate(use, 4, node_size=2)


def test_a_subset_has_the_nodes_of_its_ranks():
    def main(team):
        inner = [team.subset(ranks, heap_bytes=1 << 20) for ranks in ([2, 3], [1, 3], [0, 1, 4, 5])]
        return [one and one.shape for one in inner]

    found = weft.simulate(main, 6, node_size=2)
    assert found == [
        [None, None, (2, 2)], [None, (2, 1), (2, 2)], [(1, 2), None, None], [(1, 2), (2, 1), None],
        [None, None, (2, 2)], [None, None, (2, 2)],
    ]  # fmt: skip
    with pytest.raises(ValueError, match="this one would have 2 of node 0, 1 of node 1; leave some out"):
        weft.simulate(lambda team: team.subset([0, 1, 2]), 4, node_size=2)


@pytest.mark.parametrize(
    ("node_size", "parts", "shape"), [(4, 2, (1, 2)), (2, 2, (1, 2)), (2, 4, (1, 1)), (1, 2, (2, 1))]
)
def test_a_part_of_a_team_has_a_rail_to_the_others(node_size, parts, shape):
    """Parts of a node, nodes, and two nodes each: what the rank of equal place in the next part sends arrives."""

    def main(team):
        part, rail = team.split(parts)
        got, to, source = torch.empty(1), (rail.index + 1) % parts, (rail.index - 1) % parts
        rail.fork()
        rail.exchange([Piece(send=torch.full((1,), float(team.rank)), to=to, receive=got, source=source)])
        rail.join()
        return part.shape, part.rank, (rail.index, rail.size), got.item()

    size = 4 // parts
    found = weft.simulate(main, 4, node_size=node_size)
    assert found == [(shape, r % size, (r // size, parts), (r - size) % 4) for r in range(4)]


@pytest.mark.parametrize(
    ("ranks", "node_size", "parts", "message"),
    [
        (4, 2, 3, "parts=3 does not divide the 4 ranks of this team; pass a divisor"),
        (
            6,
            2,
            2,
            "parts=2 of 3 ranks each are neither whole nodes of 2 ranks nor equal parts of one; pass a divisor",
        ),
        (6, 2, 1, "parts=1 is not an integer of at least 2"),
    ],
)
def test_parts_that_do_not_fit_are_refused(ranks, node_size, parts, message):
    with pytest.raises(ValueError, match=message):
        weft.simulate(lambda team: team.split(parts), ranks, node_size=node_size)


def test_logical_nodes_lie_within_the_machine_s():
    with pytest.raises(
        NoPeerAccess, match="rank 0 on a virtual GPU of node 0 cannot reach rank 2 on a virtual GPU of node 1"
    ):
        weft.simulate(lambda team: weft.init(node_size=4), 4, node_size=2)
    assert weft.simulate(lambda team: weft.init(node_size=1).shape, 4, node_size=2) == [(4, 1)] * 4


@pytest.mark.parametrize("door", [weft.simulate, lambda *a, **k: weft.launch(*a, "sim", **k)])
def test_a_node_size_divides_the_world_size(door):
    with pytest.raises(ValueError, match="node_size=3 does not divide world_size=4; pass a divisor of it"):
        door(coordinates_of, 4, node_size=3)
    with pytest.raises(ValueError, match="node_size=0 is not a positive integer|is not an integer of at least 1"):
        door(coordinates_of, 4, node_size=0)


def test_the_page_runs(tmp_path):
    for block in blocks(ROOT / "docs" / "nodes.md"):
        if block.language == "python":
            file = tmp_path / f"line_{block.line}.py"
            file.write_text(block.text)
            runpy.run_path(str(file))


def test_shapes():
    assert shape_of([0, 0, 1, 1]) == Shape(2, 2) and shape_of([4, 4]) == Shape(1, 2) and shape_of([0, 3]) == Shape(2, 1)
    for nodes, said in (([0, 0, 1], "2 of node 0, 1 of node 1"), ([0, 1, 0, 1], "follow each other")):
        with pytest.raises(ValueError, match=said):
            shape_of(nodes)


def test_torchrun_says_how_many_ranks_a_machine_has(monkeypatch):
    said = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert environment.coordinates().node_size is None
    monkeypatch.setattr(cuda.dist, "get_world_size", lambda: 8)
    nodes = {}
    for told, argument in ((None, None), ("4", None), ("2", None), ("4", 1)):
        if told is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
        alike = lambda what, item: [item] * 4  # noqa: E731  an exchange in which all ranks say the same
        nodes[told, argument] = cuda.agreed_nodes(alike, [0, 3, 4, 7], argument)
    assert nodes == {
        (None, None): [0] * 4,
        ("4", None): [0, 0, 1, 1],
        ("2", None): [0, 1, 2, 3],
        ("4", 1): [0, 1, 2, 3],
    }
    differ = lambda what, item: [item, (False, 2)]  # noqa: E731
    with pytest.raises(
        ValueError, match="rank 0 has LOCAL_WORLD_SIZE=4, rank 1 has LOCAL_WORLD_SIZE=2; give all machines"
    ):
        cuda.agreed_nodes(differ, [0, 1], None)
