"""Folding of consequential findings, remedies by the two sides, and the runs of a check."""

import dataclasses
import json

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.check
import weft.language as wl
from tests.zoo import misusing, publishing, reusing, sticking
from weft.check.detector.findings import Finding, Place, Side
from weft.check.folding import Seen, causes_of

N = 32


def finding(kind, tensor="", *sides, message="", allowed=None):
    """``sides``: (line, verb) or (line, verb, signals of the last synchronisation)."""
    made = [
        Side(
            rank=0, task="rank 0 kernel k program 0", verb=verb, sync="", through=rest[0] if rest else "",
            place=Place(file="k.py", line=line, function="k", text=""),
        )
        for line, verb, *rest in sides
    ]  # fmt: skip
    return Finding(kind=kind, message=message or kind, tensor=tensor, sides=tuple(made), allowed=allowed)


def folded(*findings, runs=None):
    runs = runs or [{1}] * len(findings)
    return causes_of([Seen(finding=f, runs=frozenset(r)) for f, r in zip(findings, runs, strict=True)])


RACE = finding("race", "data", (1, "store"), (2, "load"))
FLAG = finding("race", "landed", (8, "store"), (9, "wait"))


@pytest.mark.parametrize(
    "effect",
    [
        finding("divergence"),
        finding("overshoot", "arrived", (7, "notify")),
        finding("uninitialised", "data", (2, "load")),
        finding("race", "data", (1, "store"), (3, "load")),
        finding("deadlock", "data", (5, "wait")),
        finding("error", message="AssertionError: ranks disagree"),
    ],
    ids=lambda effect: effect.kind,
)
def test_a_race_explains_what_follows_from_it(effect):
    assert folded(RACE, effect) == [0, 0]
    assert folded(effect, RACE) == ([1, 1] if effect.kind != "race" else [0, 0])
    assert folded(RACE, effect, runs=[{1}, {2}]) == [0, 1], "not of the same run"
    assert folded(dataclasses.replace(RACE, allowed="any value will do"), effect) == [0, 1], "an allowed race"


@pytest.mark.parametrize(
    "other",
    [
        finding("race", "data", (11, "store"), (12, "load")),
        finding("race", "other", (1, "store"), (2, "load")),
        finding("uninitialised", "data", (12, "load")),
        finding("deadlock", "landed", (5, "wait")),
        finding("error", message="RuntimeError: no"),
        finding("out-of-bounds", "data", (2, "load")),
        finding("use-after-free", "data", (2, "load")),
    ],
    ids=lambda other: f"{other.kind} {other.lines}",
)
def test_what_a_race_does_not_explain_stays_a_finding(other):
    assert folded(RACE, other) == [0, 1]


def test_a_signal_explains_the_data_behind_it_and_what_says_more_wins():
    behind = finding("relaxed-order", "data", (1, "store"), (2, "load", "landed"))
    assert folded(FLAG, behind) == folded(FLAG, finding("race", "data", (1, "store"), (2, "load", "landed"))) == [0, 0]
    assert folded(behind, FLAG, finding("divergence")) == [1, 1, 1], "by way of the data"
    assert folded(RACE, finding("relaxed-order", "data", (1, "store"), (2, "load"))) == [1, 1]


def test_an_uncleared_stage_explains_its_loads_and_is_explained_by_its_stores():
    uncleared = finding("uncleared", "inbox", (3, "lamport store"))
    assert folded(uncleared, finding("race", "inbox", (4, "lamport load"), (3, "lamport store"))) == [0, 0]
    assert folded(uncleared, finding("overtaken", "inbox", (5, "lamport store"), (3, "lamport store"))) == [1, 1]


def test_a_kernel_that_never_follows_is_one_finding():
    unfollowed = finding("unfollowed", "", (1, "end of k"))
    early = [finding("early-access", name, (2, "store"), (line, "load")) for line, name in ((3, "x"), (4, "y"))]
    assert folded(*early, unfollowed) == [2, 2, 2]
    assert folded(*early) == [0, 0]


def test_what_follows_is_listed_and_not_counted():
    report = weft.check(reusing.ranks_write_the_same_rows, 2, schedules=8, args=(True,), script="x.py")
    (found,) = report.wrong
    assert [finding.kind for finding in found.also] == ["divergence"]
    assert "   also seen: divergence: rank 0's result differs bitwise between" in str(report)
    assert report.summary.startswith("1 finding(s) in 8 schedules")
    (told,) = json.loads(report.to_json())["findings"]
    assert [other["kind"] for other in told["also"]] == ["divergence"]


