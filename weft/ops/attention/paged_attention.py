"""paged_attention: attention of one new token of each sequence to all of its tokens in a paged cache.

Split-KV decoding in one kernel. A program computes the query heads of one KV head (rows of one tile, so that each key is loaded
once for all of them) over one split-KV partial of one sequence. The last program of a sequence and KV head joins its partials.
The largest number of partials follows from shapes alone, so that a CUDA graph holds any lengths; the programs derive the number
of a sequence's partials from its length.

Device code: weft.kernels.online_softmax and weft.kernels.split_kv.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.online_softmax import DecodeTile, attend, ways
from weft.kernels.paged_cache import CacheSizes, PagedCache, Sequences, pages_at
from weft.kernels.split_kv import Partials, split_count, store_or_join
from weft.ops.attention.qk_norm_rope import check_cache
from weft.ops.custom_op import custom_op
from weft.ops.local import capabilities_of, check_like, check_shape
from weft.ops.registration import FLOATS, check_scalar
from weft.plan.memo import remembered
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

LOG2_E = math.log2(math.e)
PAGE_SIZES = (16, 32, 64, 128, 256)
MAX_GROUP = 64
# Rows of the smallest tile that tensor cores multiply.
MIN_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Tile and split of a decoding attention.

    block_n     tokens of a step, a power of two, at least 16 for each of num_warps
    least       tokens of a partial at least, a multiple of block_n: shorter sequences are not split
    max_splits  partials of a sequence at most
    per_sm      programs wanted on each SM, where there is work for them
    """

    block_n: int = 64
    least: int = 256
    max_splits: int = 32
    per_sm: int = 2
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        if self.block_n < 16 * self.num_warps or self.block_n & (self.block_n - 1):
            raise ValueError(
                f"block_n={self.block_n} is not a power of two of at least 16 for each of num_warps={self.num_warps}"
            )
        if self.least < 1 or self.least % self.block_n:
            raise ValueError(f"least={self.least} is not a multiple of block_n={self.block_n}")
        for name in ("max_splits", "per_sm"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not positive; pass 1 or more")


@triton.jit(do_not_specialize=["max_pages"])
def paged_attention_kernel(
    q, cache, sequences, out, partials, max_pages, scale, SIZES: tl.constexpr, TILE: tl.constexpr
):
    """out[b, h, :] = softmax(q[b, h, :] . keys of b * scale) @ values of b    grid: (B * heads, splits)

    Program (b * heads + g, i) computes split-KV partial i of sequence b for its query heads g * group .. (g + 1) * group - 1. A
    sequence has one partial for each of ``splits``, or fewer, so that each has about TILE.least tokens; programs beyond them
    end at once. Its steps of TILE.block_n tokens are dealt out in turn: where a program starts does not depend on the length.
    lengths[b] = 0: zeros.

    signals, waits  none: of the partials of a sequence and KV head, the program that arrives last joins all
    cache, SIZES    ``PagedCache`` and its ``CacheSizes``
    sequences       ``Sequences``: token t of b lies in page pages[b, t // page]
    partials        ``Partials``, not touched unless TILE.split
    """
    pair, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    sequence, head = pair // SIZES.heads, pair % SIZES.heads
    row, column = tl.arange(0, TILE.rows), tl.arange(0, SIZES.dim)[None, :]
    queries = q + pair.to(tl.int64) * (TILE.group * SIZES.dim)
    table = sequences.pages + sequence.to(tl.int64) * max_pages
    first = split * TILE.block_n
    wl.follow_previous_kernel()
    # All three loads at once; pages behind the length are loaded and not used.
    length = tl.load(sequences.lengths + sequence)
    page = pages_at(table, first, max_pages * SIZES.page, ways(TILE.block_n, TILE.ways), SIZES.page)
    x = tl.load(queries + row[:, None] * SIZES.dim + column, mask=(row < TILE.group)[:, None], other=0.0)
    length = tl.minimum(length, max_pages * SIZES.page)
    count = split_count(length, splits, TILE.least)
    if split < count:
        mean, log_sum = attend(x, cache, table, page, head, first, length, count * TILE.block_n, scale, SIZES, TILE)
        store_or_join(mean, log_sum, count, out, partials, TILE)


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    scale: float | None = None,
    tickets: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q @ keys.T * scale) @ values -> [B, Hq, D], for the newest token of each sequence.

    q             [B, Hq, D], fp16, bf16 or fp32
    keys, values  [P, Hkv, S, D], contiguous, of q's dtype; query head h attends to KV head h * Hkv // Hq
    pages         [B, max_pages] int32: token t of sequence b is at offset t % S of page pages[b, t // S]
    lengths       [B] int32: tokens to attend to, the new one included, max_pages * S at most. 0, a padding row: zeros
    scale         D ** -0.5 where None
    tickets       arrival counters: int32 zeros, B * Hkv or more, left as zeros, so calls of one stream may share them. None:
                  each call makes its own, which takes one more small kernel

    Hkv divides Hq; D and S are powers of two from 16 to 256. Softmax and sums in fp32. Results are the same bits from run to
    run; B, max_pages and the lengths decide how sums are split. ``pages`` and the cache behind a length do not change a result.
    The host reads no lengths or pages: those out of range are not refused. No backward. ValueError for shapes, dtypes or
    devices that do not fit.
    """
    op = "paged_attention"
    check_like(op, "q", q, None, FLOATS)
    check_cache(op, keys, values, q)
    heads, D = keys.shape[1], keys.shape[3]
    check_shape(op, "q", q, ("B", "Hq", D))
    B = q.shape[0]
    check_heads(op, q.shape[1], keys)
    for name, x, shape in (("pages", pages, (B, "max_pages")), ("lengths", lengths, (B,))):
        check_like(op, name, x, q.device, (torch.int32,))
        check_shape(op, name, x, shape)
    check_tickets(op, tickets, B * heads, q.device)
    if scale is not None:
        check_scalar(op, "scale", scale)
    return torch.ops.weft.paged_attention.default(
        q, keys, values, pages, lengths, D**-0.5 if scale is None else scale, tickets
    )


def check_tickets(op: str, tickets: torch.Tensor | None, pairs: int, device: torch.device) -> None:
    """ValueError unless ``tickets`` is None or has ``pairs`` counters, one for a sequence and KV head."""
    if tickets is None:
        return
    check_like(op, "tickets", tickets, device, (torch.int32,))
    if tickets.dim() != 1 or not tickets.is_contiguous() or tickets.shape[0] < pairs:
        raise ValueError(
            f"{op}: tickets has shape {tuple(tickets.shape)}; it must be a contiguous row of B * Hkv={pairs} or more"
        )


def check_heads(op: str, q_heads: int, keys: torch.Tensor) -> None:
    """ValueError unless KV heads share ``q_heads`` evenly and kernels can read pages of this size."""
    heads, page = keys.shape[1:3]
    if page not in PAGE_SIZES:
        raise ValueError(
            f"{op}: keys has shape {tuple(keys.shape)}; page_size={page} is not one of {', '.join(map(str, PAGE_SIZES))}"
        )
    if q_heads % heads != 0 or not 1 <= q_heads // heads <= MAX_GROUP:
        raise ValueError(
            f"{op}: q has {q_heads} heads and keys {heads}; each KV head must have the same number of query heads, 1 to "
            f"{MAX_GROUP}"
        )


def config_for(pairs: int, D: int, dtype: torch.dtype, caps: Capabilities) -> AttentionConfig:
    """Config for ``pairs`` of sequence and KV head.

    A step takes 16 KiB of keys, and as much of values, at two programs an SM. With more than 3 pairs for 2 SMs it takes 8 KiB,
    and with more than 4 pairs an SM 4 KiB, by programs as much smaller, of which an SM holds four or eight: the first keys of
    all pairs are loaded at once.

    Figures: docs/decisions.md, "Attention".
    """
    block_n = max(16, min(128, (16 << 10) // (D * dtype.itemsize)))
    # The fewer partials there can be, the longer a sequence must be for a join to pay.
    least = 128 if pairs <= 4 else 256 if 4 * pairs <= caps.sms else 512
    if caps.arch not in ("sm_90", "sm_100") or dtype == torch.float32:
        stages = 2 if caps.arch.startswith("gfx") or dtype == torch.float32 else 3
        return AttentionConfig(block_n=block_n, num_warps=min(4, block_n // 16), least=least, num_stages=stages)
    if 2 * pairs > 3 * caps.sms:
        block_n = max(16, block_n // (2 if pairs <= 4 * caps.sms else 4))
    return AttentionConfig(
        block_n=block_n, num_warps=min(4, block_n // 16), least=least, per_sm=2 if 8 * pairs <= caps.sms else 1
    )


def splits_for(pairs: int, tokens: int, config: AttentionConfig, sms: int) -> int:
    """Largest number of split-KV partials of a sequence of at most ``tokens``, one of ``pairs``."""
    return max(1, min(config.per_sm * sms // pairs, cdiv(tokens, config.least), config.max_splits))


def run(
    q: torch.Tensor,
    cache: PagedCache,
    sequences: Sequences,
    scale: float,
    tickets: torch.Tensor | None,
    config: AttentionConfig | None = None,
) -> torch.Tensor:
    """``paged_attention`` of checked arguments, with a chosen config."""
    B, q_heads, D = q.shape
    out = torch.empty((B, q_heads, D), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    grid, arguments, options = launch_of(out, cache, sequences, tickets, config)
    paged_attention_kernel[grid](q.contiguous(), *arguments, scale * LOG2_E, **options)
    return out


def launch_of(
    out: torch.Tensor,
    cache: PagedCache,
    sequences: Sequences,
    tickets: torch.Tensor | None,
    config: AttentionConfig | None,
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """(grid, arguments ``cache`` to ``max_pages``, keyword arguments) of a kernel with ``out`` [B, Hq, D]."""
    (B, q_heads, D), sizes = out.shape, CacheSizes.of(cache.key_pages)
    caps, pairs, max_pages = capabilities_of(out.device), B * sizes.heads, sequences.pages.shape[1]
    group, tokens = q_heads // sizes.heads, max_pages * sizes.page
    splits, options = chosen_for(pairs, tokens, group, D, out.dtype, caps, config)
    sequences = Sequences(sequences.pages.contiguous(), sequences.lengths.contiguous())
    arguments = cache, sequences, out, scratch_of(out, pairs, splits, tickets), max_pages
    return (pairs, splits), arguments, {"SIZES": sizes, **options}


@remembered
def chosen_for(
    pairs: int, tokens: int, group: int, D: int, dtype: torch.dtype, caps: Capabilities, config: AttentionConfig | None
) -> tuple[int, dict[str, Any]]:
    """(splits, keyword arguments but SIZES) for sequences of at most ``tokens``; None: config by rule."""
    config = config or config_for(pairs, D, dtype, caps)
    splits = splits_for(pairs, tokens, config, caps.sms)
    tile = tile_of(config, group=group, D=D, split=splits > 1)
    return splits, {
        "TILE": tile,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **launch_options(caps),
    }


def scratch_of(out: torch.Tensor, pairs: int, splits: int, tickets: torch.Tensor | None) -> Partials:
    """Scratch memory of one call that writes ``out`` [B, Hq, D]; any tensors where nothing is split."""
    if splits == 1:
        return Partials(out, out, out)
    B, q_heads, D = out.shape
    group = q_heads * B // pairs
    means = torch.empty((pairs, splits, group, D), dtype=torch.float32, device=out.device)
    log_sums = torch.empty((pairs, splits, group), dtype=torch.float32, device=out.device)
    arrivals = torch.zeros(pairs, dtype=torch.int32, device=out.device) if tickets is None else tickets
    return Partials(means, log_sums, arrivals)


def tile_of(config: AttentionConfig, *, group: int, D: int, split: bool) -> DecodeTile:
    """Compile-time sizes of a program with ``group`` query heads of ``D`` elements."""
    few = next_power_of_2(group)
    rows = max(MIN_ROWS, few)
    return DecodeTile(
        group=group,
        rows=rows,
        kept=rows // 2 if group * 2 <= rows else rows,
        block_n=config.block_n,
        ways=config.num_warps,
        least=config.least,
        split=split,
        # At most 16 KiB of partials at a time, in 32 registers of 4 warps.
        joined=max(1, min(4, 4096 // (few * D))),
    )


@custom_op("paged_attention", mutates_args=("tickets",), backward=False)
def _paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    tickets: torch.Tensor | None,
) -> torch.Tensor:
    return run(q, PagedCache(keys, values), Sequences(pages, lengths), scale, tickets)


@_paged_attention.register_fake
def _(q, keys, values, pages, lengths, scale, tickets):
    return torch.empty_like(q, memory_format=torch.contiguous_format)
