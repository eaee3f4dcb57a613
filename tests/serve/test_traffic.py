"""Many clients at once, half of them leaving; a signal ends running streams, and the process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.limits import ANSWER
from tests.serve.conftest import until
from weft.cli import app as command
from weft.engine import Load

ROOT = Path(__file__).parents[2]


def in_one_line(arguments):
    result = CliRunner().invoke(command, ["serve", *arguments])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    return result.stderr


def test_mistakes_on_the_command_line_are_one_line(served, monkeypatch):
    port = served.url.rpartition(":")[2]
    assert f"--port {port} on 127.0.0.1: Address already in use" in in_one_line(["--port", port])
    assert "--port=70000 is not an integer in 0 .. 65535" in in_one_line(["--port", "70000"])
    assert "--dummy-weights takes a name as MODEL" in in_one_line(["--dummy-weights"])
    assert "max_waiting=0 is not a positive integer" in in_one_line(["--max-waiting", "0"])
    monkeypatch.setattr("weft.serve.find_spec", lambda name: None if name == "uvicorn" else name)
    assert 'weft serve needs uvicorn; install them: pip install "weft[serve]"' in in_one_line([])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in (1, 2))])
def test_of_64_clients_half_leave_and_nothing_is_lost(served, seed):
    import random

    import httpx
    import openai

    random = random.Random(seed)
    kinds = ["stays", "streams", "leaves", "aborts", "malformed"]

    async def one(client, http, kind):
        a, b = random.randrange(1, 400), random.randrange(1, 400)
        ask = {"model": "adder", "prompt": f"{a}+{b}=", "max_tokens": 8}
        await asyncio.sleep(random.random())
        if kind == "stays":
            return (await client.completions.create(**ask)).choices[0].text == str(a + b)
        if kind == "streams":
            pieces = [piece async for piece in await client.completions.create(**ask, stream=True)]
            return "".join(piece.choices[0].text for piece in pieces) == str(a + b)
        long = {**ask, "max_tokens": 50, "ignore_eos": True, "n": random.choice((1, 2))}
        if kind == "leaves":
            async with http.stream("POST", "/v1/completions", json={**long, "stream": True}) as stream:
                left = random.randrange(1, 20)
                async for _ in stream.aiter_lines():
                    left -= 1
                    if not left:
                        return True
        if kind == "aborts":
            with pytest.raises(httpx.ReadTimeout):
                await http.post("/v1/completions", json=long, timeout=httpx.Timeout(30, read=random.random() / 20))
            return True
        body = json.dumps(ask)[: random.randrange(1, 30)]
        answer = await http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        return answer.status_code == 400

    async def main():
        async with (
            openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client,
            httpx.AsyncClient(base_url=served.url, timeout=ANSWER) as http,
        ):
            asked = [kinds[number % 2] if number < 32 else kinds[2 + number % 3] for number in range(64)]
            return await asyncio.gather(*(one(client, http, kind) for kind in asked))

    assert asyncio.run(main()) == [True] * 64
    until(lambda: served.llm.load == Load(preemptions=served.llm.load.preemptions))
    assert not served.llm._requests and not served.service._answers
    assert served.service._entering == 0


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_streams_and_the_process(number):
    import openai

    arguments = ["serve", "--device", "sim", "--world-size", "2", "--mode", "reference", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "weft", *arguments], stderr=subprocess.PIPE, text=True, cwd=ROOT, env=dict(os.environ),
        start_new_session=True,
    )  # fmt: skip
    try:
        line = process.stderr.readline()
        assert line.startswith("weft: adder on 2 virtual ranks at http://127.0.0.1:")
        with openai.OpenAI(base_url=line.split()[-1], api_key="any", max_retries=30) as client:
            stream = client.completions.create(
                model="adder", prompt=["1+1="] * 64, max_tokens=60, stream=True, n=8, extra_body={"ignore_eos": True}
            )
            next(stream)
            os.killpg(process.pid, number)  # as a terminal, systemd, `timeout` and Slurm do
            with pytest.raises(openai.APIError, match="the server is shutting down"):
                list(stream)
        assert process.wait(timeout=ANSWER) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
