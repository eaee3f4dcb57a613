"""sharded_decode_attention: attention of new tokens to a KV cache that is spread over ranks.

    out[b, j] = softmax(q[b, h] . keys of b at all ranks * scale) @ their values        h = rank * Hq / W + j: own heads

Every rank has the queries of all heads and some pages of every sequence (weft.kernels.block_cyclic). It attends to its pages by
split-KV partials, as ``paged_attention`` does, and pushes the mean and the log of the sum of weights of each head to the head's
owner, which merges the parts of all ranks in their order.

Over nodes the kernels run within each, on the pages of its ranks: heads of rank (k, l) come to rank (j, l) of every node j. It
sends node j's mean and log of the sum of weights over its rail, once; rank (k, l) merges the nodes' parts in their order.

one_kernel   | attend | join partials | push heads | receive own heads, merge |       the program that joins a pair receives it
two_kernels  | attend | join partials | push heads |    then    | receive, merge |    where not all programs are resident
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.block_cyclic import local_length, local_lengths
from weft.kernels.merged_parts import kept_of, merged
from weft.kernels.online_softmax import DecodeTile, ScoreRule, attend, sinks_at, ways
from weft.kernels.paged_cache import CacheSizes, PagedCache, Sequences, as_values, pages_at, scale_of_scores
from weft.kernels.split_kv import joined, split_count, store_partial
from weft.ops.attention import cases
from weft.ops.attention.attention_op import check_heads, check_scores, check_sequences, hiding
from weft.ops.attention.decoding import SplitKV, scratch_of, tile_of
from weft.ops.attention.fp8_cache import cache_of, check_queries, quantized_cache, read_back
from weft.ops.attention.head_words import (
    MERGE_WARPS,
    MERGED_HEADS,
    HeadSizes,
    end_put_heads,
    merge_heads_kernel,
    owner_of,
    places_of_words,
    receive_heads,
    send_heads,
    words_of,
)
from weft.ops.attention.merge_attention import merge_attention
from weft.ops.attention.qk_norm_rope import check_cache
from weft.ops.attention.sharded_plan import (
    OneKernel,
    ShardedCall,
    ShardedPlan,
    TwoKernels,
    attended_tokens,
    resident_programs,
    room_of,
)
from weft.ops.case import BF16, FP16, Accuracy, Case, Draw, Inputs
from weft.ops.collectives.over_nodes import OverNodes, packed, swapped, unpacked
from weft.ops.local import check_shape, compiler_options
from weft.ops.op import register
from weft.ops.registration import FLOATS, check_choice, check_team, check_tensor
from weft.plan.planned import AUTO, machine_of
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_of
from weft.runtime.team.team import find_team

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@triton.jit(do_not_specialize=["max_pages"])
def sharded_attention_kernel(
    q,
    cache,
    sequences,
    out,
    partials,
    max_pages,
    scores,
    words,
    team,
    SIZES: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    FUSED: tl.constexpr,
):
    """out[b, j, :] = own head j's attention to sequence b at all ranks    grid: (B * kv_heads, splits)

    ``paged_attention_kernel`` over this rank's tokens, up to the join of a pair's partials. The program that joins pushes the
    pair's heads to their owners; if FUSED, it then receives the pair's own heads from all ranks and stores them. Else
    ``merge_heads_kernel`` does so, and ``out`` is not touched.

    sequences    ``Sequences``: this rank's pages, and lengths of the whole sequences
    TILE         ``DecodeTile``; its window counts the tokens of all ranks. This rank's come in their order, so those in the
                 window are its last ones, from ``begin`` on
    scores       ``ScoreRule``; a sink is counted by partial 0 of the team's first rank
    words, HEADS ``HeadWords`` and ``HeadSizes``; one rank alone in one kernel: not used

    signals   to the owner of each head: its words of this rank (Lamport), an empty part too
    waits     FUSED: words of every other rank for the pair's own heads, pushed by the program that joins this pair there. That
              one waits for nothing before its push but for the end of the programs of its pair
    reuse     two halves, in turn for each pair. A receiver clears words as it reads them. Let c0, c1, c2 be calls that push a
              pair, one after the other. In c1 this rank received words from every rank, since each rank owns heads of each
              sequence. That rank had pushed them after its call c0, so after it had read and cleared the words of c0, which
              call c2 writes over. Smaller batches leave pairs out on all ranks alike, since all make the same calls
    progress  FUSED: all programs of the grid are resident (``OneKernel``); else programs wait for none of this kernel
    """
    pair, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    sequence, head = pair // SIZES.heads, pair % SIZES.heads
    row, column = tl.arange(0, TILE.rows), tl.arange(0, SIZES.dim)[None, :]
    queries = q + pair.to(tl.int64) * (TILE.group * SIZES.dim)
    table = sequences.pages + sequence.to(tl.int64) * max_pages
    first = split * TILE.block_n
    me, ranks = wl.rank(team), wl.num_ranks(team)
    wl.follow_previous_kernel()
    length = tl.load(sequences.lengths + sequence)
    begin = None
    if TILE.window is not None:
        begin = held_of(tl.maximum(length - TILE.window, 0), me, ranks, SIZES, HEADS)
        first += begin // TILE.block_n * TILE.block_n
    page = pages_at(table, first, max_pages * SIZES.page, ways(TILE.block_n, TILE.ways), SIZES.page)
    x = tl.load(queries + row[:, None] * SIZES.dim + column, mask=(row < TILE.group)[:, None], other=0.0)
    scale, inner, sink = scores.scale, scores.inner, None
    if inner is None:
        scale = scale_of_scores(scale, cache)
    else:
        inner = scale_of_scores(inner, cache)
    if scores.sinks is not None:
        counted = (row < TILE.group) & (split == 0) & (me == 0) & (HEADS.node == 0)
        sink = sinks_at(scores.sinks, head * TILE.group + row, counted)
    length = tl.minimum(held_of(length, me, ranks, SIZES, HEADS), max_pages * SIZES.page)
    if TILE.window is None:
        count = split_count(length, splits, TILE)
    else:
        count = split_count(length - begin, splits, TILE)
    if split < count:
        stride = count * TILE.block_n
        began = wl.begin_tile(team)
        mean, log_sum = attend(
            x, cache, table, page, head, first, length, stride, scale, SIZES, TILE, begin, None, inner, sink
        )
        wl.end_tile(began, pair, split, team)
        if TILE.split:
            if store_partial(mean, log_sum, count, partials, TILE):
                tl.store(partials.arrivals + pair, 0)
                place = pair.to(tl.int64) * splits * TILE.group
                means, log_sums = partials.means + place * SIZES.dim, partials.log_sums + place
                JOINED: tl.constexpr = triton.next_power_of_2(TILE.group)
                # Loaded before the partials, so as not to wait for them in line.
                half, places = next_places(words, team, JOINED, SIZES.dim, HEADS, FUSED)
                largest, total, acc = joined(means, log_sums, count, TILE.group, SIZES.dim, TILE.joined)
                whole = as_values(acc / tl.where(total == 0, 1.0, total)[:, None], cache)
                of_whole = tl.where(total == 0, float("-inf"), largest + tl.log2(total))
                exchange_heads(whole, of_whole, half, places, out, words, team, HEADS, FUSED, TILE.ways)
        else:
            half, places = next_places(words, team, TILE.kept, SIZES.dim, HEADS, FUSED)
            whole, of_whole = as_values(mean, cache), kept_of(log_sum, TILE.kept)
            exchange_heads(whole, of_whole, half, places, out, words, team, HEADS, FUSED, TILE.ways)


@triton.jit
def held_of(length, me, ranks, SIZES: tl.constexpr, HEADS: tl.constexpr):
    """Tokens at this rank of the first ``length`` of a sequence."""
    if HEADS.nodes > 1:
        return local_length(length, HEADS.node * ranks + me, HEADS.nodes * ranks, SIZES.page)
    else:
        return local_length(length, me, ranks, SIZES.page)


@triton.jit
def next_places(words, team, ROWS: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, FUSED: tl.constexpr):
    """(half of this call, ``places_of_words``) of pair program_id(0); (0, 0) where nothing is sent."""
    if FUSED and wl.num_ranks(team) == 1:
        return 0, 0
    else:
        half = tl.load(words.halves + tl.program_id(0))
        return half, places_of_words(half, words, team, ROWS, D, HEADS, not FUSED)


@triton.jit
def exchange_heads(
    mean, log_sum, half, places, out, words, team, HEADS: tl.constexpr, FUSED: tl.constexpr, WARPS: tl.constexpr
):
    """Push pair program_id(0), mean [ROWS, D] and log_sum [ROWS], to its heads' owners.

    FUSED: then receive and store the heads that it owns. half, places: of ``next_places``
    """
    D: tl.constexpr = mean.shape[1]
    world: tl.constexpr = wl.num_ranks(team)
    pair, row = tl.program_id(0), tl.arange(0, mean.shape[0])
    alone: tl.constexpr = FUSED and world == 1
    if not alone:
        began = wl.begin_put(team)
        send_heads(mean, log_sum, places)
        end_put_heads(began, D, half, words, team, HEADS)
        tl.debug_barrier()  # all threads have read the half before it changes
        tl.store(words.halves + pair, 1 - half)
    if FUSED:
        owner, place = owner_of(row, world, HEADS)
        first, me = pair % HEADS.kv_heads * HEADS.group, wl.rank(team)
        wanted = (row < HEADS.group) & (owner == me)
        if (first // HEADS.own <= me) & (me <= (first + HEADS.group - 1) // HEADS.own):
            whole = mean
            if not alone:
                whole = merged(receive_heads(mean, log_sum, place, wanted, half, pair, words, team, HEADS, True, WARPS))
            target = out + (place.to(tl.int64) * D)[:, None] + tl.arange(0, D)[None, :]
            tl.store(target, whole.to(out.dtype.element_ty), mask=wanted[:, None])


def sharded_decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    team: Team,
    scale: float | None = None,
    window: int | None = None,
    algorithm: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [B, Hq / W, D] of new tokens to all ranks' tokens, for this rank's heads. Collective.

    q             [B, Hq, D], fp16, bf16 or fp32: the queries of all heads, equal on all ranks
    keys, values  [P, Hkv, S, D], contiguous, of q's dtype or e4m3: this rank's pages, with all KV heads; query head h
                  attends to KV head h * Hkv // Hq
    pages         [B, local_pages] int32, of one shape on all ranks: page p of sequence b is pages[b, p // W] of rank p % W
    lengths       [B] int32: tokens of the whole sequences, the new one included; equal on all ranks, at most local_pages * S on
                  any. 0, a padding row: zeros
    scale         D ** -0.5 where None
    window        a token attends to this many tokens of all ranks, itself the last, 1 or more; None: to all. Pages
                  before the window are not read
    algorithm     "auto", "one_kernel" (all programs resident, of one node) or "two_kernels"
    k_scale, v_scale  of a cache in e4m3, for q in 16 bits: fp32, 1 element each, on the device, positive; a key is its byte
                  times k_scale, a value its byte times v_scale: each rank's are of the bytes that it holds
    softcap       positive; softcap * tanh(score / softcap) in place of a score, after ``scale``
    sinks         [Hq], fp16, bf16 or fp32: one more score of each row, without a value. Of all heads, equal on all ranks

    Rank r gets heads r * Hq / W and on: the ones whose rows of the output projection it holds. Hkv divides Hq, W divides Hq,
    groups have at most 64 heads; D and S are powers of two from 16 to 256. Softmax and sums in fp32, the parts of ranks merged
    in rank order: the same bits from run to run. Another W gives other bits. A row whose scores are all -inf gets zeros.
    ``pages`` and the cache beyond a length, and the cache before a window, do not change a result. The host reads no lengths or
    pages: values out of range, and lengths that differ between ranks, are not refused. Captured in a CUDA graph it follows
    growing lengths, after one call outside with these sizes. No backward. ValueError for arguments that do not fit.
    """
    op = "sharded_decode_attention"
    check_team(op, team, over_nodes=True)
    check_tensor(op, "q", q, team, FLOATS, over_nodes=True)
    check_cache(op, keys, values, q, k_scale, v_scale)
    check_queries(op, q, k_scale)
    D = keys.shape[3]
    check_shape(op, "q", q, ("B", "Hq", D))
    check_heads(op, q.shape[1], keys)
    check_own_heads(op, q.shape[1], team.size)
    sequences = Sequences(pages, lengths)
    check_sequences(op, sequences, len(q), q.device, columns="local_pages")
    check_scores(op, q.shape[1], q.device, window, scale, softcap, sinks)
    check_choice(op, "algorithm", algorithm, SHARDED_DECODE_ATTENTION.algorithms)
    scale = D**-0.5 if scale is None else scale
    places = keys, values, sequences
    return SHARDED_DECODE_ATTENTION.dispatch(
        ShardedArguments(q, *places, scale, team.name, algorithm, k_scale, v_scale, window, softcap, sinks)
    )


