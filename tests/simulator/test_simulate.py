"""Simulation of all ranks: promises of the primitives, and immediate reports of deadlocks."""

import threading
import time
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from tests.runtime import behaviour
from weft.errors import Deadlock, InvalidAccess, WeftError
from weft.simulator.machine import pointers

N = 32


def gather_three_times(team):
    x = torch.empty(N, dtype=torch.bfloat16)
    out, landed = team.empty((team.size, N)), team.signals(team.size, name="landed")
    epoch = team.local(2, torch.int32)
    results = []
    for call in range(3):
        x.fill_(10 * call + team.rank)
        behaviour.push_all_gather[(1,)](x, out, landed, epoch, team.view, N)
        results.append(out.float().mean(1).tolist())
        team.barrier()  # the next call writes to the buffer again
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_push_all_gather_gives_every_rank_everything(world_size, seed):
    expected = [[10.0 * call + rank for rank in range(world_size)] for call in range(3)]
    assert weft.simulate(gather_three_times, world_size, seed=seed) == [expected] * world_size


def test_a_slowed_rank_changes_nothing_but_the_order():
    expected = [[10.0 * call + rank for rank in range(3)] for call in range(3)]
    assert weft.simulate(gather_three_times, 3, slow={1: 50}) == [expected] * 3


def test_the_same_seed_gives_the_same_run_event_for_event():
    def events(seed):
        seen = []
        weft.simulate(gather_three_times, 3, seed=seed, on_event=seen.append)
        return seen

    first = events(7)
    assert len(first) > 100
    assert events(7) == first
    assert events(8) != first


@pytest.mark.parametrize("check", behaviour.ALL, ids=lambda check: check.__name__)
@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(8, marks=pytest.mark.sweep)])
def test_teams_and_primitives_do_what_they_promise(check, world_size):
    assert weft.simulate(check, world_size, seed=world_size) == [[]] * world_size


@triton.jit
def spin_on_a_raw_atomic(flag, out, team):
    if wl.rank(team) == 0:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 3:
            pass
        tl.store(out, 1)
    else:
        for _ in range(3):
            tl.atomic_add(wl.symm_at(flag, 0, team), 1, sem="release", scope="sys")


def test_kernels_that_spin_with_raw_atomics_make_progress():
    def main(team):
        flag, out = team.signals(1, name="flag"), team.local(1, torch.int32)
        spin_on_a_raw_atomic[(1,)](flag, out, team.view)
        return out.item()

    assert weft.simulate(main, 2) == [1, 0]


def test_a_raw_spin_without_an_end_is_a_deadlock():
    def main(team):
        flag = team.signals(4, name="flag")
        spin_on_a_raw_atomic[(1,)](flag[2:] if team.rank == 0 else flag, flag, team.view)

    with pytest.raises(
        Deadlock, match=r"rank 0 kernel spin_on_a_raw_atomic program 0 spins in .*: atomic add of flag\[2\]"
    ):
        weft.simulate(main, 2)


@triton.jit
def look(flag):
    return tl.load(flag)


@triton.jit
def spin_in_a_form(flag, out, team, FORM: tl.constexpr):
    wl.wait(flag + 4, 0, team)  # satisfied: the program does not hang here
    n = 0
    if FORM == "plain":
        while tl.load(flag) == 0:  # plain
            pass
    elif FORM == "volatile":
        while tl.load(flag, volatile=True) == 0:  # volatile
            pass
    elif FORM == "helper":
        while look(flag) == 0:
            pass
    elif FORM == "two":
        while (tl.load(flag) == 0) | (tl.load(flag + 1) == 0):  # two
            pass
    elif FORM == "sum":
        while tl.sum(tl.load(flag + tl.arange(0, 4))) == 0:  # sum
            pass
    elif FORM == "cas":
        while tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys") != 1:  # cas
            pass
    elif FORM == "ring":
        while tl.load(flag + n) == 0:  # ring
            n = (n + 1) % 4
    elif FORM == "counted":
        while tl.load(flag) == 0:  # counted
            n += 1
    elif FORM == "assigned":
        seen = tl.load(flag)
        while seen == 0:
            seen = tl.load(flag)  # assigned
    tl.store(out, n)


FORMS = ("plain", "volatile", "helper", "two", "sum", "cas", "ring", "counted", "assigned")


def spinning(team, form, tells=False):
    flag, out = team.signals(8, name="flag"), team.local(1, torch.int32)
    team.barrier()
    if tells and team.rank == 0:
        for index in range(4):
            tell_later[(1,)](flag[index:], team.view, N)
    else:
        spin_in_a_form[(1,)](flag, out, team.view, form)
    return True


