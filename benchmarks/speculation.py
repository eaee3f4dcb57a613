"""Times of speculation: verify steps over decode steps, attention of several new tokens, host time of a step.

python -m benchmarks.speculation OUT.json [--model qwen3-32b] [--world-size 2] [--only steps,attention,host]

steps      a decode step with 3 drafts and without, in CUDA graphs, of random weights; the drafts are one token again and again
attention  paged_attention of 4 new tokens a sequence, of one, and of 4 as sequences that share pages, in CUDA graphs
host       wall time of a step of 64 sequences of a model so small that the host decides it
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import weft
from weft import ops
from weft.engine import Engine, SamplingParams
from weft.engine.slots import SlotState
from weft.engine.speculation.verify import Verify
from weft.models import DecoderConfig, Qwen3Config
from weft.runtime.files import put

DRAFTS, BATCHES, CONTEXT = 3, (1, 8, 32), 1024
# Sequences and tokens of attention.
SIZES = ((32, 4096), (8, 4096), (1, 4096), (1, 32768))
SPECULATIVE = {"num_speculative_tokens": DRAFTS, "adaptive": False}


class OneToken:
    """Drafter of one token again and again, which random weights do not choose."""

    def __init__(self, max_batch: int, device: torch.device) -> None:
        self._drafts = torch.ones(max_batch, DRAFTS, dtype=torch.int64, device=device)

    page_bytes = 0

    def allocate(self, pages: int) -> None:
        pass

    def read(self, chunks: Sequence[Any], rows: Mapping[int, int]) -> None:
        pass

    def propose(self, batch: int, drafts: int) -> torch.Tensor:
        return self._drafts[:batch, :drafts]

    def accept(self, batch: int, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        pass

    def enter(self, slot: int, tokens: Sequence[int]) -> None:
        pass

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        pass


def median_us(run: Callable[[], Any], calls: int = 10, rounds: int = 7) -> float:
    """Median time of `calls` calls, by events, divided by their number."""
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[rounds // 2]


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def steps(team: weft.Team, model: str) -> list[dict[str, Any]]:
    """Times of steps by batch, on the slowest rank."""
    engine = Engine(
        DecoderConfig.named(model), team, max_batch=max(BATCHES), max_seq_len=2048, speculative=SPECULATIVE, warn=False
    )
    runner, rows = engine.batch.runner, []
    lookup = runner.verifying.drafter
    pages = runner.slots.table.shape[1]
    for batch in BATCHES:
        params = SamplingParams()
        row = {"batch": batch, "context": CONTEXT}
        sizes = {"decode": batch, "no drafts": Verify(batch, 0), f"{DRAFTS} drafts": Verify(batch, DRAFTS)}
        runner.verifying.drafter = OneToken(max(BATCHES), team.device)
        for name, size in sizes.items():
            begins = {slot: 1 + slot * pages for slot in range(batch)}
            runner.slots.send(
                {
                    slot: SlotState(position=CONTEXT, pages=list(range(at, at + pages)), params=params, last=2000)
                    for slot, at in begins.items()
                }
            )
            runner.replay(size)
            team.barrier()
            row[name] = max(team.exchange(median_us(lambda size=size: runner.replay(size))))
        with torch.inference_mode():
            graph = captured(lambda batch=batch: lookup.propose(batch, DRAFTS))
        row["look-up"] = max(team.exchange(median_us(graph.replay)))
        row["ratio"] = row[f"{DRAFTS} drafts"] / row["decode"]
        rows.append(row)
        runner.slots.send(dict.fromkeys(range(batch)))
    return rows


def attention(batch: int, length: int, device: torch.device) -> dict[str, Any]:
    """Times of attention of Qwen3-32B's heads on one of two GPUs, and bytes a second of keys and values for one new token."""
    (q_heads, heads, D, size), queries = (32, 4, 128, 64), DRAFTS + 1
    count = batch * length // size
    cache = [torch.randn(count + 1, heads, size, D, dtype=torch.bfloat16, device=device) for _ in range(2)]
    table = 1 + torch.randperm(count, device=device).to(torch.int32).view(batch, -1)
    q = torch.randn(batch * queries, q_heads, D, dtype=torch.bfloat16, device=device)
    lengths = (length - DRAFTS + torch.arange(queries, device=device)).int().repeat(batch)
    tickets = torch.zeros(batch * queries * heads, dtype=torch.int32, device=device)
    one = lengths[queries - 1 :: queries].contiguous()
    q_one, repeated = q[::queries].contiguous(), table.repeat_interleave(queries, 0)
    calls = {
        "one": lambda: ops.paged_attention(q_one, *cache, table, one, tickets=tickets),
        "several": lambda: ops.paged_attention(q, *cache, table, lengths, tickets=tickets, queries=queries),
        "rows": lambda: ops.paged_attention(q, *cache, repeated, lengths, tickets=tickets),
    }
    several, by_rows = (calls[name]().float() for name in ("several", "rows"))
    row = {"batch": batch, "length": length, "error": float((several - by_rows).abs().max() / by_rows.std())}
    row |= {name: median_us(captured(call).replay) for name, call in calls.items()}
    return row | {"ratio": row["several"] / row["one"], "one GB/s": sum(x.nbytes for x in cache) / row["one"] / 1e3}


def host(team: weft.Team) -> dict[str, float]:
    """Microseconds of wall time of a step of 64 sequences, without and with drafts."""
    model = Qwen3Config.from_dict(
        {
            "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
            "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 1024, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        }
    )  # fmt: skip
    times = {}
    for name, speculative in (("without", None), ("with", SPECULATIVE)):
        engine = Engine(model, team, max_batch=64, speculative=speculative, warn=False)
        if speculative is not None:
            engine.batch.runner.verifying.drafter = OneToken(64, team.device)
        params = SamplingParams(max_tokens=400, ignore_eos=True, temperature=1.0)
        for index in range(64):
            engine.submit([index + 1] * 16, params)
        for _ in range(100):
            engine.step()
        begin = time.perf_counter()
        for _ in range(200):
            engine.step()
        times[name] = (time.perf_counter() - begin) / 200 * 1e6
    return times | {"added": times["with"] - times["without"]}


def write(report: dict[str, Any], team: weft.Team, out: str) -> None:
    if team.rank == 0:
        put(Path(out), json.dumps(report, indent=1) + "\n")


def main(team: weft.Team, model: str, only: Sequence[str], out: str) -> dict[str, Any]:
    """Report of the parts in `only`; rank 0 writes it to `out` after each, so a part that fails costs no figures."""
    report: dict[str, Any] = {"device": team.caps.device_name, "world_size": team.size, "model": model}
    if "attention" in only:
        report["attention"] = [attention(*sizes, team.device) for sizes in SIZES]
        write(report, team, out)
    if "host" in only:
        report["host"] = host(team)
        write(report, team, out)
    if "steps" in only:
        report["steps"] = steps(team, model)
        write(report, team, out)
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Time speculation on GPUs.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="qwen3-32b")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--only", default="attention,host,steps")
    options = parser.parse_args()
    report = weft.launch(
        main, options.world_size, "cuda", args=(options.model, options.only.split(","), str(options.out.resolve()))
    )[0]
    print(json.dumps(report, indent=1))
