"""Team: ranks that share a symmetric heap, or several nodes of such ranks. ``weft.init()`` makes one."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from weft.arguments import (
    check_bool,
    check_callable,
    check_debug,
    check_heap_bytes,
    check_instance,
    check_int,
    check_optional,
    check_sequence,
    is_integer,
    quoted,
)
from weft.errors import AllocationMismatch, NotSymmetric, SeveralNodes, TeamClosed, Unsupported
from weft.runtime import virtual_rank
from weft.runtime.dense import check_dense
from weft.runtime.logs import logger_of
from weft.runtime.platforms.platform import CopyEngine, Library, Platform, address_of, at_peer
from weft.runtime.store import given
from weft.runtime.team.channel import Channel
from weft.runtime.team.heap import HeapLayout
from weft.runtime.team.rail import Rail
from weft.runtime.team.view import MAX_BARRIER_PROGRAMS, TakenByView, TeamView, make_view
from weft.runtime.triton_interpret import refuse_triton_interpret

if TYPE_CHECKING:
    from weft.runtime.platforms.cuda import CudaPlatform

T = TypeVar("T")
logger = logger_of(__name__)

# Teams by name, for custom ops, which carry the name in their schema.
_TEAMS: weakref.WeakValueDictionary[str, Team] = weakref.WeakValueDictionary()
# Names of teams that compare the ranks' calls: teams of virtual ranks, and debug builds. A set, since every eager call of an op
# looks whether its team's name is there.
COMPARING: set[str] = set()
# The shared teams of this process, by process group: Team.of. Virtual ranks: weft.runtime.virtual_rank.
_SHARED: dict[Any, Team] = {}


class Team(TakenByView):
    """One rank's end of a team.

    rank, size    number of this rank, and number of ranks
    device        device of its tensors (``cpu`` in the simulator)
    is_simulated  True for virtual ranks
    is_closed     True after ``close``
    group         its ``torch.distributed`` group; None in the simulator
    caps          capabilities of the device and its links (``weft.runtime.capabilities.Capabilities``)
    name          key for ``find_team(name)``
    view          argument ``team`` of kernels
    copy_engine   ordered copies beside the compute stream
    library       baseline collectives (NCCL), to compare with
    shape         (nodes, node_size): rank = node * node_size + local rank
    node          team of the ranks of this rank's node; the team itself if there is one node
    rail          transfers to the ranks of equal local rank in the other nodes (weft.runtime.team.rail); None for one node

    A team of several nodes has no heap, view or copy engine, which reach the ranks of one node: ``team.node`` has them, and
    SeveralNodes is raised. All else holds for both.

    ``empty``, ``zeros``, ``signals``, ``channel``, ``free``, ``workspace``, ``barrier``, ``exchange`` and ``subset`` are
    collective: every rank makes the same calls in the same order. After ``close()`` every use raises TeamClosed.
    """

    def __init__(self, platform: Platform, debug_seconds: float | None = None) -> None:
        self._platform = platform
        self._closed = False
        self._counter = itertools.count()
        self._workspaces: dict[Hashable, Any] = {}
        # Eager calls of collectives that may come again: weft.ops.collectives.collective.again.
        self.calls_again: dict[Hashable, Any] = {}
        self.heap_changes = 0  # allocations and frees: a number that stands for how the heap is filled
        self.rank, self.size, self.name, self.shape = platform.rank, platform.size, platform.name, platform.shape
        self.device, self.group, self.caps = platform.device, platform.group, platform.caps
        self.is_simulated = self.caps.is_simulated
        self._debug_seconds = debug_seconds
        self.is_traced = False  # kernels record what they do: record_into
        _TEAMS[self.name] = self
        if self.is_simulated or debug_seconds is not None:
            COMPARING.add(self.name)
            weakref.finalize(self, COMPARING.discard, self.name)
        self.rail: Rail | None = None
        self._node: Team | None = None
        if self.shape.nodes > 1:
            self._node, self.rail = Team(platform.node, debug_seconds), platform.rail
            return
        self._layout = HeapLayout(platform.heap.numel(), platform.rank)
        barriers = self.zeros((MAX_BARRIER_PROGRAMS, self.size + 1), torch.int32, name="team.barriers")
        deltas = torch.tensor(list(platform.deltas), dtype=torch.int64, device=self.device)
        patience = int(debug_seconds * 1e6) if debug_seconds else 0
        offered = platform.multimem, self.caps.remote_atomics
        self._view = make_view(self.rank, self.size, deltas, barriers, platform.record, patience, *offered)

    @staticmethod
    def of(group: Any = None, *, heap_bytes: int | None = None) -> Team:
        """The shared team of ``group`` in this process. Collective in the call that makes it.

        group       as in ``weft.init``. Arguments mean the same group if torch has one ProcessGroup for them: all slices of
                    one dimension of a DeviceMesh do, two calls of ``new_group`` with the same ranks do not
        heap_bytes  as in ``weft.init``, for the call that makes the team; later calls repeat it or leave it out

        The first call with a group makes its team, and so does the first one after that team was closed: not while a CUDA
        graph is captured (Unsupported). The team of all ranks is the one that ``weft.launch`` or ``weft.simulate`` gives main.
        """
        heap_bytes = check_heap_bytes(heap_bytes)
        shared, key = _shared_teams(group)
        team = shared.get(key)
        if team is None or team._closed:
            team = shared[key] = init(group, heap_bytes=heap_bytes)
        elif heap_bytes not in (None, size := team.node._layout.size):
            raise ValueError(
                f"heap_bytes={heap_bytes}, but the shared team of this group has heap_bytes={size}; leave it out, or pass it "
                f"at the first call"
            )
        return team

    def __repr__(self) -> str:
        nodes = f", nodes={self.shape.nodes}" if self._node else ""
        return f"Team({self.name!r}, rank={self.rank}, size={self.size}{nodes}, device={self.device})"

    # --- symmetric memory --------------------------------------------------------------------------------------------

    def empty(
        self, shape: int | Sequence[int], dtype: torch.dtype = torch.bfloat16, *, name: str | None = None
    ) -> torch.Tensor:
        """A symmetric tensor, uninitialised: the same offset in every rank's heap. Collective.

        HeapExhausted if it does not fit; AllocationMismatch, on all ranks, if they ask for different tensors.
        """
        self._check_heap("empty()")
        self._check_not_capturing("symmetric memory")
        shape = _checked_shape(shape)
        check_instance("dtype", dtype, torch.dtype, "a torch.dtype, such as torch.bfloat16")
        check_optional(check_instance, "name", name, str, "a string")
        index = next(self._counter)
        nbytes = _numel(shape) * dtype.itemsize
        offset = self._layout.find(nbytes)
        wanted = f"{tuple(shape)} {dtype}, " + ("no room" if offset is None else f"at byte {offset:,}")
        by_rank = self._platform.exchange(f"allocation #{index}", wanted)
        if any(other != wanted for other in by_rank):
            raise AllocationMismatch(self.rank, f"symmetric allocation #{index}", by_rank)
        name = name or f"symmetric tensor #{index}"
        self.heap_changes += 1
        offset = self._layout.take(nbytes, name)
        logger.debug("heap: %s takes %d bytes, %d are free", name, nbytes, self._layout.free_bytes)
        tensor = self._platform.heap[offset : offset + nbytes].view(dtype).view(shape)
        self._platform.carved(tensor, name)
        return tensor

    def zeros(
        self, shape: int | Sequence[int], dtype: torch.dtype = torch.bfloat16, *, name: str | None = None
    ) -> torch.Tensor:
        """A symmetric tensor of zeros; zero on every rank before any rank goes on. Collective."""
        tensor = self.empty(shape, dtype, name=name).zero_()
        self.barrier()
        return tensor

    def signals(self, shape: int | Sequence[int], *, name: str | None = None) -> torch.Tensor:
        """Symmetric int32 signals, all 0. Collective."""
        return self.zeros(shape, torch.int32, name=name or "signals")

    def channel(self, chunks: int, *, name: str | None = None) -> Channel:
        """Signals for the arrival of ``chunks`` chunks from every rank, call by call. Collective."""
        return Channel.make(self, self.size, check_int("chunks", chunks, 1), name)

    def free(self, tensor: torch.Tensor) -> None:
        """Give a symmetric tensor's bytes back, once no rank uses it. Collective.

        ValueError for a part of a tensor, and for one that was freed already, unless another of its size lies there by now;
        AllocationMismatch, on all ranks, if they free different tensors.
        """
        self._check_heap("free()")
        check_dense("tensor", tensor)
        if not self.is_symmetric(tensor):
            raise NotSymmetric(self.rank, "tensor", tensor.shape)
        offset = address_of(tensor) - self._platform.heap.data_ptr()
        nbytes = tensor.numel() * tensor.element_size()
        block = self._layout.taken_at(offset)
        if block is None or block.used != nbytes:
            raise ValueError(
                f"rank {self.rank}: free() of {nbytes:,} bytes at byte {offset:,} of the heap, where no such tensor begins: a "
                f"part of one, or freed already; pass the whole tensor that empty() returned, once"
            )
        self._platform.synchronize()
        by_rank = self._platform.exchange("free", (block.offset, block.used, block.name))
        if any(other[:2] != (offset, nbytes) for other in by_rank):
            listed = [f"{name!r}, {used:,} bytes at byte {start:,}" for start, used, name in by_rank]
            raise AllocationMismatch(self.rank, "free()", listed)
        self._platform.released(tensor)
        self.heap_changes += 1
        self._layout.give_back(offset)

    @property
    def heap_bytes(self) -> int:
        """Size of the symmetric heap, equal on all ranks."""
        self._check_heap("heap_bytes")
        return self._layout.size

    def largest_free_bytes(self) -> int:
        """Size of the heap's largest free block, so of the largest tensor that fits; equal on all ranks."""
        self._check_heap("largest_free_bytes()")
        return self._layout.largest_free_bytes

    def at_peer(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """The symmetric ``tensor`` in ``peer``'s memory, as a tensor of this rank.

        NotSymmetric for any other tensor, unless it has no elements.
        """
        self._check_heap("at_peer()")
        check_dense("tensor", tensor)
        peer = check_int("peer", peer)
        return at_peer(self._platform, tensor, peer)

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """True for a tensor in this rank's heap, which kernels and ``at_peer`` find in a peer's memory."""
        check_dense("tensor", tensor)
        self._check_heap("is_symmetric()")
        heap = self._platform.heap
        return heap.data_ptr() <= address_of(tensor) < heap.data_ptr() + heap.numel() + (tensor.numel() == 0)

    def local(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Ordinary zeroed memory of this rank's device, for epochs and counters."""
        self._check_open("local()")
        # Under capture the fill would be recorded, and run by every replay.
        self._check_not_capturing("memory that lasts")
        shape = _checked_shape(shape)
        check_instance("dtype", dtype, torch.dtype, "a torch.dtype, such as torch.int32")
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def workspace(self, key: Hashable, make: Callable[[], T]) -> T:
        """``make()`` at the first call with ``key``, the same object afterwards. Collective at the first call."""
        self._check_open("workspace()")
        try:
            return self._workspaces[key]
        except KeyError:
            check_callable("make", make, "make()")
        except TypeError:
            raise ValueError(f"key={quoted(key)} cannot be hashed; pass a tuple of strings and numbers") from None
        self._workspaces[key] = made = make()
        return made

    # --- the ranks ---------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def node(self) -> Team:
        return self._node or self

    @property
    def view(self) -> TeamView:
        self._check_heap("view")
        return self._view

    def record_into(self, rings: torch.Tensor | None) -> None:
        """Have kernels launched from now on record into ``rings``; None: nothing. For ``weft.trace``."""
        self._view, self.is_traced = self._view._replace(trace=rings), rings is not None

    @property
    def copy_engine(self) -> CopyEngine:
        self._check_heap("copy_engine")
        return self._platform.copy_engine

    @property
    def library(self) -> Library:
        self._check_open("library")
        return self._platform.library

    def max_programs(self, num_warps: int = 4, registers: int = 255) -> int:
        """Most programs that wait for each other in one grid, as many as this GPU's registers hold.

        registers  most registers of a thread. Shared memory is not counted: take one program an SM where it is scarce
        """
        if type(num_warps) is not int or num_warps < 1:
            num_warps = check_int("num_warps", num_warps, 1)
        if type(registers) is not int or registers < 1:
            registers = check_int("registers", registers, 1)
        return self.node._platform.max_programs(num_warps, registers)

    def holds(self, num_warps: int) -> int:
        """Programs of 255 registers a thread that this rank's GPU holds at a time.

        Virtual ranks hold as many as the GPU that they plan as, while ``max_programs`` is one an SM there.
        """
        return self.node._platform.holds(num_warps)

    def barrier(self) -> None:
        """Wait for all ranks and their earlier GPU work. Collective, and bounded in time."""
        self._check_open("barrier()")
        self._platform.synchronize()
        self._platform.exchange("barrier", None)

    def synchronize(self) -> None:
        """Wait for this rank's GPU work. WaitTimeout for a debug-mode wait that gave up, PeerFailed on a peer."""
        self._check_open("synchronize()")
        self._platform.synchronize()

    def exchange(self, item: object) -> list[Any]:
        """The ``item`` of every rank, in rank order. Collective.

        item  None, bool, int, float, str, bytes, list, tuple, dict, torch.dtype, a tensor (which arrives in CPU memory), or an
              instance of a dataclass, NamedTuple or Enum marked ``@weft.exchangeable``. NotExchangeable for other types
        """
        self._check_open("exchange()")
        return self._platform.exchange("exchange", item)

    def compare(self, call: str, values: Mapping[str, str]) -> None:
        """Compare a collective call with the other ranks', on virtual ranks and in debug builds. Collective.

        call    its name
        values  what all ranks must pass alike, by argument

        CallMismatch or ArgumentMismatch. A debug build waits for the other ranks, PeerSilent after its seconds; virtual ranks
        do not wait, and the later one raises.
        """
        if self.name in COMPARING:
            self._check_open(call)
            self._platform.compare(call, values, self._debug_seconds)

    def is_capturing(self) -> bool:
        """True while a CUDA graph is captured on the current stream."""
        return self._platform.is_capturing()

    def subset(self, ranks: Sequence[int], heap_bytes: int | None = None) -> Team | None:
        """A team of some ranks of this team, in ascending order; None on the other ranks. Collective.

        heap_bytes  of symmetric memory per rank; None: as in this team

        Of a team of several nodes: ValueError unless the subset has as many ranks of each node that it has any of.
        """
        self._check_open("subset()")
        ranks = list(check_sequence("ranks", ranks, "a list of ranks"))
        heap_bytes = check_heap_bytes(heap_bytes)
        if not ranks or not all(map(is_integer, ranks)):
            raise ValueError(f"ranks={quoted(ranks)} is not a list of ranks, integers in 0 .. {self.size - 1}")
        ranks = list(map(int, ranks))
        if len(set(ranks)) != len(ranks) or not all(0 <= r < self.size for r in ranks):
            raise ValueError(f"ranks={ranks} must be different ranks of this team, 0 to {self.size - 1}")
        if ranks != sorted(ranks):
            raise ValueError(
                f"ranks={ranks} must ascend, as torch.distributed sorts the ranks of a group; pass {sorted(ranks)}"
            )
        platform = self._platform.subset(ranks, heap_bytes or self.node._layout.size)
        return Team(platform, self._debug_seconds) if platform is not None else None

    def split(self, parts: int) -> tuple[Team, Rail]:
        """This rank's part of ``parts`` equal ones as a team, and the rail between the parts. Collective.

        Part p has ranks p * W / parts up to the next part's. The rail goes to the ranks of equal place in the other parts;
        ``Rail.index`` is the number of the part. Where parts are the nodes, they are ``team.node`` and ``team.rail``; else the
        part has a separate heap, as large as this team's.

        ValueError unless ``parts`` divides W, and parts are whole nodes, or nodes hold whole parts.
        """
        self._check_open("split()")
        parts, node_size = check_int("parts", parts, 2), self.shape.node_size
        if self.size % parts:
            raise ValueError(f"parts={parts} does not divide the {self.size} ranks of this team; pass a divisor")
        size = self.size // parts
        if size % node_size and node_size % size:
            raise ValueError(
                f"parts={parts} of {size} ranks each are neither whole nodes of {node_size} ranks nor equal parts of one; "
                f"pass a divisor or a multiple of {self.shape.nodes}"
            )
        if self.rail is not None and size == node_size:
            return self.node, self.rail
        made = [self.subset(range(first, first + size)) for first in range(0, self.size, size)]
        return made[self.rank // size], self._platform.rail_over(range(self.rank % size, self.size, size))

    def fail(self, message: str) -> None:
        """Tell the peers that this rank has failed, so that they raise PeerFailed instead of waiting for it."""
        self._platform.fail(message)
        if self._node is not None:
            self._node.fail(message)

    def close(self) -> None:
        """Give the heap back. Collective; does nothing the second time."""
        if not self._closed:
            self.barrier()
            self._closed = True
            self._workspaces.clear()
            self.calls_again.clear()
            if self._node is not None:
                self._node.close()
            self._platform.close()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the other ranks may never reach the barrier of close().
        if kind is None:
            self.close()

    def _check_not_capturing(self, what: str) -> None:
        if self._platform.is_capturing():
            raise Unsupported(
                f"rank {self.rank}: {what} is allocated while a CUDA graph is captured; run the op once with this shape before "
                f"capturing"
            )

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise TeamClosed(self.name, self.rank, what)

    def _check_heap(self, what: str) -> None:
        """TeamClosed, or SeveralNodes for ``what`` a team of one node has."""
        self._check_open(what)
        if self._node is not None:
            raise SeveralNodes(self.rank, what, str(self.shape))


def find_team(name: str) -> Team:
    """The open team of this name. ValueError if there is none in this process."""
    team = _TEAMS.get(name)
    if team is None:
        raise ValueError(f"no team called {name!r} in this process; pass the name of a Team that is alive")
    team._check_open("an op")
    return team


def init(
    group: Any = None,
    *,
    heap_bytes: int | None = None,
    debug: bool | float = False,
    node_size: int | None = None,
    untested: bool = False,
) -> Team:
    """A new team, as this process (or virtual rank) sees it. Collective.

    group       a ``torch.distributed`` group or a one-dimensional ``DeviceMesh`` (``mesh["tp"]``); None: all ranks
    heap_bytes  of symmetric memory per rank; None: 2 GiB on GPUs, 512 MiB in the simulator
    debug       True, or the seconds (20 if True) after which a kernel's wait gives up with WaitTimeout. Also compares at every
                eager or captured call of an op what all ranks must pass alike: ArgumentMismatch, CallMismatch, or PeerSilent
                after these seconds
    node_size   ranks of a node, to make logical nodes of one machine; None: torchrun's LOCAL_WORLD_SIZE, or one node where
                ``weft.launch`` or ``weft.simulate`` was given none. ValueError, on all ranks, if they have different ones
    untested    True: also on AMD GPUs, for which weft compiles (gfx942, gfx950) and where it has never run; else Unsupported

    Under ``torchrun`` or ``weft.launch`` it uses this rank's GPU, and inside ``weft.simulate`` a virtual one; else NoTeam.
    """
    refuse_triton_interpret()
    heap_bytes, seconds = check_heap_bytes(heap_bytes), check_debug(debug)
    check_bool("untested", untested)
    virtual = virtual_rank.platform_of_this_thread(heap_bytes, node_size)
    if virtual is not None:
        _refuse_group(group)
        return Team(virtual, seconds)
    from weft.runtime.platforms.cuda import refuse_untested  # needs a GPU build of torch

    if not untested:
        refuse_untested()
    return Team(_platform_of_this_process().join(group, heap_bytes, node_size), seconds)


def _platform_of_this_process() -> type[CudaPlatform]:
    run = given()
    if run is not None and run.sanitized:
        from weft.runtime.platforms.sanitized import SanitizedPlatform

        return SanitizedPlatform
    from weft.runtime.platforms.cuda import CudaPlatform

    return CudaPlatform


def init_main(*, heap_bytes: int | None = None, debug: bool | float = False, node_size: int | None = None) -> Team:
    """A new team of all ranks for main, the one that ``Team.of()`` returns from then on."""
    shared, key = _shared_teams(None)
    team = shared[key] = init(heap_bytes=heap_bytes, debug=debug, node_size=node_size)
    return team


def _shared_teams(group: Any) -> tuple[dict[Any, Team], Any]:
    """The shared teams of this process or virtual rank, and the key of ``group`` among them."""
    virtual = virtual_rank.shared_teams_of_this_thread()
    if virtual is not None:
        _refuse_group(group)
        return virtual, None
    from weft.runtime.platforms.cuda import process_group

    return _SHARED, process_group(group)


def _refuse_group(group: object) -> None:
    if group is not None:
        raise ValueError(
            f"group={quoted(group)} needs torch.distributed; in the simulator leave it out, or use team.subset(ranks)"
        )


def _checked_shape(shape: object) -> tuple[int, ...]:
    """ValueError unless it is an integer or a sequence of integers, none below 0."""
    if is_integer(shape):
        shape = (shape,)
    shape = check_sequence("shape", shape, "an integer or a tuple of integers, as in (4, 128)")
    for extent in shape:
        if not is_integer(extent) or extent < 0:
            raise ValueError(f"shape={quoted(shape)} is not a tuple of integers of at least 0, as in (4, 128)")
    return tuple(map(int, shape))


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
