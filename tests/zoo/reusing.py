"""Bugs of reused buffers, programs of one rank that share memory, the copy engine and host code."""

import torch
import triton
import triton.language as tl

import weft.language as wl
from tests.zoo.exhibit import N, exhibit
from tests.zoo.publishing import tensors


@triton.jit
def scatter_and_sum(slots, landed, out, epoch, team, N: tl.constexpr, BUG: tl.constexpr):
    me = wl.rank(team)
    world: tl.constexpr = wl.num_ranks(team)
    now = wl.next_epoch(epoch)
    at = tl.arange(0, N)
    half = slots if BUG else slots + (now & 1) * world * N
    for peer in tl.static_range(world):
        tl.store(wl.symm_at(half, peer, team) + me * N + at, now.to(tl.float32) + at)  # here
        wl.notify(landed + me, peer, now, team)
    total = tl.zeros((N,), tl.float32)
    for peer in tl.static_range(world):
        wl.wait(landed + peer, now, team)
        total += tl.load(half + peer * N + at)  # here
    tl.store(out + at, total)
    wl.advance_epoch(epoch, now)


@exhibit(
    "race", "slots", "a call scatters into a workspace that a peer still sums for the previous call", scatter_and_sum,
    published=True,
)  # fmt: skip
def workspace_without_entry_proof(team, bug):
    slots = team.zeros((2, team.size, N), torch.float32, name="slots")
    landed, epoch, out = (
        team.signals(team.size, name="landed"),
        team.local(2, torch.int32),
        team.local(N, torch.float32),
    )
    results = []
    for _ in range(3):
        scatter_and_sum[(1,)](slots, landed, out, epoch, team.view, N, bug)
        results.append(out.clone())
    return results


@triton.jit
def stale_epoch(data, landed, got, epoch, team, N: tl.constexpr, BUG: tl.constexpr):
    me = wl.rank(team)
    now = wl.next_epoch(epoch)
    at = tl.arange(0, N)
    tl.store(wl.symm_at(data, 1 - me, team) + (now & 1) * N + at, 1.0)  # here
    wl.notify(landed, 1 - me, now, team)
    if BUG:
        wl.wait(landed, now - 1, team)
    else:
        wl.wait(landed, now, team)
    tl.store(got + at, tl.load(data + (now & 1) * N + at))  # here
    wl.advance_epoch(epoch, now)


@exhibit("race", "data", "the wait is for the previous epoch", stale_epoch)
def waits_for_the_last_epoch(team, bug):
    data, landed = team.zeros((2, N), torch.float32, name="data"), team.signals(1, name="landed")
    epoch, got = team.local(2, torch.int32), team.local(N, torch.float32)
    for _ in range(2):
        stale_epoch[(1,)](data, landed, got, epoch, team.view, N, bug)


@triton.jit
def both_write(data, team, N: tl.constexpr, BUG: tl.constexpr):
    me = wl.rank(team)
    at = tl.arange(0, N)
    row = 0 if BUG else me * N
    tl.store(wl.symm_at(data, 0, team) + row + at, me.to(tl.float32))  # here


@exhibit("race", "data", "all ranks store to the same rows of one rank", both_write)
def ranks_write_the_same_rows(team, bug):
    data = team.zeros((2, N), torch.float32, name="data")
    both_write[(1,)](data, team.view, N, bug)
    team.barrier()
    return data.clone()


@triton.jit
def count_by_rank(counter, team, BUG: tl.constexpr):
    if BUG:
        tl.atomic_add(wl.symm_at(counter, 0, team), 1, sem="relaxed", scope="gpu")  # here
    else:
        tl.atomic_add(wl.symm_at(counter, 0, team), 1, sem="relaxed", scope="sys")


@exhibit("scope", "counter", "several ranks add to one counter at gpu scope", count_by_rank)
def shared_counter_of_gpu_scope(team, bug):
    counter = team.zeros(1, torch.int32, name="counter")
    count_by_rank[(1,)](counter, team.view, bug)
    team.barrier()


@triton.jit
def switch_sums(x, sums, team, WORDS: tl.constexpr, BUG: tl.constexpr):
    at = 4 * tl.arange(0, WORDS)
    tl.store(x + tl.arange(0, 4 * WORDS), wl.rank(team).to(tl.float32))  # here
    if BUG:
        tl.debug_barrier()
    else:
        wl.barrier(team)
    words = wl.multimem_load_reduce(x + at, at >= 0, team)  # here
    wl.barrier(team)
    if wl.rank(team) == 0:
        wl.multimem_store(sums + at, words, at >= 0, team)


