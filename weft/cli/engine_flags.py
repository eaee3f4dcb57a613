"""Flags of the commands that run an engine, and the EngineConfig that they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.text import Text

from weft.arguments import DEVICES
from weft.cli.vllm_flags import spellings
from weft.console import DTYPES, WORLD_SIZE, TypedFlags, complete_device, draws, layout_of, notices, one_of, option
from weft.engine.config import DEFAULTS, TUNE_SECONDS, every_tenth
from weft.models.families import published
from weft.models.hub import find_checkpoint
from weft.parallel.modes import MODES, OLD_MODES
from weft.runtime.launch import RANKS_LOAD

if TYPE_CHECKING:
    from weft.engine import EngineConfig

# Modules that processes of ranks load before they have work.
ENGINES_LOAD = *RANKS_LOAD, "weft.engine.loop", "weft.engine.engine"
MODEL = (
    "Checkpoint directory, or OWNER/NAME[@REVISION] in the Hugging Face cache, or adder-moe, built in, or with "
    "--dummy-weights a name such as qwen3-32b [default: the built-in adder]"
)


def engine(name: str, help: str, *names: str) -> Any:
    """Flag of an option of EngineConfig, with its default, and by default with vLLM's spellings."""
    return option(DEFAULTS[name], help, *(names or dict.fromkeys((f"--{name.replace('_', '-')}", *spellings(name)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags(TypedFlags):
    """Flags of a model and its engine."""

    model: str | None = option(None, MODEL)
    world_size: int | None = option(None, "Number of ranks [default: all GPUs, or 4 simulated ones]", *WORLD_SIZE)
    mode: str = engine("mode", "Parallel mode: auto, reference, sequence_parallel, replicated or invariant")
    invariant: bool = engine(
        "invariant", "Give an answer the same bits whatever runs beside it and however its prompt is cut or cached"
    )
    expert_layout: str | None = engine(
        "expert_layout",
        "Layout of a mixture of experts: whole, slices, or EPxTP such as 2x4: 2 groups of 4 ranks [default: whole "
        "where the ranks divide the experts, else slices]",
    )
    device: str = option("auto", "Where ranks run: auto, cuda or sim", autocompletion=complete_device)
    dtype: str = option("auto", f"Dtype of the computation: {', '.join(('auto', *DTYPES))}")
    dummy_weights: bool = option(False, "Random weights of a published model's sizes, made on the device")
    max_batch: int = engine("max_batch", "Prompts that run at once; further ones wait")
    max_seq_len: int | None = engine("max_seq_len", "Most tokens of a prompt and its answer [default: the model's]")
    chunk_tokens: int = engine("chunk_tokens", "Prompt tokens that a step reads at most")
    page_size: int = engine("page_size", "Tokens in a page of the KV cache: 16, 32, 64, 128, 256")
    memory_fraction: float = engine(
        "memory_fraction", "Share of the memory that is free beside the weights, for the KV cache"
    )
    gpu_memory_utilization: float | None = engine(
        "gpu_memory_utilization",
        "Share of a GPU's whole memory for weights, graphs and KV cache, in place of --memory-fraction",
    )
    kv_cache_dtype: str = engine("kv_cache_dtype", "Format of the KV cache: auto, or fp8, half the bytes of 16 bits")
    quantization: str | None = engine(
        "quantization", "Quantize weights of 16 bits as they are read: fp8, fp8_per_block, fp8_per_channel, mxfp4, int4"
    )
    wire: str = engine(
        "wire",
        "Format in which sums travel between ranks: same (as the weights), fp8 (half the bytes, less exact), auto "
        "(fp8 where it is predicted to be faster)",
    )
    prefix_caching: bool = engine(
        "prefix_caching",
        "Share pages of the KV cache among prompts with equal first tokens",
        "--prefix-caching/--no-prefix-caching",
        "--enable-prefix-caching/--no-enable-prefix-caching",
    )
    state_snapshot_bytes: int | None = engine(
        "state_snapshot_bytes",
        "Memory of a rank for states of gated delta nets that prefix caching keeps [default: an eighth of the KV "
        "cache's]",
    )
    state_snapshot_tokens: int = engine(
        "state_snapshot_tokens",
        "Tokens of a prompt between two of these states",
        "--state-snapshot-tokens",
        "--mamba-block-size",
    )
    context_parallel: bool | None = engine(
        "context_parallel",
        "Spread the KV cache over the ranks by pages, not by heads [default: with fewer KV heads than ranks]",
        "--context-parallel/--no-context-parallel",
    )
    pipeline_parallel: int = engine(
        "pipeline_parallel", "Stages that the layers are split over: nodes, or parts of one"
    )
    cuda_graph: bool = engine(
        "cuda_graph", "Replay decode steps and prompts as CUDA graphs", "--cuda-graph/--no-cuda-graph"
    )
    warm_up: bool = engine("warm_up", "Capture all CUDA graphs at start, so that no prompt waits for one")
    warm_up_late: bool = engine(
        "warm_up_late", "With --warm-up: only graphs of small batches at start, the rest beside steps"
    )
    grammar_seconds: float = engine("grammar_seconds", "Most seconds to compile a request's grammar")
    speculative_config: str | None = option(
        None,
        'Draft tokens and verify several in a step, as JSON: \'{"method": "ngram", "num_speculative_tokens": 4}\'; '
        "other methods are draft_model, eagle3 and mtp [default: a step gives a token]",
    )
    heap_bytes: int | None = option(
        None, "Symmetric memory of a rank [default: 2 GiB on GPUs, 512 MiB on simulated ranks]"
    )
    plan: Path | None = option(
        None,
        "Follow a file of weft plan: take its options, refuse other ones, and print measured times beside predicted "
        "ones at the end",
    )
    tune: bool = option(
        False, "Search the designs of this model's ops on these GPUs first, and keep them for the next start"
    )
    tune_seconds: float | None = option(
        None, f"Most seconds of that search; goes with --tune [default: {TUNE_SECONDS}]"
    )
    tune_cache: Path | None = option(None, "Folder that keeps the results of --tune [default: ~/.cache/weft]")
    algorithm_cache: Path | None = option(
        None, "Read cuBLAS algorithms of this file, and time and add the ones that it lacks [default: weft's rows]"
    )

    def check_names(self) -> None:
        """ValueError for a mistyped name, before torch is loaded, which takes seconds."""
        one_of("device", self.device, DEVICES)
        one_of("mode", self.mode, (*MODES, *OLD_MODES))
        one_of("dtype", self.dtype, ("auto", *DTYPES))
        if self.tune_seconds is not None and not self.tune:
            raise ValueError(f"--tune-seconds {self.tune_seconds:g} goes with --tune; pass both, or neither")
        if self.tune_cache is not None and not self.tune:
            raise ValueError(f"--tune-cache {self.tune_cache} goes with --tune; pass both, or neither")
        self._check_effect()
        if self.dummy_weights and self.model is not None:
            published(self.model)
        elif self.model is not None:
            find_checkpoint(self.model)

    def _check_effect(self) -> None:
        """ValueError for a flag that has no effect beside another one."""
        beside = (
            ("with --no-prefix-caching", not self.prefix_caching, ("state_snapshot_bytes", "state_snapshot_tokens")),
            ("with --no-cuda-graph", not self.cuda_graph, ("warm_up", "warm_up_late")),
            ("with --gpu-memory-utilization", self.gpu_memory_utilization is not None, ("memory_fraction",)),
            ("without --warm-up", not self.warm_up, ("warm_up_late",)),
        )
        for why, holds, names in beside:
            if holds and (given := [flag for flag, value in self.given(*names).items() if value]):
                raise ValueError(f"{given[0]} has no effect {why}; leave it out, or change that")

    def say_simulated(self) -> None:
        """Name the flags that virtual ranks do not use."""
        names = "tune", "algorithm_cache", "warm_up", "memory_fraction", "gpu_memory_utilization"
        for flag in [flag for flag, value in self.given(*names).items() if value]:
            notices.info("weft: %s has no effect without GPUs", flag)

    def engine_config(self) -> EngineConfig:
        """Options of the engine. ValueError for a value that no model can take."""
        import torch

        from weft.engine import EngineConfig, SpeculativeConfig

        config = EngineConfig(
            dtype=None if self.dtype == "auto" else getattr(torch, DTYPES[self.dtype]),
            expert_layout=layout_of(self.expert_layout),
            speculative=SpeculativeConfig.of("--speculative-config", self.speculative_config)
            if self.speculative_config is not None
            else None,
            tune=self.tune if self.tune_seconds is None else self.tune_seconds,
            **{name: getattr(self, name) for name in passed_on()},
        )
        return config if self.plan is None else EngineConfig.of(config, {"plan": self.plan})


def passed_on() -> list[str]:
    """Flags that are options of the engine by the same names, with the same values."""
    converted = {"dtype", "expert_layout", "tune", "plan"}
    return [one.name for one in fields(EngineFlags) if one.name in DEFAULTS and one.name not in converted]


class _Amount(ProgressColumn):
    """Bytes that have been read, or number of graphs that have been captured."""

    def __init__(self) -> None:
        super().__init__()
        self._columns = {"loading": DownloadColumn(), "capturing": MofNCompleteColumn()}

    def render(self, task: Task) -> Text:
        return self._columns[task.description].render(task)


@contextmanager
def starting(shown: bool) -> Iterator[dict[str, Callable[[int, int], None]]]:
    """Yield the engine's progress and warm_up_progress: on a terminal bars, else lines of the warm-up."""
    console = Console(stderr=True)
    if not shown:
        yield {}
        return
    if not draws(console):
        yield {"warm_up_progress": every_tenth(notices.info)}
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), _Amount(), console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def update(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done)

        yield {"progress": partial(update, "loading"), "warm_up_progress": partial(update, "capturing")}
