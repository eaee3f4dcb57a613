"""Platform of virtual ranks: heaps in plain memory, the copy engine as an asynchronous task."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weft.errors import ArgumentMismatch, CallMismatch, NoPeerAccess, WeftError
from weft.runtime import capabilities, codec
from weft.runtime.dense import check_dense
from weft.runtime.platforms.platform import address_of, at_peer, check_copy, check_signal
from weft.runtime.team.rail import Piece, Rail
from weft.runtime.team.rendezvous import check_alike
from weft.runtime.team.shape import check_node_size, shape_of
from weft.runtime.team.view import RECORD_WORDS
from weft.simulator.machine.machine import Machine
from weft.simulator.machine.memory import Extent
from weft.simulator.machine.tasks import Waiting

DEFAULT_HEAP_BYTES = 512 << 20  # of address space: pages that nothing touches take no memory
# Pieces of a copy, so that a kernel that reads before the flag finds half of the data.
_PIECES = 4


class Cluster:
    """Shared state of the virtual ranks of one simulation: every heap, by team and rank."""

    def __init__(
        self,
        machine: Machine,
        node_size: int | None = None,
        link: str = capabilities.NVLINK,
        like: str = capabilities.DEFAULT_GPU,
    ) -> None:
        """``link``: kind of the links within a node. ``like``: the GPU that ranks plan as."""
        self.machine, self.link, self.like = machine, link, like
        machine.remote_atomics = link != capabilities.PCIE
        self.node_size = node_size or machine.world_size
        self.heaps: dict[tuple[str, int], torch.Tensor] = {}
        self.carved: dict[tuple[str, int], int] = {}  # team and count of its tensors -> the rank that registered it
        self.links: defaultdict[tuple[str, int, int], Link] = defaultdict(Link)  # by rail, sender and receiver
        # Compared calls that some rank has yet to make, by team and number.
        self.calls: dict[tuple[str, int], Call] = {}
        self._made: dict[int, int] = {}

    def platform(self, rank: int, heap_bytes: int | None, node_size: int | None = None) -> VirtualPlatform:
        """Platform of the next team of all ranks, which make their teams in the same order."""
        number = self._made.get(rank, 0)
        self._made[rank] = number + 1
        members = list(range(self.machine.world_size))
        node_size = check_node_size(node_size, len(members)) or self.node_size
        nodes = [member // node_size for member in members]
        return VirtualPlatform(self, f"team{number}", members, nodes, rank, heap_bytes or DEFAULT_HEAP_BYTES)

    def check_reached(self, rank: int, members: Sequence[int]) -> None:
        """NoPeerAccess unless all ``members`` lie in one node of the machine."""
        first = members[0]
        for other in members:
            if other // self.node_size != first // self.node_size:
                where = [f"a virtual GPU of node {member // self.node_size}" for member in (first, other)]
                raise NoPeerAccess(rank, first, where[0], other, where[1])


@dataclass(slots=True)
class Call:
    """Collective call that a rank was the first to make; ``left``: ranks that have yet to make it."""

    rank: int
    name: str
    values: Mapping[str, str]
    place: object
    left: int


class VirtualPlatform:
    group = None

    def __init__(
        self, cluster: Cluster, team: str, members: list[int], nodes: list[int], place: int, heap_bytes: int
    ) -> None:
        """``members``: ranks of the machine; this is ``members[place]``. ``nodes``: of each."""
        self._cluster, self._machine, self._team, self._members = cluster, cluster.machine, team, members
        self._nodes, self.shape = nodes, shape_of(nodes)
        self._rendezvous = self._subsets = self._carved = self._rails = self._compared = 0
        self.rank, self.size = place, len(members)
        # One process holds all ranks, so the name contains the rank.
        self.name = f"{id(cluster):x}.{team}.rank{place}"
        self.device = torch.device("cpu")
        self.caps = capabilities.simulated(self.size, like=cluster.like, link=cluster.link)
        self.multimem = 2 if self.caps.multicast else 0
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int64)
        self.library = HostLibrary(self)
        if self.shape.nodes == 1:
            self._make_heap(heap_bytes)
        else:
            self._check_heaps(self.exchange("init", heap_bytes))
            self._make_node(heap_bytes)

    def _check_heaps(self, sizes: Sequence[int]) -> None:
        check_alike(self.rank, "a new team", {rank: {"heap_bytes": size} for rank, size in enumerate(sizes)})

    def _make_heap(self, heap_bytes: int) -> None:
        self._cluster.check_reached(self.rank, self._members)
        # torch.empty aligns to 64 bytes; tensors are carved at multiples of 256 and TMA wants 128.
        try:
            raw = torch.empty(heap_bytes + 256, dtype=torch.uint8)
        except RuntimeError:
            raise ValueError(
                f"heap_bytes={heap_bytes}: this machine has not so much memory for each of {self.size} virtual ranks; pass less"
            ) from None
        self.heap = raw[-raw.data_ptr() % 256 :][:heap_bytes]
        self._machine.memory.add_heap(self.heap.data_ptr(), heap_bytes, self._members[self.rank])
        self._cluster.heaps[self._team, self.rank] = self.heap
        bases, sizes = zip(*self.exchange("init", (self.heap.data_ptr(), heap_bytes)), strict=True)
        self._check_heaps(sizes)
        self.deltas = [base - self.heap.data_ptr() for base in bases]
        self.copy_engine = VirtualCopyEngine(self)

    def _make_node(self, heap_bytes: int) -> None:
        index, local = divmod(self.rank, self.shape.node_size)
        first = index * self.shape.node_size
        span = slice(first, first + self.shape.node_size)
        name = f"{self._team}.node{index}"
        self.node = VirtualPlatform(self._cluster, name, self._members[span], self._nodes[span], local, heap_bytes)
        reached = tuple(node == self._nodes[first] for node in self._nodes)
        links = tuple(self._cluster.link if here else capabilities.RAIL for here in reached)
        self.caps = replace(self.caps, peer_access=reached, links=links)
        self.rail = self.rail_over(range(local, self.size, self.shape.node_size))

    def peer_heap(self, peer: int) -> torch.Tensor:
        return self._cluster.heaps[self._team, peer]

    def heap_of_node(self, node: int) -> torch.Tensor:
        """Heap of the rank of equal local rank in another node, for models of transports."""
        return self._cluster.heaps[f"{self._team}.node{node}", self.node.rank]

    def exchange(self, what: str, item: object) -> list[Any]:
        # Encoded as between processes: the same items are refused, and every rank gets a copy.
        return [codec.decode(data) for data in self.meet(what, codec.encode(item))]

    def compare(self, call: str, values: Mapping[str, str], seconds: float | None) -> None:
        """``Team.compare`` with the first rank's call, without waiting, which would order the ranks' work."""
        here = self._machine.rank  # an error outside the simulation
        if self.size == 1:
            return
        self._compared += 1
        calls, key, observer = self._cluster.calls, (self._team, self._compared), self._machine.observer
        first = calls.get(key)
        if first is None:
            calls[key] = Call(self.rank, call, values, observer.host_place(), self.size - 1)
            return
        first.left -= 1
        if first.left == 0:
            del calls[key]
        try:
            if first.name != call:
                by_rank = {first.rank: first.name, self.rank: call}
                raise CallMismatch(self.rank, self._compared, by_rank, "collective call")
            check_alike(self.rank, call, {first.rank: first.values, self.rank: values})
        except (CallMismatch, ArgumentMismatch) as error:
            observer.disagreed(str(error), self._members[first.rank], first.place, here)
            raise

    def meet(self, what: str, item: object, streams: bool = False) -> list[Any]:
        """Items of all ranks, uncopied. ``streams``: the rendezvous is one of the main streams' work."""
        self._rendezvous += 1
        key = f"{self._team}'s {what} (rendezvous {self._rendezvous})"
        return self._machine.exchange(key, item, self._members, streams)

    def synchronize(self) -> None:
        self._machine.drain(VirtualCopyEngine.stream, VirtualRail.stream)
        self._machine.observer.synchronized(self._machine.rank)

    def max_programs(self, num_warps: int, registers: int) -> int:
        # One an SM, since workspaces have a part for each.
        self._machine.is_sized = True
        return self._machine.sms

    def holds(self, num_warps: int) -> int:
        self._machine.is_sized = True
        return self._machine.holds(num_warps)

    def is_capturing(self) -> bool:
        return False

    def carved(self, tensor: torch.Tensor, name: str) -> None:
        """Register a tensor that all ranks have agreed on; every rank calls it.

        The first one registers it for all ranks, so that it may go on and use it at peers that are late.
        """
        offset, nbytes = address_of(tensor) - self.heap.data_ptr(), tensor.numel() * tensor.element_size()
        first = self._cluster.carved.setdefault((self._team, self._carved), self.rank)
        self._carved += 1
        if first != self.rank:
            return
        for rank in range(self.size):
            heap = self.peer_heap(rank)
            base = heap.data_ptr() + offset
            # Poison: NaN in every float type, -1 in every integer, so that reads of unwritten elements show.
            heap[offset : offset + nbytes].fill_(0xFF)
            self._machine.uninitialised.add(base)
            self._machine.memory.add(Extent(base, nbytes, rank, name, tensor.element_size()))

    def released(self, tensor: torch.Tensor) -> None:
        self._machine.pointers.free(tensor)
        self._machine.memory.remove(address_of(tensor))

    def subset(self, ranks: Sequence[int], heap_bytes: int) -> VirtualPlatform | None:
        self._subsets += 1
        if self.rank not in ranks:
            return None
        team = f"{self._team}.{self._subsets}"
        return VirtualPlatform(
            self._cluster, team, [self._members[r] for r in ranks], [self._nodes[r] for r in ranks],
            list(ranks).index(self.rank), heap_bytes,
        )  # fmt: skip

    def rail_over(self, ranks: Sequence[int]) -> Rail:
        self._rails += 1
        name, index = f"{self._team}.rail{self._rails}.{ranks[0]}", ranks.index(self.rank)
        return Rail(VirtualRail(self._cluster, name, [self._members[r] for r in ranks], index), index, len(ranks))

    def fail(self, message: str) -> None:
        """Nothing to do: an error of a virtual rank ends the simulation."""

    def close(self) -> None:
        # Peers may still be leaving the last barrier; the heap is freed with its last reference.
        self._cluster.heaps.pop((self._team, self.rank), None)


