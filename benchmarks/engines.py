"""Whole answers of weft's engine, of vLLM and of SGLang, with the same requests on the same GPUs.

    python -m benchmarks.engines run weft --model qwen3-8b --world-size 2 --json RUNS/weft.json
    python -m benchmarks.engines run vllm --model qwen3-8b --world-size 2 --json RUNS/vllm.json
    python -m benchmarks.engines run sglang --model qwen3-8b --world-size 2 --json RUNS/sglang.json
    python -m benchmarks.engines table RUNS/weft.json RUNS/vllm.json RUNS/sglang.json

Each engine runs in a separate process and environment. A row is a number of prompts of random tokens, greedy, on random
weights: `first_ms` is the time of generate() for one new token, `per_token_ms` the further time of 64 more, divided by 64.
Medians of `--repeats` calls with new prompts each, or fewer, but three, where they take longer than `--seconds`. Calls before
them are not counted: two, and more until two in a row take the same time, within a minute. --quantization fp8 gives all
engines blocks of 128 x 128 and rows that are quantized by groups of 128. Engines run with their defaults, but without prefix
caching, for which random prompts have no use, with CUDA graphs of exactly the batches that are asked for, and with what
`--options` adds, which the file records. The table prints every row, also where weft is slower.

--room FOLDER --engines N lets N engines start at the same time: each waits until all are ready or have failed, and then
measures alone. Each needs its share of the memory: {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 20000000000} for
vLLM, {"kv_cache_memory_bytes": 20000000000} for SGLang and weft.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import importlib.metadata
import importlib.util
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import weft
from weft.bench.harness.machine import check_clean, revision
from weft.models.config import DecoderConfig
from weft.models.families import PUBLISHED
from weft.runtime import deep_gemm
from weft.runtime.files import put

CASES = "1x128,8x128,32x128,128x128,1x1024,32x1024,1x4096"
NEW_TOKENS = 64
MAX_LENGTH = 8192 + 256
# Calls of a row before those that count, at least: engines capture graphs and compile kernels in the first uses of a size.
UNCOUNTED = 2
# Two times in a row are the same within this ratio: a kernel that is compiled takes 15 s, in a call of 0.1.
STEADY = 1.25
# Seconds of a row after which its calls count although their times still differ.
SETTLING = 60.0
# Seconds from its start for which a ready engine waits for engines that start beside it: a row beside a start is worth nothing.
# Of a run's 300 s (benchmarks/engines.sh) the rest is for its rows.
PATIENCE = 240.0
# The variable that makes vLLM's answers independent of the batch, as EngineConfig.invariant does weft's.
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
Generate = Callable[[list[list[int]], int], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the engines of a comparison are given.

    quantization  None or "fp8"
    batches       numbers of prompts that are measured
    drafts        tokens that the model's MTP head drafts in a step; 0: none
    acceptance    tokens of a step on average, drawn after a real verify step, since random weights accept nothing
    draft_head, adaptive  of weft's SpeculativeConfig
    options       further arguments of the engine
    """

    model: str
    world_size: int
    quantization: str | None
    batches: list[int]
    drafts: int
    acceptance: float
    draft_head: str
    adaptive: bool
    options: dict[str, Any]

    @property
    def of_weft(self) -> dict[str, Any]:
        """Options of drafts that weft alone has, {} without drafts."""
        return {"adaptive": self.adaptive, "draft_head": self.draft_head} if self.drafts else {}

    def speculative(self, name: str, **more: Any) -> dict[str, Any]:
        """The argument by which an engine speculates, {} without drafts."""
        if not self.drafts:
            return {}
        how = {"method": "mtp", "num_speculative_tokens": self.drafts, "rejection_sample_method": "synthetic"}
        return {name: {**how, "synthetic_acceptance_length": self.acceptance, **more}}


def weft_engine(setting: Setting) -> Generate:
    """weft with its defaults; the option `kv_cache_memory_bytes` bounds its KV cache, as vLLM's does."""
    options = dict(setting.options)
    if size := options.pop("kv_cache_memory_bytes", None):
        page = options.setdefault("page_size", 64)
        options["pages"] = cache_tokens(setting.model, setting.world_size, size) // page + 1
    llm = weft.LLM(
        DecoderConfig.named(setting.model), world_size=setting.world_size, max_seq_len=MAX_LENGTH,
        max_batch=max(setting.batches), prefix_caching=False, quantization=setting.quantization,
        **setting.speculative("speculative", **setting.of_weft), **options,
    )  # fmt: skip
    return lambda prompts, new: llm.generate(prompts, weft.SamplingParams(max_tokens=new, ignore_eos=True))


