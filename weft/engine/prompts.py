"""Prompts of a batch: the shapes of their CUDA graphs, and the choice of a graph or an eager pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from weft.engine.config import EngineConfig
from weft.engine.graphs import WARM_KINDS, DecodeGraph, Graphs
from weft.engine.params import Kind, joint_kind
from weft.engine.prefill import PrefillChunk, Shape, StaticPrefill, prefill_eagerly
from weft.models import Decoder
from weft.parallel.context import gathered_entries
from weft.parallel.step import Chunk, limits_of
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.copying import to_device

# Token counts: powers of two up to ROWS, then its multiples, and above 2048 multiples of a sixteenth of the next power of two.
# cuBLAS may take longer for rows in between than for the next multiple of 128 (ROWS of weft/engine/sizes.py).
SHORTEST, ROWS, STEPS = 16, 128, 16
# Sequence counts are powers of this: the head's GEMM takes as long for 8 rows as for one.
BATCHES = 8
# Up to this many tokens padding of new prompts is free, since a pass takes as long as reading the weights.
FREE_TOKENS = 256
# Largest ratio of padded to real tokens above that.
SLACK = 1.25
# Sequences of a pass that is captured at start: the head and sampling take about as long for 64 rows as for one.
PROMPTS = 64
# Bytes of a layer that a captured pass gathers at least: 7 us by the links of an H200. With fewer, entries are padded to them.
FEWEST_GATHERED = 2 << 20
# Most bytes of a layer that a graph gathers from a spread cache: up to 0.4 ms by the links of an H200. Beyond, kernels take
# longer than their launches, and padding to a power of two costs more than a graph saves.
MOST_GATHERED = 128 << 20


class Gathering(NamedTuple):
    """Sizes of the pages that prompts gather from a spread cache.

    tokens  of an entry of a page table: of a page of each rank
    nbytes  of an entry's keys and values in one layer, of a rank's own KV heads
    window  most tokens that any layer attends to; None: all
    """

    tokens: int
    nbytes: int
    window: int | None = None

    @property
    def most(self) -> int:
        """Number of entries that a graph gathers at most."""
        return max(1, MOST_GATHERED // self.nbytes)

    def entries(self, chunks: Sequence[PrefillChunk]) -> int:
        """Number of entries with the cached tokens of these chunks."""
        return sum(len(gathered_entries(chunk.before, self.tokens, self.window)) for chunk in chunks)


def shape_of_new(chunks: Sequence[PrefillChunk]) -> Shape | None:
    """Shape of equal lengths that the chunks fit with little padding; None: there is none."""
    if any(chunk.before for chunk in chunks):
        return None
    batch = 1 << (len(chunks) - 1).bit_length()
    lengths = [len(chunk.tokens) for chunk in chunks]
    length = max(SHORTEST, 1 << (max(lengths) - 1).bit_length())
    fits = batch * length <= max(FREE_TOKENS, int(SLACK * sum(lengths)))
    return Shape.of_new(batch, length) if fits else None


def ragged_shape_of(chunks: Sequence[PrefillChunk], max_batch: int, gathering: Gathering | None = None) -> Shape | None:
    """Smallest shape of any lengths that the chunks fit; `max_batch` bounds the number of sequences.

    gathering  of a spread cache; None: nothing is gathered

    None for more entries than a graph gathers.
    """
    batch = 1
    while batch < len(chunks):
        batch *= BATCHES
    entries = 0 if gathering is None else gathering.entries(chunks)
    if gathering is not None and entries > gathering.most:
        return None
    entries = next_power_of_2(entries) if entries else 0
    return Shape(padded_tokens(sum(len(chunk.tokens) for chunk in chunks)), min(batch, max_batch), entries)


def padded_tokens(tokens: int) -> int:
    """Number of tokens of the smallest shape of any lengths that holds `tokens`."""
    power = max(SHORTEST, 1 << (tokens - 1).bit_length())
    step = power if power <= ROWS else max(ROWS, power // STEPS)
    return cdiv(tokens, step) * step


def single_lengths(most: int) -> list[int]:
    """Lengths of the shapes that single new prompts of up to `most` tokens fit."""
    lengths = [SHORTEST]
    while lengths[-1] < most and 2 * lengths[-1] <= max(FREE_TOKENS, int(SLACK * most)):
        lengths.append(2 * lengths[-1])
    return lengths


def prompt_shapes(chunk_tokens: int, max_batch: int, lengths: Sequence[int]) -> list[Shape]:
    """Shapes of which one holds any chunk of prompts, the largest first.

    lengths  of single new prompts that have a shape of their own
    """
    ragged = {
        Shape(size, min(size, batch, max_batch)) for size in _all_sizes(chunk_tokens) for batch in (PROMPTS, max_batch)
    }
    single = [Shape.of_new(1, length) for length in lengths]
    return sorted([*ragged, *single], key=lambda shape: (shape.tokens, shape.batch), reverse=True)


def gathering_shapes(chunk_tokens: int, max_batch: int, gathering: Gathering, longest: int) -> list[Shape]:
    """Shapes of prompts after cached tokens in a spread cache, the largest first.

    longest  number of entries of the longest sequence

    Numbers of entries are powers of two from FEWEST_GATHERED bytes on, up to the longest sequence's and ``gathering.most``.
    Tokens are as in ``prompt_shapes`` up to 256, then powers of two with one size between two, and from 1,024 on with three:
    each size is captured once for each number of entries.
    """
    most = min(longest, gathering.most)
    entries, few = [], next_power_of_2(cdiv(FEWEST_GATHERED, gathering.nbytes))
    while few < most:
        entries.append(few)
        few *= 2
    *sizes, last = _all_sizes(chunk_tokens)
    sizes = [size for size in sizes if size % (next_power_of_2(size) // (8 if size > 1024 else 4)) == 0]
    shapes = {
        Shape(size, min(size, batch, max_batch), count)
        for size in [*sizes, last]
        for batch in (PROMPTS, max_batch)
        for count in [*entries, most]
    }
    return sorted(shapes, key=lambda shape: (shape.tokens, shape.batch, shape.entries), reverse=True)


def _all_sizes(chunk_tokens: int) -> list[int]:
    """Numbers of tokens that ``padded_tokens`` gives for up to `chunk_tokens`."""
    sizes = [padded_tokens(1)]
    while sizes[-1] < chunk_tokens:
        sizes.append(padded_tokens(sizes[-1] + 1))
    return sizes


# Eager passes of a shape before it is captured, since a capture takes as long as several passes. There are few shapes of new
# prompts of one length; ragged shapes are many, and some never recur.
LAUNCHED_FIRST, RAGGED_FIRST = 1, 4
# Most recently used shapes whose graphs are kept: graphs take GPU memory, and there may be hundreds. To capture one of 4,096
# tokens takes 0.87 s on two H200s (benchmarks/lab/h200-x2-prompts.json).
MOST_SHAPES = 64


class Prompts:
    """Prompts of a batch: chunks go into the cache, and their next tokens into the slots. Collective.

    A shape has a graph once it has recurred (LAUNCHED_FIRST, RAGGED_FIRST), as long as it is recent (MOST_SHAPES). After
    `warm_up`, prompts are padded to ``warm_sizes``. Longer prompts, and prompts with log-probabilities or a vector, are
    launched as they are.

    gathering  sizes of the pages that are gathered from a spread cache; None: it is not spread
    longest    most tokens of one pass so far, padding included
    logprobs   of the prompts of the last `read`, by slot
    pooled     parts of their vectors, by slot
    """

    def __init__(self, decoding: DecodeGraph, graphs: Graphs, config: EngineConfig, max_seq_len: int) -> None:
        self._decoding, self._graphs, self._pipeline = decoding, graphs, decoding.pipeline
        self.max_batch, self.chunk_tokens, self.max_seq_len = config.max_batch, config.chunk_tokens, max_seq_len
        model = self._pipeline.model
        self.gathering = gathering_of(model, config.page_size * model.team.size) if model.context_parallel else None
        self.longest = 0
        self.logprobs: dict[int, torch.Tensor] = {}
        self.pooled: dict[int, torch.Tensor] = {}
        self._recent: dict[Shape, StaticPrefill] = {}  # least recently used first
        self._launched: Counter[Shape | None] = Counter()
        self._warm: dict[Shape, StaticPrefill] = {}  # the largest first

    def read(self, chunks: Sequence[PrefillChunk], *, cuda_graph: bool) -> dict[int, int]:
        """Write chunks into the cache, and next tokens, where `choose`, into the slots' tokens.

        Returns by slot the index of a chunk's first row in the pass.
        """
        scored = any(chunk.targets or chunk.pooling for chunk in chunks)  # by all logits, or rows, of the prompt
        shape = self.shape_of(chunks) if cuda_graph and not scored else None
        self.logprobs, self.pooled = {}, {}
        if shape in self._warm or (shape and self._launched[shape] >= _launched_first(shape)):
            chosen, logprobs, starts = self._read_padded(chunks, shape)
        else:
            self._launched[shape] += 1
            self.longest = max(self.longest, sum(len(chunk.tokens) for chunk in chunks))
            # Sequences of equal length share an attention call.
            chunks = sorted(chunks, key=lambda chunk: chunk.span)
            starts = accumulate((len(chunk.tokens) for chunk in chunks), initial=0)
            given = self._pipeline, self._decoding.cache, chunks, self._decoding.adjustments
            chosen, logprobs, self.logprobs, self.pooled = prefill_eagerly(*given)
        self._put(chunks, chosen, logprobs)
        return {chunk.slot: start for chunk, start in zip(chunks, starts, strict=False)}

    def _put(self, chunks: Sequence[PrefillChunk], chosen: torch.Tensor, logprobs: torch.Tensor | None) -> None:
        """Set the newest tokens of the slots whose prompts have been read."""
        ends = [index for index, chunk in enumerate(chunks) if chunk.choose]
        if not ends:
            return
        device = self._pipeline.team.device
        slots = to_device((chunks[index].slot for index in ends), device)
        kind, rows = _kind_of(chunks), None
        if len(ends) < len(chosen):
            rows = to_device(ends, device)
            chosen = chosen[rows]
        self._decoding.tokens.index_copy_(0, slots, chosen)
        if Kind.LOGPROBS in kind:
            self._decoding.logprobs.index_copy_(0, slots, logprobs if rows is None else logprobs[rows])
        if Kind.ADJUSTED in kind and self._pipeline.is_last:
            self._decoding.note(slots, chosen, to_device((chunks[index].end for index in ends), device))

    def shape_of(self, chunks: Sequence[PrefillChunk]) -> Shape | None:
        """Shape of the CUDA graph that reads these chunks; None: no graph does."""
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        if tokens > self._pipeline.most_uncut or self.attends_in_parts(chunks):
            return None
        if self._pipeline.model.has_states and not self._pipeline.model.prefills_in_kernels:
            return None
        shape = shape_of_new(chunks)
        if shape in self._warm or not self._pipeline.model.prefills_in_kernels:
            return shape  # unfused attention takes its sequence lengths from the host
        if self._graphs.warm:
            return self._warm_shape_of(chunks, tokens)
        return shape or ragged_shape_of(chunks, self.max_batch, self.gathering)

    def _warm_shape_of(self, chunks: Sequence[PrefillChunk], tokens: int) -> Shape | None:
        """Smallest captured shape of any lengths that holds these chunks, of `tokens` tokens."""
        entries = 0 if self.gathering is None else self.gathering.entries(chunks)
        ragged = (shape for shape in self._warm if shape.length is None)
        large = (shape for shape in ragged if shape.tokens >= tokens and shape.batch >= len(chunks))
        fitting = (shape for shape in large if shape.entries >= entries)
        return min(fitting, key=lambda shape: (shape.entries, shape.tokens, shape.batch), default=None)

    def attends_in_parts(self, chunks: Sequence[PrefillChunk]) -> bool:
        """True if cuDNN attends to these chunks after cached tokens, whose number a graph would hold."""
        model = self._pipeline.model
        if model.mode == "invariant" or not model.prefills_in_kernels or all(chunk.before == 0 for chunk in chunks):
            return False
        shapes = [Chunk(1, len(chunk.tokens), chunk.before, 0, 0) for chunk in chunks]
        attentions = model.attentions
        whole = next((attention.weights for attention in attentions if attention.window is None), None)
        limits = limits_of(model.team)
        return whole is not None and all(shape.by_cudnn(whole, limits) for shape in shapes)

    def _read_padded(
        self, chunks: Sequence[PrefillChunk], shape: Shape
    ) -> tuple[torch.Tensor, torch.Tensor, Iterable[int]]:
        """Next token [shape.batch] after each chunk, also without `choose`; logprobs; first rows of chunks."""
        kind = self._graphs.kind_for(shape, _kind_of(chunks))
        prefill = self._warm.get(shape)
        if prefill is None:
            prefill = self._recent.pop(shape, None) or self.static(shape)
            self._recent[shape] = prefill
            if len(self._recent) > MOST_SHAPES:
                self._evict(next(iter(self._recent)))
        self.longest = max(self.longest, shape.tokens)
        if self._pipeline.model.has_states and (shape, kind) not in self._graphs:
            # A capture runs the pass several times, and states go on with each.
            prefill.load([])
            self._graphs.capture((shape, kind), lambda: prefill.run(kind, self._decoding.adjustments))
        prefill.load(chunks)
        self._graphs.run((shape, kind), lambda: prefill.run(kind, self._decoding.adjustments))
        return prefill.chosen, prefill.logprobs, prefill.starts(chunks)

    def static(self, shape: Shape) -> StaticPrefill:
        """Tensors of a shape."""
        return StaticPrefill(self._pipeline, self._decoding.cache, shape, self._decoding.slots.table.shape[1])

    @property
    def most_rows(self) -> int:
        """Rows of the longest pass that reads prompts, padding included."""
        return max(FREE_TOKENS, int(SLACK * self.chunk_tokens), padded_tokens(self.chunk_tokens))

    def _evict(self, shape: Shape) -> None:
        """Free the graphs and tensors of a shape. Its next batches run eagerly until it is captured again."""
        self._pipeline.team.synchronize()
        del self._recent[shape], self._launched[shape]
        self._graphs.drop(shape)

    def warm_sizes(self) -> tuple[list[tuple[Shape, Kind]], list[tuple[Shape, Kind]]]:
        """Shapes and kinds that `warm_up` captures, the largest first.

        Of passes that gather cached tokens from a spread cache, then of all other passes.
        """
        model = self._pipeline.model
        longest = min(self.chunk_tokens, self.max_batch * self.max_seq_len, self._pipeline.most_uncut)
        if model.has_states and not model.prefills_in_kernels:
            return [], []
        lengths = single_lengths(min(longest, self.max_seq_len))
        if not model.prefills_in_kernels:
            shapes = [Shape.of_new(1, length) for length in reversed(lengths)]
        else:
            heads, most = model.attentions[0].num_heads, limits_of(model.team).cudnn_rows
            shapes = prompt_shapes(longest, self.max_batch, [n for n in lengths if n * heads >= most])
        sizes = [(shape, kind) for shape in shapes for kind in WARM_KINDS]
        if self.gathering is None or not model.prefills_in_kernels:
            return [], sizes
        # Of one kind, which serves greedy requests too: there are many of these shapes.
        entries = self._decoding.slots.table.shape[1]
        gathering = gathering_shapes(longest, self.max_batch, self.gathering, entries)
        return [(shape, WARM_KINDS[-1]) for shape in gathering], sizes

    def warm_up(self, shape: Shape, kind: Kind) -> None:
        """Capture the graph of a shape, without prompts."""
        prefill = self._warm[shape] = self._warm.get(shape) or self.static(shape)
        prefill.load([])
        self._graphs.capture((shape, kind), lambda: prefill.run(kind))

    def forget_warm(self) -> None:
        """Free the tensors of `warm_up`, whose graphs are gone."""
        self._warm.clear()

    def run_padding(self, most: int) -> None:
        """Run prompts of padding, of 256, 512, … ``most`` tokens: the GEMMs of prompts that fill the batch.

        They write to page 0 of the cache, and choose no tokens.
        """
        for tokens in self.padding_sizes(most):
            self.run_padding_of(tokens)

    def padding_sizes(self, most: int) -> list[int]:
        return sorted({min(1 << n, most) for n in range(8, max(8, most.bit_length()) + 1)})

    def run_padding_of(self, tokens: int) -> None:
        """``run_padding`` of one size."""
        entries, device = self._decoding.slots.table.shape[1], self._pipeline.team.device
        sequences = [(0, min(self.max_seq_len, tokens - at)) for at in range(0, tokens, self.max_seq_len)]
        pages = torch.zeros(len(sequences), entries, dtype=torch.int32, device=device)
        zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._pipeline.prefill(zeros, sequences, pages, self._decoding.cache, [])


def gathering_of(model: Decoder, entry_tokens: int) -> Gathering:
    """Sizes of the pages that prompts gather; `entry_tokens`: of a page of each rank."""
    attention = model.attentions[0]
    # Of the KV heads to which this rank's queries attend.
    ranks = model.config.num_key_value_heads // (attention.num_heads // attention.group)
    token_bytes = model.config.cached_elements(ranks) * model.cache_dtype.itemsize
    # All stages of a pipeline take passes of the same shape, so the window is the whole model's.
    return Gathering(entry_tokens, entry_tokens * token_bytes, model.config.attention.longest_window)


def _launched_first(shape: Shape) -> int:
    return RAGGED_FIRST if shape.length is None else LAUNCHED_FIRST


def _kind_of(chunks: Sequence[PrefillChunk]) -> Kind:
    return joint_kind(chunk.params for chunk in chunks if chunk.choose)
