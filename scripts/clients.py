"""Loops of agents by real clients against a server, which must have the model of tests/serve/talking.py.

    python -m tests.serve.talking build/talking
    weft serve build/talking --served-model-name adder
    python scripts/clients.py openai http://127.0.0.1:8000/v1

openai          five forced calls, then the answer, as a stream; needs `pip install openai`
openai-agents   an agent of five turns, each with a forced call; `pip install openai-agents`
pydantic-ai     an agent whose output is a call; `pip install 'pydantic-ai-slim[openai]'`
litellm         a proxy before the server, which the loop of `openai` then asks; `pip install 'litellm[proxy]'`
soak            2,000 requests of all kinds (--requests), 8 at a time, each answer checked

Exit status 0 and one line of what was called; an error otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

STEPS = 5
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two digits.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 9},
                "b": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
# The model has not learnt when to reason: its template closes the reasoning before an answer.
NO_REASONING = {"chat_template_kwargs": {"enable_thinking": False}}


def by_openai(url: str, key: str = "any") -> str:
    """Five calls that the server's grammar forces, and their sums."""
    from openai import OpenAI

    said, messages = [], [{"role": "user", "content": "Add some digits."}]
    with OpenAI(base_url=url, api_key=key, timeout=120) as client:
        for step in range(STEPS):
            asked = {
                "model": "adder",
                "messages": messages,
                "tools": [ADD],
                "temperature": 1.0,
                "seed": step,
                "max_tokens": 200,
            }
            answer = client.chat.completions.create(
                **asked, tool_choice="required", parallel_tool_calls=False, extra_body=NO_REASONING
            )
            message = answer.choices[0].message
            [call] = message.tool_calls
            numbers = json.loads(call.function.arguments)
            said.append(f"{numbers['a']}+{numbers['b']}=")
            messages += [
                message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": said[-1]},
            ]
        stream = client.chat.completions.create(
            model="adder", messages=messages, tools=[ADD], tool_choice="none", stream=True
        )
        total = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    first, second = said[-1].removesuffix("=").split("+")
    if total != str(int(first) + int(second)):
        raise SystemExit(f"{said[-1]}{total} is wrong")
    return f"{' '.join(said)}{total}"


def by_agents(url: str) -> str:
    """Turns of an Agent of openai-agents, each of which calls its function."""
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from agents.exceptions import MaxTurnsExceeded
    from openai import AsyncOpenAI
    from pydantic import Field

    calls: list[tuple[int, int]] = []
    digit = Field(ge=0, le=9)

    @function_tool
    def add(a: int = digit, b: int = digit) -> int:
        """Add two numbers."""
        calls.append((a, b))
        return a + b

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel(
        model="adder", openai_client=AsyncOpenAI(base_url=url, api_key="any", timeout=120)
    )
    settings = ModelSettings(
        tool_choice="required", parallel_tool_calls=False, temperature=1.0, max_tokens=400, extra_body=NO_REASONING
    )
    agent = Agent(
        name="adder", instructions="Add.", tools=[add], model=model, model_settings=settings, reset_tool_choice=False
    )
    try:
        Runner.run_sync(agent, "Add some digits.", max_turns=STEPS)
    except MaxTurnsExceeded:  # no turn ended by an answer, as asked
        if len(calls) == STEPS:
            return " ".join(f"{a}+{b}" for a, b in calls)
    raise SystemExit(f"{len(calls)} calls in {STEPS} turns")


def by_pydantic(url: str) -> str:
    """Output of an agent of pydantic-ai, which is a call that the server's grammar forces."""
    from pydantic import BaseModel, Field
    from pydantic_ai import Agent, ModelSettings
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Digits(BaseModel):
        a: int = Field(ge=0, le=9)
        b: int = Field(ge=0, le=9)

    class Pair(BaseModel):
        first: Digits
        second: Digits

    model = OpenAIChatModel("adder", provider=OpenAIProvider(base_url=url, api_key="any"))
    settings = ModelSettings(temperature=1.0, max_tokens=400, extra_body=NO_REASONING)
    agent = Agent(model, output_type=Pair, model_settings=settings)

    async def main() -> list[Pair]:
        return [(await agent.run("Choose digits.")).output for _ in range(STEPS)]

    return " ".join(f"{one.first.a}{one.first.b}{one.second.a}{one.second.b}" for one in asyncio.run(main()))


