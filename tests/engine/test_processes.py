"""The request loop of ranks in processes: they take equal commands at equal steps, and stop together; then real processes."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest

from tests.limits import ANSWER
from tests.spawning import launch_two
from weft import SamplingParams
from weft.engine import Load, Piece, Stats, StructuredOutputsParams, loop
from weft.engine import ranks as ranks_module
from weft.engine.config import every_tenth
from weft.engine.llm import Calls
from weft.errors import NotExchangeable, PeerFailed, WeftError
from weft.runtime import launch
from weft.runtime.codec import encode

EIGHT = SamplingParams(max_tokens=8)
LONG = 1000


class CountedEngine:
    """A step is a barrier of all ranks and answers each request with one token, until its prompt's first token.

    log    (step, what a command did), in order
    ran    steps of each call so far, begun ones included
    gates  step of a call: (an event to set, one to wait for)
    """

    captures_left = 0

    def __init__(self, together):
        self.together, self.log, self.steps, self.left = together, [], 0, {}
        self.ran, self.gates, self.stats = [], {}, Stats(load_seconds=0.0)

    def submit(self, prompt, params, number):
        if prompt == [0]:
            raise ValueError("prompt=[0] is refused")
        self.log.append((self.steps, prompt))
        self.left[number] = prompt[0]
        return number

    def cancel(self, number):
        self.log.append((self.steps, "cancel"))
        self.left.pop(number, None)

    def answer_in_steps(self, prompts, params, *, agreed):
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

    @property
    def has_work(self):
        return bool(self.left)

    @property
    def load(self):
        return Load(running=len(self.left))

    def settle(self):
        """No step is in flight."""

    def against_plan(self):
        return []

    def step(self):
        self.together.wait(timeout=ANSWER)
        self.steps += 1
        pieces = []
        for number, left in list(self.left.items()):
            if left == 1:
                del self.left[number]
            else:
                self.left[number] = left - 1
            pieces.append(Piece(number, "x", left, "length" if left == 1 else None))
        if 666 in self.left.values():
            raise RuntimeError("a GPU fell off")
        return pieces


class Ranks:
    """Three ranks in threads, with pipes as processes have them, and clients of calls.

    told  what rank 0 tells
    """

    def __init__(self, monkeypatch, load=lambda rank, progress: None, progress=None):
        together = threading.Barrier(3)
        self.engines = [CountedEngine(together) for _ in range(3)]
        self.told, self.stats, errors = [], [], []
        self.calls = Calls(lambda command: self.processes.put(command))

        def launch_on_pipes(main, pipes, started, failed, early, args, heap_bytes):
            def run(rank):
                try:
                    main(SimpleNamespace(rank=rank), pipes[rank], *args)
                except BaseException as error:
                    errors.append(error)
                    together.abort()

            threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]

        def make(team, progress, warm_up_progress):
            return load(team.rank, progress) or self.engines[team.rank]

        def take(kind, value):
            self.told.append((kind, value))
            self.calls.take(kind, value)

        monkeypatch.setattr(loop, "launch_on_pipes", launch_on_pipes)
        monkeypatch.setattr(loop, "Pipe", lambda pipe=multiprocessing.Pipe: [Shared(end) for end in pipe()])
        self.processes = loop.Processes(3, make, None, {"progress": progress} if progress else {}, take)

    def ask(self, steps, prompt="x"):
        return self.calls.ask(([prompt], [SamplingParams(max_tokens=steps)]), self.stats.append)

    def gate(self, step):
        """Events of the next call: rank 0 has come to this step, and may run it."""
        self.engines[0].gates[step] = gate = threading.Event(), threading.Event()
        return gate

    def ran(self, call):
        """Steps of it, which are the same on all ranks."""
        [steps] = {engine.ran[call] for engine in self.engines}
        return steps

    def ended_well(self):
        threads = self.processes._processes, self.processes._talker, self.processes._sender
        for thread in threads:
            thread.join(timeout=ANSWER)
        return not any(thread.is_alive() for thread in threads) and self.processes._error is None


class Shared:
    """A pipe's end that parent and rank share here, where processes have copies: the parent's close does not close it."""

    def __init__(self, end):
        self.end = end

    def __getattr__(self, name):
        return getattr(self.end, name)

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end.close()


@pytest.fixture
def ranks(monkeypatch):
    ranks = Ranks(monkeypatch)
    yield ranks
    ranks.processes.close()


def tokens(steps):
    return [step for step in range(steps) if step % 3]


def numbers(pieces):
    return [piece.token_id for piece in pieces]


def until(true):
    deadline = time.monotonic() + ANSWER
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_all_ranks_take_the_same_requests_at_the_same_step(ranks):
    for number in range(20):
        ranks.processes.put(("submit", number, [1 + number * 7 % 5], EIGHT))
        if number % 3 == 0:
            ranks.processes.put(("submit", 100 + number, [10**6], EIGHT))
            ranks.processes.put(("cancel", 100 + number))
    ranks.processes.put(("submit", 50, [0], EIGHT))
    until(lambda: ("rejected", (50, "prompt=[0] is refused")) in ranks.told)
    until(lambda: ranks.told[-1] == ("load", Load()))
    first, *others = (engine.log for engine in ranks.engines)
    assert len(first) == 34 and others == [first, first]
    ended = [piece.prompt for kind, pieces in ranks.told if kind == "pieces" for piece in pieces if piece.finish_reason]
    assert sorted(ended) == list(range(20))
    ranks.processes.close()
    assert ranks.told[-1][0] == "error" and "this LLM is closed" in str(ranks.told[-1][1])


def test_requests_wait_for_their_grammars_while_others_run_and_enter_at_one_step(ranks):
    """Rank 0's are compiled first here, and the others' when the request is submitted."""
    futures = [{} for _ in ranks.engines]

    def prepare(rank, params):
        return futures[rank].setdefault(params.seed, Future())

    def submit(rank, prompt, params, number):
        if params.structured_outputs is not None:
            assert futures[0][params.seed].done()
            futures[rank][params.seed].result(timeout=ANSWER)
        return CountedEngine.submit(ranks.engines[rank], prompt, params, number)

    for rank, engine in enumerate(ranks.engines):
        engine.prepare, engine.submit = partial(prepare, rank), partial(submit, rank)

    def guided(seed):
        return SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), seed=seed)

    def compiled(seed):
        until(lambda: all(seed in found for found in futures))
        for found in futures:
            found[seed].set_result(None)

    for number, prompt in enumerate(([4], [0], [5])):
        ranks.processes.put(("submit", number, prompt, guided(number)))
    ranks.processes.put(("submit", 3, [3], EIGHT))
    until(lambda: ("accepted", [3]) in ranks.told and ranks.told[-1] == ("load", Load()))
    assert ranks.engines[0].log == [(0, [3])], "no other waits for them"
    ranks.processes.put(("cancel", 2))
    ranks.processes.put(("submit", 4, [2], EIGHT))
    compiled(1)
    until(lambda: ("rejected", (1, "prompt=[0] is refused")) in ranks.told)
    compiled(0)
    compiled(2)
    until(lambda: ("accepted", [0]) in ranks.told and ranks.told[-1] == ("load", Load()))
    logs = [engine.log for engine in ranks.engines]
    assert logs[1:] == logs[:1] * 2 and [what for _, what in logs[0]] == [[3], "cancel", [2], [4]]


def test_a_command_that_cannot_be_sent_is_its_callers_error_alone(ranks):
    with pytest.raises(NotExchangeable, match="is of type object"):
        ranks.processes.put(("submit", 1, [object()], EIGHT))
    ranks.processes.put(("submit", 2, [1], EIGHT))
    until(lambda: ("accepted", [2]) in ranks.told)


def test_an_error_of_a_rank_in_a_process_is_told_once_and_last(ranks):
    ranks.processes.put(("submit", 1, [667], EIGHT))
    until(lambda: ranks.told and ranks.told[-1][0] == "error")
    assert str(ranks.told[-1][1]) == "a GPU fell off"
    ranks.processes.put(("submit", 2, [1], EIGHT))  # to nothing


@pytest.mark.parametrize("steps", [1, 2, 64, 200])
def test_a_call_that_is_drawn_comes_to_its_end(ranks, steps):
    for _ in range(2):
        assert numbers(ranks.ask(steps)) == tokens(steps)
    assert ranks.ran(0) == ranks.ran(1) == steps
    assert [one.new_tokens for one in ranks.stats] == [steps, steps]


def close(stream):
    stream.close()


def fail_in(stream):
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt)


def drop(stream):
    """The caller has the only reference."""


@pytest.mark.parametrize("leave", [close, fail_in, drop])
@pytest.mark.parametrize("drawn", [0, 1, 5, 40])
def test_a_call_that_is_left_stops_on_all_ranks_with_the_step_that_runs(ranks, leave, drawn):
    last = tokens(LONG)[drawn - 1] if drawn else 0
    reached, go_on = ranks.gate(last + 1)
    stream = ranks.ask(LONG)
    assert [next(stream).token_id for _ in range(drawn)] == tokens(LONG)[:drawn]
    assert reached.wait(timeout=ANSWER)
    leave(stream)
    del stream
    until(lambda: ranks.processes._commands.empty())
    time.sleep(0.05)  # until the command is in the pipe
    go_on.set()
    assert numbers(ranks.ask(30)) == tokens(30)
    assert (ranks.ran(0), ranks.ran(1)) == (last + 2, 30)
    assert [one.new_tokens for one in ranks.stats] == [30]


def test_closed_calls_one_after_another_and_a_refusal_between(ranks):
    for count in range(5):
        stream = ranks.ask(LONG)
        for _ in range(count):
            next(stream)
        stream.close()
        with pytest.raises(ValueError, match=r"prompts\[0\]='' is empty"):
            ranks.ask(LONG, prompt="")
    assert numbers(ranks.ask(LONG)) == tokens(LONG)


def test_a_call_that_is_kept_is_computed_to_its_end_before_the_next(ranks):
    first = ranks.ask(LONG)
    begun = [next(first).token_id for _ in range(3)]
    second = ranks.ask(100)
    assert ranks.ran(0) == LONG
    assert begun + numbers(first) == tokens(LONG)
    assert numbers(second) == tokens(100)
    assert [one.new_tokens for one in ranks.stats] == [LONG, 100]


def test_a_call_that_is_closed_while_the_next_waits_for_it_stops(ranks):
    reached, go_on = ranks.gate(103)
    first, answer = ranks.ask(LONG), []
    other = threading.Thread(target=lambda: answer.extend(numbers(ranks.ask(10))), daemon=True)
    other.start()
    assert reached.wait(timeout=ANSWER)
    first.close()
    go_on.set()
    other.join(timeout=ANSWER)
    assert answer == tokens(10) and ranks.ran(0) < LONG


@pytest.mark.parametrize("sent", [False, True])
def test_an_interrupted_call_is_as_one_that_was_closed_at_once(ranks, monkeypatch, sent):
    put, commands = ranks.processes.put, []

    def interrupted(command):
        commands.append(command[0])
        if sent or len(commands) > 1:
            put(command)
        if len(commands) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(ranks.processes, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ranks.ask(LONG)
    assert numbers(ranks.ask(30)) == tokens(30)
    assert commands == ["call", "cancel", "call"] and ranks.ran(-1) == 30


def test_a_message_that_cannot_be_sent_leaves_nothing_behind(ranks):
    with pytest.raises(NotExchangeable, match="is of type function"):
        ranks.ask(30, prompt=lambda: "x")
    assert numbers(ranks.ask(30)) == tokens(30)


def test_ranks_whose_parent_closes_in_a_call_end_at_one_step_without_an_error(ranks):
    reached, go_on = ranks.gate(7)
    stream = ranks.ask(LONG)
    while next(stream).token_id < 5:
        pass
    assert reached.wait(timeout=ANSWER)
    closing = threading.Thread(target=ranks.processes.close, daemon=True)
    closing.start()
    while not ranks.processes._closed:
        closing.join(timeout=0.01)
    time.sleep(0.05)  # until the pipe is shut
    go_on.set()
    closing.join(timeout=ANSWER)
    assert ranks.ended_well() and ranks.ran(0) == 8
    with pytest.raises(WeftError, match="this LLM is closed"):
        list(stream)
    with pytest.raises(WeftError, match="this LLM is closed"):
        ranks.ask(1)


def rank_of_a_process(parent, end):
    parent.close()  # a fork's copy
    loop.serve(SimpleNamespace(rank=0), (end,), lambda team, **watchers: CountedEngine(threading.Barrier(1)))


def test_an_interrupt_does_not_end_a_rank():
    """Ctrl-C goes to all processes of a terminal."""
    parent, end = loop.Pipe()
    process = multiprocessing.get_context("fork").Process(target=rank_of_a_process, args=(parent, end), daemon=True)
    process.start()
    end.close()
    assert loop.receive(parent) == ("loaded", None)
    os.kill(process.pid, signal.SIGINT)
    parent.send_bytes(encode(("call", 0, ["x"], [SamplingParams(max_tokens=3)])))
    assert [loop.receive(parent)[0] for _ in range(4)] == ["accepted", "pieces", "pieces", "ended"]
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
    ranks.processes.close()
    assert found == [(0, 9)]


def test_ranks_that_load_end_when_their_parent_is_interrupted(monkeypatch):
    failed = []

    def interrupted(*given):
        raise KeyboardInterrupt

    def load(rank, progress):
        while True:
            try:
                progress(rank, 9)
            except (loop.ParentClosed, OSError):
                failed.append(rank)
                raise

    with pytest.raises(KeyboardInterrupt):
        Ranks(monkeypatch, load, interrupted)
    assert sorted(failed) == [0, 1, 2]


def test_no_other_process_can_connect_to_the_pipes(ranks):
    """Pairs of sockets without a name, not TCP, where a message would wait for the acknowledgement of another."""
    for pipe in ranks.processes._pipes:
        with socket.socket(fileno=os.dup(pipe.fileno())) as end:
            assert end.family == socket.AF_UNIX and not end.getsockname()


class CountingSteps:
    """Keeps the steps of each answer in a file; prompt "fall" ends rank 1, which the others hear of."""

    def __init__(self, folder, team, progress, warm_up_progress):
        progress(1, 2)
        warm_up_progress(1, 20)
        warm_up_progress(2, 20)
        self.file, self.rank, self.stats = folder / f"{team.rank}", team.rank, Stats(load_seconds=0.0)

    has_work, load, captures_left = False, Load(), 0

    def cancel(self, number):
        """No request was submitted."""

    def settle(self):
        """No step is in flight."""

    def against_plan(self):
        return []

    def answer_in_steps(self, prompts, params, *, agreed):
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
    monkeypatch.setattr(loop, "launch_on_pipes", launch_two)
    stats, loaded, params = [], [], [SamplingParams(max_tokens=LONG)]
    watchers = {"progress": lambda *read: loaded.append(read), "warm_up_progress": every_tenth(loaded.append)}
    calls = Calls(lambda command: ranks.put(command))
    ranks = loop.Processes(2, partial(CountingSteps, tmp_path), None, watchers, calls.take)
    assert numbers(calls.ask((["x"], params), stats.append)) == list(range(1, LONG + 1))
    stream = calls.ask((["x"], params), stats.append)
    assert next(stream).token_id == 1
    stream.close()
    with pytest.raises(RuntimeError, match="a GPU fell off") as caught:
        list(calls.ask((["fall"], params), stats.append))
    assert loaded == [(1, 2), "captured 2 of 20 CUDA graphs"] and len(stats) == 1
    ranks.close()
    (first, cut), other = [map(int, (tmp_path / f"{rank}").read_text().split()) for rank in range(2)]
    assert [first, cut] == list(other) and first == LONG and 1 <= cut < LONG
    if hasattr(caught.value, "__notes__"):  # from Python 3.11 on
        assert "in rank 1:" in caught.value.__notes__[0]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_is_told_at_once_also_while_the_other_hangs(tmp_path, monkeypatch, killed):
    """A stopped rank stands for one whose GPU waits for the killed one."""
    monkeypatch.setattr(loop, "launch_on_pipes", launch_two)
    told, error = [], threading.Event()

    def take(kind, value):
        told.append((kind, value))
        if kind == "error":
            error.set()

    ranks = loop.Processes(2, partial(CountingSteps, tmp_path), None, {}, take)
    os.kill(ranks._started[1 - killed].pid, signal.SIGSTOP)
    begin = time.monotonic()
    os.kill(ranks._started[killed].pid, signal.SIGKILL)
    assert error.wait(timeout=ANSWER)
    assert str(told[-1][1]).startswith(f"rank {killed}: its process died without a message (killed by SIGKILL)")
    # It was 3 s for a cause and 5 s for the other rank's end before that was told.
    print(f"told after {time.monotonic() - begin:.2f} s")
    assert time.monotonic() - begin < launch.CAUSE_SECONDS + launch.END_SECONDS
    ranks.close()
    assert [process.is_alive() for process in ranks._started] == [False, False]
    assert [kind for kind, _ in told].count("error") == 1


def test_signals_to_all_forks_of_the_parent_and_a_rank_that_is_stopped(tmp_path, monkeypatch):
    """Ctrl-C and SIGTERM reach a whole group; the parent ends ranks, by a kill if need be, and nobody else does."""
    monkeypatch.setattr(loop, "launch_on_pipes", launch_two)
    monkeypatch.setattr(loop, "CLOSE_SECONDS", 1.0)
    params = [SamplingParams(max_tokens=LONG)]
    calls = Calls(lambda command: ranks.put(command))
    ranks = loop.Processes(2, partial(CountingSteps, tmp_path), None, {}, calls.take)
    for process in ranks._started:
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGTERM)
    stream = calls.ask((["x"], params), lambda stats: None)
    fork = os.fork()
    if fork == 0:
        said = []
        for ask in (lambda: calls.ask((["x"], params), lambda stats: None), lambda: list(stream)):
            try:
                ask()
            except WeftError as error:
                said.append(f"a fork of it; make another LLM here, or have process {os.getppid()} ask" in str(error))
        ranks.close()
        os._exit(0 if said == [True, True] else 1)
    assert os.waitpid(fork, 0)[1] == 0
    assert numbers(stream) == list(range(1, LONG + 1))
    os.kill(ranks._started[1].pid, signal.SIGSTOP)
    stream = calls.ask((["x"], params), lambda stats: None)
    for _ in range(2):
        ranks.close()
        assert [process.is_alive() for process in ranks._started] == [False, False]
    with pytest.raises(WeftError, match="this LLM is closed"):
        list(stream)


def test_an_interrupt_of_the_wait_for_virtual_ranks_at_exit_ends_the_process(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    ended = []
    monkeypatch.setattr(ranks_module.os, "_exit", ended.append)
    monkeypatch.setattr(ranks_module.VirtualRanks, "latest", SimpleNamespace(close=interrupted))
    ranks_module.VirtualRanks.end_latest()
    assert ended == [130]
