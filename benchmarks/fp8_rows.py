"""Times of rows put in fp8 on one GPU: by a kernel for that alone, and by the kernel that makes them.

    python -m benchmarks.fp8_rows OUT.json [--seconds 130]

In CUDA graphs; inputs, and weights of GEMMs, are cold (more copies than the L2 holds). All results are compared, bit for bit,
with those of two kernels first. Gated GEMMs take fp8 rows; designs of 64 columns need a kernel more for their results.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Rows, copies, timed
from weft import ops
from weft.kernels.fp8 import Fp8, RowFormat, by_torch, quantized_rows, quantized_weight
from weft.kernels.operands import ScaledMatrix
from weft.ops.gemm import small_m
from weft.ops.gemm.fp8_operands import by_design
from weft.ops.gemm.small_m_rule import SmallM
from weft.ops.local import capabilities_of
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import Capabilities

GROUP, TOKEN = RowFormat("group"), RowFormat("token")
SHAPES = ((1, 5120), (16, 5120), (128, 5120), (4096, 5120), (4096, 12800))
# [2 N, K] of gated GEMMs: Qwen3-32B at two ranks, Qwen3-8B at one and two.
GATED = ((25600, 5120), (24576, 4096), (12288, 4096))
EPS = 1e-6


def same(rows: Fp8, wanted: Fp8) -> bool:
    pairs = ((rows.data.view(torch.uint8), wanted.data.view(torch.uint8)), (rows.scales, wanted.scales))
    return all(torch.equal(a, b) for a, b in pairs)


def of_elements(T: int, H: int, caps: Capabilities) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kernels by themselves, and before or after a kernel that quantizes."""

    def rows() -> torch.Tensor:
        return torch.randn(T, H, device="cuda").bfloat16()

    weight = torch.ones(H, device="cuda").bfloat16()
    given = copies(lambda: (rows(), rows()), 4 * T * H)
    wide = copies(lambda: torch.randn(T, 2 * H, device="cuda").bfloat16(), 4 * T * H)
    for format in (GROUP, TOKEN):
        x, normed, gated = given[0][0], ops.add_rms_norm(*given[0], weight, EPS)[0], ops.silu_mul(wide[0])
        by = Fp8(*by_torch(x, H if format == TOKEN else 128))
        right = {
            "quantize": same(quantized_rows(x, format, caps), by),
            "norm": same(ops.add_rms_norm(*given[0], weight, EPS, fp8=format)[0], quantized_rows(normed, format, caps)),
            "silu": same(ops.silu_mul(wide[0], fp8=format), quantized_rows(gated, format, caps)),
        }
        calls = {
            "quantize": (lambda x, f=format: quantized_rows(x[0], f, caps).data, given),
            "norm": (lambda x, f=format: ops.add_rms_norm(*x, weight, EPS, fp8=f)[1], given),
            "silu": (lambda x, f=format: ops.silu_mul(x, fp8=f).data, wide),
        }
        for name, (call, inputs) in calls.items():
            yield f"{name} {format.kind}", {**timed(call, inputs, None), "same": right[name]}
    yield "norm of 16 bits", timed(lambda x: ops.add_rms_norm(*x, weight, EPS)[0], given, None)
    yield "silu of 16 bits", timed(ops.silu_mul, wide, None)


def designs(M: int, N: int, sms: int) -> Iterator[SmallM]:
    block_m = max(16, M)
    for block_n, warps, stages in ((64, 4, 4), (128, 4, 3), (128, 4, 4), (128, 8, 3), (128, 8, 4)):
        if block_m == 64 and block_n == 128 and warps == 4:
            continue
        for partials in (1, 2, 3):
            if cdiv(N, block_n) * partials <= 4 * sms:
                yield SmallM(
                    block_m=block_m, block_n=block_n, block_k=128, num_warps=warps, num_stages=stages, transposed=True,
                    partials=partials,
                )  # fmt: skip


def of_gemm(M: int, weights: list[Fp8], caps: Capabilities) -> Iterator[tuple[str, dict[str, Any]]]:
    (rows, K), groups = weights[0].shape, GROUP
    x = quantized_rows(torch.randn(M, K, device="cuda").bfloat16(), groups, caps)
    yield "auto, 16 bits", timed(lambda w: ops.matmul_silu_mul(x, w), weights, None)
    yield "auto, fp8", timed(lambda w: ops.matmul_silu_mul(x, w, fp8=groups).data, weights, None)
    for design in designs(M, rows // 2, caps.sms):
        plain = by_design(design, ScaledMatrix(x), weights[0], gated=True)
        ok = same(
            by_design(design, ScaledMatrix(x), weights[0], gated=True, format=groups),
            quantized_rows(plain, groups, caps),
        )
        times = timed(
            lambda w, d=design: by_design(d, ScaledMatrix(x), w, gated=True, format=groups).data, weights, None
        )
        alone = small_m.writes(design, K, groups) and design.partials_of(K) == 1
        yield "fp8", {**times, "same": ok, "launches": 1 if alone else 2, "design": asdict(design)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=130.0, help="skip what is left after this time")
    options = parser.parse_args()
    start, caps = time.monotonic(), capabilities_of(torch.device("cuda", torch.cuda.current_device()))
    rows = Rows(options.out)

    def note(results: Iterator[tuple[str, dict[str, Any]]], **shape: int) -> None:
        for name, result in results:
            rows.add({**shape, "what": name, **result})
            if time.monotonic() - start > options.seconds:
                return

    for T, H in SHAPES:
        note(of_elements(T, H, caps), T=T, H=H)
        torch.cuda.empty_cache()
    for N, K in GATED:
        weight = quantized_weight(torch.randn(N, K, device="cuda") / K**0.5, "block")
        weights = copies(lambda w=weight: Fp8(w.data.clone(), w.scales.clone()), N * K)
        for M in (1, 16, 64):
            note(of_gemm(M, weights, caps), M=M, N=N, K=K)
        del weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
