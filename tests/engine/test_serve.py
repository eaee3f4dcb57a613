"""How far ranks run ahead of their parent, and that they stop together: threads for processes, counted steps for a model's."""

import multiprocessing
import os
import pickle
import signal
import socket
import threading
from multiprocessing.connection import Listener
from types import SimpleNamespace

import pytest

from weft.engine import SamplingParams, serve, workers
from weft.engine.answers import Piece, Stats
from weft.errors import WeftError

LONG = 1000


class CountedEngine:
    """A step is a barrier of all ranks, as a model's is collective: ranks that disagree about one break it.

    ran  steps of each answer so far, begun ones included
    """

    def __init__(self, together):
        self.together, self.ran = together, []
        self.stats = Stats(load_seconds=0.0)
        self.gates = {}  # step: (an event to set, one to wait for)

    def answer_in_steps(self, prompts, params):
        if prompts == [""]:
            raise ValueError("prompts[0]='' is empty")
        return self._steps(params[0].max_tokens)

    def _steps(self, budget):
        self.ran.append(0)
        for step in range(budget):
            reached, go_on = self.gates.pop(step, (None, None))
            if reached is not None:
                reached.set()
                assert go_on.wait(timeout=30)
            self.ran[-1] += 1
            self.together.wait(timeout=30)
            yield [Piece(0, "", step)] if step % 3 else []
        self.stats = Stats(load_seconds=0.0, new_tokens=budget)


class Ranks:
    """Three of them, and their parent."""

    def __init__(self, monkeypatch, load=lambda rank, progress: None, progress=None):
        together = threading.Barrier(3)
        self.engines = [CountedEngine(together) for _ in range(3)]
        self.stats, errors = [], []

        def launch(main, world_size, device, args, heap_bytes):
            def run(rank):
                try:
                    main(SimpleNamespace(rank=rank), *args)
                except BaseException as error:
                    errors.append(error)
                    together.abort()

            threads = [
                threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
                for rank in range(world_size)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]

        monkeypatch.setattr(workers, "launch", launch)
        options = SimpleNamespace(
            build=lambda team, told: load(team.rank, told) or self.engines[team.rank], heap_bytes=None
        )
        self.workers = workers.ProcessWorkers(3, options, progress)

    def ask(self, steps, ahead, prompt="x"):
        return self.workers.ask(([prompt], [SamplingParams(max_tokens=steps)]), self.stats.append, ahead)

    def gate(self, step):
        self.engines[0].gates[step] = gate = threading.Event(), threading.Event()
        return gate

    def allowed(self, steps):
        """An event: the ranks have been told that they may run so many of an answer."""
        told, outbox = threading.Event(), self.workers._outbox

        def put(message):
            outbox.put(message)
            what = message and pickle.loads(message)
            if isinstance(what, serve.Allowance) and what.steps >= steps:
                told.set()

        self.workers._outbox = SimpleNamespace(get=outbox.get, put=put)
        return told

    def ran(self, answer):
        """Steps of it, which are the same on all ranks."""
        [steps] = {engine.ran[answer] for engine in self.engines}
        return steps


@pytest.fixture
def ranks(monkeypatch):
    ranks = Ranks(monkeypatch)
    yield ranks
    ranks.workers.close()
    assert not ranks.workers._thread.is_alive() and ranks.workers._error is None


def tokens(steps):
    return [step for step in range(steps) if step % 3]


def numbers(pieces):
    return [piece.token_id for piece in pieces]


@pytest.fixture
def ends(monkeypatch):
    """The ranks' ends of the pipes."""
    ends, client = [], serve.Client
    monkeypatch.setattr(serve, "Client", lambda *given, **named: ends.append(client(*given, **named)) or ends[-1])
    return ends


def rank_of_a_process(address, key):
    options = SimpleNamespace(build=lambda team, progress: CountedEngine(threading.Barrier(1)))
    serve.serve(SimpleNamespace(rank=0), address, key, options)


def test_an_interrupt_does_not_end_a_rank():
    """Ctrl-C goes to all processes of a terminal."""
    with Listener(("127.0.0.1", 0), authkey=b"key") as listener:
        process = multiprocessing.get_context("fork").Process(
            target=rank_of_a_process, args=(listener.address, b"key"), daemon=True
        )
        process.start()
        parent = listener.accept()
    assert [parent.recv(), parent.recv()] == [0, ("loaded", None)]
    os.kill(process.pid, signal.SIGINT)
    parent.send(((["x"], [SamplingParams(max_tokens=2)]), serve.Allowance(steps=8, last=True)))
    assert [parent.recv()[0] for _ in range(3)] == ["pieces", "pieces", "stats"]
    parent.close()
    process.join(timeout=30)
    assert process.exitcode == 0


