"""Cases of attention over a paged cache, with poison where nothing may be read, and plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from weft.kernels.deferred_norm import DeferredNorm
from weft.ops.case import BF16, FP16, FP32, Case, Draw, norm_dtype
from weft.runtime.arithmetic import cdiv

NO_SCORES: Mapping[str, Any] = MappingProxyType({})
# Most elements of a sequence's keys that a reference has in fp64 at once, as far as one KV head has fewer: 256 MiB.
AT_ONCE = 1 << 25
# (query heads, KV heads, head dim, page size) and dtype.
QWEN = ((16, 2, 128, 64), BF16)
SMALL = ((4, 1, 64, 16), FP32)
HEADS = (
    QWEN,
    ((4, 4, 64, 16), FP16),
    ((2, 1, 64, 64), FP32),
    ((12, 3, 64, 16), BF16),
    ((8, 1, 128, 16), FP32),
    ((6, 2, 16, 32), BF16),
    ((3, 1, 256, 128), FP16),
)
# Heads whose results are put in fp8, and the kind of scales: a head a group, several, half of one; heads of two KV heads.
IN_FP8 = (
    (QWEN, "group"),
    (((12, 3, 64, 16), BF16), "group"),
    (((6, 2, 256, 16), FP16), "group"),
    (((4, 4, 64, 16), FP16), "group"),
    (QWEN, "static"),
    (QWEN, "token"),
)

# Heads, and what makes other weights of their scores.
OF_SCORES: tuple[tuple[tuple[tuple[int, ...], torch.dtype], dict[str, Any]], ...] = (
    (SMALL, {"sinks": True}),
    (SMALL, {"softcap": 1.5}),
    (HEADS[3], {"sinks": True, "softcap": 2.0}),
)


def case_of(op: str, heads: tuple[tuple[int, ...], torch.dtype], design: Any = "auto", **fields: Any) -> Case:
    """A case whose sizes are (query heads, KV heads, head dim, page size)."""
    sizes, dtype = heads
    return Case(op=op, world_size=1, dtype=dtype, sizes=sizes, design=design, fields=tuple(fields.items()))


def lengths_of(batch: int, length: int) -> tuple[int, ...]:
    """Lengths of a batch whose last sequence is a token shorter."""
    return (length,) * (batch - 1) + (length - 1,)


def first_seen(case: Case, length: int) -> int:
    """First token that the last of ``length`` tokens attends to."""
    window = case.field("window")
    return 0 if window is None else max(0, length - window)


def draw_cache(
    draw: Draw, tokens: Sequence[int], held: Sequence[tuple[int, int]], *, spare: int, room: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(keys, values, pages) of sequences with room for ``tokens``.

    Cells outside the ``held`` ones, (first, end) of each, and pages of no sequence, are NaN.

    spare, room  columns and rows that the page table has more than the sequences need; their entries lie outside the cache
    """
    _, heads, D, S = draw.case.sizes
    needed = [cdiv(count, S) for count in tokens]
    total = sum(needed) + 2
    cache = [draw.own(name, (total, heads, S, D)) for name in ("keys", "values")]
    order = torch.randperm(total, generator=torch.Generator().manual_seed(len(tokens))).tolist()
    pages = torch.full((len(tokens) + room, max([*needed, 1]) + spare), 1 << 24, dtype=torch.int32)
    real = torch.zeros((total, S), dtype=torch.bool)
    for b, (first, end) in enumerate(held):
        for index in range(needed[b]):
            page = pages[b, index] = order.pop()
            real[page, max(0, first - index * S) : max(0, end - index * S)] = True
    for x in cache:
        x[~real[:, None, :, None].expand(x.shape).to(x.device)] = torch.nan
    return *cache, pages.to(draw.device)


