"""OpenAI's own client gets responses: text, reasoning, calls and structured text, whole and as events that agree."""

import json

import pytest

from tests.serve import talking
from tests.serve.conftest import serving
from weft.engine.params import SamplingParams
from weft.serve.checks import BadField
from weft.serve.parsing.reading import Delta
from weft.serve.response_fields import AskedResponse
from weft.serve.responses import Items

ADD = {
    "type": "function",
    "name": "add",
    "description": "Add two digits",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in ("a", "b")},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
NO_REASONING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(talking.write(tmp_path_factory.mktemp("responses") / "adder"), world_size=1) as served:
        yield served


def ask(client, **asked):
    return client.responses.create(model="adder", **{"input": "12+34=", "max_output_tokens": 100, **asked})


def test_text_is_answered_whole_and_in_events_that_make_the_same(client):
    whole = ask(client)
    assert (whole.output_text, whole.status, whole.object) == ("46", "completed", "response")
    [item] = whole.output
    assert (item.type, item.role, item.status, item.content[0].type) == (
        "message",
        "assistant",
        "completed",
        "output_text",
    )
    assert whole.usage.input_tokens == 6 and whole.usage.total_tokens == 6 + whole.usage.output_tokens
    assert whole.store is False and whole.previous_response_id is None and whole.text.format.type == "text"
    events = list(ask(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "46"
    assert events[-1].response.output_text == "46" and events[-1].response.usage == whole.usage


def test_a_conversation_goes_on_from_items_of_the_response_before(client):
    first = ask(client)
    items = [{"role": "user", "content": "12+34="}, *first.output, {"role": "user", "content": "46+1="}]
    assert ask(client, input=items).output_text == "47"
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "7+8="}]}]
    assert ask(client, input=parts, instructions="Add.").output_text == "15"


def test_calls_of_functions_follow_their_schema_and_their_outputs_come_back(client):
    asked = {"tools": [ADD], "tool_choice": "required", "extra_body": {"seed": 3, **NO_REASONING}}
    whole = ask(client, **asked)
    [call] = whole.output
    assert (call.type, call.name, call.status) == ("function_call", "add", "completed") and call.call_id
    assert {*json.loads(call.arguments)} == {"a", "b"}
    events = list(ask(client, **asked, stream=True))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(pieces) == done.arguments == call.arguments
    assert events[-1].response.output[0].arguments == call.arguments
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "5+5="}
    again = ask(client, input=[{"role": "user", "content": "12+34="}, call, output], tools=[ADD])
    assert again.output_text == "10"
    named = {**asked, "tool_choice": {"type": "function", "name": "add"}}
    assert ask(client, **named).output[0].name == "add"


def test_structured_text_and_limits(client):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    answer = ask(client, text=form, extra_body={"temperature": 0, **NO_REASONING})
    if answer.status == "completed":
        assert "n" in json.loads(answer.output_text)
    cut = ask(client, max_output_tokens=1)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[0].status == "incomplete" and cut.output_text == "4"
    assert list(ask(client, max_output_tokens=1, stream=True))[-1].type == "response.incomplete"
    scored = ask(client, include=["message.output_text.logprobs"], top_logprobs=2).output[0].content[0].logprobs
    assert [one.token for one in scored][:2] == ["4", "6"] and len(scored[0].top_logprobs) == 2


def test_items_of_reasoning_text_and_calls_follow_each_other():
    items, events = Items(), []
    deltas = [
        Delta("reasoning", "so"), Delta("reasoning", "…"), Delta("content", "It "), Delta("content", "is"),
        Delta("call", "", 0, "call_1", "add"), Delta("call", "{}", 0), Delta("call", "", 1, "call_2", "now"),
        Delta("call", "{}", 1), Delta("content", ""),
    ]  # fmt: skip
    for delta in deltas:
        events += items.take([delta], [])
    events += items.end(cut=False)
    assert [item["type"] for item in items.done] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, first, second = items.done
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "so…"}] and reasoning["summary"] == []
    assert message["content"][0]["text"] == "It is"
    assert [(one["name"], one["call_id"], one["arguments"]) for one in (first, second)] == [
        ("add", "call_1", "{}"), ("now", "call_2", "{}"),
    ]  # fmt: skip
    assert {item["status"] for item in items.done} == {"completed"}
    indices = [event["output_index"] for event in events]
    assert indices == sorted(indices) and {*indices} == {0, 1, 2, 3}
    for index, item in enumerate(items.done):
        mine = [event for event in events if event["output_index"] == index]
        assert mine[0]["type"] == "response.output_item.added" and mine[-1]["item"] == item
        assert "".join(event.get("delta", "") for event in mine) == (
            item.get("arguments") or "".join(part["text"] for part in item.get("content", ()))
        )
    empty = Items()
    list(empty.end(cut=True))
    assert empty.done[0]["content"][0]["text"] == "" and empty.done[0]["status"] == "incomplete"


