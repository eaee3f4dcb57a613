"""Teams: symmetric memory, collective host calls, errors that name ranks and values on every rank."""

import re
import threading

import pytest
import torch

import weft
from tests.runtime import behaviour
from weft import ops
from weft.errors import (
    AllocationMismatch,
    ArgumentMismatch,
    Deadlock,
    HeapExhausted,
    NotSymmetric,
    TeamClosed,
    Unsupported,
)
from weft.runtime.platforms.virtual import VirtualPlatform
from weft.runtime.team.heap import ALIGNMENT, HeapLayout
from weft.runtime.team.team import find_team


def test_symmetric_tensors_lie_at_equal_offsets_and_peers_are_reachable():
    def main(team):
        a, b = team.empty((3, 5), torch.float32), team.zeros(7, torch.int32)
        a.fill_(team.rank)
        team.barrier()
        peer = (team.rank + 1) % team.size
        base = team._platform.heap.data_ptr()
        return [t.data_ptr() - base for t in (a, b)], team.at_peer(a, peer).mean().item(), a.shape, b.dtype

    results = weft.simulate(main, 3)
    assert len({tuple(offsets) for offsets, *_ in results}) == 1
    assert [mean for _, mean, *_ in results] == [1.0, 2.0, 0.0]
    assert all(shape == (3, 5) and dtype == torch.int32 for *_, shape, dtype in results)
    assert all(offset % ALIGNMENT == 0 for offsets, *_ in results for offset in offsets)


def test_a_full_heap_says_how_large_it_must_be():
    def main(team):
        team.empty(1 << 20, torch.float32, name="activations")
        team.empty(1 << 20, torch.float32)

    with pytest.raises(
        HeapExhausted, match=r"rank \d: 4,194,304 bytes wanted.*activations \(4,194,304 bytes\).*heap_bytes="
    ):
        weft.simulate(main, 2, heap_bytes=6 << 20)


@pytest.mark.parametrize("other", [((4,), torch.float32), ((8,), torch.bfloat16)])
def test_ranks_that_allocate_differently_learn_it_on_every_rank(other):
    def main(team):
        with pytest.raises(AllocationMismatch) as caught:
            team.empty(*(other if team.rank == 1 else ((8,), torch.float32)))
        return caught.value.rank, str(caught.value)

    for rank, (named, message) in enumerate(weft.simulate(main, 2)):
        assert named == rank
        assert "rank 0: (8,) torch.float32" in message and "rank 1: " in message


