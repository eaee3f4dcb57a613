"""Decode attention between its two GEMMs on one GPU, in one kernel and in two: a laboratory.

    python -m benchmarks.lab.decode_attention --out benchmarks/lab/h100-decode-attention.json

Eight query heads of 128 a KV head, and the KV heads of a rank of Qwen3-32B on four or two ranks, between the qkv and the o GEMM
(hidden size 5120). A time is that of one such triple in a CUDA graph of 8, each with its own weights and cache, less that of
the two GEMMs alone: the median of replays, variants in turn.

    two         qk_norm_rope, then paged_attention
    64, 32, 16  decode_attention by programs that take this number of tokens a step, a warp for 16 of them
    chosen      decode_attention with the config of its rule
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.lab.skinny import BF16, Bench
from benchmarks.measuring import Rows
from weft import ops
from weft.kernels.deferred_norm import DeferredNorm
from weft.ops.attention.decoding import SplitKV, split_kv_for
from weft.ops.op import find_op
from weft.plan.memo import forget
from weft.plan.planned import Planned

GROUP, D, PAGE, HIDDEN, EPS, LAYERS = 8, 128, 64, 5120, 1e-6, 8
BLOCKS = (64, 32, 16)
# KV heads of a rank, sequences, and tokens of each.
SHAPES = (
    (2, 1, 128), (2, 1, 4000), (2, 8, 128), (2, 16, 4000), (2, 32, 1024), (2, 64, 128), (2, 80, 4000), (2, 128, 128),
    (2, 128, 1024), (2, 256, 128), (2, 256, 1024), (2, 512, 128), (4, 1, 128), (4, 32, 1024), (4, 128, 128), (4, 128, 1024),
    (4, 256, 256),
)  # fmt: skip


class Layers:
    """Weights and caches of LAYERS layers, and inputs of a step of ``batch`` sequences."""

    def __init__(self, bench: Bench, kv_heads: int, batch: int, length: int) -> None:
        device = bench.device
        each = -(-length // PAGE)
        shape = (2, batch * each, kv_heads, PAGE, D)
        self.caches = [torch.randn(shape, device=device, dtype=BF16) for _ in range(LAYERS)]
        self.pages = torch.randperm(batch * each, device=device).to(torch.int32).view(batch, each)
        self.lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        self.at = self.lengths.long() - 1
        self.slots = self.pages[:, -1].long() * PAGE + self.at % PAGE
        self.angles = torch.randn(length, D, device=device)
        self.head_norm = torch.ones(D, device=device, dtype=BF16)
        self.arrivals = torch.zeros(batch * kv_heads, dtype=torch.int32, device=device)
        self.qkv = bench.weights((GROUP + 2) * kv_heads * D, HIDDEN)
        self.o = bench.weights(HIDDEN, GROUP * kv_heads * D)
        self.x = DeferredNorm(
            torch.randn(batch, HIDDEN, device=device, dtype=BF16), torch.rand(batch, 20, device=device), EPS
        )
        self.attended = torch.randn(batch, GROUP * kv_heads * D, device=device, dtype=BF16)

    def project(self, layer: int) -> torch.Tensor | DeferredNorm:
        return ops.matmul_parts(self.x, self.qkv[layer % len(self.qkv)])

    def two(self, layer: int) -> torch.Tensor:
        norms = (self.head_norm, self.head_norm, EPS, self.angles)
        q = ops.qk_norm_rope(self.project(layer), *norms, self.at, self.slots, *self.caches[layer])
        return ops.paged_attention(q, *self.caches[layer], self.pages, self.lengths, tickets=self.arrivals)

    def one(self, layer: int) -> torch.Tensor:
        norms = (self.head_norm, self.head_norm, EPS, self.angles)
        projected, places = self.project(layer), (self.pages, self.lengths)
        return ops.decode_attention(projected, *norms, *self.caches[layer], *places, tickets=self.arrivals)

    def none(self, layer: int) -> torch.Tensor:
        self.project(layer)
        return self.attended

    def steps(self, attend: Callable[[int], torch.Tensor]) -> list[Callable[[], object]]:
        def step(layer: int) -> torch.Tensor:
            return ops.matmul(attend(layer).view(len(self.lengths), -1), self.o[layer % len(self.o)])

        return [lambda layer=layer: step(layer) for layer in range(LAYERS)]


def row(bench: Bench, kv_heads: int, batch: int, length: int) -> dict[str, object]:
    layers, op = Layers(bench, kv_heads, batch, length), find_op("decode_attention")
    expected = layers.two(0).float()

    def us(attend: Callable[[int], torch.Tensor]) -> float:
        steps = layers.steps(attend)
        steps[0]()
        return bench.us(steps) / LAYERS

    def checked(rule: Callable[..., SplitKV]) -> float:
        op.choose = lambda call, here: Planned("split_kv", rule(call, here.caps), "asked for")
        forget()
        try:
            error = ((layers.one(0).float() - expected).norm() / expected.norm()).item()
            if not error < 1e-2:
                raise ValueError(
                    f"{batch} x {length}: decode_attention differs from the two ops by {error} of their RMS"
                )
            return us(layers.one)
        finally:
            del op.choose
            forget()

    def sized(block_n: int) -> Callable[..., SplitKV]:
        return lambda *given: replace(split_kv_for(*given), block_n=block_n, num_warps=block_n // 16)

    times = {
        "two": us(layers.two),
        **{str(size): checked(sized(size)) for size in BLOCKS},
        "chosen": checked(split_kv_for),
    }
    alone = us(layers.none)
    return {
        "kv_heads": kv_heads, "batch": batch, "length": length, "products_us": round(alone, 2),
        "us": {name: round(time - alone, 2) for name, time in times.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    chosen = parser.parse_args()
    bench, results = Bench(), Rows(chosen.out)
    for shape in SHAPES:
        results.add(row(bench, *shape))


if __name__ == "__main__":
    main()
