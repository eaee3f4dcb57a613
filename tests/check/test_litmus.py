"""Litmus tests: the exact set of readable values over all schedules, late stores included.

The model: stores, notifies included, may arrive late. A notify arrives after what it covers, and stores after a fence arrive
after those before it; both cover what the program has acquired from others of its GPU, whatever the scope. Loads and atomics
take effect at once, and all ranks see one order of arrivals. PTX allows more: an atomic overtaken by a later load of its thread
(store buffering), early loads (load buffering), and two orders of independent writes (IRIW), unless there is a fence.sc. Each
test below says so if its set is smaller than PTX's.
"""

import pytest
import torch
import triton
import triton.language as tl

import weft.check
import weft.language as wl

# Offsets far enough apart to be separate signals.
Y: tl.constexpr = tl.constexpr(64)
FLAG: tl.constexpr = tl.constexpr(128)


def outcomes(kernel, world_size=2, *, constants=(), kinds=(), programs=1, counter=False, limit=3000):
    """Set of all tuples that the ranks (or programs of one rank) stored in ``out``.

    Asserts the kinds of findings.
    """
    seen = set()

    def main(team):
        x, out = team.zeros(256, torch.int32, name="x"), torch.zeros(2, dtype=torch.int32)
        counts = (torch.zeros(1, dtype=torch.int64),) if counter else ()
        kernel[(programs,)](x, out, *counts, team.view, *constants)
        return out.tolist()

    def collect(results):
        seen.add(tuple(results[0]) if world_size == 1 else tuple(r[0] for r in results))

    report = weft.check.check(
        main, world_size, strategy="exhaustive", schedules=limit, deterministic=False, on_results=collect
    )
    assert report.exhaustive == "exhausted"
    assert {f.finding.kind for f in report.findings} == set(kinds), str(report)
    return seen


@triton.jit
def message_passing(x, out, team, SEM: tl.constexpr, SCOPE: tl.constexpr, BARRIER: tl.constexpr):
    at = tl.arange(0, 2)
    if wl.rank(team) == 0:
        tl.store(wl.symm_at(x, 1, team) + at, 1)
        if BARRIER:
            tl.debug_barrier()
        tl.atomic_xchg(wl.symm_at(x, 1, team) + FLAG, 1, sem=SEM, scope=SCOPE)
    else:
        if tl.atomic_add(x + FLAG, 0, sem="acquire", scope="sys") == 1:
            tl.store(out, 1 + tl.min(tl.load(x + at)))


def test_message_passing():
    """(_, 0): the flag was not seen; 2: flag and data; 1: the flag without the data."""
    assert outcomes(message_passing, constants=("release", "sys", True)) == {(0, 0), (0, 2)}


def test_message_passing_without_order():
    weak = {(0, 0), (0, 1), (0, 2)}
    assert outcomes(message_passing, constants=("release", "sys", False), kinds=["missing-barrier"]) == weak
    assert outcomes(message_passing, constants=("relaxed", "sys", True), kinds=["relaxed-order"]) == weak
    assert outcomes(message_passing, constants=("release", "gpu", True), kinds=["scope"]) == weak


@triton.jit
def fenced(x, out, team, SENDER: tl.constexpr, SEM: tl.constexpr):
    """The fence orders the store before the atomic, which alone delivers it."""
    if wl.rank(team) == SENDER:
        tl.store(wl.symm_at(x, 1 - SENDER, team), 1)
        wl.fence(team)
        tl.atomic_xchg(wl.symm_at(x, 1 - SENDER, team) + FLAG, 1, sem=SEM, scope="sys")
    else:
        seen = tl.load(x, volatile=True)
        flag = tl.atomic_add(x + FLAG, 0, sem="acquire", scope="sys")
        tl.store(out, seen * 10 + flag)


@pytest.mark.parametrize("sem", ["relaxed", "acquire", "release"])
def test_an_atomic_after_a_fence_delivers_what_was_stored_before_it(sem):
    """0, 10: the store was seen or not, without the flag; 1, 11: with it. The load comes before the atomic."""
    for sender in (0, 1):
        expected = {(0, seen) if sender == 0 else (seen, 0) for seen in (0, 1, 10, 11)}
        assert outcomes(fenced, constants=(sender, sem), kinds=["race"]) == expected


@triton.jit
def notified(x, out, team):
    if wl.rank(team) == 0:
        tl.store(wl.symm_at(x, 1, team) + tl.arange(0, 2), 1)
        wl.notify(x + FLAG, 1, 1, team)
    else:
        wl.wait(x + FLAG, 1, team)
        tl.store(out, tl.min(tl.load(x + tl.arange(0, 2))))


