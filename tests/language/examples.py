"""An example for each group of primitives: kernels, and a ``check`` that runs them on every rank.

A kernel's name begins with the module that defines its primitives; docs/primitives.md shows the kernels.
"""

import torch
import triton
import triton.language as tl

import weft.language as wl

N = 64


@triton.jit
def coordinates(x, out, team):
    """out[s] = x of rank s, loaded from its memory"""
    for step in tl.static_range(wl.num_ranks(team)):
        peer = (wl.rank(team) + step) % wl.num_ranks(team)
        tl.store(out + peer, tl.load(wl.symm_at(x, peer, team)))


def check_coordinates(team):
    x, out = team.zeros((1,), torch.float32), torch.empty(team.size, device=team.device)
    x.fill_(team.rank)
    team.barrier()  # every rank's x is filled
    coordinates[(1,)](x, out, team.view)
    team.barrier()  # no rank frees x before it is read
    assert out.tolist() == list(range(team.size))


@triton.jit
def signals(x, inbox, arrived, out, team, n: tl.constexpr):
    """out[n] = x of the left neighbour"""
    at, right = tl.arange(0, n), (wl.rank(team) + 1) % wl.num_ranks(team)
    tl.store(wl.symm_at(inbox, right, team) + at, tl.load(x + at))
    wl.notify(arrived, right, 1, team)
    token = wl.wait(arrived, 1, team)
    tl.store(out + at, tl.load(wl.consume_token(inbox, token) + at))
    wl.barrier(team)  # every rank has read its inbox: the next message may be stored


def check_signals(team):
    x = torch.full((N,), float(team.rank), device=team.device)
    inbox, arrived, out = team.empty(N, torch.float32), team.signals(1), torch.empty_like(x)
    signals[(1,)](x, inbox, arrived, out, team.view, n=N)
    assert out.tolist() == [(team.rank - 1) % team.size] * N


@triton.jit
def waits(x, inbox, arrived, out, team, n: tl.constexpr):
    """out[n] = sum of all ranks' x, added up in the order of their arrival, twice"""
    world: tl.constexpr = wl.num_ranks(team)
    me, at, total = wl.rank(team), tl.arange(0, n), tl.zeros((n,), tl.float32)
    for peer in tl.static_range(world):
        tl.store(wl.symm_at(inbox + me * n, peer, team) + at, tl.load(x + at))
        wl.notify(arrived + me, peer, 1, team)
    done = 0
    for _ in range(world):
        source, done = wl.wait_any(arrived, world, 1, team, done)
        total += tl.load(inbox + source * n + at)
    wl.wait_all(arrived, world, 1, team)  # which returns at once here
    for source in tl.static_range(world):
        total += tl.load(inbox + source * n + at)
    tl.store(out + at, total)


def check_waits(team):
    x = torch.full((N,), 1.0 + team.rank, device=team.device)
    inbox, arrived, out = team.empty((team.size, N), torch.float32), team.signals(team.size), torch.empty_like(x)
    waits[(1,)](x, inbox, arrived, out, team.view, n=N)
    assert out.tolist() == [team.size * (team.size + 1)] * N


@triton.jit
def grid(x, out, counter, team, n: tl.constexpr):
    """out[p] = sum of x[all programs, n], where program p has written row p        grid: (programs,), all resident"""
    at = tl.arange(0, n)
    tl.store(x + tl.program_id(0) * n + at, 1.0)
    wl.grid_barrier(counter, team)
    total = tl.zeros((n,), tl.float32)
    for program in range(tl.num_programs(0)):
        total += tl.load(x + program * n + at)
    tl.store(out + tl.program_id(0), tl.sum(total))


def check_grid(team):
    x, out = torch.empty(4, N, device=team.device), torch.empty(4, device=team.device)
    counter = team.local(1, torch.int64)
    grid[(4,)](x, out, counter, team.view, n=N, launch_cooperative_grid=True)
    assert out.tolist() == [4.0 * N] * 4


@triton.jit
def epochs(epoch, arrived, out, team):
    """out[0] = number of this call, which the left neighbour makes too"""
    now = wl.next_epoch(epoch)
    wl.notify(arrived, (wl.rank(team) + 1) % wl.num_ranks(team), now, team)
    wl.wait(arrived, now, team)
    tl.store(out, now)
    wl.advance_epoch(epoch, now)


