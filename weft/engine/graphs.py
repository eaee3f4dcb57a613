"""CUDA graphs of passes: captured behind eager runs, replayed by key, in memory that all share."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

from weft.engine.params import Kind
from weft.runtime.logs import logger_of
from weft.runtime.team.team import Team

logger = logger_of(__name__)

# Rows of a tile of cuBLAS. It takes longer for some sizes between its multiples: two H200s, Qwen3-32B, prompts of 256 tokens
# take 15.9 ms and of 192 16.8 (lab/h200-x2-prefill-sizes.json@4c5a438; `weft bench model --run-type prefill`).
ROWS = 128
# Kinds of sampling that are captured at start. The second serves all but greedy requests: it has a few more kernels than they
# need, and two further graphs of each size would take twice the time and memory.
WARM_KINDS = (Kind.GREEDY, Kind.TRUNCATED)
# In place of a kind: graph of a decode step's forward pass alone.
FORWARD = None
# Size of a pass, such as a bucket, a shape of prompts or a turn, and its kind of sampling.
Key = tuple[Hashable, Kind | None]


class Graphs:
    """CUDA graphs of a rank by key. They run one after the other, so they share memory.

    capture_seconds  that all captures have taken
    warm             all sizes have been captured at start, for WARM_KINDS

    Iteration gives the keys.
    """

    def __init__(self, team: Team) -> None:
        self.team, self.capture_seconds, self.warm = team, 0.0, False
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._pool = None

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def __iter__(self) -> Iterator[Key]:
        return iter(self._graphs)

    def __len__(self) -> int:
        return len(self._graphs)

    def kind_for(self, size: Hashable, kind: Kind) -> Kind:
        """Kind that was captured at start for `size` and that serves `kind`, which stays if there is none."""
        warm = WARM_KINDS if self.warm else ()
        return next((captured for captured in warm if kind in captured and (size, captured) in self), kind)

    def replay(self, key: Key) -> None:
        """Launch the graph of `key`, which has been captured."""
        self._graphs[key].replay()

    def run(self, key: Key, run: Callable[[], Any]) -> None:
        """Replay the graph of `key`, captured from `run` if there is none."""
        if key not in self:
            self.capture(key, run)
        self.replay(key)

    def capture(self, key: Key, run: Callable[[], Any]) -> None:
        """Capture the launches of `run`, after two eager runs. Collective; waits for the GPU."""
        self.capture_all({key: run}, run)

    def capture_all(self, runs: Mapping[Key, Callable[[], Any]], eager: Callable[[], Any]) -> None:
        """Capture a graph for each of `runs`, after two eager runs of `eager`, which includes them all."""
        begin = time.perf_counter()
        self._prepare(eager)
        for key, run in runs.items():
            self._record(key, run)
        self.team.barrier()
        seconds = time.perf_counter() - begin
        self.capture_seconds += seconds
        logger.debug("captured the CUDA graph of %s in %.2f s", next(iter(runs)), seconds)

    def drop(self, size: Hashable) -> None:
        """Free the graphs of a size, of all kinds; the GPU has finished them."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] != size}

    def clear(self) -> None:
        """Free all graphs and their memory."""
        self._graphs.clear()
        self._pool = None

    def _prepare(self, run: Callable[[], Any]) -> None:
        """Run eager steps before a capture, which allows no compilation and no allocation of workspaces."""
        side = torch.cuda.Stream(self.team.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        self.team.synchronize()
        self.team.barrier()

    def _record(self, key: Key, run: Callable[[], Any]) -> None:
        graph = torch.cuda.CUDAGraph()
        # thread_local: CUDA calls of NCCL's watchdog thread must not invalidate the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph


def decode_buckets(max_batch: int) -> list[int]:
    """Batch sizes that decode steps are padded to: 1, 2, 4 … 64, 96, 128, 256, 384, 512 … and `max_batch`.

    Sizes between those up to 64 would run the same tiles (SMALL_M_ROWS of weft/plan/table.py). Rows of tables for more than 64
    begin at 96, and those of 96 serve 112 too. From 128 on all are multiples of ROWS, four or more to a factor of two.
    One H200, Qwen3-8B: 96 sequences take 6.85 ms, padded to 128 7.54 (benchmarks/lab/h200-traffic.json).
    """
    sizes, size = [], 1
    while size < max_batch:
        sizes.append(size)
        if size in (64, 96):
            size += 32
        else:
            size += size if size <= ROWS else max(ROWS, (1 << size.bit_length()) // 8)
    return [*sizes, max_batch]
