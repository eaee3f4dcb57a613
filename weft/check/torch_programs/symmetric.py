"""Symmetric memory of a torch program: buffers, signal pads, tables of addresses, handles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weft.check.torch_programs import streams
from weft.check.torch_programs.groups import Group, Named
from weft.simulator.machine.memory import Extent
from weft.simulator.machine.tasks import Waiting
from weft.simulator.places import one_place

if TYPE_CHECKING:
    from weft.check.torch_programs.groups import Groups
    from weft.check.torch_programs.ranks import Ranks

_ALIGNMENT = 256
_PAD_BYTES = 9216  # torch's default: 32 channels of 72 ranks


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """Buffer of one rank and its signal pad; ``number`` of the rank's allocations."""

    number: int
    data: torch.Tensor
    pad: torch.Tensor

    @property
    def base(self) -> int:
        return self.data.data_ptr()


class SymmetricMemory:
    """Functions of ``torch.distributed._symmetric_memory``, for the calling rank."""

    def __init__(self, ranks: Ranks, groups: Groups) -> None:
        self.ranks, self.machine, self.groups = ranks, ranks.machine, groups
        # What a signal of the host orders, by its address in a pad.
        self.signalled: dict[int, Any] = {}

    # --- memory ------------------------------------------------------------------------------------------------------

    def empty(self, *size: object, dtype: torch.dtype | None = None, device: object = None) -> torch.Tensor:
        shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)
        return self.empty_strided(shape, None, dtype or torch.get_default_dtype())

    def empty_strided(
        self, size: Sequence[int], stride: object, dtype: torch.dtype, device: object = None, *_: object, **__: object
    ) -> torch.Tensor:
        here = self.ranks.here
        number = here.number("symmetric tensor")
        count = math.prod(size)
        data = self._allocate(count * dtype.itemsize, f"symmetric tensor #{number}", dtype.itemsize, 0xFF)
        pad = self._allocate(here.kept.get("pad", _PAD_BYTES), f"signal pad #{number}", 4, 0)
        self.machine.uninitialised.add(data.data_ptr())
        here.kept["allocation", data.untyped_storage().data_ptr()] = Allocation(number, data, pad)
        return data.view(dtype).view(tuple(size))

    def _allocate(self, nbytes: int, name: str, itemsize: int, fill: int) -> torch.Tensor:
        """Bytes that peers' kernels may reach, each filled with ``fill``."""
        raw = torch.full((max(nbytes, 1) + 2 * _ALIGNMENT,), fill, dtype=torch.uint8)
        data = raw[-raw.data_ptr() % _ALIGNMENT :][: max(nbytes, 1)]
        memory, rank = self.machine.memory, self.machine.rank
        memory.add_heap(data.data_ptr(), data.numel(), rank)
        memory.add(Extent(data.data_ptr(), data.numel(), rank, name, itemsize))
        return data

    def table(self, addresses: list[int], name: str) -> int:
        """Address of a table of addresses, as ``buffer_ptrs_dev``."""
        table = torch.tensor(addresses, dtype=torch.int64)
        self.ranks.here.kept["table", table.data_ptr()] = table
        self.machine.memory.add(Extent(table.data_ptr(), table.nbytes, self.machine.rank, name, 8))
        return table.data_ptr()

    def allocation_of(self, tensor: torch.Tensor) -> Allocation:
        known = self.ranks.here.kept.get(("allocation", tensor.untyped_storage().data_ptr()))
        if known is None:
            raise RuntimeError("this tensor is not of symm_mem.empty(), so it has no peers")
        return known

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        return ("allocation", tensor.untyped_storage().data_ptr()) in self.ranks.here.kept

    # --- handles -----------------------------------------------------------------------------------------------------

    def rendezvous(self, tensor: torch.Tensor, group: Named = None) -> Handle:
        group, own, here = self.groups.of(group), self.allocation_of(tensor), self.ranks.here
        key = ("handle", own.number, group.group_name)
        if key not in here.kept:
            name = f"rendezvous of symmetric tensor #{own.number} in group {group.group_name}"
            here.kept[key] = Handle(self, group, self.machine.exchange(name, own, group.members))
        handle = here.kept[key]
        return handle.at(tensor.data_ptr() - own.base)

    def remote_tensors(self, tensor: torch.Tensor, group_name: Named) -> list[torch.Tensor]:
        """``torch.ops.symm_mem.get_remote_tensors``: the tensor on each rank of the group."""
        handle = self.rendezvous(tensor, group_name)
        return [handle.get_remote_tensor(peer, tensor.shape, tensor.dtype) for peer in range(handle.world_size)]

    def workspace(self, group_name: Named, min_size: int) -> Handle:
        here, group = self.ranks.here, self.groups.of(group_name)
        key = ("workspace", group.group_name)
        known = here.kept.get(key)
        if known is None or known.buffer_size < min_size:
            known = here.kept[key] = self.rendezvous(self.empty(min_size, dtype=torch.uint8), group)
        return known

    def backend_stream(self, priority: int = 0) -> Any:
        kept = self.ranks.here.kept
        if ("stream", priority) not in kept:
            kept["stream", priority] = streams.Stream(priority=priority)
        return kept["stream", priority]

    def set_pad_size(self, size: int) -> None:
        self.ranks.here.kept["pad"] = size

    def pad_size(self) -> int:
        return self.ranks.here.kept.get("pad", _PAD_BYTES)

    def set_backend(self, name: str) -> None:
        self.ranks.here.kept["backend"] = name

    def backend(self, *_: object) -> str:
        return self.ranks.here.kept.get("backend", "CUDA")

    def write_value(self, tensor: torch.Tensor, offset: int = 0, val: int = 1) -> torch.Tensor:
        """Write of a 32-bit word by the current stream, after all that came before it in the stream."""
        target = tensor.view(-1)[offset : offset + 1]
        value = torch.from_numpy(np.array([val], np.uint32)).view(torch.int32).view(tensor.dtype)
        streams.copy(self.ranks, f"write of {val}", target, value, signal=True)
        return tensor

    def on_stream(self, label: str, operation: Callable[[], object]) -> None:
        streams.current_stream(self.ranks).issue(label, operation, [])

    # --- signals of the host -----------------------------------------------------------------------------------------

    def exchange_word(self, address: int, before: int, after: int, what: str) -> None:
        """Wait in the running task until the word at ``address`` is ``before``, then write ``after``."""
        memory = self.machine.memory

        def word() -> int:
            return memory.read_word(address, 4, lambda: what)

        def describe() -> str:
            return f"waits in {what} until {memory.describe(address)} is {before}, sees {word()}"

        waiting = Waiting(lambda: word() == before, describe, address, address + 4)
        self.machine.scheduler.block(waiting)
        while word() != before:
            self.machine.scheduler.block(waiting)
        memory.write(one_place(address, (1,), 4), np.array([after], np.uint32), lambda: what)
        self.machine.scheduler.written(address, address + 4)


