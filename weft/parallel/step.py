"""Tokens of one forward pass, the pages of their keys and values, and the plan: shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy
import torch

from weft import ops
from weft.costs.gpu import Limits, gpu_of
from weft.kernels.block_cyclic import local_slots, slots_in
from weft.ops.attention.attention_op import PAGE_SIZES
from weft.parallel.context import GatheredLayout, SpreadPages
from weft.parallel.delta_states import DeltaStates
from weft.parallel.recipe import StepPlan
from weft.parallel.rotary import Angles
from weft.parallel.tensors import AttentionWeights, Matrix
from weft.runtime.copying import upload

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


class PagedCache:
    """Paged keys and values of all layers: data[layers, 2, pages, kv_heads_local, page_size, head_dim].

    A sequence's tokens lie in the pages that its row of a page table names, in that order. Page 0 is reserved for padding:
    unfused layers write it there. In fp8 (torch.float8_e4m3fn) each layer has a scale of its keys and one of its values in
    scales[layers, 2], fp32, which are 1 unless given. ValueError for a page size that is not a power of two from 16 to 256.

    states  of the layers that have a state in place of pages, which `layers` does not count; None: there are no such layers
    """

    PARTS: ClassVar[int] = 2

    def __init__(
        self,
        layers: int,
        pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        scales: torch.Tensor | None = None,
    ) -> None:
        check_page_size(page_size)
        # Zeros: a masked-out NaN times the zero weight of the softmax would still be NaN.
        self.data = torch.zeros(layers, self.PARTS, pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.scales = None
        if dtype.itemsize == 1:
            self.scales = torch.ones(layers, 2, device=device) if scales is None else scales
        self.page_size = page_size
        self.states: DeltaStates | None = None

    @property
    def pages(self) -> int:
        return self.data.shape[2]

    def layer(self, index: int) -> tuple[torch.Tensor, ...]:
        """keys, values [pages, kv_heads_local, page_size, head_dim] of one layer; in fp8 their scales [1].

        Or the states of a layer that has states (``DeltaStates.layer``).
        """
        if self.states is not None:
            if (states := self.states.layer(index)) is not None:
                return states
            index = self.states.number[index]
        pages = tuple(self.data[index])
        return pages if self.scales is None else (*pages, self.scales[index, :1], self.scales[index, 1:])


class LatentCache(PagedCache):
    """Paged rows of latents and rotary keys, as of one head: data[layers, 1, …].

    Keys and values are parts of a row.
    """

    PARTS = 1


class Chunk(NamedTuple):
    """`batch` sequences of `length` new tokens each, after `before` cached ones.

    Their tokens are rows first_token .. first_token + batch * length of the pass, sequence by sequence. Their pages are rows
    first_sequence .. first_sequence + batch of the page table.
    """

    batch: int
    length: int
    before: int
    first_token: int
    first_sequence: int

    def by_cudnn(self, w: AttentionWeights, limits: Limits) -> bool:
        """True if cuDNN is to attend: it can, and beats weft's kernel on a GPU of these ``limits``."""
        if w.softcap is not None or w.sinks is not None:
            return False
        if w.window is not None and self.before + self.length > w.window:
            return False
        if self.before == 0:
            return self.batch * self.length * w.heads >= limits.cudnn_rows
        rows = self.length * w.heads
        # Measured with twice cudnn_rows; with half as many only after many more tokens.
        enough = limits.cudnn_cached * (1 if rows >= 2 * limits.cudnn_rows else 4)
        return rows >= limits.cudnn_rows and self.before >= enough and takes_cached(w.qkv, w.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The tokens of one forward pass. T tokens, B sequences.

    positions  [T] int64
    slots      [T] int64: page * page_size + offset of a token's key and value; -1: not written (padding)
    cells      page [T] and offset [T] int64 of slots, 0 and 0 for padding; None in a fused pass, which does not read them
    pages      [B, max_pages] int32: the page table, in a prefill over a spread cache that of the gathered pages; any existing
               page may stand for one not in use yet, or before the windows of all layers
    angles     [max_positions, head_dim] fp32 (rotary_angles), or several tables, which the layers choose from
    lengths    [B] int32: decode, one new token a sequence; the tokens it attends to, itself included; 0: padding
    tickets    [B * kv_heads_local] int32 zeros: fused decode, arrival counters of attention, shared by all layers
    queries    decode: neighbouring rows that are new tokens of one sequence, for each of which there is a row of pages; in a
               fused pass over a cache that is not spread, one row for all
    chunks     prefill: the sequences, in runs of equal length; none where only the device knows them (spans)
    spans      fused prefill: the sequence ranges, for ops.paged_prefill_attention
    spread     the pages, where the cache is spread over the ranks; None: every rank has all tokens of its KV heads
    state_slots  [B] int32: indices of the sequences' states; None: no layer has any. state_chunks: fused prefill, the same
    state_pending  [B] int32: decode, with most_pending of ops.DeltaTokens; None: no step has drafts
    adapters   [T] int32: number of each token's adapter, -1: none; None: no token has one
    plan       the recipe, and why
    """

    positions: torch.Tensor
    slots: torch.Tensor
    pages: torch.Tensor
    angles: Angles
    plan: StepPlan
    cells: tuple[torch.Tensor, torch.Tensor] | None = None
    lengths: torch.Tensor | None = None
    tickets: torch.Tensor | None = None
    chunks: tuple[Chunk, ...] = ()
    spans: ops.PrefillSpans | None = None
    spread: SpreadPages | None = None
    queries: int = 1
    state_slots: torch.Tensor | None = None
    state_pending: torch.Tensor | None = None
    most_pending: int = 0
    state_chunks: ops.SequenceChunks | None = None
    adapters: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def is_prefill(self) -> bool:
        return self.lengths is None

    def by_cudnn(self, w: AttentionWeights) -> bool:
        """True if a fused pass leaves this attention to cuDNN, which knows no windows, soft caps or sinks.

        After cached tokens: in parts (``fused.attend_after_cached``).
        """
        if not self.chunks:
            return False
        limits = limits_of(self.plan.recipe.team)
        return all(chunk.by_cudnn(w, limits) for chunk in self.chunks)

    @property
    def after_cached(self) -> bool:
        """True if a chunk goes on after cached tokens."""
        return any(chunk.before > 0 for chunk in self.chunks)

    @classmethod
    def decode(
        cls,
        positions: torch.Tensor,
        pages: torch.Tensor,
        page_size: int,
        angles: Angles,
        plan: StepPlan,
        kv_heads: int,
        team: Team | None = None,
        queries: int = 1,
    ) -> Step:
        """One new token of each of B sequences at positions[B] int64; -1: padding. `kv_heads`: of this rank.

        team     the one over whose ranks the cache is spread, or None
        queries  new tokens of each sequence, whose positions are neighbours; ``pages`` has a row for each sequence

        The host reads no values of the device, so a decode step can be captured in a CUDA graph.
        """
        spread = None if team is None else SpreadPages(team=team)
        place = (0, 1) if team is None else (team.rank, team.size)
        if queries > 1 and not (plan.fused and team is None):
            pages = pages.repeat_interleave(queries, 0)
        if plan.fused:
            sharing = queries if team is None else 1
            at, slots, lengths, tickets = ops.decode_metadata(
                positions, pages, page_size, len(positions) * kv_heads, *place, sharing
            )
            cells = None
        else:
            at, slots = positions.clamp(min=0), local_slots(positions, pages, page_size, *place)
            lengths, tickets = (positions + 1).to(torch.int32), None
            cells = cells_of(slots, page_size)
        return cls(
            positions=at,
            slots=slots,
            cells=cells,
            pages=pages,
            angles=angles,
            lengths=lengths,
            tickets=tickets,
            spread=spread,
            plan=plan,
            queries=queries,
        )

    @classmethod
    def prefill(
        cls,
        spans: Sequence[tuple[int, int]],
        pages: torch.Tensor,
        page_size: int,
        angles: Angles,
        plan: StepPlan,
        group: int,
        dtype: torch.dtype,
        spread_over: tuple[Team, int | None] | None = None,
    ) -> Step:
        """`length` new tokens of sequence b after `before` cached ones, (before, length) = spans[b].

        pages  [B, max_pages]
        group  query heads of a KV head
        dtype  the model's
        spread_over  team over whose ranks the cache is spread, and most tokens that any layer attends to (None: all)

        The number of copies to the device does not depend on the number of sequences.
        """
        device = pages.device
        team, window = spread_over or (None, None)
        # numpy, because torch would start its threads for a few integers.
        befores, lengths = (numpy.array(part, numpy.int64) for part in zip(*spans, strict=True))
        starts = lengths.cumsum() - lengths
        on_host = numpy.arange(len(spans)).repeat(lengths)
        at = numpy.arange(len(on_host)) - starts[on_host] + befores[on_host]
        sequence, positions = (upload(torch.from_numpy(x), device) for x in (on_host, at))
        place = (0, 1) if team is None else (team.rank, team.size)
        entry = page_size * place[1]  # tokens
        slots = slots_in(pages[sequence, positions // entry], positions, page_size, *place)
        spread = None
        if team is not None:
            layout = GatheredLayout.make(spans, page_size, team.size, window=window)
            spread, pages = SpreadPages.of_prefill(team, pages, layout), upload(torch.from_numpy(layout.table), device)
        return cls(
            positions=positions,
            slots=slots,
            cells=None if plan.fused else cells_of(slots, page_size),
            pages=pages,
            angles=angles,
            plan=plan,
            chunks=runs(spans),
            spread=spread,
            spans=ops.PrefillSpans.make(spans, group, dtype).to(device) if plan.fused else None,
        )


def limits_of(team: Team) -> Limits:
    """Sizes from which cuDNN attends on the GPUs of ``team``."""
    return gpu_of(team.caps).limits


def takes_cached(weight: Matrix, head_dim: int) -> bool:
    """True if cuDNN takes such heads after cached tokens: in 16 bits, on NVIDIA GPUs.

    weight  of the projection. Activations of quantized weights have 16 bits
    """
    in_16_bits = not isinstance(weight, torch.Tensor) or weight.itemsize == 2
    return in_16_bits and head_dim <= 128 and torch.version.hip is None


def check_page_size(page_size: int) -> None:
    """ValueError unless page_size is one of PAGE_SIZES."""
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page_size={page_size} is not one of {', '.join(map(str, PAGE_SIZES))}")


def cells_of(slots: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(page, offset in it) of slots. Padding, -1, is the first cell of page 0."""
    slots = slots.clamp(min=0)
    return slots // page_size, slots % page_size


def runs(spans: Sequence[tuple[int, int]]) -> tuple[Chunk, ...]:
    """Runs of neighbouring sequences with equal (before, length): a launch of attention per run."""
    chunks: list[Chunk] = []
    token = 0
    for index, (before, length) in enumerate(spans):
        last = chunks[-1] if chunks else None
        if last is not None and (last.before, last.length) == (before, length):
            chunks[-1] = last._replace(batch=last.batch + 1)
        else:
            chunks.append(Chunk(batch=1, length=length, before=before, first_token=token, first_sequence=index))
        token += length
    return tuple(chunks)
