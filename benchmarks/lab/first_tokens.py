"""Where the time to the first tokens of an engine's call goes: the host before the GPU begins, kernels, and gaps between them.

    python -m benchmarks.lab.first_tokens OUT.json --model qwen3-8b --quantization fp8 --chunk-tokens 4096,16384

One GPU, random weights and prompts. A row is a number of prompts of equal length and a largest number of tokens of a pass
(``EngineConfig.chunk_tokens``): milliseconds of a call for one token each, the median of --repeats after calls that capture
graphs; and of one more call under the profiler the milliseconds until the first kernel begins and from there until the last
one ends, those in which kernels run, the sums by name, and the longest gaps with the kernel after each. The call is made in
the rank's process, so what a ``weft.LLM`` sends it through a pipe is not in it. Kernels that are launched before the one before
them has ended wait for it, which is in their sums.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import weft
from benchmarks.measuring import head
from weft.bench.models.breakdown import kernels_of
from weft.engine import Engine, SamplingParams
from weft.models.config import DecoderConfig
from weft.runtime.files import put

CASES = "1x128,32x128,128x128,1x4096,1x8192"
# Calls before those that count: shapes of prompts are captured when they recur (weft/engine/prompts.py).
UNCOUNTED = 6
MOST_KERNELS, MOST_GAPS = 12, 8
PAGE_SIZE = 64


def profiled(call: Callable[[], object]) -> dict[str, Any]:
    """One call under the profiler, as the module's docstring says; milliseconds."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with torch.profiler.record_function("call"):
            call()
        torch.cuda.synchronize()
    begin = next(event.time_range.start for event in profiler.events() if event.name == "call")
    # The call may be an event of the GPU too.
    kernels = sorted((one for one in kernels_of(profiler) if one.name != "call"), key=lambda kernel: kernel.start)
    first = reached = kernels[0].start
    busy, gaps = 0.0, []
    sums: Counter[str] = Counter()
    for name, start, end in kernels:
        if start > reached:
            gaps.append((round((start - reached) / 1e3, 3), name))
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
        sums[name] += end - start
    return {
        "before_ms": (first - begin) / 1e3, "span_ms": (reached - first) / 1e3, "busy_ms": busy / 1e3,
        "kernels_ms": {name: round(us / 1e3, 3) for name, us in sums.most_common(MOST_KERNELS)},
        "gaps_ms": sorted(gaps, reverse=True)[:MOST_GAPS],
    }  # fmt: skip


def measure(team: Any, model: str, quantization: str | None, cases: str, chunks: list[int], repeats: int) -> list[Any]:
    sizes, shapes = DecoderConfig.named(model), [tuple(map(int, case.split("x"))) for case in cases.split(",")]
    options: dict[str, Any] = {
        "quantization": quantization, "prefix_caching": False, "max_batch": max(prompts for prompts, _ in shapes),
        "max_seq_len": max(tokens for _, tokens in shapes) + PAGE_SIZE, "page_size": PAGE_SIZE,
        "pages": 1 + max(prompts * -(-(tokens + 1) // PAGE_SIZE) for prompts, tokens in shapes),
    }  # fmt: skip
    rows: list[Any] = []
    for chunk in chunks:
        engine = Engine(sizes, team, chunk_tokens=chunk, **options)
        for prompts, tokens in shapes:
            rows.append(row_of(engine, sizes.vocab_size, prompts, tokens, repeats) | {"chunk_tokens": chunk})
        del engine
    return rows


def row_of(engine: Engine, vocab_size: int, prompts: int, tokens: int, repeats: int) -> dict[str, Any]:
    draw = random.Random(f"{prompts}x{tokens}")

    def drawn() -> list[list[int]]:
        return [[draw.randrange(vocab_size) for _ in range(tokens)] for _ in range(prompts)]

    def call(ids: list[list[int]]) -> float:
        params = [SamplingParams(max_tokens=1, ignore_eos=True)] * prompts
        begin = time.perf_counter()
        for _ in engine.answer_in_steps(ids, params, agreed=True):
            pass
        return (time.perf_counter() - begin) * 1e3

    for _ in range(UNCOUNTED):
        call(drawn())
    taken = [call(drawn()) for _ in range(repeats)]
    parts = profiled(partial(call, drawn()))
    row = {"prompts": prompts, "tokens": tokens, "ms": statistics.median(taken), "all_ms": taken, **parts}
    print({name: value for name, value in row.items() if name != "kernels_ms"}, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--quantization", choices=["fp8"], help="block fp8; without it bf16")
    parser.add_argument("--cases", default=CASES, help="prompts x tokens, with commas between")
    parser.add_argument("--chunk-tokens", default="4096", help="most tokens of a pass, with commas between")
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    chunks = list(map(int, chosen.chunk_tokens.split(",")))
    given = chosen.model, chosen.quantization, chosen.cases, chunks, chosen.repeats
    rows = weft.launch(measure, 1, "cuda", args=given)[0]
    put(
        chosen.out,
        json.dumps({**head(model=chosen.model, quantization=chosen.quantization), "rows": rows}, indent=1) + "\n",
    )


if __name__ == "__main__":
    main()