def test_notify_and_wait_pass_a_message():
    assert outcomes(notified) == {(0, 1)}


@triton.jit
def in_one_gpu(x, out, team, SCOPE: tl.constexpr):
    at = tl.arange(0, 2)
    if tl.program_id(0) == 0:
        tl.store(x + at, 1)
        tl.debug_barrier()
        tl.atomic_xchg(x + FLAG, 1, sem="release", scope=SCOPE)
    else:
        if tl.atomic_add(x + FLAG, 0, sem="acquire", scope=SCOPE) == 1:
            tl.store(out + 1, 1 + tl.min(tl.load(x + at)))


def test_gpu_scope_is_enough_within_a_gpu():
    for scope in ("gpu", "sys"):
        assert outcomes(in_one_gpu, 1, constants=(scope,), programs=2) == {(0, 0), (0, 2)}


@triton.jit
def passed_on(x, out, counter, team, HOW: tl.constexpr):
    """Rank 0's program 1 stores to rank 1, and tells program 0, which tells rank 1."""
    at = tl.arange(0, 2)
    remote = wl.symm_at(x, 1, team)
    if wl.rank(team) == 0:
        if tl.program_id(0) == 1:
            tl.store(remote + at, 1)
            if HOW != "barrier":
                tl.debug_barrier()
                tl.atomic_xchg(counter, 1, sem=HOW, scope="gpu")
        if HOW == "barrier":
            wl.grid_barrier(counter, team)
        if tl.program_id(0) == 0:
            if HOW != "barrier":
                wl.wait(counter, 1, team)
            wl.notify(x + FLAG, 1, 1, team)
    elif tl.program_id(0) == 0:
        if tl.atomic_add(x + FLAG, 0, sem="acquire", scope="sys") == 1:
            tl.store(out, 1 + tl.min(tl.load(x + at)))


@pytest.mark.parametrize(
    ("how", "kinds", "values"),
    [
        pytest.param("barrier", (), (0, 2), marks=pytest.mark.sweep),
        ("release", (), (0, 2)),
        ("relaxed", ("relaxed-order",), (0, 1, 2)),
    ],
)
def test_a_notify_covers_stores_of_other_programs_that_a_release_at_gpu_scope_has_covered(how, kinds, values):
    """PTX's causality order is transitive, whatever the scopes of its steps."""
    seen = outcomes(passed_on, constants=(how,), kinds=kinds, programs=2, counter=True)
    assert seen == {(0, value) for value in values}


@triton.jit
def store_buffering(x, out, team, FENCE: tl.constexpr):
    me = wl.rank(team)
    tl.store(wl.symm_at(x, 0, team) + Y * me, 1)
    if FENCE:
        wl.fence(team)
    tl.store(out, tl.load(wl.symm_at(x, 0, team) + Y * (1 - me), volatile=True))


def test_store_buffering():
    assert outcomes(store_buffering, constants=(False,), kinds=["race"]) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_fence_does_not_keep_a_store_from_being_overtaken_by_a_load():
    """A fence is fence.acq_rel; only fence.sc would."""
    assert outcomes(store_buffering, constants=(True,), kinds=["race"]) == {(0, 0), (0, 1), (1, 0), (1, 1)}


@triton.jit
def store_buffering_by_notify(x, out, team):
    me = wl.rank(team)
    wl.notify(x + Y * me, 0, 1, team)
    tl.store(out, tl.atomic_add(wl.symm_at(x, 0, team) + Y * (1 - me), 0, sem="acquire", scope="sys"))


def test_store_buffering_by_release_and_acquire():
    assert outcomes(store_buffering_by_notify) == {(0, 0), (0, 1), (1, 0), (1, 1)}


@triton.jit
def store_buffering_by_atomics(x, out, team, SEM: tl.constexpr):
    me = wl.rank(team)
    home = wl.symm_at(x, 0, team)
    tl.atomic_xchg(home + Y * me, 1, sem=SEM, scope="sys")
    tl.store(out, tl.atomic_add(home + Y * (1 - me), 0, sem=SEM, scope="sys"))


def test_store_buffering_by_atomics():
    """PTX allows (0, 0) too: even after an acq_rel atomic, a load of other bytes may overtake it."""
    for sem in ("relaxed", "acq_rel"):
        assert outcomes(store_buffering_by_atomics, constants=(sem,)) == {(0, 1), (1, 0), (1, 1)}


