"""Others' algorithms for dispatch and combine, written anew on weft's primitives.

sorted-blocks       rows sorted by expert, then a block of them to each rank, behind it the counts of its experts and a signal
triton-distributed  each row to a slot of its expert, which an atomic gives out; behind a barrier of the grid counts and signals

Both send a row for each choice, k rows a token; weft's own ops send one to each rank that needs it. What they receive is what
the grouped GEMMs of their projects take. Epochs and halves of buffers are weft's (weft.ops.moe.exchange), so that both can be
captured in CUDA graphs, several programs send a block, and there is room for all rows: they differ from the originals there, in
their favour.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.bench.harness.provider import Prepared, Provider
from weft.bench.ops.moe_baselines import all_ids, exchange_of, mine, sorted_pairs, weighted_sum, written
from weft.bench.ops.problem import OpProblem
from weft.ops.moe.exchange import Halves, begin_call, end_call
from weft.ops.moe.routing import Experts
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_of

# Programs that send a block of the exchange of sorted blocks; all programs of Triton-distributed's.
PARTS, PROGRAMS, WARPS = 16, 128, 8


class Mailbox(NamedTuple):
    """One half of the receive buffers, symmetric.

    rows    [W, rows, H] blocks of ranks, or [experts of a rank, W, tokens, H] slots of experts
    counts  int32 [W, experts of a rank]; pairs: int32, beside each slot the sender's pair, or None
    """

    rows: torch.Tensor
    counts: torch.Tensor
    pairs: torch.Tensor | None = None


def mailboxes(team: Any, name: str, dtype: torch.dtype, shape: tuple[int, ...], held: int, flags: int) -> Halves:
    """Two halves of ``Mailbox`` with rows of ``shape``, and ``flags`` flags of each rank."""
    shapes = {"rows": (shape, dtype), "counts": ((team.size, held), torch.int32)}
    if len(shape) == 4:
        shapes["pairs"] = (shape[:3], torch.int32)
    return team.workspace((name, dtype, shape), lambda: Halves.make(team, flags, shapes))


# --- sorted blocks: an all-to-all of blocks of rows --------------------------------------------------------------------------


@triton.jit
def blocks_kernel(
    rows, ends, counts, mail, flags, team, H, MOST: tl.constexpr, HELD: tl.constexpr, PARTS: tl.constexpr
):
    """mail.rows[me] at each rank p = this rank's rows ends[p - 1] .. ends[p] - 1

    grid: (W * PARTS,), PARTS programs a block

    rows [n, H] by rank; ends int32 [W], where each rank's end; counts int32 [W, HELD], rows of each expert; MOST: of a block

    signals   those of ``begin_call``; then arrived[me, part] = call at p, behind its part of the block
    waits     that of ``begin_call``; at the end arrived[p, part] >= call
    reuse     as of moe_dispatch_kernel
    """
    world: tl.constexpr = wl.num_ranks(team)
    me, part = wl.rank(team), tl.program_id(0) % PARTS
    peer = (me + 1 + tl.program_id(0) // PARTS) % world
    wl.follow_previous_kernel()
    now = begin_call(flags, team)
    first = tl.load(ends + peer - 1, mask=peer > 0, other=0)
    share = tl.cdiv(tl.load(ends + peer) - first, PARTS)
    begin = tl.minimum(part * share, tl.load(ends + peer) - first)
    count = tl.minimum(share, tl.load(ends + peer) - first - begin)
    target = mail.rows + (me * MOST + begin).to(tl.int64) * H
    wl.put(target, rows + (first + begin).to(tl.int64) * H, count.to(tl.int64) * H, peer, team)
    if part == 0:
        wl.put(mail.counts + me * HELD, counts + peer * HELD, HELD, peer, team)
    if peer != me:
        wl.notify(flags.arrived + me * PARTS + part, peer, now, team)
        wl.wait(flags.arrived + peer * PARTS + part, now, team)
    end_call(flags, now)


def exchange_blocks(
    team: Any, name: str, rows: torch.Tensor, ends: torch.Tensor, counts: torch.Tensor, most: int
) -> Mailbox:
    """Blocks of all ranks [W, most, H], and the counts of this rank's experts."""
    H, held, parts = rows.shape[1], counts.shape[1], max(1, min(PARTS, team.max_programs(WARPS) // team.size))
    halves = mailboxes(team, name, rows.dtype, (team.size, most, H), held, parts)
    buffers, flags = halves.next()
    mail = Mailbox(*buffers)
    constants = {"MOST": most, "HELD": held, "PARTS": parts}
    options = {"num_warps": WARPS, "launch_cooperative_grid": True, **launch_options(team.caps)}
    launch = launch_of(team, blocks_kernel, (most, held), lambda: {**constants, **options})
    launch(team.size * parts, rows, ends, counts, mail, flags, team.view, H)
    return mail


def blocks_dispatch(problem: OpProblem) -> Prepared:
    """Sort and copy by expert, then blocks."""
    team, (T, k, total, _) = problem.team, problem.case.sizes
    buffers, everything = [x.clone() for x, *_ in problem.sets], Experts.slices(total)

    def run(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, ids = buffers[number], problem.sets[number][1]
        pairs, ends = sorted_pairs(ids, everything)
        counts = ends.diff(prepend=ends[:1] * 0).view(team.size, -1)
        of_ranks = ends.view(team.size, -1)[:, -1].contiguous()
        mail = exchange_blocks(team, "blocks_dispatch", x.index_select(0, pairs // k), of_ranks, counts, T * k)
        return mail.counts, mail.rows

    def compare(out: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, Any]:
        found = [block[: int(counts.sum())] for counts, block in zip(*out, strict=True)]
        return torch.cat(found), problem.answer()[0][exchange_of(all_ids(problem, 0), problem).arriving // k]

    return Prepared(run=run, prepare=written(problem, buffers), compare=compare)


def blocks_combine(problem: OpProblem) -> Prepared:
    """Blocks back, with counts known from the dispatch; then the weighted sum."""
    team, (T, k, total, _) = problem.team, problem.case.sizes
    buffers, me, everything = [y.clone() for y, *_ in problem.sets], team.rank, Experts.slices(total)
    exchanges = [exchange_of(ids, problem) for _, ids, _ in problem.sets]
    where = {"dtype": torch.int32, "device": team.device}
    ends = [torch.tensor(one.of, **where).cumsum(0).int() for one in exchanges]
    none = torch.zeros((team.size, total // team.size), **where)
    # Place of each of this rank's pairs among the blocks that come back.
    places = []
    for one in exchanges:
        within = [torch.arange(count, device=team.device) + rank * T * k for rank, count in enumerate(one.to)]
        places.append(torch.cat(within)[one.sent.argsort()])
    add = weighted_sum if team.is_simulated else torch.compile(weighted_sum, dynamic=False)

    def run(number: int) -> torch.Tensor:
        y, own = buffers[number], slice(me * T, (me + 1) * T)
        rows = y.index_select(0, exchanges[number].arriving)
        back = exchange_blocks(team, "blocks_combine", rows, ends[number], none, T * k).rows.flatten(0, 1)
        _, ids, weights = problem.sets[number]
        return add(back.index_select(0, places[number]), ids[own], weights[own], everything)

    return Prepared(run=run, prepare=written(problem, buffers))


# --- Triton-distributed's ------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["T"])
def slots_kernel(
    x, ids, T, taken, barrier, mail, flags, team, H, K: tl.constexpr, HELD: tl.constexpr, MOST: tl.constexpr
):
    """mail.rows[e, me, slot] at the rank of each expert e of token t = x[t]

    grid: (programs,), over pairs

    taken  int32 [W * HELD], slots taken at each expert, 0 before and after: in the order of the atomics
    MOST   tokens of a rank; barrier: counter of ``wl.grid_barrier``

    signals   those of ``begin_call``; behind a barrier of the grid arrived[me, e] = call at e's rank, with the count
    waits     that of ``begin_call``; at the end arrived[s, e] >= call of all ranks and experts
    reuse     as of moe_dispatch_kernel
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    wl.follow_previous_kernel()
    now = begin_call(flags, team)
    for pair in range(program, T * K, programs):
        id = tl.load(ids + pair)
        if id >= 0:
            slot = ((id % HELD) * world + me) * MOST + tl.atomic_add(taken + id, 1, sem="relaxed")
            wl.put(mail.rows + slot.to(tl.int64) * H, x + (pair // K).to(tl.int64) * H, H, id // HELD, team)
            tl.store(wl.symm_at(mail.pairs, id // HELD, team) + slot, pair)
    wl.quiet(team)  # of this program's puts, whose arrival another one signals
    wl.grid_barrier(barrier, team)
    for id in range(program, world * HELD, programs):
        count = tl.load(taken + id)
        tl.store(wl.symm_at(mail.counts, id // HELD, team) + me * HELD + id % HELD, count)
        tl.store(taken + id, 0)
        wl.notify(flags.arrived + me * HELD + id % HELD, id // HELD, now, team)
    for source in range(program, world * HELD, programs):
        wl.wait(flags.arrived + source, now, team)
    end_call(flags, now)


@triton.jit(do_not_specialize=["tokens"])
def back_kernel(
    y, arriving, owners, n, ids, weights, out, tokens, barrier, mail, flags, team, H,
    K: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over choices j of weights[t, j] * the row that the choice's rank sends

    grid: (programs,)

    y         rows by pair of all ranks' tokens; arriving, owners: the n pairs that are this rank's to send, and whose they are
    ids, weights [tokens, K] of this rank's tokens; out [tokens, H]; mail.rows [1, MOST * K, H], a row for each own pair

    signals   those of ``begin_call``; behind a barrier of the grid arrived[me] = call at every rank
    waits     that of ``begin_call``; arrived[s] >= call of every rank before the sums
    reuse     as of moe_combine_kernel
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    wl.follow_previous_kernel()
    now = begin_call(flags, team)
    for number in range(program, n, programs):
        pair, owner = tl.load(arriving + number), tl.load(owners + number)
        wl.put(mail.rows + (pair % (MOST * K)) * H, y + pair * H, H, owner, team)
    wl.quiet(team)  # of this program's puts, whose arrival another one signals
    wl.grid_barrier(barrier, team)
    for peer in range(program, world, programs):
        wl.notify(flags.arrived + me, peer, now, team)
    for source in range(0, world):
        wl.wait(flags.arrived + source, now, team)
    for token in range(program, tokens, programs):
        for begin in range(0, H, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            for j in range(K):
                pair = token * K + j
                mask = (column < H) & (tl.load(ids + pair) >= 0)
                row = tl.load(mail.rows + pair.to(tl.int64) * H + column, mask=mask, other=0.0).to(tl.float32)
                total += row * tl.load(weights + pair).to(tl.float32)
            tl.store(out + token.to(tl.int64) * H + column, total.to(out.dtype.element_ty), mask=column < H)
    end_call(flags, now)


def slots_dispatch(problem: OpProblem) -> Prepared:
    """Rows to their slots, in one kernel."""
    team, (T, k, total, H) = problem.team, problem.case.sizes
    buffers, held = [x.clone() for x, *_ in problem.sets], total // team.size
    shape, name = (held, team.size, T, H), "triton_distributed_dispatch"
    halves = mailboxes(team, name, problem.dtype, shape, held, held)
    state = team.workspace((name, total), lambda: (team.local(total, torch.int32), team.local((1,), torch.int64)))
    options = {"num_warps": WARPS, "launch_cooperative_grid": True, **launch_options(team.caps)}
    launch = launch_of(team, slots_kernel, (k, held, T), lambda: {"K": k, "HELD": held, "MOST": T, **options})

    def run(number: int) -> tuple[torch.Tensor, ...]:
        half, flags = halves.next()
        mail, ids = Mailbox(*half), problem.sets[number][1]
        launch(min(PROGRAMS, team.max_programs(WARPS)), buffers[number], ids, T, *state, mail, flags, team.view, H)
        return mail.counts, mail.pairs, mail.rows

    def compare(out: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
        found, (counts_of, pairs_of, rows_of) = [], out
        for of_expert, pairs, counts in zip(rows_of, pairs_of, counts_of.T, strict=True):
            for rows, order, count in zip(of_expert, pairs, counts.tolist(), strict=True):
                found.append(rows[:count][order[:count].argsort()])  # slots were taken in any order
        order = sorted_pairs(all_ids(problem, 0), mine(problem))
        return torch.cat(found), problem.answer()[0][order.pairs[: int(order.ends[-1])] // k]

    return Prepared(run=run, prepare=written(problem, buffers), compare=compare)


def slots_combine(problem: OpProblem) -> Prepared:
    """Rows back to their pairs and the weighted sum, in one kernel; the pairs are known from the dispatch."""
    team, (T, k, _, H) = problem.team, problem.case.sizes
    buffers, name = [y.clone() for y, *_ in problem.sets], "triton_distributed_combine"
    own, block = slice(team.rank * T, (team.rank + 1) * T), min(1024, triton.next_power_of_2(H))
    halves = mailboxes(team, name, problem.dtype, (1, T * k, H), 1, 1)
    barrier = team.workspace((name, "barrier"), lambda: team.local((1,), torch.int64))
    arriving = [exchange_of(ids, problem).arriving for _, ids, _ in problem.sets]
    options = {"num_warps": WARPS, "launch_cooperative_grid": True, **launch_options(team.caps)}
    launch = launch_of(team, back_kernel, (k, T, block), lambda: {"K": k, "MOST": T, "BLOCK": block, **options})

    owners = [pairs // (T * k) for pairs in arriving]

    def run(number: int) -> torch.Tensor:
        y, (_, ids, weights), pairs = buffers[number], problem.sets[number], arriving[number]
        half, flags = halves.next()
        out, of_rank = y.new_empty((T, H)), (ids[own], weights[own])
        sent = y, pairs, owners[number], len(pairs)
        launch(
            min(PROGRAMS, team.max_programs(WARPS)),
            *sent,
            *of_rank,
            out,
            T,
            barrier,
            Mailbox(*half),
            flags,
            team.view,
            H,
        )
        return out

    return Prepared(run=run, prepare=written(problem, buffers))


def _provider(op: str, name: str, make: Any) -> Provider:
    return Provider(name=name, ops=(op,), role="other", make=make)


MOE_PORTS = (
    _provider("moe-dispatch", "sorted-blocks", blocks_dispatch),
    _provider("moe-combine", "sorted-blocks", blocks_combine),
    _provider("moe-dispatch", "triton-distributed", slots_dispatch),
    _provider("moe-combine", "triton-distributed", slots_combine),
)
