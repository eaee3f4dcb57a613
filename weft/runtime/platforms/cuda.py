"""Platform of real GPUs: one torch symmetric-memory allocation per team, mapped by all peers."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.arguments import quoted
from weft.errors import MixedGPUs, NoPeerAccess, NoTeam, Unsupported, WeftError
from weft.runtime import capabilities
from weft.runtime.codec import exchangeable
from weft.runtime.environment import coordinates
from weft.runtime.logs import logger_of
from weft.runtime.platforms.driver import copy_async
from weft.runtime.platforms.platform import address_at_peer, address_of, check_copy, check_signal
from weft.runtime.platforms.torch_rail import new_group, rail_of
from weft.runtime.recording import copy_span, signal_span
from weft.runtime.store import FolderStore, given
from weft.runtime.streams import current_stream, own_stream
from weft.runtime.team.rail import Rail
from weft.runtime.team.rendezvous import Rendezvous, check_alike
from weft.runtime.team.shape import check_node_size, shape_of
from weft.runtime.team.view import RECORD_WORDS
from weft.runtime.wait_record import raise_from_record

logger = logger_of(__name__)
DEFAULT_HEAP_BYTES = 2 << 30
# Most resident programs of an SM (CUDA programming guide, compute capabilities); 16 for other architectures.
_MOST_PROGRAMS = {
    "sm_80": 32, "sm_89": 24, "sm_90": 32, "sm_100": 32, "sm_103": 32, "sm_110": 24, "sm_120": 24, "sm_121": 24,
}  # fmt: skip
# Number of teams that this process has made of the same ranks.
_made: Counter[str] = Counter()


@exchangeable
class Place(NamedTuple):
    """GPU of a rank."""

    host: str
    index: int

    def __str__(self) -> str:
        return f"GPU {self.index} of {self.host}"


@exchangeable
class Entry(NamedTuple):
    """GPU and heap with which a rank enters a team."""

    place: Place
    device_name: str
    sms: int
    heap_bytes: int


def check_entries(rank: int, entries: Sequence[Entry]) -> None:
    """MixedGPUs or ArgumentMismatch, on every rank, unless GPUs and sizes of heaps are equal."""
    check_alike(rank, "a new team", {r: {"heap_bytes": entry.heap_bytes} for r, entry in enumerate(entries)})
    kinds = [f"{entry.device_name} ({entry.sms} SMs)" for entry in entries]
    if len(set(kinds)) > 1:
        raise MixedGPUs(rank, kinds)


def check_peers(rank: int, places: Sequence[Place], can_access: Callable[[int, int], bool]) -> None:
    """NoPeerAccess for the first pair of ranks that cannot reach each other, the same on every rank."""
    for one, place in enumerate(places):
        for other, there in enumerate(places):
            reachable = place.host == there.host and (place == there or can_access(place.index, there.index))
            if one != other and not reachable:
                raise NoPeerAccess(rank, one, str(place), other, str(there))


def agreed_nodes(exchange: Callable[[str, Any], list[Any]], ranks: Sequence[int], node_size: int | None) -> list[int]:
    """Number of the node of each of ``ranks`` of the world. Collective.

    node_size  ranks of a node among these ranks, the same on all; None: torchrun's LOCAL_WORLD_SIZE among all ranks of the
               world, which torchrun numbers machine by machine, and one node where ``launch`` has started the ranks

    ValueError, on all ranks, if the ranks have different ones.
    """
    where = coordinates() if given() is None else None
    argument = node_size is not None
    own_size = node_size if argument else where.node_size if where is not None else None
    sizes = exchange("node_size", (argument, own_size))
    if any(other != sizes[0] for other in sizes):
        listed = ", ".join(
            f"rank {rank} has {'node_size' if argument else 'LOCAL_WORLD_SIZE'}={size}"
            for rank, (argument, size) in enumerate(sizes)
        )
        raise ValueError(
            f"the ranks have different nodes: {listed}; give all machines as many ranks (--nproc-per-node)"
        )
    if own_size is None:
        return [0] * len(ranks)
    check_node_size(own_size, len(ranks) if argument else dist.get_world_size())
    return [(place if argument else rank) // own_size for place, rank in enumerate(ranks)]


def name_of_next(ranks: Iterable[int]) -> str:
    """Name of a new team of these ranks of the world, the same on each.

    It does not depend on other teams that some ranks have made.
    """
    members = "-".join(map(str, ranks))
    _made[members] += 1
    return f"team.{members}.{_made[members]}"


def check_gpu() -> None:
    """NoTeam where torch finds no GPU."""
    if not torch.cuda.is_available():
        raise NoTeam(
            "weft.init() finds no GPU here. Run main(team) with weft.launch(main, device='sim') or weft.simulate(main), "
            "and look at weft doctor"
        )


def refuse_untested() -> None:
    """Unsupported where torch is built for AMD GPUs, on which weft has never run."""
    if torch.version.hip:
        raise Unsupported(
            "weft compiles for AMD GPUs (gfx942, gfx950) and has never run on one; start the ranks with torchrun and call "
            "weft.init(untested=True) to try"
        )


def process_group(group: Any) -> dist.ProcessGroup:
    """The process group of ``group``, all ranks if None: the object that torch caches.

    All slices of one dimension of a DeviceMesh have the same. Initialises torch.distributed under torchrun. ValueError unless
    it is a group of this rank.
    """
    if not dist.is_initialized():
        _connect_to_torchrun()
    if group is None:
        return dist.group.WORLD
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(f"group={quoted(group)} has {group.ndim} dimensions; pass one of them, such as mesh['tp']")
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group is one that this rank does not belong to; make the call on its members only")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group={quoted(group)} is not a torch.distributed group, a one-dimensional DeviceMesh or None"
        )
    return group


def _connect_to_torchrun() -> None:
    check_gpu()
    where = coordinates()
    if where is None:
        raise NoTeam(
            "weft.init() needs to know the ranks: start the script with torchrun --nproc-per-node N, or call "
            "weft.launch(main, world_size=N)"
        )
    torch.cuda.set_device(where.local_rank)
    dist.init_process_group("nccl")


class CudaPlatform:
    """Ranks of one node with their heap, or several nodes with their rails."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: dist.Store | FolderStore,
        secret: bytes | None,
        name: str,
        heap_bytes: int,
        nodes_of: Callable[[CudaPlatform], list[int]],
    ) -> None:
        """``nodes_of``: number of each rank's node, where the platform can exchange already."""
        self.group, self.name = group, name
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._store, self._secret = store, secret
        self._rendezvous = Rendezvous(store, name, self.rank, self.size, secret=secret)
        self._subsets = 0
        self._nodes = nodes_of(self)
        self.shape = shape_of(self._nodes)
        properties = torch.cuda.get_device_properties(self.device)
        place = Place(socket.gethostname(), self.device.index)
        entry = Entry(place, properties.name, properties.multi_processor_count, heap_bytes)
        entries = self.exchange("init", entry)
        check_entries(self.rank, entries)
        self._names: dict[int, tuple[int, str, int]] = {}
        self.library = NcclLibrary(self)
        if self.shape.nodes == 1:
            self._make_heap(heap_bytes, [entry.place for entry in entries])
        else:
            self._make_node(heap_bytes)

    def _make_heap(self, heap_bytes: int, places: Sequence[Place]) -> None:
        check_peers(self.rank, places, torch.cuda.can_device_access_peer)
        multicast = self._map_heap(heap_bytes)
        start = self.heap.data_ptr()
        self.deltas = [peer.data_ptr() - start for peer in self._peers]
        if any(delta % 16 for delta in self.deltas):
            raise WeftError(f"rank {self.rank}: peers' heaps are not 16-byte aligned to each other: {self.deltas}")
        self.multimem = int(multicast is not None)
        if multicast is not None:
            self.deltas.append(multicast)
        self.caps = capabilities.probe(self.device, [place.index for place in places], multicast=multicast is not None)
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int64, pin_memory=True)
        self.copy_engine = CudaCopyEngine(self)

    def _map_heap(self, heap_bytes: int) -> int | None:
        """Allocate the heap and map the peers' heaps; the offset of its multicast address, if it has one."""
        import torch.distributed._symmetric_memory as symm_mem  # not on CPU builds

        logger.debug("start: rank %d has looked at its peers", self.rank)
        self.heap = symm_mem.empty(heap_bytes, dtype=torch.uint8, device=self.device)
        logger.debug("start: rank %d has its heap", self.rank)
        with private_files():
            self._handle = symm_mem.rendezvous(self.heap, self.group)
        logger.debug("start: rank %d has mapped the heaps of its peers", self.rank)
        # A handle has the pointers of the allocation; the tensor may start later in it.
        first = int(self._handle.buffer_ptrs[self.rank])
        offset = self.heap.data_ptr() - first
        self._peers = [
            self.heap if r == self.rank else self._handle.get_buffer(r, (heap_bytes,), torch.uint8, offset)
            for r in range(self.size)
        ]
        multicast = int(getattr(self._handle, "multicast_ptr", 0) or 0)
        return multicast - first if multicast else None

    def _make_node(self, heap_bytes: int) -> None:
        size = self.shape.node_size
        index, local = divmod(self.rank, size)
        ranks = dist.get_process_group_ranks(self.group)
        self._refuse_bound_device()
        node_ranks = ranks[index * size : (index + 1) * size]
        name = f"{self.name}.node{index}"
        self.node = CudaPlatform(
            new_group(node_ranks), self._store, self._secret, name, heap_bytes, lambda _: [0] * size
        )
        reached = tuple(node == self._nodes[self.rank] for node in self._nodes)
        within = iter(self.node.caps.links)
        links = tuple(next(within) if here else capabilities.RAIL for here in reached)
        self.caps = replace(self.node.caps, peer_access=reached, links=links)
        self.record, self.signal_name = self.node.record, self.node.signal_name
        self.rail = self.rail_over(range(local, self.size, size))

    def _refuse_bound_device(self) -> None:
        if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
            raise Unsupported(
                f"rank {self.rank}: torch.distributed was initialised with a device_id, and a team with rails makes groups of "
                f"some ranks; leave device_id out"
            )

    @classmethod
    def join(cls, group: Any, heap_bytes: int | None, node_size: int | None = None) -> CudaPlatform:
        """The platform of ``group``: a process group, a one-dimensional DeviceMesh, or all ranks."""
        check_gpu()
        if torch.cuda.is_current_stream_capturing():
            raise Unsupported(
                "a team's heap is made while a CUDA graph is captured; call weft.init() or Team.of(group) once before capturing"
            )
        group = process_group(group)
        if (ours := given()) is not None:
            store, secret = FolderStore(ours.folder), ours.secret
        else:
            store, secret = dist.distributed_c10d._get_default_store(), None
        ranks = dist.get_process_group_ranks(group)

        def nodes_of(platform: CudaPlatform) -> list[int]:
            return agreed_nodes(platform.exchange, ranks, node_size)

        return cls(group, store, secret, name_of_next(ranks), heap_bytes or DEFAULT_HEAP_BYTES, nodes_of)

    def peer_heap(self, peer: int) -> torch.Tensor:
        return self._peers[peer]

    def exchange(self, what: str, item: object) -> list[Any]:
        return self._rendezvous.exchange(what, item)

    def compare(self, call: str, values: Mapping[str, str], seconds: float | None) -> None:
        self._rendezvous.compare(call, values, seconds)

    def synchronize(self) -> None:
        done = torch.cuda.Event()
        try:
            done.record()
            self._rendezvous.watch(done.query)
            torch.cuda.synchronize()
        except WeftError:
            raise
        except Exception as error:
            # A trapped kernel poisons the context: all later calls raise, but the record is in host memory.
            raise_from_record(self.record, self.signal_name, self._rendezvous.fail)
            self._rendezvous.fail(f"{type(error).__name__}: {error}")
            raise

    def signal_name(self, address: int) -> str:
        """Name of the signal at an address of this rank's heap, such as ``landed[2]``."""
        for base, (nbytes, name, itemsize) in self._names.items():
            if base <= address < base + nbytes:
                return f"{name}[{(address - base) // itemsize}]"
        return f"{address:#x}"

    def max_programs(self, num_warps: int, registers: int) -> int:
        properties = torch.cuda.get_device_properties(self.device)
        warps = properties.max_threads_per_multi_processor // properties.warp_size
        return self.caps.sms * resident_programs(num_warps, registers, self.caps.arch, warps)

    def holds(self, num_warps: int) -> int:
        return self.max_programs(num_warps, registers=255)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def carved(self, tensor: torch.Tensor, name: str) -> None:
        self._names[address_of(tensor)] = (tensor.numel() * tensor.element_size(), name, tensor.element_size())

    def released(self, tensor: torch.Tensor) -> None:
        self._names.pop(address_of(tensor), None)

    def subset(self, ranks: Sequence[int], heap_bytes: int) -> CudaPlatform | None:
        self._subsets += 1
        global_ranks = dist.get_process_group_ranks(self.group)
        members = [global_ranks[r] for r in ranks]
        if getattr(dist.group.WORLD, "bound_device_id", None) is None:
            # Only the members of this team call it, and they need not be all of the world.
            group = dist.new_group(members, use_local_synchronization=True) if self.rank in ranks else None
        elif len(global_ranks) == dist.get_world_size():
            # With a device_id new_group splits NCCL's communicator, in which all ranks must take part.
            group = dist.new_group(members)
        else:
            raise Unsupported(
                f"rank {self.rank}: torch.distributed was initialised with a device_id, so a sub-team can be made only from "
                f"the team of all {dist.get_world_size()} ranks, not from one of {len(global_ranks)}; leave device_id out"
            )
        if self.rank not in ranks:
            return None
        nodes = [self._nodes[r] for r in ranks]
        name = f"{self.name}.{self._subsets}"
        return CudaPlatform(group, self._store, self._secret, name, heap_bytes, lambda _: nodes)

    def rail_over(self, ranks: Sequence[int]) -> Rail:
        self._refuse_bound_device()
        members = dist.get_process_group_ranks(self.group)
        return rail_of(new_group([members[r] for r in ranks]), self.device)

    def fail(self, message: str) -> None:
        self._rendezvous.fail(message)

    def close(self) -> None:
        if self.shape.nodes == 1:
            self._peers.clear()
            self._handle = None