@pytest.mark.parametrize("node_size", [4, 2])
def test_heaps_of_different_sizes_are_refused_on_every_rank(node_size):
    """Of a node, and where they are equal within each node."""

    def main(team):
        with pytest.raises(
            ArgumentMismatch, match="a new team: heap_bytes is .*2097152 on rank 2.*; pass the same"
        ) as caught:
            weft.init(heap_bytes=(1 << 20) + (team.rank // 2 << 20))
        return caught.value.rank, caught.value.different["heap_bytes"][0]

    assert weft.simulate(main, 4, node_size=node_size) == [(rank, "1048576") for rank in range(4)]


def test_a_rank_that_does_not_allocate_is_named():
    def main(team):
        if team.rank != 2:
            team.empty(4)

    with pytest.raises(Deadlock, match=r"waits in team0's allocation #\d+ .* for rank 2"):
        weft.simulate(main, 3)


def test_an_ordinary_tensor_is_refused_where_a_symmetric_one_is_needed():
    def main(team):
        with pytest.raises(NotSymmetric, match=r"rank 0: .*shape \(3,\).*team.empty"):
            team.at_peer(torch.zeros(3), 0)
        with pytest.raises(NotSymmetric):
            team.copy_engine.put(torch.zeros(3), torch.zeros(3), 0)
        with pytest.raises(ValueError, match="peer=5"):
            team.at_peer(team.empty(4), 5)
        with pytest.raises(ValueError, match="dtype and number of elements"):
            team.copy_engine.put(team.empty(4), torch.zeros(3), 0)

    weft.simulate(main, 1)


def test_every_use_after_close_is_an_error():
    def main(team):
        x = team.empty(4)
        team.close()
        team.close()
        for use in (
            lambda: team.empty(4),
            lambda: team.view,
            team.barrier,
            lambda: team.copy_engine,
            lambda: team.at_peer(x, 0),
            lambda: find_team(team.name),
            lambda: team.exchange(1),
        ):
            with pytest.raises(TeamClosed, match="after close"):
                use()

    weft.simulate(main, 2)


def test_a_team_is_used_in_its_simulation_only():
    """Afterwards each call says so in one line, whatever the call needs of the simulator."""
    [team, *_] = weft.simulate(lambda team: team, 2)
    for use in (
        team.barrier,
        team.close,
        team.synchronize,
        lambda: team.zeros(4),
        lambda: team.exchange(1),
        lambda: team.subset([0]),
        lambda: team.library.all_reduce(torch.ones(2)),
        lambda: ops.all_reduce(torch.ones(4), team),
        lambda: ops.barrier(team),
    ):
        with pytest.raises(Unsupported, match="where no rank runs, such as after weft.simulate has returned"):
            use()


SPARSE = torch.eye(4).to_sparse()


@pytest.mark.parametrize(
    "call",
    [
        lambda team: ops.all_reduce(SPARSE, team),
        lambda team: ops.all_gather(SPARSE, team),
        lambda team: ops.all_gather_matmul(SPARSE, SPARSE, team),
        lambda team: ops.matmul(SPARSE, torch.eye(4)),
        lambda team: ops.add_rms_norm(SPARSE, SPARSE, torch.ones(4), 1e-5),
        lambda team: ops.route(SPARSE, 1),
        lambda team: team.library.all_gather(SPARSE),
        lambda team: team.copy_engine.put(team.zeros(4), SPARSE, 0),
        lambda team: team.is_symmetric(SPARSE),
        lambda team: team.free(SPARSE),
    ],
)
def test_a_sparse_tensor_is_refused(call):
    with pytest.raises(ValueError, match="is a tensor of layout sparse_.*; pass a dense one, as .to_dense"):
        weft.simulate(call, 1)


def test_teams_are_found_by_name_and_init_makes_another():
    def main(team):
        second = weft.init(heap_bytes=1 << 20)
        assert find_team(team.name) is team and find_team(second.name) is second
        assert second.name != team.name
        return second.exchange(team.rank)

    assert weft.simulate(main, 2) == [[0, 1]] * 2
    with pytest.raises(ValueError, match="no team called 'other'"):
        find_team("other")


def test_a_subset_is_a_team_of_its_own():
    def main(team):
        inner = team.subset([1, 3], heap_bytes=1 << 20)
        if inner is None:
            return None
        x = inner.zeros(4, torch.float32)
        inner.at_peer(x, 1 - inner.rank).fill_(team.rank)
        inner.barrier()
        return inner.rank, inner.size, x[0].item()

    assert weft.simulate(main, 4) == [None, (0, 2, 3.0), None, (1, 2, 1.0)]


def test_subset_ranks_are_checked():
    with pytest.raises(ValueError, match=r"ranks=\[0, 4\] must be different ranks of this team, 0 to 1"):
        weft.simulate(lambda team: team.subset([0, 4]), 2)
    with pytest.raises(ValueError, match=r"ranks=\[3, 1\] must ascend.*pass \[1, 3\]"):
        weft.simulate(lambda team: team.subset([3, 1]), 4)


def test_freed_memory_is_used_again():
    def main(team):
        first = team.empty(1000)
        address = first.data_ptr()
        team.free(first)
        return team.empty(500).data_ptr() == address

    assert weft.simulate(main, 2) == [True, True]


def test_ranks_that_free_different_tensors_learn_it_on_every_rank():
    def main(team):
        a, b = team.empty(64, name="a"), team.empty(64, name="b")
        with pytest.raises(
            AllocationMismatch, match=r"free\(\) differs .*rank 0: 'a', 128 bytes .* rank 1: 'b', 128 bytes"
        ):
            team.free(a if team.rank == 0 else b)
        team.free(b)
        return team.empty(64).data_ptr() - b.data_ptr(), a.data_ptr() < b.data_ptr()

    assert weft.simulate(main, 2) == [(0, True), (0, True)]


def test_only_a_whole_tensor_is_freed_and_once():
    def main(team):
        x = team.empty((4, 8), torch.float32, name="x")
        for part in (x[1:], x[:2]):
            with pytest.raises(ValueError, match=r"rank \d: free\(\) of \d+ bytes at byte .* the whole tensor .* once"):
                team.free(part)
        team.free(x.view(-1))
        with pytest.raises(ValueError, match="freed already"):
            team.free(x)
        smaller = team.empty(4, torch.float32, name="has x's first bytes")
        with pytest.raises(ValueError, match="freed already"):
            team.free(x)
        return smaller.data_ptr() == x.data_ptr()

    assert weft.simulate(main, 2) == [True, True]


def test_a_workspace_is_made_once():
    def main(team):
        made = []
        for _ in range(3):
            team.workspace(("op", 4), lambda: made.append(team.empty(4)) or made[-1])
        return len(made)

    assert weft.simulate(main, 2) == [1, 1]


def test_library_collectives_sum_in_rank_order():
    def main(team):
        x = torch.arange(4.0) + team.rank
        return team.library.all_reduce(x), team.library.all_gather(x), team.library.reduce_scatter(x)

    for rank, (reduced, gathered, scattered) in enumerate(weft.simulate(main, 2)):
        assert reduced.tolist() == [1, 3, 5, 7]
        assert gathered.tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
        assert scattered.tolist() == [[1, 3], [5, 7]][rank]


def test_the_heap_layout_joins_free_neighbours():
    heap = HeapLayout(8 * ALIGNMENT, rank=0)
    a, b, c = (heap.take(2 * ALIGNMENT, name) for name in "abc")
    heap.give_back(a)
    heap.give_back(c)
    assert heap.take(3 * ALIGNMENT, "d") == c
    heap.give_back(b)
    assert heap.take(4 * ALIGNMENT, "e") == a
    assert heap.find(2 * ALIGNMENT) is None and heap.taken_at(a).name == "e"
    assert heap.free_bytes == ALIGNMENT


def test_a_heap_in_pieces_says_how_large_the_largest_is_and_how_much_would_do():
    def fill(size):
        heap = HeapLayout(size, rank=0)
        offsets = [heap.take(8 << 20, f"piece {n}") for n in range(8)]
        for offset in offsets[::2]:
            heap.give_back(offset)
        return heap.take(20 << 20, "large")

    with pytest.raises(
        HeapExhausted, match=r"has 33,554,432 left, the largest piece 8,388,608; .*: heap_bytes=134_217_728$"
    ):
        fill(64 << 20)
    assert fill(134_217_728) == 64 << 20
    assert fill((64 << 20) + (20 << 20)) == 64 << 20  # what is rounded up
    with pytest.raises(HeapExhausted, match=r"has 768 left; .*: heap_bytes=1_048_576$"):
        heap = HeapLayout(1024, rank=0)
        heap.take(1, "word")
        heap.take(1024, "rest")


def test_no_workspace_is_made_while_a_graph_is_captured(monkeypatch):
    """Its fill would be recorded and not run, and a call that fails must leave nothing to the next one."""
    capturing = threading.local()
    monkeypatch.setattr(VirtualPlatform, "is_capturing", lambda _: getattr(capturing, "now", False))

    def made(team):
        return {key for key, workspace in team._workspaces.items() if workspace != {}}

    def main(team):
        x, weight = torch.ones(4, 64).bfloat16(), torch.ones(64).bfloat16()
        ops.all_reduce_rms_norm(
            x, x, weight, 1e-6, team, "one_shot"
        )  # makes the slots, but not what two_shot needs more
        before, refused = made(team), []
        for call in (
            lambda: ops.all_reduce_rms_norm(x, x, weight, 1e-6, team, "two_shot"),
            lambda: ops.matmul_all_reduce(torch.ones(40, 32).bfloat16(), torch.ones(48, 32).bfloat16(), team),
            lambda: team.local(4, torch.int32),
        ):
            capturing.now = True
            with pytest.raises(
                Unsupported, match=r"rank \d: .* while a CUDA graph is captured; run the op once"
            ) as error:
                call()
            refused.append(str(error.value))
            capturing.now = False
        agreed = {"agreed calls"}  # equal arguments stay equal after a refusal
        assert made(team) - agreed == before
        return refused

    assert all("memory that lasts" in refused[-1] for refused in weft.simulate(main, 2))


def test_sends_of_nothing_are_no_findings():
    report = weft.check.check(behaviour.sends_of_nothing, 2, schedules=4)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t, x: t.copy_engine.put(x[2:2], x[2:2], 2), "peer=2 is not a rank of this team"),
        (lambda t, x: t.copy_engine.put(x[2:2], x[2:3], 0), "dtype and number of elements must agree"),
        (lambda t, x: t.copy_engine.signal(x[2:2], x[2:2], 0), "signal has shape (0,), no element; pass one flag"),
        (lambda t, x: t.free(x[2:2]), "where no such tensor begins"),
    ],
)
def test_a_mistake_about_nothing_is_refused(call, message):
    def main(team):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(team, team.zeros(8))

    weft.simulate(main, 2)


def test_a_piece_of_nothing_crosses_a_rail():
    def main(team):
        sent, received, peer = torch.arange(3.0), torch.zeros(3), 1 - team.rail.index
        ends = [(sent[3:], received[3:]), (sent, received)]
        team.rail.fork()
        team.rail.exchange([weft.Piece(send=a, to=peer, receive=b, source=peer) for a, b in ends])
        team.rail.join()
        return received.tolist()

    assert weft.simulate(main, 2, node_size=1) == [[0.0, 1.0, 2.0]] * 2
