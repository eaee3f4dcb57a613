"""gathered_prefill_attention: causal attention of prompts whose tokens are sharded over ranks zig-zag.

Three designs. "gathered": copy engines bring the other ranks' keys and values while attention, of this rank's queries with all
heads, begins with local keys and awaits each chunk. "pipelined": the same with cuDNN's attention, a call for each rank's keys
(``pipelined_prefill``). "ulysses": every rank computes its share of the heads of all tokens, between a sequence_to_heads and a
heads_to_sequence, which nothing hides.

Causal attention needs no key after the query: the second stripe of rank s never goes to ranks above s, which saves a quarter
of the traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from weft.kernels.paged_cache import PagedCache
from weft.kernels.tile_schedule import buffer_of
from weft.ops.attention import cases
from weft.ops.attention.attention_op import check_scale
from weft.ops.attention.gathered_plan import (
    Gathered,
    GatheredArguments,
    GatheredCall,
    GatheredPlan,
    Pipelined,
    Ulysses,
    check_sharing,
)
from weft.ops.attention.paged_prefill_attention import KeyBlocks
from weft.ops.attention.pipelined_prefill import attend_between_copies
from weft.ops.attention.stripes import Stripes, attend
from weft.ops.attention.zigzag import ZigzagRanges, ZigzagShards
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs
from weft.ops.collectives.heads import HEADS_TO_SEQUENCE, SEQUENCE_TO_HEADS
from weft.ops.local import check_like, check_shape
from weft.ops.op import register
from weft.ops.registration import FLOATS, check_choice, check_flag, check_team, check_tensor
from weft.plan.planned import AUTO, machine_of
from weft.runtime.arithmetic import cdiv
from weft.runtime.team.team import find_team
from weft.runtime.team.workspace import grown_workspace
from weft.transport.copy_channel import CopyChannel

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


def gathered_prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shards: ZigzagRanges | Sequence[int],
    team: Team,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    algorithm: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q @ k.T * scale) @ v, causal -> [T, Hq, D], of sequences sharded over the ranks. Collective.

    q           [T, Hq, D], fp16, bf16 or fp32: this rank's tokens, as ``ZigzagShards.take`` gives them; T may be 0
    k, v        [T, Hkv, D] of q's dtype, of the same tokens; query head h attends to KV head h * Hkv // Hq
    shards      tokens of each sequence, equal on all ranks; or their ZigzagRanges, which many calls share
    scale       positive; D ** -0.5 where None
    return_lse  return (out, lse): lse fp32 [T, Hq], the log of the sum of exp(score * scale) of each row
    algorithm   "auto", "gathered", "ulysses", which needs W to divide Hkv, or "pipelined", which is cuDNN's attention of one
                sequence in fp16 or bf16, D at most 128

    Hkv divides Hq; D is a power of two from 16 to 256. Softmax and sums in fp32; results are the same bits from run to run,
    but not in all algorithms. Captured in a CUDA graph it replays correctly with these ZigzagRanges, after one call outside.
    All but "ulysses" keep two receive buffers of the other ranks' keys and values in the heap. No backward. ValueError for
    arguments that do not fit; HeapExhausted.
    """
    op = "gathered_prefill_attention"
    check_team(op, team)
    check_tensor(op, "q", q, team, FLOATS)
    check_shape(op, "q", q, ("T", "Hq", "D"))
    for name, x in (("k", k), ("v", v)):
        check_tensor(op, name, x, team, (q.dtype,))
        check_shape(op, name, x, (q.shape[0], "Hkv" if name == "k" else k.shape[1], q.shape[2]))
    (_, q_heads, D), kv_heads = q.shape, k.shape[1]
    check_sharing(op, q_heads, kv_heads, D)
    if not isinstance(shards, ZigzagRanges):
        try:
            shards = ZigzagRanges.make(shards, team.rank, team.size, q_heads // kv_heads, q.dtype).to(team.device)
        except ValueError as error:
            raise ValueError(f"{op}: shards: {error}") from None
    check_like(op, "shards.stripes", shards.stripes, team.device, (torch.int32,))
    of, here = shards.shards, (shards.shards.world_size, shards.rank, shards.own.group)
    if here != (team.size, team.rank, q_heads // kv_heads):
        raise ValueError(
            f"{op}: shards are for (world_size, rank, query heads of a KV head) {here}, and the call has "
            f"{(team.size, team.rank, q_heads // kv_heads)}; make them for it"
        )
    if q.shape[0] != shards.own.tokens:
        raise ValueError(
            f"{op}: q has {q.shape[0]} tokens and rank {team.rank} of shards {shards.own.tokens}; take them with "
            f"ZigzagShards.take"
        )
    check_scale(op, scale)
    check_flag(op, "return_lse", return_lse)
    check_choice(op, "algorithm", algorithm, GATHERED_PREFILL_ATTENTION.algorithms)
    tables = [shards.own.spans, shards.own.tiles, shards.every.spans, shards.every.tiles, shards.stripes]
    scale = D**-0.5 if scale is None else scale
    sizes = of.rows, shards.own.block_m, scale, return_lse
    out, lse = GATHERED_PREFILL_ATTENTION.dispatch(GatheredArguments(q, k, v, tables, *sizes, team.name, algorithm))
    return (out, lse) if return_lse else out


class GatheredPrefillAttention(GatheredPlan):
    """sizes of a case: q_heads, kv_heads, D. Its field ``lengths`` has the tokens of each sequence.

    sampled  field of a case for benchmarks: a few rows are checked, since the reference computes all scores of a row
    """

    # Tokens of the rank, and the tables and blocks of its queries.
    differs = {"q": (0,), "k": (0,), "v": (0,), "tables": (), "block_m": ()}

    # --- running -----------------------------------------------------------------------------------------------------

    def run(
        self, design: Gathered | Ulysses | Pipelined, team: Team, given: GatheredArguments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of checked arguments; lse is [0] unless ``return_lse``."""
        self.check_design(design)
        q, k, v = (x.detach().contiguous() for x in given[:3])
        given, W, rows = given._replace(q=q, k=k, v=v), team.size, given.rows
        tokens = [rows[rank] + rows[2 * W - 1 - rank] for rank in range(W)]
        if W == 1 and isinstance(design, Pipelined):
            return attend_between_copies(team, given, None, None)
        if W == 1:
            return self._local(design, team, given)
        if isinstance(design, Ulysses):
            return self._by_heads(design, team, given, tokens)
        chunk = cdiv(max(1, *tokens), design.chunks if isinstance(design, Gathered) else 1)
        channel, received = self._gather(chunk, team, k, v, tokens, rows)
        if isinstance(design, Gathered):
            peers, stripes = PagedCache(received[0], received[1]), given.tables[4]
            keys = Stripes(PagedCache(k, v), peers, stripes, stripes.shape[1], max(1, *tokens), chunk)
            out, lse = attend(design.blocks, team, given, keys, given.tables[:2], channel)
        else:
            out, lse = attend_between_copies(team, given, received, channel)
        team.copy_engine.join()
        return out, lse

    def _local(
        self, design: Gathered | Ulysses, team: Team, given: GatheredArguments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to keys that are all here."""
        own, stripes = PagedCache(given.k, given.v), given.tables[4]
        keys = Stripes(own, own, stripes, stripes.shape[1], 0, 1)
        return attend(design.blocks, team, given, keys, given.tables[2:4], None)

    def _by_heads(
        self, design: Ulysses, team: Team, given: GatheredArguments, tokens: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange tokens for heads, attend, and exchange back."""
        xs = list(given[:3])
        q, k, v = SEQUENCE_TO_HEADS.run(SEQUENCE_TO_HEADS.plan_of(xs, tokens, team, AUTO), team, xs, tokens)
        out, lse = self._local(design, team, given._replace(q=q, k=k, v=v))
        results = [[out], [lse[..., None]]][: 1 + given.return_lse]
        ways = [HEADS_TO_SEQUENCE.plan_of(one, tokens, team, AUTO) for one in results]
        back = [HEADS_TO_SEQUENCE.run(way, team, one, tokens)[0] for way, one in zip(ways, results, strict=True)]
        return back[0], back[1][..., 0] if given.return_lse else lse

    def _gather(
        self, chunk: int, team: Team, k: torch.Tensor, v: torch.Tensor, tokens: Sequence[int], rows: Sequence[int]
    ) -> tuple[CopyChannel, torch.Tensor]:
        """Begin a call: have copy engines push k and v to the ranks that need them, by chunks of tokens.

        Rank r serves r - 1, r - 2, … (mod W): the peer that needs its keys next is first. Returns the channel and the receive
        buffers [2, W - 1, most tokens of a rank, Hkv, D], keys and values.
        """
        W, me, room = team.size, team.rank, max(1, *tokens)
        row = k.shape[1] * k.shape[2]
        size = 2 * (W - 1) * room * row

        def make(capacity: int) -> CopyChannel:
            return CopyChannel.make(team, team.empty((2, capacity), k.dtype, name=self.name), W)

        channel = grown_workspace(team, (self.name, k.dtype), size, make)
        received = channel.begin(team)[:size].view(2, W - 1, room, *k.shape[1:])
        team.copy_engine.fork()
        for step in range(1, W):
            peer = (me - step) % W
            sent = (
                tokens[me] if peer < me else rows[me]
            )  # not the second stripe, which all of the peer's queries precede
            panels = received[:, buffer_of.fn(me, peer, W)]
            for number, first in enumerate(range(0, sent, chunk)):
                piece = slice(first, min(first + chunk, sent))
                team.copy_engine.put(panels[0, piece], k[piece], peer)
                channel.send(team, panels[1, piece], v[piece], me, number, peer)
        return channel, received

    def forward(self, given: GatheredArguments) -> tuple[torch.Tensor, torch.Tensor]:
        team, (_, heads, D), sequences = find_team(given.team), given.q.shape, given.tables[4].shape[1]
        sizes = sum(given.rows), heads, given.k.shape[1], D
        call = GatheredCall(*sizes, given.q.dtype, given.algorithm, sequences)
        return self.run(self.plan(call, machine_of(team)).design, team, given)

    def fake(self, given: GatheredArguments) -> tuple[torch.Tensor, torch.Tensor]:
        q = given.q
        lse = q.new_empty(q.shape[:2] if given.return_lse else 0, dtype=torch.float32)
        return torch.empty_like(q, memory_format=torch.contiguous_format), lse

    # --- judging -----------------------------------------------------------------------------------------------------

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """q, k and v of this rank's tokens."""
        q_heads, kv_heads, D = case.sizes
        T = _shards_of(case).tokens[rank]
        q, k, v = (draw.own(name, (T, heads, D)) for name, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads)))
        if case.field("huge") == rank and T > 0:  # one score above the rest
            k[0] *= 100
        return q, k, v

    def case_of(self, shape: Sequence[int], dtype: torch.dtype, world_size: int, **fields: Any) -> Case:
        tokens, *sizes = shape
        return self.case(world_size, dtype, sizes, **{"lengths": (tokens,), "sampled": True, **fields})

    def flops(self, sizes: Sequence[int]) -> int:
        """Operations of all ranks together."""
        tokens, q_heads, _, head_dim = sizes
        return 2 * q_heads * tokens * (tokens + 1) * head_dim

    def traffic_of(self, case: Case) -> int:
        """Keys and values that leave the rank with the most peers to send its second stripe to."""
        rows, W, (_, kv_heads, D) = _shards_of(case).rows, case.world_size, case.sizes
        sent = max((W - 1) * rows[rank] + rank * rows[2 * W - 1 - rank] for rank in range(W))
        return 2 * sent * kv_heads * D * case.dtype.itemsize

    def moved_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """Keys and values of all tokens."""
        tokens, _, kv_heads, head_dim = sizes
        return 2 * tokens * kv_heads * head_dim * dtype.itemsize

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        shards = _shards_of(case)
        q, k, v = (shards.join(torch.cat(parts)) for parts in zip(*by_rank, strict=True))
        if case.field("sampled"):
            tokens = shards.indices(rank)
            places = tokens[sample_of(len(tokens))].tolist()
            rows = [cases.attended(q[at : at + 1], k[: at + 1], v[: at + 1], at) for at in places]
            return torch.cat(rows) if rows else q[:0].double()
        out, first = torch.zeros(q.shape, dtype=torch.float64, device=q.device), 0
        for length in shards.lengths:
            one = slice(first, first + length)
            out[one] = cases.attended(q[one], k[one], v[one], 0)
            first += length
        return shards.take(out, rank)

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(terms=max(case.field("lengths")) + case.sizes[2], partials=1, by_row=True)

    def arguments(self, case: Case, team: Team, *tensors: torch.Tensor) -> tuple[Any, ...]:
        q, k, _ = tensors
        sizes = case.field("lengths"), team.rank, team.size, q.shape[1] // k.shape[1], q.dtype

        def make() -> ZigzagRanges:
            return ZigzagRanges.make(*sizes, block_m=case.field("block_m")).to(q.device)

        # Kept, since a CUDA graph that captures a call holds them.
        return *tensors, team.workspace((self.name, "ranges", *sizes, case.field("block_m")), make)

    def results(self, case: Case, team: Team, *arguments: Any) -> torch.Tensor:
        q, k, v, shards = arguments
        if isinstance(case.design, str):
            return gathered_prefill_attention(q, k, v, shards, team, algorithm=case.design)
        tables = [shards.own.spans, shards.own.tiles, shards.every.spans, shards.every.tiles, shards.stripes]
        fixed = shards.shards.rows, shards.own.block_m, q.shape[2] ** -0.5, False, team.name, AUTO
        return self.run(case.design, team, GatheredArguments(q, k, v, tables, *fixed))[0]

    def defined(self, case: Case, team: Team, out: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return out[sample_of(len(out)).to(out.device)] if case.field("sampled") else out

    def call(self, case: Case, team: Team, *tensors: torch.Tensor) -> torch.Tensor:
        return self.results(case, team, *self.arguments(case, team, *tensors))

    def cases(self) -> Iterator[Case]:
        few = KeyBlocks(block_n=16, num_warps=1, num_stages=2)

        def case(w: int, sizes: tuple[int, ...], dtype: torch.dtype, design: Any, *lengths: int, **fields: Any) -> Case:
            return self.case(w, dtype, sizes, design, lengths=lengths, **fields)

        for w in (1, 2, 3, 4, 8):
            # A rank without tokens; stripes of one; a stripe that is cut by one token between two chunks.
            lengths = (2 * w - 1, 0, 4 * w + 1) if w < 8 else (19,)
            yield case(w, (2, 1, 16), BF16, Gathered(chunks=3, blocks=few), *lengths, block_m=16)
        for w in (2, 3):
            yield case(w, (2 * w, w, 16), FP16, Ulysses(blocks=few), 1, 5 * w, block_m=16)
        yield case(2, (4, 2, 16), BF16, "gathered", 1)
        yield case(2, (2, 2, 16), FP32, Gathered(chunks=1, blocks=few), 50, block_m=16)
        yield case(2, (2, 1, 16), BF16, Gathered(chunks=8, blocks=few), 40, block_m=16, huge=1)
        yield case(2, (2, 2, 64), FP16, "ulysses", 0, 20)
        yield case(2, (2, 1, 128), BF16, AUTO, 20, 9)
        for w, length in ((1, 11), (2, 21), (2, 1), (3, 40), (4, 5), (8, 19)):
            yield case(w, (4, 2, 16), FP16 if w == 3 else BF16, "pipelined", length)
        yield case(2, (2, 1, 64), BF16, Pipelined(), 40, huge=1)

    def large_cases(self) -> Iterator[Case]:
        for w in (2, 4):
            for sizes in ((16, 4, 128), (8, 8, 64)):
                for design in ("gathered", "ulysses", "pipelined"):
                    for lengths in ((4096,), (3001,) if design == "pipelined" else (3000, 1, 777, 128)):
                        yield self.case(w, BF16, sizes, design, lengths=lengths)


GATHERED_PREFILL_ATTENTION = register(GatheredPrefillAttention())


def sample_of(count: int) -> torch.Tensor:
    """int64: up to 16 rows of ``count``, the first and the last among them."""
    return torch.linspace(0, max(0, count - 1), min(16, count)).long()


def _shards_of(case: Case) -> ZigzagShards:
    return ZigzagShards(lengths=case.field("lengths"), world_size=case.world_size)
