"""The measuring itself: wrong answers, providers that fail, do not end or cannot be captured, and every meter's graph."""

import contextlib
import dataclasses
import pickle
import threading

import pytest
import torch

import weft
from weft.bench.harness import meters, runner
from weft.bench.harness.bench import Options
from weft.bench.harness.provider import Prepared, Provider, Unavailable
from weft.bench.harness.workload import OutOfStep
from weft.bench.ops import providers
from weft.bench.ops.shapes import parse_shapes
from weft.bench.ops.workload import OpWorkload


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
            providers,
            "BASELINES",
            tuple(Provider(name=name, ops=("all-reduce",), role="other", make=make) for name, make in makers.items()),
        )

    return use


def library(problem):
    buffers = [x.clone() for (x,) in problem.sets]
    return Prepared(
        run=lambda number: buffers[number].copy_(problem.team.library.all_reduce(buffers[number])),
        prepare=lambda number: buffers[number].copy_(problem.sets[number][0]),
        in_place=True,
    )


def once(problem):
    """Right once after each time that its input is written, and says nothing of it."""
    return dataclasses.replace(library(problem), in_place=False)


def wrong(problem):
    return Prepared(run=lambda number: problem.sets[number][0].clone())


def unwritten(problem):
    return Prepared(run=lambda number: torch.empty_like(problem.sets[number][0]).fill_(float("nan")))


def missing(problem):
    raise Unavailable("not in this torch")


def only_rank_0(problem):
    def run(number):
        if problem.team.rank == 1:
            raise RuntimeError("no memory\nleft")
        return problem.sets[number][0]

    return Prepared(run=run)


def run(workload, world_size=2, on_gpus=True, **options):
    lines = []

    def main(team):
        team.is_simulated = team.is_simulated and not on_gpus
        return runner.run_workloads(team, [workload], Options(**options), None, lines.append)

    return weft.simulate(main, world_size), lines


def workload(op="all-reduce", shapes=("96",), providers=()):
    return OpWorkload(name=op, shapes=parse_shapes(op, shapes, 2), words=providers)


def test_times_as_on_gpus(fake_gpus, others):
    others(library=library, wrong=wrong, unwritten=unwritten, missing=missing, once=once)
    everywhere, lines = run(
        workload(providers=("weft.auto", "library", "wrong", "unwritten", "missing", "once")), eager=True, quick=True
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
        assert row.eager_row_us == pytest.approx(7 / 16) and row.host_us > 0
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
        def __init__(self, team, prepared, numbers):
            counts.append(len(numbers))
            super().__init__(team, prepared, numbers)

    others(library=library)
    monkeypatch.setattr(meters, "EagerMeter", Counted)
    (row,) = run(workload(providers=("library",)), eager=True)[0][0][0].rows
    assert row.chain_us is not None and counts == [8, 8]  # a rank each


def test_what_cannot_be_captured_is_timed_without_a_graph(fake_gpus, others, monkeypatch):
    def refuse(team, prepared, numbers):
        raise RuntimeError("operation not permitted when stream is capturing")

    others(library=library)
    monkeypatch.setattr(meters, "GraphMeter", refuse)
    (row,) = run(workload(providers=("library",)))[0][0][0].rows
    assert row.mode == "eager"
    assert row.median_us == row.eager_us == pytest.approx(7.0)
    assert row.reason == "not captured: RuntimeError: operation not permitted when stream is capturing"


def test_without_events_in_graphs_whole_graphs_are_timed(fake_gpus, monkeypatch):
    monkeypatch.setattr(meters, "events_in_graphs", lambda team: None)
    for most in ("MOST_SETS", "FEW_SETS"):  # a replay simulates all sets again
        monkeypatch.setattr(f"weft.bench.ops.problem.{most}", 4)

    (row,) = run(workload(op="gemm", shapes=("4,16,16",), providers=("weft.auto",)), quick=True)[0][0][0].rows
    assert (row.mode, row.reason, row.chain_us) == ("around", None, None)
    assert row.median_us == pytest.approx(0.0)  # both graphs take as long here


def test_kernels_on_some_ranks_only_end_the_run_with_what_was_found(fake_gpus, others):
    others(library=library, half=only_rank_0)
    with pytest.raises(
        OutOfStep, match="half at 96 B failed on some ranks only .*rank 1: RuntimeError: no memory left"
    ) as e:
        run(workload(shapes=("96", "192")))
    copy = pickle.loads(pickle.dumps(e.value))  # as it comes from another process
    assert str(copy) == str(e.value)
    (report,) = copy.reports
    assert {row.shape for row in report.rows} == {(96,), (192,)}
    assert all("not measured: " in row.reason for row in report.rows)


@pytest.mark.parametrize(("rounds", "said"), [(4, "balanced"), (5, "not balanced")])
def test_the_protocol_says_whether_neighbours_are_balanced(rounds, said, fake_gpus, others, monkeypatch):
    others(library=library)
    monkeypatch.setattr(meters, "rounds_for", lambda seconds, quick, count: rounds)
    monkeypatch.setattr(meters, "MANY_CALLS", 16)
    made = workload(providers=("weft.one_shot", "library"))  # both alone and in a row: four meters
    assert run(made)[0][0][0].protocol["neighbours"] == said
    assert runner.neighbours({"1 KiB": True, "1 MiB": False}) == "balanced, but not at 1 MiB: too few rounds"


def test_one_by_one_a_provider_has_left_before_the_next_is_made(fake_gpus, others):
    """Each is checked against the answers: a wrong second provider is found, and a right third one is timed."""
    told = []

    def noted(name, make):
        def made(problem):
            if problem.team.rank == 0:
                told.append((name, "made"))
            prepared = make(problem)

            def run(number):
                if problem.team.rank == 0:
                    told.append((name, "run"))
                return prepared.run(number)

            return dataclasses.replace(prepared, run=run)

        return made

    others(**{name: noted(name, make) for name, make in (("one", library), ("two", wrong), ("three", library))})
    made = workload(providers=("one", "two", "three"))
    report = run(made, one_by_one=True, quick=True)[0][0][0]
    assert [(row.provider, row.mode, row.reason is None) for row in report.rows] == [
        ("one", "graph", True), ("two", None, False), ("three", "graph", True),
    ]  # fmt: skip
    assert "wrong answer" in report.rows[1].reason
    assert report.protocol["alternation"] == "none: all rounds of a provider, then those of the next one"
    assert "neighbours" not in report.protocol
    names = ["one", "two", "three"]
    assert list(dict.fromkeys(told)) == [(name, what) for name in names for what in ("made", "run")]
    in_order = [name for name, _ in told]
    assert in_order == sorted(in_order, key=names.index)
    told.clear()
    run(made, quick=True)
    in_turn = [name for name, _ in told]
    assert in_turn != sorted(in_turn, key=names.index)
