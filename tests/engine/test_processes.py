"""How far ranks run ahead of their parent, and that they stop together: threads for processes, counted steps for a model's."""

import multiprocessing
import os
import signal
import socket
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from tests.limits import ANSWER
from tests.spawning import launch_two
from weft.engine import SamplingParams, processes, workers
from weft.engine.outputs import Piece, Stats
from weft.engine.progress import every_tenth
from weft.errors import NotExchangeable, PeerFailed, WeftError
from weft.runtime.codec import encode

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
                assert go_on.wait(timeout=ANSWER)
            self.ran[-1] += 1
            self.together.wait(timeout=ANSWER)
            yield [Piece(0, "", step)] if step % 3 else []
        self.stats = Stats(load_seconds=0.0, new_tokens=budget)


class Ranks:
    """Three of them, and their parent."""

    def __init__(self, monkeypatch, load=lambda rank, progress: None, progress=None):
        together = threading.Barrier(3)
        self.engines = [CountedEngine(together) for _ in range(3)]
        self.stats, errors = [], []

        def launch_on_pipes(main, pipes, started, args, heap_bytes):
            def run(rank):
                try:
                    main(SimpleNamespace(rank=rank), pipes[rank], *args)
                except BaseException as error:
                    errors.append(error)
                    together.abort()

            threads = [
                threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
                for rank in range(len(pipes))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]

        def make(team, progress, warm_up_progress):
            return load(team.rank, progress) or self.engines[team.rank]

        monkeypatch.setattr(processes, "launch_on_pipes", launch_on_pipes)
        self.workers = processes.ProcessWorkers(3, make, None, {"progress": progress} if progress else {})

    def ask(self, steps, every, prompt="x", waits=True):
        return self.workers.ask(
            ([prompt], [SamplingParams(max_tokens=steps)]), self.stats.append, processes.Pace(every, waits)
        )

    def gate(self, step):
        self.engines[0].gates[step] = gate = threading.Event(), threading.Event()
        return gate

    def verdicts(self, count):
        """An event: the ranks have been told so many from now on."""
        told, tell, found = threading.Event(), self.workers._tell, []

        def telling(message):
            tell(message)
            found.extend({message} & {processes.GO, processes.STOP})
            if len(found) >= count:
                told.set()

        self.workers._tell = telling
        return told

    def ended_well(self):
        threads = self.workers._processes, self.workers._talker
        return not any(thread.is_alive() for thread in threads) and self.workers._error is None

    def ran(self, answer):
        """Steps of it, which are the same on all ranks."""
        [steps] = {engine.ran[answer] for engine in self.engines}
        return steps


@pytest.fixture
def ranks(monkeypatch):
    ranks = Ranks(monkeypatch)
    yield ranks
    ranks.workers.close()
    assert ranks.ended_well()


def tokens(steps):
    return [step for step in range(steps) if step % 3]


def numbers(pieces):
    return [piece.token_id for piece in pieces]


@pytest.fixture
def ends(monkeypatch):
    """The ranks' ends of the pipes."""
    ends, pipe = [], processes.Pipe

    def made():
        ours, theirs = pipe()
        ends.append(theirs)
        return ours, theirs

    monkeypatch.setattr(processes, "Pipe", made)
    return ends


def rank_of_a_process(parent, end):
    parent.close()  # a fork's copy
    processes.serve(SimpleNamespace(rank=0), end, lambda team, **watchers: CountedEngine(threading.Barrier(1)))


def test_an_interrupt_does_not_end_a_rank():
    """Ctrl-C goes to all processes of a terminal."""
    parent, end = processes.Pipe()
    process = multiprocessing.get_context("fork").Process(target=rank_of_a_process, args=(parent, end), daemon=True)
    process.start()
    end.close()
    assert processes.receive(parent) == ("loaded", None)
    os.kill(process.pid, signal.SIGINT)
    parent.send_bytes(encode(("request", (["x"], [SamplingParams(max_tokens=2)], 8))))
    assert [processes.receive(parent)[0] for _ in range(3)] == ["pieces", "pieces", "stats"]
    parent.close()
    process.join(timeout=ANSWER)
    assert process.exitcode == 0


