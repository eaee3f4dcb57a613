"""OpenAI's own client gets calls of functions, reasoning and structured answers, whole and as streams."""

import asyncio
import json
import threading
import time

import httpx
import pytest

from tests.limits import ANSWER
from tests.serve import talking
from tests.serve.conftest import serving
from weft.engine.params import SamplingParams
from weft.serve.checks import BadField
from weft.serve.fields import Asked

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two digits",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"$ref": "#/$defs/Digit"}},
            "required": ["a", "b"],
            "additionalProperties": False,
            "$defs": {"Digit": {"type": "integer", "minimum": 0, "maximum": 9}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
SAY = {
    "type": "function",
    "function": {
        "name": "say",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "maxLength": 12}, "tone": {"enum": ["<tool_call>", "lo\"ud"]}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
NO_REASONING = {"chat_template_kwargs": {"enable_thinking": False}}
USER = [{"role": "user", "content": "12+34="}]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(talking.write(tmp_path_factory.mktemp("talking") / "adder"), world_size=1) as served:
        yield served


def chat(client, **asked):
    return client.chat.completions.create(model="adder", messages=asked.pop("messages", USER), **asked)


def collected(stream):
    """(content, reasoning, calls as {id, name, arguments}, reason of the end) of a stream."""
    content, thought, calls, reason = "", "", [], None
    for chunk in stream:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        thought += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.function.name:
                assert call.index == len(calls) and call.type == "function"
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments
        reason = choice.finish_reason or reason
    return content, thought, calls, reason


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=["required", "named"]
)
def test_a_forced_call_parses_by_its_schema_whole_and_as_a_stream(client, choice):
    for seed in range(2):
        asked = {
            "extra_body": NO_REASONING,
            "tools": [ADD, NOW],
            "tool_choice": choice,
            "temperature": 1.5,
            "seed": seed,
            "max_tokens": 3000,
        }
        answer = chat(client, **asked).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None and answer.message.tool_calls
        for call in answer.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            assert call.function.name == "now" and arguments == {} or {*arguments} == {"a", "b"}
            assert call.id.startswith("call_") and all(0 <= value <= 9 for value in arguments.values())
        assert choice == "required" or [one.function.name for one in answer.message.tool_calls] == ["add"]
        content, thought, calls, reason = collected(chat(client, **asked, stream=True))
        assert (content, thought, reason) == ("", "", "tool_calls")
        assert [(one["name"], one["arguments"]) for one in calls] == [
            (one.function.name, one.function.arguments) for one in answer.message.tool_calls
        ]


def test_one_call_where_calls_may_not_be_parallel_and_texts_with_marks(client):
    for seed in range(2):
        asked = {
            "extra_body": NO_REASONING,
            "tools": [NOW, SAY],
            "tool_choice": "required",
            "temperature": 1.5,
            "seed": seed,
            "max_tokens": 500,
        }
        [call] = chat(client, **asked, parallel_tool_calls=False).choices[0].message.tool_calls
        assert {*json.loads(call.function.arguments)} <= {"text", "tone"}


def test_without_a_call_tools_leave_the_answer_as_it_is(client):
    for more in ({"tool_choice": "none"}, {"tool_choice": "auto"}, {}):
        answer = chat(client, tools=[ADD], **more).choices[0]
        assert (answer.message.content, answer.finish_reason, answer.message.tool_calls) == ("46", "stop", None)
        assert collected(chat(client, tools=[ADD], stream=True, **more)) == ("46", "", [], "stop")


def test_reasoning_stands_apart_and_within_its_budget(client):
    think = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 5}
    answer = chat(
        client, temperature=1.0, seed=3, max_tokens=40, extra_body=think | {"return_token_ids": True}
    ).choices[0]
    assert answer.token_ids.index(102) <= 5 and "think" not in answer.message.content
    streamed = collected(chat(client, temperature=1.0, seed=3, max_tokens=40, stream=True, extra_body=think))
    assert streamed[:2] == (answer.message.content, getattr(answer.message, "reasoning_content", ""))
    none = chat(
        client, temperature=1.0, seed=3, max_tokens=40, extra_body=think | {"thinking_token_budget": 0}
    ).choices[0]
    assert not hasattr(none.message, "reasoning_content")
    hidden = chat(client, seed=3, max_tokens=4, extra_body=think | {"include_reasoning": False}).choices[0]
    assert not hasattr(hidden.message, "reasoning_content")
    off = {"chat_template_kwargs": {"enable_thinking": False}, "thinking_token_budget": 5}
    assert not hasattr(chat(client, max_tokens=8, extra_body=off).choices[0].message, "reasoning_content")


