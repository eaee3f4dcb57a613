"""Router, choices and schedule of a mixture of experts on one GPU: in one launch, in parts, in three, and each alone.

    python -m benchmarks.lab.route --out FILE

Times are of CUDA graphs. "single": a call behind a kernel that writes 128 MB, median of 41; "empty" is what is measured with no
call. "in a row": one call for each of so many router weights that they do not fit the L2, over their number, median of 15.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Rows
from weft import ops
from weft.ops.local import machine_on
from weft.ops.moe.matmul_route_schedule import MATMUL_ROUTE_SCHEDULE, MOST_LOGITS, MOST_TOKENS, RouterCall
from weft.ops.moe.routing import Experts

MODELS = {"qwen3-30b-a3b": (2048, 128, 8), "deepseek-v3": (7168, 256, 8)}
TOKENS = (1, 2, 4, 8, 16, 32, 128, 4096)
COLD_BYTES = 150 << 20


def timed(run: Callable[[], Any], flush: torch.Tensor, replays: int) -> float:
    """Median microseconds of what `run` launches."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
    with torch.cuda.graph(graph):
        flush.add_(1)
        begin.record()
        kept = run()
        end.record()
    samples = []
    for _ in range(3 + replays):
        graph.replay()
        torch.cuda.synchronize()
        samples.append(1e3 * begin.elapsed_time(end))
    del kept
    return statistics.median(samples[3:])


def both(run: Callable[[int], Any], sets: int, flush: torch.Tensor) -> dict[str, float]:
    single = timed(lambda: run(0), flush, 41)
    row = timed(lambda: [run(index) for index in range(sets)], flush, 15) / sets
    return {"single_us": round(single, 2), "in_a_row_us": round(row, 2)}


def rows_of(name: str, flush: torch.Tensor) -> Iterator[dict[str, Any]]:
    hidden, experts, k = MODELS[name]
    device = flush.device
    sets = COLD_BYTES // (experts * hidden * 2) + 1
    routers = [torch.randn(experts, hidden, device=device, dtype=torch.bfloat16) * hidden**-0.5 for _ in range(sets)]
    owned, tickets = Experts(experts, 0, experts // 2), torch.zeros(1, dtype=torch.int32, device=device)
    for tokens in TOKENS:
        x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
        call = RouterCall(tokens, hidden, experts, k, torch.bfloat16)
        logits = ops.matmul(x, routers[0])
        routing = ops.route(logits, k)

        def by(algorithm: str, x: torch.Tensor = x) -> Callable[[int], Any]:
            return lambda index: ops.matmul_route_schedule(
                x, routers[index], owned, k, tickets=tickets, algorithm=algorithm
            )

        forms = {
            "three launches": by("sequential"),
            "matmul": lambda index, x=x: ops.matmul(x, routers[index]),
            "route": lambda _, logits=logits: ops.route(logits, k),
            "moe_schedule": lambda _, ids=routing.ids: ops.moe_schedule(ids, owned, tickets=tickets),
            "route, moe_schedule": lambda _, logits=logits: ops.moe_schedule(
                ops.route(logits, k).ids, owned, tickets=tickets
            ),
        }
        if tokens <= MOST_TOKENS:
            forms["parts"] = by("split")
        if call.logits <= MOST_LOGITS:
            forms["one launch"] = by("fused")
        plan = MATMUL_ROUTE_SCHEDULE.plan(call, machine_on(device))
        times = {form: both(run, sets, flush) for form, run in forms.items()}
        yield {"model": name, "tokens": tokens, "plan": plan.name, "times": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    flush = torch.zeros(1 << 25, device="cuda")
    results = Rows(chosen.out, empty_us=round(timed(lambda: None, flush, 41), 2))
    for name in MODELS:
        for row in rows_of(name, flush):
            results.add(row)


if __name__ == "__main__":
    main()
