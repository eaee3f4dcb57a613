"""GPUs that a server is planned for, "4xH200", and the memory that a model takes there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.arguments import quoted
from weft.costs.gpu import Gpu, named, shipped
from weft.models.config import DecoderConfig
from weft.models.steps import Layout
from weft.runtime.arithmetic import cdiv

# Bytes that a driver reports, by the names of weft/costs/gpus.
MEMORY_BYTES = {
    "NVIDIA H200": 150_100_000_000, "NVIDIA H100 80GB HBM3": 85_000_000_000, "NVIDIA A100-SXM4-80GB": 85_000_000_000,
    "NVIDIA B200": 191_500_000_000, "AMD Instinct MI300X": 206_000_000_000,
}  # fmt: skip
# Of a rank besides weights and cache: the CUDA context with libraries, the symmetric heap, CUDA graphs.
CONTEXT_BYTES, HEAP_BYTES, GRAPH_BYTES = 1 << 30, 2 << 30, 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """``count`` GPUs of one node."""

    count: int
    gpu: Gpu
    memory_bytes: int

    @classmethod
    def of(cls, text: str) -> Cluster:
        """GPUs as a flag names them. ValueError, with the known names, for another text."""
        names = [gpu.gpu for gpu in shipped().values()]
        aliases = {name.lower(): name for name in names}
        aliases |= {re.split(r"[ -]", re.sub(r"^(nvidia|amd instinct) ", "", name.lower()))[0]: name for name in names}
        match = re.fullmatch(r"\s*([1-9]\d{0,3})\s*x\s*(.+?)\s*", text)
        if match is None or match[2].lower() not in aliases:
            known = ", ".join(sorted(name.upper() for name in aliases if " " not in name))
            raise ValueError(f"--gpus {quoted(text)} is not COUNTxGPU, such as 4xH200; known GPUs are {known}")
        gpu = named(aliases[match[2].lower()])
        return cls(count=int(match[1]), gpu=gpu, memory_bytes=MEMORY_BYTES.get(gpu.gpu, 80_000_000_000))

    def __str__(self) -> str:
        return f"{self.count}x{self.gpu.gpu}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank.

    page  of one page of the KV cache; slot: of a sequence's states, where layers have some
    free  for all pages and slots
    """

    total: int
    weights: int
    activations: int
    page: int
    slot: int
    free: int


def memory_of(
    config: DecoderConfig, layout: Layout, cluster: Cluster, *, page_size: int, chunk_tokens: int, fraction: float
) -> Memory:
    """Memory of a rank, by the rules of ``weft.engine.runner``.

    fraction  of what is left that the KV cache may take
    """
    layers = range(cdiv(config.num_hidden_layers, layout.stages))
    sizes = config.quantized(layout.quantization) if layout.quantization is not None else config
    weights = sizes.weight_bytes(layers, config.dtype) // layout.world_size
    width = 8 * config.hidden_size + 4 * max(config.intermediate_size, config.hidden_size) // layout.world_size
    activations = chunk_tokens * width * config.dtype.itemsize
    elements = config.cached_elements(1 if layout.spread else layout.world_size)
    with_states = sum(map(config.has_state, layers))
    page = max(1, len(layers) - with_states) * page_size * elements * layout.cache_bytes
    slot = 0
    if (linear := config.linear_attention) is not None:
        # The states in fp32, and the inputs of the last tokens; those of drafts are few bytes more.
        state = 4 * linear.value_heads * linear.value_dim * linear.key_dim
        columns = 2 * linear.key_heads * linear.key_dim + linear.value_heads * (linear.value_dim + 2)
        state += linear.taps * columns * config.dtype.itemsize
        slot = with_states * state // layout.world_size
    left = cluster.memory_bytes - weights - activations - CONTEXT_BYTES - HEAP_BYTES - GRAPH_BYTES
    return Memory(
        total=cluster.memory_bytes,
        weights=weights,
        activations=activations,
        page=page,
        slot=slot,
        free=int(max(0, left) * fraction),
    )
