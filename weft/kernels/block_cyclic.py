"""A KV cache that is spread over ranks by pages, block-cyclic.

Page p of a sequence lies at rank p % W, as that rank's local page p // W. So the cache of all ranks grows evenly, and a rank's
tokens are a sequence of their own: only its last page may be partly filled.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def local_length(length, rank, world, PAGE: tl.constexpr):
    """Tokens at ``rank`` of a sequence of ``length`` tokens over ``world`` ranks."""
    whole = length // PAGE
    pages = whole // world + (rank < whole % world).to(tl.int32)
    return pages * PAGE + tl.where(rank == whole % world, length % PAGE, 0)


def local_lengths(lengths: torch.Tensor, rank: int, world_size: int, page_size: int) -> torch.Tensor:
    """``local_length`` of each of ``lengths``, by torch."""
    whole = lengths // page_size
    pages = whole // world_size + (rank < whole % world_size).to(lengths.dtype)
    return pages * page_size + torch.where(whole % world_size == rank, lengths % page_size, 0)


def local_slots(
    positions: torch.Tensor, pages: torch.Tensor, page_size: int, rank: int, world_size: int
) -> torch.Tensor:
    """Slots [T] int64 of tokens in this rank's cache, for ``ops.qk_norm_rope``; -1: at another rank.

    positions  [T], of the tokens in their sequences; negative: padding, slot -1
    pages      [T, local_pages]: this rank's page table, the row of each token's sequence
    """
    at = positions.clamp(min=0).long()
    entries = pages.gather(1, (at // (page_size * world_size))[:, None])[:, 0]
    return torch.where(positions >= 0, slots_in(entries, at, page_size, rank, world_size), -1)


def slots_in(
    entries: torch.Tensor, positions: torch.Tensor, page_size: int, rank: int, world_size: int
) -> torch.Tensor:
    """Slots [T] int64 as of ``local_slots``.

    entries    [T]: local page of each token, any where it is at another rank
    positions  [T], none negative
    """
    slots = entries.long() * page_size + positions % page_size
    return torch.where(positions // page_size % world_size == rank, slots, -1)
