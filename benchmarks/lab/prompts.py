"""What launching a prompt's kernels one by one costs beside replaying them: a laboratory.

    python -m benchmarks.lab.prompts --world-size 2 --out benchmarks/lab/h200-x2-prompts.json

A model with random weights; prompts as an engine reads them, from their tokens on the host to the next ones on the GPU.
Medians of rank 0, milliseconds: until the host is done, and until the GPU is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import weft
from benchmarks.measuring import head
from weft.engine import Engine, SamplingParams
from weft.engine.prefill import PrefillChunk
from weft.engine.prompts import LAUNCHED_FIRST, RAGGED_FIRST, ragged_shape_of, shape_of_new
from weft.models import Qwen3Config
from weft.runtime.files import put

MAX_BATCH, PAGE_SIZE, CALLS = 64, 64, 5
# (before, tokens) of each sequence.
PROMPTS = {
    "1 of 128": [(0, 128)],
    "1 of 300": [(0, 300)],
    "1 of 600": [(0, 600)],
    "1 of 1200": [(0, 1200)],
    "1 of 2100": [(0, 2100)],
    "1 of 4096": [(0, 4096)],
    "300, 40 and 500": [(0, 300), (0, 40), (0, 500)],
    "20 of 5 to 176": [(0, 5 + 9 * index) for index in range(20)],
    "4096 more behind 8192": [(8192, 4096)],
}


def chunks_of(spans: list[tuple[int, int]]) -> list[PrefillChunk]:
    generator, chunks, page = torch.Generator().manual_seed(0), [], 1
    for slot, (before, length) in enumerate(spans):
        count = -(-(before + length) // PAGE_SIZE)
        tokens = torch.randint(100_000, (length,), generator=generator).tolist()
        pages, params = list(range(page, page + count)), SamplingParams(max_tokens=1)
        chunks.append(PrefillChunk(slot=slot, tokens=tokens, before=before, pages=pages, params=params, choose=True))
        page += count
    return chunks


def main(team: Any, model: str) -> dict[str, Any]:
    config = Qwen3Config.named(model)
    engine = Engine(config, team, max_batch=MAX_BATCH, page_size=PAGE_SIZE, max_seq_len=16384, pages=1200)
    runner, found = engine.batch.runner, {}

    def median(call: Callable[[], Any]) -> dict[str, float]:
        host, gpu = [], []
        for _ in range(CALLS):
            torch.cuda.synchronize()
            team.barrier()
            begin = time.perf_counter()
            call()
            host.append(time.perf_counter() - begin)
            torch.cuda.synchronize()
            gpu.append(time.perf_counter() - begin)
        return {"host": round(statistics.median(host) * 1e3, 2), "gpu": round(statistics.median(gpu) * 1e3, 2)}

    for name, spans in PROMPTS.items():
        chunks, seconds = chunks_of(spans), runner.graphs.capture_seconds
        runner.cuda_graph = False
        runner.prefill(chunks)  # compiles
        one_by_one = median(lambda chunks=chunks: runner.prefill(chunks))
        runner.cuda_graph = True
        for _ in range(max(LAUNCHED_FIRST, RAGGED_FIRST) + 1):  # captures
            runner.prefill(chunks)
        replayed = median(lambda chunks=chunks: runner.prefill(chunks))
        found[name] = {
            "padded to": str(shape_of_new(chunks) or ragged_shape_of(chunks, MAX_BATCH)),
            "one by one": one_by_one,
            "replayed": replayed,
            "seconds to capture": round(runner.graphs.capture_seconds - seconds, 2),
        }
        if team.rank == 0:
            print(name, found[name], flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--model", default="qwen3-32b")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = weft.launch(main, options.world_size, "cuda", args=(options.model,), heap_bytes=4 << 30)[0]
    put(options.out, json.dumps({"where": head(), "unit": "milliseconds", "prompts": found}, indent=1) + "\n")
