"""Variants of the overlapped matrix products against cuBLAS and cuBLAS + NCCL, in one process group: a laboratory.

    python -m benchmarks.lab.matmul --world-size 4 --out results.json [--only ag,rs,ar,gemm,decode]

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
from triton.runtime.jit import JITFunction

import weft
from weft.ops.gemm import GemmConfig

BF16 = torch.bfloat16
WIDE = dict(block_m=128, block_n=256, block_k=64, num_warps=8)
SQUARE = dict(block_m=128, block_n=128, block_k=64, num_warps=4)


def module(name):
    return sys.modules[f"weft.ops.{name}"]


def gemm_configs(M, **more):
    table = {
        1: {
            "16x64x128s5": dict(block_m=16, block_n=64, block_k=128, num_stages=5),
            "16x32x256s5": dict(block_m=16, block_n=32, block_k=256, num_stages=5),
            "16x64x256s4": dict(block_m=16, block_n=64, block_k=256, num_stages=4),
            "16x128x128s5": dict(block_m=16, block_n=128, block_k=128, num_stages=5),
        },
        64: {
            "64x64x128s5": dict(block_m=64, block_n=64, block_k=128, num_stages=5),
            "64x128x64s6": dict(block_m=64, block_n=128, block_k=64, num_stages=6),
        },
        128: {
            "128x64x128s4": dict(block_m=128, block_n=64, block_k=128, num_stages=4),
            "128x128x64s6": dict(block_m=128, block_n=128, block_k=64, num_stages=6),
            "128x128x64s6w8": dict(block_m=128, block_n=128, block_k=64, num_stages=6, num_warps=8),
            "128x256x64s4w8": dict(block_m=128, block_n=256, block_k=64, num_stages=4, num_warps=8),
        },
    }
    key = 1 if M <= 16 else 64 if M <= 64 else 128
    return {name: GemmConfig(**fields, **more) for name, fields in table[key].items()}


def decode_configs(M):
    found = {"library": GemmConfig(**WIDE, design="library")}
    return found


def large_configs(op, M):
    """By op, the candidates that were left of a wider search."""
    small = M <= 1024
    if op == "ag":
        found = {
            "wide flat": GemmConfig(**WIDE, flatten=True),
            "wide flat whole": GemmConfig(**WIDE, flatten=True, split=False),
            "segments": GemmConfig(**WIDE, design="segments"),
        }
        if M <= 2048:
            found["square flat whole"] = GemmConfig(**SQUARE, num_stages=4, flatten=True, split=False)
    else:
        found = {
            "wide p1k": GemmConfig(**WIDE, num_stages=4, piece=1024),
            "wide whole p1k": GemmConfig(**WIDE, num_stages=4, piece=1024, split=False),
        }
        if small:
            found["square whole p1k"] = GemmConfig(**SQUARE, num_stages=4, piece=1024, split=False)
        if op == "rs":
            found["segments"] = GemmConfig(**WIDE, num_stages=4, design="segments")
            found["segments whole"] = GemmConfig(**WIDE, num_stages=4, design="segments", split=False)
    if small:
        found["library"] = GemmConfig(**WIDE, design="library")
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

    def measure(self, op, shape, providers, calls, repeats=10):
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
        for _ in range(repeats):
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
            name: statistics.median(b.elapsed_time(e) * 1e3 / calls for b, e in pairs[2:])
            for name, pairs in times.items()
        }
        everyone = team.exchange(medians)
        worst = {name: round(max(m[name] for m in everyone), 2) for name in medians}
        base = worst.get("cublas") or worst.get("cublas+nccl")
        self.say(op, shape, "  ".join(f"{name} {t:.1f} ({t / base:.3f})" for name, t in worst.items()))
        self.rows.append({"op": op, "shape": shape, "us": worst})

    def compile_once(self, providers):
        """Each rank compiles a share of the kernels, which the others then find in the cache."""
        run, team = JITFunction.run, self.team
        ours = [f for name, f in providers.items() if "cublas" not in name]
        try:
            JITFunction.run = lambda self, *args, **kwargs: None
            for function in ours:
                function(0)
            JITFunction.run = lambda self, *args, warmup, **kwargs: run(self, *args, warmup=True, **kwargs)
            team.barrier()
            for function in ours[team.rank :: team.size]:
                function(0)
        finally:
            JITFunction.run = run
        team.barrier()
        for op in ("all_gather_matmul", "matmul_reduce_scatter segments"):
            for space in team.workspace((op, BF16), dict).values():
                space.calls = 0

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
        for name, config in large_configs("ag", M).items():
            providers[name] = partial(
                lambda config, call: run(shards[call % 2], weights[call % copies], team, config), config
            )
        self.compile_once(providers)
        if check:
            for call in range(2):
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
        for name, config in large_configs("rs", M).items():
            providers[name] = partial(
                lambda config, call: run(acts[call % 2], weights[call % copies], team, config), config
            )
        self.compile_once(providers)
        if check:
            for call in range(2):
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

        providers = {
            "cublas": lambda call: torch.mm(acts[call % 2], weights[call % copies].T, out=whole),
            "cublas+nccl": nccl,
        }
        configs = large_configs("ar", M) if M > 128 else decode_configs(M)
        for name, config in configs.items():
            providers[name] = partial(
                lambda config, call: run(acts[call % 2], weights[call % copies], team, config), config
            )
        self.compile_once(providers)
        if check:
            for call in range(2):
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
        if M == 16:
            providers["16x64x128s5 whole"] = lambda call: run(
                a, weights[call % copies], GemmConfig(block_m=16, block_n=64, block_k=128, num_stages=5, split=False)
            )
        self.compile_once(providers)
        if check:
            expected = a.float() @ weights[0].float().T
            for name in list(providers)[1:]:
                self.check(f"gemm {M} {N} {K} {name}", providers[name](0), expected)
        self.measure("gemm", (M, N, K), providers, copies * 2)


def main(team, only):
    torch.backends.cuda.matmul.allow_tf32 = False
    lab = Lab(team)
    w = team.size
    plan = [
        (op, *shape) for op, shape in SHAPES[w] if op in only or "decode" in only and op == "ar" and shape[0] <= 128
    ]
    checked = set()
    for op, M, N, K in plan:
        key = (op, min(M, 1024), N if op == "ag" else 0)
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


def shapes(down, o, up, qkv):
    found = [("rs", (M, *nk)) for nk in (down, o) for M in LARGE] + [
        ("ag", (M, *nk)) for nk in (up, qkv) for M in LARGE
    ]
    found += [("ar", (M, *down)) for M in (4096, 1024, 128, 16, 1)]
    found += [("rs", (256, *nk)) for nk in (down, o)] + [("ag", (256, *nk)) for nk in (up, qkv)]
    return found + [("gemm", (M, *nk)) for M in (16, 128) for nk in (up, down, o)]


SHAPES = {4: shapes(DOWN4, O4, UP4, QKV4), 2: shapes(DOWN2, O2, UP2, QKV2)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--out")
    parser.add_argument("--only", default="rs,ag,ar,gemm")
    options = parser.parse_args()
    rows = weft.launch(main, options.world_size, "cuda", args=(options.only.split(","),), heap_bytes=6 << 30)[0]
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"torch": torch.__version__, "gpu": torch.cuda.get_device_name(0), "rows": rows}, file, indent=1)
