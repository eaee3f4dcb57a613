"""Whole answers of weft's engine and of others, with the same requests on the same GPUs.

    python -m benchmarks.engines run weft --model qwen3-8b --world-size 2 --json RUNS/weft.json
    python -m benchmarks.engines run vllm --model qwen3-8b --world-size 2 --json RUNS/vllm.json
    python -m benchmarks.engines table RUNS/weft.json RUNS/vllm.json

Each engine runs in a process, and an environment, of its own. A row is a number of prompts of so many random tokens, greedy, on
random weights: `first_ms` is the time of generate() for one new token, `per_token_ms` the further time of 64 more, divided by
64. Medians of `--repeats` calls with new prompts each, after two calls that are not counted. Engines run with their defaults,
but without prefix caching, for which random prompts have no use, and with what `--options` adds, which the file records. Where
other processes use the GPU too, {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 20000000000} gives vLLM such a
cache. The table prints every row, those that weft loses too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import weft
from weft.bench.harness.machine import check_clean, revision
from weft.models.config import DecoderConfig
from weft.models.families import PUBLISHED
from weft.runtime.files import put

CASES = "1x128,8x128,32x128,128x128,1x1024,32x1024,1x4096"
NEW_TOKENS = 64
MAX_SEQUENCES, MAX_LENGTH = 128, 8192
Generate = Callable[[list[list[int]], int], Any]


def weft_engine(model: str, world_size: int, **options: Any) -> Generate:
    llm = weft.LLM(
        DecoderConfig.named(model), world_size=world_size, max_seq_len=MAX_LENGTH, max_batch=MAX_SEQUENCES,
        prefix_caching=False, **options,
    )  # fmt: skip
    return lambda prompts, new: llm.generate(prompts, weft.SamplingParams(max_tokens=new, ignore_eos=True))


def folder_of(model: str) -> Path:
    """New directory with the config.json of a published model alone, for random weights."""
    folder = Path(tempfile.mkdtemp())
    architecture = DecoderConfig.named(model).family.architecture
    config = {"architectures": [architecture], "torch_dtype": "bfloat16", "head_dim": 128, **PUBLISHED[model]}
    put(folder / "config.json", json.dumps(config))
    return folder


def vllm_engine(model: str, world_size: int, **options: Any) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder_of(model)), skip_tokenizer_init=True, load_format="dummy", tensor_parallel_size=world_size,
        max_model_len=MAX_LENGTH, max_num_seqs=MAX_SEQUENCES, enable_prefix_caching=False,
        **options,
    )  # fmt: skip

    def generate(prompts: list[list[int]], new: int) -> Any:
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
        return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return generate


ENGINES = {"weft": weft_engine, "vllm": vllm_engine}


def measured(generate: Generate, prompts: int, tokens: int, repeats: int, vocab_size: int) -> dict[str, Any]:
    """One row: times of generate() for one token and for 64 more."""
    draw = random.Random(f"{prompts}x{tokens}")
    seconds: dict[int, list[float]] = {1: [], 1 + NEW_TOKENS: []}
    for repeat in range(-2, repeats):
        for new, found in seconds.items():
            ids = [[draw.randrange(vocab_size) for _ in range(tokens)] for _ in range(prompts)]
            begin = time.perf_counter()
            generate(ids, new)
            if repeat >= 0:
                found.append(time.perf_counter() - begin)
    first, all_of_them = map(statistics.median, seconds.values())
    return {
        "prompts": prompts, "tokens": tokens, "first_ms": first * 1e3,
        "per_token_ms": (all_of_them - first) / NEW_TOKENS * 1e3, "seconds": list(seconds.values()),
    }  # fmt: skip


def run(
    engine: str, model: str, world_size: int, cases: str, repeats: int, target: Path, options: dict[str, Any]
) -> None:
    check_clean("--json", target)
    shapes = [tuple(map(int, case.split("x"))) for case in cases.split(",")]
    begin = time.perf_counter()
    generate = ENGINES[engine](model, world_size, **options)
    report = {
        "engine": engine, "version": importlib.import_module(engine).__version__, "model": model, "world_size": world_size,
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "revision": revision(Path(weft.__file__).parent),
        "ready_seconds": time.perf_counter() - begin, "repeats": repeats, "options": options,
        "rows": [],
    }  # fmt: skip
    print(f"{engine} {report['version']}: ready after {report['ready_seconds']:.1f} s", flush=True)
    vocab_size = DecoderConfig.named(model).vocab_size
    for prompts, tokens in shapes:
        row = measured(generate, prompts, tokens, repeats, vocab_size)
        report["rows"].append(row)
        times = f"first token {row['first_ms']:.1f} ms, then {row['per_token_ms']:.2f} ms a token"
        print(f"{engine} {prompts}x{tokens}: {times}", flush=True)
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
    one.add_argument("--repeats", type=int, default=5)
    one.add_argument("--json", type=Path, required=True, metavar="FILE")
    one.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="further arguments of the engine")
    both = commands.add_parser("table", help="compare runs")
    both.add_argument("files", type=Path, nargs="+")
    chosen = parser.parse_args()
    if chosen.command == "table":
        print(table(chosen.files))
    else:
        run(chosen.engine, chosen.model, chosen.world_size, chosen.cases, chosen.repeats, chosen.json, chosen.options)


if __name__ == "__main__":
    main()
