"""weft.check as a function: the contents of a report, its reproducibility, and refused arguments."""

import json
import sys
import weakref

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.check
import weft.language as wl
from tests.check import examples
from tests.zoo import staging
from weft.check.detector.detector import Detector
from weft.check.digests import digest_of
from weft.check.runner import Runner
from weft.kernels.deferred_norm import DeferredNorm
from weft.simulator.observer import Observer


@triton.jit
def write_ones(out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), 1.0)


def line_of(text):
    with open(examples.__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


def test_a_clean_main_is_clean():
    report = weft.check(examples.main, world_size=[2, 3], schedules=8)
    assert report.ok
    assert report.schedules == 16
    assert str(report) == "0 finding(s) in 16 schedules at world size 2, 3"


def test_a_report_says_what_a_kernel_author_needs():
    report = weft.check(examples.racy, 2, schedules=4, script="examples.py")
    text = str(report)
    stored, released, loaded = map(line_of, ("tl.store(wl.symm_at(data", "tl.atomic_xchg(", "tl.store(got"))
    assert "missing-barrier  data[0..31] of rank 1" in text
    assert f"the release in examples.py:{released}, acquired before line {loaded}, covers only what came before" in text
    assert f"store by rank 0 kernel publish program 0, examples.py:{stored} in publish:" in text
    assert "tl.store(wl.symm_at(data, 1, team) + at, 1.0)" in text
    assert "last synchronisation: waited for landed[0] of rank 1 in examples.py" in text
    assert "remedy: put tl.debug_barrier() between the stores and the release, or use wl.notify" in text
    assert "replay: weft check examples.py --world-size 2 --strategy pct --seed" in text
    assert len(report.findings) == 1, "one cause, one finding"
    assert report.findings[0].schedules == 4


def test_the_replayed_schedule_shows_the_finding_again():
    found = weft.check(examples.racy, 2, schedules=4).findings[0]
    again = weft.check(
        examples.racy, found.replay.world_size, strategy=found.replay.strategy, seed=found.replay.seed,
        depth=found.replay.depth, schedules=1,
    )  # fmt: skip
    assert [f.finding.cause for f in again.findings] == [found.finding.cause]


def test_a_report_as_json():
    told = json.loads(weft.check(examples.racy, 2, schedules=2, script="x.py").to_json())
    assert told["ok"] is False
    (found,) = told["findings"]
    assert found["finding"]["kind"] == "missing-barrier"
    assert found["finding"]["sides"][0]["place"]["line"] == line_of("tl.store(wl.symm_at(data")
    assert found["command"].startswith("weft check x.py ")


@pytest.mark.parametrize("strategy", ["uniform", "pct", "slow", "delay"])
def test_a_schedule_is_a_function_of_its_seed(strategy):
    def events(seed):
        seen = []

        def main(team):
            seen.append(team.rank)
            examples.main(team)
            seen.append(team.rank)

        weft.check(main, 4, schedules=1, strategy=strategy, seed=seed)
        return seen

    assert events(3) == events(3)
    assert len({tuple(events(seed)) for seed in range(6)}) > 1


@pytest.mark.parametrize("strategy", ["uniform", "pct", "slow", "delay", "exhaustive"])
def test_every_strategy_finds_a_race(strategy):
    assert not weft.check(examples.racy, 2, strategy=strategy, schedules=40).ok


def test_late_stores_make_a_race_show_in_the_results():
    report = weft.check(examples.racy, 2, strategy="delay", schedules=1)
    assert {f.finding.kind for f in report.findings} == {"missing-barrier"}


def test_a_marker_with_a_reason_allows_a_race():
    report = weft.check(examples.allowed, 2, schedules=4)
    assert report.ok
    assert "allowed: race at examples.py" in str(report)
    assert "any rank's value will do" in str(report)


def test_a_marker_without_a_reason_does_not():
    assert not weft.check(examples.allowed_for_no_reason, 2, schedules=4).ok


def test_results_that_differ_are_a_finding_unless_they_may():
    def main(team):
        return order.setdefault("calls", []).append(0) or len(order["calls"])

    order = {}
    assert [f.finding.kind for f in weft.check(main, 1, schedules=2).findings] == ["divergence"]
    assert weft.check(main, 1, schedules=2, deterministic=False).ok


def test_dataclasses_are_compared_by_their_members():
    """The pickle of a view differs with the memory that it lies in."""

    def main(team, value=1.0):
        rows = torch.full((len(made) % 2 + 1, 3), value)
        made.append(rows)
        return [DeferredNorm(rows[0], torch.full((1,), len(made) // differ, dtype=torch.float32), 1e-6)]

    made, differ = [], 1000
    assert weft.check(main, 1, schedules=4).ok
    differ = 1
    (found,) = weft.check(main, 1, schedules=2).findings
    assert found.finding.kind == "divergence" and "result[0].squares differs" in found.finding.message


def test_views_and_sparse_tensors_are_compared_by_their_values():
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    views = [numbers.conj(), numbers.conj().imag, torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.float8_e4m3fn)]
    values = [torch.tensor([1 - 2j, 3 + 1j]), torch.tensor([-2.0, 1.0]), torch.eye(2), views[3].clone()]
    assert digest_of(views) == digest_of(values) != digest_of([numbers, *values[1:]])


def operates_on_other_layouts(team):
    dense, layouts = torch.eye(4), (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
    empty = torch.empty(3, 3, layout=torch.sparse_coo)
    sparse = [dense.to_sparse(layout=kind, blocksize=(2, 2) if "bs" in str(kind) else None) for kind in layouts]
    nested = [
        torch.nested.nested_tensor([dense[0], dense[1, :2]], layout=kind) for kind in (torch.strided, torch.jagged)
    ]
    return [
        (empty + empty).to_dense(), dense.to_mkldnn().to_dense(), *(one.to_dense() for one in sparse),
        *((one * 2).to_padded_tensor(0) for one in nested),
    ]  # fmt: skip


def reads_values_of_a_sparse_tensor(team):
    x = team.zeros((4,), torch.float32)
    if team.rank == 0:
        x.fill_(1.0)
    else:
        torch.sparse_coo_tensor(torch.arange(4)[None], team.at_peer(x, 0), (4,), check_invariants=False).to_dense()


@pytest.mark.filterwarnings("ignore:Sparse|The PyTorch API of nested")
def test_tensors_of_other_layouts_are_seen_as_their_plain_tensors():
    report = weft.check(operates_on_other_layouts, 1, schedules=1)
    assert report.ok, str(report)
    assert [found.finding.kind for found in weft.check(reads_values_of_a_sparse_tensor, 2, schedules=1).wrong] == [
        "race"
    ]


def test_what_main_raises_is_a_finding():
    def main(team):
        assert team.rank == 0, "rank 1 is unhappy"

    (found,) = weft.check(main, 2, schedules=3).findings
    assert found.finding.kind == "error"
    assert "rank 1 is unhappy" in found.finding.message
    assert [side.task for side in found.finding.sides] == ["rank 1 host code"]
    assert "rank 1 is unhappy" in found.finding.sides[0].place.text


def test_a_finding_is_replayed_with_as_few_ranks_and_programs_as_show_it():
    (found,) = weft.check(examples.racy, 4, schedules=2).findings
    assert found.replay.world_size == 2

    def main(team):
        examples.count[(6,)](team.zeros(1, torch.int32, name="total"))

    found = next(f for f in weft.check(main, 3, schedules=2).findings if f.finding.kind == "race")
    assert (found.replay.world_size, found.replay.strategy, found.replay.depth) == (2, "pct", 1)
    assert found.replay.sms == 1, "programs are not ordered by having one SM"
    assert found.replay.command("").endswith("depth=1, sms=1)")


def test_a_difference_is_named_and_its_replay_compares_two_runs():
    def main(team):
        return {"calls": [0, order.setdefault("calls", []).append(0) or len(order["calls"])]}

    order = {}
    (found,) = weft.check(main, 1, schedules=2).findings
    assert found.finding.message.startswith("rank 0's result['calls'][1] differs bitwise between")
    assert found.replay.runs == 2


def test_a_clearing_that_lands_late_hangs_its_rank():
    """With late stores the run itself fails: the clear erases words that a peer has sent since."""
    report = weft.check(staging.clearing_that_is_overtaken, 2, strategy="delay", schedules=12, args=(True,))
    (found,) = report.findings
    assert found.finding.kind == "overtaken"
    assert "deadlock" in {finding.kind for finding in found.also}


def test_a_kernel_may_wait_for_what_its_host_copies_after_the_launch():
    report = weft.check(examples.launched_first, 2, schedules=8)
    assert report.ok, str(report)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="world_size=0"):
        weft.check(examples.main, 0)
    with pytest.raises(ValueError, match="schedules=0"):
        weft.check(examples.main, 2, schedules=0)
    with pytest.raises(ValueError, match="strategy='wild' is not one of mix, uniform"):
        weft.check(examples.main, 2, strategy="wild")


def test_tensors_of_ended_kernels_are_freed():
    passed = []

    def main(team):
        for _ in range(200):
            tensor = torch.zeros(32)
            passed.append(weakref.ref(tensor))
            write_ones[(1,)](tensor, 32)
            team.synchronize()
        return sum(tensor() is not None for tensor in passed)

    weft.check(main, 1, schedules=1, on_results=lambda results: passed.append(results[0]))
    assert passed[-1] < 100


def test_code_without_source_text_is_reported_without_a_line():
    names = {}
    exec(compile("def main(team):\n    return 1 / 0\n", "<string>", "exec"), names)
    text = str(weft.check(names["main"], 1, schedules=1))
    assert "ZeroDivisionError by rank 0 host code, <string>:2 in main\n   remedy:" in text


def test_a_simulation_without_a_check_has_no_observer():
    machines = []
    weft.simulate(examples.main, 2, prepare=machines.append)
    assert type(machines[0].observer) is Observer


def test_host_code_is_seen_inside_custom_operators():
    machines = []

    def prepare(machine):
        machine.observer = Detector(machine)
        machines.append(machine)

    weft.simulate(lambda team: weft.ops.all_reduce(torch.ones(8), team), 2, prepare=prepare)
    assert machines[0].observer.races.findings == {}


def test_breakpoint_stops_one_rank(monkeypatch):
    stops = []
    monkeypatch.setattr(sys, "breakpointhook", lambda *_: stops.append(sys._getframe(1).f_code.co_name))
    assert weft.simulate(examples.stopped, 3) == [0, 1, 2]
    assert stops == ["stop_here"]


def test_hosts_that_wait_for_each_other_and_a_simulation_in_one_are_told_so():
    def alone(team):
        if team.rank == 0:
            team.barrier()

    (found,) = weft.check(alone, 2, schedules=1).findings
    assert found.finding.detail == ("rank 0 host code waits in team0's barrier (rendezvous 4) for rank 1",)
    assert found.finding.remedy == "make the call in which a rank waits on all ranks, or on none"
    with pytest.raises(
        RuntimeError, match="simulates kernels already; call weft.simulate or weft.check outside of main"
    ):
        weft.simulate(lambda team: weft.simulate(lambda team: None, 1), 1)


@triton.jit
def take_behind(data, flag, got, team, N: tl.constexpr):
    wl.wait(flag, 1, team)
    tl.store(got + tl.arange(0, N), tl.load(data + tl.arange(0, N)))


def put_to_the_other(team):
    """(data that the other rank's copy engine writes, its signals, ones to send, room for a result)"""
    source, data = (team.zeros(32, torch.float32, name=name) for name in ("source", "data"))
    landed, ones, got = team.signals(3, name="landed"), team.local(3, torch.int32), team.local(32, torch.float32)
    ones.fill_(1)
    team.barrier()
    team.copy_engine.fork()
    team.copy_engine.put(data, source, 1 - team.rank)
    return data, landed, ones, got


def flagged_copy(team, as_signal):
    data, landed, ones, got = put_to_the_other(team)
    (team.copy_engine.signal if as_signal else team.copy_engine.put)(landed, ones, 1 - team.rank)
    take_behind[(1,)](data, landed[2:], got, team.view, 32)
    team.barrier()


def test_a_copy_engine_s_signal_releases_by_each_of_its_words_and_a_copy_by_none():
    report = weft.check(flagged_copy, 2, schedules=4, args=(True,))
    assert report.ok, str(report)
    kinds = {found.finding.kind for found in weft.check(flagged_copy, 2, schedules=4, args=(False,)).findings}
    assert kinds & {"race", "relaxed-order"}


@triton.jit
def copy_nothing(data, got, n):
    at = tl.arange(0, 32)
    tl.store(got + at, tl.load(data + at, mask=at < n), mask=at < n)


def copies_beside_an_empty_view(team):
    """A kernel takes a view of the heap without elements, and is forgotten while the peer's signals may have come."""
    data, landed, ones, got = put_to_the_other(team)
    team.copy_engine.signal(landed, ones, 1 - team.rank)
    copy_nothing[(1,)](data[:0], got, 0)
    team.copy_engine.join()
    take_behind[(1,)](data, landed[2:], got, team.view, 32)
    team.barrier()


def test_an_empty_view_of_the_heap_hides_no_signal():
    report = weft.check(copies_beside_an_empty_view, 2, schedules=16)
    assert report.ok, str(report)


@triton.jit
def count_polls(flag, polls):
    n = 0
    while tl.load(flag, volatile=True) == 0:
        n += 1
    tl.store(polls, n)


def test_a_loop_that_counts_its_polls_is_a_deadlock():
    """Its variables are never equal again, so the program spins until the run is given up, and never blocks."""

    def main(team):
        count_polls[(1,)](*torch.zeros(2, 1, dtype=torch.int32))

    (found,) = weft.check(main, 1, schedules=1, compile=False).findings
    assert (found.finding.kind, found.finding.sides[0].verb) == ("deadlock", "spin")


def test_a_failure_that_more_programs_do_not_help_is_not_run_again(monkeypatch):
    runs = []
    run = Runner.run
    monkeypatch.setattr(Runner, "run", lambda self, schedule: runs.append(schedule) or run(self, schedule))

    def main(team):
        raise ValueError("no")

    report = weft.check(main, 2, schedules=5, strategy="uniform")
    assert not report.ok and report.schedules == 5
    assert [schedule.sms for schedule in runs[:6]] == [8, 132, 8, 8, 8, 8]
