"""The begin and the end of a server: it runs a request before it listens, and an error of a rank ends it."""

import asyncio
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import weft
from tests.limits import ANSWER
from tests.serve.conftest import serving, until
from tests.spawning import launch_two
from weft.engine import Load, Piece, async_llm, loop
from weft.engine.config import EngineConfig

HELD = 60


def test_an_error_of_the_engine_ends_streams_and_the_server(directory, monkeypatch):
    import openai

    def fails(engine):
        raise RuntimeError("a GPU fell off")

    with (
        serving(directory) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client,
    ):
        stream = client.completions.create(
            model="adder", prompt="1+1=", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        monkeypatch.setattr(weft.Engine, "step", fails)
        with pytest.raises(openai.APIError, match="the engine has failed, and the server ends"):
            list(stream)
        until(lambda: not served.thread.is_alive())
    assert str(served.llm.error) == "a GPU fell off"


def ask(url, max_tokens=4):
    import httpx

    return httpx.post(f"{url}/v1/completions", json={"prompt": "123+456=", "max_tokens": max_tokens}, timeout=ANSWER)


def test_a_server_restarts_its_ranks_once(directory, monkeypatch):
    import httpx

    step, failing = weft.Engine.step, []

    def step_or_fail(engine):
        if failing:
            raise RuntimeError("a GPU fell off")
        return step(engine)

    monkeypatch.setattr(weft.Engine, "step", step_or_fail)

    with serving(directory, world_size=1, restart=True) as served:
        failing.append(True)
        refused = ask(served.url)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "restarting"
        failing.clear()
        until(lambda: httpx.get(f"{served.url}/health").status_code == 200)
        assert ask(served.url).json()["choices"][0]["text"] == "579" and served.thread.is_alive()
        assert httpx.get(f"{served.url}/metrics").status_code == 200
        failing.append(True)
        assert ask(served.url).status_code == 500
        until(lambda: not served.thread.is_alive())
    assert str(served.llm.error) == "a GPU fell off"


class PromptEngine:
    """Engine of a rank in a process without a GPU: it answers each request with 579, and those of HELD tokens never."""

    has_work, load, captures_left = False, Load(), 0

    def __init__(self, source, team, config, progress, warm_up_progress):
        self.asked = []

    def submit(self, prompt, params, number):
        self.asked += [number] if params.max_tokens < HELD else []
        self.has_work = bool(self.asked)

    def cancel(self, number):
        """No request is kept."""

    def settle(self):
        """No step is in flight."""

    def against_plan(self):
        return []

    def step(self):
        pieces = [Piece(number, "579", 0, "length") for number in self.asked]
        self.asked, self.has_work = [], False
        return pieces


@pytest.mark.sweep  # 10 s of a core: four processes load torch
def test_a_server_restarts_its_ranks_once_when_the_process_of_one_is_killed(directory, monkeypatch):
    import httpx

    monkeypatch.setattr(async_llm, "VirtualRanks", loop.Processes)
    monkeypatch.setattr(async_llm, "Engine", PromptEngine)
    monkeypatch.setattr(loop, "launch_on_pipes", launch_two)

    def kill(rank):
        os.kill(served.llm._ranks._started[rank].pid, signal.SIGKILL)

    with serving(directory, restart=True) as served, ThreadPoolExecutor(1) as beside:
        assert ask(served.url).json()["choices"][0]["text"] == "579"
        first = served.llm._ranks._started
        running = beside.submit(ask, served.url, HELD)
        until(lambda: served.llm._requests)
        kill(1)
        until(lambda: served.llm.error is not None)
        for refused in (running.result(timeout=ANSWER), ask(served.url)):
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "restarting"
            assert refused.headers["Retry-After"]
        until(lambda: httpx.get(f"{served.url}/health").status_code == 200)
        assert ask(served.url).json()["choices"][0]["text"] == "579"
        assert [process.is_alive() for process in first] == [False, False]
        kill(0)
        until(lambda: not served.thread.is_alive())
    assert str(served.llm.error).startswith("rank 0: its process died without a message (killed")


def test_a_server_that_listens_has_run_a_request_and_counts_none(directory):
    with serving(directory, world_size=1) as served:
        assert served.llm._template is not None and next(served.llm._numbers) == 1
        assert "weft:prompt_tokens_total" in (text := served.service.metrics.text().decode())
        counts = [line for line in text.splitlines() if "_total{" in line]
        assert counts and all(line.endswith(" 0.0") for line in counts)


def test_a_model_without_a_template_or_room_for_an_answer_is_served_nevertheless():
    from weft.serve.server import run_once

    async def refused(*given):
        asked.append(given)
        raise ValueError("no")

    asked = []
    for tokenizer, warm_up, calls in ((None, True, 1), ("one", True, 2), ("one", False, 1), (None, False, 0)):
        llm = SimpleNamespace(
            tokenizer=tokenizer, config=EngineConfig(warm_up=warm_up), generate=refused, chat_prompt=refused
        )
        asyncio.run(run_once(llm))
        assert len(asked) == calls
        asked.clear()


def test_two_servers_do_not_share_a_port_and_the_next_one_gets_it_at_once():
    """Also while connections of the server before wait there for their end."""
    from weft.serve import address

    port = 0
    for _ in range(3):
        with address.bound("127.0.0.1", port) as at:
            port = at.getsockname()[1]
            with pytest.raises(ValueError, match=rf"^--port {port} on 127.0.0.1: Address already in use; pass another"):
                address.bound("127.0.0.1", port)
            address.share(at)
            at.listen()
            with pytest.raises(ValueError, match="Address already in use"):
                address.bound("127.0.0.1", port)
            with socket.create_connection(("127.0.0.1", port)), at.accept()[0]:
                pass
