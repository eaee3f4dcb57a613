"""Regret of mla_decode_attention at 60 shapes on one GPU: 30 listed, 30 drawn. Rows as of ``weft bench --regret``.

    python -m benchmarks.latent_regret OUT.json [--seconds 120] [--seed 54]

A row's shape is (heads of a rank, sequences, tokens of each). Latents of 512 and rotary parts of 64, bf16, pages of 64 tokens
in random order, cold caches. Designs: the plan's, the further one by name, and some of the op's space. Each result is compared
with plain torch first. Designs take turns, a graph of calls each; the best one is the fastest of the even rounds, times are of
the odd ones.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch

from benchmarks.delta_and_latents import LATENT, PAGE, ROPE, draw, places
from benchmarks.lab.mla_designs import SCALE, error_of
from benchmarks.measuring import MOST_ERROR, captured, copies, said
from weft.bench.harness import machine as sources
from weft.bench.ops.labels import label
from weft.bench.regret.file import Kept, read, summary, write
from weft.bench.regret.measure import Row, told, with_times
from weft.kernels.paged_cache import Sequences
from weft.ops.attention.mla_decode_attention import MLA_DECODE_ATTENTION, MLAArguments
from weft.ops.attention.mla_plan import LatentBlocks, MLACall
from weft.ops.local import machine_on
from weft.plan.planned import AUTO, Machine
from weft.runtime.arithmetic import cdiv

# DeepSeek-V3 and Kimi-K2 have 128 and 64 heads, of which a rank of tensor parallelism has a share.
HEADS, BATCHES, CONTEXTS = (128, 64, 32, 16, 8), (1, 4, 16, 48, 128), (300, 1000, 3000, 10000, 30000)
MOST_TOKENS = 1 << 20  # of all sequences
ROUNDS, ROUND_US = 8, 400.0
SEARCH = 5  # designs besides the named ones

Shape = tuple[int, int, int]


def shapes(seed: int, listed: int = 30, drawn: int = 30) -> list[Shape]:
    """Listed shapes, whatever the seed, then drawn ones."""
    every = list(filter(_fits, product(HEADS, BATCHES, CONTEXTS)))
    made = random.Random("mla_decode_attention").sample(every, listed)
    chosen = random.Random(f"mla_decode_attention {seed}")
    while len(made) < listed + drawn:
        tokens = chosen.choice(CONTEXTS)
        shape = chosen.choice(HEADS), chosen.randint(1, chosen.choice(BATCHES)), tokens + chosen.randrange(tokens)
        if _fits(shape) and shape not in made:
            made.append(shape)
    return made


def _fits(shape: Shape) -> bool:
    return shape[1] * shape[2] <= MOST_TOKENS


def call_of(shape: Shape, design: str = AUTO) -> MLACall:
    """The plan's call of a shape."""
    heads, batch, context = shape
    return MLACall(batch, heads, cdiv(context, PAGE) * PAGE, LATENT + ROPE, torch.bfloat16, design)


def designs_of(shape: Shape, machine: Machine) -> dict[LatentBlocks, str]:
    """Designs with their labels, the plan's first."""
    op, call = MLA_DECODE_ATTENTION, call_of(shape)
    named = [op.plan(call_of(shape, name), machine).design for name in op.algorithms]
    further = (design for design in op.space(call, machine) if design.block_n >= 32 and design not in named)
    return {design: label(op, design) for design in (*named, *islice(further, SEARCH))}


def row_of(shape: Shape, machine: Machine) -> Row:
    """Row of a shape with the times of its designs."""
    heads, batch, context = shape
    per = cdiv(context, PAGE)
    cache, q, q_rope = draw(batch * per, PAGE, LATENT + ROPE), draw(batch, heads, LATENT), draw(batch, heads, ROPE)
    pages = torch.randperm(batch * per, device=cache.device).to(torch.int32).view(batch, per)
    sequences = Sequences(pages, places([context] * batch))
    caches = [cache, *copies(lambda: cache.clone(), 2 * batch * context * (LATENT + ROPE))[1:]]
    designs, graphs, dropped = designs_of(shape, machine), {}, {}

    def attend(design: LatentBlocks, cache: torch.Tensor) -> torch.Tensor:
        return MLA_DECODE_ATTENTION.run(design, None, MLAArguments(q, q_rope, cache, sequences, SCALE))[0]

    for design, name in designs.items():
        try:
            out = attend(design, cache)
            error = max(error_of(out[b], q[b], q_rope[b], cache[pages[b].long()], context) for b in {0, batch - 1})
            if not error < MOST_ERROR:
                raise ValueError(f"wrong answer: error {error:.3g}")
            graphs[name] = _graph(lambda x, design=design: attend(design, x), caches)
        except Exception as failure:  # of one design: all further ones are timed
            dropped[name] = said(failure)
    auto = next(iter(designs.values()))
    row = Row(
        op=MLA_DECODE_ATTENTION.alias, shape=shape, label=f"{heads} heads {batch}x{context}", world_size=1, dtype="bf16",
        auto=auto, reason=MLA_DECODE_ATTENTION.plan(call_of(shape), machine).reason, dropped=dropped,
    )  # fmt: skip
    return with_times(row, _halves(graphs)) if auto in graphs else row


def _graph(call: Callable[[torch.Tensor], Any], caches: list[torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, int]:
    """Graph of calls with all caches in turn, and their number."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call(caches[-1])
    end.record()
    torch.cuda.synchronize()
    turns = max(1, round(ROUND_US / max(5.0, 1e3 * begin.elapsed_time(end)) / len(caches)))
    return captured(lambda x=x: call(x) for x in caches * turns), len(caches) * turns


def _halves(graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]]) -> dict[str, tuple[float, float]]:
    """µs of a call by each design in the even and in the odd rounds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in graphs}
    names = list(graphs)
    for number in range(2 * ROUNDS + 2):
        first = number // 2 % len(names)  # both halves see the same neighbours
        for name in names[first:] + names[:first]:
            graph, calls = graphs[name]
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if number >= 2:  # two rounds warm up
                samples[name][number % 2].append(1e3 * begin.elapsed_time(end) / calls)
    return {name: tuple(map(statistics.median, halves)) for name, halves in samples.items()}


def rows(every: list[Shape], machine: Machine, seconds: float) -> Iterator[Row]:
    start = time.monotonic()
    for shape in every:
        if time.monotonic() - start > seconds:
            return
        yield row_of(shape, machine)
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0, help="begin no further shape after this time")
    parser.add_argument("--seed", type=int, default=54, help="of the drawn shapes")
    options = parser.parse_args()
    kept = read(options.out)
    known = {one.row.shape for one in kept if one.row.us}
    left = [shape for shape in shapes(options.seed) if shape not in known]
    gpu, versions = torch.cuda.get_device_name(), sources.versions()
    for row in rows(left, machine_on(torch.device("cuda", 0)), options.seconds):
        kept.append(Kept(gpu=gpu, versions=versions, row=row))
        write(options.out, kept)
        print(told(row), flush=True)
    print("\n".join(summary([one.row for one in kept])))


if __name__ == "__main__":
    main()
