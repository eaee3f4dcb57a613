"""Kernels that hang, and results that depend on the schedule."""

import torch
import triton
import triton.language as tl

import weft.language as wl
from tests.zoo.exhibit import N, exhibit


@triton.jit
def one_notifies(landed, slot, team):
    if wl.rank(team) == 0:
        wl.notify(landed + slot, 1, 1, team)
    else:
        wl.wait(landed + 1, 1, team)  # here


@exhibit("deadlock", "landed", "the notified slot is not the awaited one", one_notifies)
def another_slot_is_notified(team, bug):
    one_notifies[(1,)](team.signals(4, name="landed"), 2 if bug else 1, team.view)


@triton.jit
def never_notifies(landed, team, BUG: tl.constexpr):
    me = wl.rank(team)
    if not BUG:
        wl.notify(landed, 1 - me, 1, team)
    wl.wait(landed, 1, team)  # here


@exhibit("deadlock", "landed", "the signal is never notified", never_notifies)
def lost_signal(team, bug):
    never_notifies[(1,)](team.signals(1, name="landed"), team.view, bug)


@triton.jit
def notify_myself(landed, team, BUG: tl.constexpr):
    me = wl.rank(team)
    wl.notify(landed, me if BUG else 1 - me, 2, team)
    wl.wait(landed + (1 if BUG else 0), 2, team)  # here


@exhibit("deadlock", "landed", "the notify goes to the rank itself", notify_myself)
def notifies_itself(team, bug):
    notify_myself[(1,)](team.signals(2, name="landed"), team.view, bug)


@triton.jit
def wait_first(landed, team, BUG: tl.constexpr):
    me = wl.rank(team)
    if BUG:
        wl.wait(landed, 1, team)  # here
        wl.notify(landed, 1 - me, 1, team)
    else:
        wl.notify(landed, 1 - me, 1, team)
        wl.wait(landed, 1, team)


@exhibit("deadlock", "landed", "all ranks wait before they notify", wait_first)
def all_wait_first(team, bug):
    wait_first[(1,)](team.signals(1, name="landed"), team.view, bug)


@triton.jit
def notify_some(landed, count, team):
    if wl.rank(team) == 0:
        for _tile in range(count):
            wl.notify(landed, 1, 1, team, "add")
    else:
        wl.wait(landed, 4, team)  # here


@exhibit("deadlock", "landed", "the count of tiles is one too small", notify_some)
def one_tile_short(team, bug):
    notify_some[(1,)](team.signals(1, name="landed"), 3 if bug else 4, team.view)


@triton.jit
def notify_if(landed, rows, team, BUG: tl.constexpr):
    if wl.rank(team) == 0:
        if (rows % 2 == 0) | (not BUG):
            wl.notify(landed, 1, 1, team)
    else:
        wl.wait(landed, 1, team)  # here


@exhibit("deadlock", "landed", "the ragged case forgets its notify", notify_if)
def ragged_case_forgets(team, bug):
    notify_if[(1,)](team.signals(1, name="landed"), 7, team.view, bug)


@triton.jit
def spin(landed, wanted, team):
    if wl.rank(team) == 0:
        tl.atomic_add(wl.symm_at(landed, 1, team), 1, sem="release", scope="sys")
    else:
        while tl.atomic_add(landed, 0, sem="acquire", scope="sys") < wanted:  # here
            pass


@exhibit("deadlock", "landed", "a raw loop polls for a count that is never reached", spin)
def spins_in_vain(team, bug):
    spin[(1,)](team.signals(1, name="landed"), 2 if bug else 1, team.view)


@triton.jit
def chain(landed, team):
    me = tl.program_id(0)
    if me + 1 < tl.num_programs(0):
        wl.wait(landed + me + 1, 1, team)  # here
    wl.notify(landed + me, wl.rank(team), 1, team)


@triton.jit
def spin_plainly(landed, flag, team, BUG: tl.constexpr):
    me = wl.rank(team)
    wl.notify(landed, 1 - me, 1, team)
    wl.wait(landed, 1, team)
    if BUG:
        while tl.load(flag) == 0:  # here
            pass
    else:
        wl.wait(landed, 1, team)


@exhibit(
    "deadlock", "flag", "after a wait, a raw loop polls by plain loads a signal that is never written", spin_plainly
)
def spins_on_a_plain_load(team, bug):
    spin_plainly[(1,)](team.signals(1, name="landed"), team.signals(1, name="flag"), team.view, bug)


