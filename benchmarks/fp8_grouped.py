"""Times of grouped GEMMs of fp8 experts on one GPU, beside the same in bf16, with a sweep over their tiles.

    python -m benchmarks.fp8_grouped OUT.json [--seconds 140] [--tokens 1,8,4096] [--held 64]

Experts of Qwen3-30B-A3B: 128, or as many as --held, of (hidden, features) = (2048, 768), 8 choices of 128. In CUDA graphs whose
calls take four routings in turn, so that weights of few tokens are cold. Each result is compared with that of the dequantized
operands in bf16. Rows in fp8 are given; "quantize" rows are of bf16 and quantized in the call. "layer" is both GEMMs: bf16 with
bf16 rows between them, fp8 with fp8 rows. DeepGEMM runs beside them where it is installed (`benchmarks.fp8_deep_gemm`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.fp8_deep_gemm import deep_gemm_rows
from benchmarks.measuring import Rows, captured, compile_all, replay_us, said
from weft import ops
from weft.kernels.fp8 import E4M3, Fp8, RowFormat, by_torch, empty_rows, rows_argument
from weft.ops.moe.grouped import gemms
from weft.ops.moe.grouped.gemms import GroupedArguments, GroupedTiles
from weft.ops.moe.moe_schedule import block_for
from weft.ops.moe.routing import Experts, Schedule

HIDDEN, FEATURES, EXPERTS, CHOICES = 2048, 768, 128, 8
GROUP = RowFormat("group")
ROUTINGS, ROUNDS = 4, 7
# Largest root mean square of a result's error, relative to that of the result.
MOST_ERROR = 0.01


def experts_weight(held: int, N: int, K: int, seed: int) -> Fp8:
    generator = torch.Generator("cuda").manual_seed(seed)
    drawn = (torch.randn((held, N, K), device="cuda", generator=generator, dtype=torch.bfloat16) * 16).to(E4M3)
    scales = torch.rand((held, N // 128, K // 128), device="cuda", generator=generator) * K**-0.5 / 16 + 1e-3
    return Fp8(drawn, scales)


def candidates(block: int, gated: bool) -> Iterator[GroupedTiles]:
    """Designs for tiles of ``block`` pairs."""
    if block < 64:
        if gated:
            sizes = [(256, warps, 1, stages) for warps in (4, 8) for stages in (4, 5, 6)]
            sizes += [(256, warps, 2, stages) for warps in (4, 8) for stages in (2, 3)]
            # 64 results: too few for a scale of 128.
            sizes += [(128, 4, 1, 8), (128, 4, 2, 5)]
        else:
            sizes = [(64, 4, per_sm, 5) for per_sm in (2, 3, 4)] + [(64, 4, 2, 6), (64, 4, 2, 8)]
            sizes += [(128, 4, per_sm, 5) for per_sm in (1, 2)] + [(128, 4, 2, 3), (128, 4, 3, 3), (128, 8, 2, 5)]
    elif gated:
        sizes = [(256, 8, 1, 3), (256, 8, 1, 4)]
        sizes += [(128, 4, 2, 2), (128, 4, 2, 3), (128, 8, 2, 3), (128, 8, 1, 5)]
        if block == 64:
            sizes += [(256, 4, 2, 2), (128, 4, 3, 2), (128, 4, 2, 4)]
    else:
        sizes = [
            (128, 8, 1, 3),
            (128, 8, 2, 3),
            (64, 4, 2, 3),
            (64, 4, 2, 4),
            (64, 4, 3, 3),
            (64, 8, 2, 4),
        ]
        if block == 64:
            sizes += [(128, 4, 2, 3), (128, 4, 2, 4), (128, 4, 3, 3), (64, 4, 4, 3)]
    for block_n, warps, per_sm, stages in sizes:
        if stages * per_sm * (block + block_n) * 128 > 222 << 10:
            continue
        for columns in (1024,) if block < 64 else (1024, 4096):
            yield GroupedTiles(
                block_n=block_n, block_k=128, transposed=block < 64, per_sm=per_sm, columns=columns, num_warps=warps,
                num_stages=stages,
            )  # fmt: skip


class Problem:
    """Operands of one number of tokens."""

    def __init__(self, tokens: int, held: int, gate_up: Fp8, down: Fp8) -> None:
        generator = torch.Generator("cuda").manual_seed(tokens)
        self.x = torch.randn((tokens, HIDDEN), device="cuda", generator=generator).bfloat16()
        self.rows = Fp8(*by_torch(self.x))
        self.gate_up, self.down = gate_up, down
        self.block = block_for(tokens * CHOICES, EXPERTS)
        order = torch.rand((ROUTINGS, tokens, EXPERTS), device="cuda", generator=generator).argsort(-1)
        self.ids = [one[:, :CHOICES].int().contiguous() for one in order]
        self.held = Experts(EXPERTS, 0, held)
        self.schedules = self.scheduled(self.block)
        self.h = ops.grouped_matmul_silu_mul(self.rows, gate_up, self.schedules[0], fp8=GROUP)

    def scheduled(self, block: int) -> list[Schedule]:
        return [ops.moe_schedule(ids, self.held, block=block) for ids in self.ids]


def run_design(design: GroupedTiles, given: GroupedArguments, gated: bool) -> torch.Tensor:
    """A GEMM by a design; the result of a gated one in fp8 where a tile has the columns of a scale."""
    if not gated or design.block_n != 256:
        return gemms.run(design, given, gated=gated)
    h, scales = empty_rows(given.x, given.schedule.all_pairs, FEATURES, GROUP)
    written = rows_argument(scales, GROUP, torch.bfloat16, 128)
    return gemms.run(design, given, gated=True, out=h, into=gemms.Results(written))


def timed(call: Callable[[Schedule], Any], schedules: list[Schedule]) -> dict[str, Any]:
    """Median time of a call in µs; or its error."""
    try:
        call(schedules[0])
        torch.cuda.synchronize()
        graph = captured(lambda schedule=schedule: call(schedule) for schedule in schedules * 2)
        return {"us": replay_us(graph, 2 * len(schedules), ROUNDS)}
    except Exception as failure:
        return {"failed": said(failure)}


def checked(gemm: str, out: torch.Tensor, expected: torch.Tensor, rows: int) -> dict[str, Any]:
    """A row with the error of a result, which is refused if it is larger than that of rounding to bf16."""
    out, expected = out[:rows].float(), expected[:rows].float()
    error = float((out - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    row = {"gemm": gemm, "provider": "error", "error": round(error, 5)}
    return row if error < MOST_ERROR else {**row, "failed": f"error {error}"}


def rows_of(p: Problem, wide: tuple[torch.Tensor, torch.Tensor], sweep: bool) -> Iterator[dict[str, Any]]:
    first, schedules = p.schedules[0], p.schedules
    pairs = int(first.counts.sum())
    plain = p.rows.dequantized(torch.bfloat16)
    expected = ops.grouped_matmul_silu_mul(plain, wide[0], first)
    yield checked("gate_up", ops.grouped_matmul_silu_mul(p.rows, p.gate_up, first), expected, pairs)
    of_h = p.h.dequantized(torch.bfloat16)
    rows = first.pairs.new_zeros(0)
    for expert, count in enumerate(first.counts.tolist()):
        rows = torch.cat((rows, first.pairs[expert, :count]))
    expected = ops.grouped_matmul(of_h, wide[1], first)[rows.long()]
    yield checked("down", ops.grouped_matmul(p.h, p.down, first)[rows.long()], expected, pairs)
    yield {"gemm": "gate_up", "provider": "bf16", **timed(
        lambda s: ops.grouped_matmul_silu_mul(p.x, wide[0], s), schedules)}  # fmt: skip
    yield {"gemm": "gate_up", "provider": "fp8", **timed(
        lambda s: ops.grouped_matmul_silu_mul(p.rows, p.gate_up, s, fp8=GROUP), schedules)}  # fmt: skip
    yield {"gemm": "gate_up", "provider": "fp8 quantize", **timed(
        lambda s: ops.grouped_matmul_silu_mul(p.x, p.gate_up, s, fp8=GROUP), schedules)}  # fmt: skip
    yield {"gemm": "gate_up", "provider": "fp8, bf16 result", **timed(
        lambda s: ops.grouped_matmul_silu_mul(p.rows, p.gate_up, s), schedules)}  # fmt: skip
    yield {"gemm": "down", "provider": "bf16", **timed(lambda s: ops.grouped_matmul(of_h, wide[1], s), schedules)}
    yield {"gemm": "down", "provider": "fp8", **timed(lambda s: ops.grouped_matmul(p.h, p.down, s), schedules)}
    yield {"gemm": "down", "provider": "fp8 quantize", **timed(
        lambda s: ops.grouped_matmul(of_h, p.down, s), schedules)}  # fmt: skip

    def layer(schedule: Schedule) -> torch.Tensor:
        return ops.grouped_matmul(ops.grouped_matmul_silu_mul(p.x, wide[0], schedule), wide[1], schedule)

    def layer_fp8(schedule: Schedule) -> torch.Tensor:
        h = ops.grouped_matmul_silu_mul(p.rows, p.gate_up, schedule, fp8=GROUP)
        return ops.grouped_matmul(h, p.down, schedule)

    def layer_between(schedule: Schedule) -> torch.Tensor:
        return ops.grouped_matmul(ops.grouped_matmul_silu_mul(p.rows, p.gate_up, schedule), p.down, schedule)

    yield {"gemm": "layer", "provider": "bf16", **timed(layer, schedules)}
    yield {"gemm": "layer", "provider": "fp8, quantized between", **timed(layer_between, schedules)}
    yield {"gemm": "layer", "provider": "fp8", **timed(layer_fp8, schedules)}
    yield from deep_gemm_rows(p.rows, p.h, (p.gate_up, p.down), schedules, timed)
    for block in (p.block, 64) if p.block == 128 else (16, 32) if p.block == 32 else (p.block,):
        of_block = schedules if block == p.block else p.scheduled(block)
        for gated in (True, False) if sweep else ():
            for design in candidates(block, gated):

                def call(s: Schedule, design: GroupedTiles = design, gated: bool = gated) -> torch.Tensor:
                    x, weight = (p.rows, p.gate_up) if gated else (p.h, p.down)
                    return run_design(design, GroupedArguments.of(x, weight, s, gated), gated)

                name = "gate_up" if gated else "down"
                yield {"gemm": name, "provider": "design", "block": block, **timed(call, of_block), **asdict(design)}


def compile_one(job: tuple[int, bool, GroupedTiles]) -> None:
    """Compile a design into Triton's cache by running it once."""
    block, gated, design = job
    gate_up, down = experts_weight(2, 2 * FEATURES, HIDDEN, 0), experts_weight(2, HIDDEN, FEATURES, 1)
    ids = torch.zeros((3, CHOICES), device="cuda", dtype=torch.int32) - 1
    ids[:, 0] = 1
    schedule = ops.moe_schedule(ids, Experts(EXPERTS, 0, 2), block=block)
    x = Fp8(*by_torch(torch.randn(3, HIDDEN, device="cuda")))
    h = Fp8(*by_torch(torch.randn(3 * CHOICES, FEATURES, device="cuda")))
    run_design(design, GroupedArguments.of(x if gated else h, gate_up if gated else down, schedule, gated), gated)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=140.0, help="no further numbers of tokens after this time")
    parser.add_argument("--tokens", default="4096,1,128,8,32")
    parser.add_argument("--held", type=int, default=EXPERTS)
    parser.add_argument("--no-sweep", action="store_true")
    asked = parser.parse_args()
    start, tokens = time.monotonic(), [int(one) for one in asked.tokens.split(",")]
    blocks = {block_for(one * CHOICES, EXPERTS) for one in tokens}
    blocks |= {64} if 128 in blocks else {16} if 32 in blocks else set()
    jobs = [(block, gated, design) for block in sorted(blocks) for gated in (True, False)
            for design in candidates(block, gated) if design.columns == 1024]  # fmt: skip
    results = Rows(asked.out, held=asked.held, compiled=len(jobs))
    results.document["errors"] = [] if asked.no_sweep else compile_all(compile_one, jobs)
    print(results.document, flush=True)
    gate_up, down = experts_weight(asked.held, 2 * FEATURES, HIDDEN, 0), experts_weight(asked.held, HIDDEN, FEATURES, 1)
    wide = gate_up.dequantized(torch.bfloat16), down.dequantized(torch.bfloat16)
    for count in tokens:
        if time.monotonic() - start > asked.seconds:
            results.add({"tokens": count, "skipped": "out of time"})
            continue
        best: dict[tuple[str, str], dict[str, Any]] = {}
        for row in rows_of(Problem(count, asked.held, gate_up, down), wide, not asked.no_sweep):
            results.document["rows"].append({"tokens": count, **row})
            key = row["gemm"], row["provider"]
            if "failed" in row:
                print(count, row, flush=True)
            elif row.get("us", 0.0) < best.get(key, {}).get("us", 1e9):
                best[key] = row
        for row in best.values():
            print(count, {name: value for name, value in row.items() if value is not None}, flush=True)
        results.write()
    print(f"{results.document['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
