"""Grouped GEMM of experts in Gluon, warps specialised, beside weft's and cuBLAS, on one GPU (sm_90): a probe.

    python -m benchmarks.lab.grouped_gluon compile      # for sm_90, without a GPU: stack, shared memory
    timeout -k 3 20 python -m benchmarks.lab.grouped_gluon check --variants c3n128      # alone: a wrong barrier hangs
    python -m benchmarks.lab.grouped_gluon race > FILE      # medians of CUDA graphs in changing order, microseconds

One producer fetches; CONSUMERS warpgroups each multiply a 64-row block of a tile: 1 to CONSUMERS blocks of one expert by BN
rows of its weight. So an expert's last tile costs whole blocks of 64 rows, not of 128. Variants are named by consumers and
columns; g gathers rows of tokens. The result of 2026-11-24 is in h200-grouped-gemm.json ("gluon"), and what follows from it in
docs/decisions.md. Gluon is experimental: this compiles with Triton 3.6; that of 3.9 has no thread_barrier.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from weft.ops import moe_schedule
from weft.ops.local import capabilities_of
from weft.ops.moe.grouped import gemms
from weft.ops.moe.grouped.gemms import GroupedArguments, GroupedCall
from weft.ops.moe.grouped.rule import grouped_tiles_for
from weft.ops.moe.routing import Experts

try:
    from triton.experimental.gluon import jit
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma
    from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
    from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    MISSING = None
except ImportError as error:
    MISSING = error

    def jit(function: Callable | None = None, **options: object) -> Callable:
        return function or (lambda later: later)


class Variant(NamedTuple):
    consumers: int
    stages: int
    bn: int
    registers: int  # of a thread of the consumers after the first, which takes what is left
    gather: bool = False


VARIANTS = {
    "c2n256": Variant(2, 4, 256, 232), "c3n128": Variant(3, 5, 128, 160), "c4n128": Variant(4, 4, 128, 112),
    "c2n256g": Variant(2, 4, 256, 216, gather=True),
}  # fmt: skip
BK, COLUMNS = 64, 1024


@jit
def place_of(tile, tile_rows, across, slab):
    """(row of the table, column tile): slabs of ``slab`` column tiles, in each all rows of tiles, in each its columns."""
    first = tile // (tile_rows * slab) * slab
    width = gl.minimum(slab, across - first)
    place = tile - first * tile_rows
    return place // width, first + place % width


@jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    wrap = stage + 1 == STAGES
    return gl.where(wrap, 0, stage + 1), gl.where(wrap, phase ^ 1, phase)


@jit
def produce(x, weight, tokens_of, work, buffers, GATED: gl.constexpr, CONSUMERS: gl.constexpr, BN: gl.constexpr,
            BK: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr):  # fmt: skip
    """Weights by TMA; rows of the tile's blocks by TMA, or by cp.async of 128 threads that arrive when theirs are there."""
    tiles, tile_count, N, K, across, slab = work
    a_bufs, b_bufs, full, empty = buffers
    WIDTH: gl.constexpr = BN // 2 if GATED else BN
    if GATHER:
        COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        local = gl.arange(0, 64, layout=gl.SliceLayout(1, COPY))
        rows = x + gl.arange(0, BK, layout=gl.SliceLayout(0, COPY))[None, :]
    tile_rows = gl.load(tile_count)
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), tile_rows * across, gl.num_programs(0)):
        entry, column = place_of(tile, tile_rows, across, slab)
        row = gl.load(tiles + entry * 4 + 2)
        count = gl.load(tiles + entry * 4 + 3)
        first = gl.load(tiles + entry * 4) * N * (2 if GATED else 1) + column * WIDTH
        if GATHER:
            a0 = rows + gl.load(tokens_of + row + gl.minimum(local, count - 1)).to(gl.int64)[:, None] * K
            a1 = rows + gl.load(tokens_of + row + gl.minimum(local + 64, count - 1)).to(gl.int64)[:, None] * K
        for k in range(0, K, BK):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            if GATHER:
                mbarrier.expect(bar, BN * BK * 2)
            else:
                for i in gl.static_range(CONSUMERS):
                    mbarrier.expect(bar, (BN + (i + 1) * 64) * BK * 2, pred=(count + 63) // 64 == i + 1)
            b = b_bufs.index(stage)
            if GATED:  # gate's rows, then up's
                tma.async_copy_global_to_shared(weight, [first, k], bar, b.slice(0, WIDTH))
                tma.async_copy_global_to_shared(weight, [first + N, k], bar, b.slice(WIDTH, WIDTH))
            else:
                tma.async_copy_global_to_shared(weight, [first, k], bar, b)
            if GATHER:
                async_copy.async_copy_global_to_shared(a_bufs.index(stage * CONSUMERS), a0 + k)
                if count > 64:
                    async_copy.async_copy_global_to_shared(a_bufs.index(stage * CONSUMERS + 1), a1 + k)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                for i in gl.static_range(CONSUMERS):
                    a = a_bufs.index(stage * CONSUMERS + i)
                    tma.async_copy_global_to_shared(x, [row + i * 64, k], bar, a, pred=count > i * 64)
            stage, phase = next_stage(stage, phase, STAGES)


@jit
def store_block(acc, out, rows_of, row, count, column, N, GATED: gl.constexpr, BN: gl.constexpr):
    WIDTH: gl.constexpr = BN // 2 if GATED else BN
    # A thread holds whole pairs of rows of its warp's 16: exchanged inside a warp, a thread stores 16 bytes.
    STORE: gl.constexpr = gl.BlockedLayout([2, 8], [8, 4], [4, 1], [1, 0])
    if GATED:
        gate, up = acc.reshape([64, 2, WIDTH]).permute([0, 2, 1]).split()
        acc = gate / (1.0 + gl.exp(-gate)) * up
    result = gl.convert_layout(acc.to(out.dtype.element_ty), STORE)
    local = gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
    n = column * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, STORE))
    target = row + local
    if rows_of is not None:
        target = gl.load(rows_of + target, mask=local < count, other=0)
    at = out + target.to(gl.int64)[:, None] * N + n[None, :]
    gl.store(at, result, mask=(local < count)[:, None] & (n < N)[None, :])


