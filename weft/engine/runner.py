"""Execution of a batch on static tensors: chunks of prompts, and decode steps as CUDA graphs."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from weft.arguments import check_instance
from weft.engine.adjustments import Adjustments
from weft.engine.config import EngineConfig
from weft.engine.decode_graph import DecodeGraph, without_autograd
from weft.engine.eager_prefill import prefill_eagerly
from weft.engine.flight import Flight, Turn
from weft.engine.graph_sizes import decode_buckets, gathering_shapes, prompt_shapes
from weft.engine.graphs import FORWARD, Graphs
from weft.engine.params import Kind, joint_kind
from weft.engine.pipeline import Pipeline
from weft.engine.prefill import PaddedPrefill, PrefillChunk, Shape, shape_of, single_lengths
from weft.engine.ragged_prefill import Gathering, RaggedPrefill, RaggedShape, ragged_shape_of
from weft.engine.slots import Slots
from weft.models import Decoder
from weft.models.checkpoint import Progress
from weft.models.memory import check_cache, free_bytes
from weft.parallel.step import Chunk, PagedCache
from weft.parallel.thresholds import cudnn_attends
from weft.runtime.copying import upload
from weft.runtime.logs import logger_of

logger = logger_of(__name__)
# Default size of the KV cache on virtual ranks, whose memory is the host's.
VIRTUAL_CACHE_BYTES = 256 << 20
# Eager passes of a shape before it is captured, since a capture takes as long as several passes. There are few shapes of new
# prompts; ragged shapes are many, and some never recur.
LAUNCHED_FIRST = {Shape: 1, RaggedShape: 4}
# Most recently used prompt shapes whose graphs are kept: graphs take GPU memory, and there may be hundreds.
MOST_SHAPES = 64
# Kinds of sampling that are captured at start. The second serves all but greedy requests: it has a few more kernels than they
# need, and two further graphs of each size would take twice the time and memory.
WARM_KINDS = (Kind.GREEDY, Kind.TRUNCATED)


class Runner:
    """Executor of steps: tokens[slot] at positions[slot] → next tokens[slot], in place.

    Collective: all ranks make the same calls. A decode step only reads and writes device tensors at fixed addresses, so it
    can be replayed as a CUDA graph: one per batch bucket (graph_sizes.py) and kind of sampling, captured when first needed.
    Prompts have one per shape, captured when the shape recurs (LAUNCHED_FIRST) and kept while it is recent (MOST_SHAPES).
    After `warm_up` all graphs are there, and prompts are padded to them. Unused slots have position -1.
    """

    def __init__(self, model: Decoder, config: EngineConfig, pipeline: Pipeline | None = None) -> None:
        """`pipeline`: of which the model is a stage; None: it is whole."""
        check_instance("model", model, Decoder, "a decoder of weft.models")
        check_instance("config", config, EngineConfig, "an EngineConfig")
        self.model, self.pipeline = model, pipeline or Pipeline.whole(model)
        self.team, self.max_batch, self.page_size = self.pipeline.team, config.max_batch, config.page_size
        self.max_seq_len = config.max_seq_len or model.config.max_position_embeddings
        self.cuda_graph = config.cuda_graph and self.team.device.type == "cuda"
        self.chunk_tokens = config.chunk_tokens
        # Tokens of an entry of the page table: of a page, or of a page of each rank.
        self.entry_tokens = self.page_size * (model.team.size if model.context_parallel else 1)
        self.gathering = _gathering_of(model, self.entry_tokens) if model.context_parallel else None
        max_batch, max_pages = self.max_batch, -(-self.max_seq_len // self.entry_tokens)
        self.slots = Slots(max_batch, max_pages, self.team.device)
        self._decode_graph = DecodeGraph(model, self.pipeline, self.slots, self.page_size)
        self.tokens, self.logprobs = self._decode_graph.tokens, self._decode_graph.logprobs
        self.prompt_logprobs: dict[int, torch.Tensor] = {}  # by slot, of the prompts of the last `prefill`
        self.buckets = decode_buckets(max_batch)
        # Most tokens of one forward pass so far, padding included.
        self.longest_prefill = self.largest_decode = 0
        self.graphs = Graphs(self.team)
        # Of decode steps with grammars, which have a graph for the forward pass and one for the choice.
        self._logits: dict[int, torch.Tensor | None] = {}
        self._prompts: dict[Shape | RaggedShape, PaddedPrefill | RaggedPrefill] = {}
        self._launched: Counter[Shape | RaggedShape | None] = Counter()
        self._warm_prompts: dict[Shape | RaggedShape, PaddedPrefill | RaggedPrefill] = {}  # the largest first
        self.warm = False
        self._decode_graph.cache = model.new_cache(self._pages(config), self.page_size)
        self._flight = Flight(self._decode_graph, self.graphs)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Capture the graphs of all sizes of decode steps and prompts, for WARM_KINDS.

        progress  called with (graphs captured, graphs to capture)

        Collective, before the first step. Afterwards every chunk of prompts runs in the smallest captured shape that holds it.
        Without effect where there are no graphs.
        """
        sizes = self._warm_sizes() if self.cuda_graph else []
        if sizes:
            logger.info("warm-up: capturing %d CUDA graphs", len(sizes))
        for done, (size, kind) in enumerate(sizes, 1):
            self._warm(size, kind)
            if progress is not None:
                progress(done, len(sizes))
        self.warm = bool(sizes)
        if sizes:
            logger.info("warm-up: captured them in %.1f s", self.capture_seconds)

    def _warm_sizes(self) -> list[tuple[int | Shape | RaggedShape | Turn, Kind]]:
        """Graphs that `warm_up` captures, the largest first: those behind it fit into its memory."""
        shapes: list[Shape | RaggedShape] = []
        longest = min(self.chunk_tokens, self.max_batch * self.max_seq_len, self.pipeline.most_uncut)
        lengths = single_lengths(min(longest, self.max_seq_len))
        if not self.model.plan(1).fused:
            shapes = [Shape(1, length) for length in reversed(lengths)]
        else:
            heads = self.model.layers[0].self_attn.num_heads
            shapes = prompt_shapes(longest, self.max_batch, [n for n in lengths if cudnn_attends(n * heads)])
        sizes = [
            (size, kind) for size in [*shapes, *self._warm_flights(), *reversed(self.buckets)] for kind in WARM_KINDS
        ]
        if self.gathering is None or not self.model.plan(1).fused:
            return sizes
        # Of one kind, which serves greedy requests too: there are many of these shapes.
        gathering = gathering_shapes(longest, self.max_batch, self.gathering, self.slots.table.shape[1])
        return [*((shape, WARM_KINDS[-1]) for shape in gathering), *sizes]

    def _warm_flights(self) -> list[Turn]:
        """First turn of a decode step in flight for each bucket, which stands for all; the largest first."""
        stages = self.pipeline.stages
        return [Turn(batch, 0, None) for batch in reversed(self.buckets) if 1 < stages <= batch]

    def _warm(self, size: int | Shape | RaggedShape | Turn, kind: Kind) -> None:
        assert not self.slots.occupied, "a replay would advance them"
        with without_autograd(self.team.device):
            if isinstance(size, Turn):
                for _ in range(2):
                    self._flight.run(size.batch, kind, cuda_graph=self.cuda_graph)
                self.settle()
                return
            if isinstance(size, int):
                self.capture(size, kind)
            else:
                prompts = self._warm_prompts.get(size) or self._prompts_of(size)
                self._warm_prompts[size] = prompts
                prompts.load([])
                self.graphs.capture((size, kind), lambda: prompts.run(kind))
            self.graphs.replay((size, kind))  # the first one uploads it

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Write chunks of prompts into the cache, and next tokens, where `choose`, into `tokens[slot]`.

        Log-probabilities, where they are asked for, go into `logprobs[slot]`, of prompts into `prompt_logprobs`.
        """
        self.prompt_logprobs = {}
        self._enter([chunk for chunk in chunks if chunk.choose])
        with without_autograd(self.team.device):
            self._prefill(chunks)

    def _enter(self, chunks: Sequence[PrefillChunk]) -> None:
        """Fill the adjustments of the slots for which tokens are chosen, on the ranks that choose."""
        if not self.pipeline.is_last:
            return
        if self.adjustments is None and any(chunk.entry is not None for chunk in chunks):
            self._decode_graph.adjustments = Adjustments(self.model.lm_head, self.max_batch)
        if self.adjustments is not None:
            for chunk in chunks:
                self.adjustments.enter(chunk.slot, chunk.entry)

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        scored = any(chunk.targets for chunk in chunks)  # by all logits of the prompt
        shape = self._shape_of(chunks) if self.cuda_graph and not scored else None
        if shape in self._warm_prompts or (shape and self._launched[shape] >= LAUNCHED_FIRST[type(shape)]):
            chosen, logprobs = self._prefill_padded(chunks, shape)
        else:
            self._launched[shape] += 1
            self.longest_prefill = max(self.longest_prefill, sum(len(chunk.tokens) for chunk in chunks))
            # Sequences of equal length share an attention call.
            chunks = sorted(chunks, key=lambda chunk: (chunk.before, len(chunk.tokens)))
            given = self.model, self.pipeline, self.cache
            chosen, logprobs, self.prompt_logprobs = prefill_eagerly(*given, chunks, self.adjustments)
        ends = [index for index, chunk in enumerate(chunks) if chunk.choose]
        if ends:
            slots = upload(torch.tensor([chunks[index].slot for index in ends]), self.team.device)
            kind, rows = _kind_of(chunks), None
            if len(ends) < len(chosen):
                rows = upload(torch.tensor(ends), self.team.device)
                chosen = chosen[rows]
            self.tokens.index_copy_(0, slots, chosen)
            if Kind.LOGPROBS in kind:
                self.logprobs.index_copy_(0, slots, logprobs if rows is None else logprobs[rows])
            if Kind.ADJUSTED in kind and self.pipeline.is_last:
                ends = [chunks[index].before + len(chunks[index].tokens) for index in ends]
                positions, fused = upload(torch.tensor(ends), self.team.device), self.model.plan(1).fused
                self.adjustments.note(slots, chosen, positions, fused=fused)

    def _shape_of(self, chunks: Sequence[PrefillChunk]) -> Shape | RaggedShape | None:
        """Shape of the CUDA graph that reads these chunks; None: no graph does."""
        if sum(len(chunk.tokens) for chunk in chunks) > self.pipeline.most_uncut or self._attends_in_parts(chunks):
            return None
        shape = shape_of(chunks)
        if shape in self._warm_prompts or not self.model.plan(1).fused:
            return shape  # unfused attention takes its sequence lengths from the host
        if self.warm:
            tokens = sum(len(chunk.tokens) for chunk in chunks)
            entries = 0 if self.gathering is None else self.gathering.entries(chunks)
            ragged = (shape for shape in self._warm_prompts if isinstance(shape, RaggedShape))
            large = (shape for shape in ragged if shape.tokens >= tokens and shape.batch >= len(chunks))
            fitting = (shape for shape in large if shape.entries >= entries)
            return min(fitting, key=lambda shape: (shape.entries, shape.tokens, shape.batch), default=None)
        return shape or ragged_shape_of(chunks, self.max_batch, self.gathering)

    def _attends_in_parts(self, chunks: Sequence[PrefillChunk]) -> bool:
        """True if cuDNN attends to these chunks after cached tokens, whose number a graph would hold."""
        if not self.model.plan(1).fused or all(chunk.before == 0 for chunk in chunks):
            return False
        shapes = [Chunk(1, len(chunk.tokens), chunk.before, 0, 0) for chunk in chunks]
        attentions = (layer.self_attn for layer in self.model.layers)
        whole = next((attention.weights for attention in attentions if attention.window is None), None)
        return whole is not None and all(shape.by_cudnn(whole) for shape in shapes)

    def _prefill_padded(
        self, chunks: Sequence[PrefillChunk], shape: Shape | RaggedShape
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Next token [shape.batch] after each chunk, with or without `choose`; and their logprobs."""
        kind = self._captured_kind(shape, _kind_of(chunks))
        prompts = self._warm_prompts.get(shape)
        if prompts is None:
            prompts = self._prompts.pop(shape, None) or self._prompts_of(shape)
            self._prompts[shape] = prompts  # least recently used first
            if len(self._prompts) > MOST_SHAPES:
                self._evict(next(iter(self._prompts)))
        self.longest_prefill = max(self.longest_prefill, shape.tokens)
        prompts.load(chunks)
        self.graphs.run((shape, kind), lambda: prompts.run(kind, self.adjustments))
        return prompts.chosen, prompts.logprobs

    def _prompts_of(self, shape: Shape | RaggedShape) -> PaddedPrefill | RaggedPrefill:
        if isinstance(shape, Shape):
            return PaddedPrefill(self.model, self.cache, shape.batch, shape.length, pipeline=self.pipeline)
        sizes = {"max_pages": self.slots.table.shape[1], "entries": shape.entries}
        return RaggedPrefill(self.model, self.cache, shape.tokens, shape.batch, **sizes, pipeline=self.pipeline)

    def _evict(self, shape: Shape | RaggedShape) -> None:
        """Free the graphs and tensors of a shape. Its next batches run eagerly until it is captured again."""
        self.team.synchronize()
        del self._prompts[shape], self._launched[shape]
        self.graphs.drop(shape)

    def run_padding(self, most: int) -> None:
        """Run prompts of padding, of 256, 512, … ``most`` tokens: the GEMMs of prompts that fill the batch.

        They write to page 0 of the cache, and choose no tokens.
        """
        with without_autograd(self.team.device):
            for tokens in sorted({min(1 << n, most) for n in range(8, max(8, most.bit_length()) + 1)}):
                sequences = [(0, min(self.max_seq_len, tokens - at)) for at in range(0, tokens, self.max_seq_len)]
                pages = torch.zeros(
                    len(sequences), self.slots.table.shape[1], dtype=torch.int32, device=self.team.device
                )
                zeros = torch.zeros(tokens, dtype=torch.int64, device=self.team.device)
                self.pipeline.prefill(self.model, zeros, sequences, pages, self.cache, [])

    def move(self, moves: list[tuple[int, int]]) -> None:
        """Move the tokens of slots, (from, to); call `slots.send` before the next decode step."""
        sources, targets = (upload(torch.tensor(slots), self.team.device) for slots in zip(*moves, strict=True))
        self.tokens.index_copy_(0, targets, self.tokens[sources])
        if self.adjustments is not None:
            self.adjustments.move(moves)

    @property
    def cache(self) -> PagedCache:
        """Keys and values of this stage."""
        return self._decode_graph.cache

    @property
    def adjustments(self) -> Adjustments | None:
        """Changes of logits by slot; None until a request asks for some."""
        return self._decode_graph.adjustments

    @property
    def capture_seconds(self) -> float:
        """Seconds that captures of CUDA graphs have taken."""
        return self.graphs.capture_seconds

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
    ) -> None:
        """Decode one token for every occupied slot, all of which are below `slots`, and advance the positions.

        entries  of page tables that are read, where the next step is likely to decode the same slots: stages may then keep
                 this one in flight (weft.engine.flight); None: it ends with this call
        arrived  called once `tokens` has all those of a step in flight before, and none of this one

        The other arguments as of `replay`.
        """
        batch = self.bucket(slots)
        self.largest_decode = max(self.largest_decode, batch)
        if entries is not None and self._flight.takes(batch, kind, entries):
            kind = self._captured_kind(Turn(batch, 0, None), kind)
            with without_autograd(self.team.device):
                self._flight.run(batch, kind, arrived, cuda_graph=self.cuda_graph)
        else:
            self.settle(arrived)
            self.replay(batch, kind, between)

    def settle(self, arrived: Callable[[], None] | None = None) -> None:
        """End the decode step in flight, if there is one: then its tokens are on all stages.

        Collective; `arrived` as in `decode`. Call it before anything that is no decode step of the same slots, and
        before the host waits for all of the GPU's work.
        """
        self._flight.settle(arrived)

    def bucket(self, batch: int) -> int:
        """Size of the smallest bucket that holds `batch` slots."""
        return self.buckets[bisect_left(self.buckets, batch)]

    def replay(self, batch: int, kind: Kind = Kind.GREEDY, between: Callable[[], None] | None = None) -> None:
        """Decode step of slots 0 .. batch - 1: next `tokens`, advanced `positions` (-1 stays).

        batch    size of a bucket
        kind     union of `params.kind` of the slots; a lesser one would sample wrongly
        between  called between the forward pass and the choice of tokens, which it may change: for Kind.GUIDED

        Captures the bucket's graph if there is none. Returns before the GPU has finished.
        """
        with without_autograd(self.team.device):
            if not self.cuda_graph:
                self._decode_graph.run(batch, kind, between)
                return
            kind = self._captured_kind(batch, kind)
            self.capture(batch, kind)
            if between is not None:
                self.graphs.replay((batch, FORWARD))
                between()
            self.graphs.replay((batch, kind))

    def _captured_kind(self, size: int | Shape | RaggedShape | Turn, kind: Kind) -> Kind:
        """Kind that `warm_up` has captured for `size` and that serves `kind`, which stays if there is none."""
        warm = WARM_KINDS if self.warm else ()
        return next((captured for captured in warm if kind in captured and (size, captured) in self.graphs), kind)

    def capture(self, batch: int, kind: Kind = Kind.GREEDY) -> None:
        """Capture the graph that `replay` launches, unless there is one. Collective; waits for the GPU.

        `tokens`, `positions` and the cache keep their values: all slots are empty during warm-up.
        """
        if (batch, kind) in self.graphs:
            return
        with self._decode_graph.on_empty_slots():
            if Kind.GUIDED not in kind:
                self.graphs.capture((batch, kind), lambda: self._decode_graph.run(batch, kind))
                return
            if (batch, FORWARD) not in self.graphs:
                logits = self._decode_graph.forward(batch)
                self._logits[batch] = None if logits is None else torch.empty_like(logits)
                self.graphs.capture((batch, FORWARD), lambda: self._keep(batch, self._decode_graph.forward(batch)))
            self.graphs.capture(
                (batch, kind), lambda: self._decode_graph.choose(slice(batch), kind, self._logits[batch])
            )

    def _keep(self, batch: int, logits: torch.Tensor | None) -> None:
        if logits is not None:
            self._logits[batch].copy_(logits)

    def _pages(self, config: EngineConfig) -> int:
        """Number of KV pages: as many as asked for, else as a full batch can use and memory allows."""
        if config.pages is None:
            reserved = self._graph_bytes() if config.warm_up and self.cuda_graph else 0
            most = 1 + self.max_batch * self.slots.table.shape[1]
            return min(most, self._affordable_pages(config.memory_fraction, reserved))
        check_cache(
            self.model.config,
            self.model.team,
            self.model.cache_dtype,
            config.pages,
            self.page_size,
            layers=self.model.span,
            context_parallel=self.model.context_parallel,
        )
        return config.pages

    def _graph_bytes(self) -> int:
        """GPU memory that `warm_up` will take, by its first two graphs, captured here on a cache of two pages.

        The first one's includes what all share: activations of the largest chunk, and workspaces.
        """
        self._decode_graph.cache = self.model.new_cache(2, self.page_size)
        sizes, free = self._warm_sizes(), [free_bytes(self.team.device)]
        for size, kind in sizes[:2]:
            self._warm(size, kind)
            free.append(free_bytes(self.team.device))
        self.graphs.clear()
        self._warm_prompts.clear()
        first, second = (before - after for before, after in pairwise(free))
        graphs = sum(2 * self.pipeline.stages - 1 if isinstance(size, Turn) else 1 for size, _ in sizes)
        return max(0, first) + max(0, second) * (graphs - 1)

    def _affordable_pages(self, fraction: float, reserved: int = 0) -> int:
        """Number of KV pages that fit on the rank with the least free memory; equal on every rank."""
        data = self.model.new_cache(1, self.page_size).data
        page_bytes = data.numel() * data.element_size()
        if self.team.device.type == "cuda":
            budget = int((free_bytes(self.team.device) - reserved) * fraction)
        else:
            budget = VIRTUAL_CACHE_BYTES
        return max(2, min(self.team.exchange(budget // page_bytes)))


def _gathering_of(model: Decoder, entry_tokens: int) -> Gathering:
    attention = model.layers[0].self_attn
    kv_heads = attention.num_heads // attention.group  # to which this rank's queries attend
    token_bytes = 2 * kv_heads * model.config.head_dim * model.cache_dtype.itemsize
    # All stages of a pipeline take passes of the same shape, so the window is the whole model's.
    return Gathering(entry_tokens, entry_tokens * token_bytes, model.config.attention.longest_window)


def _kind_of(chunks: Sequence[PrefillChunk]) -> Kind:
    return joint_kind(chunk.params for chunk in chunks if chunk.choose)