@pytest.mark.parametrize("form", FORMS)
def test_a_raw_spin_of_any_form_is_a_deadlock_at_once_that_names_the_load(form):
    steps = []
    with pytest.raises(Deadlock) as caught:
        weft.simulate(spinning, 2, args=(form,), on_event=lambda event: steps.append(event[0]))
    report, lines = str(caught.value), Path(__file__).read_text().splitlines()
    line = next(
        n for n, text in enumerate(lines, 1) if text.endswith(f"# {form}" if form != "helper" else "tl.load(flag)")
    )
    assert f"program 0 spins in test_simulate.py:{line}: " in report, report
    assert "flag[" in report and "sees 0" in report
    assert "waits for flag[4]" not in report
    assert ("take a plain load out of a loop" in report) is (form not in ("volatile", "cas"))
    assert steps[-1] < (200 if form != "counted" else 10_000)


@triton.jit
def tell_later(flag, team, N: tl.constexpr):
    for _ in range(N):
        tl.atomic_add(flag + 4, 0, sem="acquire", scope="sys")
    wl.notify(flag, 1, 1, team)


@pytest.mark.parametrize("form", FORMS)
def test_a_raw_spin_goes_on_when_another_rank_writes_what_it_polls(form):
    assert weft.simulate(spinning, 2, seed=1, args=(form, True)) == [True, True]


@triton.jit
def reads_for_long(x, out, flag, N: tl.constexpr, ROUNDS: tl.constexpr):
    """Program 0 polls and counts its tries; program 1 reads for long before it writes."""
    tries, total, i = 0, 0.0, 0
    if tl.program_id(0) == 0:
        while tl.load(flag, volatile=True) == 0:
            tries += 1
    else:
        while i < ROUNDS:
            total += tl.sum(tl.load(x + i * N + tl.arange(0, N))) * tl.load(out)
            i += 1
        tl.atomic_xchg(flag, 1, sem="release", scope="gpu")
        tl.store(out + 1, total)


def test_a_long_computation_is_no_deadlock():
    rounds = 3000

    def main(team):
        x, out = torch.ones(rounds * 4), torch.ones(2)
        reads_for_long[(2,)](x, out, torch.zeros(1, dtype=torch.int32), 4, rounds)
        return out[1].item()

    assert weft.simulate(main, 1) == [4.0 * rounds]


@triton.jit
def wait_for_a_neighbour(landed, team):
    wl.wait(landed + tl.program_id(0), 5, team)


def test_a_deadlock_names_every_waiting_task_its_line_signal_and_values():
    def main(team):
        landed = team.signals(8, name="landed")
        landed[2] = 4
        wait_for_a_neighbour[(6,)](landed, team.view)

    with pytest.raises(Deadlock) as caught:
        weft.simulate(main, 2, sms=3, seed=11)
    report = str(caught.value)
    line = wait_for_a_neighbour.fn.__code__.co_firstlineno + 2
    for rank in (0, 1):
        waits = f"rank {rank} kernel wait_for_a_neighbour program 2 (test_simulate.py:{line}) waits for landed[2]"
        assert f"{waits} of rank {rank} >= 5, sees 4" in report
        assert f"rank {rank} kernel wait_for_a_neighbour programs 3..5 cannot start: all 3 SMs" in report
        assert f"rank {rank} host code waits for its kernel wait_for_a_neighbour" in report
    assert "seed=11" in report


@triton.jit
def count_programs(counter):
    tl.atomic_add(counter, 1)


def test_programs_beyond_the_sms_start_when_others_end():
    def main(team):
        counter = team.local(1, torch.int32)
        count_programs[(5, 3, 2)](counter)
        return counter.item()

    assert weft.simulate(main, 2, sms=2) == [30, 30]


def test_a_cooperative_grid_larger_than_the_gpu_is_refused():
    def main(team):
        wait_for_a_neighbour[(6,)](team.signals(8), team.view, launch_cooperative_grid=True)

    with pytest.raises(WeftError, match="6 programs that wait for each other and this GPU holds 3"):
        weft.simulate(main, 1, sms=3)


@triton.jit
def store_at(x, at, N: tl.constexpr):
    tl.store(x + at + tl.arange(0, N), 1.0)


def test_a_store_past_a_tensor_is_an_error_that_names_the_nearest_one():
    def main(team):
        activations = team.empty(64, name="activations")
        team.empty(64, name="weights")
        store_at[(1,)](activations, 60, 16)

    with pytest.raises(InvalidAccess, match=r"rank 0 kernel store_at program 0.*store.*activations\[64\] of rank 0"):
        weft.simulate(main, 1)


def test_a_pointer_stays_in_the_tensor_that_it_was_made_of():
    def main(team, at):
        activations = team.empty(128, name="activations")  # 256 bytes: the next tensor begins where it ends
        team.empty(64, name="weights")
        store_at[(1,)](activations, at, 16)

    assert weft.simulate(main, 1, args=(112,)) == [None]
    for at, index in ((113, 128), (128, 128), (-16, -16)):
        with pytest.raises(InvalidAccess, match=rf"activations\[{index}\] of rank 0, (past its end|before its start)"):
            weft.simulate(main, 1, args=(at,))