class VirtualCopyEngine:
    stream = "copy engine"

    def __init__(self, platform: VirtualPlatform) -> None:
        self._platform, self._machine = platform, platform._machine

    def fork(self) -> None:
        """Start the copy engine after the work of the main stream, which has usually ended already."""
        self._machine.settle()
        self._machine.observer.fork(self.stream)

    def put(self, dst: torch.Tensor, src: torch.Tensor, peer: int) -> None:
        there = self._at(dst, peer)
        self._enqueue(f"put to rank {peer}", there, src)

    def get(self, dst: torch.Tensor, src: torch.Tensor, peer: int) -> None:
        there = self._at(src, peer)
        self._enqueue(f"get from rank {peer}", dst, there)

    def signal(self, signal: torch.Tensor, epoch: torch.Tensor, peer: int) -> None:
        there = self._at(signal, peer)
        check_signal(there, epoch)
        self._enqueue(f"signal to rank {peer}", there, epoch, signal=True)

    def join(self) -> None:
        self._machine.join(self.stream)

    def _at(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        return at_peer(self._platform, tensor, peer)

    def _enqueue(self, label: str, dst: torch.Tensor, src: torch.Tensor, signal: bool = False) -> None:
        check_copy(dst, src)
        if src.numel() == 0:
            return
        begin = self._machine.observer.enqueued(self.stream, label, [dst, src])

        def move() -> None:
            begin()
            copy_in_pieces(self._machine, label, dst, src, signal)

        self._machine.enqueue(self.stream, label, move)


def copy_in_pieces(machine: Machine, label: str, dst: torch.Tensor, src: torch.Tensor, signal: bool = False) -> None:
    """Copy ``src`` to ``dst`` in pieces, as the running operation of a side stream."""
    target, source = dst.view(-1), src.view(-1)
    count, itemsize = source.numel(), source.element_size()
    step = -(-count // _PIECES) if count > _PIECES else max(count, 1)
    for start in range(0, count, step):
        base, nbytes = target.data_ptr() + start * itemsize, min(step, count - start) * itemsize
        origin = source.data_ptr() + start * itemsize
        machine.scheduler.current.next = ((base, base + nbytes, True), (origin, origin + nbytes, False))
        machine.scheduler.step()
        machine.note("copy", label)
        machine.observer.copied(base, origin, nbytes, itemsize, signal)
        ctypes.memmove(base, origin, nbytes)  # torch's copy would be seen as one more operation of host code
        machine.scheduler.written(base, base + nbytes)


@dataclass(slots=True, eq=False)
class Sent:
    """Piece that a rank has sent over a rail, with the knowledge of its sender, then of its receiver."""

    tensor: torch.Tensor
    known: object
    is_received: bool = False


@dataclass(slots=True)
class Link:
    """Pieces sent from one rank of a rail to another, in order, and the number of received pieces."""

    sent: list[Sent] = field(default_factory=list)
    received: int = 0


class VirtualRail:
    """A rail's engine: a piece is delivered once both ends have come to it, in the order of their streams."""

    stream = "rail"

    def __init__(self, cluster: Cluster, name: str, members: Sequence[int], index: int) -> None:
        self._links, self._machine = cluster.links, cluster.machine
        self._name, self._members, self._index = name, members, index

    def fork(self) -> None:
        self._machine.settle()
        self._machine.observer.fork(self.stream)

    def move(self, piece: Piece, epoch: torch.Tensor | None, number: int) -> Mark:
        machine, mark = self._machine, Mark()
        tensors = [t for t in (piece.send, piece.receive, piece.landed, epoch) if t is not None]
        label = f"piece {number}"
        begin = machine.observer.enqueued(self.stream, label, tensors)

        def run() -> None:
            begin()
            sent = None if piece.send is None else self._send(piece.send, piece.to)
            if piece.receive is not None:
                self._receive(piece.receive, piece.source, label)
            if sent is not None:
                link, told = self._link(self._index, piece.to), self._members[piece.to]
                here = len(link.sent)
                machine.scheduler.block(Waiting(
                    lambda: sent.is_received,
                    lambda: f"has sent piece {here} to rank {told} of node {piece.to}, which has received {link.received}",
                ))  # fmt: skip
                machine.observer.learned(sent.known)
            if piece.landed is not None:
                copy_in_pieces(machine, label, piece.landed, epoch, signal=True)
            mark.known = machine.observer.published()
            mark.is_reached = True
            machine.scheduler.recheck()

        machine.enqueue(self.stream, label, run)
        return mark

    def after(self, mark: Mark) -> None:
        self._machine.settle()
        self._machine.scheduler.block(Waiting(lambda: mark.is_reached, lambda: "waits for a piece of its rail"))
        self._machine.observer.learned(mark.known)

    def join(self) -> None:
        self._machine.join(self.stream)

    def _link(self, sender: int, receiver: int) -> Link:
        return self._links[self._name, sender, receiver]

    def _send(self, tensor: torch.Tensor, to: int) -> Sent:
        sent = Sent(tensor, self._machine.observer.published())
        self._link(self._index, to).sent.append(sent)
        self._machine.scheduler.recheck()
        return sent

    def _receive(self, tensor: torch.Tensor, source: int, label: str) -> None:
        machine, link, there = self._machine, self._link(source, self._index), self._members[source]
        number = link.received
        machine.scheduler.block(Waiting(
            lambda: len(link.sent) > number,
            lambda: f"waits for piece {number + 1} from rank {there} of node {source}, which has sent {len(link.sent)}",
        ))  # fmt: skip
        sent = link.sent[number]
        if (sent.tensor.dtype, sent.tensor.numel()) != (tensor.dtype, tensor.numel()):
            raise WeftError(
                f"rank {machine.rank}: piece {number + 1} from rank {there} of node {source} is {tuple(sent.tensor.shape)} "
                f"{sent.tensor.dtype} and is received into {tuple(tensor.shape)} {tensor.dtype}; pass them in one order"
            )
        machine.observer.learned(sent.known)
        copy_in_pieces(machine, label, tensor, sent.tensor)
        link.received += 1
        sent.known, sent.is_received = machine.observer.published(), True
        machine.scheduler.recheck()


@dataclass(slots=True, eq=False)
class Mark:
    """End of a piece on its stream, and the knowledge at that point."""

    is_reached: bool = False
    known: object = None


class HostLibrary:
    """Baseline collectives through host memory, summed in fp32 in rank order."""

    def __init__(self, platform: VirtualPlatform) -> None:
        self._platform = platform

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(self._exchange("all_reduce", x)).to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange("all_gather", x))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        shards = [part.chunk(self._platform.size)[self._platform.rank] for part in self._exchange("reduce_scatter", x)]
        return self._sum(shards).to(x.dtype)

    def _exchange(self, what: str, x: torch.Tensor) -> list[torch.Tensor]:
        check_dense("x", x)
        # A copy, since a rank that is ahead may write to x before the other ranks have read it.
        parts = self._platform.meet(what, x.detach().clone(), streams=True)
        passed = {rank: {"x": f"{tuple(part.shape)} {part.dtype}"} for rank, part in enumerate(parts)}
        check_alike(self._platform.rank, f"team.library.{what}", passed)
        return parts

    @staticmethod
    def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total