def config_of(model: str, quantization: str | None = None) -> dict[str, Any]:
    """config.json of a published model, as far as an engine needs it for random weights."""
    family = DecoderConfig.named(model).family
    config = {"architectures": [family.architecture], "torch_dtype": "bfloat16", **PUBLISHED[model]}
    if family.defaults.get("head_dim"):
        config = {"head_dim": family.defaults["head_dim"], **config}
    if config["model_type"].endswith("_text"):
        # Published as the text model of a multimodal one, the form that vLLM reads.
        # Without the dtype vLLM keeps states in bf16.
        text = {"mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32", **config}
        config = {
            "architectures": [family.architecture.replace("CausalLM", "ConditionalGeneration")],
            "model_type": config["model_type"].removesuffix("_text"), "torch_dtype": "bfloat16", "text_config": text,
            "vision_config": {"out_hidden_size": config["hidden_size"]},
        }  # fmt: skip
    if quantization is None:
        return config
    # As the published files do, the routers stay in bf16.
    layers = range(config["num_hidden_layers"]) if "num_experts" in config else ()
    kept = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in layers)]
    return {**config, "quantization_config": {**BLOCK_FP8, "modules_to_not_convert": kept}}


def folder_of(model: str, quantization: str | None = None) -> Path:
    """Directory with the config.json of a published model alone, for random weights.

    Its name is always the same, since that is a part of the key of what vLLM has compiled.
    """
    folder = Path(tempfile.gettempdir()) / f"weft-sizes-of-{model}-{quantization or 'bf16'}"
    put(folder / "config.json", json.dumps(config_of(model, quantization)))
    return folder


def vllm_engine(setting: Setting) -> Generate:
    from vllm import LLM, SamplingParams

    # Rows of a step, one for each draft too, and of a drafting step.
    sizes = {batch * more for batch in setting.batches for more in (1, 1 + setting.drafts)}
    compilation = {"cudagraph_capture_sizes": sorted(sizes)}
    folder = folder_of(setting.model, setting.quantization)
    text_only: dict[str, Any] = {}
    if "text_config" in json.loads((folder / "config.json").read_text()):
        text_only = {"language_model_only": True}
        if importlib.util.find_spec("flashinfer") is None or "FLASHINFER_DISABLE_JIT" in os.environ:
            # Its choice on Hopper is FlashInfer's, installed or not, which is compiled for minutes at the first call.
            text_only["gdn_prefill_backend"] = "triton"
    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", tensor_parallel_size=setting.world_size,
        max_model_len=MAX_LENGTH, max_num_seqs=max(setting.batches), enable_prefix_caching=False, **text_only,
        **setting.speculative("speculative_config"), **{"compilation_config": compilation, **setting.options},
    )  # fmt: skip

    def generate(prompts: list[list[int]], new: int) -> Any:
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
        return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return generate


def cache_tokens(model: str, world_size: int, size: int) -> int:
    """Tokens whose keys and values in bf16 take ``size`` bytes on each of ``world_size`` GPUs."""
    config = DecoderConfig.named(model)
    return size // (2 * config.num_hidden_layers * config.cached_elements(world_size))


def all_reduce_fusion(config: dict[str, Any], world_size: int) -> dict[str, str]:
    """SGLang's default for mixtures on Hopper, by name: the other back end uses NVLink multicast."""
    return {"flashinfer_allreduce_fusion_backend": "trtllm"} if "num_experts" in config and world_size > 1 else {}


