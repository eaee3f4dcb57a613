"""Interface of the two platforms of a team: real GPUs (``cuda.py``), the simulator (``virtual.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from weft.arguments import check_int
from weft.errors import NotSymmetric
from weft.runtime.capabilities import Capabilities
from weft.runtime.dense import check_dense

if TYPE_CHECKING:
    from weft.runtime.team.rail import Rail
    from weft.runtime.team.shape import Shape


class Library(Protocol):
    """Baseline collectives, to compare with and for mode "torch". Results are fresh tensors.

    On GPUs NCCL through torch.distributed; in the simulator an exchange through host memory, summed in fp32 in rank order.
    """

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, of the shape of ``x``."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Shards of all ranks in rank order: [W * x.shape[0], ...]."""

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum: [x.shape[0] / W, ...]."""


class CopyEngine(Protocol):
    """Copies to and from peers beside the compute stream, one after the other in the order of the calls.

    ``fork`` and ``join`` order it with the calling rank's current stream; between them its work overlaps with kernels. All of
    it may be captured in a CUDA graph: a flag is a copy of an epoch in device memory, never a value of the host.
    """

    def fork(self) -> None:
        """Have the engine wait for all work submitted to the current stream so far."""

    def put(self, dst: torch.Tensor, src: torch.Tensor, peer: int) -> None:
        """Copy ``src`` (this rank's) into ``dst`` (symmetric) at ``peer``.

        Both are contiguous, of equal dtype and number of elements. Without elements it does nothing.
        """

    def get(self, dst: torch.Tensor, src: torch.Tensor, peer: int) -> None:
        """Copy ``src`` (symmetric) at ``peer`` into ``dst`` (this rank's). Without elements it does nothing."""

    def signal(self, signal: torch.Tensor, epoch: torch.Tensor, peer: int) -> None:
        """Copy ``epoch`` (int32 [1], this rank's) into ``signal`` (symmetric int32 [1]) at ``peer``.

        It arrives after all earlier copies. Pairs with a kernel's ``wait(signal, epoch)``.
        """

    def join(self) -> None:
        """Have the current stream wait for all work submitted to the engine so far."""


class Platform(Protocol):
    """Platform of a team.

    One of several nodes has ``node`` and ``rail``, and no heap, deltas or copy engine; one of one node has these.

    multimem  how multimem primitives work: ``TeamView.multicast``
    """

    rank: int
    size: int
    shape: Shape
    name: str
    device: torch.device
    group: Any
    caps: Capabilities
    heap: torch.Tensor
    record: torch.Tensor
    deltas: Sequence[int]
    multimem: int
    copy_engine: CopyEngine
    library: Library
    node: Platform
    rail: Rail

    def peer_heap(self, peer: int) -> torch.Tensor:
        """Heap of ``peer`` as uint8, which this rank can read and write."""

    def exchange(self, what: str, item: object) -> list[Any]:
        """Items of all ranks, in rank order; ``what`` is the same on all ranks.

        Bounded in time: CallMismatch, PeerSilent or PeerFailed, in the simulator Deadlock.
        """

    def compare(self, call: str, values: Mapping[str, str], seconds: float | None) -> None:
        """``Team.compare``. seconds: most that it waits for other ranks."""

    def synchronize(self) -> None:
        """Wait for this rank's GPU work; raises its errors."""

    def max_programs(self, num_warps: int, registers: int) -> int: ...

    def holds(self, num_warps: int) -> int: ...

    def is_capturing(self) -> bool: ...

    def carved(self, tensor: torch.Tensor, name: str) -> None:
        """Register a tensor of the heap under this name."""

    def released(self, tensor: torch.Tensor) -> None: ...

    def subset(self, ranks: Sequence[int], heap_bytes: int) -> Platform | None:
        """A platform of these ranks, in ascending order; None on the other ranks. All ranks call it."""

    def rail_over(self, ranks: Sequence[int]) -> Rail:
        """Rail to these ranks, this one among them, by their place in ``ranks``. Collective on them."""

    def fail(self, message: str) -> None:
        """Tell the peers that this rank has failed."""

    def close(self) -> None: ...


def at_peer(platform: Platform, tensor: torch.Tensor, peer: int) -> torch.Tensor:
    """The symmetric ``tensor`` in ``peer``'s memory. NotSymmetric for one outside this rank's heap."""
    offset = _offset(platform, tensor, peer)
    if peer == platform.rank:
        return tensor
    return platform.peer_heap(peer)[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def address_at_peer(platform: Platform, tensor: torch.Tensor, peer: int) -> int:
    """Address of ``at_peer``."""
    offset = _offset(platform, tensor, peer)
    return tensor.data_ptr() if peer == platform.rank else platform.peer_heap(peer).data_ptr() + offset


def address_of(tensor: torch.Tensor) -> int:
    """Address of the first element, or of its place without elements, where ``data_ptr`` is 0."""
    if tensor.numel():
        return tensor.data_ptr()
    return tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()


def _offset(platform: Platform, tensor: torch.Tensor, peer: int) -> int:
    """Offset of the symmetric ``tensor`` in the heap; 0 without elements, wherever it lies.

    ValueError if it is strided or ``peer`` no rank.
    """
    check_dense("tensor", tensor)
    if type(peer) is not int:
        peer = check_int("peer", peer)
    if not 0 <= peer < platform.size:
        raise ValueError(f"peer={peer} is not a rank of this team; it has ranks 0 to {platform.size - 1}")
    if tensor.numel() == 0:
        return 0
    offset = tensor.data_ptr() - platform.heap.data_ptr()
    if not 0 <= offset < platform.heap.numel():
        raise NotSymmetric(platform.rank, "tensor", tensor.shape)
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of strides {tensor.stride()} is not contiguous; pass a contiguous slice of it")
    return offset


def check_copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    """ValueError unless both are contiguous tensors of equal dtype and number of elements."""
    check_dense("dst", dst)
    check_dense("src", src)
    if dst.dtype != src.dtype or dst.numel() != src.numel():
        raise ValueError(
            f"a copy from {tuple(src.shape)} {src.dtype} to {tuple(dst.shape)} {dst.dtype}: "
            f"dtype and number of elements must agree"
        )
    if not (dst.is_contiguous() and src.is_contiguous()):
        raise ValueError(f"copies are of contiguous tensors; got strides {src.stride()} -> {dst.stride()}")


def check_signal(signal: torch.Tensor, epoch: torch.Tensor) -> None:
    """ValueError as of ``check_copy``, and for a flag without elements, which no peer could see."""
    check_copy(signal, epoch)
    if epoch.numel() == 0:
        raise ValueError(
            f"signal has shape {tuple(signal.shape)}, no element; pass one flag, as signals[row : row + 1]"
        )
