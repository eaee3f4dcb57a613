"""Search spaces: the candidates of an op at a shape, and their attempts.

A search has rounds: ``first`` are candidates far apart, ``around`` the neighbours of the best so far, with one field moved.
Every candidate is a config dataclass; the op's own choice is among them.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

import weft.ops
from weft.bench.problem import Inputs, Problem
from weft.bench.providers import WEFT, Attempt, copy_into
from weft.bench.shapes import COLLECTIVES
from weft.ops import dispatch
from weft.ops.gemm import config, small_m_config
from weft.ops.gemm.config import GemmConfig
from weft.runtime import cublaslt
from weft.runtime.codec import exchangeable
from weft.runtime.cublaslt import Algorithm
from weft.transport.plans import CopyPlan, Plan

if TYPE_CHECKING:
    from weft.runtime.team import Team

# Suffix of an op's name for calls with own_first, which have separate rows (weft.ops.gemm.config.row_for).
OWN_FIRST = "+own_first"
# Shared memory of an SM of sm_90 and sm_100, minus Triton's use besides the operands' stages. The compiler would find excess
# too, after seconds.
STAGES_BYTES = 220 << 10
# block_m, block_n, block_k, num_warps, num_stages for 16-bit floats on sm_90: wgmma shapes that keep the tensor cores busy.
LARGE_TILES = (
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4),
    (128, 128, 128, 8, 3), (64, 256, 64, 4, 4), (64, 128, 64, 4, 5), (128, 64, 64, 4, 5),
)  # fmt: skip
QUICK_TILES = ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 4, 4))
# block_n, block_k for few rows: bound by reading B.
SKINNY_TILES = ((32, 128), (32, 256), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128))
QUICK_SKINNY = ((32, 128), (32, 256), (64, 128))
SKINNY_ROWS = 64
# Fields that are moved one at a time, by design.
TILE_FIELDS = ("block_k", "num_warps", "num_stages", "group", "split")
FIELDS = {
    ("gemm", "fused"): TILE_FIELDS,
    ("ag-gemm", "fused"): (*TILE_FIELDS, "chunks", "flatten"),
    ("gemm-rs", "fused"): (*TILE_FIELDS, "piece"),
    ("ag-gemm", "segments"): ("chunks", "lanes", "span", "begin_first"),
    ("gemm-rs", "segments"): ("chunks", "lanes", "span", "accumulate", "own_pieces"),
    ("gemm-ar", "segments"): ("chunks", "lanes", "span"),
    ("gemm-ar", "fused"): (*TILE_FIELDS, "piece"),
}
DESIGNS = {
    "gemm": ("fused", "library"),
    "ag-gemm": ("fused", "segments", "library"),
    "gemm-rs": ("fused", "segments", "library"),
    "gemm-ar": ("fused", "segments", "library"),
}
# Fields that a label shows differently, and fields of the pipelined design only.
IN_TILE = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
OF_SEGMENTS = ("lanes", "span", "begin_first", "accumulate", "own_pieces")
# chunks, lanes, span of the pipelined design.
SEGMENTS = ((1, 1, 1), (1, 2, 1), (1, 3, 1), (2, 1, 1), (2, 2, 1), (2, 3, 1), (1, 1, 2), (1, 2, 2), (1, 2, 3))
# row_bytes, num_warps, programs_per_sm of the collectives, from many small programs (soonest start) to few large ones (fewest
# polls).
PLANS = (
    (512, 1, 32), (1024, 1, 32), (1024, 2, 32), (2048, 2, 32), (2048, 2, 4), (2048, 4, 8), (2048, 4, 4), (4096, 4, 4),
    (4096, 4, 2), (4096, 8, 4), (4096, 8, 2), (8192, 8, 2), (8192, 16, 2),
)  # fmt: skip
# Pieces for copy engines, programs that copy them out, and the smallest message for which they are tried.
PIECES = ((1,), (1, 1), (3, 1), (7, 1), (12, 3, 1))
COPY_PROGRAMS = (64, 132)
COPIED_BYTES = 16 << 20
# cuBLAS algorithms that won for large GEMMs on H200, from its heuristics for some shape or their neighbours: (tile, cluster,
# custom, swizzle).
KNOWN_ALGORITHMS = tuple(
    Algorithm(tile=tile, cluster=cluster, custom=custom, swizzle=swizzle)
    for tile, cluster, custom, swizzle in (
        (20, 3, 1, 0), (20, 5, 4, 1), (23, 3, 4, 0), (24, 5, 7, 0), (29, 3, 1, 0), (29, 2, 9, 0), (30, 2, 2, 1),
        (30, 3, 8, 1), (30, 5, 2, 0), (30, 5, 4, 0), (30, 5, 8, 0), (30, 3, 4, 0), (135, 3, 0, 0), (165, 5, 2, 0),
        (184, 5, 2, 0), (184, 5, 2, 1), (197, 5, 2, 0), (201, 3, 2, 1), (201, 5, 2, 0), (247, 2, 4, 1), (247, 5, 8, 0),
        (248, 5, 7, 0),
    )
)  # fmt: skip
CLUSTERS, CUSTOMS = (2, 3, 4, 5, 6, 8), range(10)
QUICK_PLANS = ((512, 1, 32), (1024, 2, 32), (2048, 4, 4), (4096, 4, 4), (4096, 8, 2), (4096, 8, 4), (8192, 16, 2))


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveConfig:
    """Algorithm of ``weft.ops.dispatch`` and the fields of its Plan."""

    algorithm: str
    transport: str
    row_bytes: int
    num_warps: int
    programs_per_sm: int

    def plan(self) -> Plan:
        fields = dataclasses.asdict(self)
        del fields["algorithm"]
        return Plan(**fields)


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class CopyConfig:
    """Copy-engine algorithm and the fields of its CopyPlan."""

    pieces: tuple[int, ...]
    programs: int
    algorithm: str = "copy_engine"
    transport: str = "flags"

    def plan(self) -> CopyPlan:
        return CopyPlan(pieces=tuple(self.pieces), programs=self.programs)


class OwnFirst(Problem):
    """ag-gemm with own_first: each rank's own rows come first in its answer, then the next ranks'."""

    def gathered(self, number: int) -> torch.Tensor:
        return Problem.gathered(self, number).roll(-self.team.rank * self.sets[number][0].shape[0], 0)


Config = GemmConfig | CollectiveConfig | CopyConfig | Algorithm


def label(config: Config) -> str:
    """Short text of the fields that differ between candidates: fused 128x256x64 w8 s3 group=4."""
    if isinstance(config, Algorithm):
        return f"cuBLAS tile={config.tile} cluster={config.cluster} custom={config.custom} swizzle={config.swizzle}"
    if isinstance(config, CopyConfig):
        return f"{config.algorithm} {':'.join(map(str, config.pieces))} {config.programs} programs"
    if isinstance(config, CollectiveConfig):
        return (
            f"{config.algorithm} {config.transport} {config.row_bytes} B w{config.num_warps} "
            f"{config.programs_per_sm} per SM"
        )
    if config.design == "library":
        return "library"
    if config.design == "segments":
        words = [f"{name}={getattr(config, name)}" for name in ("chunks", "lanes", "span")]
        if config.own_pieces > 1:
            words.append(f"own_pieces={config.own_pieces}")
        return " ".join(
            ["segments", *words, *(name for name in ("begin_first", "accumulate") if getattr(config, name))]
        )
    tile = f"{config.block_m}x{config.block_n}x{config.block_k} w{config.num_warps} s{config.num_stages}"
    rest = [
        f"{field.name}={getattr(config, field.name)}"
        for field in dataclasses.fields(config)
        if field.name not in (*IN_TILE, *OF_SEGMENTS, "design") and getattr(config, field.name) != field.default
    ]
    return " ".join([config.design, tile, *rest])


def attempt(problem: Problem, config: Config) -> Attempt:
    """Attempt of the op with ``config``, as for any provider."""
    team, sets = problem.team, problem.sets
    if problem.op not in COLLECTIVES:
        own_first = (True,) if isinstance(problem, OwnFirst) else ()
        return Attempt(run=lambda number: call(problem.op, config, sets[number], team, *own_first))
    buffers = [x.clone() for (x,) in sets]
    return Attempt(
        run=lambda number: call(problem.op, config, (buffers[number],), team),
        prepare=lambda number: copy_into(buffers[number], sets[number][0]),
    )


def call(op: str, config: Config, inputs: Inputs, team: Team, own_first: bool = False) -> torch.Tensor:
    run = importlib.import_module(getattr(weft.ops, WEFT[op]).__module__).run
    if op in COLLECTIVES:
        algorithm = (config.algorithm,) if op == "all-reduce" else ()
        return run(*inputs, team, *algorithm, config.plan())
    if op == "gemm":
        return run(*inputs, config)
    return run(*inputs, team, config, own_first) if own_first else run(*inputs, team, config)


def decided(problem: Problem) -> str:
    """Rule that takes precedence over rows for this problem; "" if a row would be looked up."""
    if problem.op != "gemm" or problem.team.is_simulated:
        return ""
    config, reason = small_m_config.configured("matmul", *problem.shape.size, problem.dtype, problem.team.caps)
    return "" if config is None else f"weft.ops.gemm.small_m has its own rule ({reason})"


def default(problem: Problem) -> Config:
    """The op's choice without rows."""
    op, team, size = problem.op, problem.team, problem.shape.size
    if op in COLLECTIVES:
        nbytes = problem.sets[0][0].nbytes
        decision = dispatch.choose_by_rule(WEFT[op], nbytes, team.size)
        if isinstance(decision.plan, CopyPlan):
            return CopyConfig(pieces=decision.plan.pieces, programs=decision.plan.programs)
        return CollectiveConfig(algorithm=decision.algorithm, **dataclasses.asdict(decision.plan))
    return config.default_config(WEFT[op], *size, problem.dtype, team.size, team.caps)


