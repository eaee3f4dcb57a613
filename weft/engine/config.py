"""Options of an engine: parallel strategy, batch size, KV cache; functions that watch it start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from weft.arguments import (
    check_bool,
    check_callable,
    check_choice,
    check_instance,
    check_int,
    check_number,
    check_optional,
    is_integer,
    positive,
    quoted,
)
from weft.engine import followed
from weft.engine.followed import ServingPlan
from weft.engine.speculation.options import SpeculativeConfig
from weft.parallel.modes import Mode, mode_named
from weft.runtime.arithmetic import cdiv

if TYPE_CHECKING:
    import torch

    from weft.layers.moe import Layout
    from weft.models import DecoderConfig
    from weft.models.checkpoint import Progress

MAX_BATCH = 1 << 16
MOST_ADAPTERS = 64
# Seconds of a search without a number.
TUNE_SECONDS = 60
# vLLM's names of options, for the message that refuses them.
VLLM_NAMES = {
    "tensor_parallel_size": "world_size, of LLM",
    "pipeline_parallel_size": "pipeline_parallel",
    "max_model_len": "max_seq_len",
    "max_num_seqs": "max_batch",
    "max_num_batched_tokens": "chunk_tokens",
    "block_size": "page_size",
    "enable_prefix_caching": "prefix_caching",
    "mamba_block_size": "state_snapshot_tokens",
    "decode_context_parallel_size": "context_parallel, on or off",
    "speculative_config": "speculative",
    "enable_lora": "lora, a dict of names to directories",
    "lora_modules": "lora, a dict of names to directories",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of `Engine`, `LLM` and `Runner`, equal on all ranks. ValueError for impossible values.

    invariant        True: tokens and log-probabilities of a request have the same bits whatever runs beside it, however its
                     prompt is cut or cached, with drafts or without, on 1, 2, 4 or 8 ranks (docs/same-bits.md); it is
                     mode="invariant"
    mode             parallel strategy: "torch", "ag_rs", "gemm_ar", or "auto", which chooses by the tokens of a forward pass
    dtype            of weights, activations and KV cache; None: the checkpoint's
    fused            True: weft.ops' kernels between the GEMMs; False: torch operations; None: kernels
    expert_layout    of a mixture of experts: "whole" experts on each rank, "slices" of all, or (ep, tp): ep groups of tp ranks;
                     None: whole where W divides their number, else slices
    max_seq_len      tokens of a prompt and its answer together; None: the model's max_position_embeddings
    max_batch        sequences that run at once; further requests wait
    page_size        tokens in a page of the KV cache: 16, 32, 64, 128 or 256
    pages            pages of the KV cache, page 0 included, which is reserved for padding; None: what `memory_fraction` allows,
                     but no more than a full batch can use
    kv_cache_dtype   "auto": the KV cache has the dtype of the weights; "fp8": e4m3, for weights of 16 bits, with the
                     checkpoint's scales, or scales of 1 where it has none
    quantization     "fp8" or "fp8_per_block", "fp8_per_channel", "mxfp4", "int4": weights of 16 or 32 bits are quantized as
                     they are read (docs/quantization.md); None: they are as the checkpoint has them
    wire             "same": sums over the ranks travel in the dtype of the weights; "fp8": in e4m3 with a scale for 128
                     columns, half of the bytes, with a bound on the error (docs/quantization.md); "auto": in fp8 where that is
                     predicted to take less time. For dense models of 16 bits on one node
    memory_fraction  share of the GPU's free memory that the KV cache may take, in (0, 1]; virtual ranks take up to 256 MiB
    gpu_memory_utilization  share of the GPU's whole memory for weights, graphs and KV cache together, in (0, 1], as of vLLM, in
                     place of memory_fraction; without effect on virtual ranks. None: memory_fraction
    chunk_tokens     prompt tokens read in one step, before the running sequences decode their next token
    mixed_chunk_tokens  the same, fewer, of a prompt that arrives while sequences decode: bounds the time between two tokens
    prefix_caching   a request shares the full pages that other prompts or answers with the same first tokens have left in the
                     KV cache, and only the rest of it is computed
    state_snapshot_bytes  memory of a rank for snapshots of states, which prefix caching needs in models with gated delta nets
                     (docs/engine.md); 0: no prefix caching there; None: an eighth of the KV cache's, and at least one state
    state_snapshot_tokens  tokens between two snapshots of a prompt's states, rounded down to pages; one more is at its end
    context_parallel  the KV cache is spread over the ranks by pages and not by heads, so a sequence may fill the caches of all
                     ranks; None: where that makes it smaller, with fewer KV heads than ranks (`plan_cache`)
    pipeline_parallel  stages that the layers are split over, of world_size / pipeline_parallel ranks each: whole nodes, or
                     equal parts of one (weft.engine.pipeline)
    microbatch_tokens  a pass goes through the stages in up to pipeline_parallel microbatches of at least this many tokens,
                     since a stage reads its weights for each. Prompts that are cut run without CUDA graphs. Decode steps
                     of that many sequences a stage follow each other without a gap (weft.engine.graphs)
    cuda_graph       replay decode steps, and prompts of recurring shapes, as CUDA graphs; without effect on virtual ranks
    warm_up          capture the CUDA graphs of all sizes of decode steps and prompts at start: about 90 graphs, some 240 with
                     context_parallel, a fifth to a third of a second each, and no request waits for a capture. Their memory is
                     reserved before the KV cache's
    warm_up_late     with warm_up: only graphs of small batches and short prompts are captured at start, the further ones while
                     requests are answered, between steps: at once where there are none, else a twentieth of the time. Until
                     then larger passes are launched kernel by kernel, or wait for their capture. Not with pipeline_parallel
    grammar_seconds  longest time that a grammar of structured_outputs may take to compile; other requests go on meanwhile
    speculative      SpeculativeConfig, or a mapping of its fields: tokens are drafted, and several of a sequence verified in a
                     step (docs/speculation.md), not with pipeline_parallel; None: a step gives a token
    plan             file of ``weft plan``: its options are taken, and an option that differs is refused (`of`); at its end the
                     engine says measured times beside the plan's (docs/planning.md). None: there is none
    tune             True, or a number of seconds (True: 60): the designs of the ops that this model's steps call are searched
                     on these GPUs at start, collectively, within that time, and kept for the next start (docs/tuning.md). Not
                     with pipeline_parallel; virtual ranks search nothing
    tune_cache       folder of the results; None: ~/.cache/weft
    lora             directories of adapters as peft saves them, by the names that SamplingParams(lora=) takes (docs/lora.md);
                     None: there are none
    algorithm_cache  JSON file of cuBLAS algorithms: rank 0 reads it before the first prompt, times what prompts of 256, 512, …
                     chunk_tokens tokens lack, and adds it; None: shipped rows and torch.mm's choice
    """

    invariant: bool = False
    mode: Mode = "auto"
    dtype: torch.dtype | None = None
    fused: bool | None = None
    expert_layout: Layout | None = None
    max_seq_len: int | None = None
    max_batch: int = 64
    page_size: int = 64
    pages: int | None = None
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    wire: str = "same"
    memory_fraction: float = 0.8
    gpu_memory_utilization: float | None = None
    chunk_tokens: int = 8192
    mixed_chunk_tokens: int = 1024
    prefix_caching: bool = True
    state_snapshot_bytes: int | None = None
    state_snapshot_tokens: int = 4096
    context_parallel: bool | None = None
    pipeline_parallel: int = 1
    microbatch_tokens: int = 256
    cuda_graph: bool = True
    warm_up: bool = False
    warm_up_late: bool = False
    grammar_seconds: float = 10.0
    speculative: SpeculativeConfig | None = None
    plan: ServingPlan | None = None
    tune: bool | float = False
    tune_cache: str | PathLike[str] | None = None
    algorithm_cache: str | PathLike[str] | None = None
    lora: Mapping[str, str | PathLike[str]] | None = None

    def __post_init__(self) -> None:
        # Not at the top: the command line reads the defaults before it needs torch and Triton.
        import torch

        from weft.layers.moe import check_layout
        from weft.models.quantization import MADE
        from weft.parallel.modes import check_mode
        from weft.parallel.step import check_page_size

        check_mode(self.mode)
        check_optional(check_layout, "expert_layout", self.expert_layout)
        check_optional(check_choice, "quantization", self.quantization, MADE)
        check_optional(check_instance, "dtype", self.dtype, torch.dtype, "a torch.dtype, such as torch.bfloat16")
        self._check_kinds()
        self._make_plain()
        check_page_size(self.page_size)
        self._check_together()

    def _check_kinds(self) -> None:
        """ValueError for a flag, a path or a number that is none, or out of its range."""
        for name in ("invariant", "prefix_caching", "cuda_graph", "warm_up", "warm_up_late"):
            check_bool(name, getattr(self, name))
        for name in ("fused", "context_parallel"):
            check_optional(check_bool, name, getattr(self, name))
        check_optional(check_instance, "algorithm_cache", self.algorithm_cache, (str, PathLike), "the path of a file")
        check_optional(check_instance, "tune_cache", self.tune_cache, (str, PathLike), "the path of a folder")
        if not isinstance(self.tune, bool):
            check_number("tune", self.tune, 1, 86400, "in [1, 86400] seconds, True or False")
        check_choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", "fp8"))
        check_choice("wire", self.wire, ("same", "fp8", "auto"))
        rule = "the path of a plan, for EngineConfig.of, LLM and Engine, or a ServingPlan"
        check_optional(check_instance, "plan", self.plan, ServingPlan, rule)
        check_optional(check_int, "state_snapshot_bytes", self.state_snapshot_bytes, 0, 1 << 62)
        check_number("grammar_seconds", self.grammar_seconds, 1e-3, 3600, "in [0.001, 3600] seconds")
        check_number("memory_fraction", self.memory_fraction, 1e-9, 1, "in (0, 1]")
        check_optional(check_number, "gpu_memory_utilization", self.gpu_memory_utilization, 1e-9, 1, "in (0, 1]")

    def _make_plain(self) -> None:
        """Counts as Python's integers, and records of mappings. ValueError for values that are none."""
        counts = "chunk_tokens", "mixed_chunk_tokens", "max_batch", "pipeline_parallel", "microbatch_tokens"
        for name in (*counts, "state_snapshot_tokens"):
            object.__setattr__(self, name, positive(name, getattr(self, name)))
        for name in ("max_seq_len", "pages"):
            object.__setattr__(self, name, check_optional(positive, name, getattr(self, name)))
        if self.max_batch > MAX_BATCH:
            raise ValueError(
                f"max_batch={quoted(self.max_batch)} is more than {MAX_BATCH}; lower it, and further requests wait"
            )
        if not is_integer(self.page_size):  # 16.0 == 16
            raise ValueError(f"page_size={quoted(self.page_size)} is not an integer")
        object.__setattr__(self, "page_size", int(self.page_size))
        if self.pages is not None and self.pages < 2:
            raise ValueError(f"pages={self.pages} is less than 2: page 0 is reserved for padding")
        if self.lora is not None:
            object.__setattr__(self, "lora", _adapters(self.lora))
        if self.speculative is not None:
            object.__setattr__(self, "speculative", SpeculativeConfig.of("speculative", self.speculative))

    def _check_together(self) -> None:
        """ValueError for options that exclude each other."""
        for name, what in (("tune", "a search is"), ("speculative", "drafts are")):
            if getattr(self, name) and self.pipeline_parallel > 1:
                raise ValueError(
                    f"{name} with pipeline_parallel={self.pipeline_parallel}: {what} for one stage; leave out one"
                )
        if self.wire != "same" and self.lora is not None:
            raise ValueError(f"lora with wire={self.wire!r}: sums with adapters travel in 16 bits; leave out one")
        if self.invariant or self.mode == "invariant":
            self._check_invariant()
            object.__setattr__(self, "invariant", True)
            object.__setattr__(self, "mode", "invariant")

    def _check_invariant(self) -> None:
        """ValueError for an option whose sums have an order of their own."""
        if self.mode not in ("auto", "invariant"):
            raise ValueError(f"mode={self.mode!r} with invariant=True, which is mode='invariant'; leave out one")
        drafts = None if self.speculative is None else self.speculative.method
        for name, value, why in (
            ("fused", self.fused is False, "torch's operations choose an order of sums by the batch"),
            ("context_parallel", self.context_parallel, "parts of an attention would be summed by ranks"),
            ("wire", self.wire != "same", "sums of another number of ranks would be rounded otherwise"),
            ("lora", self.lora is not None, "adapters are added in sums of another order"),
            ("pipeline_parallel", self.pipeline_parallel > 1, "hidden states are handed over in other sums"),
            ("speculative", drafts not in (None, "ngram"), "drafts are those of method='ngram' alone"),
        ):
            if value:
                given = f"speculative method {drafts!r}" if name == "speculative" else f"{name}={getattr(self, name)!r}"
                raise ValueError(f"{given} with invariant=True: {why}; leave out one")

    @property
    def tune_seconds(self) -> float:
        """Budget of the search at start; 0: there is none."""
        return TUNE_SECONDS * self.tune if isinstance(self.tune, bool) else self.tune

    @classmethod
    def of(cls, config: EngineConfig | None, options: Mapping[str, Any]) -> EngineConfig:
        """`config`, or the defaults, with `options` in place of its fields. TypeError for another name."""
        check_optional(check_instance, "config", config, cls, "an EngineConfig")
        known = [field.name for field in fields(cls)]
        if isinstance(plan := options.get("plan"), (str, PathLike)):
            plan = followed.read(plan)
            given = {name: getattr(config or cls(), name) for name in known} | dict(options)
            options = {**options, **followed.followed(plan, given, DEFAULTS), "plan": plan}
        if unknown := next((name for name in options if name not in known), None):
            name = VLLM_NAMES.get(unknown)
            rest = f"weft's name is {name}" if name else f"the options are {', '.join(known)}"
            raise TypeError(f"{unknown}= is not an option of an engine; {rest}")
        return replace(config or cls(), **options)


