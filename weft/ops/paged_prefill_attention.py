"""paged_prefill_attention: each new token of some prompts attends to all before it and to itself, in a cache of pages.

Which tokens are new, the host says in chunks: sequences of one length, which go on after equally many tokens. A chunk is
one launch, whatever lies in the cache before it. Nothing but the cache holds keys: what wrote them there need not give
them twice.

The method is FlashAttention's online softmax (Dao et al., 2022), on rows that are the query heads of one KV head of
neighbouring tokens: each key is loaded once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.arithmetic import cdiv
from weft.ops.custom_op import custom_op
from weft.ops.local import capabilities_of, check_like, check_shape, launch_options
from weft.ops.paged_attention import LOG2_E, check_heads
from weft.ops.qk_norm_rope import check_cache
from weft.ops.registration import FLOATS

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

# Numbers of a chunk: batch, length, before, first_token, first_sequence.
FIELDS = 5
# Steps up to which a program masks all of them: one loop has all their loads in flight, two have not.
SHORT = tl.constexpr(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """block_m rows of a program, each a query head of a token, over block_n keys a step: powers of two of at least 16."""

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name}={value} is not a power of two of at least 16")


@triton.jit
def pages_of(table, start, end, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """The pages of keys start .. start + BLOCK_N - 1, 0 where not before ``end``: one where one page holds them all."""
    if BLOCK_N <= PAGE:
        return tl.load(table + start // PAGE, mask=start < end, other=0)
    else:
        token = start + tl.arange(0, BLOCK_N)
        return tl.load(table + token // PAGE, mask=token < end, other=0)


@triton.jit
def over_keys(
    x, position, keys, values, table, head, start, end, scale, largest, total, acc,
    MASKED: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One more stretch of the online softmax of rows ``x`` [BLOCK_M, D]: keys start .. end - 1, from a multiple of BLOCK_N on.

    A key's weight is 2 ** (score * scale), so ``scale`` holds log2(e).
    largest, total, acc  [BLOCK_M], [BLOCK_M] and [BLOCK_M, D]: the largest exponent so far, and sums relative to it
    MASKED               row i sees keys up to position[i]; else all rows see all, and ``end`` is a multiple of BLOCK_N too
    """
    column, local = tl.arange(0, D)[None, :], tl.arange(0, BLOCK_N)
    page = pages_of(table, start, end, BLOCK_N, PAGE)
    for at in tl.range(start, end, BLOCK_N):
        cell = ((page.to(tl.int64) * HEADS + head) * PAGE + (at % PAGE if BLOCK_N <= PAGE else 0)) * D
        within = local if BLOCK_N <= PAGE else (at + local) % PAGE
        # A step ahead: a load that waits for another would take a stage of the pipeline for itself.
        page = pages_of(table, at + BLOCK_N, end, BLOCK_N, PAGE)
        source = (cell + within * D)[:, None] + column
        k = tl.load(keys + source)
        if MASKED:
            v = tl.load(values + source, mask=(local < end - at)[:, None], other=0.0)
        else:
            v = tl.load(values + source)
        score = tl.dot(x, k.T, input_precision="ieee")
        if MASKED:
            score = tl.where((at + local)[None, :] <= position[:, None], score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, axis=1) * scale)
        p = tl.exp2(score * scale - new[:, None])
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        largest = new
    return largest, total, acc


