"""Split-KV decoding, of paged_attention and decode_attention: the design, its rule, the launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.kernels.online_softmax import MIN_ROWS, DecodeTile
from weft.kernels.paged_cache import CacheSizes, PagedCache, Sequences
from weft.kernels.split_kv import Partials
from weft.ops.attention.attention_op import GROUP, AttentionOp
from weft.ops.attention.fixed_runs import IN_RUNS, FixedRuns, fixed_runs_for, parts_in_runs
from weft.ops.attention.qk_norm_rope import check_head_dim
from weft.ops.case import Accuracy, Case
from weft.ops.knobs import check_knobs, counts, design_type, halved, knob, stepped
from weft.ops.local import capabilities_of, check_like, compiler_options, machine_on
from weft.plan.planned import AUTO, Machine, Planned
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.launching import Launch, launch_on

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities
    from weft.triton_api import JITFunction

MAX_SPLITS = 32
# Rows of the largest tile of several new tokens of a sequence: what the tensor cores of sm_90 multiply at once.
MOST_ROWS = 64
# Rows of a turned tile, of which tensor cores multiply keys by queries: half as many registers as for queries by keys.
TURNED_ROWS = 8
# Pairs of a sequence and a KV head up to which its new tokens are shared out, if there are several.
FEW_PAIRS = 16
# Pairs up to which short partials pay.
FEWEST_PAIRS = 4
# Tokens of a long partial.
LONG = 1024


# ``Op.bits`` of the design.
SPLIT_KV_BITS = (
    "depend on the batch, the new tokens of a sequence, a rank's KV heads, the page table's room and the design"
)


@design_type
class SplitKV:
    """Split-KV attention of one new token of each sequence.

    block_n  tokens of a step, a power of two, at least 16 for each of num_warps
    least    tokens of a partial at least, a multiple of block_n: shorter sequences are not split
    splits   partials of a sequence at most
    """

    block_n: int = knob(64, near=halved())
    least: int = knob(256, near=halved())
    splits: int = knob(1, counts(), halved(high=MAX_SPLITS))
    num_warps: int = knob(4, near=halved(high=8))
    num_stages: int = knob(3, near=stepped())

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.block_n < 16 * self.num_warps or self.block_n & (self.block_n - 1):
            raise ValueError(
                f"block_n={self.block_n} is not a power of two of at least 16 for each of num_warps={self.num_warps}"
            )
        if self.least < 1 or self.least % self.block_n:
            raise ValueError(f"least={self.least} is not a multiple of block_n={self.block_n}")


class DecodingCall(NamedTuple):
    """Sizes that the plan of a decoding attention depends on.

    pairs   of a sequence and a KV head
    tokens  that a sequence attends to at most: what a row of the page table has room for, or the window
    many    programs have rows of several new tokens, more than one tile of MIN_ROWS
    invariant  sums in an order of positions alone
    spread  of a cache that ranks share out
    """

    pairs: int
    tokens: int
    head_dim: int
    dtype: torch.dtype
    design: str = AUTO
    many: bool = False
    invariant: bool = False
    spread: bool = False

    @classmethod
    def of(
        cls, sequences: int, heads: int, group: int, queries: int, *rest: Any, invariant: bool = False
    ) -> DecodingCall:
        """Call of ``queries`` new tokens of each sequence; `rest`: ``tokens`` to ``design``."""
        pairs = sequences * heads
        if invariant:
            return cls(pairs * parts_in_runs(group, queries, rest[2]), *rest, invariant=True)
        many = queries > 1 and rows_of(group, queries, pairs) > MIN_ROWS.value
        return cls(pairs * parts_of(group, queries, pairs), *rest, many=many)

    def turns(self, caps: Capabilities) -> bool:
        """True if a program with few query heads of one new token has a turned tile."""
        few = not (self.many or self.spread)
        return few and is_turned(self.head_dim, self.dtype.itemsize, self.dtype.itemsize, caps)


def split_kv_for(call: DecodingCall, caps: Capabilities) -> SplitKV:
    """The design of a call.

    A step takes 16 KiB of keys, and as much of values, at two programs an SM. With more than 3 pairs for 2 SMs it takes 8 KiB,
    and with more than 4 pairs an SM 4 KiB, by programs as much smaller, of which an SM holds four or eight: the first keys of
    all pairs are loaded at once. With turned tiles partials may have half as many tokens, and up to 4 pairs take 32 KiB a step,
    as do programs that each have an SM and a whole sequence: 112 pairs of 10,000 tokens 277 us, otherwise 313
    (benchmarks/lab/h200-regret-unseen/w1.json).

    More pairs than eight an SM, of long sequences, take 16 KiB again, since not all fit at once: 1,344 pairs of 3,000 tokens
    466 us, by 4 KiB 524. From more than 3 pairs an SM on a step has at most 32 keys: 512 pairs of 300 tokens, heads of 64, 16.2
    us, with 64 keys 18.0. From 8 LONG tokens on turned tiles take twice as many partials where each has LONG then: 20 pairs of
    100,000 tokens 464 us, otherwise 559; not before: 64 pairs of 4,096 tokens 87 us, otherwise 71 (h200-decode-256.json). They
    take 32 KiB a step with a program for every second SM or fewer: 8 pairs of 300 tokens 11.2 us, otherwise 12.9
    (benchmarks/lab/h200-regret-unseen/w1-sixty.json).

    One H100, 512 sequences: 30.7 us, otherwise 34.5 (benchmarks/lab/h100-decode-attention.json). One H200, heads of 256, 1,024
    tokens: 2 pairs 10.1 us, otherwise 11.6; 16 pairs 12.3 and 14.5 (benchmarks/lab/h200-decode-256.json).
    """
    pairs, per_sm, stages = max(1, call.pairs), 2, 3
    # As many tokens of an fp8 cache as of 16 bits: twice as many would spill. Its steps are half as large, so one more is in
    # flight; not measured.
    itemsize = max(2, call.dtype.itemsize)
    block_n = max(16, min(128, (16 << 10) // (call.head_dim * itemsize)))
    least = least_of(call, caps)
    if caps.arch not in ("sm_90", "sm_100") or call.dtype == torch.float32:
        stages = 2 if caps.arch.startswith("gfx") or call.dtype == torch.float32 else 3
    else:
        per_sm = programs_per_sm(pairs, caps)
        at_once = pairs <= 8 * caps.sms or call.tokens <= LONG
        if 2 * pairs > 3 * caps.sms and at_once and not call.many:
            block_n = max(16, block_n // (2 if pairs <= 4 * caps.sms else 4))
            block_n = min(block_n, 32) if pairs > 3 * caps.sms else block_n
        elif call.turns(caps) and pairs <= FEWEST_PAIRS:
            block_n *= 2
    splits = splits_of(call.pairs, call.tokens, per_sm * caps.sms, least)
    if caps.arch in ("sm_90", "sm_100") and call.turns(caps):
        more = splits_of(call.pairs, call.tokens, 2 * caps.sms, least)
        splits = more if splits > 1 and call.tokens >= LONG * max(8, more) else splits
        if pairs <= caps.sms if splits == 1 else 2 * pairs * splits <= caps.sms:
            block_n = max(block_n, 64)
    return SplitKV(
        block_n=block_n,
        least=least,
        splits=splits,
        num_warps=min(4, block_n // 16),
        num_stages=stages + (call.dtype.itemsize == 1),
    )


def least_of(call: DecodingCall, caps: Capabilities) -> int:
    """Tokens of a partial at least.

    The fewer partials there can be, the longer a sequence must be for a join to pay.
    """
    least = 128 if call.pairs <= FEWEST_PAIRS else 256 if 4 * call.pairs <= caps.sms else 512
    return least // 2 if call.turns(caps) else least


def splits_of(pairs: int, tokens: int, programs: int, least: int) -> int:
    """Partials of a sequence at most, for about ``programs`` programs in all."""
    return max(1, min(programs // max(1, pairs), cdiv(tokens, least), MAX_SPLITS))


def programs_per_sm(pairs: int, caps: Capabilities) -> int:
    """Programs wanted on each SM of sm_90 and sm_100, where there is work for them."""
    return 2 if 8 * pairs <= caps.sms else 1


class DecodingOp(AttentionOp):
    """Attention of one new token of each sequence, by split-KV partials.

    sizes  sequences, tokens that a row of the page table has room for, and this rank's KV heads
    """

    designs = {"split_kv": SplitKV}
    sizes = ("batch", "context", "kv_heads", "head_dim")

    def call_of(
        self, sizes: Sequence[Any], dtype: torch.dtype, machine: Machine, design: str = AUTO, invariant: bool = False
    ) -> DecodingCall:
        batch, context, kv_heads, head_dim = self.checked_sizes(sizes)
        check_head_dim(head_dim)
        return DecodingCall(batch * kv_heads, context, head_dim, dtype, design, invariant=invariant)

    def rule(self, call: DecodingCall, machine: Machine) -> tuple[str, str]:
        if call.invariant:
            return "fixed_runs", IN_RUNS
        reason = f"{call.pairs} pairs of a sequence and a KV head on {machine.caps.sms} SMs"
        return "split_kv", f"{reason}; partials of at least {least_of(call, machine.caps)} tokens"

    def tuned(self, call: DecodingCall, machine: Machine) -> Planned | None:
        # Rows are of one new token a sequence, with programs that may be too small for many rows.
        return None if call.many or call.invariant else super().tuned(call, machine)

    def default(self, name: str, call: DecodingCall, machine: Machine) -> SplitKV | FixedRuns:
        if name == "fixed_runs":
            return fixed_runs_for(call.head_dim, call.dtype, machine.caps, call.pairs, call.tokens)
        return split_kv_for(call, machine.caps)

    def space(self, call: DecodingCall, machine: Machine, quick: bool = False) -> Iterator[SplitKV]:
        if call.invariant:
            return
        rule = split_kv_for(call, machine.caps)
        for block_n in (16, 32, 64, 128):
            least, num_warps = max(rule.least, block_n), min(4, block_n // 16)
            for per_sm in (1, 2) if quick else (1, 2, 4):
                splits = splits_of(call.pairs, call.tokens, per_sm * machine.caps.sms, least)
                for num_stages in (rule.num_stages,) if quick else (2, 3, 4):
                    tile = {"block_n": block_n, "num_warps": num_warps, "num_stages": num_stages}
                    yield SplitKV(least=least, splits=splits, **tile)

    def sequences_of(self, pairs: int, tokens: int) -> dict[str, Any]:
        return {"lengths": (tokens,) * pairs}

    def call_of_case(self, case: Case, machine: Machine) -> DecodingCall:
        _, heads, head_dim, page = case.sizes
        lengths, queries = case.field("lengths"), case.field("queries") or 1
        room = cdiv(max(lengths), page) * page
        tokens = min(room, case.field("window") or room)
        new = len(lengths) // queries, heads, case.sizes[0] // heads, queries
        invariant = case.field("invariant") or False
        return DecodingCall.of(*new, tokens, head_dim, case.dtype, case.design, invariant=invariant)

    def flops(self, sizes: Sequence[int]) -> int:
        pairs, tokens, head_dim = sizes
        return 4 * GROUP * pairs * tokens * head_dim

    def plan_of(
        self,
        keys: torch.Tensor,
        pages: torch.Tensor,
        window: int | None = None,
        group: int = 1,
        queries: int = 1,
        invariant: bool = False,
    ) -> SplitKV | FixedRuns:
        """The design for sequences of ``pages`` [B, max_pages] in a cache, with ``queries`` new tokens each."""
        _, heads, page, D = keys.shape
        tokens = pages.shape[1] * page
        sizes = heads, group, queries, min(tokens, window or tokens), D, keys.dtype
        call = DecodingCall.of(pages.shape[0], *sizes, invariant=invariant)
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
    queries: int = 1,
    **own: Any,
) -> tuple[Launch, tuple[int, int], tuple[Any, ...]]:
    """(launch, grid, arguments ``cache`` to ``max_pages``) of a kernel.

    It has ``out`` [B * queries, Hq, D] and its ``own`` constants.
    """
    (B, q_heads, D), sizes = out.shape, CacheSizes.of(cache.key_pages)
    caps, group, splits = capabilities_of(out.device), q_heads // sizes.heads, design.splits
    pairs = B // queries * sizes.heads
    parts = parts_of(group, queries, pairs)

    itemsizes = cache.key_pages.itemsize, out.itemsize

    def constants() -> dict[str, Any]:
        turned = is_turned(D, *itemsizes, caps)
        by_token = {"queries": queries, "parts": parts, "q_heads": q_heads, "turned": turned}
        tile = tile_of(design, group=group, D=D, window=window, **by_token)
        return {"SIZES": sizes, "TILE": tile, **own, **compiler_options(design, caps)}

    # Without the number of splits, which the batch decides.
    tile = design.block_n, design.least, splits > 1, design.num_warps, design.num_stages, window
    launch = launch_on(out.device, kernel, (tile, sizes, itemsizes, group, queries, parts, *own.values()), constants)
    sequences = Sequences(sequences.pages.contiguous(), sequences.lengths.contiguous())
    scratch = scratch_of(out, pairs * parts, splits, tickets, group * cdiv(queries, parts))
    return launch, (pairs * parts, splits), (cache, sequences, out, scratch, sequences.pages.shape[1])


def is_turned(head_dim: int, cache_bytes: int, out_bytes: int, caps: Capabilities) -> bool:
    """True if keys are multiplied by few queries, not queries by keys.

    With heads of 256 the other form spills registers. With heads of 128 both have room, and 128 sequences of 1,024 tokens take
    83 us in this form on an H200, 67 in the other one.
    """
    return head_dim > 128 and caps.arch.startswith("sm_") and cache_bytes == 2 and out_bytes <= 2


def parts_of(group: int, queries: int, pairs: int) -> int:
    """Programs that share out the ``queries`` new tokens of one sequence and KV head, of ``pairs`` in all.

    As few as MOST_ROWS rows allow, so that keys are loaded once. With few pairs SMs are left over, and smaller tiles take less
    time. One H200, 4 new tokens, 4 KV heads, one part and two: 1 x 4096 18.3 and 10.6 us, 4 x 4096 17.9 and 16.4, 8 x 4096 25.0
    and 31.5 (benchmarks/lab/h200-few-queries.json).
    """
    rows = MIN_ROWS.value if pairs <= FEW_PAIRS else MOST_ROWS
    return cdiv(queries, max(1, rows // group))


def rows_of(group: int, queries: int, pairs: int) -> int:
    """Rows of such a program: query heads of its new tokens."""
    return group * cdiv(queries, parts_of(group, queries, pairs))


def scratch_of(
    out: torch.Tensor, pairs: int, splits: int, tickets: torch.Tensor | None, group: int | None = None
) -> Partials:
    """Scratch memory of one call that writes ``out`` [B, Hq, D]; any tensors where nothing is split.

    group  rows of a pair; None: the query heads of a KV head
    """
    if splits == 1:
        return Partials(out, out, out)
    B, q_heads, D = out.shape
    group = q_heads * B // pairs if group is None else group
    means = torch.empty((pairs, splits, group, D), dtype=torch.float32, device=out.device)
    log_sums = torch.empty((pairs, splits, group), dtype=torch.float32, device=out.device)
    arrivals = torch.zeros(pairs, dtype=torch.int32, device=out.device) if tickets is None else tickets
    return Partials(means, log_sums, arrivals)


def tile_of(
    design: SplitKV,
    *,
    group: int,
    D: int,
    window: int | None = None,
    queries: int = 1,
    parts: int = 1,
    q_heads: int = 0,
    turned: bool = False,
) -> DecodeTile:
    """Compile-time sizes of a program with ``group`` query heads of ``D`` elements.

    queries, parts  new tokens of a sequence, and the programs that share them out; q_heads: a rank's query heads
    turned          the tile has TURNED_ROWS rows where they hold the query heads of one token
    """
    at_once = cdiv(queries, parts)
    group *= at_once
    few = next_power_of_2(group)
    rows = TURNED_ROWS if turned and at_once == 1 and few <= TURNED_ROWS else max(MIN_ROWS.value, few)
    if at_once > 1 and rows > MIN_ROWS.value:
        rows = max(MOST_ROWS, rows)
    return DecodeTile(
        group=group,
        rows=rows,
        kept=rows // 2 if group * 2 <= rows == MIN_ROWS.value else rows,
        block_n=design.block_n,
        ways=design.num_warps,
        least=design.least,
        split=design.splits > 1,
        # At most 16 KiB of partials at a time, in 32 registers of 4 warps.
        joined=max(1, min(4, 4096 // (few * D))),
        window=window,
        queries=at_once,
        stride=q_heads * D,
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
