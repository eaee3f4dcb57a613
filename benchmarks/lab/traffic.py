"""What an engine's start, prefix cache and chunks do for requests that come one after the other: a laboratory.

    python -m benchmarks.lab.traffic --world-size 1 --model qwen3-8b --out benchmarks/lab/h200-traffic.json

A model with random weights; milliseconds on rank 0. Without a warm-up prompts of new lengths are launched kernel by kernel, and
captured when they come again; the same engine is then warmed up. Last a second engine, which sizes its cache behind its graphs.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import weft
from benchmarks.measuring import head
from weft.engine import Engine, SamplingParams
from weft.engine.params import Kind
from weft.engine.slots import SlotState
from weft.models import DecoderConfig
from weft.runtime.files import put

CHUNK, MIXED, PAGE_SIZE, CALLS, ROUNDS = 4096, 1024, 64, 6, 7
LENGTHS = (100, 300, 700, 1500, 3000)
BATCHES = (64, 72, 80, 88, 96, 104, 112, 120, 128)


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


class Traffic:
    """Requests to one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.draw = engine, random.Random(0)

    def prompt(self, length: int) -> list[int]:
        return self.draw.choices(range(self.engine.model.config.vocab_size), k=length)

    def first_token(self, prompt: list[int]) -> float:
        self.engine.team.synchronize()
        begin = time.perf_counter()
        self.engine.generate([prompt], max_tokens=1, ignore_eos=True)
        return ms(time.perf_counter() - begin)

    def first_tokens(self, lengths: tuple[int, ...]) -> dict[str, list[float]]:
        """Calls in order, for prompts of about a length."""
        return {str(n): [self.first_token(self.prompt(n + 3 * call)) for call in range(CALLS)] for n in lengths}

    def prefix_hit(self, length: int) -> dict[str, Any]:
        """A prompt, then twice the same with another end of 64 tokens."""
        shared, found = self.prompt(length), {}
        for name in ("new", "hit", "hit again"):
            found[name] = self.first_token(shared + self.prompt(64))
        return {**found, "hit tokens": self.engine.stats.hit_tokens}

    def decode_steps(self, batches: tuple[int, ...], context: int, steps: int) -> dict[str, float]:
        """Medians of a step; batch sizes take turns."""
        runner, params = self.engine.batch.runner, SamplingParams()
        each = -(-(context + 2 * steps) // PAGE_SIZE)
        times: dict[int, list[float]] = {batch: [] for batch in batches}
        for _ in range(ROUNDS):
            for batch in batches:
                runner.slots.forget()
                runner.slots.send(
                    {
                        slot: SlotState(
                            position=context, pages=list(range(1 + slot * each, 1 + slot * each + each)), params=params
                        )
                        for slot in range(batch)
                    }
                )
                runner.replay(batch, Kind.GREEDY)  # captures
                self.engine.team.synchronize()
                begin = time.perf_counter()
                for _ in range(steps):
                    runner.replay(batch, Kind.GREEDY)
                self.engine.team.synchronize()
                times[batch].append((time.perf_counter() - begin) / steps)
        runner.slots.forget()
        runner.slots.send({})
        return {str(batch): ms(statistics.median(taken)) for batch, taken in times.items()}

    def gaps(self, long: int, streams: int, tokens: int) -> dict[str, float]:
        """Time between two tokens of streams beside which a long prompt arrives."""
        engine, params = self.engine, SamplingParams(max_tokens=tokens, ignore_eos=True)
        numbers = {engine.submit(self.prompt(64), params) for _ in range(streams)}
        arrivals, first, submitted = [], 0.0, 0.0
        while engine.has_work:
            pieces = engine.step()
            now = time.perf_counter()
            if any(piece.prompt in numbers for piece in pieces):
                arrivals.append(now)
            if any(piece.prompt not in numbers for piece in pieces):
                first = now
            if len(arrivals) == tokens // 4 and not submitted:
                submitted = now
                engine.submit(self.prompt(long), SamplingParams(max_tokens=1, ignore_eos=True))
        between = [after - before for before, after in zip(arrivals, arrivals[1:], strict=False)]
        return {
            "largest gap": ms(max(between)),
            "median gap": ms(statistics.median(between)),
            "first token of the long prompt": ms(first - submitted),
        }


def main(team: Any, config: DecoderConfig, small: bool = False) -> dict[str, Any]:
    """`small`: sizes for virtual ranks, to try the script."""
    lengths, batches, context, steps, long, prefixes = LENGTHS, BATCHES, 512, 20, 16384, (1024, 4096, 16384)
    sizes = {"max_batch": 128, "page_size": PAGE_SIZE, "max_seq_len": 20_000, "pages": 2000, "chunk_tokens": CHUNK}
    if small:
        lengths, batches, context, steps, long, prefixes = (9, 20), (3, 4), 16, 2, 100, (20, 130)
        sizes |= {"max_batch": 5, "max_seq_len": 250, "pages": 60, "chunk_tokens": 64}
    found: dict[str, Any] = {}

    def report(name: str, value: Any) -> None:
        found[name] = value
        if team.rank == 0:
            print(name, value, flush=True)

    engine = Engine(config, team, **sizes)
    traffic, runner = Traffic(engine), engine.batch.runner
    report("first token, cold", traffic.first_tokens(lengths))
    runner.slots.forget()
    runner.slots.send({})
    begin = time.perf_counter()
    runner.warm_up()
    team.synchronize()
    report("warm-up", {"seconds": round(time.perf_counter() - begin, 1), "graphs": len(runner.graphs)})
    report("first token, warm", traffic.first_tokens(lengths))
    report("first token, prefix", {str(length): traffic.prefix_hit(length) for length in prefixes})
    report("decode step by batch", traffic.decode_steps(batches, context, steps))
    for chunk in (MIXED, sizes["chunk_tokens"]):
        engine.batch.scheduler.mixed_chunk_tokens = min(chunk, sizes["chunk_tokens"])
        report(f"beside a prompt of {long} tokens, {chunk} a step", traffic.gaps(long, 4, 40 if small else 200))
    del engine, traffic, runner
    gc.collect()
    if not small:
        begin, sizes["pages"] = time.perf_counter(), None
        engine = Engine(config, team, warm_up=True, **sizes)
        ready, seconds = time.perf_counter() - begin, engine.batch.runner.graphs.capture_seconds
        engine.generate([[1] * CHUNK], max_tokens=2)
        free = torch.cuda.mem_get_info()[0] >> 20
        pages = engine.batch.runner.cache.pages
        report("second engine", {"ready": ms(ready), "capture": ms(seconds), "pages": pages, "MiB free": free})
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    config = DecoderConfig.named(options.model)
    found = weft.launch(main, options.world_size, "cuda", args=(config,), heap_bytes=4 << 30)[0]
    put(options.out, json.dumps({"where": head(), "unit": "milliseconds", "found": found}, indent=1) + "\n")
