"""Misuse of memory and signals."""

import torch
import triton
import triton.language as tl

import weft.language as wl
from tests.zoo.exhibit import N, exhibit
from tests.zoo.publishing import tensors


@triton.jit
def sum_slots(slots, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(slots + at) + tl.load(slots + N + at))  # here


@exhibit("uninitialised", "slots", "an unwritten slot is added to a sum", sum_slots)
def slot_not_filled(team, bug):
    slots = team.empty((2, N), torch.float32, name="slots")
    slots[: 1 if bug else 2].zero_()
    sum_slots[(1,)](slots, team.local(N, torch.float32), N)


@triton.jit
def scale(x, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    if BUG:
        scales = {"twice": 2.0}  # here
    else:
        scales = (2.0,)
    tl.store(x + at, tl.load(x + at) * scales["twice" if BUG else 0])


@exhibit("compile-error", "", "a kernel uses what the simulator runs and Triton does not compile", scale)
def dictionary_in_a_kernel(team, bug):
    scale[(1,)](team.zeros(N, torch.float32), N, bug)


@triton.jit
def read_all(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at))  # here


@exhibit("use-after-free", "scratch", "a freed tensor is read", read_all)
def read_of_a_freed_tensor(team, bug):
    scratch = team.zeros(N, torch.float32, name="scratch")
    if bug:
        team.free(scratch)
    read_all[(1,)](scratch, team.local(N, torch.float32), N)
    if not bug:
        team.free(scratch)


@triton.jit
def write_rows(x, count, N: tl.constexpr):
    for row in range(count):
        tl.store(x + row * N + tl.arange(0, N), 0.0)  # here


@exhibit("out-of-bounds", "rows", "a loop runs one row too far", write_rows)
def one_row_too_many(team, bug):
    rows = team.zeros((3, N), torch.float32, name="rows")
    write_rows[(1,)](rows, 4 if bug else 3, N)


@triton.jit
def signal_per_tile(landed, team, tiles):
    for tile in range(tiles):
        wl.notify(landed + tile, 1 - wl.rank(team), 1, team)  # here


@exhibit("out-of-bounds", "landed", "one signal per tile, but more tiles than signals", signal_per_tile, published=True)
def more_tiles_than_signals(team, bug):
    landed = team.signals(4, name="landed")
    signal_per_tile[(1,)](landed, team.view, 5 if bug else 4)