def first(problem: Problem, quick: bool) -> list[Config]:
    """The op's default, then candidates far apart, without duplicates."""
    base = default(problem)
    if isinstance(base, GemmConfig):
        return _unique([base, *_gemms(problem, base, quick)])
    return _unique([base, *_collectives(problem, base, quick)])


def around(op: str, best: Config, world_size: int) -> list[Config]:
    """Neighbours of ``best``: one field moved, within the range that this number of ranks can use."""
    if isinstance(best, CopyConfig):
        return []
    if isinstance(best, Algorithm):
        moves = {"cluster": CLUSTERS, "custom": CUSTOMS, "swizzle": (0, 1)}
        found = [replace(best, **{name: value}) for name, values in moves.items() for value in values]
        return [one for one in found if one != best]
    if isinstance(best, CollectiveConfig):
        moves = [("row_bytes", 2), ("num_warps", 2), ("programs_per_sm", 2)]
        found = [replace(best, **{name: value}) for name, by in moves for value in _scaled(getattr(best, name), by)]
        return [config for config in found if config.row_bytes >= 128 and config.num_warps <= 16]
    found = _unique(_moved(op, best))
    return [c for c in found if c.span < max(2, world_size) and (world_size == 2 or not c.accumulate)]


def is_compiled(config: Config) -> bool:
    """True if a neighbour of ``config`` is a separate kernel, which takes a second or more to compile."""
    return isinstance(config, GemmConfig) and config.design not in ("segments", "library")


