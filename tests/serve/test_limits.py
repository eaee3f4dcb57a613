"""Requests that would end the server, hold it up or fill its memory are refused in one line while it answers others."""

import asyncio
import gc
import re
import signal
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.engine.test_grammar_guard import chain
from tests.limits import ANSWER
from tests.serve.conftest import until
from weft.runtime.limited_process import LimitedProcess, ProcessFailed
from weft.serve.fields import MOST_CHARACTERS, MOST_STRINGS
from weft.text.tokenizer import TokenBound

ROOT = Path(__file__).parent.parent.parent
MILLION = "1" * (1 << 20)
NO_ROOM = "prompt has more than 63 tokens and leaves no room for an answer in max_seq_len=64; shorten it to 63 tokens"


@pytest.fixture
def http(served):
    """Client of the server's app, whose engine is that of `served`, since a process has virtual ranks once."""
    import httpx

    from weft.serve import app, routes

    service = app.Service(served.llm, app.ServeOptions(model_name="adder"))
    transport = httpx.ASGITransport(routes.create_app(service))
    return lambda: httpx.AsyncClient(transport=transport, base_url="http://weft")


@pytest.mark.parametrize("length", [1 << 40, 10**60])
def test_a_body_that_says_it_is_too_long_is_refused_before_it_comes(http, length):
    async def main():
        async with http() as client:
            headers = {"content-type": "application/json", "content-length": str(length)}
            answer = await client.post("/v1/completions", content=b"{", headers=headers)
            assert answer.status_code == 413 and "the body has more than 16,777,216 bytes" in answer.text

    asyncio.run(main())


def test_a_text_of_a_million_characters_is_refused_untokenized(served, http, monkeypatch):
    """Alone, in a list and in a conversation. The body is not that of `served`, whose limit is lower."""
    monkeypatch.setattr(served.llm._reader, "_bound", TokenBound(served.llm.tokenizer))
    monkeypatch.setattr(served.llm._reader, "_tokenizer", None)
    bodies = [
        ("completions", {"prompt": MILLION}, NO_ROOM),
        ("completions", {"prompt": [MILLION, "1"]}, NO_ROOM),
        ("completions", {"prompt": [1] * 100_000}, NO_ROOM.replace("more than 63", "100000")),
        ("chat/completions", {"messages": [{"role": "user", "content": MILLION}]}, NO_ROOM),
    ]

    async def main():
        async with http() as client:
            for path, body, message in bodies:
                answer = await client.post(f"/v1/{path}", json={**body, "n": 16, "temperature": 1})
                assert (answer.status_code, answer.json()["error"]["message"]) == (400, message), path

    asyncio.run(main())


def test_a_prompt_is_read_once_for_its_choices_and_the_server_answers_meanwhile(served, http, monkeypatch):
    """A thread reads it, which here waits for the answer of /health."""
    import threading

    read, answered, texts = served.llm._reader.read, threading.Event(), []

    def reads(name, text, **options):
        texts.append(text)
        assert answered.wait(ANSWER)
        return read(name, text, **options)

    monkeypatch.setattr(served.llm._reader, "read", reads)

    async def main():
        async with http() as client:
            body = {"prompt": ["1+2=", "3+4="], "n": 3, "temperature": 1, "seed": 1, "max_tokens": 2}
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            while not texts:
                await asyncio.sleep(0.001)
            health = await client.get("/health")
            answered.set()
            return health.status_code, (await asked).json()

    health, answer = asyncio.run(main())
    assert health == 200 and len(answer["choices"]) == 6 and texts == ["1+2=", "3+4="]


def test_a_grammar_that_overflows_the_stack_is_a_400_and_the_next_is_answered(http):
    async def main():
        async with http() as client:
            found = []
            for grammar in (chain(5000), 'start: "7"'):
                body = {"prompt": "1+1=", "structured_outputs": {"grammar": grammar}}
                found.append(await client.post("/v1/completions", json=body))
            return found

    refused, answered = asyncio.run(main())
    assert refused.status_code == 400 and answered.json()["choices"][0]["text"] == "7"
    assert refused.json()["error"]["message"].startswith(
        "structured_outputs: llguidance does not compile this grammar within its limits: its process ended"
    )


def test_a_client_that_leaves_ends_the_trial_of_its_grammar(served, monkeypatch, caplog):
    """Here a trial takes until its process is ended. No traceback of its error is logged."""
    import httpx

    ended = []

    def ask(process, message, seconds):
        ended.append(process.process.wait())
        raise ProcessFailed("ended")

    monkeypatch.setattr(LimitedProcess, "ask", ask)
    body = {"prompt": "1+1=", "structured_outputs": {"grammar": 'start: "1" "2" "3" "4"'}}
    assert served.llm._guard._idle, "the test before has started a process"
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/completions", json=body, timeout=0.5)
    until(lambda: ended)
    assert ended == [-signal.SIGKILL]
    until(lambda: not served.llm._guard._trials)
    until(lambda: not served.service._entering)
    gc.collect()  # futures complain when they go
    assert "never retrieved" not in caplog.text


def test_stop_strings_and_bad_words_have_limits(served, http):
    async def main():
        async with http() as client:
            for name, strings, message in (
                (
                    "stop",
                    ["x"] * (MOST_STRINGS + 1),
                    f"stop has {MOST_STRINGS + 1} strings; pass at most {MOST_STRINGS}",
                ),
                ("bad_words", ["1"] * 100_000, f"bad_words has 100,000 strings; pass at most {MOST_STRINGS}"),
                ("stop", "x" * 10_000_000, "stop has 10,000,000 characters in all; pass at most 8,192"),
                ("bad_words", ["1" * 9000], "bad_words has 9,000 characters in all; pass at most 8,192"),
            ):
                answer = await client.post("/v1/completions", json={"prompt": "1", name: strings})
                error = answer.json()["error"]
                assert (answer.status_code, error["message"], error["param"]) == (400, message, name)
            fits = ["x" * (MOST_CHARACTERS // MOST_STRINGS - 1) + chr(200 + n) for n in range(MOST_STRINGS)]
            answer = await client.post("/v1/completions", json={"prompt": "123+456=", "stop": fits})
            assert answer.json()["choices"][0]["text"] == "579"

    asyncio.run(main())


def test_a_salt_reaches_the_engine_and_an_empty_one_is_refused(served, http, monkeypatch):
    salts, submit = [], served.llm.submit
    monkeypatch.setattr(
        served.llm,
        "submit",
        lambda prompt, params, **rest: salts.append(params.cache_salt) or submit(prompt, params, **rest),
    )

    async def main():
        async with http() as client:
            asked = [{"prompt": "1+2="}, {"prompt": "1+2=", "cache_salt": "one"}, {"prompt": "1+2=", "cache_salt": ""}]
            return [await client.post("/v1/completions", json=body) for body in asked]

    *answered, refused = asyncio.run(main())
    assert [one.json()["choices"][0]["text"] for one in answered] == ["3", "3"] and salts == [None, "one"]
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"


def test_packages_with_known_holes_are_below_the_floors():
    """Of jinja2 before 3.1.6 the sandbox can be left; h11 before 0.16 accepts malformed chunked bodies."""
    text = (ROOT / "pyproject.toml").read_text()
    for name, floor, times in (("jinja2", (3, 1, 6), 1), ("h11", (0, 16), 2)):
        assert re.findall(rf'"{name}>=([\d.]+)"', text) == [".".join(map(str, floor))] * times
        assert tuple(map(int, version(name).split(".")[:3])) >= floor
