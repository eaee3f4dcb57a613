"""Times of GEMMs with weights in 4 bits on one GPU: cuBLAS in bf16, weft by its plan and other designs, the conversion.

    python -m benchmarks.four_bit_gemm OUT.json [--seconds 45] [--experts 40] [--sweep]

Weights are cold (more copies than the L2 holds), in CUDA graphs; each result is compared with the dequantized product before it
is timed. The built-in model then adds in both formats, in graphs.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import weft
from benchmarks.measuring import Rows, compile_all, timed
from weft import ops
from weft.kernels.four_bit import FourBit, in_words, int4, mxfp4, small
from weft.kernels.four_bit_tile import dequantized
from weft.kernels.operands import ScaledMatrix
from weft.ops.gemm.four_bit_operands import by_design
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.matmul import MATMUL
from weft.ops.gemm.small_m_rule import SmallM
from weft.ops.local import capabilities_of
from weft.ops.moe.grouped import gemms
from weft.ops.moe.grouped.gemms import FourBitTiles, GroupedArguments, GroupedCall
from weft.ops.moe.grouped.rule import four_bit_tiles_for
from weft.ops.moe.grouped_matmul import GROUPED_MATMUL, GROUPED_MATMUL_SILU_MUL
from weft.ops.moe.routing import Schedule
from weft.plan.planned import machine
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import COLD_BYTES

SHAPES, ROWS = ((25600, 5120), (5120, 12800)), (1, 16, 64, 128, 256)
# Sizes at which further designs are timed.
SWEPT = [(1, 25600, 5120), (64, 25600, 5120)]
FORMS = {"mxfp4": mxfp4, "int4": int4, "int4 with zeros": lambda weight: int4(weight, 128, False)}
SUMS = {"12+34=": "46", "250+399=": "649", "99+1=": "100"}


def designs(M: int, N: int, K: int) -> Iterator[SmallM]:
    """The plan's small-M design, and designs with one or two of its fields moved."""
    caps = capabilities_of(torch.device("cuda", 0))
    call = GemmCall(M, N, K, torch.bfloat16, four_bit="mxfp4", design="small_m")
    base = MATMUL.plan(call, machine(caps, 1)).design
    yield base
    for block_n, block_k, warps, stages, transposed in (
        (64, 128, 4, 4, False), (64, 256, 4, 3, False), (64, 256, 2, 3, False), (128, 256, 4, 3, False),
        (128, 128, 4, 4, False), (128, 256, 8, 3, False), (64, 256, 4, 3, True), (128, 256, 8, 3, True),
    ):  # fmt: skip
        tiles = cdiv(N, block_n) * cdiv(M, base.block_m)
        for programs in (2, 4):
            partials = max(1, min(programs * caps.sms // tiles, cdiv(K, 128) // 8, 16))
            fields = {"block_n": block_n, "block_k": block_k, "num_warps": warps, "num_stages": stages}
            yield replace(base, **fields, transposed=transposed, partials=partials)


def compile_one(job: tuple[SmallM, int]) -> None:
    """Compile a design into Triton's cache by running it once."""
    design, M = job
    x, weight = torch.randn(M, 2048, device="cuda").bfloat16(), mxfp4(torch.randn(512, 2048, device="cuda"))
    by_design(design, ScaledMatrix(x), weight)


def rows_of(M: int, weights: dict[str, list[FourBit]], deadline: float, sweep: bool) -> Iterator[dict[str, Any]]:
    first = weights["mxfp4"][0]
    N, K = first.shape
    x = torch.randn(M, K, device="cuda", generator=torch.Generator("cuda").manual_seed(M)).bfloat16()
    wide = [weight.dequantized(torch.bfloat16) for weight in weights["mxfp4"][:2]]
    yield {"provider": "cublas bf16", **timed(lambda w: x @ w.t(), wide, None)}
    del wide
    caps = capabilities_of(x.device)
    for form, several in weights.items():
        reference = x.double() @ several[0].dequantized(torch.bfloat16).double().t()
        yield {"provider": f"auto {form}", **timed(lambda w: ops.matmul(x, w), several, reference)}
        if M >= 128:
            for name in ("small_m", "cublas"):
                call = GemmCall(M, N, K, torch.bfloat16, four_bit=form[:5].strip(), design=name)
                design = MATMUL.plan(call, machine(caps, 1)).design
                run = timed(lambda w, d=design: by_design(d, ScaledMatrix(x), w), several, reference)
                yield {"provider": f"{name} {form}", **run}
    reference = x.double() @ first.dequantized(torch.bfloat16).double().t()
    seen: set[SmallM] = set()
    for design in designs(M, N, K) if sweep and (M, N, K) in SWEPT else ():
        if design in seen or time.monotonic() > deadline:
            continue
        seen.add(design)
        run = timed(lambda w, d=design: by_design(d, ScaledMatrix(x), w), weights["mxfp4"], reference)
        yield {"provider": "small_m mxfp4, swept", **run, "design": asdict(design)}


class Mixture(NamedTuple):
    """Experts of a model on a GPU: ``E`` of ``total``, k for a token, N features, K columns of the model."""

    E: int
    total: int
    k: int
    N: int
    K: int

    def schedule(self, T: int) -> Schedule:
        ids = torch.stack([torch.randperm(self.total)[: self.k] for _ in range(T)]).int().cuda()
        return ops.moe_schedule(ids, ops.Experts(first=0, count=self.E, total=self.total))


MIXTURES = {"qwen3-30b-a3b": Mixture(64, 128, 8, 768, 2048), "gpt-oss-120b": Mixture(128, 128, 4, 2880, 2880)}
TOKENS, SWEPT_TOKENS, SWEPT_TILES = (1, 8, 32, 128), (1, 32), 13


def expert_tiles(call: GroupedCall, gated: bool) -> Iterator[FourBitTiles]:
    """The default tiles first, then tiles with one or two of their fields moved."""
    yield four_bit_tiles_for(call, capabilities_of(torch.device("cuda", 0)), gated=gated)
    halves = 2 if gated else 1
    for block_n, block_k, transposed, warps, per_sm, stages in (
        (64, 128, True, 4, 3, 4), (64, 256, True, 4, 3, 3), (64, 256, True, 4, 4, 2), (128, 128, True, 4, 2, 4),
        (128, 256, True, 4, 2, 3), (128, 256, True, 4, 2, 2), (128, 256, True, 8, 2, 3), (128, 128, True, 4, 3, 3),
        (32, 256, False, 2, 6, 2), (32, 256, False, 4, 3, 3), (64, 256, False, 2, 6, 2), (64, 128, False, 4, 3, 3),
    ):  # fmt: skip
        fields = {
            "block_k": block_k,
            "transposed": transposed,
            "num_warps": warps,
            "per_sm": per_sm,
            "num_stages": stages,
        }
        yield FourBitTiles(block_n=block_n * halves, **fields)


def compile_experts(job: tuple[str, bool, int, int]) -> None:
    """Compile the tiles of a number for a mixture and some tokens, by running them once."""
    name, gated, T, number = job
    of = MIXTURES[name]
    rows, K = (2 * of.N, of.K) if gated else (of.K, of.N)
    data = torch.randint(0, 256, (of.E, rows, 64 * cdiv(K, 128)), dtype=torch.uint8, device="cuda")
    scales = torch.full((of.E, rows, cdiv(K, 32)), 120, dtype=torch.uint8, device="cuda")
    given = expert_arguments(of, FourBit(data, small(in_words(scales)), K), T, gated)
    gemms.run([*expert_tiles(given.call(gated), gated)][number], given, gated=gated)


def expert_arguments(of: Mixture, weight: Any, T: int, gated: bool) -> GroupedArguments:
    """Arguments of the first GEMM, or of the second one, whose rows are in the order of the schedule."""
    schedule = of.schedule(T)
    rows = T if gated else T * of.k
    x = torch.randn(rows, of.K if gated else of.N, device="cuda", generator=torch.Generator("cuda").manual_seed(T))
    return GroupedArguments.of(x.bfloat16(), weight, schedule, gated)


def experts(deadline: float, sweep: bool) -> Iterator[dict[str, Any]]:
    """Times of experts' GEMMs with weights in bf16 and in MXFP4, by the plan and by other tiles."""
    for (name, of), gated in itertools.product(MIXTURES.items(), (True, False)):
        rows, columns = (2 * of.N, of.K) if gated else (of.K, of.N)
        weights, wide = [], []
        for seed in range(2):
            generator = torch.Generator("cuda").manual_seed(seed)
            several = [
                mxfp4(torch.randn(of.E // 8, rows, columns, device="cuda", generator=generator) * columns**-0.5)
                for _ in range(8)
            ]
            data = torch.cat([one.data for one in several])
            scales = torch.cat([one.scales.view(torch.uint8) for one in several])
            weights.append(FourBit(data, small(in_words(scales)), columns))
            wide.append(torch.cat([one.dequantized(torch.bfloat16) for one in several]))
        for T in TOKENS:
            if time.monotonic() > deadline:
                return
            given = expert_arguments(of, wide[0], T, gated)
            here = sweep and T in SWEPT_TOKENS and name == "gpt-oss-120b"
            at = {"model": name, "gated": gated, "T": T, "pairs": int(given.schedule.counts.sum())}
            for row in times_of_experts(given, gated, {"bf16": wide, "mxfp4": weights}, at["pairs"], here):
                yield {**at, **row}


def times_of_experts(
    given: GroupedArguments, gated: bool, weights: dict[str, list[Any]], pairs: int, sweep: bool
) -> Iterator[dict[str, Any]]:
    """Times with each of ``weights``, of which bf16's product is the reference where all pairs are here."""
    design = plan_of_experts(given, gated)
    reference = gemms.run(design, given, gated=gated)[:pairs].double() if pairs == given.schedule.all_pairs else None

    def call(weight: Any, tiles: Any) -> torch.Tensor:
        return gemms.run(tiles, GroupedArguments.of(given.x, weight, given.schedule, gated), gated=gated)[:pairs]

    yield {"provider": "bf16", **timed(partial(call, tiles=design), weights["bf16"], reference)}
    for number, tiles in enumerate(expert_tiles(given.call(gated), gated)):
        if number == 0 or sweep:
            swept = {"design": asdict(tiles)} if number else {}
            yield {"provider": "mxfp4", **timed(partial(call, tiles=tiles), weights["mxfp4"], reference), **swept}


def plan_of_experts(given: GroupedArguments, gated: bool) -> Any:
    op = GROUPED_MATMUL_SILU_MUL if gated else GROUPED_MATMUL
    return op.plan(given.call(gated), machine(capabilities_of(given.x.device), 1)).design


def sums(team: weft.Team) -> dict[str, str]:
    """Answers of the built-in model in each format, by an engine with graphs."""
    said = {}
    for quantization in ("mxfp4", "int4"):
        engine = weft.Engine("adder", team, quantization=quantization, max_seq_len=64, warn=False)
        for _ in range(2):
            answers = engine.generate(list(SUMS), max_tokens=8, temperature=0)
            right = sum(answer.text.strip() == wanted for answer, wanted in zip(answers, SUMS.values(), strict=True))
        said[quantization] = f"{right} of {len(SUMS)}"
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=45.0, help="skip what is left after this time")
    parser.add_argument("--experts", type=float, default=40.0, help="seconds for experts after that")
    parser.add_argument("--sweep", action="store_true", help="time further designs too")
    options = parser.parse_args()
    start = time.monotonic()
    jobs = {
        (replace(design, partials=min(design.partials, 2)), M): None
        for N, K in SHAPES for M in ROWS
        for at, design in enumerate(designs(M, N, K)) if at == 0 or options.sweep and (M, N, K) in SWEPT
    }  # fmt: skip
    results = Rows(options.out, compiled=len(jobs))
    results.document["errors"] = compile_all(compile_one, jobs)[:8]
    of_experts = [
        (name, gated, T, number)
        for name, gated, T in itertools.product(MIXTURES, (True, False), TOKENS)
        for number in range(SWEPT_TILES if options.sweep and name == "gpt-oss-120b" and T in SWEPT_TOKENS else 1)
    ]
    results.document["errors"] += compile_all(compile_experts, of_experts)[:8]
    caps = capabilities_of(torch.device("cuda", 0))
    for N, K in SHAPES:
        copies = max(2, cdiv(int(COLD_BYTES), N * K // 2))
        source = [torch.randn(N, K, device="cuda") * K**-0.5 for _ in range(2)]
        weights = {form: [make(source[at % 2]) for at in range(copies)] for form, make in FORMS.items()}
        del source
        for form, several in weights.items():
            same = [
                bool(torch.equal(dequantized(several[0], dtype, caps), several[0].dequantized(dtype)))
                for dtype in (torch.bfloat16, torch.float16)
            ]
            run = timed(lambda w: dequantized(w, torch.bfloat16, caps), several, None)
            results.add({"N": N, "K": K, "provider": f"dequantize {form}", "same": same, **run})
        for M in ROWS:
            if time.monotonic() - start > options.seconds:
                results.add({"N": N, "K": K, "M": M, "skipped": "out of time"})
                continue
            for row in rows_of(M, weights, start + options.seconds, options.sweep):
                results.add({"N": N, "K": K, "M": M, **row})
        del weights
    results.document["experts"] = []
    for row in experts(start + options.seconds + options.experts, options.sweep):
        print(row, flush=True)
        results.document["experts"].append(row)
        results.write()
    results.document["sums"] = weft.launch(sums, 1)[0]
    results.write()


if __name__ == "__main__":
    main()
