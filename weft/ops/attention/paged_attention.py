"""paged_attention: attention of one new token of each sequence to all of its tokens in a paged cache.

Split-KV decoding in one kernel. A program computes the query heads of one KV head (rows of one tile, so that each key is loaded
once for all of them) over one split-KV partial of one sequence. The last program of a sequence and KV head joins its partials.
The largest number of partials follows from shapes alone, so that a CUDA graph holds any lengths; the programs derive the number
of a sequence's partials from its length.

Device code: weft.kernels.online_softmax and weft.kernels.split_kv.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.arguments import check_int
from weft.kernels.online_softmax import DecodeTile, attend, ways
from weft.kernels.paged_cache import CacheSizes, PagedCache, Sequences, pages_at
from weft.kernels.split_kv import Partials, first_block, split_count, store_or_join
from weft.ops.attention import cases
from weft.ops.attention.attention_op import GROUP, AttentionOp
from weft.ops.attention.qk_norm_rope import check_cache, check_head_dim
from weft.ops.case import Accuracy, Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_like, check_shape, check_sizes, machine_on
from weft.ops.neighbours import moved, scaled
from weft.ops.op import register
from weft.ops.registration import FLOATS, check_scalar
from weft.plan.planned import AUTO, Machine
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.codec import exchangeable
from weft.runtime.launching import Launch, launch_on

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities
    from weft.triton_api import JITFunction

LOG2_E = math.log2(math.e)
PAGE_SIZES = (16, 32, 64, 128, 256)
MAX_GROUP = 64
MAX_SPLITS = 32
# Rows of the smallest tile that tensor cores multiply.
MIN_ROWS = 16


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class SplitKV:
    """Split-KV attention of one new token of each sequence.

    block_n  tokens of a step, a power of two, at least 16 for each of num_warps
    least    tokens of a partial at least, a multiple of block_n: shorter sequences are not split
    splits   partials of a sequence at most
    """

    block_n: int = 64
    least: int = 256
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        if self.block_n < 16 * self.num_warps or self.block_n & (self.block_n - 1):
            raise ValueError(
                f"block_n={self.block_n} is not a power of two of at least 16 for each of num_warps={self.num_warps}"
            )
        if self.least < 1 or self.least % self.block_n:
            raise ValueError(f"least={self.least} is not a multiple of block_n={self.block_n}")
        if self.splits < 1:
            raise ValueError(f"splits={self.splits} is not positive; pass 1 or more")


class DecodingCall(NamedTuple):
    """Sizes that the plan of a decoding attention depends on.

    pairs   of a sequence and a KV head
    tokens  that a sequence attends to at most: those that a row of the page table has room for, or the window
    """

    pairs: int
    tokens: int
    head_dim: int
    dtype: torch.dtype
    design: str = AUTO


@triton.jit(do_not_specialize=["max_pages"])
def paged_attention_kernel(
    q, cache, sequences, out, partials, max_pages, scale, SIZES: tl.constexpr, TILE: tl.constexpr
):
    """out[b, h, :] = softmax(q[b, h, :] . keys of b * scale) @ values of b    grid: (B * heads, splits)

    Program (b * heads + g, i) computes split-KV partial i of sequence b for its query heads g * group .. (g + 1) * group - 1. A
    sequence has one partial for each of ``splits``, or fewer, so that each has about TILE.least tokens; programs beyond them
    end at once. Its steps of TILE.block_n tokens are dealt out in turn: where a program starts does not depend on the length.
    With TILE.window it does: keys before the window are not loaded but for the block that the window begins in, and they and
    their values may be NaN. lengths[b] = 0: zeros.

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
    # All three loads at once; pages behind the length are loaded and not used. With a window the length decides the first page.
    length = tl.load(sequences.lengths + sequence)
    first += first_block(tl.minimum(length, max_pages * SIZES.page), TILE)
    page = pages_at(table, first, max_pages * SIZES.page, ways(TILE.block_n, TILE.ways), SIZES.page)
    x = tl.load(queries + row[:, None] * SIZES.dim + column, mask=(row < TILE.group)[:, None], other=0.0)
    length = tl.minimum(length, max_pages * SIZES.page)
    count = split_count(length, splits, TILE)
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
    window: int | None = None,
) -> torch.Tensor:
    """softmax(q @ keys.T * scale) @ values -> [B, Hq, D], for the newest token of each sequence.

    q             [B, Hq, D], fp16, bf16 or fp32
    keys, values  [P, Hkv, S, D], contiguous, of q's dtype; query head h attends to KV head h * Hkv // Hq
    pages         [B, max_pages] int32: token t of sequence b is at offset t % S of page pages[b, t // S]
    lengths       [B] int32: tokens to attend to, the new one included, max_pages * S at most. 0, a padding row: zeros
    scale         D ** -0.5 where None
    tickets       arrival counters: int32 zeros, B * Hkv or more, left as zeros, so calls of one stream may share them. None:
                  each call makes its own, which takes one more small kernel
    window        a token attends to this many tokens, itself the last of them, 1 or more; None: to all. Blocks of keys before
                  the window are not loaded

    Hkv divides Hq; D and S are powers of two from 16 to 256. Softmax and sums in fp32. Results are the same bits from run to
    run; B, max_pages, the window and the lengths decide how sums are split. ``pages`` and the cache behind a length, and the
    cache before a window, do not change a result.
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
    check_window(op, window)
    if scale is not None:
        check_scalar(op, "scale", scale)
    scale = D**-0.5 if scale is None else scale
    return PAGED_ATTENTION.dispatch(q, keys, values, pages, lengths, scale, tickets, window)


def check_window(op: str, window: int | None) -> None:
    """ValueError unless ``window`` is None or a positive integer, or a symbolic one of torch.compile."""
    if window is not None and not isinstance(window, torch.SymInt):
        check_int(f"{op}: window", window, 1, remedy="pass 1 or more tokens, or None for no window")


def hiding(window: int | None, keys: torch.Tensor, pages: torch.Tensor) -> int | None:
    """``window``, or None where it holds all that ``pages`` [B, max_pages] have room for."""
    return None if window is None or window >= pages.shape[1] * keys.shape[2] else window


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


def split_kv_for(call: DecodingCall, caps: Capabilities) -> SplitKV:
    """The design of a call.

    A step takes 16 KiB of keys, and as much of values, at two programs an SM. With more than 3 pairs for 2 SMs it takes 8 KiB,
    and with more than 4 pairs an SM 4 KiB, by programs as much smaller, of which an SM holds four or eight: the first keys of
    all pairs are loaded at once.

    Figures: docs/decisions.md, "Attention".
    """
    pairs, per_sm, stages = max(1, call.pairs), 2, 3
    block_n = max(16, min(128, (16 << 10) // (call.head_dim * call.dtype.itemsize)))
    least = least_of(call.pairs, caps)
    if caps.arch not in ("sm_90", "sm_100") or call.dtype == torch.float32:
        stages = 2 if caps.arch.startswith("gfx") or call.dtype == torch.float32 else 3
    else:
        per_sm = programs_per_sm(pairs, caps)
        if 2 * pairs > 3 * caps.sms:
            block_n = max(16, block_n // (2 if pairs <= 4 * caps.sms else 4))
    return SplitKV(
        block_n=block_n,
        least=least,
        splits=splits_of(call, per_sm * caps.sms, least),
        num_warps=min(4, block_n // 16),
        num_stages=stages,
    )


def least_of(pairs: int, caps: Capabilities) -> int:
    """Tokens of a partial at least.

    The fewer partials there can be, the longer a sequence must be for a join to pay.
    """
    return 128 if pairs <= 4 else 256 if 4 * pairs <= caps.sms else 512


def splits_of(call: DecodingCall, programs: int, least: int) -> int:
    """Partials of a sequence at most, for about ``programs`` programs in all."""
    return max(1, min(programs // max(1, call.pairs), cdiv(call.tokens, least), MAX_SPLITS))


def programs_per_sm(pairs: int, caps: Capabilities) -> int:
    """Programs wanted on each SM of sm_90 and sm_100, where there is work for them."""
    return 2 if 8 * pairs <= caps.sms else 1


class DecodingOp(AttentionOp):
    """Attention of one new token of each sequence, by split-KV partials.

    sizes  sequences, tokens that a row of the page table has room for, and this rank's KV heads
    """

    designs = {"split_kv": SplitKV}
    sizes = ("batch", "context", "kv_heads", "head_dim")

    def call_of(self, sizes: Sequence[Any], dtype: torch.dtype, machine: Machine, design: str = AUTO) -> DecodingCall:
        check_sizes(self.name, self.sizes, sizes)
        batch, context, kv_heads, head_dim = sizes
        check_head_dim(head_dim)
        return DecodingCall(batch * kv_heads, context, head_dim, dtype, design)

    def rule(self, call: DecodingCall, machine: Machine) -> tuple[str, str]:
        reason = f"{call.pairs} pairs of a sequence and a KV head on {machine.caps.sms} SMs"
        return "split_kv", f"{reason}; partials of at least {least_of(call.pairs, machine.caps)} tokens"

    def default(self, name: str, call: DecodingCall, machine: Machine) -> SplitKV:
        return split_kv_for(call, machine.caps)

    def space(self, call: DecodingCall, machine: Machine, quick: bool = False) -> Iterator[SplitKV]:
        rule = split_kv_for(call, machine.caps)
        for block_n in (16, 32, 64, 128):
            least, num_warps = max(rule.least, block_n), min(4, block_n // 16)
            for per_sm in (1, 2) if quick else (1, 2, 4):
                splits = splits_of(call, per_sm * machine.caps.sms, least)
                for num_stages in (rule.num_stages,) if quick else (2, 3, 4):
                    tile = {"block_n": block_n, "num_warps": num_warps, "num_stages": num_stages}
                    yield SplitKV(least=least, splits=splits, **tile)

    def around(self, design: SplitKV, machine: Machine, quick: bool = False) -> Iterator[SplitKV]:
        if not quick:
            yield from moved(
                design,
                block_n=scaled(design.block_n),
                least=scaled(design.least),
                splits=scaled(design.splits, high=MAX_SPLITS),
                num_warps=scaled(design.num_warps, high=8),
                num_stages=(max(1, design.num_stages - 1), design.num_stages + 1),
            )

    def sequences_of(self, pairs: int, tokens: int) -> dict[str, Any]:
        return {"lengths": (tokens,) * pairs}

    def call_of_case(self, case: Case, machine: Machine) -> DecodingCall:
        _, heads, head_dim, page = case.sizes
        lengths = case.field("lengths")
        room = cdiv(max(lengths), page) * page
        tokens = min(room, case.field("window") or room)
        return DecodingCall(len(lengths) * heads, tokens, head_dim, case.dtype, case.design)

    def flops(self, sizes: Sequence[int]) -> int:
        pairs, tokens, head_dim = sizes
        return 4 * GROUP * pairs * tokens * head_dim

    def plan_of(self, keys: torch.Tensor, pages: torch.Tensor, window: int | None = None) -> SplitKV:
        """The design for sequences of ``pages`` [B, max_pages] in a cache."""
        _, heads, page, D = keys.shape
        tokens = pages.shape[1] * page
        call = DecodingCall(pages.shape[0] * heads, min(tokens, window or tokens), D, keys.dtype)
        return self.plan(call, machine_on(keys.device)).design

    def accuracy(self, case: Case) -> Accuracy:
        longest = max(case.field("lengths"))
        return Accuracy(terms=min(longest, case.field("window") or longest) + case.sizes[2], partials=1, by_row=True)


def launch_of(
    kernel: JITFunction,
    design: SplitKV,
    out: torch.Tensor,
    cache: PagedCache,
    sequences: Sequences,
    tickets: torch.Tensor | None,
    window: int | None,
    **own: Any,
) -> tuple[Launch, tuple[int, int], tuple[Any, ...]]:
    """(launch, grid, arguments ``cache`` to ``max_pages``) of a kernel.

    It has ``out`` [B, Hq, D] and its ``own`` constants.
    """
    (B, q_heads, D), sizes = out.shape, CacheSizes.of(cache.key_pages)
    caps, pairs, group, splits = capabilities_of(out.device), B * sizes.heads, q_heads // sizes.heads, design.splits

    def constants() -> dict[str, Any]:
        compiled = {"num_warps": design.num_warps, "num_stages": design.num_stages, **launch_options(caps)}
        return {"SIZES": sizes, "TILE": tile_of(design, group=group, D=D, window=window), **own, **compiled}

    # Without the number of splits, which the batch decides.
    tile = design.block_n, design.least, splits > 1, design.num_warps, design.num_stages, window
    launch = launch_on(out.device, kernel, (tile, sizes, group, *own.values()), constants)
    sequences = Sequences(sequences.pages.contiguous(), sequences.lengths.contiguous())
    arguments = cache, sequences, out, scratch_of(out, pairs, splits, tickets), sequences.pages.shape[1]
    return launch, (pairs, splits), arguments


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


def tile_of(design: SplitKV, *, group: int, D: int, window: int | None = None) -> DecodeTile:
    """Compile-time sizes of a program with ``group`` query heads of ``D`` elements."""
    few = next_power_of_2(group)
    rows = max(MIN_ROWS, few)
    return DecodeTile(
        group=group,
        rows=rows,
        kept=rows // 2 if group * 2 <= rows else rows,
        block_n=design.block_n,
        ways=design.num_warps,
        least=design.least,
        split=design.splits > 1,
        # At most 16 KiB of partials at a time, in 32 registers of 4 warps.
        joined=max(1, min(4, 4096 // (few * D))),
        window=window,
    )


class PagedAttention(DecodingOp):
    name, alias = "paged_attention", "paged-attention"
    mutates = ("tickets",)

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """q, the cache, pages and lengths."""
        lengths = case.field("lengths")
        q = draw.own("q", (len(lengths), case.sizes[0], case.sizes[2]))
        seen = [(cases.first_seen(case, length), length) for length in lengths]
        cache = cases.draw_cache(draw, lengths, seen, spare=case.field("spare") or 0)
        return q, *cache, torch.tensor(lengths, dtype=torch.int32, device=q.device)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        q, keys, values, pages, _ = by_rank[rank]
        out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
        for b, length in enumerate(case.field("lengths")):
            if length > 0:
                mine = (cases.tokens_of(x, pages[b], length) for x in (keys, values))
                out[b] = cases.attended(q[b : b + 1], *mine, length - 1, case.field("window"))[0]
        return out

    def call(self, case: Case, team: Any, q: torch.Tensor, *cache: torch.Tensor) -> torch.Tensor:
        window = case.field("window")
        if isinstance(case.design, str):
            return paged_attention(q, *cache, window=window)
        keys, values, pages, lengths = cache
        places = PagedCache(keys, values), Sequences(pages, lengths)
        return self.run(case.design, None, q, *places, q.shape[2] ** -0.5, None, window)

    def cases(self) -> Iterator[Case]:
        return cases.decoding_cases(self.name, SplitKV)

    def large_cases(self) -> Iterator[Case]:
        return cases.large_decoding_cases(self.name)

    def run(
        self,
        design: SplitKV,
        team: None,
        q: torch.Tensor,
        cache: PagedCache,
        sequences: Sequences,
        scale: float,
        tickets: torch.Tensor | None,
        window: int | None = None,
    ) -> torch.Tensor:
        """``paged_attention`` of checked arguments."""
        self.check_design(design)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if out.numel() > 0:
            launch, grid, arguments = launch_of(paged_attention_kernel, design, out, cache, sequences, tickets, window)
            launch(grid, q.contiguous(), *arguments, scale * LOG2_E)
        return out

    def forward(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        pages: torch.Tensor,
        lengths: torch.Tensor,
        scale: float,
        tickets: torch.Tensor | None,
        window: int | None,
    ) -> torch.Tensor:
        window = hiding(window, keys, pages)
        design, places = self.plan_of(keys, pages, window), (PagedCache(keys, values), Sequences(pages, lengths))
        return self.run(design, None, q, *places, scale, tickets, window)

    def fake(self, q, keys, values, pages, lengths, scale, tickets, window):
        return torch.empty_like(q, memory_format=torch.contiguous_format)


PAGED_ATTENTION = PagedAttention()
register(PAGED_ATTENTION)
