"""Decoder over all ranks of a team: embedding, layers of attention and MLP, head.

A recipe of weft.parallel computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from weft.arguments import check_choice, quoted
from weft.kernels.fp8 import E4M3, check_e4m3
from weft.layers import TPMLP, MoE, TPAttention
from weft.layers.delta_net import TPGatedDeltaNet
from weft.layers.latent_attention import LatentAttention
from weft.layers.moe import Layout, check_layout
from weft.layers.norm import RMSNorm
from weft.models.adapters import load_adapters
from weft.models.cache_scales import read_scale, scale_names
from weft.models.checkpoint import Checkpoint, Progress
from weft.models.config import DTYPES, DecoderConfig
from weft.models.dummy import fill_dummy
from weft.models.invariant import check_invariant
from weft.models.layer_sizes import layer_of
from weft.models.memory import check_memory
from weft.models.mtp_layouts import is_of_head
from weft.models.stacked_experts import as_stored
from weft.ops.attention.mla_decode_attention import check_latent_sizes
from weft.ops.attention.qk_norm_rope import check_head_dim
from weft.ops.collectives.fp8_wire import WIRES
from weft.ops.linear_attention.delta_rule import DeltaSizes, check_head_dims
from weft.ops.linear_attention.sequence_chunks import SequenceChunks
from weft.parallel.adapters import with_adapters
from weft.parallel.delta_states import DeltaStates
from weft.parallel.modes import Mode, mode_named
from weft.parallel.quantized import Formats
from weft.parallel.recipe import StepPlan
from weft.parallel.rotary import rotary_angles
from weft.parallel.sharding import Shard, under
from weft.parallel.step import LatentCache, PagedCache, Step
from weft.parallel.step_plan import plan_step
from weft.parallel.tensors import LayerWeights, NormWeights, tensor_of
from weft.parallel.vocabulary import VocabParallelEmbedding, VocabParallelHead
from weft.runtime.copying import to_device
from weft.runtime.logs import logger_of

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

DEFAULT_PAGE_SIZE, DEFAULT_SLOTS = 64, 64
# Of a layer, in WeightNames and in LayerWeights.
NORMS = ("input_norm", "post_norm", "attention_out_norm", "mlp_out_norm")
# Of TPAttention, by the same names in a configuration and in its AttentionOptions.
SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
OPTIONS = ("inputs", "qk_norm", "norm_all_heads", "bias", "output_bias", "scale", "softcap", "sinks", "gated")
logger = logger_of(__name__)


class Tap(NamedTuple):
    """Hidden states that forward passes hand over.

    layers  whose inputs are taken, by index; or the number of layers alone: the normed output of the last one
    take    called in each pass with the hidden states of the layers in their order, and the step: of inputs this rank's rows,
            of the output all
    """

    layers: tuple[int, ...]
    take: Callable[[list[torch.Tensor], Step], None]


class DecoderLayer(nn.Module):
    """One rank's share of a layer: norm, attention, norm, MLP."""

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        *,
        team: Team,
        mode: Mode,
        dtype: torch.dtype,
        layout: Layout | None,
        context_parallel: bool,
    ) -> None:
        super().__init__()
        self.names, self.block = config.family.weights, config.block
        prefix, quantization = f"{self.names.layers}.{index}", config.quantization
        attention, mlp, net = (
            None if quantization is None else quantization.formats(f"{prefix}.{name}", self.names.joined)
            for name in (self.names.attention, self.names.mlp, self.names.linear_attention)
        )
        block = config.block
        self.input_norm, self.post_norm = (_norm(config, team, dtype) if block.norms_before else None for _ in range(2))
        self.attention_out_norm, self.mlp_out_norm = (
            _norm(config, team, dtype) if block.norms_after else None for _ in range(2)
        )
        self.self_attn = self.linear_attn = None
        if config.has_state(index):
            linear = config.linear_attention
            self.linear_attn = TPGatedDeltaNet(
                hidden_size=config.hidden_size,
                whole=DeltaSizes(linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim),
                taps=linear.taps,
                rms_norm_eps=config.rms_norm_eps,
                joined=linear.joined,
                team=team,
                dtype=dtype,
                formats=net,
            )
        else:
            self.self_attn = _attention(config, index, team, mode, dtype, context_parallel, attention)
        self.mlp = _feed_forward(config, index, layout, team=team, mode=mode, dtype=dtype, formats=mlp)

    @property
    def mixer(self) -> TPAttention | LatentAttention | TPGatedDeltaNet:
        """The layer's attention, of either kind."""
        return self.self_attn if self.linear_attn is None else self.linear_attn

    def shards(self) -> dict[str, Shard]:
        name = self.names.attention if self.linear_attn is None else self.names.linear_attention
        shards = under(name, self.mixer.shards()) | under(self.names.mlp, self.mlp.shards())
        for name in NORMS:
            norm = getattr(self, name)
            shards |= {} if norm is None else under(getattr(self.names, name), norm.shards())
        return shards

    @property
    def weights(self) -> LayerWeights:
        norms = {name: getattr(self, name) for name in NORMS}
        return LayerWeights(
            attention=self.mixer.weights,
            mlp=self.mlp.weights,
            **{name: None if norm is None else NormWeights.of(norm) for name, norm in norms.items()},
            residual_scale=self.block.residual_scale,
        )