def test_forced_calls_and_structures_follow_the_reasoning(client):
    think = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 4}
    answer = chat(
        client, tools=[ADD], tool_choice="required", temperature=1.0, seed=1, max_tokens=3000, extra_body=think
    )
    assert answer.choices[0].finish_reason == "tool_calls" and json.loads(
        answer.choices[0].message.tool_calls[0].function.arguments
    )
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "integer", "minimum": 0, "maximum": 9}},
    }
    for body in (think, {}):
        answer = chat(client, response_format=schema, temperature=1.0, seed=1, max_tokens=200, extra_body=body)
        assert 0 <= int(answer.choices[0].message.content) <= 9
    both = (
        chat(
            client,
            response_format=schema,
            tools=[ADD],
            temperature=1.0,
            seed=1,
            max_tokens=3000,
            extra_body=NO_REASONING,
        )
        .choices[0]
        .message
    )
    assert both.tool_calls or 0 <= int(both.content) <= 9


def test_a_call_that_the_model_writes_by_itself_is_parsed_by_the_parser_of_the_options(served):
    """Here a choice of texts stands for the model; the engine is that of `served`, since a process has virtual ranks once."""
    from weft.serve import app, routes

    options = app.ServeOptions(model_name="adder", tool_call_parser="llama3_json", reasoning_parser="none")
    transport = httpx.ASGITransport(routes.create_app(app.Service(served.llm, options)))
    text = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
    body = {"messages": USER, "tools": [ADD], "structured_outputs": {"choice": [text]}, "n": 2, "max_tokens": 200}

    async def main():
        async with httpx.AsyncClient(transport=transport, base_url="http://weft", timeout=ANSWER) as client:
            whole = await client.post("/v1/chat/completions", json=body)
            streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
            return whole.json()["choices"], streamed.text

    choices, events = asyncio.run(main())
    for choice in choices:
        [call] = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        assert call["type"] == "function" and call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    chunks = [json.loads(line.removeprefix("data: ")) for line in events.split("\n\n") if line.startswith("data: {")]
    for index in range(2):
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        calls = [call for one in parts for call in one["delta"].get("tool_calls", ())]
        assert [one["finish_reason"] for one in parts if one["finish_reason"]] == ["tool_calls"]
        assert len(calls) > 3 and "".join(call["function"]["arguments"] for call in calls) == '{"a": 1, "b": 2}'
        assert [call["function"].get("name") for call in calls] == ["add", *[None] * (len(calls) - 1)]


def test_a_loop_of_five_steps_ends_by_the_answer(client):
    """Each step calls a function, and the last one adds what it is told; messages go back as the client has them."""
    messages, said = list(USER), []
    for step in range(5):
        answer = chat(
            client, messages=messages, tools=[ADD, NOW], tool_choice={"type": "function", "function": {"name": "add"}},
            seed=step, temperature=1.0, max_tokens=200, extra_body=NO_REASONING,
        ).choices[0].message  # fmt: skip
        messages.append(answer.model_dump())
        for call in answer.tool_calls:
            arguments = json.loads(call.function.arguments)
            said.append(f"{arguments['a']}+{arguments['b']}=")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said[-1]})
    last = chat(client, messages=messages, tools=[ADD, NOW], tool_choice="none").choices[0]
    assert (
        len(said) == 5
        and last.finish_reason == "stop"
        and last.message.content == str(sum(map(int, said[-1][:-1].split("+"))))
    )