def test_main_s_own_assertion_follows_from_the_race():
    def main(team):
        data = team.zeros((2, N), torch.float32, name="data")
        reusing.both_write[(1,)](data, team.view, N, True)
        team.barrier()
        assert team.rank or data[0, 0] == 0.0, "rank 1 came last"

    (found,) = weft.check(main, 2, schedules=8).wrong
    assert (found.finding.kind, [finding.kind for finding in found.also]) == ("race", ["error"])


# --- remedies ----------------------------------------------------------------------------------------------------------------


@triton.jit
def tell(landed, team):
    wl.notify(landed, 1 - wl.rank(team), 1, team)
    wl.follow_previous_kernel()


@triton.jit
def take_from_peer(x, landed, got, team, N: tl.constexpr):
    wl.follow_previous_kernel()
    wl.wait(landed, 1, team)
    at = tl.arange(0, N)
    tl.store(got + at, tl.load(wl.symm_at(x, 1 - wl.rank(team), team) + at))


@triton.jit
def fill(x, N: tl.constexpr):
    wl.follow_previous_kernel()
    tl.store(x + tl.arange(0, N), 1.0)


def notified_before_following(team, _):
    x, landed, got = publishing.tensors(team)
    team.barrier()
    fill[(1,)](x, N, launch_pdl=True)
    tell[(1,)](landed, team.view, launch_pdl=True)
    take_from_peer[(1,)](x, landed, got, team.view, N, launch_pdl=True)
    team.barrier()


@triton.jit
def delay(x, N: tl.constexpr):
    for _ in range(50):
        tl.store(x + tl.arange(0, N), tl.load(x + tl.arange(0, N)))


@triton.jit
def read_rows(rows, got, team, N: tl.constexpr):
    peer = 1 - wl.rank(team)  # no wl.chunk_wait(wl.current_call(landed), peer, 0, team)
    tl.store(got + tl.arange(0, N), tl.load(rows + peer * N + tl.arange(0, N)))


def loaded_without_chunk_wait(team, late):
    """Rank 1 loads what rank 0 copies; the rank ``late`` is the later one of the two."""
    rows, landed = team.zeros((2, N), torch.float32, name="rows"), team.channel(1)
    landed.begin()
    if team.rank == late:
        delay[(1,)](team.local(N, torch.float32).zero_(), N)
    team.copy_engine.fork()
    if team.rank == 0:
        landed.send(rows[0], team.local(N, torch.float32).fill_(1.0), 1, 0)
    else:
        read_rows[(1,)](rows, team.local(N, torch.float32), team.view, N)
    team.copy_engine.join()


def tensor_of_another_team(team, _):
    x, pair = team.zeros(N, torch.float32, name="x"), team.subset([0, 1], heap_bytes=1 << 20)
    reusing.push[(1,)](x, pair.view, N)
    team.barrier()


@triton.jit
def poll_plainly(data, landed, got, team, N: tl.constexpr):
    if wl.rank(team) == 0:
        wl.notify(landed, 1, 1, team)
    else:
        while tl.load(landed) == 0:
            pass


def polled_plainly(team, _):
    poll_plainly[(1,)](*publishing.tensors(team), team.view, N)
    team.barrier()