def _collectives(
    problem: Problem, base: CollectiveConfig | CopyConfig, quick: bool
) -> Iterator[CollectiveConfig | CopyConfig]:
    if base.algorithm == "copy":
        return
    op, whole, world_size = WEFT[problem.op], problem.shape.size[0], problem.team.size
    algorithms = getattr(importlib.import_module(getattr(weft.ops, op).__module__), "ALGORITHMS", ("push",))
    plans = QUICK_PLANS if quick or problem.team.is_simulated else PLANS
    for algorithm in algorithms:
        if algorithm == "copy_engine":
            if whole >= COPIED_BYTES and dispatch.has_even_lines(whole, world_size):
                yield from (CopyConfig(pieces=pieces, programs=n) for pieces in PIECES for n in COPY_PROGRAMS)
        elif algorithm != "auto":
            transport = dispatch.transport_of(op, whole, world_size, algorithm)
            for row_bytes, num_warps, per_sm in plans:
                yield CollectiveConfig(
                    algorithm=algorithm, transport=transport, row_bytes=row_bytes, num_warps=num_warps,
                    programs_per_sm=per_sm,
                )  # fmt: skip


def _gemms(problem: Problem, base: GemmConfig, quick: bool) -> Iterator[GemmConfig | Algorithm]:
    op, team, m = problem.op, problem.team, problem.shape.size[0]
    if op == "gemm" and not team.is_simulated:
        named = cublaslt.algorithms(*problem.shape.size, problem.dtype)
        yield from named
        yield from KNOWN_ALGORITHMS if named and not quick else ()
    for design in DESIGNS[op]:
        if design == "segments" and team.size > 1:
            yield from _segments(op, replace(base, design=design), team.size)
        elif design == "fused" or team.size > 1:
            yield replace(base, design=design)
    if team.is_simulated:
        yield replace(base, split=not base.split)
        return
    base = replace(base, design="fused")
    if problem.dtype == torch.float32:
        yield from (replace(base, block_n=n, num_stages=s) for n in (32, 64, 128) for s in (2, 3))
        return
    if not team.caps.arch.startswith("sm_"):
        return  # its own default and its neighbours
    rows = m // team.size if op in ("ag-gemm", "gemm-rs") else m
    for block_m, block_n, block_k, num_warps, num_stages in _tiles(rows, quick):
        tile = replace(
            base, block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages,
            flatten=False,
        )  # fmt: skip
        yield from (tile, replace(tile, split=not tile.split)) if op != "ag-gemm" else (tile,)
        # The next tile's loads during the epilogue take one stage of shared memory.
        if op == "ag-gemm" and (block_n, num_stages) == (256, 3):
            yield replace(tile, flatten=True)


