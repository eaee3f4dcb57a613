"""Bytes on the wire and operations, and their times at the best rates measured on this hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.bench.ops.shapes import DTYPES, is_gemm, op_of


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


def wire_bytes(op: str, world_size: int, size: Sequence[int], dtype: str) -> int:
    """Minimum number of bytes that each rank must send."""
    found, kind = op_of(op), DTYPES[dtype]
    return found.traffic(found.case_of(size, kind, world_size).sizes, kind, world_size)


def floor_us(op: str, world_size: int, size: Sequence[int], dtype: str, limits: Limits | None) -> float | None:
    """Wire time + one hop for a collective, max(T_gemm, T_comm) for a GEMM op; None without known limits."""
    if limits is None or (is_gemm(op) and dtype == "fp32"):
        return None
    wire = wire_bytes(op, world_size, size, dtype) / limits.link
    if not is_gemm(op):
        return (wire + (limits.latency if world_size > 1 else 0.0)) * 1e6
    found = op_of(op)
    gemm = max(found.flops(size) / limits.flops, found.memory_bytes(size, DTYPES[dtype]) / limits.memory)
    return max(gemm, wire) * 1e6


def rate(op: str, world_size: int, size: Sequence[int], dtype: str, microseconds: float) -> float:
    """GB/s of bus bandwidth (nccl-tests' busbw) for a collective, TFLOP/s of one rank for a GEMM op."""
    if is_gemm(op):
        return op_of(op).flops(size) / microseconds / 1e6
    return wire_bytes(op, world_size, size, dtype) / microseconds / 1e3
