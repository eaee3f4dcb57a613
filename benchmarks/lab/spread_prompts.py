"""First tokens of prompts over a cache that is spread over ranks, behind cached tokens or not: a laboratory.

    python -m benchmarks.lab.spread_prompts --world-size 2 --model qwen3-8b --out benchmarks/lab/h200-x2-spread-prompts.json

A model with random weights; milliseconds on rank 0, medians of --rounds prompts after one that is not counted. One engine
launches prompts kernel by kernel, another one has the graphs of a warm-up; --engines takes one of them. With --share-gpus the
ranks take turns on fewer GPUs, and only the answers count.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import weft
from benchmarks.measuring import head
from weft.engine import Engine
from weft.models import DecoderConfig
from weft.runtime.files import put

CONTEXTS, MORE, ROUNDS = "1024,4096,16384,32768,131072", "16,300,1000,4096", 5
ENGINES = {"launches": ("kernel by kernel", False), "graphs": ("graphs of a warm-up", True)}


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """(milliseconds, token id) of the first token of an answer."""
    engine.team.synchronize()
    begin = time.perf_counter()
    [answer] = engine.generate([prompt], max_tokens=1, ignore_eos=True)
    return round((time.perf_counter() - begin) * 1e3, 2), answer.token_ids[0]


def measured(engine: Engine, contexts: list[int], more: list[int], rounds: int) -> tuple[dict[str, Any], list[int]]:
    """Times by number of cached tokens and of those behind them; and all tokens."""
    draw, found, tokens = random.Random(0), {}, []

    def prompt(length: int) -> list[int]:
        return draw.choices(range(engine.model.config.vocab_size), k=length)

    def median(ends: list[tuple[float, int]]) -> float:
        tokens.extend(token for _, token in ends)
        return statistics.median(taken for taken, _ in ends[1:])

    for context in contexts:
        found[str(context)] = {"all of it": median([first_token(engine, prompt(context)) for _ in range(rounds + 1)])}
        cached = prompt(context)
        if more:
            tokens.append(first_token(engine, cached)[1])
        for length in more:
            taken = median([first_token(engine, cached + prompt(length)) for _ in range(rounds + 1)])
            found[str(context)][f"{length} behind {engine.stats.hit_tokens}"] = taken
    return found, tokens


def main(
    team: Any, config: DecoderConfig, contexts: list[int], more: list[int], rounds: int, engines: list[str]
) -> dict[str, Any]:
    found, tokens = {}, {}
    longest = max(contexts) + max(more, default=0) + 1
    config = replace(config, max_position_embeddings=longest)
    for name, graphs in (ENGINES[engine] for engine in engines):
        engine = Engine(
            config, team, context_parallel=True, max_batch=4, max_seq_len=longest, cuda_graph=graphs, warm_up=graphs
        )
        runner = engine.batch.runner
        found[name], tokens[name] = measured(engine, contexts, more, rounds)
        found[name]["graphs"], found[name]["seconds of capture"] = (
            len(runner.graphs),
            round(runner.graphs.capture_seconds, 1),
        )
        found[name]["passes without a graph"] = sum(runner.prompts._launched.values())
        if team.rank == 0:
            print(name, json.dumps(found[name]), flush=True)
        del engine, runner
        gc.collect()
    one, *others = tokens.values()
    for other in others:
        # In 16 bits a padded pass may round differently, so that not all need be equal.
        found["equal tokens"] = f"{sum(a == b for a, b in zip(one, other, strict=True))} of {len(one)}"
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="of the model; all by default")
    parser.add_argument("--contexts", default=CONTEXTS, help="tokens of prompts")
    parser.add_argument("--more", default=MORE, help="tokens behind a cached prompt; none if empty")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--engines", default=",".join(ENGINES), help="of launches and graphs")
    parser.add_argument("--share-gpus", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    config = DecoderConfig.named(options.model)
    config = replace(config, num_hidden_layers=options.layers or config.num_hidden_layers)
    contexts, more = ([int(part) for part in given.split(",") if part] for given in (options.contexts, options.more))
    engines = options.engines.split(",")
    if unknown := [engine for engine in engines if engine not in ENGINES]:
        parser.error(f"--engines {unknown[0]} is not launches or graphs")
    given = config, contexts, more, options.rounds, engines
    launched = {"heap_bytes": 4 << 30, "share_gpus": options.share_gpus}
    found = weft.launch(main, options.world_size, "cuda", args=given, **launched)[0]
    put(options.out, json.dumps({"where": head(), "unit": "milliseconds", "found": found}, indent=1) + "\n")
