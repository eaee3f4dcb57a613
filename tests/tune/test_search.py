"""The search on simulated ranks: all ranks go one way, whatever goes wrong on one of them."""

import dataclasses
import threading
import types

import pytest
import torch

import weft
from weft.bench.plan import Plan
from weft.bench.problem import Problem
from weft.bench.report import Row
from weft.bench.runner import Bench
from weft.bench.shapes import Shape
from weft.errors import WeftError
from weft.plan import table as tuned
from weft.runtime import capabilities
from weft.tune import compiling, search, spaces, timing
from weft.tune.search import TunePlan

pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")
STATE = threading.local()


def shapes(*sizes):
    return tuple(Shape(size=size, label="x".join(map(str, size))) for size in sizes)


def run(plan, world_size=2):
    """(outcomes by rank, lines that rank 0 said)."""
    lines = []
    found = weft.simulate(search.search, world_size, args=((plan,), lines.append))
    return [outcomes for (outcomes,) in found], lines


@pytest.fixture
def calls(monkeypatch):
    """[(rank, label, whether it was compiled only)], in order."""
    made, call = [], spaces.call

    def recorded(op, config, inputs, team):
        compiled = getattr(STATE, "compiling", False)
        made.append((team.rank, spaces.label(config), compiled))
        return None if compiled else call(op, config, inputs, team)

    def compile_only(action, team):
        STATE.compiling = True
        try:
            action()
        finally:
            STATE.compiling = False

    monkeypatch.setattr(spaces, "call", recorded)
    monkeypatch.setattr(compiling, "compile_only", compile_only)
    return made


@pytest.fixture
def failing(monkeypatch, calls):
    """failing(action): action(rank, label, compiled, out) may raise, or give another answer."""

    def use(action):
        recorded = spaces.call

        def call(op, config, inputs, team):
            compiled = getattr(STATE, "compiling", False)
            if not compiled:
                action(team.rank, spaces.label(config), compiled, None)
            out = recorded(op, config, inputs, team)
            return action(team.rank, spaces.label(config), compiled, out)

        monkeypatch.setattr(spaces, "call", call)

    return use


def test_all_ranks_try_the_same_the_same_number_of_times(calls):
    found, lines = run(TunePlan(op="all-reduce", shapes=shapes((96,), (240,)), quick=True), 3)
    assert found[0] == found[1] == found[2]
    by_rank = [[call[1:] for call in calls if call[0] == rank] for rank in range(3)]
    assert by_rank[0] == by_rank[1] == by_rank[2]
    for outcome in found[0]:
        first = 2 * len(spaces.QUICK_PLANS)  # the default is one of them
        # Then three fields of the best so far, up and down. It need not be the one that is chosen at last.
        assert first < outcome.tried <= first + 6
        assert outcome.row.config["algorithm"] in ("one_shot", "two_shot")
        assert 0 < outcome.row.us <= outcome.row.default_us
        assert outcome.dropped == ()
    assert [line.split(":")[0] for line in lines] == ["all-reduce 96", "all-reduce 240"]


def test_a_candidate_that_does_not_compile_on_one_rank_is_launched_on_none(calls, failing):
    def action(rank, label, compiled, out):
        if compiled and rank == 1 and label.startswith("two_shot lamport 512"):
            raise RuntimeError("out of resource: shared memory")
        return out

    failing(action)
    found, _ = run(TunePlan(op="all-reduce", shapes=shapes((96,)), quick=True))
    (outcome,) = found[0]
    assert found[0] == found[1]
    ((name, reason),) = outcome.dropped
    assert name.startswith("two_shot lamport 512")
    assert reason == "rank 1: RuntimeError: out of resource: shared memory"
    assert sorted(call for call in calls if call[1] == name) == [(0, name, True), (1, name, True)]
    assert outcome.row is not None
    assert outcome.row.candidates == outcome.tried - 1


def test_a_wrong_answer_on_one_rank_drops_it_everywhere(failing):
    def action(rank, label, compiled, out):
        if out is not None and rank == 1 and label.startswith("library"):
            out.view(-1)[0] += 1
        return out

    failing(action)
    found, _ = run(TunePlan(op="gemm-rs", shapes=shapes((32, 48, 32)), quick=True))
    assert found[0] == found[1]
    (outcome,) = found[0]
    assert [name for name, _ in outcome.dropped] == ["library"]
    assert "wrong answer: rank 1" in outcome.dropped[0][1]
    assert outcome.row.config["design"] in ("fused", "segments")