class ShardedArguments(NamedTuple):
    """Arguments of sharded_decode_attention."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    sequences: Sequences
    scale: float
    team: str
    algorithm: str
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class Attending(NamedTuple):
    """Checked arguments as the kernels take them. window: None where it hides no token."""

    q: torch.Tensor
    cache: PagedCache
    sequences: Sequences
    scores: ScoreRule
    window: int | None = None


def check_own_heads(op: str, q_heads: int, world_size: int) -> None:
    """ValueError unless each rank can own the same number of query heads."""
    if q_heads % world_size:
        raise ValueError(
            f"{op}: q has {q_heads} heads, which world_size={world_size} ranks cannot share evenly; use a W that divides them"
        )


def long_tile_of(split: SplitKV, group: int, D: int, window: int | None = None) -> DecodeTile:
    """``tile_of`` with more partials joined at a time, since contexts are long here. Not measured."""
    joined = 4096 * split.num_warps // (next_power_of_2(group) * D)  # 128 registers a thread
    return tile_of(split, group=group, D=D, window=window)._replace(joined=max(1, min(16, joined)))


class ShardedDecodeAttention(ShardedPlan):
    """Decode attention over a cache that is spread over ranks, by the plan of its base."""

    differs = {"keys": (0,), "values": (0,), "k_scale": (0,), "v_scale": (0,)}  # pages of the rank

    # --- running -----------------------------------------------------------------------------------------------------

    def run(self, design: OneKernel | TwoKernels | OverNodes, team: Team, given: Attending) -> torch.Tensor:
        """``sharded_decode_attention`` of checked arguments.

        ValueError for one_kernel if not all programs are resident.
        """
        self.check_design(design)
        (B, q_heads, D), kv_heads = given.q.shape, given.cache.key_pages.shape[1]
        if B == 0:
            return given.q.new_empty((B, q_heads // team.size, D))
        if not isinstance(design, OverNodes):
            heads = HeadSizes.of(q_heads, kv_heads, B, team.size)
            return self._run_in_node(design, team, given, heads)[0]
        heads = HeadSizes.of(q_heads, kv_heads, B, team.size, team.shape.nodes, team.rail.index)
        return self._run_over_nodes(design, team, given, heads)

    def _run_over_nodes(self, design: OverNodes, team: Team, given: Attending, heads: HeadSizes) -> torch.Tensor:
        """Merge of the nodes' parts, each of which has crossed once."""
        results = self._run_in_node(design.node.design, team.node, given, heads)
        of_nodes = [[x.unflatten(1, (heads.nodes, heads.own))[:, node] for x in results] for node in range(heads.nodes)]
        local, parts = of_nodes[heads.node], {}
        for node, piece in swapped(team, [packed(part) for part in of_nodes], design.node):
            parts[node] = unpacked(piece, local)
        return merge_attention(*(torch.stack(x) for x in zip(*(parts[node] for node in sorted(parts)), strict=True)))[0]

    def _run_in_node(
        self, design: OneKernel | TwoKernels, team: Team, given: Attending, heads: HeadSizes
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out [B, held, D], natural log of the sum of weights [B, held], or None in a team of one node)."""
        q, cache, sequences, scores, window = given
        (B, _, D), sizes, fused = q.shape, CacheSizes.of(cache.key_pages), isinstance(design, OneKernel)
        out = q.new_empty((B, heads.held, D))
        lse = q.new_empty((B, heads.held), dtype=torch.float32) if heads.nodes > 1 else None
        split, pairs = design.split, B * sizes.heads
        if fused and team.size > 1:
            resident = resident_programs(split, D, cache.key_pages.itemsize, team.caps)
            most = min(resident, team.holds(split.num_warps))
            if pairs * split.splits > most:
                raise ValueError(
                    f"{self.name}: algorithm='one_kernel' has {pairs * split.splits} programs that wait for peers, and {most} "
                    f"are resident; use 'two_kernels'"
                )
        words, arrivals = words_of(team, heads, D, fused=fused)
        tile = long_tile_of(split, heads.group, D, window)
        attention = launch_of(
            team,
            sharded_attention_kernel,
            (split.block_n, split.least, split.splits > 1, split.num_warps, split.num_stages, sizes, heads, fused, window),
            lambda: {
                "SIZES": sizes, "TILE": tile, "HEADS": heads, "FUSED": fused, **compiler_options(split, team.caps),
            },
        )  # fmt: skip
        sequences = Sequences(sequences.pages.contiguous(), sequences.lengths.contiguous())
        partials = scratch_of(q, pairs, split.splits, arrivals)
        arguments = cache, sequences, out, partials, sequences.pages.shape[1], scores, words, team.view
        attention((pairs, split.splits), q.contiguous(), *arguments)
        if not fused:
            rows = min(MERGED_HEADS.value, next_power_of_2(heads.held))
            merge = launch_of(
                team,
                merge_heads_kernel,
                (heads, D),
                lambda: {
                    "HEADS": heads,
                    "ROWS": rows,
                    "D": D,
                    "num_warps": MERGE_WARPS.value,
                    **launch_options(team.caps),
                },
            )
            merge((B, cdiv(heads.held, rows)), out, lse, words, team.view)
        return out, lse

    def forward(self, given: ShardedArguments) -> torch.Tensor:
        team, q, keys, sequences = find_team(given.team), given.q, given.keys, given.sequences
        _, heads, page, D = keys.shape
        window = hiding(given.window, keys, sequences.pages, team.size)
        tokens = attended_tokens(sequences.pages.shape[1], page, window, team.size)
        call = ShardedCall(len(q) * heads, tokens, D, keys.dtype, given.algorithm)
        design = self.plan(call, machine_of(team)).design
        if given.algorithm == AUTO and not self.is_held(design, call, team):
            design = self.plan(call._replace(design="two_kernels"), machine_of(team)).design
        cache = cache_of(self.name, keys, given.values, given.k_scale, given.v_scale)
        scores = ScoreRule.of(given.scale, given.softcap, given.sinks)
        return self.run(design, team, Attending(q, cache, sequences, scores, window))

    def fake(self, given: ShardedArguments) -> torch.Tensor:
        B, q_heads, D = given.q.shape
        return given.q.new_empty((B, q_heads // find_team(given.team).size, D))

    # --- judging -----------------------------------------------------------------------------------------------------

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """q, this rank's cache and pages, lengths.

        Field huge: number of a token whose key is 64 times as large.
        """
        whole = torch.tensor(case.field("lengths"), dtype=torch.int32)
        page, room = case.sizes[3], room_of(case)
        counts = local_lengths(whole, rank, case.world_size, page).tolist()
        spare = room - max(1, max(cdiv(length, page) for length in counts))
        firsts = torch.tensor([cases.first_seen(case, length) for length in case.field("lengths")], dtype=torch.int32)
        firsts = local_lengths(firsts, rank, case.world_size, page).tolist()
        keys, values, pages = cases.draw_cache(draw, counts, [*zip(firsts, counts, strict=True)], spare=spare)
        if (huge := case.field("huge")) is not None and huge // page % case.world_size == rank:
            for table, length in zip(pages.tolist(), case.field("lengths"), strict=True):
                if huge < length:
                    keys[table[huge // page // case.world_size], :, huge % page] *= 64
        q = draw.shared("q", (len(whole), case.sizes[0], case.sizes[2]))
        held = keys, values, pages, whole.to(q.device)
        return (q, *quantized_cache(*held)) if case.field("fp8") else (q, *held)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        q, own = by_rank[rank][0], case.sizes[0] // case.world_size
        keys, values = zip(*(read_back(*inputs[1:3], *inputs[5:]) for inputs in by_rank), strict=True)
        tables = [inputs[3] for inputs in by_rank]
        options = case.field("window"), cases.scores_of(case, q)
        out = cases.attended_by_head(q, keys, values, tables, case.field("lengths"), *options)
        return out[:, rank * own : (rank + 1) * own].contiguous()

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(terms=max(case.field("lengths")) + case.sizes[2], partials=1, by_row=True)

    def call(self, case: Case, team: Team, q: torch.Tensor, *cache: torch.Tensor) -> torch.Tensor:
        if isinstance(case.design, str):
            named = dict(zip(("k_scale", "v_scale"), cache[4:], strict=False))
            options = {"window": case.field("window"), "algorithm": case.design, **named, **cases.scores_of(case, q)}
            return sharded_decode_attention(q, *cache[:4], team, **options)
        keys, values, pages, lengths, *scales = cache
        places = PagedCache(keys, values, *scales), Sequences(pages, lengths)
        scores = ScoreRule.of(q.shape[2] ** -0.5, **cases.scores_of(case, q))
        return self.run(case.design, team, Attending(q, *places, scores, case.field("window")))

    def cases(self) -> Iterator[Case]:
        return cases.sharded_cases(self.name, OneKernel, TwoKernels, SplitKV)

    def large_cases(self) -> Iterator[Case]:
        yield from cases.more_sharded_cases(self.name, OneKernel, TwoKernels, SplitKV)
        for w in (1, 2, 4):
            for heads in (((32, 4, 128, 64), BF16), ((24, 12, 128, 64), FP16)):
                for lengths in ((1,), (32769,), (40000, 0, 63, 65, 131, 7000), (3000,) * 64):
                    yield cases.sharded_case(self.name, w, heads, AUTO, lengths)


SHARDED_DECODE_ATTENTION = register(ShardedDecodeAttention())
