"""Times of fp8 GEMMs on one GPU: cuBLAS, DeepGEMM if it is installed, and weft's small-M kernel with a sweep over its knobs.

    python -m benchmarks.fp8_gemm OUT.json [--seconds 280] [--rows 1,16] [--only NxK]

Weights are cold (more copies than the L2 holds), in CUDA graphs; each result is compared with the dequantized product before
it is timed. A configuration that fails is recorded with its error. Rows of "x8" take fp8 rows; others quantize bf16 rows too;
"as partials" is the design of ``matmul_parts``, whose partials a kernel adds up here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import ScalingType, scaled_mm

try:
    import deep_gemm  # sgl-deep-gemm
except ImportError:
    deep_gemm = None

from benchmarks.measuring import Rows, compile_all, copies, timed
from weft import ops
from weft.kernels.fp8 import Fp8, quantized_weight
from weft.kernels.operands import ScaledMatrix
from weft.ops.gemm import small_m
from weft.ops.gemm.fp8_operands import quantized_for
from weft.ops.gemm.matmul import MATMUL
from weft.ops.gemm.small_m_rule import SmallM
from weft.ops.local import capabilities_of
from weft.plan.planned import machine
from weft.runtime.arithmetic import cdiv, next_power_of_2

SHAPES = ((25600, 5120), (5120, 12800), (5120, 5120), (5120, 4096))
ROWS = (1, 16, 64, 128, 512, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Operands of one shape: fp8 weights of all copies, and rows."""

    x: torch.Tensor
    rows: Fp8
    weights: list[Fp8]
    reference: torch.Tensor


def candidates(M: int, N: int, K: int, sms: int, gated: bool) -> Iterator[SmallM]:
    """Designs of the small-M kernel, far apart from each other first."""
    if M > 128:
        for block_m, block_n, warps, stages, transposed in (
            (128, 128, 8, 4, False), (128, 128, 8, 3, False), (128, 128, 4, 4, False), (128, 64, 4, 4, False),
            (64, 128, 4, 4, False), (64, 128, 4, 4, True), (128, 128, 8, 4, True), (128, 256, 8, 3, False),
            (256, 128, 8, 3, False),
        ):  # fmt: skip
            yield SmallM(
                block_m=block_m, block_n=block_n, block_k=128, num_warps=warps, num_stages=stages, transposed=transposed
            )
        return
    whole = max(16, next_power_of_2(M))
    if M > 32 and not gated:
        # Rows of x fill tensor instructions too.
        for block_m, block_n, warps, stages in product(sorted({64, whole}), (32, 64, 128), (4, 8), (4, 6, 8)):
            tiles = cdiv(M, block_m) * cdiv(N, block_n)
            for transposed in (False, True) if block_n == 32 or warps == 8 else (False,):
                if stages * (block_m + block_n) * 128 > 220 << 10 or (transposed and block_n < 64):
                    continue
                for partials in (1, 2, 3, 4):
                    if tiles * partials <= 4 * sms and cdiv(K, 128) // partials >= 5:
                        yield SmallM(
                            block_m=block_m, block_n=block_n, block_k=128, num_warps=warps, num_stages=stages,
                            transposed=transposed, partials=partials,
                        )  # fmt: skip
    for block_m in sorted({whole, min(whole, 64)}):
        for block_n, warps in ((64, 4), (128, 4), (128, 8)):
            tiles, half = cdiv(M, block_m) * cdiv(N, block_n), block_m * block_n >= 128 * 128
            for stages in (4, 6, 8):
                if stages * (block_m + block_n * (2 if gated else 1)) * 128 > 220 << 10 or (half and warps == 4):
                    continue
                for partials in (1, 2, 3, 4, 5, 6, 8, 10):
                    steps = cdiv(K, 128) // partials
                    if partials == 1 or (steps >= 5 and tiles * partials <= 6 * sms):
                        yield SmallM(
                            block_m=block_m, block_n=block_n, block_k=128, num_warps=warps, num_stages=stages,
                            transposed=True, partials=partials,
                        )  # fmt: skip


