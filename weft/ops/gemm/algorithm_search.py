"""Search for the fastest cuBLAS algorithm of a GEMM: timed once on rank 0, sent to all ranks.

torch.mm runs the first algorithm that cuBLAS's heuristics name. The search times all that they name and those that won for
other shapes, with cold weights, as CUDA graphs that take turns. The fastest ones and torch.mm's choice are timed once more,
since of many a lucky one reads fastest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from weft.arguments import check_callable, check_instance, check_optional, check_sequence, is_integer, quoted
from weft.costs import gpu
from weft.errors import Unsupported
from weft.ops.case import error_bound
from weft.ops.gemm import cublas, space
from weft.ops.gemm.cublas import Cublas
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.registration import HALVES
from weft.plan import algorithms, table
from weft.plan.algorithms import Entry
from weft.runtime import cublaslt
from weft.runtime.capabilities import COLD_BYTES
from weft.runtime.cublaslt import Algorithm
from weft.runtime.graphs import recording

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

MOST_WEIGHTS = 24
# Time of a graph, which holds each weight at least once; rounds of all candidates and of the finalists, each after one to
# warm up.
GRAPH_US, ROUNDS, FINAL_ROUNDS, FINALISTS = 500.0, 3, 9, 3
# Rows that are compared at once.
CHECKED_ROWS = 1024
Shape = tuple[int, ...]
Gemm = tuple[torch.dtype, Shape]
# Median time of a call in µs by algorithm; None: torch.mm's choice.
Times = dict[Algorithm | None, float]


class Contest(Protocol):
    """GEMM of one shape by any algorithm."""

    def times(self, candidates: Sequence[Algorithm | None], rounds: int) -> Times:
        """Times of the candidates that run and compute the product; candidates take turns."""


def warm_up(
    team: Team,
    shapes: Sequence[Shape] = (),
    dtype: torch.dtype = torch.bfloat16,
    *,
    run: Callable[[], Any] | None = None,
    algorithm_cache: str | PathLike[str] | None = None,
    costs: str | PathLike[str] | None = None,
) -> list[Entry]:
    """Find cuBLAS's fastest algorithms for some GEMMs, which plans then read. Collective.

    shapes  (M, N, K) of GEMMs a[M, K] @ b[N, K].T of one rank, in ``dtype``
    run     called once; the GEMMs for which weft's ops ask cuBLAS in it are searched too
    algorithm_cache  JSON file that rank 0 reads first and adds its results to; None: results stay in memory. A damaged file is
                     ignored with one warning, and left as it is; so is one that cannot be written
    costs   rank 0's file of ``weft doctor --measure``, by whose constants plans without a row choose; None: the usual one

    Rank 0 times what has neither a shipped row nor an entry of the file; all ranks get its choices and its file's. Returns the
    entries that were found now. Virtual ranks and fp32 have none. Unsupported while a CUDA graph is captured.

        weft.ops.warm_up(team, run=lambda: model(tokens), algorithm_cache="algorithms.json")
    """
    gemms = [(dtype, _checked(shape)) for shape in check_sequence("shapes", shapes, "a list of (M, N, K)")]
    check_instance("dtype", dtype, torch.dtype, "a torch.dtype, such as torch.bfloat16")
    check_optional(check_callable, "run", run, "run()")
    check_optional(check_instance, "algorithm_cache", algorithm_cache, (str, PathLike), "the path of a file")
    check_optional(check_instance, "costs", costs, (str, PathLike), "the path of a file")
    if team.device.type == "cpu":
        return []
    if torch.cuda.is_current_stream_capturing():
        raise Unsupported(f"rank {team.rank}: warm_up times GEMMs, and a CUDA graph is captured; call it before")
    gpu.agree(team, None if costs is None else Path(costs))
    return agree(team, gemms, run, None if algorithm_cache is None else Path(algorithm_cache))


def _checked(shape: object) -> Shape:
    sizes = tuple(shape) if isinstance(shape, tuple | list) else ()
    if len(sizes) != 3 or not all(is_integer(size) and size > 0 for size in sizes):
        raise ValueError(f"warm_up: shapes has {quoted(shape)}; pass (M, N, K), three positive integers")
    return tuple(map(int, sizes))


def agree(team: Team, gemms: list[Gemm], run: Callable[[], Any] | None, file: Path | None) -> list[Entry]:
    """``warm_up`` with checked arguments."""
    known = algorithms.load(file) if team.rank == 0 and file is not None else []
    if known is None:
        known, file = [], None  # a file that is no cache is not written over
    algorithms.use(team.exchange(known)[0])
    with algorithms.missing() as missing:
        for dtype, shape in gemms:
            cublas.tuned(*shape, dtype, team.caps)
        if run is not None:
            run()
    winners = []
    # Ranks with other shares of K or N have other shapes.
    for gemm in dict.fromkeys(chain(*team.exchange([gemm for gemm in missing if gemm[0] in HALVES]))):
        entry = team.exchange(_search(*gemm, team) if team.rank == 0 else None)[0]
        if entry is not None:
            algorithms.use([entry])
            winners.append(entry)
            if file is not None and team.rank == 0 and not algorithms.try_save(file, [entry]):
                file = None  # an error here would leave the other ranks waiting for the next choice
    torch.cuda.empty_cache()  # operands and graphs of the search
    return winners


def _search(dtype: torch.dtype, shape: Shape, team: Team) -> Entry | None:
    """Entry of a shape, by timing on this rank's GPU; None where cuBLASLt names no algorithm."""
    if any(size * dtype.itemsize % cublaslt.ALIGNMENT for size in shape[1:]):
        return None  # no algorithm reads such rows
    candidates = [design.algorithm for design in space.algorithms(GemmCall(*shape, dtype), quick=False)]
    named = [algorithm for algorithm in candidates if algorithm is not None]
    if not named:
        return None
    algorithm, us, torch_us = fastest(GpuContest(shape, dtype, team.device), named)
    return Entry(
        gpu=team.caps.device_name,
        cublas=cublaslt.version(),
        dtype=table.name_of(dtype),
        shape=shape,
        algorithm=algorithm,
        us=round(us, 2),
        torch_us=round(torch_us, 2),
    )


