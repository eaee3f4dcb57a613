"""Times of speculation: verify steps over decode steps, attention of several new tokens, host time of a step.

python -m benchmarks.speculation OUT.json [--model qwen3-32b] [--world-size 2] [--only attention,host,heads,steps]
    [--heads qwen3.6-27b,qwen3-32b]

heads      one pass of what drafts, in a CUDA graph, over the time in which its weights are read: of each model in --heads its
           MTP head, that with a head in fp8, an EAGLE-3 head of 32,000 tokens, and a small model where there is one
steps      a decode step with 3 drafts and without, in CUDA graphs, of random weights; the drafts are one token again and again
attention  paged_attention of 4 new tokens a sequence, of one, and of 4 as sequences that share pages, in CUDA graphs
host       wall time of a step of 64 sequences of a model so small that the host decides it
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import weft
from weft import ops
from weft.costs.gpu import gpu_of
from weft.engine import Engine, SamplingParams
from weft.engine.graphs import Graphs, without_autograd
from weft.engine.runner import Runner
from weft.engine.slots import SlotState
from weft.engine.speculation.loading import Draft, drafter_of, load_draft
from weft.engine.speculation.options import SpeculativeConfig
from weft.engine.speculation.verify import Verify
from weft.models import Decoder, DecoderConfig, Qwen3Config
from weft.models.checkpoint import Checkpoint
from weft.models.eagle3 import Eagle3Config
from weft.models.mtp import Mtp
from weft.runtime.files import put

DRAFTS, BATCHES, CONTEXT = 3, (1, 8, 32), 1024
# Sequences and tokens of attention.
SIZES = ((32, 4096), (8, 4096), (1, 4096), (1, 32768))
SPECULATIVE = {"num_speculative_tokens": DRAFTS, "adaptive": False}
LONGEST, PAGE = 2048, 64
# Small models of the same vocabulary.
SMALL = {"qwen3-32b": "qwen3-0.6b"}


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
        DecoderConfig.named(model),
        team,
        max_batch=max(BATCHES),
        max_seq_len=LONGEST,
        speculative=SPECULATIVE,
        warn=False,
    )
    runner, rows = engine.batch.runner, []
    lookup = runner.verifying.drafter
    for batch in BATCHES:
        row = {"batch": batch, "context": CONTEXT}
        sizes = {"decode": batch, "no drafts": Verify(batch, 0), f"{DRAFTS} drafts": Verify(batch, DRAFTS)}
        runner.verifying.drafter = OneToken(max(BATCHES), team.device)
        for name, size in sizes.items():
            fill_slots(runner, batch)
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


def fill_slots(runner: Runner, batch: int) -> None:
    """Put sequences of CONTEXT tokens into slots 0 .. batch - 1."""
    pages, params = runner.slots.table.shape[1], SamplingParams()
    begins = {slot: 1 + slot * pages for slot in range(batch)}
    runner.slots.send(
        {
            slot: SlotState(position=CONTEXT, pages=list(range(at, at + pages)), params=params, last=LONGEST - 48)
            for slot, at in begins.items()
        }
    )


def drafters_of(model: str) -> dict[str, dict[str, Any]]:
    """Options of SpeculativeConfig of what drafts beside a model, by name."""
    eagle3 = Eagle3Config(sizes=replace(DecoderConfig.named(model), num_hidden_layers=1), draft_vocab_size=32000)
    found: dict[str, dict[str, Any]] = {
        "mtp": {"method": "mtp"},
        "mtp, fp8 head": {"method": "mtp", "draft_head": "fp8"},
    }
    if eagle3.sizes.linear_attention is None:
        found["eagle3"] = {"method": "eagle3", "model": eagle3}
    if model in SMALL:
        found[SMALL[model]] = {"method": "draft_model", "model": DecoderConfig.named(SMALL[model])}
    return found


def heads(team: weft.Team, model: DecoderConfig, drafters: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Times of one pass of each drafter by batch, on the slowest rank, and of reading its weights."""
    most = max(BATCHES)
    engine = Engine(
        model, team, max_batch=most, max_seq_len=LONGEST, page_size=PAGE, pages=1 + most * (LONGEST // PAGE), warn=False
    )
    runner, rows, memory = engine.batch.runner, [], gpu_of(team.caps).memory
    fill_slots(runner, most)
    for name, options in drafters.items():
        speculative = SpeculativeConfig(**SPECULATIVE, **options)
        config = replace(engine.config, speculative=speculative)
        draft = load_draft(config, engine.model, None, None, Checkpoint)
        drafter = drafter_of(draft, speculative, runner.decoding, LONGEST, LONGEST)
        drafter.allocate(runner.cache.pages)
        # The first draft of a head is of the step before.
        drafts, read = 1 if isinstance(draft, Decoder) else 2, bytes_of(draft)
        for batch in BATCHES:
            taken = pass_us(team, lambda batch=batch, drafter=drafter, drafts=drafts: drafter.propose(batch, drafts))
            us, floor = max(team.exchange(taken)), read / memory
            rows.append(
                {"drafter": name, "batch": batch, "us": us, "bytes": read, "bytes us": floor, "ratio": us / floor}
            )
    runner.slots.send(dict.fromkeys(range(most)))
    return rows


def pass_us(team: weft.Team, run: Callable[[], Any]) -> float:
    """Median time of a graph of `run`."""
    graphs = Graphs(team)
    with without_autograd(team.device):
        graphs.capture(("pass", 0), run)
        return median_us(lambda: graphs.replay(("pass", 0)))


def bytes_of(draft: Draft) -> int:
    """Bytes of the matrices that a pass reads on a rank."""
    if isinstance(draft, Decoder):
        tied = draft.lm_head.weight is draft.embed_tokens.weight
        return sum(x.nbytes for x in draft.parameters()) - (0 if tied else draft.embed_tokens.weight.nbytes)
    body = sum(x.nbytes for x in draft.body.parameters())
    if isinstance(draft, Mtp):
        head = draft.head.weight
        return body + draft.eh_proj.nbytes + sum(x.nbytes for x in ((head,) if torch.is_tensor(head) else head[:2]))
    return body + draft.lm_head.weight.nbytes


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


def main(team: weft.Team, model: str, of_heads: Sequence[str], only: Sequence[str], out: str) -> dict[str, Any]:
    """Report of the parts in `only`; rank 0 writes it to `out` after each, so a part that fails costs no figures."""
    report: dict[str, Any] = {"device": team.caps.device_name, "world_size": team.size, "model": model}
    if "attention" in only:
        report["attention"] = [attention(*sizes, team.device) for sizes in SIZES]
        write(report, team, out)
    if "host" in only:
        report["host"] = host(team)
        write(report, team, out)
    if "heads" in only:
        report["heads"] = {}
        for name in of_heads:
            report["heads"][name] = heads(team, DecoderConfig.named(name), drafters_of(name))
            write(report, team, out)
            gc.collect()
            torch.cuda.empty_cache()
    if "steps" in only:
        report["steps"] = steps(team, model)
        write(report, team, out)
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Time speculation on GPUs.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="qwen3-32b")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--only", default="attention,host,heads,steps")
    parser.add_argument("--heads", default="qwen3.6-27b,qwen3-32b", help="models of the part heads")
    options = parser.parse_args()
    arguments = options.model, options.heads.split(","), options.only.split(","), str(options.out.resolve())
    report = weft.launch(main, options.world_size, "cuda", args=arguments)[0]
    print(json.dumps(report, indent=1))
