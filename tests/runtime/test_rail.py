"""Rails: pieces in order, flags behind them, what is refused; on virtual ranks and between processes over gloo."""

import pickle
import secrets

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

import weft
import weft.check
import weft.language as wl
from weft import Piece
from weft.errors import Deadlock, Unsupported, WeftError
from weft.runtime import launch
from weft.runtime.links import measure, pairs_of
from weft.runtime.platforms.cuda import agreed_nodes
from weft.runtime.platforms.torch_rail import new_group, rail_of
from weft.runtime.platforms.virtual_put import PutLink
from weft.runtime.store import FolderStore, Given, given, private_folder
from weft.runtime.team.rendezvous import Rendezvous
from weft.runtime.team.shape import shape_of


def shifted(rail, x, landed, epoch):
    """What each other node has sent, nearest first: two calls in a row, with a flag behind every piece."""
    got = []
    for call in range(2):
        epoch.add_(1)
        source, received = x + 100 * call, torch.zeros((rail.size - 1, *x.shape))
        ends = [((rail.index + step) % rail.size, (rail.index - step) % rail.size) for step in range(1, rail.size)]
        pieces = [
            Piece(send=source, to=to, receive=received[step], source=source_node, landed=landed[step : step + 1])
            for step, (to, source_node) in enumerate(ends)
        ]
        rail.fork()
        marks = rail.exchange(pieces, epoch)
        rail.after(marks[0])
        got.append(received[0].tolist())
        rail.join()
        got += received[1:].tolist()
        assert landed.tolist() == [call + 1] * (rail.size - 1)
    return got


def expected_of(rank, nodes, node_size, n):
    others = [(rank - step * node_size) % (nodes * node_size) for step in range(1, nodes)]
    return [[100.0 * call + other] * n for call in range(2) for other in others]


def on_virtual_ranks(team, n):
    rail = team.rail
    landed, epoch = (team.local(size, torch.int32) for size in (rail.size - 1, 1))
    got = shifted(rail, torch.full((n,), float(team.rank)), landed, epoch)
    return got, rail.sent_bytes


@pytest.mark.parametrize(("nodes", "node_size"), [(2, 1), (3, 1), (2, 2)])
def test_pieces_arrive_with_their_flags(nodes, node_size):
    size, n = nodes * node_size, 5
    found = weft.simulate(on_virtual_ranks, size, node_size=node_size, args=(n,))
    assert found == [(expected_of(rank, nodes, node_size, n), 2 * 4 * n * (nodes - 1)) for rank in range(size)]


def test_an_exchange_has_no_race_under_any_schedule():
    def main(team):
        return on_virtual_ranks(weft.init(node_size=1), 3)[0]

    report = weft.check.check(main, 3, schedules=3)
    assert report.ok, str(report)


@triton.jit
def read_when_landed(received, landed, epoch, out, team, N: tl.constexpr):
    wl.wait(landed, tl.load(epoch), team)
    tl.store(out + tl.arange(0, N), tl.load(received + tl.arange(0, N)))


@pytest.mark.weft(world_size=2, schedules=8)
def test_one_program_may_wait_for_the_flag(team):
    team = weft.init(node_size=1)
    rail, node = team.rail, team.node
    received, out, other = torch.zeros(16), torch.zeros(16), 1 - team.rank
    landed, epoch = team.local(1, torch.int32), team.local(1, torch.int32).fill_(1)
    x = torch.full((16,), team.rank + 1.0)
    rail.fork()
    rail.exchange([Piece(send=x, to=other, receive=received, source=other, landed=landed)], epoch)
    read_when_landed[(1,)](received, landed, epoch, out, node.view, 16)
    rail.join()
    assert out.tolist() == [other + 1.0] * 16


def test_a_receive_without_its_send_names_both_sides():
    def main(team):
        rail, other = team.rail, 1 - team.rail.index
        rail.fork()
        pieces = [Piece(receive=torch.zeros(3), source=other), Piece(send=torch.zeros(3), to=other)]
        rail.exchange(pieces[:1] if team.rank == 1 else [])
        rail.join()

    with pytest.raises(
        Deadlock, match=r"rank 1 rail: piece 0 waits for piece 1 from rank 0 of node 0, which has sent 0"
    ):
        weft.simulate(main, 2, node_size=1)


def test_a_send_without_its_receive_names_both_sides():
    def main(team):
        rail = team.rail
        rail.fork()
        rail.exchange([Piece(send=torch.zeros(3), to=1)] if team.rank == 0 else [])
        rail.join()

    with pytest.raises(
        Deadlock, match=r"rank 0 rail: piece 0 has sent piece 1 to rank 1 of node 1, which has received 0"
    ):
        weft.simulate(main, 2, node_size=1)