def constants_of(design: SmallM) -> tuple:
    """Fields of a design for which the kernel is compiled anew."""
    return (
        *(value for name, value in asdict(design).items() if name not in ("partials", "ahead")),
        design.partials > 1,
    )


def compile_one(job: tuple[SmallM, int, bool]) -> None:
    """Compile a design into Triton's cache by running it once."""
    design, M, gated = job
    N, K = 512, 2048
    weight = quantized_weight(torch.randn(N * (2 if gated else 1), K, device="cuda"), "block")
    x = torch.randn(M, K, device="cuda").bfloat16()
    run_design(design, quantized_for(weight, x, capabilities_of(x.device)), weight, gated)


def run_design(design: SmallM, x: Any, weight: Fp8, gated: bool) -> torch.Tensor:
    return small_m.run(ScaledMatrix(x), weight, design, activation="silu" if gated else None, dtype=torch.bfloat16)


def problem_of(M: int, weights: list[Fp8], gated: bool) -> Problem:
    K = weights[0].shape[1]
    x = torch.randn(M, K, device="cuda", generator=torch.Generator("cuda").manual_seed(M)).bfloat16()
    rows = quantized_for(weights[0], x, capabilities_of(x.device))
    reference = rows.dequantized(torch.float32).double() @ weights[0].dequantized(torch.float32).double().t()
    if gated:
        gate, up = reference.chunk(2, 1)
        reference = torch.nn.functional.silu(gate) * up
    return Problem(x=x, rows=rows, weights=weights, reference=reference)