class Handle:
    """Stand-in for ``torch._C._distributed_c10d._SymmetricMemory``, of the rank that made it."""

    def __init__(self, memory: SymmetricMemory, group: Group, parts: list[Allocation], offset: int = 0) -> None:
        self._memory, self._group, self._parts, self.offset = memory, group, parts, offset
        self.rank, self.world_size, self.group_name = group.place, len(parts), group.group_name
        own = parts[self.rank]
        self._name = f"symmetric tensor #{own.number}"
        self.buffer_size, self.signal_pad_size = own.data.numel(), own.pad.numel()
        self.buffer_ptrs = [part.base for part in parts]
        self.signal_pad_ptrs = [part.pad.data_ptr() for part in parts]
        self.device = torch.device("cuda", memory.ranks.here.rank)
        self._tables: dict[str, int] = {}
        self._multicast = 0
        self._calls = 0

    def at(self, offset: int) -> Handle:
        """The handle of a tensor that lies ``offset`` bytes beyond the allocation's start."""
        return self if offset == self.offset else Handle(self._memory, self._group, self._parts, offset)

    def _table(self, name: str, addresses: list[int]) -> int:
        if name not in self._tables:
            self._tables[name] = self._memory.table(addresses, f"{name} of {self._name}")
        return self._tables[name]

    @property
    def buffer_ptrs_dev(self) -> int:
        return self._table("buffer_ptrs_dev", self.buffer_ptrs)

    @property
    def signal_pad_ptrs_dev(self) -> int:
        return self._table("signal_pad_ptrs_dev", self.signal_pad_ptrs)

    @property
    def multicast_ptr(self) -> int:
        if not self._multicast:
            window = torch.empty(self.buffer_size + _ALIGNMENT, dtype=torch.uint8)  # of addresses: nothing touches it
            self._memory.ranks.here.kept["multicast", window.data_ptr()] = window
            self._multicast = window.data_ptr() + -window.data_ptr() % _ALIGNMENT
            self._memory.machine.multicasts.append((self._multicast, self.buffer_size, self.buffer_ptrs))
        return self._multicast + self.offset

    def has_multicast_support(self, *_: object) -> bool:
        return True

    def world_within_direct_access(self) -> bool:
        return True

    # --- tensors -----------------------------------------------------------------------------------------------------

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        return _view(self._parts[rank].data, sizes, dtype, storage_offset * dtype.itemsize)

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return _view(self._parts[peer].data, sizes, dtype, self.offset)

    def get_signal_pad(
        self, rank: int, sizes: Sequence[int] = (), dtype: torch.dtype | None = None, storage_offset: int = 0
    ) -> torch.Tensor:
        dtype, pad = dtype or torch.uint32, self._parts[rank].pad
        sizes = tuple(sizes) or (pad.numel() // dtype.itemsize - storage_offset,)
        return _view(pad, sizes, dtype, storage_offset * dtype.itemsize)

    # --- operations of the current stream ----------------------------------------------------------------------------

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        self._calls += 1
        name = f"barrier of {self._name} (call {self._calls})"
        self._memory.on_stream("barrier", partial(self._memory.ranks.meet, name, self._group.members))

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        memory = self._memory
        address = self.signal_pad_ptrs[dst_rank] + 4 * (channel * self.world_size + self.rank)

        def put() -> None:
            known = memory.machine.observer.published()
            memory.exchange_word(address, 0, 1, f"put_signal to rank {dst_rank}")
            memory.signalled[address] = known

        memory.on_stream(f"put_signal to rank {dst_rank}", put)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        memory = self._memory
        address = self.signal_pad_ptrs[self.rank] + 4 * (channel * self.world_size + src_rank)

        def wait() -> None:
            memory.exchange_word(address, 1, 0, f"wait_signal from rank {src_rank}")
            if address in memory.signalled:
                memory.machine.observer.learned(memory.signalled.pop(address))

        memory.on_stream(f"wait_signal from rank {src_rank}", wait)

    def stream_write_value32(self, tensor: torch.Tensor, offset: int = 0, val: int = 1) -> torch.Tensor:
        return self._memory.write_value(tensor, offset, val)


def _view(data: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype, start: int) -> torch.Tensor:
    """Tensor of ``sizes`` from byte ``start`` of a buffer on."""
    nbytes = math.prod(sizes) * dtype.itemsize
    if start + nbytes > data.numel():
        raise RuntimeError(f"{tuple(sizes)} of {dtype} from byte {start} on exceed a buffer of {data.numel()} bytes")
    return data[start : start + nbytes].view(dtype).view(tuple(sizes))
