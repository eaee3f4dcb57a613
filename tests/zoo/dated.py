"""Errors of published libraries, by date, written anew from their descriptions as small kernels with mended twins."""

import torch
import triton
import triton.language as tl

import weft.language as wl
from tests.zoo.exhibit import N, exhibit
from tests.zoo.publishing import tensors

ROUNDS = 5
EMPTY = tl.constexpr(-(2**31))  # the bits of -0.0


@triton.jit
def sum_after_barrier(data, arrived, out, team, N: tl.constexpr, BUG: tl.constexpr):
    """out[N] = sum over ranks of data[N], read from peers after a barrier."""
    at, world = tl.arange(0, N), wl.num_ranks(team)
    send: tl.constexpr = "relaxed" if BUG else "release"
    wait: tl.constexpr = "relaxed" if BUG else "acquire"
    tl.store(data + at, wl.rank(team) + 1.0)  # here
    tl.debug_barrier()
    for peer in tl.static_range(2):
        tl.atomic_xchg(wl.symm_at(arrived, peer, team) + wl.rank(team), 1, sem=send, scope="sys")
    total = tl.zeros((N,), tl.float32)
    for peer in range(world):
        while tl.atomic_add(arrived + peer, 0, sem=wait, scope="sys") == 0:
            pass
        total += tl.load(wl.symm_at(data, peer, team) + at)  # here
    tl.store(out + at, total)


@exhibit(
    "relaxed-order", "data", "all atomics of an all-reduce's barrier are relaxed, so that it reads torn rows",
    sum_after_barrier, source="vLLM #57059, 2026-09",
)  # fmt: skip
def barrier_without_order(team, bug):
    data, arrived, out = tensors(team)
    sum_after_barrier[(1,)](data, arrived, out, team.view, N, bug)
    team.barrier()
    return out


@triton.jit
def normalise_received(data, landed, out, team, N: tl.constexpr, BUG: tl.constexpr):
    """out[N] = the peer's rows, scaled: second stage of an all-reduce with a norm."""
    at, peer = tl.arange(0, N), 1 - wl.rank(team)
    tl.store(wl.symm_at(data, peer, team) + at, 2.0)
    wl.notify(landed, peer, 1, team)  # here
    if BUG:
        while tl.atomic_add(landed, 0, sem="acquire", scope="gpu") == 0:  # here
            pass
    else:
        while tl.atomic_add(landed, 0, sem="acquire", scope="sys") == 0:
            pass
    x = tl.load(data + at)
    tl.store(out + at, x / tl.sqrt(tl.sum(x * x) / N))


@exhibit(
    "scope", "landed", "the second stage of an all-reduce with a norm acquires at the scope of one GPU",
    normalise_received, source="AITER #2890, 2026-04",
)  # fmt: skip
def acquire_of_the_wrong_scope(team, bug):
    data, landed, out = tensors(team)
    normalise_received[(1,)](data, landed, out, team.view, N, bug)
    team.barrier()
    return out


@triton.jit
def count_arrivals(data, landed, out, team, N: tl.constexpr, BUG: tl.constexpr):
    """out[N] = sum of the rows that all ranks have sent here, once their count is complete."""
    at, world = tl.arange(0, N), wl.num_ranks(team)
    for peer in tl.static_range(2):
        tl.store(wl.symm_at(data, peer, team) + wl.rank(team) * N + at, 1.0)  # here
        tl.debug_barrier()
        if BUG:
            tl.atomic_add(wl.symm_at(landed, peer, team), 1, sem="relaxed", scope="sys")
        else:
            tl.atomic_add(wl.symm_at(landed, peer, team), 1, sem="release", scope="sys")
    wl.wait(landed, world, team)
    total = tl.zeros((N,), tl.float32)
    for source in range(world):
        total += tl.load(data + source * N + at)  # here
    tl.store(out + at, total)


@exhibit(
    "relaxed-order", "data", "arrivals are counted by a reduction without release order", count_arrivals,
    source="TensorRT-LLM #8612, 2025-10",
)  # fmt: skip
def count_without_release(team, bug):
    data, landed, out = team.zeros((2, N), torch.float32, name="data"), *tensors(team)[1:]
    count_arrivals[(1,)](data, landed, out, team.view, N, bug)
    team.barrier()
    return out


@triton.jit
def exchange_words(inbox, got, team, N: tl.constexpr, BUG: tl.constexpr, ROUNDS: tl.constexpr):
    """Rounds over three stages. The stage of the last round is cleared, or, with the bug, that of the next one."""
    at = tl.arange(0, N)
    for round in range(ROUNDS):
        stage, other = inbox + round % 3 * N, inbox + (round + (1 if BUG else 2)) % 3 * N
        wl.fence(team)
        there = wl.symm_at(stage, 1 - wl.rank(team), team)
        wl.lamport_store(there + at, tl.full((N,), 1.0, tl.float32) + round, at < N)  # here
        tl.store(got + round * N + at, wl.lamport_load(stage + at, at < N, team))
        wl.lamport_clear(other + at, at < N)  # here


@exhibit(
    "race", "inbox", "a Lamport stage is cleared when peers may already send words of the next call", exchange_words,
    source="TensorRT-LLM #6237, 2025",
)  # fmt: skip
def stage_cleared_too_early(team, bug):
    got = team.local((ROUNDS, N), torch.float32)
    inbox = team.empty((3, N), torch.float32, name="inbox").fill_(-0.0)
    team.barrier()
    exchange_words[(1,)](inbox, got, team.view, N, bug, ROUNDS)