def _segments(op: str, base: GemmConfig, world_size: int) -> Iterator[GemmConfig]:
    for chunks, lanes, span in SEGMENTS:
        if span < world_size:
            config = replace(base, chunks=chunks, lanes=lanes, span=span)
            yield config
            if op == "ag-gemm":
                yield replace(config, begin_first=True)
    if op == "gemm-rs" and world_size == 2:
        yield from (replace(base, chunks=c, lanes=lanes, accumulate=True) for c, lanes in ((2, 1), (2, 2), (4, 1)))


def _tiles(rows: int, quick: bool) -> Iterable[tuple[int, int, int, int, int]]:
    if rows > SKINNY_ROWS:
        return QUICK_TILES if quick else LARGE_TILES
    block_m = next(size for size in (16, 32, 64) if size >= rows)
    found = []
    for block_n, block_k in QUICK_SKINNY if quick else SKINNY_TILES:
        deepest = STAGES_BYTES // ((block_m + block_n) * block_k * 2)
        found += [(block_m, block_n, block_k, 4, stages) for stages in {min(4, deepest), min(7, deepest)}]
    return sorted(found)


def _moved(op: str, best: GemmConfig) -> Iterator[GemmConfig]:
    for name in FIELDS.get((op, best.design), ()):
        value: Any = getattr(best, name)
        if isinstance(value, bool):
            values: tuple[Any, ...] = (not value,)
        elif name == "num_stages":
            values = (value - 1, value + 1)
        else:
            values = _scaled(value, 2)
        for moved in values:
            try:
                config = replace(best, **{name: moved})
            except ValueError:
                continue  # not allowed by the config
            if config.num_stages >= 1 and config.num_warps in (2, 4, 8) and config.piece <= 8192:
                yield config


def _scaled(value: int, by: int) -> tuple[int, ...]:
    return (value // by, value * by) if value > 1 else (value * by,)


def _unique(configs: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(configs))
