"""Graphs that are captured while requests run change no answer, and come between steps that all ranks agree on."""

import threading
import time
from types import SimpleNamespace

import pytest

import weft
from tests.engine.test_processes import EIGHT, CountedEngine, Ranks, until
from tests.limits import ANSWER
from weft.engine import Load, SamplingParams
from weft.engine.graphs import WARM_KINDS, Graphs
from weft.engine.prompts import Shape
from weft.engine.sizes import first_of, late_place
from weft.engine.speculation.verify import Verify

PROMPTS = ["123+456=", "7+8=", "99+1=", "5+5=", "12+34=", "1+2=", "3+4=", "50+60=", "8+8=", "1+1=", "10+10=", "6+7="]


@pytest.fixture
def graphs_as_passes(monkeypatch):
    """A capture runs its pass twice, as on GPUs, and a replay is the pass itself."""

    def capture(self, key, run):
        run()
        run()
        self._graphs[key] = SimpleNamespace(replay=run)

    monkeypatch.setattr(Graphs, "capture", capture)


def test_captures_between_steps_change_no_answer(graphs_as_passes):
    params = [SamplingParams(max_tokens=6, temperature=0.0 if i % 2 else 0.8, seed=i, logprobs=1) for i in range(12)]

    def main(team):
        made = [weft.Engine(None, team, mode="reference", max_batch=12, page_size=16) for _ in range(2)]
        exact, late = made
        runner = late.batch.runner
        runner.cuda_graph = True
        runner.warm_up(late=True)
        first = {*runner.graphs}
        left = runner.captures_left
        answers = []
        for engine in made:
            for number, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True)):
                engine.submit(prompt, one, number)
            pieces = []
            while engine.has_work:
                if engine.captures_left:
                    engine.capture_next()
                pieces += engine.step()
            answers.append(sorted((piece.prompt, piece.token_id, piece.logprobs is None) for piece in pieces))
        while late.captures_left:
            late.capture_next()
        return answers, first, left, {*runner.graphs}, runner._warm_sizes()

    for (expected, found), first, left, graphs, sizes in weft.simulate(main, 1):
        assert found == expected and len(expected) >= 12
        assert first == {*first_of(sizes)} and 0 < len(first) < len(sizes) == len(first) + left
        assert {*sizes} <= graphs


def test_the_first_graphs_serve_small_batches_and_short_prompts():
    shapes = Shape(384, 64), Shape(256, 64), Shape(256, 8), Shape(128, 64), Shape(16, 64, entries=8)
    of_new = Shape.of_new(1, 512), Shape.of_new(1, 64)
    batches = 16, 8, 1
    sizes = [(size, kind) for size in (*shapes, *of_new, *batches) for kind in WARM_KINDS]
    # The second kind serves greedy requests too.
    assert first_of(sizes) == [(size, WARM_KINDS[1]) for size in (Shape(256, 64), Shape.of_new(1, 64), 8)]
    assert first_of([(size, WARM_KINDS[1]) for size in (4, 2, 1)]) == [(4, WARM_KINDS[1])]


def test_graphs_of_small_batches_come_first_whatever_drafts_they_have():
    sizes = [Shape(16, 4), *(Verify(batch, length) for length in (2, 0) for batch in (16, 4, 2, 1))]
    late = sorted(((size, WARM_KINDS[0]) for size in sizes), key=late_place)
    assert [size for size, _ in reversed(late)][:6] == [
        Verify(batch, length) for batch in (1, 2, 4) for length in (0, 2)
    ]


def test_small_batches_run_in_the_first_graph_until_they_have_theirs(graphs_as_passes):
    def main(team):
        runner = weft.Engine(None, team, mode="reference", max_batch=12, page_size=16).batch.runner
        runner.cuda_graph = True
        before = [runner.buckets.of(batch) for batch in (1, 2, 3, 8, 9)]
        runner.warm_up(late=True)
        taken = []
        while runner.captures_left:
            taken.append([runner.buckets.of(batch) for batch in (1, 2, 3, 8, 9)])
            runner.capture_next()
        return before, taken, [runner.buckets.of(batch) for batch in (1, 2, 3, 8, 9)]

    [(before, taken, after)] = weft.simulate(main, 1)
    assert before == after == [1, 2, 4, 8, 12]
    assert taken[0] == [8, 8, 8, 8, 12] and [1, 8, 8, 8, 12] in taken and [1, 2, 8, 8, 12] in taken
    assert taken == sorted(taken, reverse=True)


class CapturingEngine(CountedEngine):
    """Has three graphs to capture."""

    def __init__(self, together):
        super().__init__(together)
        self.captures_left, self.captured = 3, []

    def capture_next(self):
        self.together.wait(timeout=ANSWER)
        self.captures_left -= 1
        self.captured.append((self.steps, bool(self.left)))


def test_all_ranks_capture_at_the_same_step_and_idle_ones_at_once(monkeypatch):
    together = threading.Barrier(3)
    engines = [CapturingEngine(together) for _ in range(3)]
    ranks = Ranks(monkeypatch, load=lambda rank, progress: engines[rank])
    until(lambda: engines[0].captures_left == 0)
    ranks.processes.put(("submit", 1, [2], EIGHT))
    until(lambda: ranks.told and ranks.told[-1] == ("load", Load()))
    ranks.processes.close()
    assert engines[0].captured == engines[1].captured == engines[2].captured == [(0, False)] * 3


def test_captures_take_a_small_share_of_the_time_of_running_requests(monkeypatch):
    class SlowEngine(CapturingEngine):
        def capture_next(self):
            time.sleep(0.05)
            super().capture_next()

    together = threading.Barrier(3)
    engines = [SlowEngine(together) for _ in range(3)]
    for engine in engines:
        engine.left[0] = 10**6  # a request runs from the begin
    ranks = Ranks(monkeypatch, load=lambda rank, progress: engines[rank])
    until(lambda: engines[0].captures_left == 1)
    assert engines[0].captured[0] == (0, True) and engines[0].captured[1][0] > 10, "a second after the first"
    ranks.processes.put(("cancel", 0))
    until(lambda: engines[0].captures_left == 0)
    ranks.processes.close()
    assert engines[0].captured == engines[2].captured and engines[0].captured[2][1] is False