def test_progress_is_rank_0_s_whoever_comes_first(monkeypatch):
    others, seen = threading.Semaphore(0), threading.Event()

    def load(rank, progress):
        if rank == 0:
            assert all(others.acquire(timeout=ANSWER) for _ in range(2))
        progress(rank, 9)
        others.release()
        assert rank == 0 or seen.wait(timeout=ANSWER)

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
            except (processes.ParentClosed, OSError):
                failed.append(rank)
                raise

    with pytest.raises(KeyboardInterrupt):
        Ranks(monkeypatch, load, interrupted)
    assert sorted(failed) == [0, 1, 2]


def test_no_message_waits_for_the_acknowledgement_of_another(ends, ranks):
    """And no other process can connect: pairs of sockets without a name, not TCP."""
    for pipe in [*ends, *ranks.workers._pipes]:
        with socket.socket(fileno=os.dup(pipe.fileno())) as end:
            assert end.family == socket.AF_UNIX and not end.getsockname()
    assert len(ends) == 3


@pytest.mark.parametrize("every", [1, 2, 7, 64, 1024])
@pytest.mark.parametrize("steps", [1, 2, 64, 200])
def test_an_answer_that_is_drawn_comes_to_its_end_however_short_the_lead(ranks, every, steps):
    for _ in range(2):  # what is left in the pipes of the first is not in the way
        assert numbers(ranks.ask(steps, every)) == tokens(steps)
    assert ranks.ran(0) == ranks.ran(1) == steps
    assert [one.new_tokens for one in ranks.stats] == [steps, steps]


def close(stream):
    stream.close()


def fail_in(stream):
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt)


def drop(stream):
    pass  # nobody else has it


# A verdict every 4 steps, which the ranks read 4 steps later: behind the 8th whether to go on behind the 4th.
@pytest.mark.parametrize(("drawn", "steps"), [(0, 8), (1, 8), (2, 8), (3, 12), (4, 12), (5, 16), (40, 68)])
@pytest.mark.parametrize("leave", [close, fail_in, drop])
def test_an_answer_that_nobody_draws_any_more_stops_on_all_ranks_at_the_step_they_were_told(ranks, leave, drawn, steps):
    stream = ranks.ask(LONG, 4)
    assert [next(stream).token_id for _ in range(drawn)] == tokens(LONG)[:drawn]
    last = tokens(LONG)[drawn - 1] if drawn else 0
    assert last + 1 < steps <= last + 1 + 8
    leave(stream)
    del stream
    assert numbers(ranks.ask(30, 4)) == tokens(30)
    assert (ranks.ran(0), ranks.ran(1)) == (steps, 30)
    assert [one.new_tokens for one in ranks.stats] == [30]


def test_closed_answers_one_after_another_and_a_refusal_between(ranks):
    for count in range(5):
        stream = ranks.ask(LONG, 4)
        for _ in range(count):
            next(stream)
        stream.close()
        with pytest.raises(ValueError, match=r"prompts\[0\]='' is empty"):
            ranks.ask(LONG, 2, prompt="")
    assert numbers(ranks.ask(LONG, 4)) == tokens(LONG)
    assert max(ranks.ran(answer) for answer in range(5)) <= 12


def test_an_answer_shorter_than_the_lead_is_there_already_when_it_is_closed(ranks):
    ranks.ask(5, 32).close()
    assert numbers(ranks.ask(7, 32)) == tokens(7)
    assert ranks.ran(0) == 5


def test_an_answer_that_is_kept_is_computed_to_its_end_by_the_next_call(ranks):
    first = ranks.ask(LONG, 4)
    begun = [next(first).token_id for _ in range(3)]
    second = ranks.ask(100, 4)
    assert ranks.ran(0) == LONG
    assert begun + numbers(first) == tokens(LONG)
    assert numbers(second) == tokens(100)
    assert [one.new_tokens for one in ranks.stats] == [LONG, 100]


def test_an_answer_that_is_closed_while_the_next_call_waits_for_it_stops(ranks):
    (reached, go_on), told = ranks.gate(103), ranks.verdicts(25)
    first, found = ranks.ask(LONG, 4), []
    other = threading.Thread(target=lambda: found.extend(numbers(ranks.ask(10, 4))), daemon=True)
    other.start()
    # As soon as 100 have come.
    assert reached.wait(timeout=ANSWER) and told.wait(timeout=ANSWER)
    first.close()
    go_on.set()
    other.join(timeout=ANSWER)
    assert found == tokens(10)
    assert ranks.ran(0) == 108


