"""What a rank's device and the links to its peers can do. Asked when a team is made, never at import."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# CUdevice_attribute CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of cuda.h
_MULTICAST_SUPPORTED = 132


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """``team.caps``.

    device_name   as the driver calls it; "simulated" in the simulator
    arch          "sm_90", "gfx942", or "sim"
    sms           streaming multiprocessors (compute units): how many programs of one kernel can be resident at least
    memory_bytes  of the device, or 0 where nobody knows
    peer_access   bool [size]: whether this rank's kernels reach the memory of each rank; True for itself
    multicast     whether the team's heap has a multicast address, so that multimem instructions may be used
    """

    device_name: str
    arch: str
    sms: int
    memory_bytes: int
    peer_access: tuple[bool, ...]
    multicast: bool = False

    @property
    def is_simulated(self) -> bool:
        return self.arch == "sim"

    def unreachable(self) -> tuple[int, ...]:
        """The ranks whose memory this rank cannot reach."""
        return tuple(rank for rank, reached in enumerate(self.peer_access) if not reached)


def probe(device: torch.device | int, peers: Sequence[int], *, multicast: bool = False) -> Capabilities:
    """Ask the driver about ``device`` (a CUDA or HIP device) and its links to ``peers``.

    ``peers`` holds the device index of every rank, this one's included, all of them visible to this process.
    ``multicast`` is what the rendezvous of the heap found: that a driver offers it does not make it usable.
    """
    index = _index_of(device)
    properties = torch.cuda.get_device_properties(index)
    return Capabilities(
        device_name=properties.name,
        arch=architecture(index),
        sms=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        peer_access=tuple(peer == index or torch.cuda.can_device_access_peer(index, peer) for peer in peers),
        multicast=multicast,
    )


def simulated(world_size: int, sms: int, *, multicast: bool = False) -> Capabilities:
    """The capabilities of one of ``world_size`` virtual ranks with ``sms`` resident programs each."""
    return Capabilities(
        device_name="simulated",
        arch="sim",
        sms=sms,
        memory_bytes=0,
        peer_access=(True,) * world_size,
        multicast=multicast,
    )


def architecture(index: int) -> str:
    """ "sm_90" for an H100 or H200, "gfx942" for an MI300."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def peer_matrix() -> tuple[tuple[bool, ...], ...]:
    """[count, count]: whether GPU ``i`` reaches the memory of GPU ``j``, for the GPUs that this process sees."""
    count = torch.cuda.device_count()
    return tuple(tuple(i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)) for i in range(count))


def driver_offers_multicast(index: int) -> bool | None:
    """Whether the driver says that a device supports multicast objects; None where there is no NVIDIA driver to ask.

    Only an attribute is read. Whether multicast *works* shows when the heap is made: it may be off in the fabric.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, supported = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), index):
        return None
    if cuda.cuDeviceGetAttribute(ctypes.byref(supported), _MULTICAST_SUPPORTED, device):
        return None
    return bool(supported.value)


def nvshmem_available() -> bool:
    """Whether torch's symmetric memory could use NVSHMEM here."""
    if not torch.cuda.is_available() or not torch.distributed.is_available():
        return False
    try:
        from torch.distributed._symmetric_memory import is_nvshmem_available
    except ImportError:
        return False
    return bool(is_nvshmem_available())


def _index_of(device: torch.device | int) -> int:
    if isinstance(device, int):
        return device
    if device.type != "cuda":
        raise ValueError(f"device={device} is not a GPU; virtual ranks have capabilities.simulated(world_size, sms)")
    return torch.cuda.current_device() if device.index is None else device.index


def launch_options(caps: Capabilities) -> dict[str, bool]:
    """Launch options that ``wl.follow_previous_kernel`` needs, where the target or the simulator's checker knows them."""
    overlaps = caps.is_simulated or (caps.arch.startswith("sm_") and int(caps.arch[3:]) >= 90)
    return {"launch_pdl": True} if overlaps else {}