def sglang_engine(setting: Setting) -> Generate:
    """SGLang with its defaults for Hopper; the option `kv_cache_memory_bytes` bounds its KV cache, as vLLM's does."""
    config = config_of(setting.model, setting.quantization)
    if setting.drafts:
        raise SystemExit("--drafts: SGLang takes no acceptance as an argument; measure weft and vllm")
    if "text_config" in config:
        raise SystemExit(
            f"{setting.model}: SGLang asks for a processor of pictures, which has files; measure weft and vllm"
        )
    from sglang import Engine

    options: dict[str, Any] = {
        "cuda_graph_bs_decode": sorted(set(setting.batches)), "cuda_graph_max_bs_decode": max(setting.batches),
        "log_level": "info",
    }  # fmt: skip
    options |= all_reduce_fusion(config, setting.world_size) | setting.options
    if size := options.pop("kv_cache_memory_bytes", None):
        # The fraction covers weights too, and takes those of engines that start at the same time for its own.
        options = {"mem_fraction_static": 0.9, **options}
        options["max_total_tokens"] = cache_tokens(setting.model, setting.world_size, size)
    engine = Engine(
        model_path=str(folder_of(setting.model, setting.quantization)), skip_tokenizer_init=True, load_format="dummy",
        tp_size=setting.world_size, context_length=MAX_LENGTH, max_running_requests=max(setting.batches),
        disable_radix_cache=True, **options,
    )  # fmt: skip

    def generate(prompts: list[list[int]], new: int) -> Any:
        params = {"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True}
        return engine.generate(input_ids=prompts, sampling_params=params)

    return generate


ENGINES = {"weft": weft_engine, "vllm": vllm_engine, "sglang": sglang_engine}


def measured(
    generate: Generate, prompts: int, tokens: int, repeats: int, longest: float, vocab_size: int
) -> dict[str, Any]:
    """One row: times of generate() for one token and for 64 more.

    longest  seconds after which no further counted call begins, once there are three of each kind
    """
    draw = random.Random(f"{prompts}x{tokens}")
    seconds: dict[int, list[float]] = {1: [], 1 + NEW_TOKENS: []}

    def call_both() -> None:
        for new, taken in seconds.items():
            ids = [[draw.randrange(vocab_size) for _ in range(tokens)] for _ in range(prompts)]
            begin = time.perf_counter()
            generate(ids, new)
            taken.append(time.perf_counter() - begin)

    start = time.perf_counter()
    while len(seconds[1]) < UNCOUNTED or (not settled(seconds.values()) and time.perf_counter() - start < SETTLING):
        call_both()
    for taken in seconds.values():
        taken.clear()
    start = time.perf_counter()
    for repeat in range(repeats):
        if repeat > 2 and time.perf_counter() - start > longest:
            break
        call_both()
    first, whole = map(statistics.median, seconds.values())
    return {
        "prompts": prompts, "tokens": tokens, "first_ms": first * 1e3,
        "per_token_ms": (whole - first) / NEW_TOKENS * 1e3, "tokens_a_second": prompts * (1 + NEW_TOKENS) / whole,
        "seconds": list(seconds.values()),
    }  # fmt: skip


def settled(kinds: Iterable[list[float]]) -> bool:
    """True where the last two times of each kind are the same."""
    return all(max(taken[-2:]) <= STEADY * min(taken[-2:]) for taken in kinds)


@contextlib.contextmanager
def alone(room: Path | None, engines: int, name: str, begin: float) -> Iterator[None]:
    """Wait for the engines that start at the same time, then hold the GPUs alone. ``arrive`` says that one is there.

    begin  of this engine's start, by time.perf_counter()
    """
    if room is None:
        yield
        return
    arrive(room, name)
    while len(list(room.glob("*.here"))) < engines and time.perf_counter() - begin < PATIENCE:
        time.sleep(0.2)
    with (room / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


def arrive(room: Path | None, name: str) -> None:
    """Say that the engine of this name is ready, or will never be; benchmarks/engines.sh says it of one that was killed."""
    if room is not None:
        room.mkdir(parents=True, exist_ok=True)
        (room / f"{name}.here").touch()


def version_of(package: str) -> str | None:
    """Version of a package, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def surroundings_of(engine: str) -> dict[str, Any]:
    """What the engine's speed depends on outside its arguments; SGLang asks for all of its packages itself.

    deep_gemm  version that weft chooses: where it does not work, the log has a warning, and cuBLAS was measured
    """
    if engine == "vllm":
        return {"flashinfer": version_of("flashinfer-python"), "batch_invariant": BATCH_INVARIANT in os.environ}
    if engine == "weft":
        return {"deep_gemm": deep_gemm.version() if deep_gemm.is_chosen() else None}
    return {}


def run(engine: str, setting: Setting, chosen: argparse.Namespace) -> None:
    target: Path = chosen.json
    check_clean("--json", target)
    shapes = [tuple(map(int, case.split("x"))) for case in chosen.cases.split(",")]
    begin = time.perf_counter()
    generate = ENGINES[engine](setting)
    report = {
        "engine": engine, "version": importlib.import_module(engine).__version__, "model": setting.model,
        "quantization": setting.quantization, "drafts": setting.drafts, "acceptance": setting.acceptance,
        **(setting.of_weft if engine == "weft" else {}),
        **surroundings_of(engine),
        "world_size": setting.world_size, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "revision": revision(Path(weft.__file__).parent), "ready_seconds": time.perf_counter() - begin,
        "repeats": chosen.repeats, "options": setting.options, "rows": [],
    }  # fmt: skip
    label = f"{engine} {report['version']} {setting.model} {setting.quantization or ''}"
    label = label.rstrip() + (f" {setting.drafts} drafts" if setting.drafts else "")
    print(f"{label}: ready after {report['ready_seconds']:.1f} s", flush=True)
    vocab_size = DecoderConfig.named(setting.model).vocab_size
    with alone(chosen.room, chosen.engines, target.stem, begin):
        for prompts, tokens in shapes:
            row = measured(generate, prompts, tokens, chosen.repeats, chosen.seconds, vocab_size)
            report["rows"].append(row)
            times = f"first token {row['first_ms']:.1f} ms, then {row['per_token_ms']:.2f} ms a token"
            print(f"{label} {prompts}x{tokens}: {times}", flush=True)
            put(target, json.dumps(report, indent=1) + "\n")


def table(files: list[Path]) -> str:
    """The runs side by side as Markdown. Ratios: time of the other engine over that of weft."""
    reports = {report["engine"]: report for report in (json.loads(file.read_text()) for file in files)}
    ours = reports.pop("weft")
    lines = [
        f"{ours['model']} on {ours['world_size']} x {ours['device']}: first token / each further one, ms",
        "",
        "| prompts x tokens | weft | "
        + " | ".join(f"{name} {other['version']}" for name, other in reports.items())
        + " |",
        "|---|---|" + "---|" * len(reports),
    ]
    others = {
        name: {(row["prompts"], row["tokens"]): row for row in report["rows"]} for name, report in reports.items()
    }
    for row in ours["rows"]:
        cells = [f"{row['prompts']}x{row['tokens']}", f"{row['first_ms']:.1f} / {row['per_token_ms']:.2f}"]
        for rows in others.values():
            other = rows.get((row["prompts"], row["tokens"]))
            cells.append(beside(row, other) if other else "not measured")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def beside(ours: dict[str, Any], other: dict[str, Any]) -> str:
    ratios = [other[field] / ours[field] for field in ("first_ms", "per_token_ms")]
    return f"{other['first_ms']:.1f} / {other['per_token_ms']:.2f} ({ratios[0]:.2f} x, {ratios[1]:.2f} x)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="measure one engine")
    one.add_argument("engine", choices=ENGINES)
    one.add_argument("--model", default="qwen3-8b", choices=PUBLISHED, help="sizes of a published model")
    one.add_argument("--world-size", type=int, default=1, help="GPUs, tensor parallel")
    one.add_argument("--cases", default=CASES, help="prompts x tokens, with commas between")
    one.add_argument("--quantization", choices=["fp8"], help="block fp8; without it bf16")
    one.add_argument(
        "--drafts", type=int, default=0, help="tokens that the MTP head drafts in a step, with random weights"
    )
    one.add_argument("--draft-head", default="model", help="of weft, with --drafts: model or fp8")
    one.add_argument(
        "--adaptive", action="store_true",
        help="of weft: as many drafts up to --drafts as pay; stated acceptance is of the first drafts, so fewer keep it",
    )  # fmt: skip
    one.add_argument("--acceptance", type=float, default=1.0, help="tokens of a step on average, with --drafts")
    one.add_argument("--repeats", type=int, default=5)
    one.add_argument("--seconds", type=float, default=60.0, help="of a row, after which no fourth call begins")
    one.add_argument("--room", type=Path, metavar="FOLDER", help="where engines that start at the same time meet")
    one.add_argument("--engines", type=int, default=1, help="number of engines that meet in the room")
    one.add_argument("--json", type=Path, required=True, metavar="FILE")
    one.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="further arguments of the engine")
    both = commands.add_parser("table", help="compare runs")
    both.add_argument("files", type=Path, nargs="+")
    chosen = parser.parse_args()
    if chosen.command == "table":
        print(table(chosen.files))
        return
    setting = Setting(
        model=chosen.model, world_size=chosen.world_size, quantization=chosen.quantization, options=chosen.options,
        batches=[int(case.split("x")[0]) for case in chosen.cases.split(",")], drafts=chosen.drafts,
        acceptance=chosen.acceptance, draft_head=chosen.draft_head, adaptive=chosen.adaptive,
    )  # fmt: skip
    try:
        run(chosen.engine, setting, chosen)
    finally:
        arrive(chosen.room, chosen.json.stem)


if __name__ == "__main__":
    main()