def check_epochs(team):
    epoch, arrived, out = team.local(2, torch.int32), team.signals(1), team.local(1, torch.int32)
    for call in range(3):
        epochs[(1,)](epoch, arrived, out, team.view)
        assert out.tolist() == [call + 1]


@triton.jit
def channels_send(x, inbox, landed, team, n: tl.constexpr):
    """Begin a call: chunk c of this rank's x goes to all ranks.        grid: (chunks,)"""
    call, me, chunk = wl.next_call(landed), wl.rank(team), tl.program_id(0)
    at = chunk * n + tl.arange(0, n)
    for peer in tl.static_range(wl.num_ranks(team)):
        tl.store(wl.symm_at(inbox + me * 2 * n, peer, team) + at, tl.load(x + at))
        wl.chunk_notify(call, peer, chunk, team)
    wl.advance_call(call)


@triton.jit
def channels_receive(inbox, landed, out, team, n: tl.constexpr):
    """out = sum of all ranks' x, in the call that channels_send has begun.        grid: (chunks,)"""
    call, chunk, total = wl.current_call(landed), tl.program_id(0), tl.zeros((n,), tl.float32)
    at = chunk * n + tl.arange(0, n)
    for source in tl.static_range(wl.num_ranks(team)):
        wl.chunk_wait(call, source, chunk, team)
        total += tl.load(inbox + source * 2 * n + at)
    tl.store(out + at, total)


def check_channels(team):
    x, landed = torch.full((2 * N,), 1.0 + team.rank, device=team.device), team.channel(2)
    inbox, out = team.empty((team.size, 2 * N), torch.float32), torch.empty_like(x)
    channels_send[(2,)](x, inbox, landed.view, team.view, n=N)
    channels_receive[(2,)](inbox, landed.view, out, team.view, n=N)
    assert out.tolist() == [team.size * (team.size + 1) / 2] * 2 * N


@triton.jit
def bulk(x, inbox, arrived, fetched, n, team):
    """Four copies of x[n] to the right neighbour's inbox, two copies of a part of it back"""
    right = (wl.rank(team) + 1) % wl.num_ranks(team)
    wl.put(inbox, x, n, right, team)
    wl.put_signal(inbox + n, x, n, arrived, 1, right, team)  # a wait for this signal covers both
    wl.put_nbi(inbox + 2 * n, x, n, right, team)
    wl.put_signal_nbi(inbox + 3 * n, x, n, arrived + 1, 1, right, team)  # … for this one not the copy before
    wl.quiet(team)  # now both are complete
    wl.get(fetched, inbox, n, right, team)
    wl.get_nbi(fetched + n, inbox + 2 * n, n, right, team)
    wl.quiet(team)


def check_bulk(team):
    x = torch.full((N,), float(team.rank), device=team.device)
    inbox, arrived, fetched = team.empty(4 * N, torch.float32), team.signals(2), torch.empty(2 * N).to(team.device)
    bulk[(1,)](x, inbox, arrived, fetched, N, team.view)
    team.barrier()
    assert fetched.tolist() == [team.rank] * 2 * N
    assert inbox.tolist() == [(team.rank - 1) % team.size] * 4 * N


@triton.jit
def ordering_send(x, inbox, arrived, n, team):
    """A message to the right neighbour, whose source is overwritten afterwards"""
    wl.wait_for_previous_kernel()  # x is written by the kernel before, launched with launch_pdl=True
    wl.let_next_kernel_start()
    right = (wl.rank(team) + 1) % wl.num_ranks(team)
    wl.put_nbi(inbox, x, n, right, team)
    wl.fence(team)  # the data are delivered before the signal; x still belongs to the copy
    wl.notify(arrived, right, 1, team)
    wl.quiet(team)  # x is free
    tl.store(x + tl.arange(0, 64), -1.0)


@triton.jit
def ordering_receive(inbox, arrived, out, ready, team, n: tl.constexpr):
    """out[n] = the message, announced to programs of this GPU by an atomic operation"""
    wl.follow_previous_kernel()
    wl.wait(arrived, 1, team)
    at = tl.arange(0, n)
    tl.store(out + at, tl.load(inbox + at))
    wl.gather_stores()  # without it the release covers the stores of one thread
    tl.atomic_add(ready, 1, sem="release", scope="gpu")