@triton.jit
def two_notifies(x, out, team):
    if wl.rank(team) == 0:
        wl.notify(x, 1, 1, team)
        wl.notify(x + Y, 1, 1, team)
    else:
        second = tl.atomic_add(x + Y, 0, sem="acquire", scope="sys")
        tl.store(out, 2 * second + tl.atomic_add(x, 0, sem="acquire", scope="sys"))


def test_notifies_of_one_program_arrive_in_order():
    assert {seen for _, seen in outcomes(two_notifies)} == {0, 1, 3}


@triton.jit
def load_buffering(x, out, team):
    me = wl.rank(team)
    seen = tl.load(wl.symm_at(x, 0, team) + Y * me, volatile=True)
    tl.store(wl.symm_at(x, 0, team) + Y * (1 - me), 1)
    tl.store(out, seen)


def test_load_buffering_does_not_happen_here():
    """PTX allows (1, 1) too: the stores do not depend on the loads."""
    assert outcomes(load_buffering, kinds=["race"]) == {(0, 0), (0, 1), (1, 0)}


@triton.jit
def iriw(x, out, team):
    """Ranks 0 and 1 write x and y, ranks 2 and 3 read them in opposite orders."""
    me = wl.rank(team)
    home = wl.symm_at(x, 0, team)
    if me < 2:
        tl.atomic_xchg(home + Y * me, 1, sem="release", scope="sys")
    else:
        first = tl.atomic_add(home + Y * (me - 2), 0, sem="acquire", scope="sys")
        second = tl.atomic_add(home + Y * (3 - me), 0, sem="acquire", scope="sys")
        tl.store(out, 2 * first + second)


def test_independent_reads_of_independent_writes():
    """2: the first write seen and not the second.

    Both readers cannot return it, as that would be two orders. PTX allows (2, 2) too.
    """
    seen = {(third, fourth) for _, _, third, fourth in outcomes(iriw, 4)}
    assert seen == {(a, b) for a in range(4) for b in range(4)} - {(2, 2)}


@triton.jit
def release_sequence(x, out, team, BREAK: tl.constexpr):
    """Rank 0 publishes, rank 1 increments (relaxed), rank 2 acquires rank 1's value."""
    me = wl.rank(team)
    home = wl.symm_at(x, 2, team)
    if me == 0:
        tl.store(home + tl.arange(0, 2), 1)
        tl.debug_barrier()
        tl.atomic_xchg(home + FLAG, 1, sem="release", scope="sys")
    elif me == 1:
        if BREAK:
            if tl.atomic_add(home + FLAG, 0, sem="relaxed", scope="sys") == 1:
                tl.store(home + FLAG, 2)
        else:
            tl.atomic_cas(home + FLAG, 1, 2, sem="relaxed", scope="sys")
    else:
        if tl.atomic_add(x + FLAG, 0, sem="acquire", scope="sys") == 2:
            tl.store(out, 1 + tl.min(tl.load(x + tl.arange(0, 2))))


def test_a_read_modify_write_goes_on_with_a_release_sequence():
    seen = {third for _, _, third in outcomes(release_sequence, 3, constants=(False,))}
    assert seen == {0, 2}


def test_a_plain_store_ends_a_release_sequence():
    outcomes(release_sequence, 3, constants=(True,), kinds=["relaxed-order"])


@triton.jit
def answered(stage, inbox, team, PROOF: tl.constexpr):
    """Rank 0 clears a stage and sends words; rank 1 receives them and writes to the stage."""
    at = tl.arange(0, 2)
    if wl.rank(team) == 0:
        wl.lamport_clear(stage + at, at < 2)
        if PROOF == "fence":
            wl.fence(team)
        if PROOF == "volatile":
            tl.load(stage + at, volatile=True)
        wl.lamport_store(wl.symm_at(inbox, 1, team) + at, tl.full((2,), 1.0, tl.float32), at < 2)
    else:
        wl.lamport_load(inbox + at, at < 2, team)
        wl.lamport_store(wl.symm_at(stage, 0, team) + at, tl.full((2,), 2.0, tl.float32), at < 2)