def test_a_candidate_that_fails_on_all_ranks_is_dropped_and_the_search_goes_on(failing):
    def action(rank, label, compiled, out):
        if not compiled and out is None and label != "library":
            raise ValueError("too many programs")
        return out

    failing(action)
    found, lines = run(TunePlan(op="gemm-ar", shapes=shapes((5, 24, 16)), quick=True))
    (outcome,) = found[0]
    assert outcome.winner == "library"
    assert outcome.row.default_us is None
    assert {reason for _, reason in outcome.dropped} == {"too many programs"}
    assert "dropped" in lines[0]


def test_no_candidate_at_all_is_an_outcome_with_a_reason(failing):
    def action(rank, label, compiled, out):
        raise ValueError("nothing runs here")

    failing(action)
    found, lines = run(TunePlan(op="gemm", shapes=shapes((5, 24, 16)), quick=True))
    assert found[0] == found[1]
    assert found[0][0].row is None
    assert lines[0].startswith("gemm 5x24x16: no candidate ran: nothing runs here")


def test_ranks_that_come_apart_end_the_search_and_leave_what_was_found(tmp_path, failing):
    """Rank 1 fails where rank 0 has launched: no agreement can help rank 0's kernel any more."""
    second = []

    def action(rank, label, compiled, out):
        if not compiled and out is None and rank == 1 and second:
            raise RuntimeError("lost")
        return out

    failing(action)
    file = tmp_path / "x.json"
    plan = TunePlan(op="all-reduce", shapes=shapes((96,), (2048,)), quick=True, out=file)
    with pytest.raises(WeftError, match=r"rank 0|deadlock"):
        weft.simulate(search.search, 2, args=((plan,), second.append))
    assert [row.shape for row in tuned.read(file).rows] == [(96,)]


def test_the_default_stays_unless_it_is_beaten():
    def main(team):
        return search.agreed(team, {"default": 10.0, "other": 9.95}, "default"), search.agreed(
            # Times are exchanged, so they are equal; rank 0 decides all the same.
            team, {"default": 10.0, "other": 9.0 + 2 * team.rank}, "default",
        )  # fmt: skip

    assert weft.simulate(main, 2) == [(("default", 10.0), ("other", 9.0))] * 2


def test_the_fastest_are_timed_once_more_beside_the_default(monkeypatch):
    """Of many candidates one reads fast by luck: what it reads beside the default counts."""
    rounds = [[], []]

    def measured(bench, entrants):
        mine = rounds[bench.team.rank]
        mine.append([spaces.label(config) for config in entrants])
        us = {"library": 1.0, "segments chunks=1 lanes=1 span=1": 7.0} if len(mine) == 1 else {"library": 30.0}
        return {config: us.get(spaces.label(config), 10.0) for config in entrants}

    monkeypatch.setattr(timing, "measured", measured)
    found, _ = run(TunePlan(op="gemm-rs", shapes=shapes((32, 48, 32)), quick=True))
    (outcome,) = found[0]
    assert rounds[0] == rounds[1]
    assert len(rounds[0]) == 2
    assert rounds[0][1] == [outcome.default, "library", "segments chunks=1 lanes=1 span=1"]
    assert (outcome.winner, outcome.row.us) == (outcome.default, 10.0)
    assert (outcome.row.default_us, outcome.row.candidates) == (10.0, len(rounds[0][0]))


def test_collectives_are_compared_alone_and_in_a_row_where_all_were():
    alone = [Row(shape=(4,), label="x", provider="x", role="weft", median_us=us) for us in (8.0, 9.0)]
    in_a_row = [dataclasses.replace(row, chain_us=us) for row, us in zip(alone, (4.5, 4.0), strict=True)]
    assert timing.deciding(alone) == [8.0, 9.0]
    assert timing.deciding(in_a_row) == pytest.approx([6.0, 6.0])
    assert timing.deciding([in_a_row[0], alone[1]]) == [8.0, 9.0]


