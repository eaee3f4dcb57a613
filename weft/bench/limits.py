"""Bytes on the wire and operations, and their times at the best rates measured on this hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.bench.shapes import ITEMSIZE, NORMED, is_collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Measured averages, not data-sheet values. A single run may be a few percent faster.

    link bytes/s in one direction, FLOP/s of 16-bit floats, memory bytes/s, seconds of one hop to a peer
    """

    link: float
    flops: float
    memory: float
    latency: float


# By the driver's GPU name. H200: NVLink 4 through NVSwitch without multicast; copies of 132 CTAs 359 GB/s,
# bf16 GEMMs on random data 770-803 TFLOP/s, weights streamed at 4.3 TB/s, a round trip of one flag 2.43 µs: a floor has one
# hop, half of that.
GPUS = {"NVIDIA H200": Limits(link=360e9, flops=790e12, memory=4.3e12, latency=1.2e-6)}


def limits_of(gpu: str) -> Limits | None:
    return GPUS.get(gpu)


def wire_bytes(op: str, world_size: int, size: Sequence[int], itemsize: int) -> float:
    """Minimum number of bytes that each rank must send."""
    share = (world_size - 1) / world_size
    if op == NORMED:
        return 2 * share * size[0] * size[1] * itemsize
    if is_collective(op):
        return (2 if op == "all-reduce" else 1) * share * size[0]
    m, n, k = size
    return {
        "gemm": 0.0,
        "ag-gemm": share * m * k,
        "gemm-rs": share * m * n,
        "gemm-ar": 2 * share * m * n,
    }[op] * itemsize


def operations(op: str, size: Sequence[int]) -> float:
    """Floating-point operations of one rank's GEMM; 0 for collectives."""
    return 0.0 if is_collective(op) else 2.0 * size[0] * size[1] * size[2]


def floor_us(op: str, world_size: int, size: Sequence[int], dtype: str, limits: Limits | None) -> float | None:
    """Wire time + one hop for a collective, max(T_gemm, T_comm) for a GEMM op; None without known limits."""
    if limits is None or (not is_collective(op) and dtype == "fp32"):
        return None
    itemsize = ITEMSIZE[dtype]
    wire = wire_bytes(op, world_size, size, itemsize) / limits.link
    if is_collective(op):
        return (wire + (limits.latency if world_size > 1 else 0.0)) * 1e6
    m, n, k = size
    gemm = max(operations(op, size) / limits.flops, itemsize * (m * k + n * k + m * n) / limits.memory)
    return max(gemm, wire) * 1e6


def rate(op: str, world_size: int, size: Sequence[int], dtype: str, microseconds: float) -> float:
    """GB/s of bus bandwidth (nccl-tests' busbw) for a collective, TFLOP/s of one rank for a GEMM op."""
    if is_collective(op):
        return wire_bytes(op, world_size, size, ITEMSIZE[dtype]) / microseconds / 1e3
    return operations(op, size) / microseconds / 1e6
