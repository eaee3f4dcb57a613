"""Collectives: µs by design. nbytes: of the whole tensor, as in ``weft bench``."""

from __future__ import annotations

from weft.costs.fitted import Pushes
from weft.costs.gpu import Gpu


def one_hop(gpu: Gpu, fitted: Pushes, sent: float, world_size: int) -> float:
    """A kernel that stores ``sent`` bytes to its peers and waits for theirs."""
    if world_size == 1:
        return gpu.launch
    many = fitted.ramp * sent / (sent + fitted.ramp_bytes)
    return gpu.hop + fitted.peer * (world_size - 2) + many + sent / gpu.wire(world_size)


def exchange(gpu: Gpu, fitted: Pushes, nbytes: float, world_size: int, adds: bool = False) -> dict[str, float]:
    """All-gather or all-to-all, with ``adds`` reduce-scatter: a part of the tensor to each peer."""
    if world_size == 1:
        return {"copy": gpu.launch + 2 * nbytes / gpu.memory}
    part = nbytes / world_size
    copies = (world_size - 1) * (gpu.copy + part / gpu.link)
    added = fitted.reduce * (world_size - 2) + (world_size + 1) * part / gpu.memory if adds else 0.0
    return {
        "push": one_hop(gpu, fitted, (world_size - 1) * part, world_size),
        "copy_engine": fitted.engine + copies + added,
    }


def all_reduce(gpu: Gpu, fitted: Pushes, nbytes: float, world_size: int) -> dict[str, float]:
    """Sum over the ranks, on every rank."""
    if world_size == 1:
        return {"copy": gpu.launch + 2 * nbytes / gpu.memory}
    gathered = exchange(gpu, fitted, nbytes, world_size)["copy_engine"]
    reduced = exchange(gpu, fitted, nbytes, world_size, adds=True)["copy_engine"]
    share = 2 * (world_size - 1) / world_size * nbytes
    second = fitted.second + 2 * fitted.peer * (world_size - 2)
    return {
        "one_shot": one_hop(gpu, fitted, (world_size - 1) * nbytes, world_size),
        "two_shot": second + one_hop(gpu, fitted, fitted.owner * share, world_size),
        # Of two ranks one fork and join serves both halves.
        "copy_engine": gathered + reduced - fitted.joined / (world_size - 1),
    }


def all_reduce_rms_norm(
    gpu: Gpu, fitted: Pushes, rows: int, width: int, item: int, world_size: int
) -> dict[str, float]:
    """All-reduce of rows, residual and norm."""
    nbytes = rows * width * item
    times = all_reduce(gpu, fitted, nbytes, world_size)
    norm = fitted.norm + nbytes / gpu.memory
    if world_size == 1:
        return {"one_shot": gpu.launch + norm}
    # Each rank adds up all rows, or its share.
    added = {"one_shot": world_size, "two_shot": 1}
    return {name: times[name] + norm + fitted.norm_rows * count * nbytes / gpu.memory for name, count in added.items()}