def schema_of(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


HOSTILE = {
    "a regex of a million states": schema_of(a={"type": "string", "pattern": "^(([a-z]{1,500}){1,500}){1,500}$"}),
    "a regex that is none": schema_of(a={"type": "string", "pattern": "(((("}),
    "a reference to itself": schema_of(a={"$ref": "#/properties/a"}),
    "a reference to nothing": schema_of(a={"$ref": "#/$defs/none"}),
    "a reference to a file": schema_of(a={"$ref": "file:///etc/passwd"}),
    "alternatives of alternatives": schema_of(
        a={"allOf": [{"anyOf": [{"type": "integer", "multipleOf": a + b} for a in range(1, 30)]} for b in range(30)]}
    ),
    "a range without an end": schema_of(a={"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}}),
    "a type that is none": schema_of(a={"type": "thing"}),
    "an object with a million characters": schema_of(a={"enum": ["x" * 1_000_000]}),
    "many properties": schema_of(**{f"p{n}": {"type": "string", "pattern": f"a{{{n}}}"} for n in range(3000)}),
}  # fmt: skip


@pytest.mark.slow
def test_hostile_schemas_cost_one_error_and_no_time_of_other_requests(served, client, monkeypatch):
    """Some compile; then the answer is cut. Meanwhile another client gets its answers."""
    monkeypatch.setattr(served.llm._guard, "seconds", 1.0)  # the tests before have made it
    wrong, errors = {}, []

    def send():
        for name, schema in HOSTILE.items():
            tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
            body = {"messages": USER, "tools": [tool], "tool_choice": "required", "max_tokens": 2, **NO_REASONING}
            answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=ANSWER)
            said = answer.json()
            if answer.status_code == 400:
                errors.append(said["error"]["message"])
            ended = answer.status_code == 200 and said["choices"][0]["finish_reason"] == "length"
            if not (ended or (answer.status_code == 400 and "\n" not in errors[-1] and len(errors[-1]) < 1100)):
                wrong[name] = answer.text[:500]

    sending = threading.Thread(target=send)
    sending.start()
    seconds = []
    while sending.is_alive():
        begin = time.monotonic()
        assert chat(client).choices[0].message.content == "46"
        seconds.append(time.monotonic() - begin)
    sending.join()
    assert wrong == {} and len(errors) >= 5 and any(one.startswith("tools, as a grammar: ") for one in errors), errors
    assert len(seconds) >= 5 and sorted(seconds)[len(seconds) // 2] < 2.0


def test_a_schema_at_the_depth_of_the_body_is_refused_before_the_template(client):
    import openai

    deep = {"type": "object"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"x": deep}}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    with pytest.raises(openai.BadRequestError, match="nested more than 64 deep"):
        chat(client, tools=[tool])


def asked(**body):
    return Asked.of({"messages": USER, **body}, True, SamplingParams())


def named(name):
    return {"type": "function", "function": {"name": name}}


def test_messages_with_calls_reach_the_template_with_arguments_as_objects():
    call = {"id": "x", "type": "function", "index": 0, "function": {"name": "add", "arguments": '{"a": 1}'}}
    broken = {"function": {"name": "add", "arguments": "{a"}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call, broken], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "1"}], "name": "add"},
        {"role": "assistant", "reasoning": "because", "content": None},
    ]
    known = Asked.of({"messages": messages}, True, SamplingParams()).messages
    assert known == [
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
            {"type": "function", "function": {"name": "add", "arguments": "{a"}},
        ]},
        {"role": "tool", "tool_call_id": "x", "content": "1", "name": "add"},
        {"role": "assistant", "reasoning": "because", "content": ""},
    ]  # fmt: skip


DEEP = {"type": "object"}
for _ in range(80):
    DEEP = {"type": "object", "properties": {"x": DEEP}}
WRONG = [
    ({"tools": {}}, "tools={} is not a list of tools"),
    ({"tools": [{"type": "custom"}]}, "tools[0]={'type': 'custom'} is not {\"type\": \"function\", \"function\": {…}}"),
    ({"tools": [named("a\nb")]}, "tools[0].function.name='a\\nb' is not a name of up to 128 letters, digits and _ - . : /"),
    ({"tools": [named("x" * 200)]}, "tools[0].function.name="),
    ({"tools": [named("x")] * 2}, "tools has two functions named 'x'; rename one"),
    ({"tools": [named(f"f{n}") for n in range(10_000)]}, "tools has 10,000 tools; pass at most 512"),
    ({"tools": [{"type": "function", "function": {"name": "x", "parameters": []}}]}, "parameters=[] is not an object"),
    ({"tools": [{"type": "function", "function": {"name": "x", "parameters": DEEP}}]},
     "tools[0].function is nested more than 64 deep; flatten"),
    ({"tool_choice": "required"}, "tool_choice='required' without tools; send tools too"),
    ({"tools": [ADD], "tool_choice": "any"}, "tool_choice='any' is not none, auto, required or a function of tools"),
    ({"tools": [ADD], "tool_choice": named("sub")}, "tool_choice names 'sub', which is no function of tools"),
    ({"tools": [ADD], "parallel_tool_calls": 1}, "parallel_tool_calls=1 is not true or false"),
    ({"thinking_token_budget": -2}, "thinking_token_budget=-2 is not a number of tokens, or -1 for any number"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [named("x")]}]}, "only an assistant's message has calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]={} is not a call of a function"),
]  # fmt: skip


def test_wrong_tools_are_refused_by_name():
    for body, message in WRONG:
        with pytest.raises(BadField) as error:
            asked(**body)
        assert message in str(error.value) and len(str(error.value)) < 1000, message


def test_tools_that_may_be_called_are_chosen():
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("now")]}}
    assert [*asked(tools=[ADD, NOW], tool_choice=allowed).tools.called] == ["now"]
    assert asked(tools=[ADD], tool_choice="none").tools is None
    one = asked(tools=[ADD, NOW], tool_choice=named("add")).tools
    assert len(one.listed) == 2 and [*one.called] == ["add"] and not one.parallel