@pytest.mark.parametrize(
    ("main", "says"),
    [
        (reusing.copy_without_fork, "call team.copy_engine.fork() before the copy"),
        (reusing.read_without_join, "call team.copy_engine.join() after the copy"),
        (reusing.source_overwritten_too_early, "call team.copy_engine.join() after the copy"),
        (reusing.copy_without_flag, "send team.copy_engine.signal() after the copy and wait for it"),
        (reusing.filled_by_the_host_too_late, "call team.barrier() between the two"),
        (reusing.ranks_write_the_same_rows, "write to separate places, or mask all stores but one"),
        (reusing.sum_without_an_atomic, "read and write in one step, with an atomic (tl.atomic_add)"),
        (notified_before_following, "call wl.wait_for_previous_kernel() before the notify in test_folding.py:"),
        (polled_plainly, "poll with wl.wait, or with an atomic that acquires"),
        (publishing.notify_before_store, "if the load in publishing.py:"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_remedy_names_what_the_sides_are(main, says):
    found = weft.check(main, 2, schedules=4, args=(True,)).wrong
    assert [f.finding.remedy.startswith(says) for f in found] == [True], [f.finding.remedy for f in found]


def test_a_missing_chunk_wait_is_named_whichever_side_comes_first():
    wait = "(wl.wait, wl.chunk_wait)"
    for late, remedy in (
        (1, f"send team.copy_engine.signal() after the copy and wait for it {wait} in each program"),
        (
            0,
            f"if the load wants what is copied, wait for the copy's signal before it, in each program {wait}; if it wants",
        ),
    ):
        (found,) = weft.check(loaded_without_chunk_wait, 2, schedules=1, strategy="uniform", args=(late,)).wrong
        assert found.finding.kind == "race" and found.finding.remedy.startswith(remedy)


def test_a_tensor_of_another_team_is_named():
    (found,) = weft.check(tensor_of_another_team, 2, schedules=2, args=(True,)).wrong
    assert found.finding.message.endswith(": x is of another team's heap; pass the view of the team that made it")


# --- how runs are made -------------------------------------------------------------------------------------------------------


def test_a_simpler_schedule_shows_the_same_finding_and_no_other():
    def main(team):
        if team.size == 2:
            raise RuntimeError("two ranks are too few")
        reusing.both_write[(1,)](team.zeros((team.size, N), torch.float32, name="data"), team.view, N, True)

    (found,) = weft.check(main, 3, schedules=4).wrong
    assert (found.finding.kind, found.replay.world_size) == ("race", 3)

    def both(team):
        misusing.sum_slots[(1,)](team.empty((2, N), torch.float32, name="slots"), team.local(N, torch.float32), N)
        if team.size == 3:
            reusing.both_write[(1,)](team.zeros((3, N), torch.float32, name="data"), team.view, N, True)

    replays = {found.finding.kind: found.replay.world_size for found in weft.check(both, 3, schedules=4).wrong}
    assert replays == {"uninitialised": 2, "race": 3}


def test_an_epoch_may_go_back_where_no_program_waits_for_it():
    @triton.jit
    def write_down(steps, value, team):
        wl.notify(steps, 1 - wl.rank(team), value, team)

    def main(team):
        steps = team.signals(1, name="steps")
        for value in (2, 1):
            write_down[(1,)](steps, value, team.view)
        team.barrier()

    assert weft.check(main, 2, schedules=4).ok


def sized(team, bug):
    asked.append(team.max_programs())
    return sticking.tiles_in_an_order_for_many_sms(team, bug)


asked: list[int] = []


def test_fewer_sms_are_tried_for_kernels_that_are_sized_by_them():
    asked.clear()
    report = weft.check(sized, 1, schedules=16, args=(False,))
    assert report.ok
    assert asked == [8] * 4 + [2] * 4 + [4] * 4 + [1] * 4
    asked.clear()
    weft.check(sized, 1, schedules=16, sms=3, args=(False,))
    assert set(asked) == {3}
    (found,) = weft.check(sized, 1, schedules=8, args=(True,)).wrong
    assert found.replay.sms < 8
    assert f"--sms {found.replay.sms}" in found.replay.command("x.py")


def test_kernels_of_a_fixed_size_keep_their_sms():
    """Four programs that wait for each other fit every GPU: fewer SMs are no finding."""

    def main(team):
        team.max_programs()
        sticking.chain[(4,)](team.signals(8, name="landed"), team.view)

    report = weft.check(main, 2, schedules=12)
    assert report.ok, str(report)


def test_a_lost_signal_is_no_lack_of_sms():
    def main(team):
        sticking.swap_or_take[(6,)](team.signals(8, name="landed"), team.view, False)

    (found,) = weft.check(main, 2, schedules=2, sms=4).wrong
    assert found.finding.kind == "deadlock"


@pytest.mark.parametrize(("sizes", "suggests"), [((1,), False), ((2, 4), True), ((2, 3), False), ((8,), True)])
def test_a_world_size_that_is_no_power_of_two_is_suggested(sizes, suggests):
    report = weft.check.Report(findings=(), schedules=1, world_sizes=sizes)
    assert ("all powers of two: try world size 3 as well" in report.summary) is suggests