@contextmanager
def private_files() -> Iterator[None]:
    """Give files that are made meanwhile the mode 0600.

    torch's ranks pass memory handles over sockets in the folder for temporary files, which other users must not reach.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def resident_programs(num_warps: int, registers: int, arch: str = "sm_90", max_warps: int = 64) -> int:
    """Resident programs of an SM of ``max_warps``, with ``registers`` a thread and little shared memory.

    An SM has 65,536 registers in four quarters. A warp takes them from one quarter, 256 at a time.
    """
    per_warp = 256 * -(-registers // 8)
    warps = min(max_warps, 4 * (16384 // per_warp))
    return max(1, min(_MOST_PROGRAMS.get(arch, 16), warps // num_warps))


class CudaCopyEngine:
    """Copies and flags on one side stream: ``cudaMemcpyAsync`` between mapped addresses, by copy engines.

    Flags use the same stream as the data: on a stream of their own they arrived only after all copies. They are copies too: a
    kernel that sets a flag deadlocks when the programs that wait for it fill every SM. Each flag delays the next copy by 4 us
    (H200, in a CUDA graph).
    """

    def __init__(self, platform: CudaPlatform) -> None:
        self._platform = platform
        self._stream = own_stream(platform.device, priority=-1)
        self._forked, self._ended = torch.cuda.Event(), torch.cuda.Event()
        # References until the next join: owners may drop local tensors while the engine still uses them.
        self._held: list[torch.Tensor] = []

    def fork(self) -> None:
        self._forked.record(current_stream(self._platform.device))
        self._forked.wait(self._stream)

    def put(self, dst: torch.Tensor, src: torch.Tensor, peer: int) -> None:
        check_copy(dst, src)
        there = address_at_peer(self._platform, dst, peer)
        if src.numel():
            with copy_span(self._stream, src.nbytes, peer):
                self._copy(there, src.data_ptr(), dst, src)

    def get(self, dst: torch.Tensor, src: torch.Tensor, peer: int) -> None:
        check_copy(dst, src)
        there = address_at_peer(self._platform, src, peer)
        if src.numel():
            with copy_span(self._stream, src.nbytes, peer):
                self._copy(dst.data_ptr(), there, dst, src)

    def signal(self, signal: torch.Tensor, epoch: torch.Tensor, peer: int) -> None:
        check_signal(signal, epoch)
        with signal_span(self._stream, signal.data_ptr(), peer):
            self._copy(address_at_peer(self._platform, signal, peer), epoch.data_ptr(), signal, epoch)

    def join(self) -> None:
        self._ended.record(self._stream)
        self._ended.wait(current_stream(self._platform.device))
        self._held.clear()

    def _copy(self, target: int, source: int, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._held += (dst, src)
        copy_async(target, source, src.nbytes, self._stream.cuda_stream)


class NcclLibrary:
    def __init__(self, platform: CudaPlatform) -> None:
        self._group, self._size = platform.group, platform.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        out = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=self._group)
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((self._size * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=self._group)
        return out

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((x.shape[0] // self._size, *x.shape[1:]))
        dist.reduce_scatter_tensor(out, x.contiguous(), group=self._group)
        return out