@exhibit("race", "x", "a switch adds what a peer may not have staged yet", switch_sums)
def sum_of_the_switch_before_a_barrier(team, bug):
    x, sums = team.zeros(N, torch.float32, name="x"), team.zeros(N, torch.float32, name="sums")
    switch_sums[(1,)](x, sums, team.view, N // 4, bug)
    team.barrier()
    return sums.clone()


@triton.jit
def accumulate(total, BUG: tl.constexpr):
    if BUG:
        tl.store(total, tl.load(total) + 1)  # here
    else:
        tl.atomic_add(total, 1)


@exhibit("race", "total", "programs add to a sum by load and store", accumulate)
def sum_without_an_atomic(team, bug):
    total = team.zeros(1, torch.int32, name="total")
    accumulate[(4,)](total, bug)
    return total.clone()


@triton.jit
def split_k(parts, out, tickets, N: tl.constexpr, SEM: tl.constexpr, BARRIER: tl.constexpr):
    at = tl.arange(0, N)
    me = tl.program_id(0)
    tl.store(parts + me * N + at, me.to(tl.float32))  # here
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(tickets, 1, sem=SEM, scope="gpu") == tl.num_programs(0) - 1:
        total = tl.zeros((N,), tl.float32)
        for part in range(tl.num_programs(0)):
            total += tl.load(parts + part * N + at)  # here
        tl.store(out + at, total)


def split(team, sem, barrier):
    parts, tickets = team.zeros((4, N), torch.float32, name="parts"), team.local(1, torch.int32)
    split_k[(4,)](parts, team.local(N, torch.float32), tickets, N, sem, barrier)


@exhibit("relaxed-order", "parts", "the arrival counter of the last program is a relaxed atomic", split_k, world_size=1)
def ticket_that_is_relaxed(team, bug):
    split(team, "relaxed" if bug else "acq_rel", True)


@exhibit(
    "missing-barrier",
    "parts",
    "a program counts its arrival before all its threads have stored",
    split_k,
    world_size=1,
)
def ticket_without_barrier(team, bug):
    split(team, "acq_rel", not bug)


@triton.jit
def fill(x, value, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), value)  # here


