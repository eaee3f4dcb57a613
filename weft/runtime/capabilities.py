"""Capabilities of a rank's device and of its links to peers, probed when a team is made."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# CUdevice_attribute CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of cuda.h
_MULTICAST_SUPPORTED = 132
# CUdevice_P2PAttribute CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of cuda.h
_NATIVE_ATOMICS = 3
# Kinds of links: NVLink (or xGMI, or this rank's own memory), PCIe, a rail to another node.
NVLINK, PCIE, RAIL = "nvlink", "pcie", "rail"
# Kinds within a node.
LINKS = NVLINK, PCIE
# Bytes that a measurement reads between two uses of the same weights: twice the 60 MB L2 of an H200.
COLD_BYTES = 120e6
# Multiprocessors that kernels leave free where ranks share a GPU: a copy between two ranks is a kernel there, and one that
# fills the GPU and waits for the copy would keep it out for ever.
COPY_SMS = 8
# Shared memory of an SM of sm_90, sm_100 and sm_103, also of one program at most. Other GPUs have as much or less.
SHARED_BYTES = 227 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Capabilities of a rank's device, ``team.caps``.

    device_name   the driver's name of it
    arch          "sm_90" or "gfx942"
    sms           streaming multiprocessors (compute units)
    memory_bytes  of the device; 0 if unknown
    peer_access   bool [size]: this rank's kernels reach the memory of each rank; True for itself
    multicast     the team's heap has a multicast address, so that multimem instructions may be used
    links         [size]: kind of the link to each rank, "nvlink" (to itself too), "pcie" (no atomics on a peer's memory) or
                  "rail" (no access); (): all NVLink
    is_simulated  a virtual rank, which plans as such a GPU and runs its kernels on the CPU
    """

    device_name: str
    arch: str
    sms: int
    memory_bytes: int
    peer_access: tuple[bool, ...]
    multicast: bool = False
    links: tuple[str, ...] = ()
    is_simulated: bool = False

    @property
    def remote_atomics(self) -> bool:
        """True if atomics on the memory of every rank of the node are atomic."""
        return PCIE not in self.links


class GPU(NamedTuple):
    """A GPU that virtual ranks can plan as."""

    device_name: str
    arch: str
    sms: int


# ``like`` of weft.simulate.
GPUS = {
    "h200": GPU("NVIDIA H200", "sm_90", 132),
    "h100": GPU("NVIDIA H100 80GB HBM3", "sm_90", 132),
    "b200": GPU("NVIDIA B200", "sm_100", 148),
    "a100": GPU("NVIDIA A100-SXM4-80GB", "sm_80", 108),
}
DEFAULT_GPU = "h200"


def probe(device: torch.device | int, peers: Sequence[int], *, multicast: bool = False) -> Capabilities:
    """Capabilities of ``device`` (a CUDA or HIP device) and of its links to ``peers``.

    peers      device index of every rank, this one included; all are visible to this process
    multicast  found when the heap was mapped: a driver may offer multicast that is not usable
    """
    index = _index_of(device)
    properties = torch.cuda.get_device_properties(index)
    shared = len(set(peers)) < len(peers)  # any GPU, so that all ranks plan alike
    return Capabilities(
        device_name=properties.name,
        arch=architecture(index),
        sms=properties.multi_processor_count - COPY_SMS * shared,
        memory_bytes=properties.total_memory,
        peer_access=tuple(peer == index or torch.cuda.can_device_access_peer(index, peer) for peer in peers),
        multicast=multicast,
        links=tuple(link_between(index, peer) for peer in peers),
    )


@functools.lru_cache
def simulated(world_size: int, *, like: str = DEFAULT_GPU, link: str = NVLINK) -> Capabilities:
    """Capabilities of one of ``world_size`` virtual ranks.

    like  the GPU that it plans as, a key of GPUS
    link  kind of the links; multicast is among the capabilities unless it is "pcie"
    """
    gpu = GPUS[like]
    return Capabilities(
        device_name=gpu.device_name,
        arch=gpu.arch,
        sms=gpu.sms,
        memory_bytes=0,
        peer_access=(True,) * world_size,
        multicast=link == NVLINK,
        links=() if link == NVLINK else (link,) * world_size,
        is_simulated=True,
    )


def architecture(index: int) -> str:
    """Architecture of a device: "sm_90" for an H100 or H200, "gfx942" for an MI300."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def peer_matrix() -> tuple[tuple[bool, ...], ...]:
    """Peer access between the GPUs that this process sees: [i][j] is True if GPU i reaches GPU j."""
    count = torch.cuda.device_count()
    return tuple(tuple(i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)) for i in range(count))


def link_between(index: int, peer: int) -> str:
    """Kind of the link between two devices of this machine: "nvlink" if it carries atomics, else "pcie"."""
    if index == peer or torch.version.hip:
        return NVLINK
    cuda, supported = _cuda_driver(), ctypes.c_int(1)
    if cuda is not None and cuda.cuDeviceGetP2PAttribute(ctypes.byref(supported), _NATIVE_ATOMICS, index, peer):
        return NVLINK  # the driver does not say
    return NVLINK if supported.value else PCIE


def _cuda_driver() -> ctypes.CDLL | None:
    """The driver's library, initialised; None without one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if cuda.cuInit(0) else cuda


def driver_offers_multicast(index: int) -> bool | None:
    """True if the driver reports multicast objects for a device; None without an NVIDIA driver.

    This reads an attribute only. Multicast may still be off in the fabric, which shows when a heap is made.
    """
    cuda, device, supported = _cuda_driver(), ctypes.c_int(), ctypes.c_int()
    if cuda is None or cuda.cuDeviceGet(ctypes.byref(device), index):
        return None
    if cuda.cuDeviceGetAttribute(ctypes.byref(supported), _MULTICAST_SUPPORTED, device):
        return None
    return bool(supported.value)


def nvshmem_available() -> bool:
    """True if torch's symmetric memory can use NVSHMEM here."""
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
        raise ValueError(f"device={device} is not a GPU; virtual ranks have capabilities.simulated(world_size)")
    return torch.cuda.current_device() if device.index is None else device.index


def launch_options(caps: Capabilities) -> dict[str, bool]:
    """Launch options that ``wl.follow_previous_kernel`` needs; none where the target has no such launch."""
    overlaps = caps.arch.startswith("sm_") and int(caps.arch[3:]) >= 90
    return {"launch_pdl": True} if overlaps else {}