def left_in_the_stage(proof, kinds=()):
    seen = set()

    def main(team):
        stage, inbox = team.zeros(2, torch.float32, name="stage"), team.empty(2, torch.float32, name="inbox")
        stage.fill_(-0.0)
        inbox.fill_(-0.0)
        team.barrier()
        answered[(1,)](stage, inbox, team.view, proof)
        team.barrier()
        return stage.tolist()

    report = weft.check.check(
        main, 2, strategy="exhaustive", schedules=500, deterministic=False, on_results=lambda all: seen.add(all[0][0])
    )
    assert report.exhaustive == "exhausted"
    assert {f.finding.kind for f in report.findings} == set(kinds), str(report)
    return seen


def test_a_clearing_may_land_later_than_the_answer_to_what_was_sent_after_it():
    assert left_in_the_stage("none", kinds=["overtaken"]) == {0.0, 2.0}
    assert left_in_the_stage("fence") == {2.0}
    assert left_in_the_stage("volatile") == {2.0}


@triton.jit
def coherence(x, out, team):
    if wl.rank(team) == 0:
        tl.atomic_xchg(wl.symm_at(x, 1, team), 1, sem="relaxed", scope="sys")
        tl.atomic_xchg(wl.symm_at(x, 1, team), 2, sem="relaxed", scope="sys")
    else:
        first = tl.atomic_add(x, 0, sem="relaxed", scope="sys")
        second = tl.atomic_add(x, 0, sem="relaxed", scope="sys")
        tl.store(out, 10 * first + second)


def test_one_word_is_never_seen_to_go_back():
    assert {second for _, second in outcomes(coherence)} == {0, 1, 2, 11, 12, 22}


@triton.jit
def two_tickets(x, out, team):
    tl.store(out, tl.atomic_add(wl.symm_at(x, 0, team), 1, sem="acq_rel", scope="sys"))


def test_tickets_are_given_once():
    assert outcomes(two_tickets, 3) == {(a, b, 3 - a - b) for a in range(3) for b in range(3) if a != b}


def test_a_search_that_stops_early_says_bounded():
    report = weft.check.check(
        lambda team: iriw[(1,)](team.zeros(256, torch.int32), torch.zeros(2, dtype=torch.int32), team.view), 4,
        strategy="exhaustive", schedules=3,
    )  # fmt: skip
    assert report.exhaustive == "bounded"
    assert "bounded" in str(report)


@triton.jit
def late_flag(x, out, team, HOW: tl.constexpr, WANTED: tl.constexpr):
    """Rank 0 publishes data, then sets Y by an atomic, which may overtake the flag.

    Rank 1 reads Y, then the flag.
    """
    me = wl.rank(team)
    home = wl.symm_at(x, 1, team)
    if me == 0:
        tl.store(home + tl.arange(0, 2), 1)
        wl.notify(x + FLAG, 1, 4, team)
        tl.atomic_xchg(home + Y, 1, sem="relaxed", scope="sys")
    elif me == 1:
        if tl.load(x + Y, volatile=True) == 1:
            if HOW == "fence":
                flag = tl.load(x + FLAG, volatile=True)
                wl.fence(team)
            else:
                flag = tl.atomic_add(x + FLAG, 0, sem="acquire", scope="sys")
            if flag == WANTED:
                tl.store(out, 1 + tl.min(tl.load(x + tl.arange(0, 2))))
    else:
        tl.atomic_add(home + FLAG, 2, sem="relaxed", scope="sys")


def test_an_acquire_of_the_old_value_learns_nothing_of_a_notify_that_is_under_way():
    """The twin reads the data only if it has seen the flag."""
    for how in ("acquire", "fence"):
        assert {read for _, read in outcomes(late_flag, constants=(how, 0), kinds=["relaxed-order"])} == {0, 1, 2}
        assert {read for _, read in outcomes(late_flag, constants=(how, 4))} == {0, 2}


def test_a_read_modify_write_before_a_notify_arrives_goes_on_with_nothing_of_it():
    """2: the third rank has added to 0, which the notify then overwrites.

    6: it has added to the notify's value.
    """
    early = outcomes(late_flag, 3, constants=("acquire", 2), kinds=["relaxed-order"])
    assert {read for _, read, _ in early} == {0, 1, 2}
    assert {read for _, read, _ in outcomes(late_flag, 3, constants=("acquire", 6))} == {0, 2}


