"""Collectives by copy engines: how parts are cut, calls of both designs in turn, rounds, and who gets them."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import weft
import weft.check
from tests.ops.cases import BF16, FP32, OPERATIONS, Case, check, inputs_of
from tests.ops.closeness import assert_identical
from weft import ops
from weft.ops import dispatch
from weft.ops.collectives import copy_engine
from weft.plan.memo import forget
from weft.runtime import capabilities
from weft.transport.plans import LINE_BYTES

LINE = LINE_BYTES
GPU = dataclasses.replace(capabilities.simulated(4, 132), device_name="Some GPU", arch="sm_90")


@given(st.integers(1, 300), st.lists(st.integers(1, 9), min_size=1, max_size=8), st.sampled_from([BF16, FP32]))
def test_pieces_hold_every_element_once_and_begin_on_lines(n, shares, dtype):
    x = torch.empty(n, dtype=dtype)
    pieces = list(copy_engine.cut(x, shares))
    assert [at for piece in pieces for at in range(piece.start, piece.stop)] == list(range(n))
    assert len(pieces) <= len(shares)
    assert all(piece.start < piece.stop and piece.start * dtype.itemsize % LINE == 0 for piece in pieces)


@given(st.integers(1, 300), st.integers(1, 9), st.sampled_from([BF16, FP32]))
def test_parts_hold_every_element_once_and_none_is_longer_than_the_first(n, world_size, dtype):
    x = torch.arange(n).to(dtype)
    parts = copy_engine.split(x, world_size)
    assert len(parts) == world_size and torch.equal(torch.cat(parts), x)
    assert all(part.numel() <= parts[0].numel() for part in parts)
    assert all(part.storage_offset() * dtype.itemsize % LINE == 0 for part in parts if part.numel())


def in_turn(world_size):
    """Calls that share slots and flags, large after small and small after large, between those of the other design."""
    for length in (7, 900, 64):
        for algorithm in ("copy_engine", "auto"):
            yield Case(op="all_reduce", world_size=world_size, dtype=BF16, shape=(length * 5,), algorithm=algorithm)
            yield Case(op="all_gather", world_size=world_size, dtype=FP32, shape=(length,), algorithm=algorithm)
            for op in ("all_to_all", "reduce_scatter"):
                yield Case(op=op, world_size=world_size, dtype=BF16, shape=(world_size, length), algorithm=algorithm)


def run_in_turn(team, cases):
    """No barrier between, so that a rank may be a call ahead; everything is checked at the end."""
    done = [(case, OPERATIONS[case.op].run(case, team, *inputs_of(case, team.rank, 0))) for case in cases]
    for case, result in done:
        check(case, team.rank, 0, result)
    return [(case, result) for case, result in done if OPERATIONS[case.op].replicated]


def check_replicated(by_rank):
    for others in by_rank[1:]:
        for (case, first), (_, other) in zip(by_rank[0], others, strict=True):
            assert_identical(other, first, what=f"{case}, another rank")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("world_size", "slow"), [(2, {1: 20.0}), (3, None), (4, {0: 20.0})])
def test_both_designs_in_turn(world_size, slow, seed):
    cases = list(in_turn(world_size))
    check_replicated(weft.simulate(run_in_turn, world_size, seed=seed, slow=slow, args=(cases,)))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_what_the_slots_cannot_hold_goes_in_rounds(monkeypatch, world_size):
    monkeypatch.setattr(copy_engine, "ROUND_BYTES", 512)
    cases = [case for case in in_turn(world_size) if case.algorithm == "copy_engine"]
    check_replicated(weft.simulate(run_in_turn, world_size, seed=world_size, args=(cases,)))

    def main(team):
        run_in_turn(team, cases)
        (space,) = team.workspace(copy_engine.KEY, dict).values()
        return space.buffers.numel()

    assert set(weft.simulate(main, world_size)) == {1 << 16}


def test_the_same_bits_from_run_to_run():
    case = Case(op="all_reduce", world_size=4, dtype=BF16, shape=(3000,), algorithm="copy_engine")
    first, second = (weft.simulate(run_in_turn, 4, seed=seed, args=([case],)) for seed in (11, 12))
    assert_identical(first[0][0][1], second[0][0][1])


def test_rounds_are_clean_under_many_schedules(monkeypatch):
    """The slots are written again in the same call, by engines that may be a round ahead."""
    monkeypatch.setattr(copy_engine, "ROUND_BYTES", 256)

    def main(team):
        x = torch.randn(200, generator=torch.Generator().manual_seed(team.rank)).bfloat16()
        return [ops.all_reduce(x, team, "copy_engine"), ops.all_gather(x, team, "copy_engine")]

    report = weft.check.check(main, 3, schedules=12)
    assert report.ok, str(report)


def test_a_slot_that_nobody_gives_back_is_a_race(monkeypatch):
    """What the meeting at the beginning of a call is for."""
    begin = copy_engine.CopyChannel.begin

    def careless(space, team):
        half = begin(space, team)
        space.entered.fill_(1 << 20)  # as if all peers had ended all calls
        return half

    monkeypatch.setattr(copy_engine.CopyChannel, "begin", careless)

    def main(team):
        x = torch.randn(64, generator=torch.Generator().manual_seed(team.rank)).bfloat16()
        return [ops.all_gather(x, team, "copy_engine") for _ in range(3)]

    assert not weft.check.check(main, 2, schedules=12).ok


def limit_of(op, world_size):
    return dispatch.of_world(dispatch.COPY_ENGINE[op], world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("op", sorted(dispatch.COPY_ENGINE))
def test_the_rule_counts_the_bytes_of_all_parts(op, world_size):
    line, limit = LINE * world_size, limit_of(op, world_size)
    least = -(-limit // line) * line
    parts = world_size if op == "all_gather" else 1
    tiles = "two_shot" if op == "all_reduce" else "push"

    def chosen(whole, **options):
        return dispatch.choose(op, whole // parts, BF16, world_size, **options)

    if limit == dispatch.ENDLESS:
        assert chosen(1 << 40).algorithm == tiles
        return
    found = chosen(least)
    assert (found.algorithm, found.transport) == ("copy_engine", "flags")
    assert f"{least:,} bytes >= {limit_of(op, world_size):,}" in found.reason
    assert chosen(least - line).algorithm == tiles
    assert chosen(least + line - 4 * parts).algorithm == tiles  # parts that do not end on lines
    assert chosen(least, algorithm=tiles).algorithm == tiles
    assert chosen(4 * line, algorithm="copy_engine").plan == found.plan


def test_explain_says_copy_engines_and_why(capsys):
    found = ops.explain("all_reduce", (1 << 30,), BF16, 4, GPU)
    assert (found.algorithm, found.transport) == ("copy_engine", "flags")
    told = capsys.readouterr().out
    assert f"gets  copy_engine: pieces={found.plan.pieces}, programs={found.plan.programs}" in told
    assert "one peer at a time" in told
    assert ops.explain("all_reduce", (4096,), BF16, 4, GPU, algorithm="copy_engine").algorithm == "copy_engine"


def test_a_heap_without_room_gets_tiles(monkeypatch):
    """Unless copy engines were asked for; and slots that are there already are used."""
    for op in dispatch.COPY_ENGINE:
        monkeypatch.setitem(dispatch.COPY_ENGINE, op, {4: 1 << 17})

    def main(team):
        x = torch.zeros(1 << 17, dtype=BF16)
        before = copy_engine.chosen("all_reduce", x, team, "auto").algorithm
        asked = copy_engine.chosen("all_reduce", x, team, "copy_engine").algorithm
        ops.all_reduce(x, team, "copy_engine")
        return before, asked, copy_engine.chosen("all_reduce", x, team, "auto").algorithm

    # Slots of 2 x 128 KiB at world_size=2; half of what is free must hold them.
    for result in weft.simulate(main, 2, heap_bytes=450 << 10):
        assert result == ("two_shot", "copy_engine", "copy_engine")
    for result in weft.simulate(main, 2, heap_bytes=2 << 20):
        assert result == ("copy_engine", "copy_engine", "copy_engine")


def test_a_row_of_copy_engines_is_taken_where_parts_end_on_lines(monkeypatch, tmp_path):
    from weft.plan import table as tuned
    from weft.tune import search, spaces

    file_for = tuned.file_for
    monkeypatch.setattr(tuned, "file_for", lambda gpu, world_size: file_for(gpu, world_size, tmp_path))
    config = spaces.CopyConfig(pieces=(5, 2), programs=48)
    row = tuned.Row(op="all_gather", dtype="bfloat16", shape=(1 << 20,), config=search.fields_of(config), us=7.5)
    forget()
    tuned.write(tuned.file_for("Some GPU", 4), tuned.Table(gpu="Some GPU", world_size=4, rows=(row,)))
    found = dispatch.choose("all_gather", 1 << 18, BF16, 4, GPU)
    assert (found.algorithm, found.plan) == ("copy_engine", config.plan())
    assert dispatch.choose("all_gather", (1 << 18) + 4, BF16, 4, GPU).algorithm == "push"
    assert dispatch.choose("all_gather", 1 << 18, BF16, 4, GPU, algorithm="push").algorithm == "push"
    forget()