def check_ordering(team):
    x = torch.full((N,), float(team.rank), device=team.device)
    inbox, arrived = team.empty(N, torch.float32), team.signals(1)
    out, ready = torch.empty_like(x), team.local(1, torch.int32)
    ordering_send[(1,)](x, inbox, arrived, N, team.view)
    ordering_receive[(1,)](inbox, arrived, out, ready, team.view, n=N)
    assert out.tolist() == [(team.rank - 1) % team.size] * N and ready.tolist() == [1]


@triton.jit
def lamport(x, stages, epoch, out, team, n: tl.constexpr):
    """out[n] = x of rank W - 1 - r; stages [3, n] symmetric, all -0.0 at first"""
    now, at, inside = wl.next_epoch(epoch), tl.arange(0, n), tl.full((n,), True, tl.int1)
    peer = wl.num_ranks(team) - 1 - wl.rank(team)
    stage, old = stages + now % 3 * n, stages + (now - 1) % 3 * n
    wl.lamport_store(wl.symm_at(stage, peer, team) + at, tl.load(x + at), inside)
    tl.store(out + at, wl.lamport_receive(stage + at, old + at, inside, team))
    wl.advance_epoch(epoch, now)


@triton.jit
def lamport_once(x, inbox, out, team, n: tl.constexpr):
    """The same once: the inbox is cleared for a later kernel"""
    at, inside = tl.arange(0, n), tl.full((n,), True, tl.int1)
    peer = wl.num_ranks(team) - 1 - wl.rank(team)
    wl.lamport_store(wl.symm_at(inbox, peer, team) + at, tl.load(x + at), inside)
    tl.store(out + at, wl.lamport_load(inbox + at, inside, team))
    wl.lamport_clear(inbox + at, inside)


@triton.jit
def lamport_keyed(x, scale, stages, keys, out, team, n: tl.constexpr, RECEIVE: tl.constexpr):
    """out[n] = x * scale of rank W - 1 - r: the scale arrives in the same round trip; stages [2, n], keys [2, 1]"""
    at, inside = tl.arange(0, n), tl.full((n,), True, tl.int1)
    one, always = tl.arange(0, 1), tl.full((1,), True, tl.int1)
    peer = wl.num_ranks(team) - 1 - wl.rank(team)
    wl.lamport_store(wl.symm_at(stages, peer, team) + at, tl.load(x + at), inside)
    wl.lamport_store(wl.symm_at(keys, peer, team) + one, tl.load(scale + one), always)
    if RECEIVE:  # and clear the other stage
        y, key = wl.lamport_receive_keyed(
            stages + at, stages + n + at, inside, keys + one, keys + 1 + one, always, team
        )
    else:
        y, key = wl.lamport_load_keyed(stages + at, inside, keys + one, always, team)
    tl.store(out + at, y * key)


def check_lamport(team):
    def cleared(*shape):
        return team.empty(shape, torch.float32).fill_(-0.0)

    mirrored = float(team.size - 1 - team.rank)
    x, scale = torch.full((N,), float(team.rank), device=team.device), torch.full((1,), 2.0, device=team.device)
    stages, inbox, epoch, out = cleared(3, N), cleared(N), team.local(2, torch.int32), torch.empty_like(x)
    keyed = [(cleared(2, N), cleared(2, 1)) for _ in range(2)]
    team.barrier()  # every rank's stages are cleared
    for _ in range(4):
        lamport[(1,)](x, stages, epoch, out, team.view, n=N)
        assert out.tolist() == [mirrored] * N
    lamport_once[(1,)](x, inbox, out, team.view, n=N)
    assert out.tolist() == [mirrored] * N
    for receive, (blocks, keys) in enumerate(keyed):
        lamport_keyed[(1,)](x, scale, blocks, keys, out, team.view, n=N, RECEIVE=bool(receive))
        assert out.tolist() == [2 * mirrored] * N


@triton.jit
def multimem(x, sums, team, WORDS: tl.constexpr):
    """sums = sum over ranks of x, both fp32 [4 * W * WORDS] and symmetric; rank r adds WORDS words of 16 bytes"""
    wl.barrier(team)  # every rank's x is there
    at = 4 * (wl.rank(team) * WORDS + tl.arange(0, WORDS))
    inside = tl.full((WORDS,), True, tl.int1)
    wl.multimem_store(sums + at, wl.multimem_load_reduce(x + at, inside, team), inside, team)
    wl.barrier(team)  # every rank's part of the sums is there


