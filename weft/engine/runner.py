"""Execution of a batch on static tensors: chunks of prompts, and decode steps as CUDA graphs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from weft.arguments import check_instance
from weft.engine.config import EngineConfig
from weft.engine.graphs import FORWARD, WARM_KINDS, DecodeGraph, Flight, Graphs, Turn, decode_buckets, without_autograd
from weft.engine.params import Kind
from weft.engine.pipeline import Pipeline
from weft.engine.prefill import PrefillChunk
from weft.engine.prompts import Prompts, Shape
from weft.engine.slots import Adjustments, Slots
from weft.engine.snapshots import SNAPSHOT_SHARE, Copies, places_beside
from weft.engine.speculation.loading import Draft, drafter_of
from weft.engine.speculation.verify import Verify, VerifyGraph
from weft.models import Decoder
from weft.models.checkpoint import Progress
from weft.models.memory import check_cache, free_bytes, memory_of
from weft.parallel.step import PagedCache
from weft.runtime.copying import move_rows, to_device
from weft.runtime.logs import logger_of

logger = logger_of(__name__)
# Default size of the KV cache on virtual ranks, whose memory is the host's.
VIRTUAL_CACHE_BYTES = 256 << 20
Size = int | Verify | Shape | Turn  # of a graph: a decode step's slots, or a shape of prompts
# Slots of a decode step and tokens of prompts whose graphs are captured before the engine is ready: for its first requests.
FIRST_BATCH, FIRST_TOKENS = 8, 256


class Runner:
    """Executor of steps: tokens[slot] at positions[slot] → next tokens[slot], in place.

    Collective: all ranks make the same calls. A decode step only reads and writes device tensors at fixed addresses, so it
    can be replayed as a CUDA graph: one per batch bucket (``decode_buckets``) and kind of sampling, captured when first needed.
    Prompts have one per shape (weft.engine.prompts). After `warm_up` all graphs are there. Unused slots have position -1.

    entry_tokens    tokens of an entry of the page table: of a page, or of a page of each rank
    decoding        the slots' tensors, and the cache; `slots`, `tokens` and `logprobs` are its
    verifying       decode steps with drafts; None: without speculation
    buckets         batch sizes that decode steps are padded to
    largest_decode  most slots of one decode step so far, padding included
    snapshots       states that prefix caching may keep, in models with gated delta nets
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        pipeline: Pipeline | None = None,
        draft: Draft | None = None,
        before_cache: Callable[[Runner], object] | None = None,
    ) -> None:
        """`pipeline`: of which the model is a stage; None: it is whole. `draft`: model of config.speculative.

        before_cache  called once before the KV cache takes its memory, with a cache of two pages
        """
        check_instance("model", model, Decoder, "a decoder of weft.models")
        check_instance("config", config, EngineConfig, "an EngineConfig")
        self.model, self.max_batch = model, config.max_batch
        self.pipeline = Pipeline.whole(model) if pipeline is None else replace(pipeline, model=model)
        self.team = self.pipeline.team
        self.cuda_graph = config.cuda_graph and self.team.device.type == "cuda"
        self.entry_tokens = config.page_size * (model.team.size if model.context_parallel else 1)
        max_seq_len = config.max_seq_len or model.config.max_position_embeddings
        self.slots = Slots(self.max_batch, -(-max_seq_len // self.entry_tokens), self.team.device)
        self.decoding = DecodeGraph(self.pipeline, self.slots, config.page_size)
        self.tokens, self.logprobs = self.decoding.tokens, self.decoding.logprobs
        self.buckets, self.largest_decode = decode_buckets(self.max_batch), 0
        self._open = self.buckets  # the ones that steps take
        self.graphs = Graphs(self.team)
        self.prompts = Prompts(self.decoding, self.graphs, config, max_seq_len)
        self.verifying: VerifyGraph | None = None
        self._late: list[tuple[Size, Kind]] = []  # graphs to capture beside steps
        if (speculative := config.speculative) is not None:
            drafter = drafter_of(draft, speculative, self.decoding, max_seq_len, self.prompts.most_rows)
            self.verifying = VerifyGraph(self.decoding, drafter, speculative)
        self.snapshots = 0
        if before_cache is not None:
            self._allocate(2)
            before_cache(self)
            self.decoding.cache = None
        pages = self._pages(config)
        if model.has_states and config.prefix_caching:
            page = model.new_cache(1, config.page_size, 1, self._most_drafts)
            self.snapshots = places_beside(page, pages, config.state_snapshot_bytes)
            del page
        self._allocate(pages)
        self._flight = Flight(self.decoding, self.graphs)

    @property
    def cache(self) -> PagedCache:
        """Keys and values of this stage."""
        return self.decoding.cache

    @property
    def adjustments(self) -> Adjustments | None:
        """Changes of logits by slot; None until a request asks for some."""
        return self.decoding.adjustments

    def warm_up(self, progress: Progress | None = None, *, late: bool = False) -> None:
        """Capture the graphs of all sizes of decode steps and prompts, for WARM_KINDS.

        progress  called with (graphs captured, graphs to capture)
        late      only the graphs of `first_of` are captured now, and the further ones by `capture_next`

        Collective, before the first step. Afterwards every chunk of prompts runs in the smallest captured shape that holds it.
        Without effect where there are no graphs.
        """
        sizes = self._warm_sizes() if self.cuda_graph else []
        first = first_of(sizes) if late and self.pipeline.stages == 1 else sizes
        self._late = sorted((one for one in sizes if one not in first), key=_late_place)
        self._close_smaller()
        if sizes:
            logger.info("warm-up: capturing %d CUDA graphs, and %d later", len(first), len(self._late))
        for done, (size, kind) in enumerate(first, 1):
            self._warm(size, kind)
            if progress is not None:
                progress(done, len(first))
        self.graphs.warm = bool(sizes)
        if sizes:
            logger.info("warm-up: captured them in %.1f s", self.graphs.capture_seconds)

    @property
    def captures_left(self) -> int:
        """Number of graphs that `capture_next` has still to capture."""
        return len(self._late)

    def capture_next(self) -> None:
        """Capture the next graph that `warm_up` has left for later, beside running sequences. Collective."""
        self.settle()
        self._warm(*self._late.pop())
        self._close_smaller()
        if not self._late:
            logger.info("warm-up: captured the last graph, after %.1f s of captures", self.graphs.capture_seconds)

    def _close_smaller(self) -> None:
        """Leave buckets below the first one that was captured out of steps, until their own graphs are there."""
        left = {batch_of(size) for size, _ in self._late if not isinstance(size, Shape)}
        first = first_batch(self.buckets)
        self._open = [bucket for bucket in self.buckets if bucket >= first or bucket not in left]

    def _warm_sizes(self) -> list[tuple[Size, Kind]]:
        """Graphs that `warm_up` captures, the largest first: the rest fit into its memory."""
        gathering, prompts = self.prompts.warm_sizes()
        decoding = [*self._warm_flights(), *reversed(self.buckets)]
        if self.verifying is not None:
            sizes = (self.decode_sizes(batch) for batch in reversed(self.buckets))
            decoding = [size for of_length in zip(*sizes, strict=True) for size in of_length]
        return [*gathering, *prompts, *((size, kind) for size in decoding for kind in WARM_KINDS)]

    def decode_sizes(self, batch: int) -> list[int | Verify]:
        """Decode steps of `batch` slots: with speculation one for each number of drafts, the largest first."""
        if self.verifying is None:
            return [batch]
        return [Verify(batch, length) for length in reversed(self.verifying.lengths)]

    def _warm_flights(self) -> list[Turn]:
        """First turn of a decode step in flight for each bucket, which stands for all; the largest first."""
        stages = self.pipeline.stages
        return [Turn(batch, 0, None) for batch in reversed(self.buckets) if 1 < stages <= batch]

    def _warm(self, size: Size, kind: Kind) -> None:
        with without_autograd(self.team.device):
            if isinstance(size, Turn):
                assert not self.slots.occupied, "a turn would advance them"
                for _ in range(2):
                    self._flight.run(size.batch, kind, cuda_graph=self.cuda_graph)
                self.settle()
                return
            if isinstance(size, Shape):
                self.prompts.warm_up(size, kind)
                self.graphs.replay((size, kind))  # the first one uploads it
                return
            self.capture(size, kind)
            with self.decoding.on_empty_slots():  # it advances none
                self.graphs.replay((size, kind))

    def prefill(self, chunks: Sequence[PrefillChunk], copies: Copies | None = None) -> None:
        """Write chunks of prompts into the cache, and next tokens, where `choose`, into `tokens[slot]`.

        copies  of states from snapshots before, and to snapshots afterwards

        Log-probabilities, where they are asked for, go into `logprobs[slot]`, of prompts into `prompts.logprobs`.
        """
        self._enter([chunk for chunk in chunks if chunk.choose])
        with without_autograd(self.team.device):
            states = self.cache.states
            if copies is not None and copies.restored:
                states.restore(self._on_device(copies.restored.values()), self._on_device(copies.restored))
            rows = self.prompts.read(chunks, cuda_graph=self.cuda_graph)
            if states is not None and self.verifying is not None:
                states.begin(self._on_device(chunk.slot for chunk in chunks))
            if copies is not None and copies.saved:
                states.save(self._on_device(copies.saved.values()), self._on_device(copies.saved))
            if self.verifying is not None:
                self.verifying.drafter.read(chunks, rows)

    def keep_states(self, kept: Mapping[int, int]) -> None:
        """Copy states to snapshots, after a decode step: by snapshot, the batch slot."""
        with without_autograd(self.team.device):
            self.cache.states.save(self._on_device(kept.values()), self._on_device(kept))

    def _on_device(self, values: Iterable[int]) -> torch.Tensor:
        return to_device(values, self.team.device)

    def _enter(self, chunks: Sequence[PrefillChunk]) -> None:
        """Fill the adjustments of the slots for which tokens are chosen, on the ranks that choose."""
        if not self.pipeline.is_last:
            return
        if self.adjustments is None and any(chunk.entry is not None for chunk in chunks):
            self.decoding.adjustments = Adjustments(self.model.lm_head, self.max_batch)
        if self.adjustments is not None:
            for chunk in chunks:
                self.adjustments.enter(chunk.slot, chunk.entry)

    def run_empty(self, size: int | Verify) -> None:
        """Run a decode step of empty slots, without a graph; all slots are empty. Collective."""
        with without_autograd(self.team.device), self.decoding.on_empty_slots():
            self._graph_of(size).run(size, Kind.GREEDY)

    def run_padding(self, most: int) -> None:
        """Run prompts of padding, as ``Prompts.run_padding``."""
        with without_autograd(self.team.device):
            self.prompts.run_padding(most)

    def move(self, moves: list[tuple[int, int]]) -> None:
        """Move the tokens of slots, (from, to); call `slots.send` before the next decode step."""
        move_rows(moves, self.tokens)
        if self.cache.states is not None:
            self.cache.states.move(*map(self._on_device, zip(*moves, strict=True)))
        if self.verifying is not None:
            self.verifying.drafter.move(moves)
        if self.adjustments is not None:
            self.adjustments.move(moves)

    @property
    def in_flight(self) -> bool:
        """True if tokens of the last decode step are under way to some stages."""
        return self._flight.in_flight

    def decode(
        self,
        slots: int,
        kind: Kind = Kind.GREEDY,
        between: Callable[[], None] | None = None,
        *,
        entries: int | None = None,
        arrived: Callable[[], None] | None = None,
        drafts: int = 0,
    ) -> None:
        """Decode one token for every occupied slot, all of which are below `slots`, and advance the positions.

        drafts   with speculation: drafts of each slot, of which the accepted ones become tokens too
        entries  of page tables that are read, where the next step is likely to decode the same slots: stages may then keep
                 this one in flight (weft.engine.graphs); None: it ends with this call
        arrived  called once `tokens` has all tokens of a step in flight before, and none of this one

        The other arguments as in `replay`.
        """
        batch = self.bucket(slots)
        self.largest_decode = max(self.largest_decode, batch)
        if entries is not None and self._flight.takes(batch, kind, entries):
            kind = self.graphs.kind_for(Turn(batch, 0, None), kind)
            with without_autograd(self.team.device):
                self._flight.run(batch, kind, arrived, cuda_graph=self.cuda_graph)
        else:
            self.settle(arrived)
            self.replay(batch if self.verifying is None else Verify(batch, drafts), kind, between)

    def settle(self, arrived: Callable[[], None] | None = None) -> None:
        """End the decode step in flight, if there is one: then its tokens are on all stages.

        Collective; `arrived` as in `decode`. Call it before anything that is no decode step of the same slots, and
        before the host waits for all of the GPU's work.
        """
        self._flight.settle(arrived)

    def bucket(self, batch: int) -> int:
        """Size of the smallest bucket that holds `batch` slots.

        While graphs are captured beside steps, of the ones up to FIRST_BATCH the smallest that has its graphs.
        """
        return self._open[bisect_left(self._open, batch)]

    def replay(self, size: int | Verify, kind: Kind = Kind.GREEDY, between: Callable[[], None] | None = None) -> None:
        """Decode step of slots 0 .. batch - 1: next `tokens`, advanced `positions` (-1 stays).

        size     batch, the size of a bucket; with drafts a Verify
        kind     union of `params.kind` of the slots; a lesser one would sample wrongly
        between  called between the forward pass and the choice of tokens, which it may change: for Kind.GUIDED

        Captures the bucket's graph if there is none. Returns before the GPU has finished.
        """
        with without_autograd(self.team.device):
            if not self.cuda_graph:
                self._graph_of(size).run(size, kind, between)
                return
            kind = self.graphs.kind_for(size, kind)
            self.capture(size, kind)
            if between is not None:
                self.graphs.replay((size, FORWARD))
                between()
            self.graphs.replay((size, kind))

    def _graph_of(self, size: int | Verify) -> DecodeGraph | VerifyGraph:
        return self.verifying if isinstance(size, Verify) else self.decoding

    def capture(self, size: int | Verify, kind: Kind = Kind.GREEDY) -> None:
        """Capture the graph that `replay` launches, unless there is one. Collective; waits for the GPU.

        `tokens`, `positions` and the cache keep their values: all slots are empty during warm-up.
        """
        if (size, kind) in self.graphs:
            return
        graph = self._graph_of(size)
        with self.decoding.on_empty_slots():
            if Kind.GUIDED not in kind:
                self.graphs.capture((size, kind), lambda: graph.run(size, kind))
                return
            if (size, FORWARD) not in self.graphs:
                graph.forward_and_keep(size)
                self.graphs.capture((size, FORWARD), lambda: graph.forward_and_keep(size))
            self.graphs.capture((size, kind), lambda: graph.choose_kept(size, kind))

    def _pages(self, config: EngineConfig) -> int:
        """Number of KV pages: as many as asked for, else as a full batch can use and memory allows."""
        if config.pages is None:
            reserved = self._graph_bytes() if config.warm_up and self.cuda_graph else 0
            most = 1 + self.max_batch * self.slots.table.shape[1]
            return min(most, self._affordable_pages(config, reserved))
        check_cache(
            self.model.config,
            self.model.team,
            self.model.cache_dtype,
            config.pages,
            self.decoding.page_size,
            layers=self.model.span,
            context_parallel=self.model.context_parallel,
        )
        return config.pages

    def _allocate(self, pages: int) -> None:
        """Make the caches of the model and of the drafter."""
        self.decoding.cache = self.model.new_cache(
            pages, self.decoding.page_size, self.max_batch, self._most_drafts, self.snapshots
        )
        if self.verifying is not None:
            self.verifying.drafter.allocate(pages)

    @property
    def _most_drafts(self) -> int:
        """Drafts of a slot in a step at most."""
        return 0 if self.verifying is None else self.verifying.most

    def _graph_bytes(self) -> int:
        """GPU memory that `warm_up` will take, by its first two graphs, captured here on a cache of two pages.

        The first one's includes what all share: activations of the largest chunk, and workspaces.
        """
        self._allocate(2)
        sizes, free = self._warm_sizes(), [free_bytes(self.team.device)]
        for size, kind in sizes[:2]:
            self._warm(size, kind)
            free.append(free_bytes(self.team.device))
        self.graphs.clear()
        self.prompts.forget_warm()
        self.decoding.cache = None  # its states have the size of the real one's
        first, second = (before - after for before, after in pairwise(free))
        graphs = sum(2 * self.pipeline.stages - 1 if isinstance(size, Turn) else 1 for size, _ in sizes)
        return max(0, first) + max(0, second) * (graphs - 1)

    def _affordable_pages(self, config: EngineConfig, reserved: int = 0) -> int:
        """Number of KV pages that fit on the rank with the least memory for them; equal on every rank."""
        cache = self.model.new_cache(1, self.decoding.page_size, 1, self._most_drafts)
        states = 0 if cache.states is None else self.max_batch * cache.states.nbytes_of_one
        page_bytes = cache.data.nbytes
        if cache.states is not None and config.prefix_caching:
            states += config.state_snapshot_bytes or 0
            page_bytes = int(page_bytes * (1 + (SNAPSHOT_SHARE if config.state_snapshot_bytes is None else 0)))
        drafts = 0 if self.verifying is None else self.verifying.drafter.page_bytes
        page_bytes += drafts
        budget = VIRTUAL_CACHE_BYTES
        if self.team.device.type == "cuda":
            budget = cache_budget(config, *memory_of(self.team.device), reserved + states)
        pages = min(self.team.exchange(budget // page_bytes))
        if pages < 2 and config.gpu_memory_utilization is not None:
            raise ValueError(
                f"gpu_memory_utilization={config.gpu_memory_utilization} leaves no memory for the KV cache beside weights and "
                f"graphs; raise it, or shard the model over more ranks"
            )
        if pages < 2 and drafts:
            raise ValueError(
                f"speculative: the draft of method={config.speculative.method!r} leaves no memory for two pages of both KV "
                f"caches; take a smaller draft or method='ngram', or shard the model over more ranks"
            )
        return max(2, pages)


def _late_place(graph: tuple[Size, Kind]) -> int:
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


def cache_budget(config: EngineConfig, free: int, whole: int, reserved: int) -> int:
    """Bytes for the KV cache on a GPU of `whole` bytes, of which `free` are free beside the weights.

    reserved  bytes for graphs and states, of the free ones
    """
    if (share := config.gpu_memory_utilization) is None:
        return int((free - reserved) * config.memory_fraction)
    return free - reserved - int(whole * (1 - share))
