"""A decode step's attention between two products, in one kernel and in two, on one GPU: a laboratory.

    python -m benchmarks.lab.decode_attention --out benchmarks/lab/h200-decode-attention.json

16 query heads on 2 KV heads of 128, as a rank of four has of Qwen3-32B, behind its qkv product (hidden size 5120) and before
its o product. A time is that of one such triple in a CUDA graph of 16, each with weights and a cache of its own, less that of
the two products alone; the median of replays, variants in turn.

    two            qk_norm_rope, then paged_attention
    early, late    decode_attention that asks for its first keys and values before it makes the queries, or does not
    chosen         decode_attention as its rule has it
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from benchmarks.lab.skinny import BF16, GBPS, Bench
from weft import ops
from weft.ops.factored_norm import FactoredNorm

# The module: an op of the same name hides it.
decoding = importlib.import_module("weft.ops.decode_attention")
Q_HEADS, KV_HEADS, D, PAGE, HIDDEN, EPS, LAYERS = 16, 2, 128, 64, 5120, 1e-6, 16
# Sequences, and tokens of each.
SHAPES = ((1, 128), (8, 128), (32, 1024), (128, 128), (16, 4000), (1, 4000))


class Layers:
    """Weights and caches of LAYERS layers, and what a step of ``batch`` sequences of ``length`` tokens is given."""

    def __init__(self, bench: Bench, batch: int, length: int) -> None:
        device = bench.device
        each = -(-length // PAGE)
        shape = (2, batch * each, KV_HEADS, PAGE, D)
        self.caches = [torch.randn(shape, device=device, dtype=BF16) for _ in range(LAYERS)]
        self.pages = torch.randperm(batch * each, device=device).to(torch.int32).view(batch, each)
        self.lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        self.at = self.lengths.long() - 1
        self.slots = self.pages[:, -1].long() * PAGE + self.at % PAGE
        self.angles = torch.randn(length, D, device=device)
        self.head_norm = torch.ones(D, device=device, dtype=BF16)
        self.tickets = torch.zeros(batch * KV_HEADS, dtype=torch.int32, device=device)
        self.qkv = bench.weights((Q_HEADS + 2 * KV_HEADS) * D, HIDDEN)
        self.o = bench.weights(HIDDEN, Q_HEADS * D)
        self.x = FactoredNorm(
            torch.randn(batch, HIDDEN, device=device, dtype=BF16), torch.rand(batch, 20, device=device), EPS
        )
        self.attended = torch.randn(batch, Q_HEADS * D, device=device, dtype=BF16)

    def project(self, layer: int) -> torch.Tensor | FactoredNorm:
        return ops.matmul_parts(self.x, self.qkv[layer % len(self.qkv)])

    def two(self, layer: int) -> torch.Tensor:
        norms = (self.head_norm, self.head_norm, EPS, self.angles)
        q = ops.qk_norm_rope(self.project(layer), *norms, self.at, self.slots, *self.caches[layer])
        return ops.paged_attention(q, *self.caches[layer], self.pages, self.lengths, tickets=self.tickets)

    def one(self, layer: int) -> torch.Tensor:
        norms = (self.head_norm, self.head_norm, EPS, self.angles)
        projected, places = self.project(layer), (self.pages, self.lengths)
        return ops.decode_attention(projected, *norms, *self.caches[layer], *places, tickets=self.tickets)

    def none(self, layer: int) -> torch.Tensor:
        self.project(layer)
        return self.attended

    def steps(self, attend: Callable[[int], torch.Tensor]) -> list[Callable[[], object]]:
        def step(layer: int) -> torch.Tensor:
            return ops.matmul(attend(layer).view(len(self.lengths), -1), self.o[layer % len(self.o)])

        return [lambda layer=layer: step(layer) for layer in range(LAYERS)]


def row(bench: Bench, batch: int, length: int) -> dict[str, object]:
    layers, rule = Layers(bench, batch, length), decoding.EARLY_PAIRS
    expected = layers.two(0).float()
    error = ((layers.one(0).float() - expected).norm() / expected.norm()).item()
    if not error < 1e-2:
        raise ValueError(f"{batch} x {length}: decode_attention differs from the two ops by {error} of their RMS")
    us = {}
    for name, pairs, attend in (
        ("none", rule, layers.none),
        ("two", rule, layers.two),
        ("early", 0, layers.one),
        ("late", 1 << 20, layers.one),
        ("chosen", rule, layers.one),
    ):
        decoding.EARLY_PAIRS = pairs
        steps = layers.steps(attend)
        steps[0]()
        us[name] = bench.us(steps) / LAYERS
    decoding.EARLY_PAIRS = rule
    alone = us.pop("none")
    floor = 2 * 2 * batch * length * KV_HEADS * D / GBPS / 1e3
    times = {name: round(time - alone, 2) for name, time in us.items()}
    return {"batch": batch, "length": length, "floor_us": round(floor, 2), "products_us": round(alone, 2), "us": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    chosen = parser.parse_args()
    bench = Bench()
    document = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cuda": torch.version.cuda, "date": datetime.date.today().isoformat(), "gbps": GBPS,
        "command": " ".join(["python -m benchmarks.lab.decode_attention", *sys.argv[1:]]),
        "rows": [row(bench, *shape) for shape in SHAPES],
    }  # fmt: skip
    chosen.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