class Decoder(nn.Module):
    """Token ids → logits, over all ranks of `team`.

    Collective: all ranks call a method with the same tokens.

    mode   "reference", "sequence_parallel", "replicated", "invariant" (docs/same-bits.md), or "auto", which chooses between
           the second and the third by the number of tokens
    fused  local work between the GEMMs in weft's kernels, if not False. Mode "reference" never is
    expert_layout, kv_cache_dtype, quantization  as of EngineConfig
    context_parallel  the KV cache is spread over the ranks by pages, and not by heads (weft.parallel.context); not in mode
           "reference". Page tables of such a model have an entry for a page of each rank
    wire   "same", "fp8" or "auto", as of ``weft.ops.all_reduce``: sums over the ranks travel in fp8, but for the embedding's
           (docs/quantization.md); of dense models in 16 bits, within a node, in no mode "reference" or "invariant"
    layers  of a stage of a pipeline (weft.engine.pipeline); None: all. Only the first stage has an embedding, and only
           the last one a norm and a head
    tap    set it to take hidden states of each pass; None: none are taken
    adapters  names of the adapters that `load_adapters` has read

    Logits are this rank's [n, V'/W], in fp32, or in a fused pass in the model's dtype; `lm_head.argmax` and `lm_head.gather`
    bring them together.
    For inference: its weights carry no gradients. ValueError where W does not divide heads or intermediate size, or no kernel
    takes such heads; ModelTooLarge where the weights do not fit.
    """

    def __init__(
        self,
        config: DecoderConfig,
        team: Team,
        *,
        mode: Mode = "auto",
        dtype: torch.dtype | None = None,
        fused: bool | None = None,
        expert_layout: Layout | None = None,
        kv_cache_dtype: str = "auto",
        context_parallel: bool = False,
        layers: range | None = None,
        quantization: str | None = None,
        wire: str = "same",
    ) -> None:
        super().__init__()
        dtype, config = dtype or config.dtype, config.quantized(quantization)
        layout = _expert_layout(config, expert_layout, team)
        _check_dtype(config, dtype, team)
        self.config, self.team, self.mode, self.dtype = config, team, mode_named(mode), dtype
        self.fused, self.expert_layout = fused, layout
        self.send_sums(wire)
        self._sizes = layer_of(config, team.size, layout == "slices", dtype.itemsize)
        self.adapters: tuple[str, ...] = ()
        if self.mode == "invariant":
            check_invariant(config, dtype, fused)
        self.context_parallel = context_parallel and team.size > 1
        if self.context_parallel and self.mode in ("reference", "invariant"):
            raise ValueError(
                f"context_parallel=True: mode={mode!r} keeps the cache split by heads; choose another mode"
            )
        if kv_cache_dtype == "fp8" and config.attention.latent is not None:
            raise ValueError("kv_cache_dtype='fp8': a cache of latents has the dtype of the weights; leave it out")
        self.cache_dtype = E4M3 if kv_cache_dtype == "fp8" else dtype
        self.cache_scales: torch.Tensor | None = None  # [layers with keys, 2] of a checkpoint
        # Local work runs in weft's kernels, not in torch's: the same for passes of any length.
        self.runs_kernels = self.plan(1).fused
        if self.runs_kernels:
            self._check_kernels()
        self.span = range(config.num_hidden_layers) if layers is None else layers
        self.is_first, self.is_last = self.span.start == 0, self.span.stop == config.num_hidden_layers
        check_memory(config, team, dtype, self.span)
        sharded = {"team": team, "mode": mode, "dtype": dtype}
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, **sharded, layout=layout, context_parallel=self.context_parallel)
            for index in self.span
        )
        self._make_ends(sharded)
        sizes = config.max_position_embeddings, config.head_dim
        tables = tuple(rotary_angles(*sizes, rotary, team.device) for rotary in config.rotaries)
        self.angles = tables[0] if len(tables) == 1 else tables
        self.tap: Tap | None = None

    def _check_kernels(self) -> None:
        """ValueError for sizes and caches that no kernel takes."""
        config = self.config
        if (latent := config.attention.latent) is None:
            check_head_dim(config.head_dim, "; pass fused=False")
        else:
            check_latent_sizes(latent.kv_lora_rank, latent.qk_rope_head_dim, "; pass fused=False")
        if (linear := config.linear_attention) is not None:
            check_head_dims(linear.key_dim, linear.value_dim, linear.taps)
        if self.cache_dtype == E4M3:
            check_cache_dtype(self.dtype, self.team)

    def _make_ends(self, sharded: dict[str, Any]) -> None:
        """Make the embedding of a first stage, the norm and the head of a last one."""
        config, block = self.config, self.config.block
        vocabulary = config.vocab_size, config.hidden_size
        self.norm = _norm(config, self.team, self.dtype) if self.is_last else None
        self.embed_tokens = VocabParallelEmbedding(*vocabulary, **sharded) if self.is_first else None
        self.lm_head = VocabParallelHead(*vocabulary, **sharded) if self.is_last else None
        if config.tie_word_embeddings and self.is_first and self.is_last:
            self.lm_head.weight = self.embed_tokens.weight
        if self.is_first and (scale := block.embedding_scale) is not None:
            rounded = block.embedding_scale_rounded
            self.embed_tokens.scale = float(torch.tensor(scale).to(self.dtype)) if rounded else scale
        if self.is_last:
            self.lm_head.divisor, self.lm_head.softcap = block.logits_divisor, block.logits_softcap

    @classmethod
    def from_pretrained(
        cls,
        directory: str | PathLike[str] | Checkpoint,
        team: Team,
        *,
        progress: Progress | None = None,
        **options: Any,
    ) -> Decoder:
        """Model of a checkpoint directory, this rank's slices cast to `dtype` (None: the checkpoint's own).

        Its family is the one of the checkpoint's model_type. Warnings as of `load`. options: of the model.
        """
        checkpoint = directory if isinstance(directory, Checkpoint) else Checkpoint(directory)
        model = cls(DecoderConfig.of(checkpoint), team, **options)
        for line in model.load(checkpoint, progress):
            if team.rank == 0:
                logger.warning(line)
        return model

    def load(
        self, checkpoint: Checkpoint, progress: Progress | None = None, whole_team: Team | None = None
    ) -> list[str]:
        """Read this rank's slices and return warnings, a line each, of NaN and of unused tensors. Collective.

        whole_team  ranks that have the model together, where this one is a stage of a pipeline; None: this team's
        """
        shards, team, weights = self.shards(), whole_team or self.team, self.config.family.weights
        if self.config.experts is not None:
            shards = as_stored(shards, checkpoint, weights, self.config.experts.num_experts)
        of_ranks = team.exchange(checkpoint.load(shards, progress, weights.joined))
        odd = {name for names in of_ranks for name in names}
        # A tied head is in some checkpoints twice, with equal values. Other ranks may hold other experts or layers.
        known = dict.fromkeys(name for names in (tuple(shards), *team.exchange(tuple(shards))) for name in names)
        scales = self._read_cache_scales(checkpoint)
        used = known.keys() | {*scales, f"{weights.head}.weight"}
        # Of an MTP head, which is read where it drafts.
        heads, names = self.config.num_hidden_layers, checkpoint.unused(used, weights.joined)
        unused = [name for name in names if not is_of_head(name, heads)]
        dtype = str(self.dtype).removeprefix("torch.")
        warned = {
            f"NaN or infinite weights in {dtype}, so answers mean nothing": [name for name in known if name in odd],
            "scales of an fp8 KV cache, which only kv_cache_dtype='fp8' uses": scales
            if self.cache_scales is None
            else (),
            "tensors beside the text model, which weft leaves out": checkpoint.left_out(),
            "tensors that this model does not have, and does not use": unused,
        }
        return [f"{checkpoint.directory}: {what}: {_listed(names)}" for what, names in warned.items() if names]

    def _read_cache_scales(self, checkpoint: Checkpoint) -> list[str]:
        """Names of the scales of keys and values of all layers; reads this rank's for a cache in fp8."""
        weights = self.config.family.weights
        attending = [at for at in range(self.config.num_hidden_layers) if not self.config.has_state(at)]
        names = scale_names(checkpoint, weights, attending)
        if names and self.cache_dtype == E4M3:
            own = scale_names(checkpoint, weights, [at for at in attending if at in self.span])
            values = [read_scale(checkpoint, name) for name in own]
            self.cache_scales = torch.tensor(values, device=self.team.device).view(-1, 2)
        return names

    def fill_dummy(self) -> Decoder:
        """Fill with random weights and return self.

        Matrices and biases N(0, 0.02), biases of q, k and v N(0, 0.1), norms 1 and 5 % noise. A rank has the same weights on
        every run, and all ranks the same norms and routers. Another world size is another model, and so is another number of
        stages; in mode "invariant" every world size has the same model.
        """
        fill_dummy(self.shards(), self.team, whole=self.mode == "invariant")
        return self

    def load_adapters(self, directories: Mapping[str, str | PathLike[str]]) -> None:
        """Read adapters by name; a Step holds their numbers. ValueError for what weft does not run.

        From then on passes have the recipe of weft.parallel.adapters.
        """
        if self.mode in ("reference", "invariant"):
            raise ValueError(f"lora with mode={self.mode!r}: it runs no adapters; choose another mode")
        if self.wire != "same":
            raise ValueError(f"lora with wire={self.wire!r}: sums with adapters travel in 16 bits; leave out one")
        load_adapters(
            directories,
            zip(self.span, self.layers, strict=True),
            self.config.family.weights,
            dtype=self.dtype,
            whole=self.is_first and self.is_last,
        )
        self.adapters = tuple(directories)

    def shards(self) -> dict[str, Shard]:
        """Name of a tensor in a checkpoint → this rank's part of it."""
        names, tied = self.config.family.weights, self.config.tie_word_embeddings
        shards = under(names.embedding, self.embed_tokens.shards()) if self.is_first else {}
        for index, layer in zip(self.span, self.layers, strict=True):
            shards |= under(f"{names.layers}.{index}", layer.shards())
        if self.is_last:
            shards |= under(names.norm, self.norm.shards())
            if not tied or not self.is_first:
                shards |= under(names.embedding if tied else names.head, self.lm_head.shards())
        return shards

    def plan(self, tokens: int) -> StepPlan:
        """Plan of a forward pass of `tokens` tokens; its text says what runs and why."""
        plan = plan_step(
            tokens,
            mode=self.mode,
            hidden_size=self.config.hidden_size,
            dtype=self.dtype,
            team=self.team,
            fused=self.fused,
            layer=self._sizes,
        )
        if self.adapters:
            reason = f"{plan.reason}; adapters are added after each GEMM, so nothing is fused with one"
            plan = replace(plan, recipe=with_adapters(plan.recipe, self.team), reason=reason)
        if self.config.block.residual_scale is not None:  # of whole sums
            plan = plan.of_single_layers()
        if self.wire != "same" and self.team.size > 1:
            plan = replace(plan, recipe=plan.recipe.with_wire(self.wire))
        if self.config.attention.latent is not None and plan.fused:
            plan = replace(plan, reason=f"{plan.reason}; prompts attend to expanded latents by torch's operations")
        quantization = self.config.quantization
        if quantization is None or not quantization.format.static_inputs:
            return plan
        # A static scale is of normed rows.
        return replace(plan, recipe=plan.recipe.without_deferred_scale())

    def send_sums(self, wire: str) -> None:
        """Let sums over the ranks travel as ``wire`` says. ValueError where they cannot."""
        check_choice("wire", wire, WIRES)
        self.wire, asked = wire, f"wire={quoted(wire)}"
        if wire == "same":
            return
        for is_so, what in (
            (self.mode in ("reference", "invariant"), f"mode={self.mode!r}, whose sums travel in their dtype"),
            (self.dtype.itemsize != 2, f"dtype={self.dtype}: it is for bfloat16 and float16"),
            (self.config.experts is not None, "a mixture of experts, whose sums have no such form"),
            (self.team.rail is not None, f"a team of {self.team.shape}: it is for one node"),
        ):
            if is_so:
                raise ValueError(f"{asked} with {what}; leave wire out")
        check_e4m3(asked, self.team.caps)

    def new_cache(
        self,
        pages: int,
        page_size: int = DEFAULT_PAGE_SIZE,
        slots: int = DEFAULT_SLOTS,
        drafts: int = 0,
        snapshots: int = 0,
    ) -> PagedCache:
        """Cache of these pages.

        slots, drafts, snapshots  of sequences' states, in models with gated delta nets, as of DeltaStates
        """
        where = {"device": self.team.device}
        latent = self.config.attention.latent
        kind, width = (PagedCache, self.config.head_dim) if latent is None else (LatentCache, latent.width)
        sizes = len(self.attentions), pages, self.attentions[0].num_kv_heads, page_size, width
        cache = kind(*sizes, dtype=self.cache_dtype, scales=self.cache_scales, **where)
        if nets := [layer.linear_attn for layer in self.layers if layer.linear_attn is not None]:
            has_state = [layer.linear_attn is not None for layer in self.layers]
            sizes = nets[0].sizes, nets[0].conv1d.shape[1]
            numbers = {"drafts": drafts, "snapshots": snapshots}
            cache.states = DeltaStates(has_state, slots, *sizes, **numbers, dtype=self.dtype, **where)
        return cache

    @property
    def attentions(self) -> list[TPAttention | LatentAttention]:
        """Attentions of the layers that have keys and values."""
        return [layer.self_attn for layer in self.layers if layer.self_attn is not None]

    @property
    def has_states(self) -> bool:
        """True if some layers have a state in place of keys and values."""
        return self.config.linear_attention is not None

    @property
    def prefills_in_kernels(self) -> bool:
        """True if attention of prompts takes lengths from the device; else the host knows each prompt's."""
        return self.runs_kernels and self.config.attention.latent is None

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.attentions[0].group

    @property
    def window(self) -> int | None:
        """Most tokens that a token attends to in any layer; None: all before it."""
        windows = [attention.window for attention in self.attentions]
        return None if None in windows else max(windows)

    @property
    def _spread_over(self) -> Team | None:
        return self.team if self.context_parallel else None

    def decode_step(self, positions: torch.Tensor, pages: torch.Tensor, page_size: int = DEFAULT_PAGE_SIZE) -> Step:
        """One new token of each sequence at positions[B] int64, -1: padding. pages: [B, max_pages] int32.

        Made on the device from values there, so it may be captured in a CUDA graph.
        """
        kv_heads = self.attentions[0].num_kv_heads
        plan = self.plan(len(positions))
        step = Step.decode(positions, pages, page_size, self.angles, plan, kv_heads, self._spread_over)
        return self._with_states(step, len(positions))

    def verify_step(
        self,
        positions: torch.Tensor,
        pages: torch.Tensor,
        page_size: int = DEFAULT_PAGE_SIZE,
        states: DeltaStates | None = None,
    ) -> Step:
        """Several new tokens of each sequence, at positions[B, n] int64 that follow each other; -1: padding.

        A token attends to earlier tokens of its row, too. pages and captures as of `decode_step`.
        states  of the cache, in models with gated delta nets, for as many drafts
        """
        kv_heads, (batch, queries) = self.attentions[0].num_kv_heads, positions.shape
        plan = self.plan(positions.numel())
        places = positions.flatten(), pages, page_size, self.angles, plan, kv_heads, self._spread_over
        step = Step.decode(*places, queries=queries)
        if states is None:
            return step
        slots, pending = states.verified(batch)
        return replace(step, state_slots=slots, state_pending=pending, most_pending=states.drafts)

    def prefill_step(
        self,
        spans: Sequence[tuple[int, int]],
        pages: torch.Tensor,
        page_size: int = DEFAULT_PAGE_SIZE,
        slots: Sequence[int] | None = None,
    ) -> Step:
        """Sequence b goes on by `length` tokens after `before` cached ones, (before, length) = spans[b].

        slots  of the sequences' states, in models with gated delta nets; None: sequence b has slot b, as in `decode_step`
        """
        tokens = sum(length for _, length in spans)
        plan = self.plan(tokens)
        spread_over = None if self._spread_over is None else (self._spread_over, self.window)
        step = Step.prefill(spans, pages, page_size, self.angles, plan, self.group, self.dtype, spread_over)
        return self._with_states(step, len(spans), slots, spans)

    def _with_states(
        self,
        step: Step,
        sequences: int,
        slots: Sequence[int] | None = None,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> Step:
        """The step, with the slots of its sequences' states."""
        device = self.team.device
        if not self.has_states:
            return step
        if spans is not None and step.plan.fused:
            chunks = SequenceChunks.make(spans, list(range(sequences)) if slots is None else slots).to(device)
            return replace(step, state_slots=chunks.slots, state_chunks=chunks)
        if slots is None:
            return replace(step, state_slots=torch.arange(sequences, dtype=torch.int32, device=device))
        return replace(step, state_slots=to_device(slots, device, torch.int32))

    def forward(
        self, tokens: torch.Tensor, step: Step, cache: PagedCache, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """tokens[T] → logits [n, V'/W] after the tokens `rows` [n] (None: after each token).

        Keys and values go into `cache`. Shapes depend on the step's alone, and the host reads nothing: it can be captured in a
        CUDA graph, after one call outside.
        """
        return self.logits(*self.hidden(tokens, step, cache), step, rows)

    def logits(self, x: Any, residual: Any, step: Step, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [n, V'/W] after the tokens `rows`, from what `hidden` returns."""
        if self.taps_output:
            normed = self.output(x, residual, step)
            normed = normed if rows is None else normed[rows]
            return step.plan.recipe.local.logits(normed, self.lm_head.weights)
        recipe = step.plan.recipe.of_head(step.tokens if rows is None else len(rows))
        return recipe.logits(x, residual, NormWeights.of(self.norm), self.lm_head.weights, step, rows)

    @property
    def taps_output(self) -> bool:
        """True if the normed output of the last layer is taken."""
        return self.tap is not None and self.config.num_hidden_layers in self.tap.layers

    def output(self, x: Any, residual: Any, step: Step) -> torch.Tensor:
        """Normed output [T, H] of the last layer, from what `hidden` returns, which its tap takes."""
        recipe = step.plan.recipe.without_deferred_scale()
        normed = recipe.last_norm(x, residual, NormWeights.of(self.norm), step, None)
        self.tap.take([normed], step)
        return normed

    def hidden(self, given: torch.Tensor, step: Step, cache: PagedCache) -> tuple[Any, Any]:
        """(output, residual) of the last layer here, as the step's recipe has them.

        given  tokens[T]; to a later stage of a pipeline the rows that the stage before hands over

        Keys and values go into `cache`.
        """
        recipe, residual = step.plan.recipe, None
        if cache.states is not None and step.state_slots is not None:
            cache.states.check_holds(step.state_slots)
        if step.is_prefill and step.spread is not None:
            caches = [cache.layer(index) for index, layer in enumerate(self.layers) if layer.self_attn is not None]
            step = replace(step, spread=step.spread.ahead_of(self.attentions[0].weights, caches))
        x = recipe.embed(given, self.embed_tokens.weights) if self.is_first else recipe.take_over(given, step.tokens)
        tapped: list[Any] = []
        for index, layer in enumerate(self.layers):
            inputs = tapped if self.tap is not None and index in self.tap.layers else None
            x, residual = recipe.decoder_layer(x, residual, layer.weights, step, cache.layer(index), inputs)
        if tapped:
            self.tap.take([tensor_of(rows) for rows in tapped], step)
        return x, residual

    def hand_over(self, x: Any, residual: Any, step: Step) -> torch.Tensor:
        """This rank's rows [ceil(T / W), H] for the next stage, from what `hidden` returns."""
        return step.plan.recipe.hand_over(x, residual, self.layers[-1].weights)


def check_cache_dtype(dtype: torch.dtype, team: Team) -> None:
    """ValueError unless kernels take an fp8 cache beside weights of ``dtype`` here."""
    if dtype.itemsize != 2:
        raise ValueError(f"kv_cache_dtype='fp8' with dtype={dtype}: it is for bfloat16 and float16; pass 'auto'")
    check_e4m3("kv_cache_dtype='fp8'", team.caps)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _attention(
    config: DecoderConfig,
    index: int,
    team: Team,
    mode: Mode,
    dtype: torch.dtype,
    context_parallel: bool,
    formats: Formats | None,
) -> TPAttention | LatentAttention:
    """Attention of a layer."""
    if (latent := config.attention.latent) is not None:
        return LatentAttention(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            sizes=latent,
            team=team,
            mode=mode,
            dtype=dtype,
            formats=formats,
        )
    options, rotary = config.attention, config.rotary_of(index)
    return TPAttention(
        **{name: getattr(config, name) for name in SIZES},
        **{name: getattr(options, name) for name in OPTIONS},
        unrotated=config.rotaries.index(None) if options.norm_after_rotary else None,
        norm_names=config.family.weights.head_norms,
        one_plus_norms=config.block.one_plus_norms,
        window=options.window(index),
        rotated=None if rotary is None else rotary.elements(config.head_dim),
        interleaved=options.interleaved and rotary is not None,
        rotary=config.rotaries.index(rotary),
        team=team,
        mode=mode,
        dtype=dtype,
        context_parallel=context_parallel,
        formats=formats,
    )


def _norm(config: DecoderConfig, team: Team, dtype: torch.dtype) -> RMSNorm:
    one_plus = config.block.one_plus_norms
    return RMSNorm(config.hidden_size, config.rms_norm_eps, team=team, dtype=dtype, one_plus=one_plus)


def _check_dtype(config: DecoderConfig, dtype: torch.dtype, team: Team) -> None:
    """ValueError for a dtype in which weft does not run the model."""
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype={dtype} is not supported; pass one of {', '.join(map(str, DTYPES.values()))}")
    if config.quantization is not None and dtype.itemsize != 2 and team.device.type == "cuda":
        raise ValueError(
            f"dtype={dtype} with weights in {config.quantization.format.name}: they run in bfloat16 and float16; pass one, or "
            f"leave it out"
        )


def _expert_layout(config: DecoderConfig, layout: Layout | None, team: Team) -> Layout | None:
    """Layout of the experts, as asked for or by their number; None for a model without experts.

    ValueError for one that does not fit.
    """
    if config.experts is None:
        if layout is not None:
            raise ValueError(f"expert_layout={quoted(layout)}, but this model has no experts; leave it out")
        return None
    if layout is None:
        return "whole" if config.experts.num_experts % team.size == 0 else "slices"
    check_layout("expert_layout", layout, team.size)
    return layout


def _feed_forward(config: DecoderConfig, index: int, layout: Layout | None, **options: Any) -> TPMLP | MoE:
    """MLP of a layer, or its experts."""
    experts, names = config.experts, config.family.weights
    shared = {"hidden_size": config.hidden_size, **options}
    if not config.has_experts(index):
        activation = config.block.activation
        return TPMLP(intermediate_size=config.intermediate_size, activation=activation, **shared)
    return MoE(
        **{one.name: getattr(experts, one.name) for one in fields(experts) if one.name != "layers"},
        layout=layout,
        projections=names.projections,
        router_name=names.router,
        router_bias_name=names.router_bias,
        shared_name=names.shared_expert,
        **shared,
    )
