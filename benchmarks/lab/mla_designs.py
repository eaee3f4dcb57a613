"""Times of mla_decode_attention's designs on one GPU: plain blocks, and early copies with tiles beside them.

    python -m benchmarks.lab.mla_designs OUT.json [--seconds 40]

Latents of 512 and rotary parts of 64, bf16, pages of 64 tokens in random order. In CUDA graphs; caches are cold (more copies
than the L2 holds). Each result is compared with plain torch first. "tflops" counts both products, "tbytes" the cache, in TB/s.
Contexts of 4,096 tokens come first; what does not fit the time is left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.delta_and_latents import LATENT, PAGE, ROPE, draw, places
from benchmarks.measuring import MOST_ERROR, Rows, copies, timed
from weft.kernels.paged_cache import Sequences
from weft.ops.attention.decoding import splits_of
from weft.ops.attention.mla_decode_attention import MLA_DECODE_ATTENTION, MLAArguments
from weft.ops.attention.mla_plan import EarlyBlocks, LatentBlocks, MLACall
from weft.ops.local import machine_on
from weft.plan.planned import Machine
from weft.runtime.arithmetic import cdiv

SCALE = (128 + 64) ** -0.5
# 64 rows on tensor cores of sm_90, also where rows fill a quarter of them, and the plan's 16 rows with early copies.
TILES = (
    {"block_m": 64, "block_n": 64, "num_warps": 8, "num_stages": 2},
    {"block_m": 16, "block_n": 64, "num_warps": 8, "num_stages": 3},
)


class Shape(NamedTuple):
    """One call: heads of a rank, sequences, tokens of each."""

    heads: int
    batch: int
    context: int


SHAPES = [
    Shape(heads, batch, context)
    for context in (4096, 1024, 8192, 2048)
    for heads in (128, 64, 16)
    for batch in (128, 32, 1)
]


def designs_for(shape: Shape, machine: Machine) -> Iterator[LatentBlocks]:
    """Plain blocks, then early copies: with 64 rows a program, and 16 heads also with 16."""
    call = MLACall(shape.batch, shape.heads, cdiv(shape.context, PAGE) * PAGE, LATENT + ROPE, torch.bfloat16, "blocks")
    planned = MLA_DECODE_ATTENTION.plan(call, machine).design
    yield planned
    for tile in TILES[: 1 if shape.heads > 16 else 2]:
        pairs = shape.batch * cdiv(shape.heads, tile["block_m"])
        splits = splits_of(pairs, call.tokens, machine.caps.sms, planned.least)
        yield EarlyBlocks(**asdict(replace(planned, splits=splits, **tile)))


def rows_of(shape: Shape, machine: Machine) -> Iterator[dict[str, object]]:
    heads, batch, context = shape
    per = cdiv(context, PAGE)
    cache, q, q_rope = draw(batch * per, PAGE, LATENT + ROPE), draw(batch, heads, LATENT), draw(batch, heads, ROPE)
    pages = torch.randperm(batch * per, device=cache.device).to(torch.int32).view(batch, per)
    sequences = Sequences(pages, places([context] * batch))
    nbytes, flops = 2 * batch * context * (LATENT + ROPE), 2 * batch * heads * context * (2 * LATENT + ROPE)
    caches = [cache, *copies(lambda: cache.clone(), nbytes)[1:]]

    def attend(design: LatentBlocks, cache: torch.Tensor) -> torch.Tensor:
        given = MLAArguments(q, q_rope, cache, sequences, SCALE)
        return MLA_DECODE_ATTENTION.run(design, None, given)[0]

    for design in designs_for(shape, machine):
        fields = {"design": MLA_DECODE_ATTENTION.name_of(design), **asdict(design)}
        try:
            out = attend(design, cache)
            error = max(error_of(out[b], q[b], q_rope[b], cache[pages[b].long()], context) for b in {0, batch - 1})
        except Exception as failure:  # of one design: the others are timed
            yield {**shape._asdict(), **fields, "failed": f"{type(failure).__name__}: {str(failure)[:200]}"}
            continue
        result = timed(lambda c, design=design: attend(design, c), caches, None) if error < MOST_ERROR else {}
        us = result.get("us")
        rates = {"tflops": round(flops / us / 1e6, 1), "tbytes": round(nbytes / us / 1e6, 2)} if us else {}
        yield {**shape._asdict(), **fields, **result, **rates, "error": error}


def error_of(out: torch.Tensor, q: torch.Tensor, q_rope: torch.Tensor, cache: torch.Tensor, context: int) -> float:
    """Largest error over the largest result of one sequence, whose pages ``cache`` has in order."""
    rows = cache.flatten(0, 1)[:context].float()
    wanted = (torch.cat((q, q_rope), 1).float() @ rows.T * SCALE).softmax(1) @ rows[:, :LATENT]
    return ((out.float() - wanted).abs().max() / wanted.abs().max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=40.0, help="skip what is left after this time")
    options = parser.parse_args()
    start, results, machine = time.monotonic(), Rows(options.out), machine_on(torch.device("cuda", 0))
    for shape in SHAPES:
        if time.monotonic() - start > options.seconds:
            break
        for row in rows_of(shape, machine):
            results.add(row)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
