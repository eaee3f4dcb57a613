"""Best rates measured on this hardware, from which the limits of workloads follow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Measured averages, not data-sheet values. A single run may be a few percent faster.

    link bytes/s in one direction, FLOP/s of 16-bit floats, memory bytes/s, seconds of one hop to a peer
    """

    link: float
    flops: float
    memory: float
    latency: float


# By the driver's GPU name. H200: NVLink 4 through NVSwitch without multicast, over which a copy engine pushes 389 GB/s; bf16
# GEMMs on random data 770-803 TFLOP/s, weights streamed at 4.3 TB/s, a round trip of one flag 2.43 µs: a floor has one hop,
# half of that. H100 (SXM5): the same processor and links; weights at 3.0 TB/s.
GPUS = {
    "NVIDIA H200": Limits(link=389e9, flops=790e12, memory=4.3e12, latency=1.2e-6),
    "NVIDIA H100 80GB HBM3": Limits(link=389e9, flops=790e12, memory=3.0e12, latency=1.2e-6),
}