@triton.jit
def take(x, got, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(got + at, tl.load(x + at))  # here


@exhibit("race", "source", "the copy engine reads a tensor that a kernel still writes: fork() is missing", fill)
def copy_without_fork(team, bug):
    source, target = (team.zeros(N, torch.float32, name=name) for name in ("source", "target"))
    fill[(1,)](source, 1.0, N)
    if not bug:
        team.copy_engine.fork()
    team.copy_engine.put(target, source, 1 - team.rank)  # here
    team.synchronize()


@exhibit("race", "target", "a kernel reads what the copy engine is still copying: join() is missing", take)
def read_without_join(team, bug):
    source, target = (team.zeros(N, torch.float32, name=name) for name in ("source", "target"))
    got = team.local(N, torch.float32)
    team.barrier()
    team.copy_engine.fork()
    team.copy_engine.get(target, source, 1 - team.rank)  # here
    if not bug:
        team.copy_engine.join()
    take[(1,)](target, got, N)
    team.barrier()


@exhibit("race", "source", "a tensor is overwritten while the copy engine still reads it", fill)
def source_overwritten_too_early(team, bug):
    source, target = (team.zeros(N, torch.float32, name=name) for name in ("source", "target"))
    team.barrier()
    team.copy_engine.fork()
    team.copy_engine.put(target, source, 1 - team.rank)  # here
    if not bug:
        team.copy_engine.join()
    fill[(1,)](source, 2.0, N)
    team.barrier()


@exhibit("race", "x, argument of take", "the copy engine refills a plain tensor that a kernel still reads: join() orders the "
         "kernels after the engine, not the engine after the kernels", take)  # fmt: skip
def plain_tensor_refilled_too_early(team, bug):
    source = team.zeros(N, torch.float32, name="source")
    halves, got = [team.local(N, torch.float32) for _ in range(2)], team.local(N, torch.float32)
    team.barrier()
    team.copy_engine.fork()
    team.copy_engine.get(halves[0], source, 1 - team.rank)
    team.copy_engine.join()
    take[(1,)](halves[0], got, N)
    team.copy_engine.get(halves[1], source, 1 - team.rank)
    team.copy_engine.join()
    if not bug:
        team.copy_engine.fork()
    team.copy_engine.get(halves[0], source, 1 - team.rank)  # here
    team.barrier()


@triton.jit
def take_after_wait(x, landed, got, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    if not BUG:
        wl.wait(landed, 1, team)
    tl.store(got + at, tl.load(x + at))  # here


@exhibit(
    "race", "target", "a kernel reads what a peer's copy engine copies, without waiting for its flag", take_after_wait
)
def copy_without_flag(team, bug):
    source, target = (team.zeros(N, torch.float32, name=name) for name in ("source", "target"))
    landed, one, got = team.signals(1, name="landed"), team.local(1, torch.int32), team.local(N, torch.float32)
    one.fill_(1)
    team.copy_engine.fork()
    team.copy_engine.put(target, source, 1 - team.rank)  # here
    team.copy_engine.signal(landed, one, 1 - team.rank)
    take_after_wait[(1,)](target, landed, got, team.view, N, bug)
    team.barrier()


@triton.jit
def push(data, team, N: tl.constexpr):
    tl.store(wl.symm_at(data, 1 - wl.rank(team), team) + tl.arange(0, N), 1.0)  # here


@exhibit("race", "data", "host code uses exchange(), which waits for no kernel, instead of barrier()", push, take)
def exchange_for_a_barrier(team, bug):
    data, _, got = tensors(team)
    push[(1,)](data, team.view, N)
    if bug:
        team.exchange("done")
    else:
        team.barrier()
    take[(1,)](data, got, N)


@exhibit("race", "data", "host code fills a tensor that a peer's kernel writes to", push)
def filled_by_the_host_too_late(team, bug):
    data, _, _ = tensors(team)
    if not bug:
        data.fill_(5.0)
        team.barrier()
    push[(1,)](data, team.view, N)
    if bug:
        data.fill_(5.0)  # here
    team.barrier()
    return data.clone()


@triton.jit
def take_after_signal(x, landed, got, team, N: tl.constexpr):
    at = tl.arange(0, N)
    wl.wait(landed, 1, team)  # here
    tl.store(got + at, tl.load(x + at))


@exhibit(
    "deadlock", "landed", "a kernel waits for a copy that is forked after the kernel's launch",
    take_after_signal,
)  # fmt: skip
def fork_after_the_launch(team, bug):
    source, target = (team.zeros(N, torch.float32, name=name) for name in ("source", "target"))
    landed, one, got = team.signals(1, name="landed"), team.local(1, torch.int32), team.local(N, torch.float32)
    one.fill_(1)
    if not bug:
        team.copy_engine.fork()
    take_after_signal[(1,)](target, landed, got, team.view, N)
    if bug:
        team.copy_engine.fork()
    team.copy_engine.put(target, source, 1 - team.rank)
    team.copy_engine.signal(landed, one, 1 - team.rank)
    team.barrier()


@triton.jit
def turned(x, scratch, got, N: tl.constexpr, BUG: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(scratch + rows * N + columns, tl.load(x + rows * N + columns))  # here
    if not BUG:
        tl.debug_barrier()
    tl.store(got + rows * N + columns, tl.load(scratch + columns * N + rows))  # here


@exhibit("cta-race", "scratch, argument of turned", "a tile is written by rows and read by columns, without a CTA barrier",
         turned, world_size=1)  # fmt: skip
def tile_turned_in_memory(team, bug):
    x, scratch, got = (team.local((N, N), torch.float32) for _ in range(3))
    turned[(1,)](x, scratch, got, N, bug)


@triton.jit
def counted_in_memory(count, got, N: tl.constexpr, BUG: tl.constexpr):
    tl.store(count, 3)  # here
    if not BUG:
        tl.debug_barrier()
    last = tl.load(count)  # here
    tl.store(got + tl.arange(0, N), last)


@exhibit("cta-race", "count, argument of counted_in_memory", "one thread stores a scalar and all load it without a CTA barrier",
         counted_in_memory, world_size=1)  # fmt: skip
def scalar_read_back(team, bug):
    counted_in_memory[(1,)](team.local(1, torch.int32), team.local(N, torch.int32), N, bug)