def check_multimem(team):
    if team.caps.multicast:
        words = 8
        x, sums = (team.zeros(4 * words * team.size, torch.float32) for _ in range(2))
        x += torch.arange(x.numel(), device=team.device) * (team.rank + 1)
        multimem[(1,)](x, sums, team.view, WORDS=words)
        assert sums.tolist() == [at * team.size * (team.size + 1) / 2 for at in range(x.numel())]


@triton.jit
def hints(x, weight, out, rows, N: tl.constexpr):
    """out[rows, N] = x[rows, N] * weight[N]"""
    at = tl.arange(0, N)
    wl.prefetch(weight + tl.arange(0, N // 8) * 8, tl.full((N // 8,), 32, tl.int32))  # 8 elements of fp32 each
    wl.wait_for_previous_kernel()  # which wrote x, not weight
    for row in range(rows):
        here = weight + at + 16 * wl.zero_here()  # addresses are computed in the loop, and not kept in registers
        tl.store(out + row * N + at, tl.load(x + row * N + at) * tl.load(here))


def check_hints(team):
    x, weight = torch.ones(3, N, device=team.device), torch.full((N,), 2.0, device=team.device)
    out = torch.empty_like(x)
    hints[(1,)](x, weight, out, 3, N=N)
    assert torch.equal(out, 2 * x)


@triton.jit
def spans(x, out, tiles, team, N: tl.constexpr):
    """out[tiles, N] of the next rank = 2 * x[tiles, N]; in a traced team two slices for each row"""
    peer = (wl.rank(team) + 1) % wl.num_ranks(team)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        began = wl.begin_tile(team)
        at = tile * N + tl.arange(0, N)
        y = 2 * tl.load(x + at)
        wl.end_tile(began, tile, 0, team)
        began = wl.begin_put(team)
        tl.store(wl.symm_at(out, peer, team) + at, y)
        wl.end_put(began, out + tile * N, 4 * N, peer, team)


def check_spans(team):
    x = torch.ones(3, N, device=team.device)
    out = team.zeros(x.shape, x.dtype)
    spans[(2,)](x, out, 3, team.view, N=N)
    team.barrier()
    assert torch.equal(out, 2 * x)


@triton.jit
def shmem(x, inbox, landed, out, team, n: tl.constexpr):
    """out[n] = x of the left neighbour"""
    me, at = wl.shmem.my_pe(team), tl.arange(0, n)
    right = (me + 1) % wl.shmem.n_pes(team)
    wl.shmem.putmem_signal_block(inbox, x, 4 * n, landed, 1, wl.shmem.SIGNAL_SET, right, team)
    wl.shmem.signal_wait_until(landed, wl.shmem.CMP_GE, 1, team)
    tl.store(out + at, tl.load(inbox + at))
    wl.shmem.barrier_all_block(team)  # every PE has read its inbox: the next message may be stored


@triton.jit
def shmem_gather(x, gathered, landed, team, n: tl.constexpr):
    """gathered[s] = x of PE s"""
    me = wl.shmem.my_pe(team)
    for pe in tl.static_range(wl.shmem.n_pes(team)):
        wl.shmem.putmem_signal_nbi_block(gathered + me * n, x, 4 * n, landed + me, 1, wl.shmem.SIGNAL_ADD, pe, team)
    wl.shmem.wait_until_all(landed, wl.shmem.n_pes(team), None, wl.shmem.CMP_GE, 1, team)
    wl.shmem.quiet(team)  # x may be written again


def check_shmem(team):
    x = torch.full((N,), float(team.rank), device=team.device)
    inbox, landed, out = team.empty(N, torch.float32), team.zeros(1, torch.uint64), torch.empty_like(x)
    shmem[(1,)](x, inbox, landed, out, team.view, n=N)
    assert out.tolist() == [(team.rank - 1) % team.size] * N
    gathered, landed = team.empty((team.size, N), torch.float32), team.zeros(team.size, torch.uint64)
    shmem_gather[(1,)](x, gathered, landed, team.view, n=N)
    x.zero_()
    assert gathered[:, 0].tolist() == list(range(team.size))
    team.barrier()  # no rank frees what the others still store to
