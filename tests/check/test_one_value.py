"""Waits for one value: a finding only where a write may take the signal past it unseen, in raw loops and by CMP_EQ."""

import pytest
import triton
import triton.language as tl

import weft.check
import weft.language as wl

pytestmark = pytest.mark.usefixtures("as_found")


@triton.jit
def add_ones(counter, rank, times, team, NOTIFY: tl.constexpr):
    for _ in range(times):
        if NOTIFY:
            wl.notify(counter, rank, 1, team, "add")
        else:
            tl.atomic_add(wl.symm_at(counter, rank, team), 1, sem="acq_rel", scope="sys")


@triton.jit
def poll(counter, wanted, team, FORM: tl.constexpr):
    """Wait until ``counter`` is ``wanted`` alone."""
    if FORM == "add":
        while tl.atomic_add(counter, 0, sem="acquire", scope="sys") != wanted:  # add
            pass
    elif FORM == "volatile":
        while tl.load(counter, volatile=True) != wanted:  # volatile
            pass
    elif FORM == "cas":
        while tl.atomic_cas(counter, wanted, wanted, sem="acquire", scope="sys") != wanted:  # cas
            pass
    elif FORM == "not":
        while not (wanted == tl.atomic_add(counter, 0, sem="acquire", scope="sys")):  # noqa: SIM201  # not
            pass
    elif FORM == "variable":
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys").to(tl.int64)
        while seen != wanted:
            seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys").to(tl.int64)  # variable
    elif FORM == "computed":
        while tl.atomic_add(counter, 0, sem="acquire", scope="sys") != wl.num_ranks(team) * (wanted // 2):  # computed
            pass
    elif FORM == "difference":
        while tl.atomic_add(counter, 0, sem="acquire", scope="sys") - wanted != 0:  # difference
            pass
    elif FORM == "eq":
        wl.shmem.signal_wait_until(counter, wl.shmem.CMP_EQ, wanted, team)  # eq


@triton.jit
def count_and_poll(counter, wanted, extra, team, FORM: tl.constexpr, NOTIFY: tl.constexpr):
    """Program 0 of rank 0 waits for the count that the other programs and ranks make, and ``extra`` more."""
    if (wl.rank(team) == 0) & (tl.program_id(0) == 0):
        poll(counter, wanted, team, FORM)
    else:
        add_ones(counter, 0, 1, team, NOTIFY)
        if (wl.rank(team) == 1) & (tl.program_id(0) == 0):
            add_ones(counter, 0, extra, team, NOTIFY)


FORMS = ("add", "volatile", "cas", "not", "variable", "computed", "difference", "eq")


def counted(team, form, extra, notify):
    counter = team.signals(1, name="counter")
    adders = 2 * team.size - 1
    even = int(form == "computed")  # its value is even
    count_and_poll[(2,)](counter, adders + even, even + extra, team.view, form, notify)
    team.barrier()


@pytest.mark.parametrize("form", FORMS)
def test_a_count_that_nobody_takes_past_the_value_is_clean_and_one_more_is_a_finding(form):
    report = weft.check.check(counted, 2, schedules=4, args=(form, 0, form in ("add", "eq")))
    assert report.ok, str(report)
    report = weft.check.check(counted, 2, schedules=6, args=(form, 1, False))
    kinds = [found.finding.kind for found in report.wrong]
    if form == "difference" and "deadlock" in kinds:
        kinds.remove("deadlock")  # the condition does not show the value, so a run that is stuck cannot tell
    assert kinds == ["equality-wait"], str(report)
    finding = next(found.finding for found in report.wrong if found.finding.kind == "equality-wait")
    assert finding.sides[0].place.text.endswith(f"# {form}")


@triton.jit
def meet(counter, rounds, team):
    """A barrier of all ranks on a counter of rank 0, ``rounds`` times."""
    home = wl.symm_at(counter, 0, team)
    for round in range(rounds):
        tl.atomic_add(home, 1, sem="acq_rel", scope="sys")
        while tl.atomic_add(home, 0, sem="acquire", scope="sys") != wl.num_ranks(team) * (round + 1):
            pass


@triton.jit
def lock(flag, total, team, RETURNS: tl.constexpr):
    """Add to a total under a spin lock."""
    home, at = wl.symm_at(flag, 0, team), wl.symm_at(total, 0, team)
    while tl.atomic_cas(home, 0, 1, sem="acquire", scope="sys") != 0:
        pass
    tl.store(at, tl.load(at) + 1)
    tl.debug_barrier()
    if RETURNS:
        tl.atomic_xchg(home, 0, sem="release", scope="sys")


@triton.jit
def count_down(counter, team, LEAVES_OUT: tl.constexpr):
    """Rank 0 waits until all others have taken one from the counter."""
    home = wl.symm_at(counter, 0, team)
    if wl.rank(team) == 0:
        while tl.atomic_add(counter, 0, sem="acquire", scope="sys") != 0:
            pass
    elif wl.rank(team) != LEAVES_OUT:
        tl.atomic_add(home, -1, sem="release", scope="sys")


@triton.jit
def fill_and_empty(full, rounds, team):
    """A flag that rank 0 sets on both sides, and rank 1 clears."""
    for _ in range(rounds):
        if wl.rank(team) == 0:
            while tl.atomic_add(full, 0, sem="acquire", scope="sys") != 0:
                pass
            wl.notify(full, 0, 1, team)
            wl.notify(full, 1, 1, team)
        else:
            while tl.load(full, volatile=True) != 1:
                pass
            wl.fence(team)
            wl.notify(full, 1, 0, team)
            wl.notify(full, 0, 0, team)


def on_a_signal(team, kernel, start, *given):
    signal = team.signals(1, name="signal")
    signal.fill_(start)
    team.barrier()
    if kernel is lock:
        lock[(1,)](signal, team.zeros(1, name="total"), team.view, *given)
    elif kernel is count_down:
        count_down[(1,)](signal, team.view, *given)
    else:
        kernel[(1,)](signal, *given, team.view)
    team.barrier()


@pytest.mark.parametrize(
    ("kernel", "start", "given", "kind"),
    [
        (meet, 0, (1,), None),
        (meet, 0, (2,), "equality-wait"),  # a rank's next round may begin before another has seen the end of this one
        (lock, 0, (True,), None),
        (lock, 0, (False,), "deadlock"),
        (count_down, 2, (0,), None),
        (count_down, 2, (1,), "deadlock"),
        (count_down, 1, (0,), "equality-wait"),
        (fill_and_empty, 0, (3,), None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_barriers_locks_and_counts_of_raw_loops(kernel, start, given, kind):
    report = weft.check.check(
        on_a_signal, 2 if kernel is fill_and_empty else 3, schedules=8, args=(kernel, start, *given)
    )
    assert [found.finding.kind for found in report.wrong] == [kind] * (kind is not None), str(report)
