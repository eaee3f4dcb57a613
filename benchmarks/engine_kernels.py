"""DeepGEMM's kernels for models in blocks of fp8, compiled by many processes before an engine calls them one by one.

    bash benchmarks/engine_packages.sh vllm ARCHIVES python -m benchmarks.engine_kernels vllm qwen3-8b qwen3-32b
    bash benchmarks/engine_packages.sh sglang ARCHIVES python -m benchmarks.engine_kernels sglang qwen3-8b

The kernel of a GEMM depends on its number of rows, so an engine that compiles when it first meets a number (some ten seconds a
kernel) does so within the calls of a measurement, or compiles for ten minutes before. Here each process calls the dense layers
of the models on one GPU with other numbers of rows, up to --rows in steps of a tile's, the measured ones first; the
kernels go to the folder where the engine looks for them. Not for experts, which neither engine gives to DeepGEMM by default.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import time
from typing import Any

import torch

from weft.models.config import DecoderConfig
from weft.models.families import PUBLISHED

# Rows of a tile at least: the number of tiles, not of rows, chooses the kernel.
TILE = 64
MEASURED = (8, 32, 128, 1024, 4096, 8192)
MODULES = {"vllm": "vllm.third_party.deep_gemm", "sglang": "deep_gemm"}


def layers(model: str) -> list[tuple[int, int]]:
    """(rows, columns) of the weights that are stored in blocks of fp8, experts left out."""
    config = PUBLISHED[model]
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or DecoderConfig.named(model).head_dim
    shapes = [((heads + 2 * config["num_key_value_heads"]) * size, hidden), (hidden, heads * size)]
    if "num_experts" not in config:
        shapes += [(2 * config["intermediate_size"], hidden), (hidden, config["intermediate_size"])]
    return shapes


def calls(models: list[str], rows: int) -> list[tuple[int, int, int]]:
    """(rows of the input, rows and columns of a weight) of all calls, the measured numbers of rows first."""
    shapes = sorted({shape for model in models for shape in layers(model)})
    counts = [count for count in MEASURED if count <= rows]
    counts += [count for count in range(TILE, rows + 1, TILE) if count not in counts]
    return [(count, *shape) for count in counts for shape in shapes]


def library(engine: str) -> Any:
    """The engine's DeepGEMM, which puts kernels where the engine looks for them."""
    folder = os.environ["SGLANG_DG_CACHE_DIR"] if engine == "sglang" else os.environ["VLLM_CACHE_ROOT"] + "/deep_gemm"
    os.environ.setdefault("DG_JIT_CACHE_DIR", folder)
    module = importlib.import_module(MODULES[engine])
    module.set_pdl(True)  # as both engines do
    return module


def call(module: Any, count: int, columns: int, depth: int) -> None:
    """One GEMM of zeros, its scales laid out as an engine's."""
    blocks = depth // 128
    left = torch.zeros(count, depth, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.zeros(blocks, (count + 3) // 4 * 4, device="cuda").t()[:count]
    right = torch.zeros(columns, depth, dtype=torch.float8_e4m3fn, device="cuda")
    blocks_of_right = torch.zeros(columns // 128, blocks, device="cuda")
    out = torch.empty(count, columns, dtype=torch.bfloat16, device="cuda")
    module.fp8_gemm_nt((left, scales), (right, blocks_of_right), out)


def work(engine: str, waiting: Any) -> None:
    module = library(engine)
    while (one := waiting.get()) is not None:
        call(module, *one)
        torch.cuda.empty_cache()  # engines start beside it
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=MODULES)
    parser.add_argument("models", nargs="+", choices=PUBLISHED)
    parser.add_argument("--rows", type=int, default=8192, help="largest number of rows of a step")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    chosen = parser.parse_args()
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    waiting = context.Queue()
    for one in (*calls(chosen.models, chosen.rows), *[None] * chosen.processes):
        waiting.put(one)
    workers = [context.Process(target=work, args=(chosen.engine, waiting)) for _ in range(chosen.processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    failed = sum(worker.exitcode != 0 for worker in workers)
    took = time.perf_counter() - start
    print(f"{chosen.engine}: kernels of {', '.join(chosen.models)} after {took:.0f} s, {failed} failed", flush=True)


if __name__ == "__main__":
    main()