def by_litellm(url: str) -> str:
    """The loop of `by_openai` through a proxy of litellm."""
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        port = end.getsockname()[1]
    models = [{"model_name": "adder", "litellm_params": {"model": "openai/adder", "api_base": url, "api_key": "any"}}]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "proxy.yaml"
        key = f"sk-{secrets.token_hex(16)}"  # without one the proxy does not start
        path.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": key}}))  # YAML too
        command = [
            Path(sys.executable).with_name("litellm"),
            "--config",
            path,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        with subprocess.Popen(list(map(str, command))) as proxy:
            try:
                _wait(f"http://127.0.0.1:{port}/health/liveliness", proxy)
                return by_openai(f"http://127.0.0.1:{port}/v1", key)
            finally:
                proxy.terminate()


def _wait(url: str, process: subprocess.Popen[bytes], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"{url} does not answer")


async def soak(url: str, requests: int, at_once: int = 8, *, seconds: float = 1e9) -> str:
    """Requests of all kinds in turn; AssertionError for an answer that is wrong. Their counts by kind.

    seconds  after which no request begins
    """
    from openai import AsyncOpenAI, BadRequestError

    client = AsyncOpenAI(base_url=url, api_key="any", timeout=600, max_retries=0)
    numbers, deadline = iter(range(requests)), time.monotonic() + seconds

    async def ask(number: int, **asked: object) -> object:
        first, second = number * 7 % 90 + 10, number * 13 % 90 + 10
        messages = [{"role": "user", "content": f"{first}+{second}="}]
        body = {"model": "adder", "messages": messages, "seed": number, **asked}
        return await client.chat.completions.create(**body), str(first + second)

    async def add(number: int) -> None:
        answer, total = await ask(number)
        assert answer.choices[0].message.content == total, (answer, total)

    async def call(number: int) -> None:
        forced = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
        answer, _ = await ask(number, **forced, temperature=1.0, max_tokens=200, extra_body=NO_REASONING)
        [made] = answer.choices[0].message.tool_calls
        assert {*json.loads(made.function.arguments)} == {"a", "b"} and answer.choices[0].finish_reason == "tool_calls"

    async def follow(number: int) -> None:
        schema = {"type": "integer", "minimum": number, "maximum": number + 50}  # grammars that differ
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        answer, _ = await ask(number, response_format=form, extra_body=NO_REASONING, max_tokens=20)
        assert number <= int(answer.choices[0].message.content) <= number + 50

    async def leave(number: int) -> None:
        stream, _ = await ask(number, stream=True, max_tokens=300, extra_body={"ignore_eos": True})
        async for _ in stream:
            break
        await stream.close()

    async def refused(number: int) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a|b" * (number % 5 + 1)}}}
        tool = {"type": "function", "function": {"name": "x", "parameters": schema}}
        try:
            await ask(number, tools=[tool], tool_choice="required")
        except BadRequestError:
            return
        raise AssertionError("a pattern that is none was taken")

    kinds, counts = (add, call, follow, leave, refused), {}

    async def work() -> None:
        for number in numbers:
            if time.monotonic() > deadline:
                return
            kind = kinds[number % len(kinds)]
            await kind(number)
            counts[kind.__name__] = counts.get(kind.__name__, 0) + 1

    await asyncio.gather(*[work() for _ in range(at_once)])
    answer, total = await ask(0)
    assert answer.choices[0].message.content == total
    return ", ".join(f"{count} {name}" for name, count in counts.items())


CLIENTS = {"openai": by_openai, "openai-agents": by_agents, "pydantic-ai": by_pydantic, "litellm": by_litellm}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", choices=[*CLIENTS, "soak"])
    parser.add_argument("url", help="of the server, with /v1")
    parser.add_argument("--requests", type=int, default=2000, help="of soak")
    asked = parser.parse_args()
    is_soak = asked.client == "soak"
    print(asked.client, asyncio.run(soak(asked.url, asked.requests)) if is_soak else CLIENTS[asked.client](asked.url))