@jit
def consume(out, rows_of, work, buffers, which: gl.constexpr, GATED: gl.constexpr, CONSUMERS: gl.constexpr, BN: gl.constexpr,
            BK: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr):  # fmt: skip
    """Warpgroup ``which``: its block of each tile; all stages are counted, also of tiles without a block for it."""
    tiles, tile_count, N, K, across, slab = work
    a_bufs, b_bufs, full, empty = buffers
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    tile_rows = gl.load(tile_count)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tile_rows * across, gl.num_programs(0)):
        entry, column = place_of(tile, tile_rows, across, slab)
        count = gl.load(tiles + entry * 4 + 3) - which * 64
        if count > 0:
            acc = gl.zeros([64, BN], gl.float32, ACC)
            for k in range(0, K, BK):
                mbarrier.wait(full.index(stage), phase)
                if GATHER:  # cp.async wrote a by threads, wgmma reads it as TMA does
                    fence_async_shared()
                a = a_bufs.index(stage * CONSUMERS + which)
                b = b_bufs.index(stage).permute((1, 0))
                acc = mma(a, b, acc, use_acc=k > 0, is_async=True)
                # All but the newest product are done, of all four warps behind the barrier: the stage before is free.
                acc = mma_wait(1, deps=(acc,))
                gl.thread_barrier()
                # Not ``last = stage`` from the step before: equal before the loop, the two are one value for Triton 3.6,
                # which the loop does not change, and every arrival goes to the stage that the tile began with.
                mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), pred=k > 0)
                stage, phase = next_stage(stage, phase, STAGES)
            done = mma_wait(0, deps=(acc,))
            gl.thread_barrier()
            mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
            row = gl.load(tiles + entry * 4 + 2) + which * 64
            store_block(done, out, rows_of, row, count, column, N, GATED, BN)
        else:
            for _k in range(0, K, BK):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                stage, phase = next_stage(stage, phase, STAGES)