@triton.jit(do_not_specialize=["max_pages", "batch", "length", "before", "first_token", "first_sequence"])
def paged_prefill_attention_kernel(
    q, keys, values, pages, out, max_pages, batch, length, before, first_token, first_sequence, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[b, t, h, :] = softmax(q[b, t, h, :] . keys of b up to before + t * scale) @ values of b        0 <= t < length

    grid: (batch * HEADS * cdiv(length * GROUP, BLOCK_M),): of all sequences and KV heads the tiles with most keys first

    q, out  [batch, length, HEADS * GROUP, D] from row first_token on. Tile i of a sequence and KV head has rows i * BLOCK_M
            and on of its length * GROUP: token t's heads are rows t * GROUP .. (t + 1) * GROUP - 1
    pages   [batch, max_pages] from row first_sequence on: key i of b lies in page pages[b, i // PAGE]; keys behind
            before + length - 1 are not used
    """
    pair = tl.program_id(0) % (batch * HEADS)
    tile = tl.cdiv(length * GROUP, BLOCK_M) - 1 - tl.program_id(0) // (batch * HEADS)
    sequence, head = pair // HEADS, pair % HEADS
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    exists = (row < length * GROUP)[:, None]
    first = (first_token + sequence.to(tl.int64) * length) * (HEADS * GROUP * D)
    mine = first + ((token.to(tl.int64) * HEADS + head) * GROUP + row % GROUP)[:, None] * D + tl.arange(0, D)[None, :]
    table = pages + (first_sequence + sequence).to(tl.int64) * max_pages
    end = before + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, length)
    # What the first row sees, all do.
    whole = (before + tile * BLOCK_M // GROUP + 1) // BLOCK_N * BLOCK_N
    whole = tl.where(end <= SHORT * BLOCK_N, 0, whole)
    position = before + token
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    wl.follow_previous_kernel()
    x = tl.load(q + mine, mask=exists, other=0.0)
    largest, total, acc = over_keys(
        x, position, keys, values, table, head, 0, whole, scale, largest, total, acc, False, HEADS, PAGE, D, BLOCK_N
    )
    largest, total, acc = over_keys(
        x, position, keys, values, table, head, whole, end, scale, largest, total, acc, True, HEADS, PAGE, D, BLOCK_N
    )
    tl.store(out + mine, (acc / total[:, None]).to(out.dtype.element_ty), mask=exists)


def paged_prefill_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, chunks: Sequence[Sequence[int]],
    scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """softmax(q @ keys.T * scale) @ values -> [T, Hq, D]: each of T tokens, and those before it in its sequence.

    q             [T, Hq, D], fp16, bf16 or fp32: the new tokens of all sequences, whose keys and values the cache holds already
    keys, values  [P, Hkv, S, D], contiguous, of q's dtype; query head h attends to KV head h * Hkv // Hq
    pages         [B, max_pages] int32: token t of sequence b is at offset t % S of page pages[b, t // S]
    chunks        of host integers (batch, length, before, first_token, first_sequence): ``batch`` sequences, rows
                  first_sequence and on of ``pages``, that go on by ``length`` tokens each after ``before`` others; these
                  are rows first_token .. first_token + batch * length - 1 of q, sequence by sequence. Tokens of no chunk
                  are left undefined
    scale         positive; D ** -0.5 where None

    Hkv divides Hq, D is a power of two from 16 to 256, S one from 16 to 256. Softmax and sums in fp32. The same bits from
    run to run; a chunk's sizes decide how sums are cut. What stands in ``pages`` and the cache behind a sequence moves
    nothing. The host reads no pages: those out of range are not refused. No backward. ValueError for shapes, dtypes,
    devices or chunks that do not fit.
    """
    op = "paged_prefill_attention"
    check_like(op, "q", q, q.device, FLOATS)
    check_cache(op, keys, values, q)
    page, D = keys.shape[2:]
    check_shape(op, "q", q, ("T", "Hq", D))
    check_heads(op, q.shape[1], keys)
    check_like(op, "pages", pages, q.device, (torch.int32,))
    check_shape(op, "pages", pages, ("B", "max_pages"))
    for chunk in chunks:
        check_chunk(op, chunk, tokens=q.shape[0], sequences=pages.shape[0], keys=pages.shape[1] * page)
    if scale is not None and scale <= 0:
        raise ValueError(f"{op}: scale={scale} is not positive; scores are compared before it is applied")
    flat = [number for chunk in chunks for number in chunk]
    return torch.ops.weft.paged_prefill_attention.default(
        q, keys, values, pages, flat, D**-0.5 if scale is None else scale
    )


def check_chunk(op: str, chunk: Sequence[int], *, tokens: int, sequences: int, keys: int) -> None:
    """ValueError unless a chunk lies within q's tokens and the page table."""
    if len(chunk) != FIELDS or min(chunk) < 0:
        raise ValueError(
            f"{op}: chunk {tuple(chunk)} is not (batch, length, before, first_token, first_sequence), none negative"
        )
    batch, length, before, token, sequence = chunk
    for what, end, limit in (
        ("tokens of q", token + batch * length, tokens),
        ("rows of pages", sequence + batch, sequences),
        ("tokens that a row of pages holds", before + length, keys),
    ):
        if end > limit:
            raise ValueError(f"{op}: chunk {tuple(chunk)} reaches to {end} of the {limit} {what}")


def config_for(
    chunk: Sequence[int], heads: int, group: int, D: int, dtype: torch.dtype, caps: Capabilities
) -> PrefillConfig:
    """For a chunk of ``group`` query heads to each of ``heads`` KV heads: 16 KiB of keys a step, and as much of values.

    H200, bf16, D=128, 16 heads on 2, with the norms before it in a CUDA graph, in microseconds, 3 stages (two programs an SM)
    / 4 (one): 1 prompt of 128 tokens 7.6 / 6.8, 1 of 512 14.2 / 12.6, 4 of 512 24.7 / 34.3. 128 rows with 8 warps take as
    long as 64 with 4, 16 rows up to three times as long (benchmarks/lab/h200-prefill-attention.json).
    """
    batch, length, _, _, _ = chunk
    if dtype == torch.float32:
        return PrefillConfig(block_m=16, block_n=16, num_stages=2)
    block_n = max(16, min(128, (16 << 10) // (D * dtype.itemsize)))
    if caps.arch.startswith("gfx"):
        return PrefillConfig(block_n=block_n, num_stages=2)
    programs = batch * heads * cdiv(length * group, 64)
    return PrefillConfig(block_n=block_n, num_stages=4 if programs <= caps.sms else 3)


def run(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, chunks: Sequence[int], scale: float,
    config: PrefillConfig | None = None,
) -> torch.Tensor:  # fmt: skip
    """``paged_prefill_attention`` of checked arguments, with a chosen config; the chunks' numbers in one row."""
    (_, q_heads, D), (_, heads, page, _) = q.shape, keys.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    caps = capabilities_of(q.device)
    q, pages, group = q.contiguous(), pages.contiguous(), q_heads // heads
    for start in range(0, len(chunks), FIELDS):
        chunk = chunks[start : start + FIELDS]
        batch, length, before, token, sequence = chunk
        if batch * length == 0:
            continue
        how = config or config_for(chunk, heads, group, D, q.dtype, caps)
        paged_prefill_attention_kernel[(batch * heads * cdiv(length * group, how.block_m),)](
            q, keys, values, pages, out, pages.shape[1], batch, length, before, token, sequence, scale * LOG2_E,
            **constants(how, heads=heads, group=group, page=page, D=D), **launch_options(caps),
        )  # fmt: skip
    return out


def constants(config: PrefillConfig, *, heads: int, group: int, page: int, D: int) -> dict[str, int]:
    """The keyword arguments of the kernel."""
    return {
        "HEADS": heads, "GROUP": group, "PAGE": page, "D": D, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip


@custom_op("paged_prefill_attention", backward=False)
def _paged_prefill_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, chunks: list[int], scale: float
) -> torch.Tensor:
    return run(q, keys, values, pages, chunks, scale)


@_paged_prefill_attention.register_fake
def _(q, keys, values, pages, chunks, scale):
    return torch.empty_like(q, memory_format=torch.contiguous_format)
