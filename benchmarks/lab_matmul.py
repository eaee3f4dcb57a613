"""Variants of the overlapped matrix products against cuBLAS and cuBLAS + NCCL, in one process group: a laboratory.

    python -m benchmarks.lab_matmul --world-size 4 --out results.json [--only ag,rs,ar,gemm,decode]

Every variant is checked against fp32 before it is timed. A timing is a CUDA graph of a few calls on rotated weights,
replayed behind a barrier kernel; providers alternate; the number is the maximum over ranks of the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial

import torch
import torch.distributed as dist

import weft
from weft.ops import all_gather_matmul as _  # noqa: F401
from weft.ops.gemm import GemmConfig

BF16 = torch.bfloat16
WIDE = dict(block_m=128, block_n=256, block_k=64, num_warps=8)
SQUARE = dict(block_m=128, block_n=128, block_k=64, num_warps=4)


def module(name):
    return sys.modules[f"weft.ops.{name}"]


def gemm_configs(M, names=None):
    table = {
        1: {
            "16x32x256s4": dict(block_m=16, block_n=32, block_k=256, num_stages=4),
            "16x64x128s5": dict(block_m=16, block_n=64, block_k=128, num_stages=5),
            "16x64x256s4": dict(block_m=16, block_n=64, block_k=256, num_stages=4),
            "16x128x128s4": dict(block_m=16, block_n=128, block_k=128, num_stages=4),
            "16x128x128s5w8": dict(block_m=16, block_n=128, block_k=128, num_stages=5, num_warps=8),
        },
        64: {
            "64x64x128s5": dict(block_m=64, block_n=64, block_k=128, num_stages=5),
            "64x128x64s6": dict(block_m=64, block_n=128, block_k=64, num_stages=6),
            "64x128x128s4": dict(block_m=64, block_n=128, block_k=128, num_stages=4),
            "64x256x64s5": dict(block_m=64, block_n=256, block_k=64, num_stages=5),
        },
        128: {
            "128x64x128s4": dict(block_m=128, block_n=64, block_k=128, num_stages=4),
            "128x128x64s6": dict(block_m=128, block_n=128, block_k=64, num_stages=6),
            "128x128x128s3": dict(block_m=128, block_n=128, block_k=128, num_stages=3, num_warps=8),
            "128x256x64s4w8": dict(block_m=128, block_n=256, block_k=64, num_stages=4, num_warps=8),
        },
    }
    key = 1 if M <= 16 else 64 if M <= 64 else 128
    return {name: GemmConfig(**fields) for name, fields in table[key].items()}


def large_configs(op):
    found = {
        "wide": GemmConfig(**WIDE),
        "wide s4": GemmConfig(**WIDE, num_stages=4),
        "wide s4 whole": GemmConfig(**WIDE, num_stages=4, stream=False),
        "square s4": GemmConfig(**SQUARE, num_stages=4),
    }
    if op == "rs":
        found["wide s4 p512"] = GemmConfig(**WIDE, num_stages=4, piece=512)
        found["wide s4 p1024"] = GemmConfig(**WIDE, num_stages=4, piece=1024)
    if op == "ag":
        found["wide s4 c2"] = GemmConfig(**WIDE, num_stages=4, chunks=2)
    if op in ("ag", "rs"):
        found["segments"] = GemmConfig(**WIDE, num_stages=4, design="segments")
    return found


class Lab:
    def __init__(self, team):
        self.team, self.rows = team, []
        self.started = time.time()
        self.generator = torch.Generator("cuda").manual_seed(team.rank)

    def say(self, *words):
        if self.team.rank == 0:
            print(f"{time.time() - self.started:6.1f}", *words, flush=True)

    def random(self, *shape):
        return torch.randn(shape, device=self.team.device, generator=self.generator).to(BF16)

    def measure(self, op, shape, providers, calls, repeats=12):
        """providers: name -> function of the call's number. One row each: median, max over ranks, microseconds a call."""
        team, graphs, side = self.team, {}, torch.cuda.Stream()
        for name, function in providers.items():
            try:
                for call in range(2):
                    function(call)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.graph(graph, stream=side):
                    for call in range(calls):
                        function(call)
                graphs[name] = graph
                graph.replay()
                torch.cuda.synchronize()
            except Exception as error:
                graphs[name] = f"{type(error).__name__}: {str(error)[:200]}"
                self.say(op, shape, name, graphs[name])
                raise
        times = {name: [] for name in graphs}
        for repeat in range(repeats):
            for name, graph in graphs.items():
                torch.cuda._sleep(150_000)
                weft.ops.barrier(team)
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                graph.replay()
                end.record()
                times[name].append((begin, end))
            torch.cuda.synchronize()
        medians = {
            name: statistics.median(b.elapsed_time(e) * 1e3 / calls for b, e in pairs[2:]) for name, pairs in times.items()
        }
        everyone = team.exchange(medians)
        worst = {name: round(max(m[name] for m in everyone), 2) for name in medians}
        base = worst.get("cublas") or worst.get("cublas+nccl")
        self.say(op, shape, "  ".join(f"{name} {t:.1f} ({t / base:.3f})" for name, t in worst.items()))
        self.rows.append({"op": op, "shape": shape, "us": worst})

    def check(self, what, got, expected):
        error = ((got.float() - expected).norm() / expected.norm()).item()
        if not error < 1e-2:
            self.say("WRONG", what, error)
            raise AssertionError(f"{what}: relative error {error} on rank {self.team.rank}")

    # --- ops ---------------------------------------------------------------------------------------------------------

    def ag(self, M, N, K, check):
        team, run = self.team, module("all_gather_matmul").run
        copies = max(2, -(-(160 << 20) // (N * K * 2)))
        shards = [self.random(M // team.size, K) for _ in range(2)]
        weights = [self.random(N, K) for _ in range(copies)]
        whole = torch.empty(M, K, dtype=BF16, device=team.device)
        out = torch.empty(M, N, dtype=BF16, device=team.device)

        def nccl(call):
            dist.all_gather_into_tensor(whole, shards[call % 2])
            torch.mm(whole, weights[call % copies].T, out=out)

        providers = {
            "cublas": lambda call: torch.mm(whole, weights[call % copies].T, out=out),
            "cublas+nccl": nccl,
        }
        for name, config in large_configs("ag").items():
            providers[name] = partial(lambda config, call: run(shards[call % 2], weights[call % copies], team, config), config)
        if check:
            for call in range(3):
                nccl(call)
                expected = whole.float() @ weights[call % copies].float().T
                for name in list(providers)[2:]:
                    self.check(f"ag {M} {N} {K} {name}", providers[name](call), expected)
        self.measure("ag", (M, N, K), providers, 2)

    def rs(self, M, N, K, check):
        team, run = self.team, module("matmul_reduce_scatter").run
        copies = max(2, -(-(160 << 20) // (N * K * 2)))
        acts = [self.random(M, K) for _ in range(2)]
        weights = [self.random(N, K) for _ in range(copies)]
        whole = torch.empty(M, N, dtype=BF16, device=team.device)
        out = torch.empty(M // team.size, N, dtype=BF16, device=team.device)

        def nccl(call):
            torch.mm(acts[call % 2], weights[call % copies].T, out=whole)
            dist.reduce_scatter_tensor(out, whole)

        providers = {
            "cublas": lambda call: torch.mm(acts[call % 2], weights[call % copies].T, out=whole),
            "cublas+nccl": nccl,
        }
        for name, config in large_configs("rs").items():
            providers[name] = partial(lambda config, call: run(acts[call % 2], weights[call % copies], team, config), config)
        if check:
            for call in range(3):
                expected = acts[call % 2].float() @ weights[call % copies].float().T
                dist.all_reduce(expected)
                expected = expected.chunk(team.size)[team.rank]
                for name in list(providers)[2:]:
                    self.check(f"rs {M} {N} {K} {name}", providers[name](call), expected)
        self.measure("rs", (M, N, K), providers, 2)

    def ar(self, M, N, K, check):
        team, run = self.team, module("matmul_all_reduce").run
        copies = max(2, -(-(200 << 20) // (N * K * 2)))
        acts = [self.random(M, K) for _ in range(2)]
        weights = [self.random(N, K) for _ in range(copies)]
        whole = torch.empty(M, N, dtype=BF16, device=team.device)

        def nccl(call):
            torch.mm(acts[call % 2], weights[call % copies].T, out=whole)
            dist.all_reduce(whole)

        def pair(call):
            torch.mm(acts[call % 2], weights[call % copies].T, out=whole)
            return weft.ops.all_reduce(whole, team)

        providers = {
            "cublas": lambda call: torch.mm(acts[call % 2], weights[call % copies].T, out=whole),
            "cublas+nccl": nccl,
            "cublas+weft": pair,
        }
        configs = large_configs("ar") if M > 128 else gemm_configs(M)
        for name, config in configs.items():
            providers[name] = partial(lambda config, call: run(acts[call % 2], weights[call % copies], team, config), config)
        if hasattr(module("matmul_all_reduce"), "run_decode") and M <= 128:
            decode = module("matmul_all_reduce").run_decode
            for name, config in configs.items():
                providers["L " + name] = partial(
                    lambda config, call: decode(acts[call % 2], weights[call % copies], team, config), config
                )
        if check:
            for call in range(3):
                expected = acts[call % 2].float() @ weights[call % copies].float().T
                dist.all_reduce(expected)
                for name in list(providers)[2:]:
                    self.check(f"ar {M} {N} {K} {name}", providers[name](call), expected)
        self.measure("ar", (M, N, K), providers, 2 if M > 128 else copies * 2)

    def gemm(self, M, N, K, check):
        team, run = self.team, module("matmul").run
        copies = max(2, -(-(200 << 20) // (N * K * 2)))
        a, weights = self.random(M, K), [self.random(N, K) for _ in range(copies)]
        out = torch.empty(M, N, dtype=BF16, device=team.device)
        providers = {"cublas": lambda call: torch.mm(a, weights[call % copies].T, out=out)}
        for name, config in gemm_configs(M).items():
            providers[name] = partial(lambda config, call: run(a, weights[call % copies], config), config)
        if check:
            expected = a.float() @ weights[0].float().T
            for name in list(providers)[1:]:
                self.check(f"gemm {M} {N} {K} {name}", providers[name](0), expected)
        self.measure("gemm", (M, N, K), providers, copies * 2)


def main(team, only):
    torch.backends.cuda.matmul.allow_tf32 = False
    lab = Lab(team)
    w = team.size
    plan = [(op, *shape) for op, shape in SHAPES[w] if op in only or "decode" in only and op == "ar" and shape[0] <= 128]
    checked = set()
    for op, M, N, K in plan:
        key = (op, min(M, 1024), N if op != "gemm" else 0)
        try:
            getattr(lab, op)(M, N, K, key not in checked)
        except Exception as error:
            lab.say("FAILED", op, M, N, K, type(error).__name__, str(error)[:300])
            raise
        checked.add(key)
    return lab.rows


DOWN4, O4, UP4, QKV4 = (5120, 6400), (5120, 2048), (12800, 5120), (2560, 5120)
DOWN2, O2, UP2, QKV2 = (5120, 12800), (5120, 4096), (25600, 5120), (5120, 5120)
LARGE = (8192, 4096, 2048, 1024)
SHAPES = {
    4: [(op, (M, N, K)) for op, nk in (("rs", DOWN4), ("rs", O4), ("ag", UP4), ("ag", QKV4)) for M in LARGE for N, K in (nk,)]
    + [("ar", (M, *DOWN4)) for M in (4096, 1024, 128, 64, 16, 1)]
    + [("gemm", (M, *nk)) for M in (1, 16, 64, 128) for nk in (UP4, DOWN4, QKV4, O4)],
    2: [(op, (M, N, K)) for op, nk in (("rs", DOWN2), ("rs", O2), ("ag", UP2), ("ag", QKV2)) for M in LARGE for N, K in (nk,)]
    + [("ar", (M, *DOWN2)) for M in (4096, 1024, 128, 16, 1)],
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--out")
    parser.add_argument("--only", default="rs,ag,ar,gemm")
    options = parser.parse_args()
    rows = weft.launch(
        main, options.world_size, "cuda", args=(options.only.split(","),), heap_bytes=6 << 30
    )[0]
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"torch": torch.__version__, "gpu": torch.cuda.get_device_name(0), "rows": rows}, file, indent=1)