def fastest(contest: Contest, named: Sequence[Algorithm]) -> tuple[Algorithm | None, float, float]:
    """(algorithm, its time, torch.mm's): None, torch.mm's choice, if the best gains less than LEAST_GAIN."""
    first = contest.times([None, *named], ROUNDS)
    ordered = sorted((one for one in first if one is not None), key=lambda one: first[one])
    times = contest.times([None, *ordered[:FINALISTS]], FINAL_ROUNDS) if ordered else first
    best = min(times, key=lambda one: times[one])
    if times[best] > times[None] * (1 - table.LEAST_GAIN):
        best = None
    return best, times[best], times[None]


class GpuContest:
    """Contest on a GPU, by CUDA graphs of calls with weights in rotation."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        M, N, K = shape
        copies = min(MOST_WEIGHTS, 1 + math.ceil(COLD_BYTES / (N * K * dtype.itemsize)))
        generator = torch.Generator(device).manual_seed(0)

        def drawn(rows: int, scale: float = 1.0) -> torch.Tensor:
            return torch.empty(rows, K, dtype=dtype, device=device).normal_(0, scale, generator=generator)

        self._a, self._weights = drawn(M), [drawn(N, K**-0.5) for _ in range(copies)]
        self._out = torch.empty(M, N, dtype=dtype, device=device)
        self._answer = self._a @ self._weights[0].T
        self._calls, self._pool = copies, None
        self._graphs: dict[Algorithm | None, torch.cuda.CUDAGraph | None] = {}
        self._calls = max(copies, math.ceil(GRAPH_US / self.times([None], 1)[None]))
        self._graphs.clear()
        self._pool = None

    def times(self, candidates: Sequence[Algorithm | None], rounds: int) -> Times:
        graphs = {one: graph for one in candidates if (graph := self._graph(one)) is not None}
        samples: dict[Algorithm | None, list[float]] = {one: [] for one in graphs}
        ordered = list(graphs)
        for number in range(1 + rounds):
            events = []
            for one in ordered if number % 2 else reversed(ordered):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graphs[one].replay()
                end.record()
                events.append((one, start, end))
            torch.cuda.synchronize(self._out.device)
            for one, start, end in events if number else ():
                samples[one].append(start.elapsed_time(end) * 1e3 / self._calls)
        return {one: statistics.median(times) for one, times in samples.items()}

    def _graph(self, algorithm: Algorithm | None) -> torch.cuda.CUDAGraph | None:
        """Graph of calls by an algorithm; None if this GPU lacks it or its answer is not torch.mm's."""
        if algorithm not in self._graphs:
            self._graphs[algorithm] = self._captured(algorithm) if self._is_right(algorithm) else None
        return self._graphs[algorithm]

    def _captured(self, algorithm: Algorithm | None) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with recording(graph, self._pool):
            for number in range(self._calls):
                cublas.run(Cublas(algorithm=algorithm), self._a, self._weights[number % len(self._weights)], self._out)
        self._pool = self._pool or graph.pool()  # one graph runs at a time
        return graph

    def _is_right(self, algorithm: Algorithm | None) -> bool:
        if algorithm is None:
            return True
        if not cublaslt.matmul(self._a, self._weights[0], self._out.fill_(math.nan), algorithm):
            return False
        for actual, expected in zip(self._out.split(CHECKED_ROWS), self._answer.split(CHECKED_ROWS), strict=True):
            expected = expected.float()
            bound = error_bound(expected, self._out.dtype, self._a.shape[1], partials=1)
            if not bool(((actual.float() - expected).abs_() <= bound).all()):
                return False
        return True
