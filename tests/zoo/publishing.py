"""Bugs of data and the signal after them: incomplete releases and missing acquires."""

import torch
import triton
import triton.language as tl

import weft.language as wl
from tests.zoo.exhibit import N, exhibit
from weft.language.lowering import stock


def tensors(team):
    return team.zeros((N,), torch.float32, name="data"), team.signals(4, name="landed"), team.local(N, torch.float32)


@triton.jit
def publish_without_barrier(data, landed, got, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    if wl.rank(team) == 0:
        tl.store(wl.symm_at(data, 1, team) + at, 1.0)  # here
        if not BUG:
            tl.debug_barrier()
        tl.atomic_xchg(wl.symm_at(landed, 1, team), 1, sem="release", scope="sys")
    else:
        wl.wait(landed, 1, team)
        tl.store(got + at, tl.load(data + at))  # here


@exhibit(
    "missing-barrier", "data", "a scalar release publishes a tile without a CTA barrier", publish_without_barrier,
    published=True,
)  # fmt: skip
def tile_published_without_barrier(team, bug):
    data, landed, got = tensors(team)
    publish_without_barrier[(1,)](data, landed, got, team.view, N, bug)
    team.barrier()


@triton.jit
def signal_after_descriptor_store(data, landed, got, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    if wl.rank(team) == 0:
        out = tl.make_tensor_descriptor(wl.symm_at(data, 1, team), [1, N], [N, 1], [1, N])
        out.store([0, 0], tl.full((1, N), 1.0, tl.float32))  # here
        if BUG:
            tl.debug_barrier()
            tl.atomic_xchg(wl.symm_at(landed, 1, team), 1, sem="release", scope="sys")
        else:
            wl.notify(landed, 1, 1, team)
    else:
        wl.wait(landed, 1, team)
        tl.store(got + at, tl.load(data + at))  # here


@exhibit(
    "undrained-tma", "data", "a signal after a descriptor store that may not have landed", signal_after_descriptor_store,
    published=True,
)  # fmt: skip
def signal_overtakes_descriptor_store(team, bug):
    data, landed, got = tensors(team)
    signal_after_descriptor_store[(1,)](data, landed, got, team.view, N, bug)
    team.barrier()


@triton.jit
def descriptor_load_after_acquire(data, landed, got, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    if wl.rank(team) == 0:
        tl.store(wl.symm_at(data, 1, team) + at, 1.0)  # here
        wl.notify(landed, 1, 1, team)
    else:
        if BUG:
            while tl.atomic_add(landed, 0, sem="acquire", scope="sys") < 1:
                pass
        else:
            wl.wait(landed, 1, team)
        source = tl.make_tensor_descriptor(data, [1, N], [N, 1], [1, N])
        x = source.load([0, 0])  # here
        tl.store(got + at, tl.reshape(x, (N,)))


@exhibit(
    "proxy-fence", "data", "a descriptor load of a peer's data without a proxy fence after the acquire",
    descriptor_load_after_acquire, published=True,
)  # fmt: skip
def descriptor_load_without_proxy_fence(team, bug):
    data, landed, got = tensors(team)
    descriptor_load_after_acquire[(1,)](data, landed, got, team.view, N, bug)
    team.barrier()


@triton.jit
def flagged(
    data,
    landed,
    got,
    team,
    N: tl.constexpr,
    SEM: tl.constexpr,
    SCOPE: tl.constexpr,
    LOOK: tl.constexpr,
    SEES: tl.constexpr,
):
    at = tl.arange(0, N)
    if wl.rank(team) == 0:
        tl.store(wl.symm_at(data, 1, team) + at, 1.0)  # here
        tl.debug_barrier()
        tl.atomic_xchg(wl.symm_at(landed, 1, team), 1, sem=SEM, scope=SCOPE)  # flag
    else:
        while tl.atomic_add(landed, 0, sem=LOOK, scope=SEES) < 1:  # flag
            pass
        tl.store(got + at, tl.load(data + at))  # here


def with_orders(team, sem="release", scope="sys", look="acquire", sees="sys"):
    data, landed, got = tensors(team)
    flagged[(1,)](data, landed, got, team.view, N, sem, scope, look, sees)
    team.barrier()


@exhibit("scope", "landed", "a release at gpu scope for a peer", flagged, mark="flag")
def release_of_gpu_scope(team, bug):
    with_orders(team, scope="gpu" if bug else "sys")


@exhibit("scope", "landed", "an acquire at gpu scope of a peer's release", flagged, mark="flag")
def acquire_of_gpu_scope(team, bug):
    with_orders(team, sees="gpu" if bug else "sys")


@exhibit("relaxed-order", "data", "a relaxed atomic sets the flag", flagged)
def release_that_is_relaxed(team, bug):
    with_orders(team, sem="relaxed" if bug else "release")


@exhibit("relaxed-order", "data", "a relaxed atomic polls the flag", flagged)
def acquire_that_is_relaxed(team, bug):
    with_orders(team, look="relaxed" if bug else "acquire")


@triton.jit
def polled(data, landed, got, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    if wl.rank(team) == 0:
        tl.store(wl.symm_at(data, 1, team) + at, 1.0)  # here
        wl.notify(landed, 1, 1, team)
    else:
        if BUG:
            while tl.load(landed, volatile=True) < 1:
                pass
        else:
            wl.wait(landed, 1, team)
        tl.store(got + at, tl.load(data + at))  # here


@exhibit("relaxed-order", "data", "a volatile load, which is no acquire, polls the flag", polled)
def volatile_poll(team, bug):
    data, landed, got = tensors(team)
    polled[(1,)](data, landed, got, team.view, N, bug)
    team.barrier()


@triton.jit
def plainly_flagged(data, landed, got, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    if wl.rank(team) == 0:
        tl.store(wl.symm_at(data, 1, team) + at, 1.0)
        tl.debug_barrier()
        if BUG:
            tl.store(wl.symm_at(landed, 1, team), 1)  # here
        else:
            wl.notify(landed, 1, 1, team)
    else:
        wl.wait(landed, 1, team)  # here
        tl.store(got + at, tl.load(data + at))


@exhibit("race", "landed", "a plain store sets the flag", plainly_flagged)
def flag_by_plain_store(team, bug):
    data, landed, got = tensors(team)
    plainly_flagged[(1,)](data, landed, got, team.view, N, bug)
    team.barrier()


@triton.jit
def told_too_early(data, landed, got, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    if wl.rank(team) == 0:
        if BUG:
            wl.notify(landed, 1, 1, team)
        tl.store(wl.symm_at(data, 1, team) + at, 1.0)  # here
        if not BUG:
            wl.notify(landed, 1, 1, team)
    else:
        wl.wait(landed, 1, team)
        tl.store(got + at, tl.load(data + at))  # here


@exhibit("race", "data", "the notify comes before the stores", told_too_early)
def notify_before_store(team, bug):
    data, landed, got = tensors(team)
    told_too_early[(1,)](data, landed, got, team.view, N, bug)
    team.barrier()


@triton.jit
def fenced(data, landed, got, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    if wl.rank(team) == 0:
        tl.store(wl.symm_at(data, 1, team) + at, 1.0)  # here
        if BUG:
            tl.debug_barrier()
        else:
            wl.fence(team)
        tl.atomic_xchg(wl.symm_at(landed, 1, team), 1, sem="relaxed", scope="sys")
    else:
        wl.wait(landed, 1, team)
        tl.store(got + at, tl.load(data + at))  # here


@exhibit("relaxed-order", "data", "a relaxed flag without a fence between it and the data", fenced)
def relaxed_flag_without_fence(team, bug):
    data, landed, got = tensors(team)
    fenced[(1,)](data, landed, got, team.view, N, bug)
    team.barrier()


@triton.jit
def wrong_slot(data, landed, got, team, N: tl.constexpr, BUG: tl.constexpr):
    me = wl.rank(team)
    at = tl.arange(0, N)
    tl.store(wl.symm_at(data, 1 - me, team) + at, 1.0)  # here
    wl.notify(landed + me, 1 - me, 1, team)
    wl.notify(landed + me, me, 1, team)
    if BUG:
        wl.wait(landed + me, 1, team)
    else:
        wl.wait(landed + 1 - me, 1, team)
    tl.store(got + at, tl.load(data + at))  # here


@exhibit("race", "data", "a wait for the rank's own slot of the signals", wrong_slot)
def wait_for_the_wrong_slot(team, bug):
    data, landed, got = tensors(team)
    wrong_slot[(1,)](data, landed, got, team.view, N, bug)
    team.barrier()


@triton.jit
def chunked(data, landed, got, team, N: tl.constexpr, BUG: tl.constexpr):
    half = tl.arange(0, N // 2)
    if wl.rank(team) == 0:
        for chunk in range(2):
            tl.store(wl.symm_at(data, 1, team) + chunk * (N // 2) + half, 1.0)  # here
            wl.notify(landed + chunk, 1, 1, team)
    else:
        for chunk in range(2):
            if BUG:
                wl.wait(landed, 1, team)
            else:
                wl.wait(landed + chunk, 1, team)
            tl.store(got + chunk * (N // 2) + half, tl.load(data + chunk * (N // 2) + half))  # here


@exhibit("race", "data", "the second chunk is read after a wait for the first", chunked)
def reads_past_its_chunk(team, bug):
    data, landed, got = tensors(team)
    chunked[(1,)](data, landed, got, team.view, N, bug)
    team.barrier()


@triton.jit
def between_programs(data, flag, got, N: tl.constexpr, SCOPE: tl.constexpr):
    at = tl.arange(0, N)
    if tl.program_id(0) == 0:
        tl.store(data + at, 1.0)
        tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem="release", scope=SCOPE)  # here
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope=SCOPE) < 1:  # here
            pass
        tl.store(got + at, tl.load(data + at))


@exhibit("scope", "landed", "a release at cta scope for another program", between_programs, world_size=1)
def release_of_cta_scope(team, bug):
    data, landed, got = tensors(team)
    between_programs[(2,)](data, landed, got, N, "cta" if bug else "gpu")


@triton.jit
def relayed(data, landed, got, team, N: tl.constexpr, BUG: tl.constexpr):
    me, at = wl.rank(team), tl.arange(0, N)
    if me == 0:
        tl.store(wl.symm_at(data, 2, team) + at, 1.0)  # here
        wl.notify(landed, 1, 1, team)
    elif me == 1:
        if BUG:
            while tl.load(landed, volatile=True) < 1:
                pass
        else:
            wl.wait(landed, 1, team)
        wl.notify(landed, 2, 1, team)
    else:
        wl.wait(landed, 1, team)
        tl.store(got + at, tl.load(data + at))  # here


@exhibit(
    "relaxed-order", "data", "a rank between two ranks forwards the signal without acquiring it", relayed, world_size=3
)
def relay_that_does_not_acquire(team, bug):
    data, landed, got = tensors(team)
    relayed[(1,)](data, landed, got, team.view, N, bug)
    team.barrier()


@triton.jit
def store_then_load_tile(data, got, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(data + at, 1.0)  # here
    if not BUG:
        tl.debug_barrier()
        stock.fence_before_tma_loads()
    tile = tl.make_tensor_descriptor(data, [1, N], [N, 1], [1, N])
    x = tile.load([0, 0])  # here
    tl.store(got + at, tl.reshape(x, (N,)))


@exhibit("proxy-fence", "data", "a program loads through a descriptor what it stored without one",
         store_then_load_tile, world_size=1)  # fmt: skip
def own_store_loaded_through_a_descriptor(team, bug):
    data, _, got = tensors(team)
    store_then_load_tile[(1,)](data, got, N, bug)


@triton.jit
def store_tile_then_load(data, got, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    tile = tl.make_tensor_descriptor(data, [1, N], [N, 1], [1, N])
    tile.store([0, 0], tl.full((1, N), 1.0, tl.float32))  # here
    if not BUG:
        stock.drain_tma_stores()
        tl.debug_barrier()
    tl.store(got + at, tl.load(data + at))  # here


@exhibit("undrained-tma", "data", "a program reads back a descriptor store, which may not have landed",
         store_tile_then_load, world_size=1)  # fmt: skip
def own_descriptor_store_read_back(team, bug):
    data, _, got = tensors(team)
    store_tile_then_load[(1,)](data, got, N, bug)


@triton.jit
def reduced(total, landed, got, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    if wl.rank(team) == 0:
        tile = tl.make_tensor_descriptor(total, [1, N], [N, 1], [1, N])
        tile.atomic_add([0, 0], tl.full((1, N), 1.0, tl.float32))  # here
        if BUG:
            tl.debug_barrier()
            tl.atomic_xchg(wl.symm_at(landed, 1, team), 1, sem="release", scope="sys")
        else:
            wl.notify(landed, 1, 1, team)
    else:
        wl.wait(landed, 1, team)
        tl.store(got + at, tl.load(wl.symm_at(total, 0, team) + at))  # here


@exhibit("undrained-tma", "data", "a signal after a descriptor's reduction that may not have landed", reduced)
def signal_overtakes_descriptor_reduction(team, bug):
    data, landed, got = tensors(team)
    reduced[(1,)](data, landed, got, team.view, N, bug)
    team.barrier()


@triton.jit
def write_alone(data, wanted, out, team, N: tl.constexpr, BUG: tl.constexpr):
    """The first rank that sees no other one in the section writes rank 0's rows; the rest leave.

    BUG  each announces itself in its own flag, then looks at the other's: both may look before either flag arrives. Else both
         swap one word, whose order is total
    """
    me, at = wl.rank(team), tl.arange(0, N)
    if BUG:
        wl.notify(wanted + me, 1 - me, 1, team)
        taken = tl.atomic_add(wanted + (1 - me), 0, sem="acquire", scope="sys")
    else:
        taken = tl.atomic_xchg(wl.symm_at(wanted, 0, team), 1, sem="acq_rel", scope="sys")
    if taken == 0:
        tl.store(wl.symm_at(data, 0, team) + at, tl.full((N,), 1.0, tl.float32) + me)  # here
    tl.store(out, taken)


@exhibit(
    "race", "data", "two ranks enter a section: each looks at the other's flag before that flag arrives (store buffering)",
    write_alone,
)  # fmt: skip
def section_by_two_flags(team, bug):
    data, wanted, out = tensors(team)
    write_alone[(1,)](data, wanted, out, team.view, N, bug)
    team.barrier()
