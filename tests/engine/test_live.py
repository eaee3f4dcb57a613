"""Requests that come and go: the same at the same step on every rank, each with its own pieces, and an error ends all."""

import asyncio
import threading
import time
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest

import weft
from tests import limits
from tests.spawning import launch_two
from weft import SamplingParams
from weft.engine import Load, Piece, StructuredOutputsParams, live, processes
from weft.errors import NotExchangeable, RequestCancelled, WeftError

ANSWER = SamplingParams(max_tokens=8)
LONG = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    llm = weft.AsyncLLM(None, 2, device="sim", mode="reference", max_batch=4, page_size=16)
    yield llm
    llm.close()


def test_requests_come_and_go_and_no_page_is_lost(llm):
    async def leaves(tokens):
        async for piece in llm.stream("123+456=", LONG):
            tokens -= 1
            if not tokens:
                return piece.token_id

    async def main():
        answers = [llm.generate(f"{n}+{n}=", ANSWER) for n in range(100, 112)]
        found = await asyncio.gather(*answers, *(leaves(tokens) for tokens in range(1, 9)))
        while llm.load.running or llm.load.waiting:
            await asyncio.sleep(0.01)
        return [one.text for one in found[:12]]

    assert asyncio.run(main()) == [str(2 * n) for n in range(100, 112)]
    assert llm.load == Load(preemptions=llm.load.preemptions)


def test_a_request_is_cancelled_by_its_name_from_another_thread(llm):
    async def main():
        request = await llm.submit("1+1=", LONG, request_id="mine")
        threading.Thread(target=llm.cancel, args=("mine",)).start()
        with pytest.raises(RequestCancelled, match="^mine was cancelled$"):
            async for _ in request:
                pass
        request.cancel()

    asyncio.run(main())


def test_a_request_that_cannot_be_answered_is_refused_alone(llm):
    async def main():
        with pytest.raises(ValueError, match="prompt has 200 tokens and leaves no room"):
            await llm.submit([1] * 200)
        with pytest.raises(ValueError, match="params='x' is not a SamplingParams"):
            await llm.submit([1], "x")
        return (await llm.generate("123+456=", ANSWER)).text

    assert asyncio.run(main()) == "579"


def test_ranks_sleep_without_requests(llm):
    time.sleep(0.05)  # the last request's step
    begin = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - begin < 0.1


def test_another_simulation_is_refused_and_an_error_of_a_rank_ends_all_requests(llm, monkeypatch):
    with pytest.raises(WeftError, match="the virtual ranks of this process serve an AsyncLLM; close it first"):
        weft.LLM(None, 2, device="sim")

    async def main():
        requests = [await llm.submit("1+1=", LONG) for _ in range(3)]
        monkeypatch.setattr(weft.Engine, "step", lambda engine: 1 / 0)
        for request in requests:
            with pytest.raises(ZeroDivisionError):
                async for _ in request:
                    pass
        with pytest.raises(ZeroDivisionError):
            await llm.submit("1+1=")

    asyncio.run(main())
    assert isinstance(llm.error, ZeroDivisionError)
    llm.close()
    with weft.LLM(None, 1, device="sim") as other:  # the ranks have ended
        assert other.world_size == 1


class CountedEngine:
    """A step is a barrier of all ranks and answers each request with one token, until its prompt's first token.

    log  (step, what a command did), in order
    """

    def __init__(self, together):
        self.together, self.log, self.steps, self.left = together, [], 0, {}

    def submit(self, prompt, params, number):
        if prompt == [0]:
            raise ValueError("prompt=[0] is refused")
        self.log.append((self.steps, prompt))
        self.left[number] = prompt[0]
        return number

    def cancel(self, number):
        self.log.append((self.steps, "cancel"))
        self.left.pop(number, None)

    @property
    def has_work(self):
        return bool(self.left)

    @property
    def load(self):
        return Load(running=len(self.left))

    def settle(self):
        """No step is in flight."""

    def step(self):
        self.together.wait(timeout=limits.ANSWER)
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


@pytest.fixture
def ranks(monkeypatch):
    """Three ranks in threads, with pipes as processes have them; `take` keeps what they tell."""
    together = threading.Barrier(3)
    engines = [CountedEngine(together) for _ in range(3)]

    def launch_on_pipes(main, given, started, args, heap_bytes):
        errors = []

        def run(rank):
            try:
                main(SimpleNamespace(rank=rank), given[rank], *args)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    monkeypatch.setattr(processes, "launch_on_pipes", launch_on_pipes)
    monkeypatch.setattr(live, "Pipe", lambda: [Shared(end) for end in processes.Pipe()])
    told = []
    found = live.LiveProcesses(
        3, lambda team, **watchers: engines[team.rank], None, {}, lambda *message: told.append(message)
    )
    yield SimpleNamespace(live=found, engines=engines, told=told)
    found.close()