@triton.jit
def publish_to_next(x, token, team, SEM: tl.constexpr, READS: tl.constexpr, BARRIER: tl.constexpr):
    """Rank 0 stores (or reads) rank 1's data and signals; rank 1 reads the signal without acquire order."""
    at = tl.arange(0, 2)
    if wl.rank(team) == 0:
        if READS:
            tl.store(token + at, tl.load(wl.symm_at(x, 1, team) + at))
        else:
            tl.store(wl.symm_at(x, 1, team) + at, 1)
        if BARRIER:
            tl.debug_barrier()
        tl.atomic_xchg(wl.symm_at(x, 1, team) + FLAG, 1, sem=SEM, scope="sys")
    else:
        if SEM == "release":
            tl.store(token, tl.load(x + FLAG, volatile=True))
        else:
            tl.store(token, tl.atomic_cas(x + FLAG, 1, 1, sem="relaxed", scope="sys"))


@triton.jit
def signal_relaxed(x, team):
    if wl.rank(team) == 0:
        tl.atomic_xchg(wl.symm_at(x, 1, team) + FLAG, 1, sem="relaxed", scope="sys")


@triton.jit
def look(x, token, team):
    if wl.rank(team) == 1:
        tl.store(token, tl.load(x + FLAG, volatile=True))


@triton.jit
def go_on(x, token, out, team, READS: tl.constexpr):
    at = tl.arange(0, 2)
    if wl.rank(team) == 1 and tl.load(token) == 1:
        if READS:
            tl.store(x + at, 5)
        else:
            tl.store(out, 1 + tl.min(tl.load(x + at)))


@triton.jit
def only_access(x, token, team, READS: tl.constexpr):
    at = tl.arange(0, 2)
    if wl.rank(team) == 0:
        if READS:
            tl.store(token + at, tl.load(wl.symm_at(x, 1, team) + at))
        else:
            tl.store(wl.symm_at(x, 1, team) + at, 1)


def next_kernels(*, sem="relaxed", reads=False, barrier=True, two=False, kinds=()):
    """Values that rank 1's second kernel has read, or rank 0's first one."""
    seen = set()

    def main(team):
        x, token, out = team.zeros(256, torch.int32, name="x"), *(torch.zeros(2, dtype=torch.int32) for _ in range(2))
        if two:
            only_access[(1,)](x, token, team.view, reads)
            signal_relaxed[(1,)](x, team.view)
            look[(1,)](x, token, team.view)
        else:
            publish_to_next[(1,)](x, token, team.view, sem, reads, barrier)
        go_on[(1,)](x, token, out, team.view, reads)
        return token.tolist()[0] if reads else out.tolist()[0]

    report = weft.check.check(
        main, 2, strategy="exhaustive", schedules=3000, deterministic=False,
        on_results=lambda all: seen.add(all[0] if reads else all[1]),
    )  # fmt: skip
    assert report.exhaustive == "exhausted"
    assert {f.finding.kind for f in report.findings} == set(kinds), str(report)
    return seen


def test_the_end_of_a_kernel_makes_an_acquire_of_its_relaxed_reads():
    assert next_kernels(sem="release") == {0, 2}


def test_the_beginning_of_a_kernel_makes_a_release_of_its_relaxed_writes():
    """The release covers earlier kernels, not stores of the kernel itself."""
    assert next_kernels(two=True) == {0, 2}
    assert next_kernels(two=True, reads=True) == {0}
    assert next_kernels(kinds=["race"]) == {0, 1, 2}


def test_a_relaxed_write_behind_a_barrier_tells_that_loads_are_over():
    """The pattern at the end of torch's own symmetric-memory kernels."""
    assert next_kernels(reads=True) == {0}
    next_kernels(reads=True, barrier=False, kinds=["race"])


@triton.jit
def put_later(x, out, team, ORDER: tl.constexpr):
    """Rank 0 puts two elements, signals, and overwrites their source."""
    at = tl.arange(0, 2)
    if wl.rank(team) == 0:
        tl.store(x + Y + at, 1)
        wl.put_nbi(x, x + Y, 2, 1, team, BLOCK=2)
        if ORDER == "fence":
            wl.fence(team)
        if ORDER == "quiet":
            wl.quiet(team)
        wl.notify(x + FLAG, 1, 1, team)
        if ORDER != "fence":
            tl.store(x + Y + at, 2)
    else:
        wl.wait(x + FLAG, 1, team)
        tl.store(out, tl.min(tl.load(x + at)))


def test_a_put_that_is_not_completed_may_be_late_and_read_what_is_stored_after_it():
    """0: the signal came first."""
    assert {read for _, read in outcomes(put_later, constants=("none",), kinds=["unquieted"])} == {0, 1, 2}
    assert {read for _, read in outcomes(put_later, constants=("fence",))} == {1}
    assert {read for _, read in outcomes(put_later, constants=("quiet",))} == {1}
