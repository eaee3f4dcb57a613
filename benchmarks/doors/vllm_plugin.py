"""vLLM with and without weft's plugin: first token, time of a token, and the tokens themselves.

    python -m benchmarks.doors.vllm_plugin run --plugin off --model qwen3-8b --world-size 2 --json RUNS/vllm-off.json [--quick]
    python -m benchmarks.doors.vllm_plugin run --plugin on --model qwen3-8b --world-size 2 --json RUNS/vllm-on.json [--quick]
    python -m benchmarks.doors.vllm_plugin table RUNS/vllm-off.json RUNS/vllm-on.json [--json RUNS/vllm.json]

A run is a process of its own, since vLLM reads WEFT_VLLM where it starts. Random weights, random prompts, greedy, CUDA graphs;
--quick leaves torch.compile out and captures few sizes, so that a run starts within a minute. The table compares tokens too: at
the first one that differs the probabilities of both must be within a near-tie, as rounding decides it. A source tree of weft
works like an installed one: the script writes the entry point by which vLLM finds the plugin. --room and --engines as in
benchmarks/engines.py: both runs start together and measure in turn, each with its share of the memory (--options).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from weft.runtime.files import put

SHAPES = ((1, 128), (8, 1024), (32, 128), (1, 4096), (4, 4096))  # prompts, and tokens of each
NEW, REPEATS = 32, 3
MOST_LENGTH = 4608
# Difference of two log-probabilities below which rounding decides; bf16 logits of a 32B model differ by some hundredths.
NEAR_TIE = 0.1
TIMES = ("first_ms", "per_token_ms")


def offer_plugin(folder: Path) -> None:
    """Put the entry point of weft's plugin, for this process and its children, into ``folder``."""
    info = folder / "weft_door-0.dist-info"
    info.mkdir()
    put(info / "METADATA", "Metadata-Version: 2.1\nName: weft-door\nVersion: 0\n")
    put(info / "entry_points.txt", "[vllm.general_plugins]\nweft = weft.integrations.vllm:register\n")
    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), root, os.environ.get("PYTHONPATH"))))
    sys.path[:0] = [str(folder), root]


def engine(model: str, world_size: int, quick: bool, given: dict[str, Any]) -> Any:
    from vllm import LLM

    from benchmarks.engines import folder_of

    graphs = {"cudagraph_capture_sizes": sorted({prompts for prompts, _ in SHAPES})}
    without_compile = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"} if quick else {}
    options = {"compilation_config": graphs | without_compile, **given}
    return LLM(
        model=str(folder_of(model)), skip_tokenizer_init=True, load_format="dummy", tensor_parallel_size=world_size,
        max_model_len=MOST_LENGTH, max_num_seqs=max(prompts for prompts, _ in SHAPES), enable_prefix_caching=False, seed=0,
        **options,
    )  # fmt: skip


def measured(llm: Any, prompts: int, tokens: int, vocab_size: int) -> dict[str, Any]:
    """Times of generate() for one token and for NEW more, and what the last call has generated."""
    from vllm import SamplingParams

    draw = random.Random(f"{prompts}x{tokens}")
    given = [{"prompt_token_ids": [draw.randrange(vocab_size) for _ in range(tokens)]} for _ in range(prompts)]
    seconds: dict[int, list[float]] = {1: [], 1 + NEW: []}
    for repeat in range(-1, REPEATS):
        for new, taken in seconds.items():
            how = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
            begin = time.perf_counter()
            llm.generate(given, how, use_tqdm=False)
            if repeat >= 0:
                taken.append(time.perf_counter() - begin)
    how = SamplingParams(max_tokens=1 + NEW, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=5)
    answers = [one.outputs[0] for one in llm.generate(given, how, use_tqdm=False)]
    first, all_of_them = map(statistics.median, seconds.values())
    return {
        "prompts": prompts, "tokens": tokens, "first_ms": first * 1e3, "per_token_ms": (all_of_them - first) / NEW * 1e3,
        "answers": [list(answer.token_ids) for answer in answers],
        "likely": [[{str(token): of.logprob for token, of in step.items()} for step in answer.logprobs] for answer in answers],
    }  # fmt: skip