@triton.jit
def is_empty(bits, BUG: tl.constexpr):
    """True for a word that has not come: by its bits, or as a float whose subnormals count as zero (-ftz=true)."""
    x = bits.to(tl.float32, bitcast=True)
    return tl.abs(x) < 1.17549435e-38 if BUG else bits == EMPTY


@triton.jit
def poll_for_value(inbox, out, x, team, BUG: tl.constexpr):
    """out = x of the peer, a word that is its own flag."""
    bits = x.to(tl.int32, bitcast=True)
    tl.atomic_xchg(wl.symm_at(inbox, 1 - wl.rank(team), team), bits, sem="relaxed", scope="sys")
    seen = tl.atomic_add(inbox, 0, sem="relaxed", scope="sys")
    while is_empty(seen, BUG):
        seen = tl.atomic_add(inbox, 0, sem="relaxed", scope="sys")  # here
    tl.store(out, seen.to(tl.float32, bitcast=True))


@exhibit(
    "deadlock", "inbox", "a poll for a value other than zero takes a subnormal number for an empty word", poll_for_value,
    source="TensorRT-LLM #14476, 2026-05",
)  # fmt: skip
def poll_that_misses_a_subnormal(team, bug):
    inbox, out = team.zeros((1,), torch.int32, name="inbox"), team.local(1, torch.float32)
    inbox.fill_(-(2**31))
    team.barrier()
    poll_for_value[(1,)](inbox, out, 1e-40, team.view, bug)
    team.barrier()
    return out


@triton.jit
def poll_for_peer(landed, out, call, team, BUG: tl.constexpr):
    """out = 1 if the peer's word of this call has come, 0 if the patience of the poll is at its end."""
    if wl.rank(team) == 0:
        tries, seen = 0, tl.atomic_add(landed, 0, sem="acquire", scope="sys")
        if BUG:
            while seen < call:
                seen = tl.atomic_add(landed, 0, sem="acquire", scope="sys")  # here
        else:
            while (seen < call) & (tries < 32):
                seen = tl.atomic_add(landed, 0, sem="acquire", scope="sys")
                tries += 1
        tl.store(out, (seen >= call).to(tl.int32))


@exhibit(
    "deadlock", "landed", "a poll without a time limit waits for a rank that has left the call", poll_for_peer,
    source="SGLang #30209, 2026-09",
)  # fmt: skip
def poll_without_a_time_limit(team, bug):
    landed, out = team.signals(1, name="landed"), team.local(1, torch.int32)
    poll_for_peer[(1,)](landed, out, 1, team.view, bug)  # rank 1 has sent nothing
    return out


@triton.jit
def meet_at_counter(counter, out, round, team, BUG: tl.constexpr):
    """Barrier over a counter of rank 0, which rank 0 resets, or which grows."""
    there = wl.symm_at(counter, 0, team)
    world = wl.num_ranks(team)
    wanted = world if BUG else world * round
    tl.atomic_add(there, 1, sem="release", scope="sys")  # here
    while tl.atomic_add(there, 0, sem="acquire", scope="sys") < wanted:
        pass
    if BUG:
        if wl.rank(team) == 0:
            tl.store(counter, 0)  # here
    tl.store(out, round)


@exhibit(
    "signal-reset", "counter", "a barrier's counter is reset while ranks still wait for it", meet_at_counter,
    source="FlashInfer #3615, LMCache #4123, 2026",
)  # fmt: skip
def counter_reset_before_all_have_seen_it(team, bug):
    counter, out = team.signals(1, name="counter"), team.local(1, torch.int32)
    for round in range(1, 3):
        meet_at_counter[(1,)](counter, out, round, team.view, bug)
    team.barrier()


@triton.jit
def combine_tokens(received, landed, out, epoch, team, N: tl.constexpr, BUG: tl.constexpr):
    """out[N] = sum over ranks of the expert outputs of this rank's tokens, from buffers that rotate by call."""
    me, at, now = wl.rank(team), tl.arange(0, N), wl.next_epoch(epoch)
    world: tl.constexpr = wl.num_ranks(team)
    buffer = received if BUG else received + now % 2 * world * N
    for owner in tl.static_range(world):
        tl.store(wl.symm_at(buffer, owner, team) + me * N + at, now.to(tl.float32))  # here
        wl.notify(landed + me, owner, now, team)
    total = tl.zeros((N,), tl.float32)
    for source in tl.static_range(world):
        wl.wait(landed + source, now, team)
        total += tl.load(buffer + source * N + at)  # here
    tl.store(out + at, total)
    wl.advance_epoch(epoch, now)


@exhibit(
    "race", "received", "a combine sends to a receive buffer that its owner still sums for the last call", combine_tokens,
    source="DeepEP #621, 2026-05",
)  # fmt: skip
def combine_into_a_buffer_in_use(team, bug):
    received, landed = (
        team.zeros((2, team.size, N), torch.float32, name="received"),
        team.signals(team.size, name="landed"),
    )
    epoch, out = team.local(2, torch.int32), team.local(N, torch.float32)
    results = []
    for _ in range(3):
        combine_tokens[(1,)](received, landed, out, epoch, team.view, N, bug)
        results.append(out.clone())
    return results
