"""Requests that come and go over virtual ranks: each with its own pieces, and an error ends all."""

import asyncio
import threading
import time

import pytest

import weft
from tests.limits import ANSWER as ANSWER_SECONDS
from weft import SamplingParams
from weft.engine import Load, StructuredOutputsParams, async_llm
from weft.errors import CheckpointError, RequestCancelled, WeftError

ANSWER = SamplingParams(max_tokens=8)
LONG = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    llm = weft.AsyncLLM(None, 2, device="sim", mode="reference", max_batch=4, page_size=16)
    yield llm
    llm.close()


def test_ranks_start_while_the_tokenizer_is_read_and_end_where_it_is_damaged(monkeypatch):
    started, closed = threading.Event(), threading.Event()

    class Ranks:
        def __init__(self, *_):
            started.set()

        def close(self):
            closed.set()

    def read(directory):
        assert started.wait(timeout=ANSWER_SECONDS)
        raise CheckpointError(f"{directory.name}: damaged")

    monkeypatch.setattr(async_llm, "VirtualRanks", Ranks)
    monkeypatch.setattr(async_llm, "load_tokenizer", read)
    with pytest.raises(CheckpointError, match="damaged"):
        weft.AsyncLLM(None, 2, device="sim")
    assert closed.is_set()


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
    guided = weft.SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]+"))
    with pytest.raises(ZeroDivisionError):  # and no error of what tries grammars, which is closed
        asyncio.run(llm.submit("1+1=", guided))
    with weft.LLM(None, 1, device="sim") as other:  # the ranks have ended
        assert other.world_size == 1
