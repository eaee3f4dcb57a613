"""The simulator runs kernels and host code of all ranks as the verbs promise, and says at once when nobody can go on."""

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from weft.errors import Deadlock, InvalidAccess, WeftError
from weft.language.shmem import CMP_GE, SIGNAL_ADD

N = 32


@triton.jit
def push_all_gather(x, out, landed, epoch, team, N: tl.constexpr):
    me = wl.rank(team)
    now = wl.next_epoch(epoch)
    offsets = tl.arange(0, N)
    for step in tl.static_range(wl.num_ranks(team)):
        peer = (me + step) % wl.num_ranks(team)
        tl.store(wl.symm_at(out, peer, team) + me * N + offsets, tl.load(x + offsets))
        wl.notify(landed + me, peer, now, team)
    for peer in tl.static_range(wl.num_ranks(team)):
        wl.wait(landed + peer, now, team)
    wl.advance_epoch(epoch, now)


def gather_three_times(team):
    x = torch.empty(N, dtype=torch.bfloat16)
    out, landed = team.empty((team.size, N)), team.signals(team.size, name="landed")
    epoch = team.local(2, torch.int32)
    results = []
    for call in range(3):
        x.fill_(10 * call + team.rank)
        push_all_gather[(1,)](x, out, landed, epoch, team.view, N)
        results.append(out.float().mean(1).tolist())
        team.barrier()  # the buffer is written again by the next call
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


@triton.jit
def bulk_words(source, target, signals, n, team):
    me = wl.rank(team)
    right = (me + 1) % wl.num_ranks(team)
    wl.put_signal(target, source, n, signals, 1, right, team, BLOCK=16)
    wl.wait(signals, 1, team)
    wl.barrier(team)
    wl.get(target + 64, source, n, right, team, BLOCK=16)
    wl.shmem.putmem_signal_block(target + 128, source, 2 * n, signals + 1, 1, SIGNAL_ADD, right, team)
    wl.shmem.putmem_signal_nbi_block(target + 192, source, 2 * n, signals + 1, 1, SIGNAL_ADD, right, team)
    wl.shmem.signal_wait_until(signals + 1, CMP_GE, 2, team)
    wl.shmem.int_p(signals + 2, 40 + me, right, team)
    wl.shmem.barrier_all_block(team)


@pytest.mark.parametrize("n", [1, 16, 37])
def test_puts_gets_and_their_shmem_spelling_move_what_they_say(n):
    def main(team):
        source, target = team.empty(64), team.zeros(256)
        signals = team.signals(4, name="signals")
        source.copy_(torch.arange(64) + 100 * team.rank)
        team.barrier()
        bulk_words[(1,)](source, target, signals, n, team.view)
        return target.float().view(4, 64), signals.tolist()

    size = 3
    for rank, (got, signals) in enumerate(weft.simulate(main, size)):
        left, right = (rank - 1) % size, (rank + 1) % size
        for row, origin in enumerate([left, right, left, left]):
            assert got[row, :n].tolist() == [float(i + 100 * origin) for i in range(n)]
            assert got[row, n:].eq(0).all()
        assert signals == [1, 2, 40 + left, 0]


@triton.jit
def lamport_exchange(x, inbox, out, team, N: tl.constexpr):
    me = wl.rank(team)
    offsets = tl.arange(0, N)
    peer = 1 - me
    wl.lamport_store(wl.symm_at(inbox, peer, team) + offsets, tl.load(x + offsets), offsets < N)
    tl.store(out + offsets, wl.lamport_load(inbox + offsets, offsets < N, team))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lamport_words_carry_zeros_of_both_signs_and_specials(dtype):
    values = torch.tensor([-0.0, 0.0, float("inf"), float("-inf"), float("nan"), -1.5, 3.0, 1e-7], dtype=dtype)

    def main(team):
        inbox = team.empty(8, dtype).fill_(-0.0)
        out = torch.empty(8, dtype=dtype)
        team.barrier()
        lamport_exchange[(1,)](values, inbox, out, team.view, 8)
        return out

    for out in weft.simulate(main, 2):
        assert torch.equal(out.nan_to_num(7.0), values.nan_to_num(7.0))


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


def test_a_raw_spin_that_nobody_ends_is_a_deadlock():
    def main(team):
        flag = team.signals(4, name="flag")
        spin_on_a_raw_atomic[(1,)](flag[2:] if team.rank == 0 else flag, flag, team.view)

    with pytest.raises(Deadlock, match="rank 0 kernel spin_on_a_raw_atomic program 0 spins"):
        weft.simulate(main, 2)


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
        assert f"rank {rank} kernel wait_for_a_neighbour program 2 (test_simulate.py:{line}) waits for landed[2] of rank {rank} >= 5, sees 4" in report  # fmt: skip
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

    with pytest.raises(InvalidAccess, match="rank 0 kernel store_at program 0.*store.*activations of rank 0"):
        weft.simulate(main, 1)


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


@triton.jit
def wait_and_sum(data, landed, epoch, out, team, N: tl.constexpr):
    now = wl.next_epoch(epoch)
    wl.wait(landed, now, team)
    tl.store(out, tl.sum(tl.load(data + tl.arange(0, N)).to(tl.float32)))
    wl.advance_epoch(epoch, now)


@pytest.mark.parametrize("seed", range(4))
def test_a_flag_behind_a_copy_comes_after_the_data(seed):
    def main(team):
        data, landed = team.empty(256, name="data"), team.signals(1, name="landed")
        epoch, word, out = team.local(2, torch.int32), team.local(1, torch.int32), torch.zeros(1)
        source = torch.empty(256, dtype=torch.bfloat16)
        sums = []
        for call in range(1, 4):
            source.fill_(call * (team.rank + 1))
            word.fill_(call)
            engine = team.copy_engine
            engine.fork()
            engine.put(data, source, (team.rank + 1) % team.size)
            engine.signal(landed, word, (team.rank + 1) % team.size)
            wait_and_sum[(1,)](data, landed, epoch, out, team.view, 256)
            engine.join()
            sums.append(out.item())
            team.barrier()
        fetched = torch.empty(256, dtype=torch.bfloat16)
        team.copy_engine.get(fetched, data, (team.rank + 1) % team.size)
        team.copy_engine.join()
        return sums, fetched[0].item()

    size = 3
    for rank, (sums, fetched) in enumerate(weft.simulate(main, size, seed=seed)):
        left = (rank - 1) % size
        assert sums == [256.0 * call * (left + 1) for call in (1, 2, 3)]
        assert fetched == 3.0 * (rank + 1)


def test_kernels_are_launched_from_host_code_only_and_simulations_do_not_nest():
    def main(team):
        weft.simulate(lambda inner: None, 1)

    with pytest.raises(RuntimeError):
        weft.simulate(main, 1)
