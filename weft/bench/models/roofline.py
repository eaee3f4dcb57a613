"""Roofline of a model's step at the rates of weft.bench.harness.limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.bench.harness.limits import Limits
from weft.bench.harness.workload import DTYPES

if TYPE_CHECKING:
    from weft.models.config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Microseconds of one step on one rank.

    gemms      of the layers: weights read at memory bandwidth or multiplied at peak FLOP/s, whichever takes longer, per GEMM
    head       the same for the vocabulary head
    attention  keys and values read at memory bandwidth, or queries multiplied with them at peak FLOP/s
    wire       all-reduced bytes over link bandwidth, ring-optimal
    latency    of all-reduces: nothing after one can start sooner
    exposed    wire time that the layers' GEMMs are too short to hide: as reduce-scatter and all-gather, half of it can
               overlap the GEMM that makes the sum, the other half the GEMM that takes it
    """

    gemms: float
    head: float
    attention: float
    wire: float
    latency: float
    exposed: float

    @property
    def floor(self) -> float:
        """Total with bytes on the wire hidden by GEMMs as far as possible."""
        return self.gemms + self.head + self.attention + self.latency + self.exposed


def weights(config: DecoderConfig, world_size: int) -> dict[str, int]:
    """Elements of one rank's weights by GEMM of a layer. A bias counts as a column more.

    Of a mixture of experts, all of this rank's experts; the router counts as columns of gate and up. A shared expert has
    separate GEMMs.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads // world_size
    kv_heads = max(config.num_key_value_heads // world_size, 1)
    experts = config.experts
    features = config.intermediate_size if experts is None else experts.num_experts * experts.intermediate_size
    shared = 0 if experts is None else (experts.shared_intermediate_size or 0) // world_size
    qkv, o = (
        (heads + 2 * kv_heads) * config.head_dim * (hidden + config.attention.bias),
        heads * config.head_dim * hidden,
    )
    if (latent := config.attention.latent) is not None:
        o = heads * latent.v_head_dim * hidden
        qkv = latent.parameters(hidden, heads) - o
    matrices = 1 + config.block.gated
    return {
        "qkv": qkv,
        "o": o,
        "gate_up": (matrices * features // world_size + (0 if experts is None else experts.num_experts)) * hidden,
        "down": features // world_size * hidden,
        "shared_gate_up": 2 * shared * hidden,
        "shared_down": shared * hidden,
    }


def active_share(config: DecoderConfig, tokens: int) -> float:
    """Share of the experts that some of ``tokens`` tokens choose, if all sets of experts are chosen alike."""
    return 1 - (1 - config.experts.num_experts_per_tok / config.experts.num_experts) ** tokens


def roofline(
    level: str, config: DecoderConfig, world_size: int, shape: Sequence[int], dtype: str, limits: Limits | None
) -> Roofline | None:
    """Roofline of one layer ("mlp" and "attn") or of the whole model. ``shape``: (batch, length, new).

    None if the limits of the GPU or the dtype's peak are unknown.
    """
    if limits is None or dtype == "fp32":
        return None
    batch, length, new = shape
    itemsize, tokens = DTYPES[dtype].itemsize, batch * new
    layers = config.num_hidden_layers if level == "model" else 1
    mlp = ("gate_up", "down", "shared_gate_up", "shared_down")
    chosen = {"mlp": mlp, "attn": ("qkv", "o"), "model": ("qkv", "o", *mlp)}[level]
    bits = 8.0 * itemsize if config.quantization is None else config.quantization.format.bits

    def gemm(elements: int, rows: float, read: float = 1.0, bits: float = bits) -> float:
        # Elements of 8 bits multiply at twice the rate; ones of 4 are converted to 16.
        rate = limits.flops * (2 if bits == 8 else 1)
        return max(read * elements * bits / 8 / limits.memory, 2.0 * elements * rows / rate) * 1e6

    times = {name: gemm(size, tokens) for name, size in weights(config, world_size).items() if name in chosen}
    if config.experts is not None:
        # A token meets its share of the experts, and an expert is read if any token chose it: all sets of experts alike.
        share = config.experts.num_experts_per_tok / config.experts.num_experts
        for name in times.keys() & {"gate_up", "down"}:
            read = active_share(config, tokens)
            times[name] = gemm(weights(config, world_size)[name], tokens * share, read)
    attention = 0.0 if level == "mlp" else _attention(config, world_size, shape, itemsize, limits)
    wire = latency = exposed = 0.0
    if world_size > 1:
        each = 2 * (world_size - 1) / world_size * tokens * config.hidden_size * itemsize / limits.link * 1e6
        sums = len({"o", "down"} & times.keys())
        wire, latency = each * sums, limits.latency * 1e6 * sums
        exposed = max(0.0, wire - sum(times.values()))
    rows = -(-config.vocab_size // world_size)
    head = gemm(rows * config.hidden_size, batch, 1.0, 8.0 * itemsize) if level == "model" else 0.0
    return Roofline(
        gemms=layers * sum(times.values()), head=head, attention=layers * attention,
        wire=layers * wire, latency=layers * latency, exposed=layers * exposed,
    )  # fmt: skip


def _attention(config: DecoderConfig, world_size: int, shape: Sequence[int], itemsize: int, limits: Limits) -> float:
    """Attention of a layer in the mean, in microseconds."""
    batch, length, new = shape
    heads, elements = config.num_attention_heads // world_size, config.cached_elements(world_size)
    operations = 4.0 * config.head_dim
    if (latent := config.attention.latent) is not None:
        expanded = latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim
        operations = 2.0 * (latent.width + latent.kv_lora_rank if new == 1 else expanded)
    windows = [config.attention.window(layer) for layer in range(config.num_hidden_layers)]

    def attend(window: int | None) -> float:
        window = min(window or length, length)
        nbytes = batch * min(length, window + new - 1) * elements * itemsize
        # Token i of a sequence sees i + 1 tokens, itself the last, and at most the window.
        whole = length - max(window, length - new)
        growing = new - whole
        pairs = batch * (whole * window + growing * (length - new) + growing * (growing + 1) / 2)
        return max(nbytes / limits.memory, operations * pairs * heads / limits.flops) * 1e6

    return sum(map(attend, windows)) / len(windows)