def tokens_of(cache: torch.Tensor, pages: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` tokens [count, heads, D] of a sequence, in fp64."""
    used = pages[: cdiv(count, cache.shape[2])].long()
    return cache[used].transpose(1, 2).flatten(0, 1)[:count].double()


def tokens_of_ranks(caches: Sequence[torch.Tensor], pages: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """The first ``count`` tokens [count, heads, D] of a sequence spread over ranks, in fp64.

    caches, pages  keys, or values, and the sequence's row of the page table at each rank
    """
    world_size, (_, heads, size, D) = len(caches), caches[0].shape
    whole = caches[0].new_empty((cdiv(count, size), size, heads, D))
    for rank, (cache, table) in enumerate(zip(caches, pages, strict=True)):
        shard = whole[rank::world_size]
        shard.copy_(cache[table[: len(shard)].long()].transpose(1, 2))
    return whole.flatten(0, 1)[:count].double()


def attended_by_head(
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    pages: Sequence[torch.Tensor],
    lengths: Sequence[int],
    window: int | None = None,
    scores: Mapping[str, Any] = NO_SCORES,
) -> torch.Tensor:
    """Attention of new tokens q [B, Hq, D] in fp64; of long contexts a KV head at a time.

    keys, values, pages  each rank's; lengths: of whole sequences. Zeros for sequences without tokens. window, scores: as of
                         attended
    """
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    heads = keys[0].shape[1]
    group = q.shape[1] // heads
    for b, length in enumerate(lengths):
        tables = [table[b] for table in pages]
        step = heads if length * heads * q.shape[2] <= AT_ONCE else 1
        for head in range(0, heads if length > 0 else 0, step):
            caches = ([cache[:, head : head + step] for cache in of_ranks] for of_ranks in (keys, values))
            k, v = (tokens_of_ranks(cache, tables, length) for cache in caches)
            some = slice(head * group, (head + step) * group)
            sinks = scores.get("sinks")
            of_heads = {**scores, "sinks": None if sinks is None else sinks[some]}
            out[b : b + 1, some] = attended(q[b : b + 1, some], k, v, length - 1, window, of_heads)
    return out


def scores_of(case: Case, like: torch.Tensor) -> dict[str, Any]:
    """Arguments softcap and sinks of a case: sinks from far below the scores to far above."""
    if case.field("softcap") is None and case.field("sinks") is None:
        return {}
    heads = torch.linspace(-3, 4, case.sizes[0], device=like.device).to(case.dtype)
    return {"softcap": case.field("softcap"), "sinks": heads if case.field("sinks") else None}


def attended(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    before: int,
    window: int | None = None,
    scores: Mapping[str, Any] = NO_SCORES,
) -> torch.Tensor:
    """Causal attention in fp64 of q [n, heads, D] after ``before`` tokens.

    keys, values  [tokens, kv_heads, D]
    window        tokens that each attends to, itself the last; None: all up to itself
    scores        softcap and sinks, as of ``ops.paged_attention``
    """
    last = before + torch.arange(q.shape[0], device=q.device)[:, None]
    at = torch.arange(keys.shape[0], device=q.device)
    seen = at <= last if window is None else (at <= last) & (at > last - window)
    used = seen.any(0)[:, None, None]  # rows that nothing reads may be NaN
    k, v = (torch.where(used, x.double(), 0.0).transpose(0, 1) for x in (keys, values))
    rows = q.double().unflatten(1, (len(k), -1)).permute(1, 2, 0, 3)  # [kv_heads, group, n, D]
    x = (rows.flatten(1, 2) @ k.transpose(1, 2)).view(*rows.shape[:3], len(at)) / q.shape[2] ** 0.5
    softcap, sinks = scores.get("softcap"), scores.get("sinks")
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    x = x.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        x = torch.cat((x, sinks.double().view(*rows.shape[:2], 1, 1).expand(*rows.shape[:3], 1)), dim=-1)
    weights = x.softmax(-1)[..., : len(at)]
    return (weights.flatten(1, 2) @ v).view(rows.shape).permute(2, 0, 1, 3).flatten(1, 2)


def draw_projection(draw: Draw, tokens: int) -> tuple[torch.Tensor, ...]:
    """Tensors of a ``Projection``: (qkv, q_weight, k_weight, angles[, squares][, bias]).

    Fields of the case: partials (split-K partials of qkv), squares (parts of a deferred RMS scale), bias, strided (rows of a
    wider matrix), positions (rows of angles; 50), wide_norm (weights of norms in fp32).
    """
    case = draw.case
    q_heads, heads, D, _ = case.sizes
    partials, parts, width = case.field("partials"), case.field("squares"), (q_heads + 2 * heads) * D
    shape = (tokens, width) if partials is None else (partials, tokens, width)
    qkv = draw.own("qkv", shape, dtype=None if partials is None else FP32)
    if case.field("strided"):
        qkv = torch.cat((qkv, qkv), dim=-1)[..., :width]
    weights = [1 + draw.own(name, (D,), dtype=norm_dtype(case)) / 4 for name in ("q_weight", "k_weight")]
    squares = [] if parts is None else [1 + draw.own("squares", (tokens, parts), 5.0, FP32).square()]
    bias = [draw.own("bias", (width,))] if case.field("bias") else []
    return qkv, *weights, draw.own("angles", (case.field("positions") or 50, D), dtype=FP32), *squares, *bias


class Projection(NamedTuple):
    """The projection of a case as the ops take it. Its field ``norms=False``: heads are only rotated.

    norms  (q_weight, k_weight, eps)
    """

    case: Case
    qkv: torch.Tensor | DeferredNorm
    norms: tuple[torch.Tensor | None, torch.Tensor | None, float]
    angles: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(
        cls,
        case: Case,
        qkv: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        angles: torch.Tensor,
        *more: torch.Tensor,
    ) -> Projection:
        """The projection of what ``draw_projection`` drew."""
        given = qkv if case.field("squares") is None else DeferredNorm(qkv, more[0], case.eps)
        weights = (None, None) if case.field("norms") is False else (q_weight, k_weight)
        return cls(case, given, (*weights, case.eps), angles, more[-1] if case.field("bias") else None)

    def heads(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(queries, keys, values) [T, heads, D] in fp64: normalised and rotated."""
        q_heads, heads, D, _ = self.case.sizes
        deferred = isinstance(self.qkv, DeferredNorm)
        x = (self.qkv.scaled if deferred else self.qkv).double()
        x = x.sum(0) if x.dim() == 3 else x
        if deferred:
            x = x * (self.qkv.squares.double().sum(-1, keepdim=True) + self.case.eps).rsqrt()
        if self.bias is not None:
            x = x + self.bias.double()
        q, k, v = x.view(x.shape[0], q_heads + 2 * heads, D).split([q_heads, heads, heads], dim=1)
        cos, sin = (half[:, None] for half in self.angles.double()[positions.long()].chunk(2, dim=-1))

        def rotated(y: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
            if weight is not None:
                y = self.case.exact_norm(y, weight)
            a, b = y.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

        q_weight, k_weight, _ = self.norms
        return rotated(q, q_weight), rotated(k, k_weight), v


def decoding_cases(op: str, split_kv: type) -> Iterator[Case]:
    """Cases of one new token of each sequence. split_kv: the type of the design."""
    split = split_kv(block_n=16, least=16, splits=8, num_warps=1)
    for lengths, spare in (((1,), 0), ((0, 63, 64, 65, 128), 0), ((1000,), 4), ((0, 1, 700), 1)):
        yield case_of(op, QWEN, lengths=lengths, spare=spare)
    for lengths, design in (
        ((300, 15), split_kv(block_n=128, least=128, splits=3, num_warps=8, num_stages=2)),
        ((513,), split_kv(block_n=32, least=32, splits=3, num_warps=2)),
        ((640,), split_kv(block_n=16, least=16, splits=40, num_warps=1)),
    ):
        yield case_of(op, QWEN, design, lengths=lengths)
    yield case_of(op, SMALL, lengths=(0, 0, 0))
    for lengths, spare in (((15, 16, 17, 31, 32, 33), 0), ((256,), 0), ((255, 1, 0, 47), 3)):
        yield case_of(op, SMALL, split, lengths=lengths, spare=spare)
    for heads in HEADS:
        yield case_of(op, heads, split, lengths=(0, 1, 77, 160))
        yield case_of(op, heads, lengths=(500,), spare=2)
    # Windows of a token, within a block, of whole blocks and not, of a whole sequence and beyond it, over many partials.
    for window, lengths in (
        (1, (0, 1, 16, 17)),
        (7, (6, 7, 8, 23, 33)),
        (16, (15, 16, 17, 32)),
        (40, (39, 40, 41, 0, 300)),
        (77, (77, 160, 76)),
        (100, (60,)),
    ):
        yield case_of(op, SMALL, split, lengths=lengths, window=window)
    # Six and three query heads of 256: keys are multiplied by queries.
    for heads, options in (
        (((6, 1, 256, 16), BF16), {"window": 40}),
        (HEADS[6], {"sinks": True, "softcap": 2.0}),
        (((6, 1, 256, 16), BF16), {"window": 40, "sinks": True, "softcap": 2.0}),
    ):
        yield case_of(op, heads, split, lengths=(0, 39, 40, 41, 160), **options)
    for heads, window, design in (
        (QWEN, 100, split_kv(block_n=128, least=128, splits=3, num_warps=8, num_stages=2)),
        (QWEN, 64, split_kv(block_n=16, least=16, splits=3, num_warps=1)),
        (HEADS[1], 90, split_kv(block_n=64, least=64, splits=2)),
        (HEADS[-2], 33, "auto"),
    ):
        yield case_of(op, heads, design, lengths=(300, 0, 513), window=window, spare=1)
    yield case_of(op, QWEN, lengths=(200, 3), window=150)
    # Over many partials, which count a sink once; in a window that begins in a late one; without any key.
    for heads, kind in OF_SCORES:
        yield case_of(op, heads, split, lengths=(0, 1, 33, 160), **kind)
        yield case_of(op, heads, split, lengths=(160, 41), window=40, **kind)
    if op == "paged_attention":
        yield case_of(op, ((4, 1, 64, 16), FP16), split, lengths=(0, 70), fp8=True)
        yield case_of(op, QWEN, lengths=(130, 1), window=90, fp8=True)
    yield case_of(op, SMALL, lengths=(20, 16), window=32)


def verifying_cases(op: str, split_kv: type) -> Iterator[Case]:
    """Cases of several new tokens of a sequence, whose lengths follow each other; 0: no token."""
    split = split_kv(block_n=16, least=16, splits=8, num_warps=1)
    for heads, kind in OF_SCORES:
        yield case_of(op, heads, split, lengths=(16, 17, 18, 64, 0, 0), queries=3, **kind)
    yield case_of(op, QWEN, split, lengths=(60, 61, 62, 0), queries=4, sinks=True, softcap=1.5)
    for lengths, queries in (((1, 2), 2), ((15, 16, 17, 32, 33, 0, 0, 0, 0), 3), ((300, 301, 302, 0), 4)):
        yield case_of(op, SMALL, split, lengths=lengths, queries=queries)
    # Tokens of a sequence in one program and in several, the last with fewer; groups of 1, 3, 4 and 8 query heads.
    for heads in (QWEN, HEADS[1], HEADS[4], HEADS[6]):
        yield case_of(op, heads, split, lengths=(*range(70, 75), 17, 18, 0, 0, 0), queries=5)
    yield case_of(op, QWEN, lengths=(*range(500, 509), *range(1, 10)), queries=9, spare=1)
    # More pairs than share out their new tokens: one tile of many rows.
    yield case_of(op, QWEN, lengths=(30, 31, 32, 100, 101, 0) * 5, queries=3)
    # Windows that begin within a block and before it for tokens of one program.
    for window, lengths in ((1, (16, 17, 18)), (16, (15, 16, 17, 300, 301, 0)), (40, (39, 40, 41, 80, 81, 82))):
        yield case_of(op, SMALL, split, lengths=lengths, window=window, queries=3)
    yield case_of(op, QWEN, lengths=(200, 201, 3, 0), window=150, queries=2)
    yield case_of(op, QWEN, split, lengths=(300, 301, 302, 76, 77, 78, 20, 0, 0), window=77, queries=3)
    yield case_of(op, QWEN, lengths=(130, 131, 1, 2), window=90, queries=2, fp8=True)


def large_decoding_cases(op: str) -> Iterator[Case]:
    """Batches of a model's steps."""
    for heads in (QWEN, ((32, 4, 128, 64), BF16)):
        for batch, length in ((1, 128), (1, 40000), (32, 1024), (128, 128), (300, 50)):
            yield case_of(op, heads, lengths=lengths_of(batch, length))
        if op == "paged_attention":
            for batch, length in ((1, 40000), (32, 1024), (128, 129)):
                yield case_of(op, heads, lengths=lengths_of(batch, length), fp8=True)
        for batch, length in ((1, 20000), (32, 5000)):
            yield case_of(op, heads, lengths=lengths_of(batch, length), window=4096)


def sharded_cases(op: str, one_kernel: type, two_kernels: type, split_kv: type) -> Iterator[Case]:
    """Cases of new tokens over a cache at several ranks. The types of the two designs, and of their split."""
    wide = split_kv(block_n=32, least=32, splits=3, num_warps=2, num_stages=2)
    for w in (1, 2, 3, 4, 8):
        # A round of pages and one more token, no token; one token, a token less than a round.
        yield sharded_case(op, w, ((2 * w, 1, 16, 16), BF16), "one_kernel", (16 * w + 1, 0))
        yield sharded_case(op, w, ((2 * w, 1, 16, 16), BF16), "two_kernels", (1, 16 * w - 1), spare=1)
    yield sharded_case(op, 2, ((16, 1, 32, 16), BF16), one_kernel(split=wide), (150,))
    yield sharded_case(op, 2, ((4, 2, 16, 16), FP16), two_kernels(split=wide), (90,), huge=20)
    yield sharded_case(op, 2, ((4, 1, 64, 32), FP32), "auto", (65,))
    yield sharded_case(op, 2, ((4, 1, 32, 16), BF16), "auto", (40,), fp8=True)
    # A window within a page of one rank, and one from within a block on, over several partials.
    yield sharded_case(op, 2, ((4, 1, 16, 16), BF16), "one_kernel", (40, 0, 7), window=9)
    yield sharded_case(op, 3, ((3, 1, 32, 16), BF16), two_kernels(split=wide), (200,), window=150)
    # A sink counts once among ranks and partials, in the window too.
    yield sharded_case(op, 2, ((4, 1, 16, 16), FP32), "one_kernel", (40, 0, 7), window=9, sinks=True)
    yield sharded_case(op, 3, ((3, 1, 32, 16), BF16), two_kernels(split=wide), (200, 1), sinks=True, softcap=1.5)


def more_sharded_cases(op: str, one_kernel: type, two_kernels: type, split_kv: type) -> Iterator[Case]:
    """Groups of 1, 4, 8 and 16 query heads, ragged lengths, one huge score, at each number of ranks."""
    split = split_kv(block_n=16, least=16, splits=4, num_warps=1)
    for w in (1, 2, 3, 4, 8):
        for q_heads, heads, lengths in (
            (24, 24, (16 * w + 1,)),
            (24, 6, (0, 16 * w - 1)),
            (24, 3, (1, 16 * w)),
            (48, 3, (100, 16 * w + 1, 0)),
        ):
            for design in ("two_kernels", two_kernels(split=split)):
                yield sharded_case(op, w, ((q_heads, heads, 32, 16), BF16), design, lengths, spare=2, huge=16 * w)
        for heads in (((48, 1, 64, 16), FP16), ((24, 2, 16, 64), FP32), ((24, 2, 256, 16), BF16)):
            for design in ("one_kernel", one_kernel(split=split)):
                lengths = (0,) if heads[0][1] == 2 else (40 * w + 3, 17)
                yield sharded_case(op, w, heads, design, lengths, huge=1)
                yield sharded_case(op, w, heads, design, (50 * w,), spare=1)
                for window in (1, 16, 16 * w + 1, 30 * w):
                    yield sharded_case(op, w, heads, design, (40 * w + 3,), window=window)
                if heads[1] != FP32:
                    yield sharded_case(op, w, heads, design, (16 * w + 1,), fp8=True)


def sharded_case(
    op: str,
    world_size: int,
    heads: tuple[tuple[int, ...], torch.dtype],
    design: Any,
    lengths: tuple[int, ...],
    **fields: Any,
) -> Case:
    """A case whose sizes are (query heads, KV heads, head dim, page size)."""
    return replace(case_of(op, heads, design, lengths=lengths, **fields), world_size=world_size)


def invariant_cases(op: str, fixed_runs: type) -> Iterator[Case]:
    """Cases of sums in an order of positions alone. fixed_runs: the type of the design."""
    small, split = (
        {"block_n": 16, "run": run, "programs": programs, "num_warps": 1} for run, programs in ((48, 1), (32, 3))
    )
    decoding = op == "paged_attention"

    def of(heads: tuple, design: Any, lengths: tuple[int, ...], **fields: Any) -> Case:
        if not decoding:
            chunks = tuple((1, cdiv(length, 3), length - cdiv(length, 3)) for length in lengths)
            return case_of(op, heads, design, chunks=chunks, **fields)
        return case_of(op, heads, design, lengths=lengths, **fields)

    yield of(QWEN, "auto", (0, 63, 64, 130), spare=1, invariant=True)
    yield of(SMALL, "auto", (15, 16, 17, 0, 33), invariant=True)
    for design in (fixed_runs(**small), fixed_runs(**split), fixed_runs(**split, num_stages=2)):
        yield of(SMALL, design, (0, 1, 47, 48, 49, 160))
        yield of(SMALL, design, (160, 41, 0), window=40)
    yield of(QWEN, fixed_runs(run=64, programs=4), (0, 1, 64, 65, 300))
    yield of(SMALL, fixed_runs(**split, early=64), (0, 1, 16, 17, 63, 64, 65, 96, 97, 160))
    yield of(SMALL, fixed_runs(**split, early=64), (160, 90, 65, 41), window=40)
    for heads in (HEADS[1], HEADS[6]):
        yield of(heads, fixed_runs(block_n=32, run=64, programs=2, num_warps=4), (1, 77, 160))
    for heads, kind in OF_SCORES:
        yield of(heads, fixed_runs(**split), (0, 1, 33, 160), **kind)
        yield of(heads, fixed_runs(**small), (160, 41), window=40, **kind)
    yield of(((4, 1, 64, 16), FP16), fixed_runs(**split), (0, 70), fp8=True)
    if decoding:
        yield case_of(op, SMALL, fixed_runs(**split), lengths=(15, 16, 17, 98, 99, 0, 0, 0, 0), queries=3)
        yield case_of(op, QWEN, fixed_runs(**split), lengths=(*range(70, 79), *range(1, 10)), queries=9)
        yield case_of(op, QWEN, lengths=(60, 61, 1, 0), queries=2, invariant=True)
        yield case_of(op, ((20, 1, 16, 16), FP32), lengths=(33, 0), invariant=True)
    else:
        yield case_of(op, QWEN, chunks=((1, 50, 30), (2, 3, 0)), room=(20, 2), invariant=True)
