"""Configuration of a decoder: from a config.json, or that of a published model by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.arguments import quoted
from weft.errors import CheckpointError
from weft.models import generation, refusals
from weft.models.checkpoint import Checkpoint
from weft.models.families import FAMILIES, PUBLISHED, family_of, published
from weft.models.family import (
    AttentionOptions,
    BlockOptions,
    ExpertOptions,
    Family,
    LinearAttentionOptions,
    count_of,
    number_of,
)
from weft.models.hub import find_checkpoint
from weft.models.multimodal import check_architecture, text_config
from weft.models.quantization import Quantization, modelopt_file
from weft.parallel.rotary import NtkAlpha, Rotary
from weft.parallel.step_plan import Mode, mode_named
from weft.runtime.logs import logger_of

logger = logger_of(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Keys of config.json without effect on what weft computes, by the reason. Nor has a key that begins with "_", or an unknown one
# whose value asks for nothing (null, false, 0 or empty).
WITHOUT_EFFECT = {
    "naming": (
        "finetuning_task",
        "is_composition",
        "is_decoder",
        "is_llama_config",
        "name_or_path",
        "transformers_version",
    ),
    "code": ("auto_map",),
    "lengths": ("max_sequence_length", "model_max_length", "seq_length"),  # max_position_embeddings counts
    "provenance": ("internal_version", "unsloth_fixed", "unsloth_version"),
    "windows": ("max_window_layers",),  # use_sliding_window counts, in a family that reads this
    "towers": ("pixel_shuffle_factor",),
    "training": (
        "attention_dropout",
        "embd_pdrop",
        "embedding_initializer_range",
        "gradient_checkpointing",
        "initializer_range",
        "loss_type",
        "neftune_noise_alpha",
        "resid_pdrop",
        "residual_dropout",
        "router_aux_loss_coef",
        "router_jitter_noise",
    ),
    "outputs": (
        "keys_to_ignore_at_inference",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "tie_last_hidden_states",
        "torchscript",
        "use_return_dict",
    ),
    "classification": ("id2label", "label2id", "num_labels", "problem_type"),
    "drafts": ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"),  # a head's tensors count
    "pipelines": ("task_specific_params",),
    "tokenizer": (
        "bos_token_id",
        "cls_token_id",
        "decoder_start_token_id",
        "eod_token_id",
        "mask_token_id",
        "pad_token_id",
        "sep_token_id",
        "tokenizer_class",
        "unk_token_id",
    ),
    "speed": ("attn_implementation", "pretraining_tp", "use_bfloat16", "use_cache"),
    "other frameworks": ("tf_legacy_loss", "transformers.js_config"),
}
KNOWN = {name for names in WITHOUT_EFFECT.values() for name in names}

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Bits of sizes for which tables are made as a configuration is read; 31 of the rest.
MOST_BITS = {"num_hidden_layers": 16, "head_dim": 16}
# Keys that weft reads of every family; eos_token_id in Checkpoint.
READ = {
    "model_type", *SIZES, "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling",
    "max_position_embeddings", "tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id", "architectures",
    "quantization_config",
}  # fmt: skip

# Keys that may have these values and no other ones, in families that do not say otherwise.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),  # two names of one function
    "activation": ("swiglu", "silu", "swish", None),  # of the MLP with its gate; transformers reads hidden_act alone
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "qkv_bias": (False, None),
    "use_sliding_window": (False, None),
    "use_mrope": (False, None),
    "rope_interleaved": (False, None),
    "is_causal": (True,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "chunk_size_feed_forward": (0, None),
    "partial_rotary_factor": (1.0, None),
    "mtp_use_dedicated_embeddings": (False, None),
}

# Keys of rope_parameters that do not count beside alpha (Family.ntk_alpha).
BESIDE_ALPHA = {"rope_type", "type", "alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}

# Largest models on virtual ranks, whose kernels are interpreted: SmolLM2 of 0.135 billion parameters takes half a minute of CPU
# time for three tokens on one rank. Mode "reference" computes with torch's operations alone: 4 of its tokens a second.
SIMULATED_PARAMETERS = 200_000_000
SIMULATED_REFERENCE_PARAMETERS = 2_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a decoder, under the names of config.json.

    quantization  of matrices in 8 or 4 bits; None: all are in `dtype`
    max_position_embeddings  with YaRN, its positions: factor * original_max_position_embeddings
    rotary, window_rotary  rotary embedding, and that of layers with a window where it is another one
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rotary: Rotary
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: torch.dtype
    attention: AttentionOptions
    window_rotary: Rotary | None = None
    block: BlockOptions = BlockOptions()
    experts: ExpertOptions | None = None
    linear_attention: LinearAttentionOptions | None = None
    quantization: Quantization | None = None

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.in_layer(layer)

    def has_state(self, layer: int) -> bool:
        """True for a layer with a gated delta net, which has a state in place of keys and values."""
        return self.linear_attention is not None and self.linear_attention.layers[layer]

    def rotary_of(self, layer: int) -> Rotary | None:
        """Rotary embedding of a layer; None: it has none."""
        if not self.attention.rotated[layer % len(self.attention.rotated)]:
            return None
        windowed = self.window_rotary is not None and self.attention.window(layer) is not None
        return self.window_rotary if windowed else self.rotary

    @property
    def rotaries(self) -> tuple[Rotary | None, ...]:
        """The different rotary embeddings of the layers."""
        of_layers = map(self.rotary_of, range(self.num_hidden_layers))
        # Where norms come after the rotary embedding, kernels norm without turning.
        return tuple(dict.fromkeys((*of_layers, None) if self.attention.norm_after_rotary else of_layers))

    def weight_bytes(self, layers: range, dtype: torch.dtype) -> int:
        """Bytes of the matrices of consecutive layers, in `dtype` where they are not quantized."""
        whole = self.parameters_of(layers)
        if self.quantization is None:
            return whole * dtype.itemsize
        # All other matrices of the layers count as quantized: the routers are small.
        bits = self.quantization.format.bits
        kept = self._embeddings(layers) + (self._projections(layers) if bits < 8 else 0)
        return kept * dtype.itemsize + int((whole - kept) * bits / 8)

    def _projections(self, layers: range) -> int:
        """Number of weights before gated delta nets and gated attention, for which no 4 bits are made."""
        of_linear, columns = sum(map(self.has_state, layers)), 0
        if (linear := self.linear_attention) is not None:
            columns += of_linear * (linear.parameters - linear.value_heads * linear.value_dim)
        if self.attention.gated:
            of_head = 2 * (self.num_attention_heads + self.num_key_value_heads)
            columns += (len(layers) - of_linear) * of_head * self.head_dim
        return self.hidden_size * columns

    @property
    def parameters(self) -> int:
        """Number of weights in all matrices."""
        return self.parameters_of(range(self.num_hidden_layers))

    def parameters_of(self, layers: range) -> int:
        """Number of weights in the matrices of consecutive layers.

        The embedding counts with the first layer, the head with the last.
        """
        gates = self.num_attention_heads if self.attention.gated else 0
        attention, latents = self.head_dim * (2 * self.num_attention_heads + 2 * self.num_key_value_heads + gates), 0
        if (latent := self.attention.latent) is not None:
            attention, latents = 0, len(layers) * latent.parameters(self.hidden_size, self.num_attention_heads)
        mlp = (3 if self.block.gated else 2) * self.intermediate_size
        columns = len(layers) * (attention + mlp)
        if (linear := self.linear_attention) is not None:
            columns += sum(map(self.has_state, layers)) * (linear.parameters - attention)
        if self.experts is not None:
            of_experts = self.experts.num_experts * (3 * self.experts.intermediate_size + 1)
            of_experts += 3 * (self.experts.shared_intermediate_size or 0) + self.experts.shared_gate
            columns += sum(map(self.has_experts, layers)) * (of_experts - mlp)
        return self._embeddings(layers) + self.hidden_size * columns + latents

    def cached_elements(self, ranks: int = 1) -> int:
        """Elements of a token in the cache of one layer at a rank.

        ranks  that share out the KV heads; latents are of all heads
        """
        if self.attention.latent is not None:
            return self.attention.latent.width
        return 2 * max(self.num_key_value_heads // ranks, 1) * self.head_dim

    def _embeddings(self, layers: range) -> int:
        """Number of weights in the embedding and the head that come with consecutive layers."""
        first, last = layers.start == 0, layers.stop == self.num_hidden_layers
        return self.hidden_size * self.vocab_size * (1 if self.tie_word_embeddings and first else first + last)

    def quantized(self, name: str | None) -> DecoderConfig:
        """The same with weights quantized as they are read; None: as they are.

        name  of MADE in weft.models.quantization

        ValueError for another name, and for a checkpoint that has been quantized otherwise.
        """
        if name is None:
            return self
        made = Quantization.made(name)
        if self.quantization is None:
            return replace(self, quantization=made)
        form, method = self.quantization.format.name, self.quantization.method
        if name != form and self.quantization != made:
            raise ValueError(
                f"quantization={name!r}, but the weights are in {form} by quant_method={method!r}; leave it out"
            )
        return self

    @classmethod
    def named(cls, name: str) -> DecoderConfig:
        """Configuration of a published model, such as "qwen3-32b". ValueError for another name."""
        return cls.from_dict(published(name))

    @classmethod
    def find(cls, model: str) -> DecoderConfig:
        """Configuration of a published model by its name, or of a checkpoint. ValueError if there is none."""
        return cls.named(model) if model.lower() in PUBLISHED else cls.of(Checkpoint(find_checkpoint(model)))

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> DecoderConfig:
        """Configuration of a checkpoint, from its weights where config.json is silent or contradicts them.

        Follows transformers 5: without a dtype that of the first weight, and a head that differs from the embedding is a
        weight by itself, whatever tie_word_embeddings says.
        """
        content = checkpoint.config
        if content.get("dtype") is None and content.get("torch_dtype") is None:
            content = {**content, "dtype": checkpoint.dtype()}
        if not content.get("quantization_config") and (quantization := modelopt_file(checkpoint)):
            content = {**content, "quantization_config": quantization}
        config = cls.from_dict(content)
        if config.quantization is not None:
            config = replace(config, quantization=config.quantization.named_in(checkpoint))
        names = config.family.weights
        if config.tie_word_embeddings and checkpoint.differ(f"{names.embedding}.weight", f"{names.head}.weight"):
            return replace(config, tie_word_embeddings=False)
        return config

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> DecoderConfig:
        """Reads a config.json of transformers 4.x or 5.x; bfloat16 where it names no dtype.

        Of a multimodal model its text model is taken.

        CheckpointError (a ValueError) for a model of no family in FAMILIES, and for unknown keys and values.
        """
        content = text_config(content)
        if (family := family_of(model_type := content.get("model_type"))) is None:
            runs = f"weft runs {', '.join(map(repr, FAMILIES))}"
            if mechanism := refusals.lacked(model_type):
                runs = f"it has {mechanism}; docs/models.md lists what weft runs"
            raise CheckpointError(f"config.json: model_type={quoted(model_type)} is not supported; {runs}")
        quantization = Quantization.of(content.get("quantization_config"))
        check_architecture(content, family.architecture, repr(family.architecture), family.other_architecture)
        _check_keys(family, content)
        dtype = next((content[name] for name in ("dtype", "torch_dtype") if content.get(name) is not None), "bfloat16")
        if not isinstance(dtype, str) or dtype.removeprefix("torch.") not in DTYPES:
            raise CheckpointError(f"config.json: dtype={quoted(dtype)} is not supported; weft runs {', '.join(DTYPES)}")
        filled = {**family.defaults, **content}
        if not isinstance(tied := filled["tie_word_embeddings"], bool):
            raise CheckpointError(f"config.json: tie_word_embeddings={quoted(tied)} is not true or false")
        rotary, window_rotary = _rotaries(family, filled)
        sizes, attention = _sizes(family, filled), family.attention(filled)
        if attention.latent is not None:
            # One row of the cache for all heads; its rotary part is what rotary embedding counts as a head.
            sizes |= {"num_key_value_heads": 1, "head_dim": attention.latent.qk_rope_head_dim}
        for one in filter(None, (rotary, window_rotary)):
            try:
                one.frequencies(sizes["head_dim"], torch.device("cpu"), sizes["max_position_embeddings"])
            except ValueError as error:
                raise CheckpointError(f"config.json: {error}") from None
        positions = rotary.positions(sizes["max_position_embeddings"])
        return cls(
            model_type=family.model_type,
            **sizes | {"max_position_embeddings": min(positions, family.longest(filled) or positions)},
            rms_norm_eps=number_of(filled, "rms_norm_eps"),
            rotary=rotary,
            window_rotary=window_rotary,
            tie_word_embeddings=tied,
            dtype=DTYPES[dtype.removeprefix("torch.")],
            attention=attention,
            block=family.block(filled),
            experts=family.experts(filled),
            linear_attention=family.linear_attention(filled),
            quantization=quantization,
        )


def unreached_positions(checkpoint: Checkpoint) -> list[str]:
    """A line where sequences end before the positions that config.json names."""
    content = checkpoint.config
    family, config = family_of(content["model_type"]), DecoderConfig.from_dict(content)
    named = config.rotary.positions(content.get("max_position_embeddings", family.defaults["max_position_embeddings"]))
    if (most := config.max_position_embeddings) == named:
        return []
    return [f"config.json: sequences have up to {most:,} of {named:,} positions; weft does not compute the later ones"]


def _check_keys(family: Family, content: Mapping[str, Any]) -> None:
    """CheckpointError for a key of config.json that the family does not know, or not with this value."""
    supported = {**SUPPORTED, **family.supported}
    known = {*KNOWN, *family.without_effect, *supported, *generation.KEYS}
    for name, value in content.items():
        if name in READ or name in family.reads:
            continue
        if name in supported and value not in supported[name]:
            raise CheckpointError(
                f"config.json: {name}={quoted(value)} is not supported; weft runs {family.name} with {supported[name][0]!r}"
            )
        if name in known or name.startswith("_"):
            continue
        if value:
            raise CheckpointError(
                f"config.json: {quoted(name)[1:-1]}={quoted(value)} is a key that weft does not know; where it changes "
                f"nothing of {family.name}, remove it from config.json"
            )
        logger.debug("config.json: %s=%s is not known, and asks for nothing", quoted(name)[1:-1], value)


def _sizes(family: Family, content: Mapping[str, Any]) -> dict[str, int]:
    """Sizes in a config.json, with the family's defaults."""
    sizes = {name: content.get(name) for name in (*SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings")}

    def check(*names: str) -> None:
        for name in names:
            value, bits = sizes[name], MOST_BITS.get(name, 31)
            # A file may name positions without end: an Engine allocates for its max_seq_len.
            if type(value) is not int or value < 1 or (value >= 1 << bits and name != "max_position_embeddings"):
                raise CheckpointError(f"config.json: {name}={quoted(value)} is not a positive integer below 2**{bits}")

    check(*SIZES)
    hidden_size, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if sizes["num_key_value_heads"] is None:
        sizes["num_key_value_heads"] = heads
    if sizes["head_dim"] is None and (family.null_head_dim or family.defaults["head_dim"] is None):
        if hidden_size % heads:
            raise CheckpointError(
                f"config.json: hidden_size={hidden_size} is not a multiple of num_attention_heads={heads}, and there is no "
                f"head_dim; add it"
            )
        sizes["head_dim"] = hidden_size // heads
    check(*sizes)
    if sizes["head_dim"] % 2:
        raise CheckpointError(
            f"config.json: head_dim={sizes['head_dim']} is odd; rotary embedding takes halves of a head"
        )
    if heads % sizes["num_key_value_heads"]:
        raise CheckpointError(
            f"config.json: num_attention_heads={heads} is not a multiple of "
            f"num_key_value_heads={sizes['num_key_value_heads']}"
        )
    return sizes


def _rotaries(family: Family, content: Mapping[str, Any]) -> tuple[Rotary, Rotary | None]:
    """Rotary embedding in a config.json, and that of layers with a window where it is another one.

    transformers 5 keeps it in rope_parameters, 4.x beside a rope_scaling that is mostly null. In transformers 5 a rope_scaling
    replaces rope_parameters.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if content.get(name) is not None and not isinstance(content[name], Mapping):
            raise CheckpointError(f"config.json: {name}={quoted(content[name])} is not an object")
    name = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    # Empty parameters are the plain embedding, in place of the family's.
    assumed = family.defaults.get(name) if content.get(name) is None else None
    given, of_windows = content.get(name) or assumed or {}, family.window_rope(content)
    if of_windows is not None:
        given = given.get("full_attention") or {
            key: value for key, value in given.items() if key != "sliding_attention"
        }
    if given.get("rope_type", given.get("type")) == "longrope":
        given = _long_rope(given, content)
    alpha = None
    if family.ntk_alpha and given.get("rope_type", given.get("type")) == "dynamic" and given.get("alpha"):
        alpha, given = given["alpha"], {key: value for key, value in given.items() if key not in BESIDE_ALPHA}
    # Keys of rope_parameters, too, may change nothing; Ministral 3's repeat the key of the whole.
    unread = {*family.without_effect, "max_position_embeddings"}
    given = {key: value for key, value in given.items() if key not in unread}
    partly = "partial_rotary_factor" in family.reads
    common = {"rope_theta": content["rope_theta"]}
    if partly:
        common["partial_rotary_factor"] = _partial(family, content)
    try:
        rotary = Rotary.of({**common, **given}, name, partly=partly)
        if alpha is not None:
            rotary = replace(rotary, scaling=NtkAlpha(alpha=alpha))
        if of_windows is None:
            return rotary, None
        return rotary, Rotary.of({**common, **of_windows}, "rope_parameters of sliding_attention", partly=partly)
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from None


def _partial(family: Family, content: Mapping[str, Any]) -> float | None:
    """Part of a head that is rotated; None: the whole. MiniMax-M2's files name the number of elements."""
    if "partial_rotary_factor" in content or "rotary_dim" not in family.reads or content.get("rotary_dim") is None:
        return content.get("partial_rotary_factor")
    head_dim = count_of(content, "head_dim")
    return count_of(content, "rotary_dim", head_dim) / head_dim


def _long_rope(given: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of longrope with what Phi-3's config.json has beside them."""
    positions = content.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    given = {**given, "original_max_position_embeddings": positions}
    if given.get("factor") is None and type(positions) is int and positions > 0:
        given["factor"] = max(1.0, content["max_position_embeddings"] / positions)
    return given


def check_simulable(
    model: str, config: DecoderConfig, remedy: str, *, mode: Mode = "auto", reference: str | None = None
) -> None:
    """ValueError for a model too large for virtual ranks.

    model      its name in the message
    reference  how the caller asks for mode "reference", for the message; None: not at all
    """
    size = config.parameters
    limit = SIMULATED_REFERENCE_PARAMETERS if mode_named(mode) == "reference" else SIMULATED_PARAMETERS
    if size <= limit:
        return
    most = f"{limit / 1e9:g}"
    if reference is not None and limit < size <= SIMULATED_REFERENCE_PARAMETERS:
        most += f" ({SIMULATED_REFERENCE_PARAMETERS / 1e9:g} with {reference})"
    raise ValueError(
        f"{model} has {size / 1e9:.2g} billion parameters, and simulated ranks take at most {most}; {remedy}"
    )
