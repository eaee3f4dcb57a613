"""The measuring itself: wrong answers, providers that fail, do not end or cannot be captured, and every meter's graph."""

import contextlib
import dataclasses
import pickle
import threading
import types
from collections import Counter
from itertools import pairwise

import pytest
import torch

import weft
from tests.bench import canned
from weft.bench.harness import meters, runner
from weft.bench.ops import baselines
from weft.bench.ops.problem import Problem
from weft.bench.ops.providers import Attempt, Provider, Unavailable, choose, plan_of
from weft.bench.ops.shapes import OPS, Shape, is_gemm, op_of, parse_shapes
from weft.bench.ops.workload import Plan, heap_bytes
from weft.plan.planned import machine
from weft.runtime.capabilities import Capabilities


class Event:
    """Every event comes 7 µs after the one before of the same rank."""

    clock = threading.local()

    def __init__(self, **options):
        self.at = None

    def record(self):
        self.at = Event.clock.now = getattr(Event.clock, "now", 0.0) + 0.007

    def query(self):
        return True

    def elapsed_time(self, end):
        return end.at - self.at


class Graph:
    def replay(self):
        """Again does the work."""


class Again:
    """A meter whose replay does its work again: nothing here can be captured."""

    def __init__(self, *arguments):
        self.arguments = arguments
        super().__init__(*arguments)

    def replay(self):
        self.__init__(*self.arguments)
        super().replay()