def baselines(p: Problem) -> Iterator[tuple[str, dict[str, Any]]]:
    wide = [weight.dequantized(torch.bfloat16) for weight in p.weights[: max(2, len(p.weights) // 2)]]
    yield "cublas bf16", timed(lambda w: p.x @ w.t(), wide, None)
    del wide
    by_row = [weight._replace(scales=torch.ones((weight.shape[0], 1), device="cuda")) for weight in p.weights]
    ones = torch.ones((p.x.shape[0], 1), device="cuda")
    for fast in (False, True):

        def row_scaled(w: Fp8, fast: bool = fast) -> torch.Tensor:
            return torch._scaled_mm(
                p.rows.data,
                w.data.t(),
                scale_a=ones,
                scale_b=w.scales.t(),
                out_dtype=torch.bfloat16,
                use_fast_accum=fast,
            )

        yield f"cublas row{' fast' if fast else ''} x8", timed(row_scaled, by_row, None)

    def block_scaled(w: Fp8) -> torch.Tensor:
        of_rows, of_blocks = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        return scaled_mm(p.rows.data, w.data.t(), p.rows.scales, of_rows, w.scales.t(), of_blocks)

    yield "cublas block x8", timed(block_scaled, p.weights, p.reference)
    if deep_gemm is not None:
        M, groups = p.rows.scales.shape
        # Its layout: scales of a group one after the other, on 16 bytes.
        scales = torch.zeros((groups, cdiv(M, 4) * 4), device="cuda").t()[:M].copy_(p.rows.scales)

        def by_deep_gemm(w: Fp8) -> torch.Tensor:
            out = torch.empty((M, len(w.data)), dtype=torch.bfloat16, device="cuda")
            deep_gemm.fp8_gemm_nt((p.rows.data, scales), (w.data, w.scales), out)
            return out

        yield "deep_gemm x8", timed(by_deep_gemm, p.weights, p.reference)


def design_of_partials(M: int, N: int, K: int, device: torch.device) -> SmallM | None:
    """The design of ``matmul_parts``, whose partials a kernel adds up here; None: it leaves none."""
    here = machine(capabilities_of(device), 1)
    call = MATMUL.call_of((M, N, K), torch.bfloat16, here, block_fp8=True, partials=True)
    design = MATMUL.plan(call, here).design
    return design if isinstance(design, SmallM) and design.partials_of(K) > 1 else None


def of_weft(p: Problem, gated: bool, sms: int, sweep: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    op = ops.matmul_silu_mul if gated else ops.matmul
    yield "auto", timed(lambda w: op(p.x, w), p.weights, p.reference)
    yield "auto x8", timed(lambda w: op(p.rows, w), p.weights, p.reference)
    if not gated:
        yield "quantize", timed(lambda w: quantized_for(w, p.x, capabilities_of(p.x.device)).data, p.weights, None)
    M, K = p.x.shape
    N = p.weights[0].shape[0] // (2 if gated else 1)
    if not gated and (left := design_of_partials(M, N, K, p.x.device)) is not None:
        found = timed(lambda w: run_design(left, p.rows, w, gated), p.weights, p.reference)
        yield "as partials x8", {**found, "design": asdict(left)}
    if not sweep:
        return
    measured: list[tuple[float, SmallM]] = []
    for design in candidates(M, N, K, sms, gated):
        found = timed(lambda w, d=design: run_design(d, p.rows, w, gated), p.weights, p.reference)
        measured.append((found.get("us", 1e9), design))
        yield "small_m x8", {**found, "design": asdict(design)}
    best = sorted(measured, key=lambda one: one[0])[:3]
    for us, design in best:
        if us == 1e9:
            continue
        for ahead in (256, 512):
            ahead_of = SmallM(**{**asdict(design), "ahead": ahead})
            found = timed(lambda w, d=ahead_of: run_design(d, p.rows, w, gated), p.weights, p.reference)
            yield "small_m x8", {**found, "design": asdict(ahead_of)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=280.0, help="skip what is left after this time")
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=ROWS)
    parser.add_argument("--no-sweep", action="store_true", help="of weft what the plan takes, and no other design")
    parser.add_argument("--only", default="", help="one shape, as 5120x4096")
    options = parser.parse_args()
    start = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    sms = capabilities_of(device).sms
    shapes = [shape for shape in SHAPES if options.only in ("", "x".join(map(str, shape)))]
    jobs: dict[tuple, tuple] = {}
    for N, K in () if options.no_sweep else shapes:
        for M in options.rows:
            for gated in (False, True) if N == 25600 and M <= 128 else (False,):
                for design in candidates(M, N // (2 if gated else 1), K, sms, gated):
                    jobs.setdefault((constants_of(design), gated), (design, M, gated))
    results = Rows(options.out, compiled=len(jobs))
    results.document["errors"] = compile_all(compile_one, jobs.values(), 0.5 * options.seconds)
    results.write()
    print(results.document, flush=True)
    for N, K in shapes:
        weights = copies(lambda N=N, K=K: quantized_weight(torch.randn(N, K, device="cuda") * K**-0.5, "block"), N * K)
        for M in options.rows:
            for gated in (False, True) if N == 25600 and M <= 128 else (False,):
                if time.monotonic() - start > options.seconds:
                    results.add({"N": N, "K": K, "M": M, "skipped": "out of time"})
                    continue
                problem = problem_of(M, weights, gated)
                providers = [of_weft(problem, gated, sms, not options.no_sweep)]
                if not gated:
                    providers.insert(0, baselines(problem))
                rows = [
                    {"N": N, "K": K, "M": M, "gated": gated, "provider": name, **found}
                    for provider in providers
                    for name, found in provider
                ]
                results.document["rows"] += rows
                results.write()
                best: dict[str, dict[str, Any]] = {}
                for row in rows:
                    if row.get("us", 1e9) < best.get(row["provider"], {}).get("us", 1e9):
                        best[row["provider"]] = row
                failed = [row for row in rows if "failed" in row]
                print(f"{N}x{K} M={M}{' gated' if gated else ''}, {len(failed)} of {len(rows)} failed", flush=True)
                for name, row in best.items():
                    design = {k: v for k, v in row.get("design", {}).items()}
                    print(f"    {name:20} {row['us']:8.2f}  {design or ''}", flush=True)
                for row in failed[:3]:
                    print(f"    failed: {row['provider']} {row['failed'][:150]}", flush=True)
        del weights
    print(f"{results.document['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
