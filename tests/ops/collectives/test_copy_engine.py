"""Collectives by copy engines: how parts are cut, calls of both designs in turn, rounds, and who gets them."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import weft
import weft.check
from tests.ops.checking import assert_identical, check_replicated, run_cases
from tests.sampled import sampled
from weft import ops
from weft.ops.case import BF16, FP32, Case
from weft.ops.collectives import copy_engine
from weft.ops.collectives.all_gather import ALL_GATHER
from weft.ops.collectives.all_reduce import ALL_REDUCE, AllReduce
from weft.ops.collectives.collective import ENDLESS, Collective, CollectiveCall, of_world
from weft.ops.collectives.copy_engine import CopyEngine
from weft.ops.op import registered
from weft.plan import table
from weft.plan.memo import forget
from weft.plan.planned import STAGING, machine, machine_of
from weft.runtime import capabilities
from weft.transport.plans import LINE_BYTES

LINE = LINE_BYTES
COLLECTIVES = [op for op in registered() if isinstance(op, Collective)]
GPU = dataclasses.replace(capabilities.simulated(4), device_name="Some GPU", is_simulated=False)


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
        for design in ("copy_engine", "auto"):
            yield Case(op="all_reduce", world_size=world_size, dtype=BF16, sizes=(length * 5,), design=design)
            yield Case(op="all_gather", world_size=world_size, dtype=FP32, sizes=(length,), design=design)
            for op in ("all_to_all", "reduce_scatter"):
                yield Case(op=op, world_size=world_size, dtype=BF16, sizes=(world_size, length), design=design)


def run_in_turn(team, cases):
    """No barrier between, so that a rank may be a call ahead; everything is checked at the end."""
    return run_cases(team, cases, calls=1)


@pytest.mark.parametrize(
    ("world_size", "slow", "seed"),
    sampled(
        ((*ranks, seed) for ranks in ((2, {1: 20.0}), (3, None), (4, {0: 20.0})) for seed in range(3)),
        lambda world_size, slow, seed: seed == world_size - 2 and world_size < 4,
    ),
)
def test_both_designs_in_turn(world_size, slow, seed):
    cases = list(in_turn(world_size))
    check_replicated(weft.simulate(run_in_turn, world_size, seed=seed, slow=slow, args=(cases,)))


@pytest.mark.parametrize("world_size", sampled([(2,), (3,), (4,)], lambda world_size: world_size == 3))
def test_what_the_slots_cannot_hold_goes_in_rounds(monkeypatch, world_size):
    monkeypatch.setattr(copy_engine, "ROUND_BYTES", 512)
    cases = [case for case in in_turn(world_size) if case.design == "copy_engine"]

    def main(team):
        results = run_in_turn(team, cases)
        (space,) = team.workspace(STAGING, dict).values()
        return results, space.buffers.numel()

    results, sizes = zip(*weft.simulate(main, world_size, seed=world_size), strict=True)
    check_replicated(results)
    assert set(sizes) == {1 << 16}


def test_the_same_bits_from_run_to_run():
    case = Case(op="all_reduce", world_size=4, dtype=BF16, sizes=(3000,), design="copy_engine")
    first, second = (weft.simulate(run_in_turn, 4, seed=seed, args=([case],)) for seed in (11, 12))
    assert_identical(first[0][0][2], second[0][0][2])


@pytest.mark.parametrize("schedules", [2, pytest.param(12, marks=pytest.mark.sweep)])
def test_rounds_are_clean_under_many_schedules(monkeypatch, schedules):
    """The slots are written again in the same call, by engines that may be a round ahead."""
    monkeypatch.setattr(copy_engine, "ROUND_BYTES", 256)

    def main(team):
        x = torch.randn(200, generator=torch.Generator().manual_seed(team.rank)).bfloat16()
        return [ops.all_reduce(x, team, "copy_engine"), ops.all_gather(x, team, "copy_engine")]

    report = weft.check.check(main, 3, schedules=schedules)
    assert report.ok, str(report)


def test_a_slot_that_nobody_gives_back_is_a_race(monkeypatch):
    """What the meeting at the beginning of a call is for."""
    begin = copy_engine.CopyChannel.begin

    def careless(space, team):
        half = begin(space, team)
        space.halves.halves[0][1].entered.fill_(1 << 20)  # as if all peers had ended all calls
        return half

    monkeypatch.setattr(copy_engine.CopyChannel, "begin", careless)

    def main(team):
        x = torch.randn(64, generator=torch.Generator().manual_seed(team.rank)).bfloat16()
        return [ops.all_gather(x, team, "copy_engine") for _ in range(3)]

    assert not weft.check.check(main, 2, schedules=4).ok


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("op", COLLECTIVES, ids=lambda op: op.name)
def test_the_rule_counts_the_bytes_of_all_parts(op, world_size):
    line, limit = LINE * world_size, of_world(op.copy_engine_from, world_size)
    least = -(-limit // line) * line
    parts = world_size if op.gathers else 1
    pushed = "two_shot" if "two_shot" in op.designs else "push"

    def of_bytes(whole, design="auto"):
        return op.plan(CollectiveCall(whole // parts, BF16, design), machine(GPU, world_size))

    if limit == ENDLESS:
        assert of_bytes(1 << 40).name == pushed
        return
    found = of_bytes(least)
    assert found.name == "copy_engine" and isinstance(found.design, CopyEngine)
    assert f"{least:,} bytes >= {limit:,}" in found.reason
    assert of_bytes(least - line).name == pushed
    assert of_bytes(least + line - 4 * parts).name == pushed  # parts that do not end on lines
    assert of_bytes(least, pushed).name == pushed
    assert of_bytes(4 * line, "copy_engine").design == found.design


def test_explain_says_copy_engines_and_why():
    found = ops.explain("all_reduce", (1 << 30,), BF16, 4, GPU)
    assert found.algorithm == "copy_engine"
    told = str(found)
    assert f"gets  copy_engine: pieces={found.plan.pieces}, programs={found.plan.programs}" in told
    assert "one peer at a time" in told
    assert ops.explain("all_reduce", (4096,), BF16, 4, GPU, algorithm="copy_engine").algorithm == "copy_engine"


def test_a_heap_without_room_gets_tiles(monkeypatch):
    """Unless copy engines were asked for; and slots that are there already are used."""
    monkeypatch.setattr(AllReduce, "copy_engine_from", {4: 1 << 17})
    forget()

    def main(team):
        x = torch.zeros(1 << 17, dtype=BF16)

        def planned(design):
            return ALL_REDUCE.plan(CollectiveCall(x.nbytes, x.dtype, design), machine_of(team)).name

        before, asked = planned("auto"), planned("copy_engine")
        ops.all_reduce(x, team, "copy_engine")
        return before, asked, planned("auto")

    # Slots of 2 x 128 KiB at world_size=2; half of what is free must hold them. No table has rows of a B200.
    for result in weft.simulate(main, 2, like="b200", heap_bytes=450 << 10):
        assert result == ("one_shot", "copy_engine", "copy_engine")
    for result in weft.simulate(main, 2, like="b200", heap_bytes=2 << 20):
        assert result == ("copy_engine", "copy_engine", "copy_engine")
    forget()


def test_a_row_of_copy_engines_is_taken_where_parts_end_on_lines(monkeypatch, tmp_path):
    file_for = table.file_for
    monkeypatch.setattr(table, "file_for", lambda gpu, world_size: file_for(gpu, world_size, tmp_path))
    design = CopyEngine(pieces=(5, 2), programs=48)
    row = table.Row(
        op="all_gather", dtype="bfloat16", shape=(1 << 20,), design="copy_engine", config=dataclasses.asdict(design), us=7.5
    )  # fmt: skip
    forget()
    table.write(table.file_for("Some GPU", 4), table.Table(gpu="Some GPU", world_size=4, rows=(row,)))
    here = machine(GPU, 4)
    found = ALL_GATHER.plan(CollectiveCall(1 << 18, BF16), here)
    assert (found.name, found.design) == ("copy_engine", design)
    assert ALL_GATHER.plan(CollectiveCall((1 << 18) + 4, BF16), here).name == "push"
    assert ALL_GATHER.plan(CollectiveCall(1 << 18, BF16, "push"), here).name == "push"
    forget()
