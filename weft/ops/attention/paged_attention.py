"""paged_attention: one new token of each sequence attends to all of its tokens, in a cache of pages.

Split-KV decoding in one kernel. A program computes the query heads of one KV head (rows of one tile: each key is loaded
once for all of them) over one part of one sequence; the last program of a sequence's head joins the parts. Into how many
parts a sequence may be cut follows from shapes alone, so that a CUDA graph holds any lengths; into how many it is cut,
the programs find from its length.

What a program computes: weft.kernels.online_softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.online_softmax import attend, join_parts, pages_at
from weft.ops.attention.qk_norm_rope import check_cache
from weft.ops.custom_op import custom_op
from weft.ops.local import capabilities_of, check_like, check_shape
from weft.ops.registration import FLOATS, check_scalar
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
    """How the cache is read.

    block_n     tokens of a step, a power of two, at least 16 for each of num_warps
    least       tokens of a part at least, a multiple of block_n: shorter sequences are not cut
    max_splits  parts of a sequence at most
    per_sm      programs that an SM is to have, where there is work for them
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


@triton.jit
def attend_and_join(
    x, keys, values, table, page, head, first, length, count, scale, out, parts, weights, tickets,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    BLOCK_N: tl.constexpr, WAYS: tl.constexpr, SPLIT: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Part program_id(1) of ``count`` of pair program_id(0), into ``out``, or where there are several into ``parts``, which
    the program that comes last joins. Arguments as of ``attend`` and ``paged_attention_kernel``; out: of all pairs."""
    pair, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    ROWS: tl.constexpr = x.shape[0]
    KEPT: tl.constexpr = ROWS // 2 if GROUP * 2 <= ROWS else ROWS
    row, kept, column = tl.arange(0, ROWS), tl.arange(0, KEPT)[:, None], tl.arange(0, D)[None, :]
    mine = pair.to(tl.int64) * (GROUP * D)
    mean, weight = attend(
        x, keys, values, table, page, head, first, length, count * BLOCK_N, scale, HEADS, PAGE, D, BLOCK_N, WAYS, KEPT
    )
    alone = True
    if SPLIT:
        alone = count == 1
        if count > 1:
            part = (pair.to(tl.int64) * splits + split) * GROUP
            tl.store(parts + part * D + kept * D + column, mean, mask=kept < GROUP)
            tl.store(weights + part + row, weight, mask=row < GROUP)
            wl.gather_stores()
            if tl.atomic_add(tickets + pair, 1, sem="acq_rel", scope="gpu") == count - 1:
                tl.store(tickets + pair, 0)
                first_part = pair.to(tl.int64) * splits * GROUP
                join_parts(parts + first_part * D, weights + first_part, out + mine, count, GROUP, D, JOINED)
    if alone:
        tl.store(out + mine + kept * D + column, mean.to(out.dtype.element_ty), mask=kept < GROUP)


@triton.jit
def parts_of(length, splits, LEAST: tl.constexpr):
    """Into how many parts a sequence of ``length`` tokens is cut."""
    return tl.minimum(tl.maximum(tl.cdiv(length, LEAST), 1), splits)


@triton.jit(do_not_specialize=["max_pages"])
def paged_attention_kernel(
    q, keys, values, pages, lengths, out, parts, weights, tickets, max_pages, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, WAYS: tl.constexpr, LEAST: tl.constexpr, SPLIT: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    """out[b, h, :] = softmax(q[b, h, :] . keys of b * scale) @ values of b        grid: (B * HEADS, splits)

    Program (b * HEADS + g, i) has part i of sequence b for its query heads g * GROUP .. (g + 1) * GROUP - 1. A sequence
    has as many parts as there are splits, or fewer, so that they have about LEAST tokens; programs beyond them end at
    once. Its steps of BLOCK_N tokens are dealt out in turn: where a program starts does not wait for the length. Token t of
    b lies in page pages[b, t // PAGE]. lengths[b] = 0: zeros.

    signals, waits  none: of the parts of a sequence and head, the program that comes last joins all
    parts, weights  fp32 [B * HEADS, splits, GROUP, D] and [B * HEADS, splits, GROUP], of this call only
    tickets         int32 [B * HEADS], 0: how many parts are there. Left as 0 for the next kernel of this stream
    SPLIT           whether there are splits; where not, parts, weights and tickets are not touched
    """
    pair, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    sequence, head = pair // HEADS, pair % HEADS
    row, column = tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    mine = pair.to(tl.int64) * (GROUP * D)
    table = pages + sequence.to(tl.int64) * max_pages
    first = split * BLOCK_N
    wl.follow_previous_kernel()
    # All three at once; what the table holds behind the length is not used.
    length = tl.load(lengths + sequence)
    page = pages_at(table, first, max_pages * PAGE, BLOCK_N, WAYS, PAGE)
    x = tl.load(q + mine + row[:, None] * D + column, mask=(row < GROUP)[:, None], other=0.0)
    length = tl.minimum(length, max_pages * PAGE)
    count = parts_of(length, splits, LEAST)
    if split < count:
        attend_and_join(
            x, keys, values, table, page, head, first, length, count, scale, out, parts, weights, tickets,
            HEADS, GROUP, PAGE, D, BLOCK_N, WAYS, SPLIT, JOINED,
        )  # fmt: skip


def paged_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor,
    scale: float | None = None, tickets: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """softmax(q @ keys.T * scale) @ values -> [B, Hq, D], for one token of each sequence, which the cache holds already.

    q             [B, Hq, D], fp16, bf16 or fp32
    keys, values  [P, Hkv, S, D], contiguous, of q's dtype; query head h attends to KV head h * Hkv // Hq
    pages         [B, max_pages] int32: token t of sequence b is at offset t % S of page pages[b, t // S]
    lengths       [B] int32: tokens to attend to, the new one included, max_pages * S at most. 0, a padding row: zeros
    scale         D ** -0.5 where None
    tickets       int32 zeros, B * Hkv or more, left as zeros: calls of one stream may share them. None: each call makes
                  its own, by one small kernel more

    Hkv divides Hq, D is a power of two from 16 to 256, S one from 16 to 256. Softmax and sums in fp32. The same bits from
    run to run; B, max_pages and the lengths decide how sums are cut. What stands in ``pages`` and the cache behind a length
    moves nothing. The host reads no lengths or pages: those out of range are not refused. No backward. ValueError for shapes,
    dtypes or devices that do not fit.
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
    """ValueError unless there are none or one for each of ``pairs`` of sequence and KV head."""
    if tickets is None:
        return
    check_like(op, "tickets", tickets, device, (torch.int32,))
    if tickets.dim() != 1 or not tickets.is_contiguous() or tickets.shape[0] < pairs:
        raise ValueError(
            f"{op}: tickets has shape {tuple(tickets.shape)}; it must be a contiguous row of B * Hkv={pairs} or more"
        )


def check_heads(op: str, q_heads: int, keys: torch.Tensor) -> None:
    """ValueError unless so many query heads share the KV heads of a cache evenly, and its pages have a size that kernels
    read."""
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
    """For ``pairs`` of sequence and KV head: 16 KiB of keys a step, and as much of values, by programs of which an SM holds
    two. From three pairs for two SMs on 8 KiB, and from four an SM on 4, by programs as much smaller, of which an SM holds
    four, or eight: the first keys of all pairs are under way at once.

    Figures: docs/decisions.md, "Attention".
    """
    block_n = max(16, min(128, (16 << 10) // (D * dtype.itemsize)))
    # The fewer parts there can be, the longer must a sequence be for a join to pay.
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
    """Into how many parts a sequence of at most ``tokens`` may be cut, where there are ``pairs`` of sequence and KV head."""
    return max(1, min(config.per_sm * sms // pairs, cdiv(tokens, config.least), config.max_splits))


def run(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor, scale: float,
    tickets: torch.Tensor | None, config: AttentionConfig | None = None,
) -> torch.Tensor:  # fmt: skip
    """``paged_attention`` of checked arguments, with a chosen config."""
    (B, q_heads, D), (_, heads, page, _) = q.shape, keys.shape
    out = torch.empty((B, q_heads, D), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    caps = capabilities_of(q.device)
    pairs, max_pages = B * heads, pages.shape[1]
    config = config or config_for(pairs, D, q.dtype, caps)
    splits = splits_for(pairs, max_pages * page, config, caps.sms)
    paged_attention_kernel[(pairs, splits)](
        q.contiguous(), keys, values, pages.contiguous(), lengths.contiguous(), out, *scratch_of(out, pairs, splits, tickets),
        max_pages, scale * LOG2_E,
        **constants(config, heads=heads, group=q_heads // heads, page=page, D=D, split=splits > 1), **launch_options(caps),
    )  # fmt: skip
    return out


def scratch_of(
    out: torch.Tensor, pairs: int, splits: int, tickets: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """parts, weights and tickets of one call with ``out`` [B, Hq, D]; anything where nothing is split."""
    if splits == 1:
        return out, out, out
    B, q_heads, D = out.shape
    group = q_heads * B // pairs
    parts = torch.empty((pairs, splits, group, D), dtype=torch.float32, device=out.device)
    weights = torch.empty((pairs, splits, group), dtype=torch.float32, device=out.device)
    tickets = torch.zeros(pairs, dtype=torch.int32, device=out.device) if tickets is None else tickets
    return parts, weights, tickets


def constants(
    config: AttentionConfig, *, heads: int, group: int, page: int, D: int, split: bool
) -> dict[str, int | bool]:
    """The keyword arguments of the kernel."""
    few = next_power_of_2(group)
    return {
        "HEADS": heads, "GROUP": group, "PAGE": page, "D": D, "ROWS": max(MIN_ROWS, few),
        "BLOCK_N": config.block_n, "WAYS": config.num_warps, "LEAST": config.least, "SPLIT": split,
        # At most 16 KiB of parts at a time, in 32 registers of 4 warps.
        "JOINED": max(1, min(4, 4096 // (few * D))),
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip


@custom_op("paged_attention", mutates_args=("tickets",), backward=False)
def _paged_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor, scale: float,
    tickets: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    return run(q, keys, values, pages, lengths, scale, tickets)


@_paged_attention.register_fake
def _(q, keys, values, pages, lengths, scale, tickets):
    return torch.empty_like(q, memory_format=torch.contiguous_format)