def _adapters(value: object) -> dict[str, str] | None:
    """Directories by name, as plain text. ValueError for anything else."""
    check_instance("lora", value, Mapping, "a dict of names to directories")
    for name, directory in value.items():
        if not isinstance(name, str) or not name.strip() or not isinstance(directory, (str, PathLike)):
            raise ValueError(f"lora={quoted(value)} is not a dict of names to directories")
    if len(value) > MOST_ADAPTERS:
        raise ValueError(f"lora has {len(value)} adapters; pass at most {MOST_ADAPTERS}")
    return {name: str(directory) for name, directory in value.items()} or None


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """Layout of the KV cache and the reason for it. context_parallel: as in weft.models.Decoder."""

    context_parallel: bool
    reason: str

    def __str__(self) -> str:
        how = "spread over the ranks by pages" if self.context_parallel else "split over the ranks by heads"
        return f"{how}: {self.reason}"


def plan_cache(config: EngineConfig, model: DecoderConfig, world_size: int, nodes: int = 1) -> CachePlan:
    """Plan for `config`, whose max_seq_len is known: as asked for, else what makes the cache smaller.

    With fewer KV heads than ranks, a split by heads holds a head several times.
    """
    if world_size == 1:
        return CachePlan(context_parallel=False, reason="one rank has all")
    if config.context_parallel is not None:
        return CachePlan(context_parallel=config.context_parallel, reason=f"context_parallel={config.context_parallel}")
    if mode_named(config.mode) in ("reference", "invariant"):
        return CachePlan(context_parallel=False, reason=f"mode={config.mode!r} knows no other cache")
    if nodes > 1:
        reason = f"{nodes} nodes, between which a spread cache sends in every layer; context_parallel=True spreads it"
        return CachePlan(context_parallel=False, reason=reason)
    heads, page = model.num_key_value_heads, config.page_size
    split = max(1, heads // world_size) * cdiv(config.max_seq_len, page) * page
    spread = heads * cdiv(config.max_seq_len, page * world_size) * page
    fewer, more = sorted((split, spread))
    reason = (
        f"{config.max_seq_len} tokens of {heads} KV heads take {fewer} tokens of a head on each of {world_size} ranks, the "
        f"other way {more}"
    )
    if spread >= split:
        return CachePlan(context_parallel=False, reason=reason)
    return CachePlan(context_parallel=True, reason=f"{reason}; context_parallel=False splits by heads")


# Defaults by name, for the command line's flags.
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(EngineConfig)}

# Engine's progress and warm_up_progress by these names, called in the caller's process.
Watchers = Mapping[str, Callable[[int, int], None]]


def watchers_of(progress: Progress | None, warm_up_progress: Progress | None) -> Watchers:
    """The given functions by name; for a missing `warm_up_progress` one that logs."""
    check_optional(check_callable, "progress", progress, "progress(bytes read, bytes to read)")
    check_optional(check_callable, "warm_up_progress", warm_up_progress, "warm_up_progress(captured, to capture)")
    given = {
        "progress": progress,
        "warm_up_progress": warm_up_progress or every_tenth(logging.getLogger("weft.engine").info),
    }
    return {name: function for name, function in given.items() if function is not None}


def every_tenth(say: Callable[[str], None]) -> Progress:
    """A `warm_up_progress` that says a line for each tenth of the graphs."""

    def progress(captured: int, total: int) -> None:
        if captured * 10 // total > (captured - 1) * 10 // total:
            say(f"captured {captured} of {total} CUDA graphs")

    return progress