def test_progress_is_rank_0_s_whoever_comes_first(monkeypatch):
    client, others, seen = serve.Client, threading.Semaphore(0), threading.Event()

    def connected(*given, **named):
        if threading.current_thread().name == "rank 0":
            assert all(others.acquire(timeout=30) for _ in range(2))
        pipe = client(*given, **named)
        others.release()
        return pipe

    def load(rank, progress):
        progress(rank, 9)
        assert rank == 0 or seen.wait(timeout=30)

    monkeypatch.setattr(serve, "Client", connected)
    found = []
    ranks = Ranks(monkeypatch, load, lambda *given: (found.append(given), seen.set()))
    ranks.workers.close()
    assert found == [(0, 9)]


def test_ranks_that_load_end_when_their_parent_is_interrupted(monkeypatch):
    failed = []

    def interrupted(*given):
        raise KeyboardInterrupt

    def load(rank, progress):
        while True:
            try:
                progress(rank, 9)
            except (serve._ParentClosed, OSError):
                failed.append(rank)
                raise

    with pytest.raises(KeyboardInterrupt):
        Ranks(monkeypatch, load, interrupted)
    assert sorted(failed) == [0, 1, 2]


def test_no_message_waits_for_the_acknowledgement_of_another(ends, ranks):
    for pipe in [*ends, *ranks.workers._ranks.values()]:
        with socket.socket(fileno=os.dup(pipe.fileno())) as end:
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert len(ends) == 3


@pytest.mark.parametrize("ahead", [1, 2, 7, 64, 1024])
@pytest.mark.parametrize("steps", [1, 2, 64, 200])
def test_an_answer_that_is_drawn_comes_to_its_end_however_short_the_lead(ranks, ahead, steps):
    for _ in range(2):  # what is left in the pipes of the first is not in the way
        assert numbers(ranks.ask(steps, ahead)) == tokens(steps)
    assert ranks.ran(0) == ranks.ran(1) == steps
    assert [one.new_tokens for one in ranks.stats] == [steps, steps]


def close(stream):
    stream.close()


def fail_in(stream):
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt)


def drop(stream):
    pass  # nobody else has it


# Of a lead of 8, ranks hear of the next 4 when they have 4.
@pytest.mark.parametrize(("drawn", "steps"), [(0, 8), (1, 8), (2, 8), (3, 12), (4, 12), (5, 16), (40, 68)])
@pytest.mark.parametrize("leave", [close, fail_in, drop])
def test_an_answer_that_nobody_draws_any_more_stops_on_all_ranks_at_the_step_they_were_told(ranks, leave, drawn, steps):
    stream = ranks.ask(LONG, 8)
    assert [next(stream).token_id for _ in range(drawn)] == tokens(LONG)[:drawn]
    last = tokens(LONG)[drawn - 1] if drawn else 0
    assert last + 1 < steps <= last + 1 + 8
    leave(stream)
    del stream
    assert numbers(ranks.ask(30, 8)) == tokens(30)
    assert (ranks.ran(0), ranks.ran(1)) == (steps, 30)
    assert [one.new_tokens for one in ranks.stats] == [30]


def test_closed_answers_one_after_another_and_a_refusal_between(ranks):
    for count in range(5):
        stream = ranks.ask(LONG, 4)
        for _ in range(count):
            next(stream)
        stream.close()
        with pytest.raises(ValueError, match=r"prompts\[0\]='' is empty"):
            ranks.ask(LONG, 4, prompt="")
    assert numbers(ranks.ask(LONG, 4)) == tokens(LONG)
    assert max(ranks.ran(answer) for answer in range(5)) <= 12


def test_an_answer_shorter_than_the_lead_is_there_already_when_it_is_closed(ranks):
    ranks.ask(5, 64).close()
    assert numbers(ranks.ask(7, 64)) == tokens(7)
    assert ranks.ran(0) == 5


def test_an_answer_that_is_kept_is_computed_to_its_end_by_the_next_call(ranks):
    first = ranks.ask(LONG, 8)
    begun = [next(first).token_id for _ in range(3)]
    second = ranks.ask(100, 8)
    assert ranks.ran(0) == LONG
    assert begun + numbers(first) == tokens(LONG)
    assert numbers(second) == tokens(100)
    assert [one.new_tokens for one in ranks.stats] == [LONG, 100]


