"""Behaviour of teams and primitives on any device: mains for virtual ranks and for GPUs.

Each returns a list of what went wrong on this rank, so that one launch can run many of them and keep going.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.errors import AllocationMismatch, NotSymmetric
from weft.language.shmem import CMP_GE, SIGNAL_ADD


@triton.jit
def push_all_gather(x, out, landed, epoch, team, N: tl.constexpr):
    me = wl.rank(team)
    now = wl.next_epoch(epoch)
    offsets = tl.arange(0, N)
    for step in tl.static_range(wl.num_ranks(team)):
        peer = (me + step) % wl.num_ranks(team)
        tl.store(wl.symm_at(out, peer, team) + me * N + offsets, tl.load(x + offsets))
        wl.notify(landed + me, peer, now, team)
    for peer in tl.static_range(wl.num_ranks(team)):
        wl.wait(landed + peer, now, team)
    wl.advance_epoch(epoch, now)


def tiles_pushed_behind_a_signal(team):
    """Stores to every peer, a notify, a wait, device-side epochs, three calls with other data."""
    n, wrong = 256, []
    x = torch.empty(n, dtype=torch.bfloat16, device=team.device)
    out, landed = team.empty((team.size, n)), team.signals(team.size, name="landed")
    epoch = team.local(2, torch.int32)
    for call in range(3):
        x.fill_(10 * call + team.rank)
        push_all_gather[(1,)](x, out, landed, epoch, team.view, n)
        expected = [10.0 * call + rank for rank in range(team.size)]
        if out.float().mean(1).tolist() != expected or out.float().std(1).any():
            wrong.append(f"call {call}: {out.float().mean(1).tolist()}, not {expected}")
        team.barrier()  # the next call writes the same buffer
    return wrong


@triton.jit
def bulk_primitives(source, target, signals, n, team):
    me = wl.rank(team)
    right = (me + 1) % wl.num_ranks(team)
    wl.put_signal(target, source, n, signals, 1, right, team, BLOCK=16)
    wl.wait(signals, 1, team)
    wl.barrier(team)
    wl.get(target + 64, source, n, right, team, BLOCK=16)
    wl.shmem.putmem_signal_block(target + 128, source, 2 * n, signals + 1, 1, SIGNAL_ADD, right, team)
    wl.shmem.putmem_signal_nbi_block(target + 192, source, 2 * n, signals + 1, 1, SIGNAL_ADD, right, team)
    wl.shmem.signal_wait_until(signals + 1, CMP_GE, 2, team)
    wl.shmem.int_p(signals + 2, 40 + me, right, team)
    wl.shmem.barrier_all_block(team)


def puts_and_gets(team):
    """put_signal, get, barrier and their OpenSHMEM names, for sizes around a block."""
    wrong = []
    left, right = (team.rank - 1) % team.size, (team.rank + 1) % team.size
    for n in (1, 16, 37, 64):
        source, target = team.empty(64), team.zeros(256)
        signals = team.signals(4, name="signals")
        source.copy_(torch.arange(64) + 100 * (team.rank % 2))
        team.barrier()
        bulk_primitives[(1,)](source, target, signals, n, team.view)
        got = target.float().view(4, 64).cpu()
        for row, origin in enumerate([left, right, left, left]):
            expected = torch.cat([torch.arange(n) + 100.0 * (origin % 2), torch.zeros(64 - n)]).bfloat16().float()
            if not torch.equal(got[row], expected):
                wrong.append(f"n={n} row {row}: {got[row].tolist()}")
        if signals.tolist() != [1, 2, 40 + left, 0]:
            wrong.append(f"n={n} signals {signals.tolist()}")
        for tensor in (source, target, signals):
            team.free(tensor)
    return wrong


@triton.jit
def barrier_many_times(board, out, team, ROUNDS: tl.constexpr):
    me = wl.rank(team)
    world: tl.constexpr = wl.num_ranks(team)
    row = board + tl.program_id(0) * world
    bad = 0
    for round in range(1, ROUNDS + 1):
        for peer in tl.static_range(world):
            tl.store(wl.symm_at(row + me, peer, team), round)
        wl.barrier(team)
        for peer in tl.static_range(world):
            bad += (tl.load(row + peer, volatile=True) < round).to(tl.int32)
        wl.barrier(team)
    tl.store(out + tl.program_id(0), bad)


def barriers(team):
    """Barriers make the earlier stores of all ranks visible, twice in a row and in several programs."""
    programs = min(4, team.max_programs(4))
    board = team.zeros((programs, team.size), torch.int32)
    out = team.local(programs, torch.int32)
    for _ in range(2):
        board.zero_()
        team.barrier()
        barrier_many_times[(programs,)](board, out, team.view, 5)
    return [f"stale reads after a barrier: {out.tolist()}"] if out.any() else []


@triton.jit
def lamport_exchange(x, inbox, out, team, N: tl.constexpr):
    offsets = tl.arange(0, N)
    right = (wl.rank(team) + 1) % wl.num_ranks(team)
    wl.lamport_store(wl.symm_at(inbox, right, team) + offsets, tl.load(x + offsets), offsets < N)
    tl.store(out + offsets, wl.lamport_load(inbox + offsets, offsets < N, team))


def data_that_are_their_own_flag(team):
    """Lamport data may be zeros of both signs, infinities and NaN."""
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        special = torch.tensor([-0.0, 0.0, float("inf"), float("-inf"), float("nan"), -1.5, 3.0, 1e-7])
        values = special.repeat(64).to(dtype).to(team.device)
        inbox = team.empty(512, dtype).fill_(-0.0)
        out = torch.empty(512, dtype=dtype, device=team.device)
        team.barrier()
        lamport_exchange[(1,)](values, inbox, out, team.view, 512)
        if not torch.equal(out.nan_to_num(7.0), values.nan_to_num(7.0)):
            wrong.append(f"{dtype}: {out[:8].tolist()}")
    return wrong


@triton.jit
def wait_and_sum(data, landed, epoch, out, team, N: tl.constexpr):
    now = wl.next_epoch(epoch)
    wl.wait(landed, now, team)
    tl.store(out, tl.sum(tl.load(data + tl.arange(0, N)).to(tl.float32)))
    wl.advance_epoch(epoch, now)


def flags_behind_copies(team):
    """A kernel that waits for the copy engine's flag finds the data; get reads a peer's."""
    wrong = []
    left, right = (team.rank - 1) % team.size, (team.rank + 1) % team.size
    n = 4096
    data, landed = team.empty(n, name="data"), team.signals(1, name="landed")
    epoch, word = team.local(2, torch.int32), team.local(1, torch.int32)
    out = torch.zeros(1, device=team.device)
    source = torch.empty(n, dtype=torch.bfloat16, device=team.device)
    for call in range(1, 4):
        source.fill_(call * (team.rank + 1))
        word.fill_(call)
        engine = team.copy_engine
        engine.fork()
        engine.put(data, source, right)
        engine.signal(landed, word, right)
        wait_and_sum[(1,)](data, landed, epoch, out, team.view, n)
        engine.join()
        if out.item() != n * call * (left + 1):
            wrong.append(f"call {call}: {out.item()}, not {n * call * (left + 1)}")
        team.barrier()
    fetched = torch.empty(n, dtype=torch.bfloat16, device=team.device)
    team.copy_engine.fork()
    team.copy_engine.get(fetched, data, right)
    team.copy_engine.join()
    if fetched[0].item() != 3.0 * (team.rank + 1):
        wrong.append(f"get: {fetched[0].item()}")
    return wrong


@triton.jit
def push_chunks(x, out, got, landed, team, N: tl.constexpr):
    """Send one chunk of N elements for each program to every rank."""
    call = wl.next_call(landed)
    me, chunk, at = wl.rank(team), tl.program_id(0), tl.arange(0, N)
    row, world = tl.num_programs(0) * N, wl.num_ranks(team)
    half = out + call.now % 2 * world * row
    for step in range(world):
        peer = (me + step) % world
        tl.store(wl.symm_at(half, peer, team) + me * row + chunk * N + at, tl.load(x + chunk * N + at))
        wl.chunk_notify(call, peer, chunk, team)
    for step in range(world):
        source = (me + step) % world
        wl.chunk_wait(call, source, chunk, team)
        there = source * row + chunk * N + at
        tl.store(got + there, tl.load(half + there))
    wl.advance_call(call)


def chunks_of_kernels(team):
    """A channel of kernels alone, in four calls with other data and alternating halves of the buffer."""
    n, chunks, wrong = 16, 3, []
    out, landed = team.empty((2, team.size, chunks * n), torch.float32), team.channel(4, name="landed")
    x = torch.empty(chunks * n, device=team.device)
    got = torch.empty((team.size, chunks * n), device=team.device)
    for call in range(1, 5):
        x.fill_(10.0 * call + team.rank)
        push_chunks[(chunks,)](x, out, got, landed.view, team.view, n)
        expected = [10.0 * call + rank for rank in range(team.size)]
        if got.mean(1).tolist() != expected or got.std(1).any():
            wrong.append(f"call {call}: {got.mean(1).tolist()}, not {expected}")
    return wrong


@triton.jit
def sum_chunks(data, out, landed, team, CHUNKS: tl.constexpr, N: tl.constexpr):
    call, at, total = wl.current_call(landed), tl.arange(0, N), tl.zeros((N,), tl.float32)
    left = (wl.rank(team) + wl.num_ranks(team) - 1) % wl.num_ranks(team)
    for chunk in tl.static_range(CHUNKS):
        wl.chunk_wait(call, left, chunk, team)
        total += tl.load(data + chunk * N + at)
    tl.store(out, tl.sum(total))


def chunks_of_copy_engines(team):
    """A channel that the host begins and the copy engine of the left neighbour fills."""
    n, chunks, wrong = 256, 4, []
    left, right = (team.rank - 1) % team.size, (team.rank + 1) % team.size
    data, landed = team.empty((chunks, n), torch.float32, name="data"), team.channel(chunks)
    source, out = torch.empty((chunks, n), device=team.device), torch.zeros(1, device=team.device)
    for call in range(1, 4):
        source.fill_(call * (team.rank + 1))
        landed.begin()
        team.copy_engine.fork()
        for chunk in range(chunks):
            landed.send(data[chunk], source[chunk], right, chunk)
        sum_chunks[(1,)](data, out, landed.view, team.view, chunks, n)
        team.copy_engine.join()
        if out.item() != chunks * n * call * (left + 1):
            wrong.append(f"call {call}: {out.item()}, not {chunks * n * call * (left + 1)}")
        team.barrier()  # the next call writes the same buffer
    return wrong


def allocation_errors(team):
    """Ranks that allocate differently all raise an error, and the team stays usable."""
    wrong = []
    try:
        team.empty(8 if team.rank == 0 or team.size == 1 else 4)
        if team.size > 1:
            wrong.append("a mismatch went unnoticed")
    except AllocationMismatch as error:
        if f"rank {team.rank}" not in str(error):
            wrong.append(str(error))
    try:
        team.at_peer(torch.zeros(3, device=team.device), (team.rank + 1) % team.size if team.size > 1 else 0)
        if team.size > 1:
            wrong.append("an ordinary tensor was taken for a symmetric one")
    except NotSymmetric:
        pass
    return wrong


@triton.jit
def push_to_next(x, team, N: tl.constexpr):
    me = wl.rank(team)
    right = (me + 1) % wl.num_ranks(team)
    tl.store(wl.symm_at(x, right, team) + tl.arange(0, N), (me + 1).to(x.dtype.element_ty))


def fresh_tensors_are_pushed_into(team):
    """Tensors of ``empty`` exist on all ranks: a push may arrive before the peer's call has returned.

    Also in the bytes of a tensor that was freed, and in a team within the team.
    """
    wrong, inner = [], team.subset(list(range(team.size)), heap_bytes=4 << 20)
    for group in (team, inner):
        for attempt in range(2):
            x = group.empty(64, torch.float32, name="x")
            push_to_next[(1,)](x, group.view, 64)
            group.barrier()
            expected = (group.rank - 1) % group.size + 1.0
            if not x.eq(expected).all():
                wrong.append(f"{group.name}, attempt {attempt}: {x.tolist()}, not {expected}")
            group.free(x)
    inner.close()
    return wrong


def teams_within_the_team(team):
    """A subset has its own ranks, heap and signals."""
    if team.size < 2:
        return []
    inner = team.subset([0, team.size - 1], heap_bytes=4 << 20)
    if inner is None:
        return []
    wrong = [] if inner.rank == (team.rank > 0) else [f"rank {team.rank} has become {inner.rank}"]
    wrong += tiles_pushed_behind_a_signal(inner)
    inner.close()
    return wrong


@triton.jit
def put_nothing(target, source, count, landed, team):
    peer = (wl.rank(team) + 1) % wl.num_ranks(team)
    wl.put_signal(target, source, count, landed, 1, peer, team, BLOCK=16)
    wl.put_signal_nbi(target, source, count, landed + 1, 1, peer, team, BLOCK=16)
    wl.quiet(team)
    wl.wait(landed, 1, team)
    wl.wait(landed + 1, 1, team)


def sends_of_nothing(team):
    """Sends of pieces without elements, for which torch's address is 0, send their signals; puts of them do nothing."""
    half, own = team.zeros(8, torch.float32, name="half"), torch.arange(8.0, device=team.device)
    channel, landed, empty = team.channel(3), team.signals(2), team.empty((3, 0), torch.float32)
    peer, source = (team.rank + 1) % team.size, (team.rank - 1) % team.size
    channel.begin()
    team.copy_engine.fork()
    for chunk, (target, piece) in enumerate([(half[2:2], own[2:2]), (half[8:], own[8:]), (empty, own[:0])]):
        channel.send(target, piece, peer, chunk)
    team.copy_engine.put(own[4:4], own[4:4], peer)
    team.copy_engine.get(own[4:4], half[8:], peer)
    team.copy_engine.join()
    put_nothing[(1,)](half[2:2], own[3:3], 0, landed, team.view)
    team.barrier()
    symmetric = [team.is_symmetric(x) for x in (half[2:2], half[8:], empty, own[4:4])]
    shapes = [tuple(team.at_peer(x, peer).shape) for x in (half[2:2], empty)]
    team.free(empty)
    seen = half.sum().item(), channel.signals[source].tolist(), landed.tolist(), symmetric, shapes
    wanted = 0.0, [1, 1, 1], [1, 1], [True, True, True, False], [(0,), (3, 0)]
    return [] if seen == wanted else [f"{seen}, not {wanted}"]


ALL = [
    tiles_pushed_behind_a_signal, puts_and_gets, barriers, data_that_are_their_own_flag, flags_behind_copies,
    chunks_of_kernels, chunks_of_copy_engines, allocation_errors, fresh_tensors_are_pushed_into, teams_within_the_team,
    sends_of_nothing,
]  # fmt: skip


def run_all(team):
    """{name: what went wrong}, for GPU launches that do all of it in one process group."""
    return {check.__name__: check(team) for check in ALL}


@triton.jit
def wait_for_nobody(landed, team):
    if wl.rank(team) == 0:
        wl.wait(landed + 1, 5, team)


def wait_in_vain(team, folder):
    """Rank 0 waits for a signal that no rank sends; each rank's error goes into a file.

    The GPU cannot be used afterwards.
    """
    landed = team.signals(2, name="landed")
    try:
        wait_for_nobody[(1,)](landed, team.view)
        team.barrier()
    except Exception as error:
        with open(f"{folder}/rank{team.rank}", "w") as file:
            file.write(f"{type(error).__name__}: {error}")
        raise