def test_input_items_become_messages():
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a sum"}], "id": "rs_1"},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1, "b": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Two."}]},
    ]
    asked = AskedResponse.of({"input": items, "instructions": "Add."}, SamplingParams()).asked
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "now", "arguments": {}}},
    ]
    assert asked.messages == [
        {"role": "system", "content": "Add.\n\nBe brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "reasoning_content": "a sum", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
        {"role": "assistant", "content": "Two."},
    ]


REFUSED = [
    ({}, "input", "input is missing"),
    ({"input": []}, "input", "input=[] is not text or a list of items"),
    ({"input": "1", "store": True}, "store", "this server keeps no responses; send store false"),
    ({"input": "1", "previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation as input"),
    ({"input": "1", "conversation": "c"}, "conversation", "this server keeps no conversations"),
    ({"input": "1", "background": True}, "background", "background=True is not supported"),
    ({"input": "1", "truncation": "auto"}, "truncation", "truncation='auto' is not supported"),
    ({"input": "1", "tools": [{"type": "web_search"}]}, "tools", "tools[0] of type 'web_search' is not supported; only"),
    ({"input": "1", "tool_choice": "required"}, "tool_choice", "tool_choice='required' without tools"),
    ({"input": "1", "text": {"verbosity": "low"}}, "text", "text.verbosity='low' is not supported"),
    ({"input": "1", "text": {"format": {"type": "xml"}}}, "text", "response_format.type='xml' is not text"),
    ({"input": "1", "include": ["file_search_call.results"]}, "include", "which is not supported"),
    ({"input": "1", "top_logprobs": 3}, "top_logprobs", "top_logprobs is for include=message.output_text.logprobs"),
    ({"input": "1", "reasoning": {"summary": "detailed"}}, "reasoning", "reasoning.summary='detailed' is not supported"),
    ({"input": "1", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens=0 is not a positive integer"),
    ({"input": "1", "max_tokens": 5}, "max_tokens", "max_tokens is not a field of this request"),
    ({"input": "1", "n": 2}, "n", "n is not a field of this request"),
    ({"input": "1", "temperature": 9e99}, "temperature", "temperature="),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input[0].type='item_reference' is not supported"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input", "input[0].role='robot' is not one of user"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input[0].content holds"),
    ({"input": [{"type": "function_call", "name": "x"}]}, "input", "is no call: it needs name, call_id and arguments"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", "input[0].call_id is missing"),
    ({"input": [{"role": ["user"], "content": "x"}]}, "input", "input[0].role=['user'] is not one of user"),
    ({"input": [{"type": "reasoning", "summary": 5}]}, "input[0].summary", "input[0].summary=5 is not a list"),
    ({"input": "1", "metadata": {"a": 1e999}}, "metadata", "cannot be repeated as JSON"),
    ({"input": "1", "user": "\ud800"}, "user", "is not text that UTF-8 can hold"),
    ({"input": "1", "instructions": "\ud800"}, "instructions", "is not text that UTF-8 can hold"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "message"), REFUSED)
def test_what_is_wrong_is_refused_by_name(body, param, message):
    with pytest.raises(BadField) as caught:
        AskedResponse.of(body, SamplingParams())
    assert message in str(caught.value) and caught.value.param == param


def test_what_asks_for_nothing_is_taken(client):
    neutral = {"store": False, "background": False, "truncation": "disabled", "user": "me", "metadata": {"a": "b"},
               "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, "service_tier": "auto",
               "parallel_tool_calls": True, "prompt_cache_key": "k", "text": {"format": {"type": "text"}},
               "extra_body": {"client_metadata": {"session": "1"}}}  # fmt: skip
    answer = ask(client, **neutral)
    assert answer.output_text == "46" and answer.metadata == {"a": "b"} and answer.user == "me"


def test_an_error_ends_a_stream_as_a_failed_response(client, monkeypatch):
    import openai

    from weft.engine import pipeline

    choose = pipeline.choose_tokens
    broken = 4712

    def overflowing(head, logits, choice, kind, **options):
        breaks = (choice.seed == broken) & (choice.position > 6)
        return choose(head, logits.masked_fill(breaks[:, None], float("nan")), choice, kind, **options)

    monkeypatch.setattr(pipeline, "choose_tokens", overflowing)
    last = list(ask(client, stream=True, extra_body={"seed": broken}))[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.code == "server_error" and "not finite" in last.response.error.message
    with pytest.raises(openai.InternalServerError, match="not finite"):
        ask(client, extra_body={"seed": broken})
