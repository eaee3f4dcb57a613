"""Sizes that are chosen before the first step: buckets of decode steps, first graphs, KV pages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from weft.engine.config import EngineConfig
from weft.engine.graphs import WARM_KINDS, Turn
from weft.engine.params import Kind
from weft.engine.prompts import Shape
from weft.engine.snapshots import SNAPSHOT_SHARE
from weft.engine.speculation.verify import Verify
from weft.models.memory import memory_of
from weft.parallel.step import PagedCache
from weft.runtime.team.team import Team

# Rows of a tile of cuBLAS. It takes longer for some sizes between its multiples: two H200s, Qwen3-32B, prompts of 256 tokens
# take 15.9 ms and of 192 16.8 (lab/h200-x2-prefill-sizes.json@4c5a438; `weft bench model --run-type prefill`).
ROWS = 128
# Default size of the KV cache on virtual ranks, whose memory is the host's.
VIRTUAL_CACHE_BYTES = 256 << 20
Size = int | Verify | Shape | Turn  # of a graph: a decode step's slots, or a shape of prompts
# Slots of a decode step and tokens of prompts whose graphs are captured before the engine is ready: for its first requests.
FIRST_BATCH, FIRST_TOKENS = 8, 256


def decode_buckets(max_batch: int) -> list[int]:
    """Batch sizes that decode steps are padded to: 1, 2, 4 … 64, 96, 128, 256, 384, 512 … and `max_batch`.

    Sizes in between, up to 64, would run the same tiles (SMALL_M_ROWS of weft/plan/table.py). Rows of tables for more than 64
    begin at 96, which serves 112 too. From 128 on all are multiples of ROWS, four or more to a factor of two.
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


class Buckets:
    """Batch sizes that decode steps are padded to, some of which still have graphs to be captured.

    sizes    all, ascending
    largest  largest one that a decode step took so far
    late     graphs that are left to capture, the next one last
    """

    def __init__(self, max_batch: int) -> None:
        self.sizes, self.largest = decode_buckets(max_batch), 0
        self.late: list[tuple[Size, Kind]] = []
        self._open = self.sizes  # the ones that steps take

    def of(self, batch: int) -> int:
        """Size of the smallest bucket that holds `batch` slots.

        While graphs are captured beside steps, of the ones up to FIRST_BATCH the smallest that has its graphs.
        """
        return self._open[bisect_left(self._open, batch)]

    def leave(self, late: Iterable[tuple[Size, Kind]]) -> None:
        """Leave these graphs to capture later: until then smaller batches run in the first captured bucket."""
        self.late = sorted(late, key=late_place)
        left = {batch_of(size) for size, _ in self.late if not isinstance(size, Shape)}
        first = first_batch(self.sizes)
        self._open = [bucket for bucket in self.sizes if bucket >= first or bucket not in left]


def late_place(graph: tuple[Size, Kind]) -> int:
    """Place of a graph among the late ones, which are captured from the end: the smallest batches last."""
    size, _ = graph
    small = not isinstance(size, Shape) and batch_of(size) <= FIRST_BATCH
    return FIRST_BATCH + 1 - batch_of(size) if small else 0


def first_batch(batches: Iterable[int]) -> int:
    """The batch whose graph smaller ones share until they have theirs; 0: there is none."""
    return max((batch for batch in batches if batch <= FIRST_BATCH), default=0)


def batch_of(size: int | Verify | Turn) -> int:
    return size if isinstance(size, int) else size.batch


def first_of(sizes: Sequence[tuple[Size, Kind]]) -> list[tuple[Size, Kind]]:
    """Graphs among ``sizes`` to capture before the engine is ready, where most are captured late.

    Of one kind, which serves greedy requests too; of prompts of any lengths one shape, which holds all smaller ones; of decode
    steps the largest batch up to FIRST_BATCH, which holds all smaller ones.
    """
    first = first_batch(batch_of(size) for size, _ in sizes if not isinstance(size, Shape))
    shapes = [size for size, _ in sizes if isinstance(size, Shape) and size.tokens <= FIRST_TOKENS and not size.entries]
    ragged = [shape for shape in shapes if shape.length is None]
    largest = max(ragged, key=lambda shape: (shape.tokens, shape.batch), default=None)

    def chosen(size: Size) -> bool:
        if isinstance(size, Shape):
            return size == largest or (size in shapes and size.length is not None)
        return batch_of(size) == first

    return [(size, kind) for size, kind in sizes if kind == WARM_KINDS[-1] and chosen(size)]


def affordable_pages(page: PagedCache, config: EngineConfig, team: Team, reserved: int, draft_bytes: int) -> int:
    """Number of KV pages that fit on the rank with the least memory for them; equal on every rank.

    page         a cache of one page and one slot
    reserved     bytes of graphs
    draft_bytes  of a page of the drafter's cache
    """
    states = 0 if page.states is None else config.max_batch * page.states.nbytes_of_one
    page_bytes = page.data.nbytes
    if page.states is not None and config.prefix_caching:
        states += config.state_snapshot_bytes or 0
        page_bytes = int(page_bytes * (1 + (SNAPSHOT_SHARE if config.state_snapshot_bytes is None else 0)))
    page_bytes += draft_bytes
    budget = VIRTUAL_CACHE_BYTES
    if team.device.type == "cuda":
        budget = cache_budget(config, *memory_of(team.device), reserved + states)
    pages = min(team.exchange(budget // page_bytes))
    if pages < 2 and config.gpu_memory_utilization is not None:
        raise ValueError(
            f"gpu_memory_utilization={config.gpu_memory_utilization} leaves no memory for the KV cache beside weights and "
            f"graphs; raise it, or shard the model over more ranks"
        )
    if pages < 2 and draft_bytes:
        raise ValueError(
            f"speculative: the draft of method={config.speculative.method!r} leaves no memory for two pages of both KV "
            f"caches; take a smaller draft or method='ngram', or shard the model over more ranks"
        )
    return max(2, pages)


def cache_budget(config: EngineConfig, free: int, whole: int, reserved: int) -> int:
    """Bytes for the KV cache on a GPU of `whole` bytes, of which `free` are free beside the weights.

    reserved  bytes for graphs and states, of the free ones
    """
    if (share := config.gpu_memory_utilization) is None:
        return int((free - reserved) * config.memory_fraction)
    return free - reserved - int(whole * (1 - share))
