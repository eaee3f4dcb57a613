"""Execution of a batch on static tensors: chunks of prompts, and decode steps as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from weft.arguments import check_instance
from weft.engine.config import EngineConfig
from weft.engine.graphs import FORWARD, WARM_KINDS, DecodeGraph, Flight, Graphs, Turn, without_autograd
from weft.engine.params import Kind
from weft.engine.pipeline import Pipeline
from weft.engine.prefill import PrefillChunk
from weft.engine.prompts import Prompts, Shape
from weft.engine.sizes import Buckets, Size, affordable_pages, first_of
from weft.engine.slots import Adjustments, Slots
from weft.engine.snapshots import Copies, places_beside
from weft.engine.speculation.loading import Draft, drafter_of
from weft.engine.speculation.verify import Verify, VerifyGraph
from weft.models import Decoder
from weft.models.checkpoint import Progress
from weft.models.memory import check_cache, free_bytes
from weft.parallel.step import PagedCache
from weft.runtime.copying import move_rows, to_device
from weft.runtime.logs import logger_of

logger = logger_of(__name__)


class Runner:
    """Executor of steps: tokens[slot] at positions[slot] → next tokens[slot], in place.

    Collective: all ranks make the same calls. A decode step only reads and writes device tensors at fixed addresses, so it
    can be replayed as a CUDA graph: one per batch bucket (``decode_buckets``) and kind of sampling, captured when first needed.
    Prompts have one per shape (weft.engine.prompts). After `warm_up` all graphs are there. Unused slots have position -1.

    pipeline      of the model that it runs, or of whose stage
    cuda_graph    True: steps are graphs
    entry_tokens  tokens of an entry of the page table: of a page, or of a page of each rank
    slots         positions, page tables and sampling parameters of the batch slots
    decoding      the slots' tokens, and the cache
    buckets       batch sizes that decode steps are padded to
    graphs        that have been captured
    prompts       passes that read prompts
    verifying     decode steps with drafts; None: without speculation
    snapshots     states that prefix caching may keep, in models with gated delta nets
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
        self.pipeline = Pipeline.whole(model) if pipeline is None else replace(pipeline, model=model)
        device = self.pipeline.team.device
        self.cuda_graph = config.cuda_graph and device.type == "cuda"
        self.entry_tokens = config.page_size * (model.team.size if model.context_parallel else 1)
        max_seq_len = config.max_seq_len or model.config.max_position_embeddings
        self.slots = Slots(config.max_batch, -(-max_seq_len // self.entry_tokens), device)
        self.decoding = DecodeGraph(self.pipeline, self.slots, config.page_size)
        self.buckets = Buckets(config.max_batch)
        self.graphs = Graphs(self.pipeline.team)
        self.prompts = Prompts(self.decoding, self.graphs, config, max_seq_len)
        self.verifying: VerifyGraph | None = None
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
            self.snapshots = places_beside(self._one_page(), pages, config.state_snapshot_bytes)
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
        self.buckets.leave(one for one in sizes if one not in first)
        if sizes:
            logger.info("warm-up: capturing %d CUDA graphs, and %d later", len(first), self.captures_left)
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
        return len(self.buckets.late)

    def capture_next(self) -> None:
        """Capture the next graph that `warm_up` has left for later, beside running sequences. Collective."""
        self.settle()
        self._warm(*self.buckets.late.pop())
        self.buckets.leave(self.buckets.late)
        if not self.captures_left:
            logger.info("warm-up: captured the last graph, after %.1f s of captures", self.graphs.capture_seconds)

    def _warm_sizes(self) -> list[tuple[Size, Kind]]:
        """Graphs that `warm_up` captures, the largest first: the rest fit into its memory."""
        gathering, prompts = self.prompts.warm_sizes()
        decoding = [*self._warm_flights(), *reversed(self.buckets.sizes)]
        if self.verifying is not None:
            sizes = (self.decode_sizes(batch) for batch in reversed(self.buckets.sizes))
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
        return [Turn(batch, 0, None) for batch in reversed(self.buckets.sizes) if 1 < stages <= batch]

    def _warm(self, size: Size, kind: Kind) -> None:
        with without_autograd(self.pipeline.team.device):
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
        """Write chunks of prompts into the cache, and next tokens, where `choose`, into the slots' tokens.

        copies  of states from snapshots before, and to snapshots afterwards

        Log-probabilities, where they are asked for, go into the slots', of prompts into `prompts.logprobs`.
        """
        self._enter([chunk for chunk in chunks if chunk.choose])
        with without_autograd(self.pipeline.team.device):
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
        with without_autograd(self.pipeline.team.device):
            self.cache.states.save(self._on_device(kept.values()), self._on_device(kept))

    def _on_device(self, values: Iterable[int]) -> torch.Tensor:
        return to_device(values, self.pipeline.team.device)

    def _enter(self, chunks: Sequence[PrefillChunk]) -> None:
        """Fill the adjustments of the slots for which tokens are chosen, on the ranks that choose."""
        if not self.pipeline.is_last:
            return
        if self.adjustments is None and any(chunk.entry is not None for chunk in chunks):
            self.decoding.adjustments = Adjustments(self.pipeline.model.lm_head, len(self.decoding.tokens))
        if self.adjustments is not None:
            for chunk in chunks:
                self.adjustments.enter(chunk.slot, chunk.entry)

    def run_empty(self, size: int | Verify) -> None:
        """Run a decode step of empty slots, without a graph; all slots are empty. Collective."""
        with without_autograd(self.pipeline.team.device), self.decoding.on_empty_slots():
            self._graph_of(size).run(size, Kind.GREEDY)

    def run_padding(self, most: int) -> None:
        """Run prompts of padding, as ``Prompts.run_padding``."""
        with without_autograd(self.pipeline.team.device):
            self.prompts.run_padding(most)

    def move(self, moves: list[tuple[int, int]]) -> None:
        """Move the tokens of slots, (from, to); call `slots.send` before the next decode step."""
        move_rows(moves, self.decoding.tokens)
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
        batch = self.buckets.of(slots)
        self.buckets.largest = max(self.buckets.largest, batch)
        if entries is not None and self._flight.takes(batch, kind, entries):
            kind = self.graphs.kind_for(Turn(batch, 0, None), kind)
            with without_autograd(self.pipeline.team.device):
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

    def replay(self, size: int | Verify, kind: Kind = Kind.GREEDY, between: Callable[[], None] | None = None) -> None:
        """Decode step of slots 0 .. batch - 1: next `tokens`, advanced `positions` (-1 stays).

        size     batch, the size of a bucket; with drafts a Verify
        kind     union of `params.kind` of the slots; a lesser one would sample wrongly
        between  called between the forward pass and the choice of tokens, which it may change: for Kind.GUIDED

        Captures the bucket's graph if there is none. Returns before the GPU has finished.
        """
        with without_autograd(self.pipeline.team.device):
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
        model = self.pipeline.model
        if config.pages is None:
            reserved = self._graph_bytes() if config.warm_up and self.cuda_graph else 0
            drafts = 0 if self.verifying is None else self.verifying.drafter.page_bytes
            fitting = affordable_pages(self._one_page(), config, self.pipeline.team, reserved, drafts)
            return min(1 + self.slots.table.numel(), fitting)
        check_cache(
            model.config,
            model.team,
            model.cache_dtype,
            config.pages,
            config.page_size,
            layers=model.span,
            context_parallel=model.context_parallel,
        )
        return config.pages

    def _one_page(self) -> PagedCache:
        """Cache of one page and one slot, to size the cache by."""
        return self.pipeline.model.new_cache(1, self.decoding.page_size, 1, self._most_drafts)

    def _allocate(self, pages: int) -> None:
        """Make the caches of the model and of the drafter."""
        page_size, max_batch = self.decoding.page_size, len(self.decoding.tokens)
        new_cache = self.pipeline.model.new_cache
        self.decoding.cache = new_cache(pages, page_size, max_batch, self._most_drafts, self.snapshots)
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
        sizes, free = self._warm_sizes(), [free_bytes(self.pipeline.team.device)]
        for size, kind in sizes[:2]:
            self._warm(size, kind)
            free.append(free_bytes(self.pipeline.team.device))
        self.graphs.clear()
        self.prompts.forget_warm()
        self.decoding.cache = None  # its states have the size of the real one's
        first, second = (before - after for before, after in pairwise(free))
        graphs = sum(2 * self.pipeline.stages - 1 if isinstance(size, Turn) else 1 for size, _ in sizes)
        return max(0, first) + max(0, second) * (graphs - 1)