def test_the_ranks_run_ahead_of_a_caller_who_does_not_draw(ranks):
    reached, go_on = ranks.gate(900)
    stream = ranks.ask(LONG, 4, waits=False)
    assert reached.wait(timeout=ANSWER)
    go_on.set()
    assert numbers(stream) == tokens(LONG)


def interrupt(ranks, name):
    """Behind the next event that the caller puts into this queue comes an interrupt."""
    events, put = getattr(ranks.workers, name), []

    def interrupted(event):
        events.put(event)
        put.append(event)
        if len(put) == 1:
            raise KeyboardInterrupt

    setattr(ranks.workers, name, SimpleNamespace(get=events.get, put=interrupted, empty=events.empty))


def test_an_interrupt_as_the_ranks_are_told_does_not_part_them(ranks):
    stream = ranks.ask(LONG, 4)
    interrupt(ranks, "_changed")
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert numbers(ranks.ask(30, 4)) == tokens(30)
    assert ranks.ran(0) == 12  # as they were told


def test_ranks_end_without_an_error_when_their_parent_closes_after_an_interrupt(ranks):
    stream = ranks.ask(LONG, 4)
    interrupt(ranks, "_changed")
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    ranks.workers.close()
    assert ranks.ended_well()
    assert ranks.ran(0) in (8, 12)  # all at one step, whether they have been told to go on by then or not


def test_an_interrupted_request_is_as_one_that_was_closed_at_once(ranks):
    interrupt(ranks, "_asked")
    with pytest.raises(KeyboardInterrupt):
        ranks.ask(LONG, 4)
    assert numbers(ranks.ask(30, 4)) == tokens(30)
    assert (ranks.ran(0), ranks.ran(1)) == (8, 30)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("queue", ["_asked", "_changed"])
def test_a_call_that_is_interrupted_as_it_ends_the_answer_before_leaves_that_to_the_next(ranks, closed, queue):
    stream = ranks.ask(LONG, 4)
    if closed:
        stream.close()
    interrupt(ranks, queue)
    with pytest.raises(KeyboardInterrupt):
        ranks.ask(30, 4)
    assert numbers(ranks.ask(30, 4)) == tokens(30)
    assert ranks.ran(0) == (8 if closed else LONG)
    if not closed:
        assert numbers(stream) == tokens(LONG)


def test_a_message_that_cannot_be_sent_is_said_at_once_and_leaves_nothing_behind(ranks):
    with pytest.raises(NotExchangeable, match="is of type function"):
        ranks.ask(30, 4, prompt=lambda: "x")
    assert numbers(ranks.ask(30, 4)) == tokens(30)


def test_ranks_whose_parent_closes_in_an_answer_end_at_one_step_without_an_error(ranks):
    reached, go_on = ranks.gate(7)
    stream = ranks.ask(LONG, 4)
    while next(stream).token_id < 4:
        pass
    assert reached.wait(timeout=ANSWER)  # 12 steps are allowed by now, and nobody has read so
    closing = threading.Thread(target=ranks.workers.close, daemon=True)
    closing.start()
    while not ranks.workers._closed:
        closing.join(timeout=0.01)
    go_on.set()
    closing.join(timeout=ANSWER)
    assert ranks.ended_well()
    assert ranks.ran(0) == 12
    with pytest.raises(WeftError, match="this LLM is closed"):
        list(stream)


def test_ranks_that_wait_to_go_on_end_without_an_error_when_their_parent_closes(ends, ranks):
    waiting = threading.Barrier(4)

    def after_the_others(recv):
        waiting.wait(timeout=ANSWER)
        return recv()

    assert numbers(ranks.ask(5, 4)) == tokens(5)
    reached, go_on = ranks.gate(6)
    stream = ranks.ask(LONG, 4)  # of its eight messages one is read
    assert reached.wait(timeout=ANSWER)
    for pipe in ends:
        pipe.recv_bytes = lambda recv=pipe.recv_bytes: after_the_others(recv)
    go_on.set()
    waiting.wait(timeout=ANSWER)
    ranks.workers.close()
    assert ranks.ended_well()
    assert ranks.ran(1) == 8
    stream.close()