def run(plugin: str, model: str, world_size: int, chosen: argparse.Namespace) -> None:
    os.environ |= {
        "WEFT_VLLM": "1" if plugin == "on" else "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    with tempfile.TemporaryDirectory() as folder:
        offer_plugin(Path(folder))
        from benchmarks.engines import alone
        from benchmarks.measuring import head

        begin = time.perf_counter()
        llm = engine(model, world_size, chosen.quick, chosen.options)
        import torch
        import vllm

        from weft.models.config import DecoderConfig

        report: dict[str, Any] = {
            **head(), "door": "vllm", "plugin": plugin, "vllm": vllm.__version__, "model": model, "world_size": world_size,
            "quick": chosen.quick, "options": chosen.options, "gpu": torch.cuda.get_device_name(),
            "ready_seconds": time.perf_counter() - begin, "rows": [],
        }  # fmt: skip
        print(f"plugin {plugin}: ready after {report['ready_seconds']:.0f} s", flush=True)
        with alone(chosen.room, chosen.engines, chosen.json.stem, begin):
            for prompts, tokens in SHAPES:
                row = measured(llm, prompts, tokens, DecoderConfig.named(model).vocab_size)
                report["rows"].append(row)
                times = f"first {row['first_ms']:.1f} ms, {row['per_token_ms']:.2f} ms a token"
                print(f"plugin {plugin} {prompts}x{tokens}: {times}", flush=True)
                put(chosen.json, json.dumps(report) + "\n")


def first_difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[int, float, int]:
    """(answers that differ, largest gap of log-probabilities at a first difference, tokens before the earliest one)."""
    differing, worst, earliest = 0, 0.0, 1 + NEW
    for place, (ours, theirs) in enumerate(zip(one["answers"], other["answers"], strict=True)):
        at = next((at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if at is None:
            continue
        differing, earliest = differing + 1, min(earliest, at)
        for run, mine in ((one, ours), (other, theirs)):
            likely, rival = run["likely"][place][at], (theirs if mine is ours else ours)[at]
            # A token beyond the likeliest five is further away than the fifth.
            worst = max(worst, likely[str(mine[at])] - likely.get(str(rival), min(likely.values()) - 1.0))
    return differing, worst, earliest


def joined(off: dict[str, Any], on: dict[str, Any]) -> dict[str, Any]:
    """Both runs in one report: times, and how far tokens differ, without the tokens themselves."""
    rows = []
    for one, other in zip(off["rows"], on["rows"], strict=False):
        differing, gap, earliest = first_difference(one, other)
        row = {name: one[name] for name in ("prompts", "tokens")}
        row |= {"without": {name: one[name] for name in TIMES}, "with": {name: other[name] for name in TIMES}}
        rows.append(row | {"differing": differing, "gap": gap, "earliest": earliest})
    return {name: value for name, value in off.items() if name not in ("plugin", "rows")} | {"rows": rows}


def table(report: dict[str, Any]) -> str:
    """A report of ``joined`` as Markdown. ValueError if tokens differ by more than a near-tie."""
    where = f"{report['world_size']} x {report['gpu']}"
    lines = [
        f"vLLM {report['vllm']}, {report['model']}, {where}: first token / each further one, ms", "",
        "| prompts x tokens | without | with weft | gain | answers that differ |", "|---|---|---|---|---|",
    ]  # fmt: skip
    far = []
    for row in report["rows"]:
        label = f"{row['prompts']}x{row['tokens']}"
        one, other = row["without"], row["with"]
        cells = [f"{times['first_ms']:.1f} / {times['per_token_ms']:.2f}" for times in (one, other)]
        gain = " / ".join(f"{one[field] / other[field]:.2f}" for field in TIMES)
        differing = row["differing"]
        said = f"{differing}, from token {row['earliest']} on, by {row['gap']:.3f}" if differing else "0"
        lines.append(f"| {label} | {cells[0]} | {cells[1]} | {gain} | {said} |")
        if row["gap"] > NEAR_TIE:
            far.append(label)
    if far:
        raise ValueError("\n".join([*lines, f"tokens differ by more than {NEAR_TIE} at {', '.join(far)}"]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("--plugin", choices=("on", "off"), required=True)
    one.add_argument("--model", default="qwen3-8b")
    one.add_argument("--world-size", type=int, default=2)
    one.add_argument("--quick", action="store_true")
    one.add_argument("--json", type=Path, required=True)
    one.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="further arguments of vLLM's LLM")
    one.add_argument("--room", type=Path, metavar="FOLDER", help="where engines that start at the same time meet")
    one.add_argument("--engines", type=int, default=1, help="number of engines that meet in the room")
    two = commands.add_parser("table")
    two.add_argument(
        "files", type=Path, nargs="+", help="a run without and one with the plugin, or what --json wrote of two"
    )
    two.add_argument("--json", type=Path, help="put both into one file, without the tokens")
    options = parser.parse_args()
    if options.command == "run":
        from benchmarks.engines import arrive

        try:
            run(options.plugin, options.model, options.world_size, options)
        finally:
            arrive(options.room, options.json.stem)
    else:
        reports = [json.loads(file.read_text()) for file in options.files]
        report = reports[0] if len(reports) == 1 else joined(*reports)
        if options.json is not None:
            put(options.json, json.dumps(report, indent=1) + "\n")
        print(table(report))


if __name__ == "__main__":
    main()