@jit(do_not_specialize=["slab"])
def grouped_kernel(x, weight, out, tiles, tile_count, tokens_of, rows_of, N, K, slab, GATED: gl.constexpr,
                   CONSUMERS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
                   REGISTERS: gl.constexpr):  # fmt: skip
    """out[row] = x[row] @ weight[expert].T, through silu(gate) * up if GATED    grid: (programs,)

    x          descriptor [rows, K] in blocks of 64 x BK, rows in the order of the tiles; or a pointer with ``tokens_of``: row i
               is x[tokens_of[i]]
    weight     descriptor [experts * (2 N or N), K] in blocks of WIDTH x BK
    tiles      int32 [tile_count, 4]: expert, -, first row, rows (1 to CONSUMERS * 64); rows_of: target row of each row, or None

    signals  producer: full[stage] = the stage's bytes are there (by cp.async: 128 threads and the weight's bytes)
             consumer: empty[stage] = its last product that reads the stage is done, or the tile has no block for it
    waits    consumer: full[stage] before it reads; producer: empty[stage] of all consumers before it writes the stage again
    """
    across = (N + (BN // 2 if GATED else BN) - 1) // (BN // 2 if GATED else BN)
    GATHER: gl.constexpr = tokens_of is not None
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES * CONSUMERS, 64, BK], LAYOUT)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129 if GATHER else 1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    work = (tiles, tile_count, N, K, across, slab)
    buffers = (a_bufs, b_bufs, full, empty)
    WARPS: gl.constexpr = 4 if GATHER else 1
    FEW: gl.constexpr = 56 if GATHER else 24
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (out, rows_of, work, buffers, 0, GATED, CONSUMERS, BN, BK, STAGES, GATHER)),
            (consume, (out, rows_of, work, buffers, 1, GATED, CONSUMERS, BN, BK, STAGES, GATHER)),
            (produce, (x, weight, tokens_of, work, buffers, GATED, CONSUMERS, BN, BK, STAGES, GATHER)),
        ], [4, WARPS], [REGISTERS, FEW])  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize([
            (consume, (out, rows_of, work, buffers, 0, GATED, CONSUMERS, BN, BK, STAGES, GATHER)),
            (consume, (out, rows_of, work, buffers, 1, GATED, CONSUMERS, BN, BK, STAGES, GATHER)),
            (consume, (out, rows_of, work, buffers, 2, GATED, CONSUMERS, BN, BK, STAGES, GATHER)),
            (produce, (x, weight, tokens_of, work, buffers, GATED, CONSUMERS, BN, BK, STAGES, GATHER)),
        ], [4, 4, WARPS], [REGISTERS, REGISTERS, FEW])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (out, rows_of, work, buffers, 0, GATED, CONSUMERS, BN, BK, STAGES, GATHER)),
            (consume, (out, rows_of, work, buffers, 1, GATED, CONSUMERS, BN, BK, STAGES, GATHER)),
            (consume, (out, rows_of, work, buffers, 2, GATED, CONSUMERS, BN, BK, STAGES, GATHER)),
            (consume, (out, rows_of, work, buffers, 3, GATED, CONSUMERS, BN, BK, STAGES, GATHER)),
            (produce, (x, weight, tokens_of, work, buffers, GATED, CONSUMERS, BN, BK, STAGES, GATHER)),
        ], [4, 4, 4, WARPS], [REGISTERS, REGISTERS, REGISTERS, FEW])  # fmt: skip


