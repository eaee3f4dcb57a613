"""decode_metadata: slots, lengths and positions of one new token a sequence, in one kernel.

at = max(position, 0);  slot = page * S + at % S, page = pages[b, at // S];  length = position + 1        position -1: slot -1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.case import Accuracy, Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_like, check_shape
from weft.ops.op import Op, register
from weft.ops.registration import check_count
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options

BLOCK = 128


@triton.jit(do_not_specialize=["batch", "width", "counters"])
def decode_metadata_kernel(
    positions, pages, at, slots, lengths, arrivals, batch, width, counters, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write at, slots and lengths by the module's formula, and set all arrival counters to 0.

    grid: (cdiv(max(batch, counters), BLOCK),)
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < batch
    wl.follow_previous_kernel()
    position = tl.load(positions + row, mask=exists, other=-1)
    here = tl.maximum(position, 0)
    page = tl.load(pages + row.to(tl.int64) * width + here // PAGE, mask=exists, other=0).to(tl.int64)
    slot = tl.where(position >= 0, page * PAGE + here % PAGE, -1)
    tl.store(at + row, here, mask=exists)
    tl.store(slots + row, slot, mask=exists)
    tl.store(lengths + row, (position + 1).to(tl.int32), mask=exists)
    tl.store(arrivals + row, tl.zeros([BLOCK], tl.int32), mask=row < counters)


def decode_metadata(
    positions: torch.Tensor, pages: torch.Tensor, page_size: int, tickets: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(at, slots, lengths, arrival counters)`` of one new token a sequence.

    positions  [B] int64, of the new tokens, each below max_pages * page_size; -1: padding
    pages      [B, max_pages] int32, contiguous
    tickets    number of arrival counters that decode_attention needs: B * kv_heads int32 zeros

    lengths [B] int32 are for decode_attention; at and slots [B] int64 for qk_norm_rope before paged_attention. Padding has
    at 0, slot -1 and length 0.
    ValueError for shapes, dtypes or devices that do not fit.
    """
    check_like("decode_metadata", "positions", positions, None, (torch.int64,))
    check_shape("decode_metadata", "positions", positions, ("B",))
    check_like("decode_metadata", "pages", pages, positions.device, (torch.int32,))
    check_shape("decode_metadata", "pages", pages, (len(positions), "max_pages"))
    check_count("decode_metadata", "page_size", page_size)
    check_count("decode_metadata", "tickets", tickets)
    return DECODE_METADATA.dispatch(positions, pages, page_size, tickets)


class DecodeMetadata(Op):
    name, alias = "decode_metadata", "decode-metadata"

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Positions and four pages of each sequence. sizes: sequences, KV heads, page size."""
        batch, _, page_size = case.sizes
        generator = torch.Generator().manual_seed(batch)
        pages = torch.randperm(batch * 4, generator=generator).view(batch, 4).to(torch.int32)
        positions = torch.randint(-1, 4 * page_size, (batch,), generator=generator)
        return positions.to(draw.device), pages.to(draw.device)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, ...]:
        positions, pages = by_rank[rank]
        (_, kv_heads, page_size), at = case.sizes, positions.clamp(min=0)
        page = pages.long().gather(1, at[:, None] // page_size)[:, 0]
        slots = torch.where(positions >= 0, page * page_size + at % page_size, -1)
        arrivals = torch.zeros(len(positions) * kv_heads, dtype=torch.int32, device=at.device)
        return at, slots, (positions + 1).int(), arrivals

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(exact=True)

    def call(self, case: Case, team: Any, positions: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, kv_heads, page_size = case.sizes
        return decode_metadata(positions, pages, page_size, batch * kv_heads)

    def cases(self) -> Iterator[Case]:
        for page_size in (16, 64):
            for sizes in ((1, 1), (5, 2), (200, 1), (3, 100)):
                yield Case(op=self.name, world_size=1, dtype=torch.int64, sizes=(*sizes, page_size))

    def forward(
        self, positions: torch.Tensor, pages: torch.Tensor, page_size: int, tickets: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        outputs = self.fake(positions, pages, page_size, tickets)
        grid = cdiv(max(len(positions), tickets), BLOCK)
        if grid > 0:
            arguments = positions.contiguous(), pages.contiguous(), *outputs, len(positions), pages.shape[1], tickets
            options = launch_options(capabilities_of(positions.device))
            decode_metadata_kernel[(grid,)](*arguments, PAGE=page_size, BLOCK=BLOCK, **options)
        return outputs

    def fake(self, positions, pages, page_size, tickets):
        batch = positions.shape[0]
        at, slots = (positions.new_empty((batch,)) for _ in range(2))
        lengths = positions.new_empty((batch,), dtype=torch.int32)
        return at, slots, lengths, positions.new_empty((tickets,), dtype=torch.int32)


DECODE_METADATA = DecodeMetadata()
register(DECODE_METADATA)