class CountingSteps:
    """Keeps the steps of each answer in a file; prompt "fall" ends rank 1, which the others hear of."""

    def __init__(self, folder, team, progress, warm_up_progress):
        progress(1, 2)
        warm_up_progress(1, 20)
        warm_up_progress(2, 20)
        self.file, self.rank, self.stats = folder / f"{team.rank}", team.rank, Stats(load_seconds=0.0)

    def answer_in_steps(self, prompts, params):
        if prompts == ["fall"]:
            raise RuntimeError("a GPU fell off") if self.rank == 1 else PeerFailed(self.rank, 1, "a GPU fell off")
        return self._steps(params[0].max_tokens)

    def _steps(self, budget):
        done = 0
        try:
            for done in range(1, budget + 1):
                yield [Piece(0, "x", done)]
        finally:
            with self.file.open("a") as file:
                file.write(f"{done}\n")


def test_processes_answer_through_pipes_and_an_error_says_which_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "launch_on_pipes", launch_two)
    stats, loaded, params = [], [], [SamplingParams(max_tokens=LONG)]
    watchers = {"progress": lambda *read: loaded.append(read), "warm_up_progress": every_tenth(loaded.append)}
    ranks = processes.ProcessWorkers(2, partial(CountingSteps, tmp_path), None, watchers)
    assert numbers(ranks.ask((["x"], params), stats.append)) == list(range(1, LONG + 1))
    stream = ranks.ask((["x"], params), stats.append)
    assert next(stream).token_id == 1
    stream.close()
    with pytest.raises(RuntimeError, match="a GPU fell off") as caught:
        list(ranks.ask((["fall"], params), stats.append))
    assert loaded == [(1, 2), "captured 2 of 20 CUDA graphs"] and len(stats) == 1
    ranks.close()
    assert [(tmp_path / f"{rank}").read_text().split()[:2] for rank in range(2)] == [[str(LONG), "64"]] * 2
    if hasattr(caught.value, "__notes__"):  # from Python 3.11 on
        assert "in rank 1:" in caught.value.__notes__[0]


def test_signals_to_all_forks_of_the_parent_and_a_rank_that_is_stopped(tmp_path, monkeypatch):
    """Ctrl-C and SIGTERM reach a whole group; the parent ends ranks, by a kill if need be, and nobody else does."""
    monkeypatch.setattr(processes, "launch_on_pipes", launch_two)
    monkeypatch.setattr(processes, "CLOSE_SECONDS", 1.0)
    params = [SamplingParams(max_tokens=LONG)]
    ranks = processes.ProcessWorkers(2, partial(CountingSteps, tmp_path), None, {})
    for process in ranks._started:
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGTERM)
    stream = ranks.ask((["x"], params), lambda stats: None)
    fork = os.fork()
    if fork == 0:
        said = []
        for ask in (lambda: ranks.ask((["x"], params), lambda stats: None), lambda: list(stream)):
            try:
                ask()
            except WeftError as error:
                said.append(
                    f"a fork of it; make an LLM of its own here, or have process {os.getppid()} ask" in str(error)
                )
        ranks.close()
        os._exit(0 if said == [True, True] else 1)
    assert os.waitpid(fork, 0)[1] == 0
    assert numbers(stream) == list(range(1, LONG + 1))
    os.kill(ranks._started[1].pid, signal.SIGSTOP)
    stream = ranks.ask((["x"], params), lambda stats: None)
    for _ in range(2):
        ranks.close()
        assert [process.is_alive() for process in ranks._started] == [False, False]
    with pytest.raises(WeftError, match="this LLM is closed"):
        list(stream)


def test_an_interrupt_of_the_wait_for_virtual_ranks_at_exit_ends_the_process(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    ended = []
    monkeypatch.setattr(workers.os, "_exit", ended.append)
    monkeypatch.setattr(workers.VirtualWorkers, "_latest", SimpleNamespace(end=interrupted))
    workers.VirtualWorkers.end()
    assert ended == [130]
