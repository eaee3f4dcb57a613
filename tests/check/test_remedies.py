"""What a finding says besides its place: the side that was early, the write that ended a wait, names, an error's numbers."""

import pytest
import torch
import triton
import triton.language as tl

import weft.check
import weft.language as wl
from tests.zoo import copying, railing, sticking
from weft.check.report import Report

N = 16


@pytest.mark.parametrize(
    ("main", "says"),
    [
        (railing.piece_read_early, "call rail.after(mark) of the piece, or rail.join(), before it is used"),
        (railing.flag_of_another_piece, "call rail.after(mark) of the piece, or rail.join(), before it is used"),
        (railing.source_of_a_piece_written, "if the piece sends what is written here, call rail.fork() after it"),
        (copying.source_of_put_nbi_overwritten, "call wl.quiet(team) before the source of put_nbi is written again"),
        (copying.target_of_get_nbi_read, "call wl.quiet(team) between get_nbi and the access"),
        (copying.notify_overtakes_put_nbi, "call wl.fence(team) or wl.quiet(team) between put_nbi and the notify"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_remedies_of_rails_and_late_copies(main, says):
    (found,) = weft.check.check(main, 2, schedules=4, args=(True,), deterministic=False).wrong
    assert found.finding.remedy.startswith(says), found.finding.remedy


@triton.jit
def push(data, landed, got, team, N: tl.constexpr, WAITS: tl.constexpr):
    at, peer = tl.arange(0, N), 1 - wl.rank(team)
    tl.store(wl.symm_at(data, peer, team) + at, 1.0)
    wl.notify(landed, peer, 1, team)
    if WAITS:
        wl.wait(landed, 1, team)
    tl.store(got + at, tl.load(data + at))


def test_a_load_that_reads_unwritten_memory_is_the_early_side():
    def main(team):
        data, landed = team.empty(N, torch.float32, name="data"), team.signals(1, name="landed")
        push[(1,)](data, landed, team.local(N, torch.float32), team.view, N, False)
        team.barrier()

    (found,) = weft.check.check(main, 2, schedules=8).wrong
    assert (found.finding.kind, [one.kind for one in found.also]) == ("race", ["uninitialised"])
    assert found.finding.remedy.startswith(
        "the load comes too early: notify (release) after the store in test_remedies.py"
    )


@triton.jit
def add_in_turn(total, turn, team, BUG: tl.constexpr):
    me = wl.rank(team)
    home = wl.symm_at(total, 0, team)
    if not BUG:
        wl.wait(turn, me, team)
    tl.store(home, tl.load(home) + me)  # turn
    for peer in range(wl.num_ranks(team)):
        wl.notify(turn, peer, me + 1, team)
    if BUG:
        wl.wait(turn, me, team)


def in_turn(team, bug):
    total, turn = team.zeros(1, torch.float32, name="total"), team.signals(1, name="turn")
    for _ in range(1):
        add_in_turn[(1,)](total, turn, team.view, bug)
    team.barrier()


def test_turns_in_a_fixed_order_are_not_told_to_add_in_any():
    report = weft.check.check(in_turn, 2, schedules=4, args=(False,))
    assert report.ok, str(report)
    (found,) = [f for f in weft.check.check(in_turn, 2, schedules=4, args=(True,)).wrong if f.finding.kind == "race"]
    assert "if the order" in found.finding.remedy


@triton.jit
def count_too_few(data, arrived, got, team, N: tl.constexpr):
    """Two pieces, of which the wait counts one."""
    at, peer = tl.arange(0, N), 1 - wl.rank(team)
    for piece in range(2):
        tl.store(wl.symm_at(data, peer, team) + piece * N + at, 1.0)
        wl.notify(arrived, peer, 1, team, "add")  # counts
    wl.wait(arrived, 1, team)
    tl.store(got + at, tl.load(data + N + at))


def test_the_notify_that_ended_the_wait_is_named_and_tensors_by_their_arguments():
    def main(team):
        data, arrived = team.zeros(2 * N, torch.float32), team.signals(1)
        count_too_few[(1,)](data, arrived, team.local(N, torch.float32), team.view, N)
        team.barrier()

    report = weft.check.check(main, 2, schedules=8, deterministic=False)
    text = str(report)
    (found,) = report.wrong
    assert (found.finding.kind, found.finding.tensor) == ("race", "data, argument of count_too_few")
    assert "symmetric tensor #" not in text
    assert "waited for signals[0] of rank" in text
    assert "ended by atomic add (release, sys) of rank" in text and "from 0 to 1" in text


def test_an_assertion_keeps_the_lines_with_its_numbers():
    def main(team):
        torch.testing.assert_close(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0]))

    report = weft.check.check(main, 1, schedules=1)
    assert "Tensor-likes are not close!" in str(report)
    assert "Mismatched elements: 1 / 3" in str(report) and "Greatest absolute difference: 1.0" in str(report)
    assert "see the message" not in str(report)

    def talkative(team):
        raise RuntimeError("\n".join(["first"] + ["x" * 1000] * 1000))

    assert len(str(weft.check.check(talkative, 1, schedules=1))) < 4000


@pytest.mark.parametrize(("how", "says"), [("exhausted", "atomics take effect at once"), ("bounded", "other orders")])
def test_a_search_says_what_it_has_left_out(how, says):
    assert says in Report(findings=(), schedules=9, world_sizes=(3,), exhaustive=how).summary


def test_a_divergence_names_its_line_and_counts_once_for_all_world_sizes():
    report = weft.check.check(sticking.rows_in_order_of_arrival, [1, 2, 3], schedules=6, args=(True,))
    (found,) = report.wrong
    assert found.finding.kind == "divergence"
    assert [side.place.text[:24] for side in found.finding.sides] == ["row = tl.atomic_add(tick"]
    assert "at world size 1" in found.finding.message and "at world size 3" in found.finding.detail[-1]