def test_a_freed_tensor_is_known_though_another_has_its_bytes():
    def main(team):
        old = team.empty(64, name="old")
        team.free(old)
        assert team.empty(64, name="new").data_ptr() == old.data_ptr()
        store_at[(1,)](old, 0, 16)

    with pytest.raises(InvalidAccess, match=r"old\[0\] of rank 0, which was freed"):
        weft.simulate(main, 1)


@pytest.mark.parametrize("seed", range(3))
def test_tensors_keep_their_pointers_in_a_run_that_has_many(seed, monkeypatch):
    monkeypatch.setattr(pointers, "_NUMBERS", 16)

    def main(team):
        landed, epoch = team.signals(team.size, name="landed"), team.local(2, torch.int32)
        out = team.empty((team.size, N))
        for call in range(20):
            x = torch.full((N,), call + team.rank, dtype=torch.bfloat16)
            behaviour.push_all_gather[(1,)](x, out, landed, epoch, team.view, N)
            team.barrier()
        return out.float().mean(1).tolist()

    assert weft.simulate(main, 2, seed=seed) == [[19.0, 20.0]] * 2


def test_a_store_outside_an_ordinary_argument_is_an_error_too():
    with pytest.raises(InvalidAccess, match="argument of store_at"):
        weft.simulate(lambda team: store_at[(1,)](torch.zeros(8), -16, 8), 1)


def test_fresh_symmetric_memory_is_poisoned():
    def main(team):
        return team.empty(4).isnan().all().item(), team.empty(4, torch.int32).tolist(), team.zeros(4).tolist()

    assert weft.simulate(main, 1) == [(True, [-1] * 4, [0.0] * 4)]


def test_what_one_rank_raises_ends_the_simulation_and_is_raised():
    def main(team):
        if team.rank == 1:
            raise KeyError("mine")
        team.barrier()

    with pytest.raises(KeyError, match="mine"):
        weft.simulate(main, 3)


def test_what_a_kernel_raises_reaches_its_host_code():
    def main(team):
        with pytest.raises(InvalidAccess):
            store_at[(1,)](torch.zeros(8), 100, 8)
        return "went on"

    assert weft.simulate(main, 2) == ["went on"] * 2


@pytest.mark.parametrize("seed", range(4))
def test_a_flag_behind_a_copy_comes_after_the_data_in_any_order(seed):
    assert weft.simulate(behaviour.flags_behind_copies, 3, seed=seed, slow={seed % 3: 20}) == [[]] * 3


def test_a_wait_in_vain_is_reported_at_once(tmp_path):
    with pytest.raises(Deadlock, match=r"wait_for_nobody program 0 .* waits for landed\[1\] of rank 0 >= 5, sees 0"):
        weft.simulate(behaviour.wait_in_vain, 2, args=(str(tmp_path),))


def test_kernels_are_launched_from_host_code_only_and_simulations_do_not_nest():
    def main(team):
        weft.simulate(lambda inner: None, 1)

    with pytest.raises(RuntimeError):
        weft.simulate(main, 1)


@pytest.mark.parametrize("fails", [False, True])
def test_a_simulation_ends_with_what_its_ranks_held_in_thread_local_variables(fails):
    held, gone = threading.local(), []

    class SlowToGo:
        def __del__(self):
            time.sleep(0.1)
            gone.append(self)

    def main(team):
        held.by_this_rank = SlowToGo()
        team.barrier()
        assert not (fails and team.rank)
        team.barrier()

    if fails:
        with pytest.raises(AssertionError):
            weft.simulate(main, 2)
    else:
        weft.simulate(main, 2)
    assert len(gone) == 2


@triton.jit
def of_two_tensors(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(tl.where(at % 2 == 0, x + at, y + at)))


@pytest.mark.parametrize("swapped", [False, True])
def test_one_load_reads_two_tensors_in_either_order(swapped):
    """Numbers in the upper bits of addresses, by which tensors are told apart, may order them otherwise than memory does."""

    def main(team):
        first, second = (team.zeros(64, dtype=torch.float32) for _ in range(2))
        first.fill_(1.0)
        second.fill_(2.0)
        out, (x, y) = team.local(8, torch.float32), (second, first) if swapped else (first, second)
        of_two_tensors[(1,)](y, x, team.local(8, torch.float32), 8)  # numbers them in this order
        of_two_tensors[(1,)](x, y, out, 8)
        return out.tolist()

    assert weft.simulate(main, 1) == [[2.0, 1.0] * 4 if swapped else [1.0, 2.0] * 4]
