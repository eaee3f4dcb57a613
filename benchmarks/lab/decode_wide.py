"""Decode attention with heads of 256 on one GPU, by designs and by both forms of its tile: a laboratory.

    python -m benchmarks.lab.decode_wide --seconds 60 --json benchmarks/lab/h200-decode-256.json

Six query heads a KV head, as a rank of two with Qwen3.6-27B has them, with gates. A time is that of a launch in a CUDA graph of
eight, each with its own cache: the median of ten replays. Every result is compared with torch's attention in fp32.

    queries  a tile of 16 rows, in which queries are multiplied by keys: the form of heads of up to 128
    keys     a tile of 8 rows, in which keys are multiplied by queries
    rule     the design that the rule takes; the rest of the designs vary its tokens of a step, its splits and its stages
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.measuring import Rows, captured, replay_us
from weft.kernels.paged_cache import Sequences
from weft.kernels.rotary import HeadNorms
from weft.ops.attention import decoding
from weft.ops.attention.decode_attention import DECODE_ATTENTION, DecodeArguments
from weft.ops.attention.decoding import DecodingCall, SplitKV, split_kv_for, splits_of
from weft.ops.local import capabilities_of

D, GROUP, HEADS, PAGE, LAYERS = 256, 6, 2, 64, 8
BF16 = torch.bfloat16
SHAPES = (1, 1024), (8, 1024), (32, 1024), (128, 1024), (1, 8192), (32, 4096)
FORMS = {"queries": False, "keys": True}
REPLAYS = 10


class Layers:
    """Caches of LAYERS layers of ``batch`` sequences of ``length`` tokens, a multiple of a page, and one projection."""

    def __init__(self, batch: int, length: int) -> None:
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.batch, pages = batch, batch * length // PAGE
        self.caches = [self.draw(2, pages, HEADS, PAGE, D) for _ in range(LAYERS)]
        order = torch.randperm(pages, device="cuda", generator=self.generator)
        self.pages = order.to(torch.int32).view(batch, -1)
        self.qkv, self.gate = self.draw(batch, (GROUP + 2) * HEADS * D), self.draw(batch, GROUP * HEADS * D)
        halves = torch.ones(length, D // 2, device="cuda"), torch.zeros(length, D // 2, device="cuda")
        ones = torch.ones(D, device="cuda", dtype=BF16)
        lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        tickets = torch.zeros(batch * HEADS, dtype=torch.int32, device="cuda")
        # Angles of 0, so that a reference need not rotate.
        self.given = DecodeArguments(
            self.qkv, None, 0.0, HeadNorms(ones, ones, 1e-6), torch.cat(halves, 1), *self.caches[0],
            Sequences(self.pages, lengths), D**-0.5, tickets, None, None, gate=self.gate,
        )  # fmt: skip

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=BF16, generator=self.generator)

    def run(self, design: SplitKV, layer: int) -> torch.Tensor:
        keys, values = self.caches[layer]
        return DECODE_ATTENTION.run(design, None, self.given._replace(keys=keys, values=values))

    def reference(self) -> torch.Tensor:
        """The result of layer 0 in fp32, whose new key and value ``run`` has written."""
        x = self.qkv.view(self.batch, -1, D).float()[:, : GROUP * HEADS]
        q = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(BF16).float()
        held = (x[self.pages.long()].transpose(1, 2).reshape(self.batch, HEADS, -1, D).float() for x in self.caches[0])
        out = torch.nn.functional.scaled_dot_product_attention(q.view(self.batch, HEADS, GROUP, D), *held)
        return out.reshape(self.batch, -1) * self.gate.float().sigmoid()


def microseconds(layers: Layers, design: SplitKV) -> float:
    layers.run(design, 0)
    graph = captured(partial(layers.run, design, layer) for layer in range(LAYERS))
    return replay_us(graph, LAYERS, REPLAYS, warm_up=2)


def designs(call: DecodingCall) -> Iterator[tuple[str, SplitKV]]:
    """The rule's design, then the rest, by names."""
    caps = capabilities_of(torch.device("cuda"))
    yield "rule", split_kv_for(call, caps)
    for block_n in (16, 32, 64):
        for num_stages in (2, 3, 4):
            for splits in sorted({splits_of(call.pairs, call.tokens, per_sm * caps.sms, 64) for per_sm in (1, 2, 4)}):
                if block_n * num_stages <= 192:  # else a program has not enough shared memory
                    tile = {"block_n": block_n, "num_warps": block_n // 16, "num_stages": num_stages}
                    yield "varied", SplitKV(least=64, splits=splits, **tile)


def measured(form: str, batch: int, length: int, end: float) -> Iterator[dict[str, Any]]:
    layers = Layers(batch, length)
    with mock.patch.object(decoding, "is_turned", return_value=FORMS[form]):
        for name, design in designs(DecodingCall(batch * HEADS, length, D, BF16)):
            if time.monotonic() > end:
                return
            us = microseconds(layers, design)
            error = (layers.run(design, 0).flatten(1).float() - layers.reference()).abs().max().item()
            knobs = {knob: getattr(design, knob) for knob in ("block_n", "least", "splits", "num_warps", "num_stages")}
            yield {"form": form, "batch": batch, "length": length, "name": name, **knobs, "us": us, "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="no design begins after this")
    chosen = parser.parse_args()
    end, results = time.monotonic() + chosen.seconds, Rows(chosen.json)
    for batch, length in SHAPES:
        for form in FORMS:
            for row in measured(form, batch, length, end):
                results.add(row)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