class Shared:
    """A pipe's end that parent and rank share here, where processes have copies: the parent's close does not close it."""

    def __init__(self, end):
        self.end, self.send_bytes, self.recv_bytes = end, end.send_bytes, end.recv_bytes

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end.close()


def until(true):
    deadline = time.monotonic() + limits.ANSWER
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_all_ranks_take_the_same_requests_at_the_same_step(ranks):
    for number in range(20):
        ranks.live.put(("submit", number, [1 + number * 7 % 5], ANSWER))
        if number % 3 == 0:
            ranks.live.put(("submit", 100 + number, [10**6], ANSWER))
            ranks.live.put(("cancel", 100 + number))
    ranks.live.put(("submit", 50, [0], ANSWER))
    until(lambda: ("rejected", (50, "prompt=[0] is refused")) in ranks.told)
    until(lambda: ranks.told[-1] == ("load", Load()))
    first, *others = (engine.log for engine in ranks.engines)
    assert len(first) == 34 and others == [first, first]
    ended = [piece.prompt for kind, pieces in ranks.told if kind == "pieces" for piece in pieces if piece.finish_reason]
    assert sorted(ended) == list(range(20))
    ranks.live.close()
    assert ranks.told[-1][0] == "error" and "this LLM is closed" in str(ranks.told[-1][1])


def test_requests_wait_for_their_grammars_while_others_run_and_enter_at_one_step(ranks):
    """Rank 0's are compiled first here, and the others' when the request is submitted."""
    futures = [{} for _ in ranks.engines]

    def prepare(rank, params):
        return futures[rank].setdefault(params.seed, Future())

    def submit(rank, prompt, params, number):
        if params.structured_outputs is not None:
            assert futures[0][params.seed].done()
            futures[rank][params.seed].result(timeout=limits.ANSWER)
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
        ranks.live.put(("submit", number, prompt, guided(number)))
    ranks.live.put(("submit", 3, [3], ANSWER))
    until(lambda: ("accepted", [3]) in ranks.told and ranks.told[-1] == ("load", Load()))
    assert ranks.engines[0].log == [(0, [3])], "no other waits for them"
    ranks.live.put(("cancel", 2))
    ranks.live.put(("submit", 4, [2], ANSWER))
    compiled(1)
    until(lambda: ("rejected", (1, "prompt=[0] is refused")) in ranks.told)
    compiled(0)
    compiled(2)
    until(lambda: ("accepted", [0]) in ranks.told and ranks.told[-1] == ("load", Load()))
    logs = [engine.log for engine in ranks.engines]
    assert logs[1:] == logs[:1] * 2 and [what for _, what in logs[0]] == [[3], "cancel", [2], [4]]


def test_a_command_that_cannot_be_sent_is_its_callers_error_alone(ranks):
    with pytest.raises(NotExchangeable, match="is of type object"):
        ranks.live.put(("submit", 1, [object()], ANSWER))
    ranks.live.put(("submit", 2, [1], ANSWER))
    until(lambda: ("accepted", [2]) in ranks.told)


def test_an_error_of_a_rank_in_a_process_is_told_once_and_last(ranks):
    ranks.live.put(("submit", 1, [667], ANSWER))
    until(lambda: ranks.told and ranks.told[-1][0] == "error")
    assert str(ranks.told[-1][1]) == "a GPU fell off"
    ranks.live.put(("submit", 2, [1], ANSWER))  # to nothing


class LonelyEngine(CountedEngine):
    """Falls at the prompt [13, ...] on rank 1."""

    def __init__(self, team, **watchers):
        super().__init__(SimpleNamespace(wait=lambda timeout: None))
        self.rank = team.rank

    def submit(self, prompt, params, number):
        if self.rank == 1 and prompt == [13]:
            raise RuntimeError("a GPU fell off")
        return super().submit(prompt, params, number)


@pytest.mark.sweep
def test_real_processes_take_requests_through_their_pipes_and_one_that_falls_ends_all(monkeypatch):
    monkeypatch.setattr(processes, "launch_on_pipes", launch_two)
    told = []
    ranks = live.LiveProcesses(2, LonelyEngine, None, {}, lambda *message: told.append(message))
    ranks.put(("submit", 7, [3], ANSWER))
    until(lambda: told and told[-1] == ("load", Load()))
    pieces = [piece for kind, found in told if kind == "pieces" for piece in found]
    assert [(piece.prompt, piece.token_id) for piece in pieces] == [(7, 3), (7, 2), (7, 1)]
    begin = time.monotonic()
    ranks.put(("submit", 8, [13], ANSWER))
    until(lambda: told[-1][0] == "error")
    assert str(told[-1][1]) == "a GPU fell off" and time.monotonic() - begin < 10
    ranks.close()