@pytest.fixture
def fake_gpus(monkeypatch):
    """Ranks that time as on GPUs, with events and graphs that are made up."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(meters, "capturing", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(meters, "events_in_graphs", lambda team: 1.5)
    for name in ("GraphMeter", "ChainMeter", "AroundMeter"):
        monkeypatch.setattr(meters, name, type(name, (Again, getattr(meters, name)), {}))


@pytest.fixture
def others(monkeypatch):
    """others(name=make, …) are the baselines of all-reduce."""

    def use(**makers):
        monkeypatch.setattr(
            baselines,
            "BASELINES",
            tuple(Provider(name=name, ops=("all-reduce",), role="other", make=make) for name, make in makers.items()),
        )

    return use


def library(problem):
    buffers = [x.clone() for (x,) in problem.sets]
    return Attempt(
        run=lambda number: buffers[number].copy_(problem.team.library.all_reduce(buffers[number])),
        prepare=lambda number: buffers[number].copy_(problem.sets[number][0]),
        in_place=True,
    )


def once(problem):
    """Right once after each time that its input is written, and says nothing of it."""
    return dataclasses.replace(library(problem), in_place=False)


def wrong(problem):
    return Attempt(run=lambda number: problem.sets[number][0].clone())


def unwritten(problem):
    return Attempt(run=lambda number: torch.empty_like(problem.sets[number][0]).fill_(float("nan")))


def missing(problem):
    raise Unavailable("not in this torch")


def only_rank_0(problem):
    def run(number):
        if problem.team.rank == 1:
            raise RuntimeError("no memory\nleft")
        return problem.sets[number][0]

    return Attempt(run=run)


def run(plan, world_size=2, on_gpus=True):
    lines = []

    def main(team):
        team.is_simulated = team.is_simulated and not on_gpus
        return runner.run_plans(team, [plan], None, lines.append)

    return weft.simulate(main, world_size), lines


def plan(op="all-reduce", shapes=("96",), **more):
    return Plan(op=op, shapes=parse_shapes(op, shapes, 2), **more)


def test_times_as_on_gpus(fake_gpus, others):
    others(library=library, wrong=wrong, unwritten=unwritten, missing=missing, once=once)
    everywhere, lines = run(
        plan(eager=True, quick=True, providers=("weft.auto", "library", "wrong", "unwritten", "missing", "once"))
    )
    reports = everywhere[0][0], everywhere[1][0]
    assert reports[0].rows == reports[1].rows  # every rank knows all, whichever lives to tell it
    rows = {row.provider: row for row in reports[0].rows}
    for name in ("weft.auto", "library"):
        row = rows[name]
        assert (row.mode, row.reason) == ("graph", None)
        assert row.median_us == pytest.approx(7.0)
        assert row.chain_us == pytest.approx(7 / 64)  # the 7 µs between two events, over 64 calls
        assert row.eager_us == pytest.approx(7.0)
        assert row.samples >= 3 * 8
        assert row.max_abs_error < 0.1
    assert rows["wrong"].reason.startswith("wrong answer: rank 0: ")
    assert rows["wrong"].median_us is None
    assert rows["unwritten"].reason.startswith("wrong answer: rank 0: 48 of 48 elements")
    assert rows["once"].reason.startswith("wrong answer in a row: rank 0: ")
    assert rows["once"].median_us is None
    assert rows["missing"].reason == "not in this torch"
    assert reports[0].protocol["empty_us"] == 1.5
    assert lines == [lines[0]]
    assert lines[0].startswith("all-reduce W=2 96 B: 1 of 1")


def test_without_a_graph_as_many_calls_are_timed_as_with_one(fake_gpus, others, monkeypatch):
    counts = []

    class Counted(meters.EagerMeter):
        def __init__(self, team, attempt, numbers):
            counts.append(len(numbers))
            super().__init__(team, attempt, numbers)

    others(library=library)
    monkeypatch.setattr(meters, "EagerMeter", Counted)
    (row,) = run(plan(eager=True, providers=("library",)))[0][0][0].rows
    assert row.chain_us is not None and counts == [8, 8]  # a rank each


def test_what_cannot_be_captured_is_timed_without_a_graph(fake_gpus, others, monkeypatch):
    def refuse(team, attempt, numbers):
        raise RuntimeError("operation not permitted when stream is capturing")

    others(library=library)
    monkeypatch.setattr(meters, "GraphMeter", refuse)
    (row,) = run(plan(providers=("library",)))[0][0][0].rows
    assert row.mode == "eager"
    assert row.median_us == row.eager_us == pytest.approx(7.0)
    assert row.reason == "not captured: RuntimeError: operation not permitted when stream is capturing"


def test_without_events_in_graphs_whole_graphs_are_timed(fake_gpus, monkeypatch):
    monkeypatch.setattr(meters, "events_in_graphs", lambda team: None)

    (row,) = run(plan(op="gemm", shapes=("4,16,16",), providers=("weft.auto",), quick=True))[0][0][0].rows
    assert (row.mode, row.reason, row.chain_us) == ("around", None, None)
    assert row.median_us == pytest.approx(0.0)  # both graphs take as long here


def test_kernels_on_some_ranks_only_end_the_run_with_what_was_found(fake_gpus, others):
    others(library=library, half=only_rank_0)
    with pytest.raises(
        runner.OutOfStep, match="half at 96 B failed on some ranks only .*rank 1: RuntimeError: no memory left"
    ) as e:
        run(plan(shapes=("96", "192")))
    copy = pickle.loads(pickle.dumps(e.value))  # as it comes from another process
    assert str(copy) == str(e.value)
    (report,) = copy.reports
    assert {row.shape for row in report.rows} == {(96,), (192,)}
    assert all("not measured: " in row.reason for row in report.rows)


def test_work_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", type("Never", (Event,), {"query": lambda self: False}))
    team = types.SimpleNamespace(device=torch.device("cuda", 0), rank=3)
    with pytest.raises(meters.Stuck, match=r"rank 3: nccl at 4 KiB did not end within 0.05 s.*--providers") as e:
        meters.finish(team, "nccl at 4 KiB", 0.05)
    e.value.reports = [canned.all_reduce()]
    assert pickle.loads(pickle.dumps(e.value)).reports == [canned.all_reduce()]


def test_a_spread_is_of_the_samples():
    found = meters.spread([float(value) for value in range(101)][::-1])
    assert (found.median, found.p10, found.p90, found.samples) == (50.0, 10.0, 90.0, 101)
    assert meters.spread([3.0]).p90 == 3.0


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 10, 15])
def test_every_meter_follows_every_other_equally_often(count):
    rounds = max(2, meters.balanced_rounds(count))
    orders = [meters.in_turn(count, number) for number in range(rounds)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert set(pairs.values()) <= {1 + count % 2} and len(pairs) == count * (count - 1)
    for place in zip(*orders, strict=True):
        assert set(Counter(place).values()) == {1 + count % 2}
    assert meters.in_turn(count, rounds) == orders[0]


def test_the_last_replica_takes_the_set_whose_answer_is_known():
    assert meters.order(3, 7) == [0, 2, 1, 0, 2, 1, 0]
    for sets in range(1, 9):
        for replicas in range(1, 20):
            taken = meters.order(sets, replicas)
            assert taken[-1] == 0
            assert len(set(taken)) == min(sets, replicas)


def test_short_calls_are_many_in_a_row():
    """So that what only the first one costs is divided by many."""
    assert [meters.calls_in_a_row(us) for us in (0.5, 3.0, 24.9, 25.0, 99.0)] == [64, 64, 64, 32, 32]


def test_rounds_fill_the_time_within_bounds():
    assert meters.rounds_for(0.1, quick=False, count=1) == 11
    assert meters.rounds_for(1e-9, quick=False, count=1) == 50
    assert meters.rounds_for(9.0, quick=True, count=1) == 3


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("count", [2, 5, 8, 15, 16])
def test_short_rounds_are_so_many_that_neighbours_are_balanced(count, quick):
    rounds = meters.rounds_for(0.005, quick, count)
    pairs = Counter(pair for number in range(rounds) for pair in pairwise(meters.in_turn(count, number)))
    assert len(pairs) == count * (count - 1) and len(set(pairs.values())) == 1


def test_long_rounds_are_no_more_than_time_allows():
    assert meters.rounds_for(0.35 / 12, quick=True, count=16) == 16  # 1.33 times as long
    assert meters.rounds_for(0.35 / 12, quick=True, count=8) == 16
    assert meters.rounds_for(0.35 / 11, quick=True, count=8) == 8
    assert meters.rounds_for(0.35 / 12, quick=True, count=15) == 12  # not balanced
    assert meters.rounds_for(9.0, quick=True, count=5) == 3  # nor these


@pytest.mark.parametrize(("rounds", "said"), [(4, "balanced"), (5, "not balanced")])
def test_the_protocol_says_whether_neighbours_are_balanced(rounds, said, fake_gpus, others, monkeypatch):
    others(library=library)
    monkeypatch.setattr(meters, "rounds_for", lambda seconds, quick, count: rounds)
    made = plan(providers=("weft.one_shot", "library"))  # both alone and in a row: four meters
    assert run(made)[0][0][0].protocol["neighbours"] == said
    assert runner.neighbours({"1 KiB": True, "1 MiB": False}) == "balanced, but not at 1 MiB: too few rounds"


@pytest.mark.parametrize("size", [(16, 8192, 512), (16, 1024, 1024), (1, 512, 512)])
def test_weights_are_cold_again_when_they_come_round(size):
    team = types.SimpleNamespace(is_simulated=False, size=4, rank=0, device=torch.device("cpu"))
    problem = Problem("gemm", Shape(size=size, label=""), "bf16", team)
    (m, n, k), calls = size, len(problem.sets)
    assert (m + n) * k * 2 * (calls - 1) >= 120e6
    assert problem.replicas == len(problem.sets)
    assert not torch.equal(problem.sets[0][1], problem.sets[1][1])


@pytest.mark.parametrize("op", ["all-gather", "all-to-all", "reduce-scatter", "ag-gemm", "gemm-rs", "gemm-ar"])
def test_a_wrong_element_is_seen(op):
    def main(team):
        problem = Problem(op, parse_shapes(op, [], 2, tiny=True)[0], "bf16", team)
        right = problem.answer().to(torch.bfloat16, copy=True)
        assert not problem.judge(right).wrong
        right.view(-1)[5] += 1
        assert problem.judge(right).wrong.startswith("1 of ")
        assert problem.judge(right[1:]).wrong.startswith("shape ")
        return True

    assert all(weft.simulate(main, 2))


def test_providers_are_chosen_by_name_and_family():
    assert [p.name for p in choose("all-reduce", ["weft"])] == [
        f"weft.{name}" for name in ("auto", "one_shot", "two_shot", "copy_engine")
    ]
    assert [p.name for p in choose("all-reduce", ["nccl", "torch.two_shot"])] == [
        "nccl",
        "nccl.window",
        "torch.two_shot",
    ]
    assert [p.name for p in choose("gemm-ar", ["weft"])] == [
        f"weft.{name}" for name in ("auto", "fused", "pipelined", "sequential")
    ]
    assert [p.name for p in choose("gemm-ar", []) if p.role == "weft"] == ["weft.auto"]
    assert {p.name for p in choose("gemm-ar", [], simulated=True)} >= {
        "weft.fused",
        "weft.pipelined",
        "weft.sequential",
    }
    assert [p.name for p in choose("gemm-ar", ["weft.segments", "weft.library"])] == [
        "weft.pipelined",
        "weft.sequential",
    ]
    assert "weft.small_m" not in {p.name for p in choose("gemm", [], simulated=True)}  # for some dtypes and sizes only
    assert [p.name for p in choose("gemm", ["weft.small_m"])] == ["weft.small_m"]
    assert [(p.name, p.role) for p in choose("gemm-rs", ["cublas"])] == [("cublas", "ceiling")]
    assert [(p.name, p.role) for p in choose("gemm", ["cublas"])] == [("cublas", "other")]


@pytest.mark.parametrize("name", [name for name in OPS if is_gemm(name)])
def test_a_design_by_name_has_its_own_fields(name):
    """Also where a call gets another one, by rule or by a row that was tuned."""
    h200 = Capabilities(device_name="NVIDIA H200", arch="sm_90", sms=132, memory_bytes=0, peer_access=(True,) * 4)
    op, here = op_of(name), machine(h200, 4)
    for m in (16, 4096, 8192):
        call = op.call_of((m, 5120, 6400), torch.bfloat16, here)
        for design in op.designs:
            planned = op.plan(call._replace(design=design), here)
            assert (planned.name, type(planned.design)) == (design, op.designs[design])
        auto = op.plan(call, here)
        assert op.plan(call._replace(design=auto.name), here).design == auto.design


def test_a_provider_runs_the_plan_of_its_design():
    def main(team):
        problem = Problem("gemm-rs", parse_shapes("gemm-rs", [], 2, tiny=True)[0], "bf16", team)
        return [plan_of(problem, design).name for design in ("auto", *problem.op.designs)]

    assert weft.simulate(main, 2) == [["fused", "fused", "pipelined", "sequential"]] * 2


def test_the_heap_grows_with_the_largest_shape():
    small, large = plan(op="gemm-rs", shapes=("2,16,16",)), plan(op="ag-gemm", shapes=("16384,6656,16384",))
    assert heap_bytes([small]) < 7 << 30
    assert heap_bytes([small, large]) > 10 << 30
