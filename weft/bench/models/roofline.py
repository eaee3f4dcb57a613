"""Roofline of a model's step at the rates of weft.bench.harness.limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from weft.bench.harness.limits import Limits
from weft.bench.harness.workload import DTYPES

if TYPE_CHECKING:
    from weft.models.config import DecoderConfig

# GEMMs of an MLP, with experts or without.
MLP = ("gate_up", "down", "shared_gate_up", "shared_down")
# Of an element of a gated delta net's state, fp32.
BYTES_OF_A_STATE = 4


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


class Kind(NamedTuple):
    """A kind of layers: with a gated delta net in place of attention, with experts in place of an MLP."""

    state: bool
    experts: bool


def weights(config: DecoderConfig, world_size: int, kind: Kind | None = None) -> dict[str, int]:
    """Elements of one rank's weights by GEMM of a layer.

    kind  None: attention, and experts if there are any

    A bias counts as a column more. Of a mixture of experts, all of this rank's experts; the router counts as columns of gate
    and up. A shared expert has separate GEMMs.
    """
    kind = kind or Kind(state=False, experts=config.experts is not None)
    hidden, heads = config.hidden_size, config.num_attention_heads // world_size
    kv_heads = max(config.num_key_value_heads // world_size, 1)
    experts = config.experts if kind.experts else None
    features = config.intermediate_size if experts is None else experts.num_experts * experts.intermediate_size
    shared = 0 if experts is None else (experts.shared_intermediate_size or 0) // world_size
    gates = heads if config.attention.gated else 0
    qkv = (heads + 2 * kv_heads + gates) * config.head_dim * (hidden + config.attention.bias)
    o = heads * config.head_dim * hidden
    if kind.state:
        linear = config.linear_attention
        o = linear.value_heads * linear.value_dim // world_size * hidden
        qkv = linear.parameters // world_size * hidden - o
    elif (latent := config.attention.latent) is not None:
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
    chosen = {"mlp": MLP, "attn": ("qkv", "o"), "model": ("qkv", "o", *MLP)}[level]
    bits = 8.0 * itemsize if config.quantization is None else config.quantization.format.bits

    def gemm(elements: int, rows: float, read: float = 1.0, bits: float = bits) -> float:
        # Elements of 8 bits multiply at twice the rate; ones of 4 are converted to 16.
        rate = limits.flops * (2 if bits == 8 else 1)
        return max(read * elements * bits / 8 / limits.memory, 2.0 * elements * rows / rate) * 1e6

    def layer(kind: Kind) -> float:
        sizes = weights(config, world_size, kind)
        times = {name: gemm(size, tokens) for name, size in sizes.items() if name in chosen}
        if kind.experts:
            # A token meets its share of the experts, and an expert is read if any token chose it: all sets of experts alike.
            share = config.experts.num_experts_per_tok / config.experts.num_experts
            for name in times.keys() & {"gate_up", "down"}:
                times[name] = gemm(sizes[name], tokens * share, active_share(config, tokens))
        return sum(times.values())

    layers = config.num_hidden_layers if level == "model" else 1
    every = [Kind(config.has_state(at), config.has_experts(at)) for at in range(config.num_hidden_layers)]
    of_level = Counter(every) if level == "model" else {Kind(state=False, experts=config.experts is not None): 1}
    gemms = sum(count * layer(kind) for kind, count in of_level.items())
    attention = 0.0 if level == "mlp" else layers * _attention(config, world_size, shape, itemsize, limits)
    wire = latency = exposed = 0.0
    if world_size > 1:
        each = 2 * (world_size - 1) / world_size * tokens * config.hidden_size * itemsize / limits.link * 1e6
        sums = layers * len({"o", "down"} & set(chosen))
        wire, latency = each * sums, limits.latency * 1e6 * sums
        exposed = max(0.0, wire - gemms)
    rows = -(-config.vocab_size // world_size)
    head = gemm(rows * config.hidden_size, batch, 1.0, 8.0 * itemsize) if level == "model" else 0.0
    return Roofline(gemms=gemms, head=head, attention=attention, wire=wire, latency=latency, exposed=exposed)


def _attention(config: DecoderConfig, world_size: int, shape: Sequence[int], itemsize: int, limits: Limits) -> float:
    """Attention of a layer in the mean, in microseconds; a gated delta net reads its state and writes it."""
    batch, length, new = shape
    heads, elements = config.num_attention_heads // world_size, config.cached_elements(world_size)
    operations = 4.0 * config.head_dim
    if (latent := config.attention.latent) is not None:
        expanded = latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim
        operations = 2.0 * (latent.width + latent.kv_lora_rank if new == 1 else expanded)

    def attend(layer: int) -> float:
        if config.has_state(layer):
            linear = config.linear_attention
            state = linear.value_heads * linear.value_dim * linear.key_dim // world_size
            return 2 * batch * state * BYTES_OF_A_STATE / limits.memory * 1e6
        window = min(config.attention.window(layer) or length, length)
        nbytes = batch * min(length, window + new - 1) * elements * itemsize
        # Token i of a sequence sees i + 1 tokens, itself the last, and at most the window.
        whole = length - max(window, length - new)
        growing = new - whole
        pairs = batch * (whole * window + growing * (length - new) + growing * (growing + 1) / 2)
        return max(nbytes / limits.memory, operations * pairs * heads / limits.flops) * 1e6

    every = range(config.num_hidden_layers)
    return sum(map(attend, every)) / len(every)
