"""Links between ranks of several nodes, measured by ``weft doctor --nodes`` under torchrun."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import NoTeam
from weft.runtime.capabilities import link_between
from weft.runtime.codec import exchangeable
from weft.runtime.environment import coordinates
from weft.runtime.platforms.cuda import agreed_nodes
from weft.runtime.team.rendezvous import Rendezvous
from weft.runtime.team.shape import Shape, shape_of

# (bytes, rounds before the clock starts, timed rounds)
_LATENCY, _BANDWIDTH = (4096, 5, 20), (8 << 20, 2, 5)


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Link between two ranks.

    kind          "nvlink" or "pcie": of one node ("node" without GPUs); "rail": of equal local rank in different nodes
    microseconds  one way, of 4 KiB
    gb_per_s      one way, of 8 MiB at a time
    """

    one: int
    other: int
    kind: str
    microseconds: float
    gb_per_s: float


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Links of a run.

    hosts    of the ranks
    backend  of torch.distributed that carried the measurements: within a node weft's own kernels and copy engines are faster
    """

    shape: Shape
    hosts: list[str]
    backend: str
    links: list[Link]


def links_of_torchrun() -> tuple[int, Links]:
    """Rank of this process, and the links of all ranks. Collective.

    NoTeam where torchrun did not start this process.
    """
    where = coordinates()
    if where is None:
        raise NoTeam(
            "weft doctor --nodes measures links between ranks: start it on every machine with torchrun --nnodes M "
            "--nproc-per-node N --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m weft doctor --nodes"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", where.local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    try:
        store = dist.distributed_c10d._get_default_store()
        exchange = Rendezvous(store, "doctor", where.rank, where.world_size).exchange
        shape = shape_of(agreed_nodes(exchange, range(where.world_size), None))
        return where.rank, measure(shape, where.rank, device, exchange)
    finally:
        dist.destroy_process_group()


def measure(shape: Shape, rank: int, device: torch.device, exchange: Callable[[str, Any], list[Any]]) -> Links:
    """Links that weft uses between the ranks of the world, measured one after the other. Collective."""
    own_links = []
    for one, other, kind in pairs_of(shape):
        if rank in (one, other):
            latency, transfer = (
                _one_way(other + one - rank, rank == one, device, *how) for how in (_LATENCY, _BANDWIDTH)
            )
            if kind == "node" and device.type == "cuda":
                kind = link_between(device.index, other % shape.node_size)
            link = Link(
                one=one, other=other, kind=kind, microseconds=1e6 * latency, gb_per_s=_BANDWIDTH[0] / transfer / 1e9
            )
            own_links += [link] if rank == one else []
        exchange("next link", None)
    by_rank = exchange("links", own_links)
    hosts = exchange("hosts", socket.gethostname())
    return Links(
        shape=shape, hosts=hosts, backend=dist.get_backend(), links=[link for links in by_rank for link in links]
    )


def pairs_of(shape: Shape) -> Iterator[tuple[int, int, str]]:
    """Pairs of ranks between which weft moves data, with the kind of their link."""
    size = shape.nodes * shape.node_size
    for one in range(size):
        for other in range(one + 1, size):
            if one // shape.node_size == other // shape.node_size:
                yield one, other, "node"
            elif one % shape.node_size == other % shape.node_size:
                yield one, other, "rail"


def _one_way(peer: int, first: bool, device: torch.device, nbytes: int, warm: int, rounds: int) -> float:
    """Seconds of half a round trip of ``nbytes`` to ``peer`` and back."""
    x = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    began = 0.0
    for number in range(warm + rounds):
        if number == warm:
            _finish(device)
            began = time.perf_counter()
        for sends in (first, not first):
            (dist.send if sends else dist.recv)(x, peer)
    _finish(device)
    return (time.perf_counter() - began) / (2 * rounds)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
