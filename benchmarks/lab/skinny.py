"""Small-M GEMMs with cold weights, weft's kernel against cuBLAS, on one GPU.

    python -m benchmarks.lab.skinny --out benchmarks/lab/h100-skinny.json [--world-size 2,4] [--rows 1,8,16,32,64,128]

All projections of Qwen3-32B, as one rank of several holds them. Each answer is checked against fp32 before it is timed.
A time is that of one GEMM in a CUDA graph of many, on weights of 1 GB in all, used in turn, so that each is cold:

    alone        one GEMM after the other
    after norm   RMSNorm, GEMM, RMSNorm, GEMM ...: a norm and a GEMM
    after wait   the same with norms that take 4 us longer, as an all-reduce of few rows does

``python benchmarks/skinny.py`` makes the table of docs/performance.md from the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl

import weft.language as wl
from benchmarks.measuring import Rows, captured, replay_us
from weft import ops
from weft.language.lowering import ptx
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.matmul import MATMUL
from weft.ops.gemm.matmul_silu_mul import MATMUL_SILU_MUL
from weft.ops.local import capabilities_of
from weft.plan.planned import machine

BF16 = torch.bfloat16
HIDDEN = 5120
WAIT_US = 4
# Bytes of the weights that a graph reads, and the GEMMs in it.
ROTATED, FEWEST, MOST = 1 << 30, 8, 32
REPLAYS = 7


def projections(world_size: int) -> dict[str, tuple[int, int, bool]]:
    """Projections of Qwen3-32B: name -> (N, K, gated) of one rank's weight [N, K]."""
    qkv, attention, intermediate = 10240 // world_size, 8192 // world_size, 25600 // world_size
    return {
        "qkv": (qkv, HIDDEN, False),
        "o": (HIDDEN, attention, False),
        "gate-up": (2 * intermediate, HIDDEN, False),
        "gate-up and silu": (2 * intermediate, HIDDEN, True),
        "down": (HIDDEN, intermediate, False),
    }


@triton.jit(do_not_specialize=["micros"])
def norm_kernel(x, out, micros, K: tl.constexpr, BLOCK: tl.constexpr):
    """out = rms_norm(x), a program a row, ``micros`` microseconds later than it could."""
    columns = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * K + columns
    wl.follow_previous_kernel()
    row = tl.load(x + at, mask=columns < K, other=0.0).to(tl.float32)
    begin = ptx.globaltimer_us()
    while ptx.globaltimer_us() - begin < micros:
        pass
    row *= tl.rsqrt(tl.sum(row * row) / K + 1e-6)
    tl.store(out + at, row.to(out.dtype.element_ty), mask=columns < K)


class Bench:
    """One GPU's memory for all cases, and the timing of a graph."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        torch.manual_seed(0)
        self.pool = torch.randn(ROTATED, dtype=BF16, device=self.device) * 0.02
        self.stream = torch.cuda.Stream()

    def weights(self, N: int, K: int) -> list[torch.Tensor]:
        size = N * K
        count = max(FEWEST, min(MOST, -(-ROTATED // (2 * size))))
        starts = [i * size % (self.pool.numel() - size) // 64 * 64 for i in range(count)]
        return [self.pool[start : start + size].view(N, K) for start in starts]

    def us(self, steps: list[Callable[[], object]]) -> float:
        """Microseconds of a graph of ``steps``, the median of REPLAYS."""
        return replay_us(captured(steps, self.stream), rounds=REPLAYS)

    def situations(self, product: Callable, x: torch.Tensor, weights: list[torch.Tensor]) -> dict[str, float]:
        """Microseconds of one GEMM, and of what comes before it, in each situation."""
        before, normed = torch.randn_like(x), torch.empty_like(x)
        K = x.shape[1]
        constants = {"K": K, "BLOCK": triton.next_power_of_2(K), "num_warps": 16 if K > 4096 else 8, "launch_pdl": True}

        def norm(micros: int) -> None:
            norm_kernel[(x.shape[0],)](before, normed, micros, **constants)

        def between(micros: int) -> float:
            steps = [step for w in weights for step in (lambda: norm(micros), lambda w=w: product(normed, w))]
            return self.us(steps)

        times = {"alone": self.us([lambda w=w: product(x, w) for w in weights])}
        times |= {"after norm": between(0), "after wait": between(WAIT_US)}
        return {name: round(time / len(weights), 2) for name, time in times.items()}


def library(gated: bool) -> Callable:
    return lambda x, w: ops.silu_mul(x @ w.T) if gated else x @ w.T


def check(product: Callable, x: torch.Tensor, weight: torch.Tensor, gated: bool) -> float:
    """The error's RMS over the reference's. ValueError where it is more than roundings explain."""
    expected = x.float() @ weight.float().T
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    error = ((product(x, weight).float() - expected).norm() / expected.norm()).item()
    if not error < 6e-3:
        raise ValueError(f"{tuple(x.shape)} x {tuple(weight.shape)}, gated={gated}: relative RMS error {error}")
    return error


def rows_of(bench: Bench, world_size: int, rows: list[int]):
    here = machine(capabilities_of(bench.device), 1)
    for name, (N, K, gated) in projections(world_size).items():
        weights = bench.weights(N, K)
        outputs = N // 2 if gated else N
        for M in rows:
            x = torch.randn((M, K), dtype=BF16, device=bench.device)
            op, call = MATMUL_SILU_MUL if gated else MATMUL, GemmCall(M, outputs, K, BF16)
            design = op.plan(call._replace(design="small_m"), here).design
            providers = {"cublas": library(gated), "skinny": lambda x, w, o=op, d=design: o.run(d, None, x, w)}
            found = {}
            for provider, product in providers.items():
                check(product, x, weights[0], gated)
                found[provider] = bench.situations(product, x, weights)
            chosen = op.plan(call, here).name
            row = {
                "projection": name, "world_size": world_size, "M": M, "N": N, "K": K, "gated": gated,
                "us": found, "config": op.config_of(design), "chosen": "skinny" if chosen == "small_m" else "cublas",
            }  # fmt: skip
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--world-size", default="4,2", help="of the ranks whose shares are measured")
    parser.add_argument("--rows", default="1,8,16,32,64,128")
    chosen = parser.parse_args()
    bench = Bench()
    results = Rows(chosen.out, wait_us=WAIT_US)
    for world_size in map(int, chosen.world_size.split(",")):
        for row in rows_of(bench, world_size, list(map(int, chosen.rows.split(",")))):
            results.add(row)


if __name__ == "__main__":
    main()
