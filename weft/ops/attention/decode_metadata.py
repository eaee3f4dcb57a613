"""decode_metadata: slots, lengths and positions of one new token a sequence, in one kernel.

at = max(position, 0);  slot = page * S + at % S, page = pages[b, at // S];  length = position + 1        position -1: slot -1

Of a cache spread over W ranks (weft.kernels.block_cyclic) page = pages[b, at // S // W] at rank at // S % W; slot -1 elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.arguments import check_int
from weft.kernels.block_cyclic import local_slots
from weft.ops.case import Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_like, check_shape
from weft.ops.op import UNCHANGED, Op, register
from weft.ops.registration import check_count
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.team.team import Team

BLOCK = 128


@triton.jit(do_not_specialize=["batch", "width", "counters", "rank"])
def decode_metadata_kernel(
    positions,
    pages,
    at,
    slots,
    lengths,
    arrivals,
    batch,
    width,
    counters,
    rank,
    PAGE: tl.constexpr,
    RANKS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write at, slots and lengths by the module's formula, and set all arrival counters to 0.

    grid: (cdiv(max(batch, counters), BLOCK),)
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < batch
    wl.follow_previous_kernel()
    position = tl.load(positions + row, mask=exists, other=-1)
    here = tl.maximum(position, 0)
    held, index = exists, here // PAGE
    if RANKS > 1:
        held, index = exists & (index % RANKS == rank), index // RANKS
    page = tl.load(pages + (row // QUERIES).to(tl.int64) * width + index, mask=held, other=0).to(tl.int64)
    slot = tl.where((position >= 0) & held, page * PAGE + here % PAGE, -1)
    tl.store(at + row, here, mask=exists)
    tl.store(slots + row, slot, mask=exists)
    tl.store(lengths + row, (position + 1).to(tl.int32), mask=exists)
    tl.store(arrivals + row, tl.zeros([BLOCK], tl.int32), mask=row < counters)


def decode_metadata(
    positions: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    tickets: int,
    rank: int = 0,
    ranks: int = 1,
    queries: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(at, slots, lengths, arrival counters)`` of one new token a sequence.

    positions  [B] int64, of the new tokens, each below max_pages * page_size; -1: padding
    pages      [B, max_pages] int32, contiguous
    tickets    number of arrival counters that decode_attention needs: B * kv_heads int32 zeros
    rank       of ``ranks`` that a cache is spread over, block-cyclic: ``pages`` has this rank's pages, tokens at
               other ranks get slot -1, and lengths count the whole sequences
    queries    new tokens of each sequence: positions are then [B * queries], a sequence's one after the other

    lengths [B] int32 are for decode_attention; at and slots [B] int64 for qk_norm_rope before paged_attention. Padding has
    at 0, slot -1 and length 0.
    ValueError for shapes, dtypes or devices that do not fit.
    """
    check_like("decode_metadata", "positions", positions, None, (torch.int64,), ("B",))
    check_like("decode_metadata", "pages", pages, positions.device, (torch.int32,))
    check_int("decode_metadata: queries", queries, 1)
    if len(positions) % queries:
        raise ValueError(
            f"decode_metadata: {len(positions)} positions, which queries={queries} does not divide; pass all of a sequence"
        )
    check_shape("decode_metadata", "pages", pages, (len(positions) // queries, "max_pages"))
    check_count("decode_metadata", "page_size", page_size, low=1)
    check_count("decode_metadata", "tickets", tickets)
    check_int("decode_metadata: ranks", ranks, 1)
    check_int("decode_metadata: rank", rank, 0, ranks - 1)
    return DECODE_METADATA.dispatch(MetadataArguments(positions, pages, page_size, tickets, rank, ranks, queries))


class MetadataArguments(NamedTuple):
    """Arguments of decode_metadata."""

    positions: torch.Tensor
    pages: torch.Tensor
    page_size: int
    tickets: int
    rank: int = 0
    ranks: int = 1
    queries: int = 1


class DecodeMetadata(Op):
    name, alias = "decode_metadata", "decode-metadata"
    bits = UNCHANGED
    no_plan = "one kernel of few integers, in blocks of one size"

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Positions and four pages of each sequence. sizes: sequences, KV heads, page size."""
        batch, _, page_size = case.sizes
        generator = torch.Generator().manual_seed(batch)
        pages = torch.randperm(batch * 4, generator=generator).view(batch, 4).to(torch.int32)
        batch *= case.field("queries") or 1
        positions = torch.randint(-1, 4 * page_size, (batch,), generator=generator)
        return positions.to(draw.device), pages.to(draw.device)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, ...]:
        positions, pages = by_rank[rank]
        (_, kv_heads, page_size), at = case.sizes, positions.clamp(min=0)
        pages = pages.repeat_interleave(case.field("queries") or 1, 0)
        slots = local_slots(positions, pages, page_size, *(case.field("of_ranks") or (0, 1)))
        arrivals = torch.zeros(len(positions) * kv_heads, dtype=torch.int32, device=at.device)
        return at, slots, (positions + 1).int(), arrivals

    def call(self, case: Case, team: Team, positions: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, kv_heads, page_size = case.sizes
        place, queries = case.field("of_ranks") or (0, 1), case.field("queries") or 1
        return decode_metadata(positions, pages, page_size, len(positions) * kv_heads, *place, queries)

    def cases(self) -> Iterator[Case]:
        for page_size in (16, 64):
            for sizes in ((1, 1), (5, 2), (200, 1), (3, 100)):
                yield self.case(1, torch.int64, (*sizes, page_size))
        yield self.case(1, torch.int64, (50, 2, 16), queries=4)
        for rank in range(3):
            yield self.case(1, torch.int64, (40, 1, 16), of_ranks=(rank, 3))

    def forward(self, given: MetadataArguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        outputs, positions, pages = self.fake(given), given.positions, given.pages
        grid = cdiv(max(len(positions), given.tickets), BLOCK)
        if grid > 0:
            sizes = len(positions), pages.shape[1], given.tickets, given.rank
            constants = {"PAGE": given.page_size, "RANKS": given.ranks, "QUERIES": given.queries, "BLOCK": BLOCK}
            constants |= launch_options(capabilities_of(positions.device))
            decode_metadata_kernel[(grid,)](positions.contiguous(), pages.contiguous(), *outputs, *sizes, **constants)
        return outputs

    def fake(self, given: MetadataArguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        positions, batch = given.positions, given.positions.shape[0]
        at, slots = (positions.new_empty((batch,)) for _ in range(2))
        lengths, arrivals = (positions.new_empty((size,), dtype=torch.int32) for size in (batch, given.tickets))
        return at, slots, lengths, arrivals


DECODE_METADATA = register(DecodeMetadata())