def test_an_answer_that_is_closed_while_the_next_call_waits_for_it_stops(ranks):
    (reached, go_on), allowed = ranks.gate(103), ranks.allowed(108)
    first, found = ranks.ask(LONG, 8), []
    other = threading.Thread(target=lambda: found.extend(numbers(ranks.ask(10, 8))), daemon=True)
    other.start()
    # As soon as 100 have come.
    assert reached.wait(timeout=30) and allowed.wait(timeout=30)
    first.close()
    go_on.set()
    other.join(timeout=30)
    assert found == tokens(10)
    assert ranks.ran(0) == 108


def test_the_ranks_run_ahead_of_a_caller_who_does_not_draw(ranks):
    reached, go_on = ranks.gate(900)
    stream = ranks.ask(LONG, 1024)
    assert reached.wait(timeout=30)
    go_on.set()
    assert numbers(stream) == tokens(LONG)


def interrupt(ranks, kind, number):
    """Behind the so many-th message of a kind from now on, for which an interrupt waits that has come in the meantime."""
    outbox, told = ranks.workers._outbox, []

    def put(message):
        outbox.put(message)
        if message is not None and isinstance(pickle.loads(message), serve.Allowance) == (kind == "allowance"):
            told.append(message)
            if len(told) == number:
                raise KeyboardInterrupt

    ranks.workers._outbox = SimpleNamespace(get=outbox.get, put=put)


def test_an_interrupt_as_the_ranks_are_told_does_not_part_them(ranks):
    stream = ranks.ask(LONG, 8)
    interrupt(ranks, "allowance", 1)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert numbers(ranks.ask(30, 8)) == tokens(30)
    assert ranks.ran(0) == 12  # as they were told


def test_ranks_end_without_an_error_when_their_parent_closes_after_an_interrupt(ranks):
    stream = ranks.ask(LONG, 8)
    interrupt(ranks, "allowance", 1)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    ranks.workers.close()
    assert not ranks.workers._thread.is_alive() and ranks.workers._error is None
    assert ranks.ran(0) == 12


def test_an_interrupted_request_is_as_one_that_was_closed_at_once(ranks):
    interrupt(ranks, "request", 1)
    with pytest.raises(KeyboardInterrupt):
        ranks.ask(LONG, 8)
    assert numbers(ranks.ask(30, 8)) == tokens(30)
    assert (ranks.ran(0), ranks.ran(1)) == (8, 30)


@pytest.mark.parametrize(("closed", "message"), [(False, 1), (False, 2), (False, 5), (True, 1)])
def test_a_call_that_is_interrupted_as_it_ends_the_answer_before_leaves_that_to_the_next(ranks, closed, message):
    stream = ranks.ask(LONG, 7)
    if closed:
        stream.close()
    interrupt(ranks, "allowance", message)
    with pytest.raises(KeyboardInterrupt):
        ranks.ask(30, 7)
    assert numbers(ranks.ask(30, 7)) == tokens(30)
    assert ranks.ran(0) == (7 if closed else LONG)
    if not closed:
        assert numbers(stream) == tokens(LONG)


def test_a_message_that_cannot_be_sent_is_said_at_once_and_leaves_nothing_behind(ranks):
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        ranks.ask(30, 8, prompt=lambda: "x")
    assert numbers(ranks.ask(30, 8)) == tokens(30)


def test_ranks_whose_parent_closes_in_an_answer_end_at_one_step_without_an_error(ranks):
    reached, go_on = ranks.gate(7)
    stream = ranks.ask(LONG, 8)
    while next(stream).token_id < 4:
        pass
    assert reached.wait(timeout=30)  # 12 steps are allowed by now, and nobody has read so
    closing = threading.Thread(target=ranks.workers.close, daemon=True)
    closing.start()
    while not ranks.workers._closed:
        closing.join(timeout=0.01)
    go_on.set()
    closing.join(timeout=30)
    assert not ranks.workers._thread.is_alive() and ranks.workers._error is None
    assert ranks.ran(0) == 12
    with pytest.raises(WeftError, match="this LLM is closed"):
        list(stream)


def test_ranks_that_wait_to_go_on_end_without_an_error_when_their_parent_closes(ends, ranks):
    waiting = threading.Barrier(4)

    def after_the_others(recv):
        waiting.wait(timeout=30)
        return recv()

    assert numbers(ranks.ask(5, 8)) == tokens(5)
    reached, go_on = ranks.gate(6)
    stream = ranks.ask(LONG, 8)  # of its eight messages one is read
    assert reached.wait(timeout=30)
    for pipe in ends:
        pipe.recv = lambda recv=pipe.recv: after_the_others(recv)
    go_on.set()
    waiting.wait(timeout=30)
    ranks.workers.close()
    assert not ranks.workers._thread.is_alive() and ranks.workers._error is None
    assert ranks.ran(1) == 8
    stream.close()
