"""``relaxed-order`` and ``scope`` are named only where the missing release or acquire would have ordered the race."""

import pytest
import torch
import triton
import triton.language as tl

import weft.check
import weft.language as wl

pytestmark = pytest.mark.usefixtures("as_found")

N = 8


@triton.jit
def count_to_the_right(data, arrived, got, team, WANTED: tl.constexpr, N: tl.constexpr):
    """Three pieces to the right neighbour, each counted; the wait is for some of them."""
    me, world = wl.rank(team), wl.num_ranks(team)
    right, at = (me + 1) % world, tl.arange(0, N)
    for piece in range(3):
        tl.store(wl.symm_at(data, right, team) + piece * N + at, 1.0)
        wl.notify(arrived, right, 1, team, "add")
    wl.wait(arrived, WANTED, team)
    tl.store(got + at, tl.load(data + 2 * N + at))


@triton.jit
def count_beside(data, arrived, got, team, N: tl.constexpr, RELAXED: tl.constexpr):
    """Ranks 0 and 1 count at rank 2; rank 1 reads what rank 0 has stored there, polling or not."""
    me, at = wl.rank(team), tl.arange(0, N)
    if me == 0:
        tl.store(wl.symm_at(data, 2, team) + at, 1.0)
        wl.notify(arrived, 2, 1, team, "add")
    elif me == 1:
        if RELAXED:
            while tl.atomic_add(wl.symm_at(arrived, 2, team), 0, sem="relaxed", scope="sys") == 0:
                pass
        else:
            wl.notify(arrived, 2, 1, team, "add")
        tl.store(got + at, tl.load(wl.symm_at(data, 2, team) + at))


@triton.jit
def hand_on(data, arrived, got, team, N: tl.constexpr, RELAY: tl.constexpr, EARLY: tl.constexpr):
    """Rank 0 stores to rank 2 and tells rank 1, which tells rank 2."""
    me, at = wl.rank(team), tl.arange(0, N)
    if me == 0:
        if not EARLY:
            tl.store(wl.symm_at(data, 2, team) + at, 1.0)
        wl.notify(arrived, 1, 1, team)
        if EARLY:
            tl.store(wl.symm_at(data, 2, team) + at, 1.0)
    elif me == 1:
        if RELAY == "volatile":
            while tl.load(arrived, volatile=True) != 1:
                pass
        elif RELAY == "acquire":
            wl.wait(arrived, 1, team)
        wl.notify(arrived, 2, 1, team)
    else:
        wl.wait(arrived, 1, team)
        tl.store(got + at, tl.load(data + at))


def run(team, kernel, *constants):
    data, arrived = team.zeros(3 * N, torch.float32, name="data"), team.signals(1, name="arrived")
    if kernel is count_to_the_right:
        kernel[(1,)](data, arrived, team.local(N, torch.float32), team.view, *constants, N)
    else:
        kernel[(1,)](data, arrived, team.local(N, torch.float32), team.view, N, *constants)
    team.barrier()


@pytest.mark.parametrize(
    ("kernel", "constants", "kinds"),
    [
        (count_to_the_right, (3,), set()),
        (count_to_the_right, (2,), {"race"}),
        (count_beside, (False,), {"race"}),  # a notify that adds decides nothing by what it reads
        (count_beside, (True,), {"relaxed-order"}),
        (hand_on, ("acquire", False), set()),
        (hand_on, ("acquire", True), {"race"}),
        (hand_on, ("volatile", False), {"relaxed-order"}),
        (hand_on, ("volatile", True), {"race"}),  # an acquire would not have covered the store
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_an_acquire_would_not_have_ordered_is_no_fault_of_a_relaxed_access(kernel, constants, kinds):
    report = weft.check.check(run, 3, schedules=8, args=(kernel, *constants), deterministic=False)
    assert {found.finding.kind for found in report.wrong} == kinds, str(report)
    assert not {one.kind for found in report.wrong for one in found.also} & {"relaxed-order", "scope"}, str(report)
