"""Times of GEMMs with weights in 4 bits on one GPU: cuBLAS in bf16, weft by its plan and other designs, the conversion.

    python -m benchmarks.four_bit_gemm OUT.json [--seconds 25]

Weights are cold (more copies than the L2 holds), in CUDA graphs; each result is compared with the dequantized product before it
is timed. The built-in model then adds in both formats, in graphs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import weft
from benchmarks.measuring import Rows, compile_all, timed
from weft import ops
from weft.kernels.four_bit import FourBit, int4, mxfp4
from weft.kernels.four_bit_tile import dequantized
from weft.kernels.operands import ScaledMatrix
from weft.ops.gemm.four_bit_operands import by_design
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.matmul import MATMUL
from weft.ops.gemm.small_m_rule import SmallM
from weft.ops.local import capabilities_of
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
    for block_n, warps, stages in ((64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 8, 4), (128, 8, 3), (64, 8, 4)):
        tiles = cdiv(N, block_n) * cdiv(M, base.block_m)
        for programs in (2, 4):
            partials = max(1, min(programs * caps.sms // tiles, cdiv(K, 128) // 8, 16))
            yield replace(base, block_n=block_n, num_warps=warps, num_stages=stages, partials=partials)


def compile_one(job: tuple[SmallM, int]) -> None:
    """Compile a design into Triton's cache by running it once."""
    design, M = job
    x, weight = torch.randn(M, 2048, device="cuda").bfloat16(), mxfp4(torch.randn(512, 2048, device="cuda"))
    by_design(design, ScaledMatrix(x), weight)


def rows_of(M: int, weights: dict[str, list[FourBit]], deadline: float) -> Iterator[dict[str, Any]]:
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
    for design in designs(M, N, K) if (M, N, K) in SWEPT else ():
        if design in seen or time.monotonic() > deadline:
            continue
        seen.add(design)
        run = timed(lambda w, d=design: by_design(d, ScaledMatrix(x), w), weights["mxfp4"], reference)
        yield {"provider": "small_m mxfp4, swept", **run, "design": asdict(design)}


def experts() -> Iterator[dict[str, Any]]:
    """Times of the gated GEMM of half of Qwen3-30B-A3B's experts with weights in bf16 and in MXFP4."""
    E, k, N, K = 64, 8, 768, 2048
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [mxfp4(torch.randn(E, 2 * N, K, device="cuda", generator=generator) * K**-0.5) for _ in range(2)]
    wide = [weight.dequantized(torch.bfloat16) for weight in weights]
    for T in (1, 8, 32, 128):
        x = torch.randn(T, K, device="cuda", generator=generator).bfloat16()
        ids = torch.stack([torch.randperm(2 * E)[:k] for _ in range(T)]).int().cuda()
        schedule = ops.moe_schedule(ids, ops.Experts(first=0, count=E, total=2 * E))
        pairs = int(schedule.counts.sum())
        reference = ops.grouped_matmul_silu_mul(x, wide[0], schedule)[:pairs].double()
        for name, several in (("bf16", wide), ("mxfp4", weights)):
            call = timed(
                lambda w, x=x, s=schedule, n=pairs: ops.grouped_matmul_silu_mul(x, w, s)[:n], several, reference
            )
            yield {"T": T, "pairs": pairs, "provider": f"experts {name}", **call}


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
    parser.add_argument("--seconds", type=float, default=25.0, help="skip what is left after this time")
    options = parser.parse_args()
    start = time.monotonic()
    jobs = {
        (replace(design, partials=min(design.partials, 2)), M): None
        for N, K in SHAPES for M in ROWS
        for at, design in enumerate(designs(M, N, K)) if at == 0 or (M, N, K) in SWEPT
    }  # fmt: skip
    results = Rows(options.out, compiled=len(jobs))
    results.document["errors"] = compile_all(compile_one, jobs)[:8]
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
            for row in rows_of(M, weights, start + options.seconds):
                results.add({"N": N, "K": K, "M": M, **row})
        del weights
    results.document["experts"] = list(experts())
    results.document["sums"] = weft.launch(sums, 1)[0]
    results.write()


if __name__ == "__main__":
    main()