@exhibit("residency", "landed", "programs wait for later ones that get no SM", chain, sms=4)
def grid_beyond_residency(team, bug):
    chain[(6 if bug else 4,)](team.signals(8, name="landed"), team.view)


@triton.jit
def send_all(landed, team, COUNT: tl.constexpr):
    for slot in range(COUNT):
        wl.notify(landed + slot, 1 - wl.rank(team), 1, team)


@triton.jit
def swap_or_take(landed, team, BUG: tl.constexpr):
    me = tl.program_id(0)
    if BUG:
        wl.notify(landed + me, 1 - wl.rank(team), 1, team)
    wl.wait(landed + me, 1, team)  # here


@exhibit("residency", "landed", "programs of two grids too large for their GPUs wait for each other",
         swap_or_take, sms=4)  # fmt: skip
def grids_that_wait_for_each_other(team, bug):
    landed = team.signals(8, name="landed")
    if not bug:
        send_all[(1,)](landed, team.view, 8)
    swap_or_take[(8,)](landed, team.view, bug)


@triton.jit
def sum_tiles_in_order(done, tiles, BUG: tl.constexpr):
    """Wait for the tile two further on, which is correct only if each tile has its own program."""
    count, me = tl.num_programs(0), tl.program_id(0)
    for step in range(tl.cdiv(tiles, count)):
        tile = me + step * count
        if tile < tiles:
            if BUG:
                if tile + 2 < tiles:
                    while tl.atomic_add(done + tile + 2, 0, sem="acquire", scope="gpu") == 0:  # here
                        pass
            tl.atomic_xchg(done + tile, 1, sem="release", scope="gpu")


@exhibit("deadlock", "done", "with few SMs, programs wait for a tile that is their own next one",
         sum_tiles_in_order)  # fmt: skip
def tiles_in_an_order_for_many_sms(team, bug):
    done = team.zeros(8, torch.int32, name="done")
    sum_tiles_in_order[(min(8, team.max_programs()),)](done, 8, bug)


@triton.jit
def first_then_second(landed, mine, theirs, team):
    wl.notify(landed + mine, 1 - wl.rank(team), 1, team)
    wl.wait(landed + theirs, 1, team)  # here


@triton.jit
def second_phase(landed, mine, theirs, team):
    wl.notify(landed + mine, 1 - wl.rank(team), 1, team)
    wl.wait(landed + theirs, 1, team)  # here


@exhibit("launch-mismatch", "landed", "ranks launch two kernels in different orders", first_then_second, second_phase)
def kernels_in_another_order(team, bug):
    landed = team.signals(2, name="landed")
    if bug and team.rank == 1:
        second_phase[(1,)](landed, 1, 1, team.view)
        first_then_second[(1,)](landed, 0, 0, team.view)
    else:
        first_then_second[(1,)](landed, 0, 0, team.view)
        second_phase[(1,)](landed, 1, 1, team.view)


@triton.jit
def add_floats(total, parts, team, BUG: tl.constexpr):
    me = wl.rank(team)
    world: tl.constexpr = wl.num_ranks(team)
    x = 1e8 * (me == 0).to(tl.float32) + 3.3 * (me == 1).to(tl.float32) - 1e8 * (me == 2).to(tl.float32)
    if BUG:
        tl.atomic_add(wl.symm_at(total, 0, team), x, sem="relaxed", scope="sys")  # here
    else:
        tl.store(wl.symm_at(parts, 0, team) + me, x)
    wl.barrier(team)
    if (me == 0) & (not BUG):
        x = 0.0
        for peer in range(world):
            x += tl.load(parts + peer)
        tl.store(total, x)


@exhibit("divergence", "", "ranks add floats into one sum, in order of arrival", add_floats, world_size=3)
def sum_in_order_of_arrival(team, bug):
    total, parts = team.zeros(1, torch.float32, name="total"), team.zeros(3, torch.float32, name="parts")
    add_floats[(1,)](total, parts, team.view, bug)
    team.barrier()
    return total.clone()


@triton.jit
def take_rows(rows, ticket, out, N: tl.constexpr, BUG: tl.constexpr):
    row = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")  # here
    if not BUG:
        row = tl.program_id(0)
    at = tl.arange(0, N)
    tl.store(out + row * N + at, tl.load(rows + tl.program_id(0) * N + at))


@exhibit("divergence", "", "rows are compacted in order of the programs' arrival", take_rows)
def rows_in_order_of_arrival(team, bug):
    rows = torch.arange(4 * N, dtype=torch.float32)
    out = torch.zeros(4 * N)
    take_rows[(4,)](rows, team.local(1, torch.int32), out, N, bug)
    return out
