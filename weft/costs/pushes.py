"""Collectives: µs by design. nbytes: of the whole tensor, as in ``weft bench``."""

from __future__ import annotations

from weft.costs.fitted import Fitted, Pushes
from weft.costs.gpu import Gpu
from weft.runtime.arithmetic import cdiv, next_power_of_2

# Bytes of a part of a row as it is sent, and programs of an SM, each with a part, of an all-reduce with a norm by default
# (weft/ops/collectives/all_reduce_rms_norm.py).
NORM_PART, NORM_PROGRAMS = 512, 16
# Programs of an SM above which one shot of two ranks has parts twice as long, and the most bytes with such parts.
NORM_MANY, NORM_MOST = 8, 8 << 20
# Bytes of 128 columns in fp8 with their scale, over the bytes in 16 bits.
FP8_SHARE = 132 / 256
# µs that a hop takes longer where numbers are put in fp8 before it and read back after it: a guess.
# Times the memory's time that putting the numbers of long messages in fp8 and reading them back takes. Two H200s, 40 MiB, in a
# row: 137 us, in 16 bits 125 (benchmarks/results/h200-x2-wire).
FP8_LATENCY, FP8_PACE = 0.4, 2.4
# Most ranks on which it was measured: of more ranks the norm is taken to last as long.
NORM_RANKS = 4


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


def fp8_all_reduce(gpu: Gpu, fitted: Pushes, nbytes: float, world_size: int) -> dict[str, float]:
    """``all_reduce`` of ``nbytes`` of 16-bit numbers that travel in fp8.

    Putting a number in fp8, or reading it back, is taken to last FP8_PACE times as long as to load it from memory in 16 bits,
    and a hop FP8_LATENCY longer.
    """
    if world_size == 1:
        return all_reduce(gpu, fitted, nbytes, world_size)
    times = all_reduce(gpu, fitted, nbytes * FP8_SHARE, world_size)
    # Numbers put in fp8 and read back, over the tensor's: a share of the sums is put in fp8 in the second hop.
    converted = {"one_shot": 1 + world_size, "two_shot": 3 + 1 / world_size}
    latency = {"one_shot": FP8_LATENCY, "two_shot": 2 * FP8_LATENCY}
    return {
        name: times[name] + latency[name] + FP8_PACE * count * nbytes / gpu.memory for name, count in converted.items()
    }


def all_reduce_rms_norm(
    gpu: Gpu, fitted: Fitted, rows: int, width: int, item: int, world_size: int, fp8_wire: bool = False
) -> dict[str, float]:
    """All-reduce of rows, in 16 bits or in fp8, residual and norm."""
    nbytes = rows * width * item
    moved = nbytes / gpu.memory
    if world_size == 1:
        return {"one_shot": gpu.launch + fitted.norms.call + moved}
    times = (fp8_all_reduce if fp8_wire else all_reduce)(gpu, fitted.pushes, nbytes, world_size)
    of, measured = fitted.norms, min(world_size, NORM_RANKS)
    first = of.call + of.peer * (measured - 2) + of.rows * moved
    many = world_size == 2 and not fp8_wire and NORM_MANY * gpu.sms * NORM_PART < nbytes <= NORM_MOST
    # Each rank adds up all rows, or its share. Programs that take several tiles wait for a hop before each.
    added = {
        "one_shot": (rows, NORM_PART * (1 + many), world_size * (of.longer if many else 1.0)),
        # W rows of a part in fp8 are in registers at once.
        "two_shot": (cdiv(rows, measured), 1024 // next_power_of_2(world_size) if fp8_wire else NORM_PART, 1.0),
    }

    def taken(tiles: int, part: int, added: float) -> float:
        at_once = NORM_PROGRAMS * gpu.sms // min(cdiv(width * (1 if fp8_wire else item), part), gpu.sms)
        return first if tiles <= at_once else of.several + (1 + of.later * added) * moved

    return {name: times[name] + taken(*how) for name, how in added.items()}