def test_pieces_of_other_sizes_are_refused_with_both():
    def main(team):
        rail, other = team.rail, 1 - team.rail.index
        rail.fork()
        x = torch.zeros(3 + team.rank)
        rail.exchange([Piece(send=x, to=other, receive=torch.zeros(3), source=other)])
        rail.join()

    said = r"rank 0: piece 1 from rank 1 of node 1 is \(4,\) torch.float32 and is received into \(3,\)"
    with pytest.raises(WeftError, match=said):
        weft.simulate(main, 2, node_size=1)


def test_bad_pieces_are_refused_before_anything_is_sent():
    def main(team):
        rail, x, other = team.rail, torch.zeros(4, 4), 1 - team.rail.index
        one, flag = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        for pieces, epoch, said in (
            ([x], None, r"pieces\[0\]=.* is not a Piece"),
            ([Piece(send=x)], None, "send and to go together"),
            ([Piece(receive=x, source=5)], None, r"source=5 is not an integer in 0 .. 1"),
            ([Piece(send=x, to=rail.index)], None, "is this rank's own node"),
            ([Piece(send=x.t()[:2], to=other)], None, r"pieces\[0\].send has strides \(1, 4\); pass a contiguous"),
            ([Piece(receive=x, source=other, landed=one)], None, "landed is a flag written after received data"),
            ([Piece(receive=x, source=other, landed=flag)], one, "is not an int32 tensor of one element"),
        ):
            with pytest.raises(ValueError, match=said):
                rail.exchange([Piece(send=x, to=other), *pieces][1:], epoch)
        return rail.sent_bytes

    assert weft.simulate(main, 2, node_size=1) == [0, 0]


class Process:
    """A rank in a process without a GPU: the real rendezvous, groups and rail, and no heap."""

    def __init__(self, job, rank):
        launch.connect("gloo", job.given, rank, job.world_size)
        ours, ranks = given(), list(range(job.world_size))
        self.rank = rank
        self.rendezvous = Rendezvous(FolderStore(ours.folder), "team", rank, job.world_size, 60.0, ours.secret)
        self.shape = shape_of(agreed_nodes(self.rendezvous.exchange, ranks, job.node_size))
        index, local = divmod(rank, self.shape.node_size)
        self.node = new_group(ranks[index * self.shape.node_size :][: self.shape.node_size])
        self.rail = rail_of(new_group(ranks[local :: self.shape.node_size]), torch.device("cpu"))
        try:
            agreed_nodes(self.rendezvous.exchange, ranks, 1 + rank % 2)
        except ValueError as error:
            self.refused = str(error)

    def fail(self, message):
        self.rendezvous.fail(message)

    def close(self):
        self.rendezvous.exchange("close", None)


def in_process(process, n):
    rail = process.rail
    landed, epoch = (torch.zeros(size, dtype=torch.int32) for size in (rail.size - 1, 1))
    got = shifted(rail, torch.full((n,), float(process.rank)), landed, epoch)
    nearest = torch.tensor(got[0])
    dist.all_reduce(nearest, group=process.node)
    links = measure(process.shape, process.rank, torch.device("cpu"), process.rendezvous.exchange)
    return got, nearest.tolist(), rail.sent_bytes, process.refused, links


@pytest.mark.parametrize(
    ("nodes", "node_size"), [(2, 1), *(pytest.param(*shape, marks=pytest.mark.sweep) for shape in ((2, 2), (3, 1)))]
)
def test_processes_over_gloo(nodes, node_size):
    size, n = nodes * node_size, 1000
    with private_folder() as folder:
        job = launch._Job(Given(folder, secrets.token_bytes(32)), size, 0, None, False, node_size)
        found = launch._run(size, Process, job, pickle.dumps((in_process, (n,))))
    for rank, (got, nearest, sent, refused, links) in enumerate(found):
        assert got == expected_of(rank, nodes, node_size, n) and sent == 2 * 4 * n * (nodes - 1)
        first = rank - rank % node_size
        assert nearest[0] == sum((r - node_size) % size for r in range(first, first + node_size))
        assert [(link.one, link.other, link.kind) for link in links.links] == list(pairs_of(links.shape))
        assert all(link.microseconds > 0 and link.gb_per_s > 0 for link in links.links) and links.backend == "gloo"
        assert refused.startswith("the ranks have different nodes: rank 0 has node_size=1, rank 1 has node_size=2")


def test_puts_between_nodes_are_a_model_of_virtual_ranks_of_several_nodes():
    def main(team):
        with pytest.raises(Unsupported, match="puts between nodes are a model, .* use team.rail"):
            PutLink(team.node)
        link, x = PutLink(team), team.node.zeros(8, torch.float32)
        team.barrier()
        with pytest.raises(ValueError, match="is this rank's own node; store within the node instead"):
            link.put(x, x, team.rail.index)
        link.put(x, torch.full((8,), team.rank + 1.0), 1 - team.rail.index)
        link.quiet()
        team.barrier()
        return x.tolist()

    assert weft.simulate(main, 2, node_size=1) == [[2.0] * 8, [1.0] * 8]