@triton.jit
def read_pairs(x, out, shift, N: tl.constexpr):
    pairs = (x + shift).to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(out + tl.arange(0, N // 2), tl.load(pairs + tl.arange(0, N // 2)))  # here


@exhibit("misaligned", "words", "pairs of bf16 are loaded as int32 from an odd element", read_pairs)
def pairs_from_an_odd_element(team, bug):
    words = team.zeros(2 * N, name="words")
    read_pairs[(1,)](words, team.local(N, torch.int32), 1 if bug else 2, N)


@triton.jit
def through_table(data, table, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    peer = 1 - wl.rank(team)
    if BUG:
        there = tl.load(table + peer).to(tl.pointer_type(tl.float32))
    else:
        there = wl.symm_at(data, peer, team)
    tl.store(there + at, 1.0)  # here


@exhibit("untranslated", "data", "a peer's raw address is used", through_table)
def raw_address_of_a_peer(team, bug):
    data, _, _ = tensors(team)
    table = torch.tensor(team.exchange(data.data_ptr()), dtype=torch.int64)
    through_table[(1,)](data, table, team.view, N, bug)
    team.barrier()


@triton.jit
def wait_and_reset(landed, team, BUG: tl.constexpr):
    me = wl.rank(team)
    wl.notify(landed, 1 - me, 1, team)  # here
    wl.wait(landed, 1, team)
    if BUG:
        tl.store(landed, 0)  # here


@exhibit(
    "signal-reset",
    "landed",
    "the kernel resets its signal to 0 for the next call",
    wait_and_reset,
)
def reset_in_the_kernel(team, bug):
    landed = team.signals(1, name="landed")
    for _ in range(2):
        wait_and_reset[(1,)](landed, team.view, bug)


@triton.jit
def wait_for(landed, epoch, team):
    wl.notify(landed, 1 - wl.rank(team), epoch, team)  # here
    wl.wait(landed, epoch, team)


@exhibit("signal-reset", "landed", "host code zeroes the signals between two calls, without a barrier", wait_for)  # fmt: skip
def reset_by_the_host(team, bug):
    landed = team.signals(1, name="landed")
    wait_for[(1,)](landed, 1, team.view)
    if bug:
        landed.zero_()  # here
    wait_for[(1,)](landed, 1 if bug else 2, team.view)


@triton.jit
def notify_value(landed, value, team):
    if wl.rank(team) == 0:
        wl.notify(landed, 1, value, team)  # here
    else:
        wl.wait(landed, value, team)


@exhibit("epoch-back", "landed", "an epoch decreases", notify_value)
def epoch_that_goes_back(team, bug):
    landed = team.signals(1, name="landed")
    for value in (2, 1) if bug else (1, 2):
        notify_value[(1,)](landed, value, team.view)


@triton.jit
def poll_for_one_value(landed, team, BUG: tl.constexpr):
    if wl.rank(team) == 0:
        for value in range(1, 4):
            wl.notify(landed, 1, value, team)
    elif BUG:
        while tl.atomic_add(landed, 0, sem="acquire", scope="sys") != 2:  # here
            pass
    else:
        wl.wait(landed, 2, team)


@exhibit("equality-wait", "landed", "a loop waits for one value of a signal that passes it", poll_for_one_value)  # fmt: skip
def loop_for_one_value(team, bug):
    landed = team.signals(1, name="landed")
    poll_for_one_value[(1,)](landed, team.view, bug)
    team.barrier()


@triton.jit
def count_arrivals(arrived, team, BUG: tl.constexpr):
    world: tl.constexpr = wl.num_ranks(team)
    for peer in tl.static_range(world):
        wl.notify(arrived, peer, 1, team, "add")
        if BUG:
            wl.notify(arrived, peer, 1, team, "add")  # here
    wl.wait(arrived, world, team)


@exhibit("overshoot", "arrived", "each rank counts twice, but the wait expects one count per rank", count_arrivals)
def counted_twice(team, bug):
    arrived = team.signals(1, name="arrived")
    count_arrivals[(1,)](arrived, team.view, bug)
    team.barrier()


@exhibit("out-of-bounds", "landed", "an index past the end of the signals, into the next tensor", signal_per_tile)
def signals_that_end_where_a_tensor_begins(team, bug):
    landed = team.signals(64, name="landed")
    team.zeros(64, name="next")
    signal_per_tile[(1,)](landed, team.view, 65 if bug else 64)


@exhibit("use-after-free", "scratch", "a freed tensor is read, whose bytes another tensor has", read_all)
def read_of_bytes_given_to_another(team, bug):
    scratch = team.zeros(N, torch.float32, name="scratch")
    if bug:
        team.free(scratch)
        team.zeros(N, torch.float32, name="another")
    read_all[(1,)](scratch, team.local(N, torch.float32), N)


@exhibit("use-after-free", "scratch", "host code uses a freed tensor")
def freed_tensor_in_host_code(team, bug):
    scratch = team.zeros(N, torch.float32, name="scratch")
    if not bug:
        scratch.add_(1)
    team.free(scratch)
    if bug:
        scratch.add_(1)  # here


@exhibit("uninitialised", "filled", "host code copies unwritten memory")
def copy_of_unwritten_memory(team, bug):
    filled = team.empty(N, torch.float32, name="filled")
    if not bug:
        filled.zero_()
    filled.clone()  # here


@triton.jit
def load_tile(x, out, start, N: tl.constexpr):
    tile = tl.make_tensor_descriptor(x + start, [1, N], [N, 1], [1, N])  # here
    tl.store(out + tl.arange(0, N), tl.reshape(tile.load([0, 0]), (N,)))


@exhibit("misaligned", "", "a tensor descriptor starts at an odd element", load_tile)
def descriptor_from_an_odd_element(team, bug):
    load_tile[(1,)](team.zeros(2 * N, torch.float32, name="x"), team.local(N, torch.float32), 1 if bug else 4, N)


@triton.jit
def load_hinted(x, out, start, N: tl.constexpr):
    at = tl.multiple_of(x + start + tl.arange(0, N), 16)  # here
    tl.store(out + tl.arange(0, N), tl.load(at))


@exhibit("misaligned", "", "an alignment hint is false", load_hinted)
def hint_that_is_not_true(team, bug):
    load_hinted[(1,)](team.zeros(2 * N, torch.float32, name="x"), team.local(N, torch.float32), 1 if bug else 4, N)


@triton.jit
def poll_in_two_lines(landed, team, BUG: tl.constexpr):
    if wl.rank(team) == 0:
        for value in range(1, 4):
            wl.notify(landed, 1, value, team)
    elif BUG:
        seen = tl.atomic_add(landed, 0, sem="acquire", scope="sys")
        while seen != 2:
            seen = tl.atomic_add(landed, 0, sem="acquire", scope="sys")  # here
    else:
        wl.wait(landed, 2, team)


@exhibit("equality-wait", "landed", "a loop waits for one value, held in a variable", poll_in_two_lines)
def loop_for_one_value_of_a_variable(team, bug):
    landed = team.signals(1, name="landed")
    poll_in_two_lines[(1,)](landed, team.view, bug)
    team.barrier()


@triton.jit
def send_epochs(landed, team, COMPARISON: tl.constexpr):
    for epoch in range(1, 4):
        if wl.rank(team) == 0:
            wl.shmem.signal_op(landed, epoch, wl.shmem.SIGNAL_SET, 1, team)
        else:
            wl.shmem.signal_wait_until(landed, COMPARISON, epoch, team)  # here


@exhibit("equality-wait", "landed", "a wait for CMP_EQ, whose value the next notify overwrites", send_epochs)
def wait_for_equality(team, bug):
    landed = team.signals(1, name="landed")
    send_epochs[(1,)](landed, team.view, wl.shmem.NVSHMEM_CMP_EQ if bug else wl.shmem.NVSHMEM_CMP_GE)
