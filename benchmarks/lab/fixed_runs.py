"""Attention in runs of positions, whose bits depend on positions alone, against the default designs, on one GPU.

    python -m benchmarks.lab.fixed_runs --out FILE [--no-bits]

First bits: rows of one sequence read whole, in chunks, decoded and verified, for heads of Qwen3-8B. Then times of a decode step
of 8 KV heads, as of ``benchmarks.lab.skinny`` "alone": calls of one CUDA graph, each on a cache of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.lab.skinny import BF16, Bench
from weft import ops
from weft.kernels.online_softmax import ScoreRule
from weft.kernels.paged_cache import PagedCache
from weft.ops.attention.fixed_runs import EARLY, Attended, Rows, attend_in_runs, fixed_runs_for, runs_of
from weft.ops.local import capabilities_of
from weft.runtime.files import put

Q_HEADS, HEADS, D, PAGE = 32, 8, 128, 64
# block_n, run, num_stages, early
VARIANTS = (
    (64, 512, 3, EARLY), (64, 512, 3, 0), (64, 256, 3, 0), (64, 512, 2, 0), (64, 256, 2, 0), (32, 512, 4, 0), (128, 512, 2, 0),
)  # fmt: skip


def check_bits(length: int = 1500) -> dict[str, int]:
    """Differing elements of rows computed in another way than whole."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(BF16)

    q, keys, values = random(length, Q_HEADS, D), *(random(40, HEADS, PAGE, D) for _ in range(2))
    table = torch.randperm(40, device="cuda", generator=generator)[None, :24].int()

    def read(chunk: int) -> torch.Tensor:
        parts = []
        for before in range(0, length, chunk):
            new = min(chunk, length - before)
            given = q[before : before + new], keys, values, table, [(before, new)]
            parts.append(ops.paged_prefill_attention(*given, invariant=True))
        return torch.cat(parts)

    def decode(tokens: torch.Tensor, queries: int) -> torch.Tensor:
        pages, lengths = table.expand(len(tokens) // queries, -1).contiguous(), (tokens + 1).int()
        return ops.paged_attention(q[tokens], keys, values, pages, lengths, queries=queries, invariant=True)

    whole, differing = read(length), {}
    plain = ops.paged_prefill_attention(q, keys, values, table, [(0, length)])
    differing["error against the default design"] = round(float((whole - plain).norm() / plain.norm()), 5)
    every = torch.arange(length, device="cuda")
    results = {f"chunks of {chunk}": (every, read(chunk)) for chunk in (1, 37, 256)}
    for count, queries in ((1, 1), (40, 1), (1496, 1), (4, 4), (1496, 4), (90, 9)):
        tokens = every[length - count :]
        results[f"{count} tokens, {queries} a sequence"] = tokens, decode(tokens, queries)
    for name, (tokens, rows) in results.items():
        differing[name] = int((rows.view(torch.int16) != whole[tokens].view(torch.int16)).sum())
    return differing


def times(bench: Bench, batch: int, length: int) -> dict[str, float]:
    """Microseconds of a decode step by the default design and by each variant."""
    pages = -(-length // PAGE)
    copies = max(1, min(8, (256 << 20) // (2 * batch * pages * HEADS * PAGE * D * 2)))
    caches = [torch.randn((2, batch * pages, HEADS, PAGE, D), device="cuda").to(BF16) for _ in range(copies)]
    table = torch.randperm(batch * pages, device="cuda").view(batch, pages).int()
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    q, tickets = (
        torch.randn((batch, Q_HEADS, D), device="cuda").to(BF16),
        torch.zeros(batch * HEADS, device="cuda").int(),
    )
    caps = capabilities_of(q.device)
    base = fixed_runs_for(D, BF16, caps, batch * HEADS, length)
    given = table, lengths, None, tickets

    def timed(calls: list[Callable[[], object]]) -> float:
        calls[0]()  # compiles it, outside the capture
        torch.cuda.synchronize()
        return bench.us(calls) / copies

    figures = {"default": timed([lambda c=c: ops.paged_attention(q, *c, *given) for c in caches])}
    rows, rule = Rows(lengths, lengths), ScoreRule.of(D**-0.5)
    options = {"queries": 1, "tickets": tickets}
    for block_n, run, stages, early in VARIANTS:
        design = replace(base, block_n=block_n, run=run, num_stages=stages, early=early)
        programs = min(2 * caps.sms // (batch * HEADS), runs_of(length, run, early))
        design = replace(design, programs=max(1, programs))
        figures[f"{block_n} {run} {stages}" + f" early {early}" * (early > 0)] = timed(
            [
                lambda c=c, d=design: attend_in_runs(d, q, Attended(PagedCache(*c), table, rule), rows, **options)
                for c in caches
            ]
        )
    return {name: round(us, 1) for name, us in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--no-bits", action="store_true")
    chosen = parser.parse_args()
    rows: list[dict[str, object]] = []
    if not chosen.no_bits:
        rows.append({"differing": check_bits()})
        print(json.dumps(rows[-1]), flush=True)
    bench = Bench()
    for batch, length in ((1, 1024), (1, 4096), (1, 16384), (32, 1024), (128, 1024), (32, 4096)):
        rows.append({"batch": batch, "length": length, "us": times(bench, batch, length)})
        print(json.dumps(rows[-1]), flush=True)
        put(chosen.out, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
