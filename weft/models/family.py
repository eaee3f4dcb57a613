"""Tables of a family of models: how its config.json reads, and the names of its weights."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from weft.arguments import quoted
from weft.errors import CheckpointError
from weft.models.joined import Joined
from weft.parallel.latent_sizes import LatentSizes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Options of a model's attention: arguments of ``weft.layers.TPAttention`` by their names, and

    norm_after_rotary  norms of q and k come after the rotary embedding, not before it
    windows  by layer, and repeated for more layers: a token attends to this many tokens, itself the last; None: to all
    interleaved  rotary embedding pairs neighbours 2i and 2i + 1, not the halves of a head
    rotated  by layer, and repeated for more layers: False where there is no rotary embedding
    latent   latent attention, which has no other option here; None: attention of heads
    """

    qk_norm: bool = False
    norm_after_rotary: bool = False
    norm_all_heads: bool = False
    bias: bool = False
    output_bias: bool = False
    windows: tuple[int | None, ...] = (None,)
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    interleaved: bool = False
    rotated: tuple[bool, ...] = (True,)
    inputs: int = 1
    gated: bool = False
    latent: LatentSizes | None = None

    def window(self, layer: int) -> int | None:
        """Window of a layer."""
        return self.windows[layer % len(self.windows)]

    @property
    def longest_window(self) -> int | None:
        """Most tokens that a token attends to in any layer; None: all before it."""
        return None if None in self.windows else max(self.windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """Options of a decoder around its attention: norms, MLP, residuals, embedding, logits.

    norms_before, norms_after  RMSNorms of the rows that attention and MLP take, and of the rows that they give
    one_plus_norms   a checkpoint's weight w of a norm, also of q_norm and k_norm, stands for 1 + w in fp32
    activation       of the MLP's gate: "silu", or "gelu_tanh", GELU by a hyperbolic tangent; without a gate a key of
                     ``UNGATED`` in weft.parallel.plain. gated: False: there is no gate_proj
    residual_scale   factor of the rows that attention and MLP give, before they are added to the residual
    embedding_scale  factor of the embedding; in the dtype of the weights if embedding_scale_rounded
    logits_divisor, logits_softcap  logits / logits_divisor, then logits_softcap * tanh(logits / logits_softcap)
    """

    norms_before: bool = True
    norms_after: bool = False
    one_plus_norms: bool = False
    activation: str = "silu"
    gated: bool = True
    residual_scale: float | None = None
    embedding_scale: float | None = None
    embedding_scale_rounded: bool = False
    logits_divisor: float | None = None
    logits_softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionOptions:
    """Gated delta nets in place of attention in some layers.

    key_heads, value_heads, key_dim, value_dim  of the rule (docs/linear-attention.md); taps: of the convolution
    layers  by layer: True where there is such a layer, else attention
    joined  in_proj_qkvz and in_proj_ba hold the rows of a key head together, else in_proj_qkv, in_proj_z, _b and _a have
            the rows of all heads one after another
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    layers: tuple[bool, ...]
    joined: bool = True

    @property
    def parameters(self) -> int:
        """Number of weights of a layer's matrices, over the hidden size."""
        values = self.value_heads * self.value_dim
        return 2 * self.key_heads * self.key_dim + 3 * values + 2 * self.value_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOptions:
    """Mixture of experts in place of a model's MLPs: arguments of ``weft.layers.MoE`` by their names, and

    layers  by layer, and repeated for more layers: True where there are experts, else an MLP
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool = True
    scoring: str = "softmax"
    router_bias: bool = False
    groups: int = 1
    group_limit: int = 1
    scale: float = 1.0
    shared_intermediate_size: int | None = None
    shared_gate: bool = False
    bias: bool = False
    logit_bias: bool = False
    clamped_swiglu: tuple[float, float] | None = None
    layers: tuple[bool, ...] = (True,)

    def in_layer(self, layer: int) -> bool:
        return self.layers[layer % len(self.layers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExperts:
    """Tensors of all experts in a checkpoint: names below the mixture's, and what is where in them.

    gate_up, down  [E, 2 N, H] and [E, H, N]; their biases end in _bias, numbers and scales in MXFP4 in _blocks and _scales
    transposed     [E, H, 2 N] and [E, N, H], where they are not in MXFP4
    interleaved    rows of gate and of up take turns, else gate's come first
    """

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """Prefixes of tensors' names in a checkpoint: the model's parts, and a layer's within it.

    Attention and MLP have q_proj, k_proj, v_proj, o_proj, `head_norms`, gate_proj, up_proj and down_proj below theirs, a
    mixture of experts `router`, `router_bias` (a tensor), `shared_expert` and experts.E, with `projections` for gate, up and
    down below that. A checkpoint may have `stacked` tensors in place of experts.E. Norms of rows that attention and MLP give
    count in a model that has such norms only (``BlockOptions``).

    joined  modules in whose tensors several of these matrices lie; a checkpoint may have the matrices apart, too
    """

    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    joined: tuple[Joined, ...] = ()
    router: str = "gate"
    router_bias: str = "gate.e_score_correction_bias"
    shared_expert: str = "shared_expert"
    stacked: StackedExperts = StackedExperts()

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    input_norm: str = "input_layernorm"
    attention: str = "self_attn"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    linear_attention: str = "linear_attn"
    post_norm: str = "post_attention_layernorm"
    attention_out_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = "post_feedforward_layernorm"
    mlp: str = "mlp"
    norm: str = "model.norm"
    head: str = "lm_head"


Content = Mapping[str, Any]
"""A config.json, with the family's defaults for absent keys."""


def always(value: T) -> Callable[[Content], T]:
    """Reader of a config.json that gives this value whatever the file says."""
    return lambda content: value


def window_rope(content: Content, theta: str = "rope_theta") -> Content:
    """Rotary embedding of layers with a window: that of "sliding_attention", else without scaling.

    theta  key of its base in a file without rope_parameters
    """
    by_type = content.get("rope_parameters") or {}
    return {"rope_theta": content[theta], **(by_type.get("sliding_attention") or {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models whose config.json has one `model_type`.

    name          in messages
    architecture  the member of `architectures` that generates text: drafters, classifiers and embedders share a model_type
    other_architecture  its name in files that are older than the class of transformers
    defaults      keys of config.json with the values that transformers assumes where the file has none. num_key_value_heads
                  None: one for each query head; head_dim None: hidden_size / num_attention_heads
    null_head_dim  True if null as head_dim, too, is hidden_size / num_attention_heads, where the default is a number
    published     name of a model -> its config.json, as far as it counts, without model_type
    attention     options in a config.json. CheckpointError for values that weft does not run
    window_rope   rope_parameters of layers with a window, where they are other ones than of the rest; None: they are not.
                  Where it gives some, rope_parameters of the rest may stand under "full_attention"
    ntk_alpha     rope_type "dynamic" with an alpha is ``NtkAlpha``; without one, and in other families, it is refused
    block         options of the rest of a layer and of both ends, with the same errors
    experts       the mixture of experts in a config.json, with the same errors; None: MLPs
    longest       most positions that weft computes as transformers does, with the same errors; None: all
    linear_attention  layers that have a state in place of keys and values, with the same errors; None: no layer has
    reads         keys that these functions read
    supported     keys that may have these values and no other ones, beside the keys of all families
    without_effect  keys of published files that transformers' class does not read, of any value
    """

    name: str
    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    published: Mapping[str, Mapping[str, Any]]
    other_architecture: str | None = None
    null_head_dim: bool = False
    attention: Callable[[Content], AttentionOptions] = always(AttentionOptions())
    window_rope: Callable[[Content], Content | None] = always(None)
    ntk_alpha: bool = False
    block: Callable[[Content], BlockOptions] = always(BlockOptions())
    experts: Callable[[Content], ExpertOptions | None] = always(None)
    longest: Callable[[Content], int | None] = always(None)
    linear_attention: Callable[[Content], LinearAttentionOptions | None] = always(None)
    reads: tuple[str, ...] = ()
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    without_effect: tuple[str, ...] = ()
    weights: WeightNames = WeightNames()


DEFAULTS: Content = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
"""Defaults of Llama; most families have a few other values."""
SHAPE = "hidden_size intermediate_size num_hidden_layers num_attention_heads"
"""First columns of tables of published models."""


def table(columns: str, rows: Mapping[str, Sequence[object]], **common: object) -> dict[str, Content]:
    """Name of a published model -> its config.json: a row's values by key, and ``common`` ones."""
    return {name: {**common, **dict(zip(columns.split(), row, strict=True))} for name, row in rows.items()}


def flag(content: Content, name: str) -> bool:
    """true or false under `name`; null is false."""
    if (value := content.get(name)) is not None and not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name}={quoted(value)} is not true or false")
    return bool(value)


def window_of(content: Content) -> int | None:
    """sliding_window: tokens that a token attends to, itself the last; null: all before it."""
    value = content["sliding_window"]
    if value is not None and (type(value) is not int or value < 1):
        raise CheckpointError(f"config.json: sliding_window={quoted(value)} is not a positive integer or null")
    return value


def count_of(content: Content, name: str, most: int | None = None) -> int:
    """A positive integer under `name`, `most` at most."""
    value = content.get(name)
    if type(value) is not int or value < 1 or (most is not None and value > most):
        limit = "a positive integer" if most is None else f"an integer in 1 .. {most}"
        raise CheckpointError(f"config.json: {name}={quoted(value)} is not {limit}")
    return value


def number_of(content: Content, name: str) -> float:
    """A positive finite number under `name`."""
    value = content.get(name)
    # Booleans are integers to Python, and JSON as Python reads it has infinity and NaN.
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"config.json: {name}={quoted(value)} is not a positive number that is finite")
    return float(value)


def number_or_none(content: Content, name: str) -> float | None:
    """The same, and None for null."""
    return None if content.get(name) is None else number_of(content, name)


def factor_of(content: Content, name: str) -> float | None:
    """The same of a factor; None for 1, which changes nothing."""
    return None if (value := number_of(content, name)) == 1 else value


def experts_of(content: Content, name: str, chosen: str = "num_experts_per_tok") -> tuple[int, int]:
    """(experts, of which there are `name`; experts of each token, as many as `chosen` says)"""
    # Not at the top: they load all ops, and torch.
    from weft.ops.moe.route import MAX_EXPERTS
    from weft.ops.moe.routing import MAX_CHOICES

    total = count_of(content, name, MAX_EXPERTS)
    return total, count_of(content, chosen, min(total, MAX_CHOICES))


def local_experts(content: Content) -> ExpertOptions:
    """Experts of intermediate_size in every layer, as many as num_local_experts says."""
    total, chosen = experts_of(content, "num_local_experts")
    return ExpertOptions(num_experts=total, num_experts_per_tok=chosen, intermediate_size=content["intermediate_size"])


def layers_with_experts(content: Content) -> tuple[bool, ...]:
    """By layer, as Qwen names them: every decoder_sparse_step-th, but for mlp_only_layers."""
    step, dense = count_of(content, "decoder_sparse_step"), content["mlp_only_layers"]
    if dense is not None and not (isinstance(dense, list) and all(type(layer) is int for layer in dense)):
        raise CheckpointError(f"config.json: mlp_only_layers={quoted(dense)} is not a list of layers")
    layers = range(content["num_hidden_layers"])
    return tuple(layer not in (dense or []) and (layer + 1) % step == 0 for layer in layers)


WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


def windows_by_layer(content: Content, windowed: Callable[[int, int], bool] = operator.ge) -> tuple[int | None, ...]:
    """Windows as Qwen names them: of layers from max_window_layers on, unless layer_types says of which.

    windowed  (layer, max_window_layers) -> True for a layer with a window, in a family with another rule
    """
    layers, first, window = content["num_hidden_layers"], content["max_window_layers"], window_of(content)
    if not flag(content, "use_sliding_window"):
        window = None
    if type(first) is not int or first < 0:
        raise CheckpointError(f"config.json: max_window_layers={quoted(first)} is not an integer of at least 0")
    if content.get("layer_types") is None:
        return tuple(window if windowed(layer, first) else None for layer in range(layers))
    return windows_of_types(content, window)


def windows_of_pattern(content: Content, period: int, first: int | None = None) -> tuple[int | None, ...]:
    """Windows of a family in which every period-th layer has none, unless layer_types says which.

    first  of the layers without a window; None: the last one of each period
    """
    if content.get("layer_types") is None:
        kinds, whole = ("sliding_attention", "full_attention"), period - 1 if first is None else first
        layers = range(content["num_hidden_layers"])
        content = {**content, "layer_types": [kinds[layer % period == whole] for layer in layers]}
    return windows_of_types(content, window_of(content))


def windows_of_types(content: Content, window: int | None) -> tuple[int | None, ...]:
    """Windows by layer_types."""
    layers, types = content["num_hidden_layers"], content["layer_types"]
    if not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(f"config.json: layer_types={quoted(types)} is not a list of num_hidden_layers={layers}")
    # Two names of one type.
    known = {"full_attention": None, "attention": None, "sliding_attention": window}
    for index, kind in enumerate(types):
        if not isinstance(kind, str) or kind not in known:
            raise CheckpointError(
                f"config.json: layer_types[{index}]={quoted(kind)} is not supported; weft runs 'full_attention' and "
                f"'sliding_attention'"
            )
        if kind == "sliding_attention" and window is None:
            raise CheckpointError(
                f"config.json: layer_types[{index}]='sliding_attention' has no window; set sliding_window to its tokens"
                f"{', and use_sliding_window to true' if 'use_sliding_window' in content else ''}"
            )
    return tuple(known[kind] for kind in types)