def launch(v: Variant, x, weight, out, tiles, tile_count, rows_of, tokens_of, gated: bool, programs: int | None) -> Any:
    """Launch ``programs`` programs, or compile for None; weight [experts, (2) N, K], the rest as ``grouped_kernel`` has it."""
    experts, rows, K = weight.shape
    N, width = rows // (2 if gated else 1), v.bn // 2 if gated else v.bn
    layout = gl.NVMMASharedLayout(128, 16, 2)
    operand = x if v.gather else TensorDescriptor(x, list(x.shape), [K, 1], [64, BK], layout)
    weights = TensorDescriptor(weight.view(-1, K), [experts * rows, K], [K, 1], [width, BK], layout)
    slab = max(1, min(-(-N // width), COLUMNS // width))
    constants = {"GATED": gated, "CONSUMERS": v.consumers, "BN": v.bn, "BK": BK, "STAGES": v.stages}
    constants |= {"LAYOUT": layout, "REGISTERS": v.registers, "num_warps": 4}
    start = partial(grouped_kernel.warmup, grid=(1,)) if programs is None else grouped_kernel[(programs,)]
    return start(operand, weights, out, tiles, tile_count, tokens_of, rows_of, N, K, slab, **constants)


# Tokens, choices of each, experts, H, I. SHAPES are timed and have the mean of pairs an expert in their names: Qwen3-30B-A3B
# and Mixtral 8x7B, with random choices or "even", all experts with equally many pairs.
SMALL = {"ragged": (150, 3, 6, 320, 192), "many steps": (1000, 8, 32, 2048, 768)}
SHAPES = {f"30b {T // 16}": (T, 8, 128, 2048, 768) for T in (4096, 8192, 16384)}
SHAPES |= {"mixtral 1024": (4096, 2, 8, 4096, 14336), "30b 256 even": SHAPES["30b 256"]}


class Data:
    """Operands of one GEMM: x of tokens and in the order of the pairs, weights, that order, and the fp32 answer."""

    def __init__(self, name: str, gated: bool) -> None:
        T, k, E, H, I = {**SMALL, **SHAPES}[name]
        generator = torch.Generator(device="cuda").manual_seed(0)

        def draw(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, device="cuda", dtype=torch.bfloat16, generator=generator)

        likes = torch.rand(T, E, device="cuda", generator=generator)
        if name == "ragged":  # all tokens choose the first expert, none the last, one the fourth
            likes += torch.tensor([2, 0, 0, -2, 0, -2], device="cuda")
            likes[0, 3] += 4
        ids = likes.topk(k, -1).indices.int()
        if "even" in name:
            ids = torch.arange(T * k, device="cuda").view(T, k).int() % E
        found, self.pairs = ids.flatten().sort(stable=True)
        counts = torch.bincount(found, minlength=E)
        self.counts, self.ends = counts.tolist(), counts.cumsum(0).int()
        self.experts, self.k, self.gated, self.ids, self.tokens_of = E, k, gated, ids, (self.pairs // k).int()
        self.N, self.K = (I, H) if gated else (H, I)
        self.x = draw(T, self.K)
        self.ordered = self.x[self.tokens_of] if gated else draw(T * k, self.K)
        self.weight = torch.stack([draw(self.N * (2 if gated else 1), self.K) * self.K**-0.5 for _ in range(E)])
        of_experts = zip(self.ordered.split(self.counts), self.weight, strict=True)
        self.answer = torch.cat([rows.float() @ weight.float().T for rows, weight in of_experts])
        if gated:
            gate, up = self.answer.chunk(2, -1)
            self.answer = torch.nn.functional.silu(gate) * up
        self.out = torch.empty(T * k, self.N, device="cuda", dtype=torch.bfloat16)

    def check(self, run: Callable[[], object]) -> float:
        """The error's RMS over the answer's, of the rows that ``run`` stores. ValueError where roundings do not explain it."""
        self.out.fill_(float("nan"))
        run()
        error = (self.out if self.gated else self.out[self.pairs]).float() - self.answer
        whole, row = error.norm() / self.answer.norm(), (error.norm(dim=1) / self.answer.norm(dim=1)).max()
        if not (whole < 4e-3 and row < 2e-2):
            raise ValueError(f"gated={self.gated}, K={self.K}: relative error {whole:.3g}, of a row {row:.3g}")
        return float(whole)

    def variant(self, v: Variant) -> Callable[[], object]:
        """A launch of ``v``: an expert's 64-row blocks are shared out evenly among as few tiles as they need."""
        rows, first = [], 0
        for expert, count in enumerate(self.counts):
            end, blocks = first + count, -(-count // 64)
            tiles = -(-blocks // v.consumers)
            for i in range(tiles):
                height = min((blocks // tiles + (i < blocks % tiles)) * 64, end - first)
                rows.append((expert, 0, first, height))
                first += height
        table, number = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in (rows, [len(rows)]))
        x, tokens_of = (self.x, self.tokens_of) if v.gather else (self.ordered, None)
        rows_of = None if self.gated else self.pairs.int()
        programs = capabilities_of(self.x.device).sms
        return lambda: launch(v, x, self.weight, self.out, table, number, rows_of, tokens_of, self.gated, programs)

    def today(self, gather: bool) -> Callable[[], object]:
        """A launch of weft's kernel by its rule, in tiles of 128 pairs."""
        schedule = moe_schedule(self.ids, Experts.slices(self.experts), block=128)
        call = GroupedCall(128, len(self.pairs), self.N, self.K, torch.bfloat16, gather)
        design = grouped_tiles_for(call, capabilities_of(self.x.device), gated=self.gated)
        x, k = (self.x, self.k) if gather else (self.ordered, 0)
        return lambda: gemms.run(
            design, GroupedArguments(x, self.weight, schedule, k > 0, None), gated=self.gated, out=self.out
        )

    def ours(self, variants: list[str]) -> dict[str, Callable[[], object]]:
        found = {"today in order": self.today(False)} | ({"today gathered": self.today(True)} if self.gated else {})
        known = {v: VARIANTS[v] for v in variants}
        return found | {f"gluon {v}": self.variant(known[v]) for v in known if self.gated or not known[v].gather}

    def baselines(self) -> dict[str, Callable[[], object]]:
        """cuBLAS on as many rows with one weight, and torch's grouped GEMM without what comes behind it."""
        x, weights = self.ordered, self.weight.transpose(1, 2)
        dense, grouped_mm = x.new_empty(len(x), weights.shape[2]), torch._grouped_mm
        multiply = partial(torch.mm, x, weights[0], out=dense)
        return {"cublas dense": multiply, "torch._grouped_mm": partial(grouped_mm, x, weights, offs=self.ends)}


def compile_all(variants: list[str]) -> None:
    from tests.compiling import compiling_for, stack_bytes

    x, weight, ints = torch.zeros(64, 2048).bfloat16(), torch.zeros(1, 1536, 2048).bfloat16(), torch.zeros(4).int()
    with compiling_for("sm_90"), tempfile.TemporaryDirectory() as directory:
        for name, gated in ((name, gated) for name in variants for gated in (True, False)):
            tokens_of = ints if VARIANTS[name].gather else None
            kernel = launch(VARIANTS[name], x, weight, x, ints, ints, None if gated else ints, tokens_of, gated, None)
            stack, shared = stack_bytes(kernel, Path(directory)), kernel.metadata.shared
            print(f"{name}, gated={gated}: {stack} bytes of stack, {shared} of shared memory", flush=True)


def race(providers: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median microseconds of a CUDA graph of each, in another order every round."""
    graphs, times, kept = {name: torch.cuda.CUDAGraph() for name in providers}, {name: [] for name in providers}, []
    for name, run in providers.items():
        run()
        with torch.cuda.graph(graphs[name]):
            kept.append(run())
        graphs[name].replay()
    for _ in range(9):
        for name in random.sample(list(graphs), len(graphs)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            end.record()
            times[name].append((start, end))
    torch.cuda.synchronize()
    medians = {name: statistics.median(a.elapsed_time(b) for a, b in marks) for name, marks in times.items()}
    return {name: round(milliseconds * 1e3, 1) for name, milliseconds in medians.items()}


def compare(variants: list[str], shapes: Iterable[str], timed: bool) -> None:
    """Print relative errors of three launches each, then times if ``timed``."""
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}))
    for name, gated in ((name, gated) for name in shapes for gated in (True, False)):
        data = Data(name, gated)
        ours = data.ours(variants)
        row = {"shape": name, "gated": gated}
        for provider, run in ours.items():
            errors = [round(data.check(run), 5) for _ in range(3)]
            print(json.dumps({**row, "provider": provider, "errors": errors}), flush=True)
        if timed:
            print(json.dumps({**row, "us": race({**data.baselines(), **ours})}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("compile", "check", "race"))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    chosen = parser.parse_args()
    if MISSING is not None:
        parser.error(f"triton {triton.__version__} lacks what the kernel needs of Gluon: {MISSING}")
    if chosen.what == "compile":
        compile_all(chosen.variants)
    else:
        compare(chosen.variants, SHAPES if chosen.what == "race" else SMALL, timed=chosen.what == "race")


if __name__ == "__main__":
    main()
