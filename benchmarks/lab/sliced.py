"""GEMMs in slices of K, whose bits depend neither on M nor on ranks, against the default designs, on one GPU.

    python -m benchmarks.lab.sliced --out FILE [--models 8b,32b] [--world-size 1,2] [--rows 1,32,128] [--no-bits]

First bits: each design's sums of 130 rows, and of fewer rows, must be those of the first design. Then times as of
``benchmarks.lab.skinny`` "alone": a GEMM in a CUDA graph of many, with cold weights; the sum of the nodes is included.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.lab.skinny import BF16, Bench
from weft import ops
from weft.kernels.slices import SLICES
from weft.ops.gemm import sliced
from weft.ops.gemm.sliced import COLUMN_SLICES, Sliced, default_sliced, step_of
from weft.ops.local import capabilities_of
from weft.runtime.files import put

# hidden, columns of q, k and v, columns of attention's result, intermediate
MODELS = {"0.6b": (1024, 4096, 2048, 3072), "8b": (4096, 6144, 4096, 12288), "32b": (5120, 10240, 8192, 25600)}
DESIGNS = [
    Sliced(block_m=m, block_n=n, programs=p, num_warps=w, num_stages=s)
    for m, n, p, w, s in (
        (64, 16, 1, 4, 6),
        (64, 16, 2, 4, 6),
        (64, 16, 8, 4, 4),
        (64, 32, 4, 4, 4),
        (64, 64, 1, 4, 4),
        (64, 128, 2, 4, 4),
        (128, 32, 1, 4, 4),
        (128, 64, 8, 8, 3),
        (128, 128, 1, 8, 4),
        (128, 128, 4, 8, 3),
        (128, 256, 1, 8, 3),
        (256, 64, 2, 8, 3),
    )
]


def projections(model: str, world_size: int) -> Iterator[tuple[str, int, int, int, bool]]:
    """(name, N, K, slices of a rank, whether nodes are rounded)"""
    hidden, qkv, attention, intermediate = MODELS[model]
    yield "qkv", qkv // world_size, hidden, COLUMN_SLICES, False
    yield "gate-up", 2 * intermediate // world_size, hidden, COLUMN_SLICES, False
    yield "o", hidden, attention // world_size, SLICES // world_size, True
    yield "down", hidden, intermediate // world_size, SLICES // world_size, True


def product(x: torch.Tensor, w: torch.Tensor, slices: int, rounded: bool, design: Sliced) -> torch.Tensor:
    step = step_of("sliced", x.shape[1], slices, slices)
    return sliced.total(sliced.run(design, x, w, slices, rounded=rounded, step=step), BF16, rounded=rounded)


def check_bits() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    for K, slices, rounded in ((2048, 8, True), (4096, 2, False)):
        x, w = (torch.randn((n, K), device="cuda", generator=generator).to(BF16) for n in (130, 200))
        whole, expected = product(x, w, slices, rounded, DESIGNS[0]), x.float() @ w.float().T
        error = (whole.float() - expected).norm() / expected.norm()
        # Sums that are 0 but for rounding errors, which show the order of all terms.
        for first in range(0, K, K // slices):
            left, right = (first + torch.randperm(K // slices, device="cuda", generator=generator)).chunk(2)
            x[:, right], w[:, right] = x[:, left], -w[:, left]
        whole = product(x, w, slices, rounded, DESIGNS[0])
        differing = {}
        for design in DESIGNS:
            for M in (1, 2, 16, 17, 33, 64, 65, 130):
                out = product(x[:M], w, slices, rounded, design)
                if bits := int((out.view(torch.int16) != whole[:M].view(torch.int16)).sum()):
                    differing[f"{design} M={M}"] = bits
        print(
            json.dumps({"bits": [K, slices, rounded], "error": round(float(error), 6), "differing": differing}),
            flush=True,
        )


def around(base: Sliced, slices: int, M: int) -> Iterator[Sliced]:
    """The default, and designs that may be faster."""
    yield base
    for programs in (1, 2, 4, 8):
        if programs <= slices:
            yield replace(base, programs=programs)
    for block_m, warps in ((64, 4), (128, 4), (128, 8)):
        for stages in (3, 4, 6):
            yield replace(base, block_m=block_m, num_warps=warps, num_stages=stages)
    if M >= 128:
        yield replace(base, block_m=128, block_n=256, num_warps=8, num_stages=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="8b")
    parser.add_argument("--world-size", default="2")
    parser.add_argument("--rows", default="1,32,128")
    parser.add_argument("--no-bits", action="store_true")
    parser.add_argument("--variants", action="store_true", help="designs around the default too")
    chosen = parser.parse_args()
    if not chosen.no_bits:
        check_bits()
    bench, rows = Bench(), []
    caps = capabilities_of(bench.device)
    for model in chosen.models.split(","):
        for world_size in map(int, chosen.world_size.split(",")):
            for name, N, K, slices, rounded in projections(model, world_size):
                weights = bench.weights(N, K)
                for M in map(int, chosen.rows.split(",")):
                    row = {"model": model, "W": world_size, "name": name, "M": M, "N": N, "K": K}
                    base = default_sliced(M, N, slices, caps)
                    designs = list(dict.fromkeys(around(base, slices, M) if chosen.variants else [base]))
                    row |= timed(bench, weights, M, (slices, rounded), designs)
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                    put(chosen.out, json.dumps(rows, indent=1) + "\n")


def timed(
    bench: Bench, weights: list[torch.Tensor], M: int, tree: tuple[int, bool], designs: list[Sliced]
) -> dict[str, object]:
    """Microseconds of the default design, of the first of ``designs``, and of the fastest."""
    x = torch.randn((M, weights[0].shape[1]), dtype=BF16, device=bench.device)
    ops.matmul(x, weights[0])  # cuBLAS makes its handle, which it may not while a graph is captured
    default, us = bench.us([lambda w=w: ops.matmul(x, w) for w in weights]), {}
    for design in designs:
        try:
            product(x, weights[0], *tree, design)
            us[design] = bench.us([lambda w=w, d=design: product(x, w, *tree, d) for w in weights])
        except Exception as error:
            us[design] = float("inf")
            print(design, repr(error)[:200], flush=True)
    best, count = min(designs, key=us.__getitem__), len(weights)
    figures = {"default": default, "sliced": us[designs[0]], "best": us[best]}
    return {name: round(time / count, 2) for name, time in figures.items()} | {
        "design": repr(designs[0]),
        "best design": repr(best),
    }


if __name__ == "__main__":
    main()