def test_times_of_a_warm_gpu_are_compared_by_the_default(monkeypatch):
    """Two groups and a second round, in each of which all is slower than in the one before."""
    passes = []

    def measured(bench, entrants):
        passes.append(len(entrants))
        slow = 1 + 0.5 * len(passes)
        us = {config: 10.0 if config == configs[0] else 8.0 if config == configs[3] else 9.0 for config in entrants}
        return {config: time * slow for config, time in us.items()}

    def main(team):
        problem = Problem("gemm", shapes((5, 24, 16))[0], "bf16", team)
        bench = Bench(team, Plan(op="gemm", shapes=(), providers=("weft",)), None)
        return [timing.timed(bench, problem, configs, reference)[0] for reference in (None, 20.0)]

    configs = [spaces.GemmConfig(block_m=16, block_n=16, block_k=16, group=group) for group in range(1, 6)]
    monkeypatch.setattr(timing, "measured", measured)
    monkeypatch.setattr(timing, "TOGETHER", 2)
    ((first, second),) = weft.simulate(main, 1)
    assert passes == [4, 3, 3] * 2
    assert list(first.values()) == pytest.approx([15.0, 13.5, 13.5, 12.0, 13.5])
    assert list(second.values()) == pytest.approx([20.0, 18.0, 18.0, 16.0, 18.0])


def test_large_results_are_timed_in_smaller_groups():
    def together(op, *size, replicas=2):
        problem = types.SimpleNamespace(
            op=op, shape=Shape(size=size, label=""), dtype=torch.bfloat16, replicas=replicas
        )
        return timing.most_together(problem)

    assert together("all-reduce", 1 << 28) == together("gemm-rs", 4096, 5120, 6400) == timing.TOGETHER
    assert together("gemm", 16384, 57344, 8192) == 6  # 1.9 GB twice: eight in 32 GB, two of which are in every group
    assert together("gemm", 1 << 20, 1 << 20, 64) == 1


def test_shapes_that_differ_in_k_alone_get_rows_that_agree():
    """Fused is best for the one and segments for the other: together segments cost less, each with its own lanes."""
    tile = {"block_m": 128, "block_n": 128, "block_k": 64}
    fused = spaces.GemmConfig(**tile)
    one, two = (spaces.GemmConfig(**tile, design="segments", lanes=lanes) for lanes in (1, 2))

    def outcome(k, times):
        best = min(times, key=times.get)
        row = tuned.Row(
            op="matmul_reduce_scatter",
            dtype="bfloat16",
            shape=(1024, 5120, k),
            config=search.fields_of(best),
            us=times[best],
        )
        return search.Outcome(label=str(k), row=row, winner=spaces.label(best), times=times)

    alone = outcome(6400, {fused: 100.0, one: 104.0, two: 103.0})
    found = search.reconciled([alone, outcome(2048, {fused: 70.0, one: 60.0, two: 66.0})])
    assert [(found.row.config["design"], found.row.config["lanes"], found.row.us) for found in found] == [
        ("segments", 2, 103.0),
        ("segments", 1, 60.0),
    ]
    assert search.reconciled([alone]) == [alone]


def test_few_rows_are_left_to_their_own_rule():
    caps = dataclasses.replace(capabilities.simulated(4, 132), device_name="NVIDIA H200", arch="sm_90")
    team = types.SimpleNamespace(is_simulated=False, caps=caps)

    def decided(op, *size, dtype=torch.bfloat16):
        shape = Shape(size=size, label="")
        return spaces.decided(types.SimpleNamespace(op=op, team=team, shape=shape, dtype=dtype))

    assert "weft.ops.gemm.small_m has its own rule" in decided("gemm", 16, 12800, 5120)
    assert decided("gemm", 4096, 12800, 5120) == decided("gemm-ar", 16, 5120, 6400) == ""
    assert decided("gemm", 16, 12800, 5120, dtype=torch.float32) == ""


def test_neighbours_move_one_field_within_what_the_config_allows():
    best = spaces.GemmConfig(block_m=128, block_n=256, block_k=16, num_warps=8, group=1, chunks=8)
    found = spaces.around("ag-gemm", best, 4)
    assert len(found) == len(set(found))
    for config in found:
        moved = [name for name, value in search.fields_of(config).items() if value != getattr(best, name)]
        assert len(moved) == 1
        assert moved[0] in spaces.FIELDS["ag-gemm", "fused"]
    assert {config.chunks for config in found} == {4, 8}
    assert {config.block_k for config in found} == {16, 32}
    assert spaces.around("ag-gemm", spaces.replace(best, design="library"), 4) == []
    for world_size, span, spans, accumulate in (
        (2, 1, {1}, {False, True}), (3, 2, {1, 2}, {False}), (8, 2, {1, 2, 4}, {False}),
    ):  # fmt: skip
        segments = spaces.replace(best, design="segments", chunks=1, span=span)
        moved = spaces.around("gemm-rs", segments, world_size)
        assert {config.span for config in moved} == spans
        assert {config.accumulate for config in moved} == accumulate
