"""OpenAI's own client gets answers, streams, usage and errors; what is not supported is refused by name."""

import asyncio
import json
import logging
import math
import re
from types import SimpleNamespace

import pytest

from tests.documents import ROOT
from tests.limits import ANSWER
from tests.serve.conftest import until
from weft.engine import Load
from weft.engine.params import SamplingParams
from weft.engine.snapshots import SnapshotCounts
from weft.engine.speculation.drafting import Speculation
from weft.serve import fields
from weft.serve.app import Service
from weft.serve.choices import Choices
from weft.serve.metrics import Metrics
from weft.serve.options import ServeOptions

LONG = {"max_tokens": 50, "extra_body": {"ignore_eos": True}}


def idle(served):
    return served.llm.load == Load(preemptions=served.llm.load.preemptions)


def test_a_prompt_and_a_conversation_are_answered(client):
    found = client.completions.create(model="adder", prompt="123+456=")
    assert (found.choices[0].text, found.choices[0].finish_reason, found.object) == ("579", "stop", "text_completion")
    assert found.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12,
    }  # fmt: skip
    content = [{"type": "text", "text": "123+456="}]
    chat = client.chat.completions.create(model="adder", messages=[{"role": "user", "content": content}])
    assert chat.choices[0].message.content == "579" and chat.object == "chat.completion"
    cut = client.chat.completions.create(
        model="adder", messages=[{"role": "user", "content": "123+4"}], max_completion_tokens=2,
        extra_body={"chat_template_kwargs": {"suffix": "56="}},
    )  # fmt: skip
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("57", "length")


def test_the_examples_of_the_page_are_answered(served):
    """Those that it sends to the built-in model with curl."""
    import httpx

    found = re.findall(r"(/v1/\S+)[^']*(?:'[A-Z][^']*'[^']*)*-d '(\{.*\})'", (ROOT / "docs/serving.md").read_text())
    assert {path for path, _ in found} == {"/v1/completions", "/v1/chat/completions"}
    for path, body in found:
        answer = httpx.post(served.url + path, content=body, headers={"Content-Type": "application/json"})
        lines = answer.text.removesuffix("data: [DONE]\n\n").split("data: ")
        choices = [choice for line in lines if line for choice in json.loads(line)["choices"]]
        texts = [one.get("text") or one.get("delta", {}).get("content") or "" for one in choices]
        assert answer.status_code == 200 and "".join(texts) == "579", (path, answer.text)


def test_streams_are_the_whole_answer_in_pieces_with_usage_at_the_end(client):
    messages = [{"role": "user", "content": "123+456="}]
    usage = {"include_usage": True}
    *chunks, last = client.chat.completions.create(model="adder", messages=messages, stream=True, stream_options=usage)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "579"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert not last.choices and last.usage.completion_tokens == 4 and chunks[1].usage is None
    pieces = list(client.completions.create(model="adder", prompt=["1+2=", [3, 4]], n=2, stream=True, max_tokens=3))
    texts = ["".join(one.choices[0].text for one in pieces if one.choices[0].index == index) for index in range(4)]
    whole = client.completions.create(model="adder", prompt=["1+2=", [3, 4]], n=2, max_tokens=3)
    assert texts == [choice.text for choice in whole.choices] and texts[0] == texts[1] == "3"


def test_sampling_follows_the_fields_of_a_request(client):
    def texts(**asked):
        return [one.text for one in client.completions.create(model="adder", prompt="7", **asked).choices]

    hot = {"temperature": 2.0, "max_tokens": 6, "n": 2}
    assert texts(**hot, seed=5) == texts(**hot, seed=5) != texts(**hot)
    assert len(set(texts(**hot, seed=5))) == 2
    assert len(set(texts(**hot, extra_body={"top_k": 1}))) == 1
    stopped = client.completions.create(
        model="adder", prompt="123+456=", stop="9", extra_body={"return_token_ids": True}
    )
    assert stopped.choices[0].text == "57" and len(stopped.choices[0].token_ids) == 3


def test_logprobs_have_the_shapes_of_both_endpoints(client):
    found = client.completions.create(model="adder", prompt="123+456=", logprobs=2).choices[0]
    logprobs = found.logprobs
    assert logprobs.tokens[:3] == ["5", "7", "9"] and logprobs.text_offset == [0, 1, 2, 3]
    assert [
        top[token] for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)
    ] == logprobs.token_logprobs
    assert all(len(top) == 2 for top in logprobs.top_logprobs) and max(logprobs.token_logprobs) <= 0
    ask = {"model": "adder", "messages": [{"role": "user", "content": "123+456="}], "logprobs": True, "top_logprobs": 1}
    content = client.chat.completions.create(**ask).choices[0].logprobs.content
    streamed = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**ask, stream=True)]
    assert [one for part in streamed if part for one in part.content] == content
    assert [one.token for one in content[:3]] == ["5", "7", "9"] == [one.top_logprobs[0].token for one in content[:3]]
    assert [one.logprob for one in content] == logprobs.token_logprobs and content[0].bytes == [53]


def test_an_answer_without_a_token_to_choose_is_an_error_of_the_apis_shape(client, served, monkeypatch):
    """Logits that are not finite are the server's error, constraints that exclude all tokens the client's."""
    import httpx
    import openai

    from weft.engine import pipeline

    seed, choose = 4711, pipeline.choose_tokens

    def overflowing(head, logits, choice, kind, **options):
        breaks = (choice.seed == seed) & (choice.position > 6)  # of "123+4=" the answer's second token
        return choose(head, logits.masked_fill(breaks[:, None], math.nan), choice, kind, **options)

    def counted(name):
        lines = httpx.get(f"{served.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"weft:{name}"))

    monkeypatch.setattr(pipeline, "choose_tokens", overflowing)
    before = [counted(name) for name in ("corrupted_requests_total", 'request_success_total{finished_reason="error"')]
    broken = {"prompt": "123+4=", "seed": seed, "logprobs": 2, "max_tokens": 5}
    allowed = {"prompt": "123+4=", "allowed_token_ids": [4], "bad_words": "11", "max_tokens": 5}
    cases = [
        (broken, 500, "server_error", "the model's logits are not finite"),
        (
            allowed,
            400,
            "invalid_request_error",
            "no token is left for place 1 of the answer: allowed_token_ids and bad",
        ),
        (
            {**allowed, "bad_words": "1"},
            400,
            "invalid_request_error",
            "no token can begin the answer: allowed_token_ids",
        ),
    ]
    for asked, status, kind, message in cases:
        answer = httpx.post(f"{served.url}/v1/completions", json=asked, timeout=ANSWER)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (status, kind) and error["message"].startswith(message)
        assert "\n" not in error["message"]
    for asked, *_, message in cases[:2]:
        with httpx.stream(
            "POST", f"{served.url}/v1/completions", json={**asked, "stream": True}, timeout=ANSWER
        ) as stream:
            *chunks, last, done = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        texts = [json.loads(one, parse_constant=pytest.fail)["choices"][0] for one in chunks]
        assert "".join(one["text"] for one in texts) == "1" and texts[-1]["finish_reason"] is None
        assert json.loads(last)["error"]["message"].startswith(message) and done == "[DONE]"
    with pytest.raises(openai.APIError, match="the model's logits are not finite"):
        list(client.completions.create(model="adder", prompt="123+4=", seed=seed, stream=True, max_tokens=5))
    assert client.completions.create(model="adder", prompt="123+456=").choices[0].text == "579"
    until(lambda: idle(served))
    assert counted("corrupted_requests_total") - before[0] == 3
    assert counted('request_success_total{finished_reason="error"') - before[1] == 5


def test_answers_follow_a_structure_and_penalties(client):
    def text(**asked):
        return client.completions.create(model="adder", prompt="123+456=", **asked).choices[0].text

    assert text(extra_body={"structured_outputs": {"choice": ["12", "34"]}}) in ("12", "34")
    schema = {"name": "n", "schema": {"type": "integer", "minimum": 100, "maximum": 200}}
    answer = text(extra_body={"response_format": {"type": "json_schema", "json_schema": schema}})
    assert 100 <= int(answer) <= 200
    assert text(logit_bias={"0": 0}) == "579" and "5" not in text(extra_body={"bad_words": ["5"]})


BODIES = [
    (b"", 400, "the body is not JSON"),
    (b"{", 400, "the body is not JSON"),
    (b"\xff", 400, "the body is not JSON"),
    (b"[" * 20_000, 400, "the body is not JSON"),
    (b'{"prompt": NaN}', 400, "the body is not JSON: NaN is not a number of JSON"),
    (b"[]", 400, "the body is []; send a JSON object"),
    (b"x" * 70_000, 413, "the body has more than 65,536 bytes; send less, or raise --max-body-bytes"),
    ({}, 400, "prompt is missing"),
    ({"prompt": []}, 400, "prompt=[] is empty; send at least one token"),
    ({"prompt": ["1", 2]}, 400, "prompt[1]=2 is not a string or a list of token ids"),
    ({"prompt": [10**30]}, 400, "is a token id outside 0 .. "),
    ({"prompt": "1" * 200}, 400, "prompt has 200 tokens and leaves no room for an answer in max_seq_len=64"),
    ({"prompt": "hello"}, 400, "prompt='hello' has 'h', 'e', 'l', 'o', which this model does not read; it reads + 0 1 2"),
    ({"prompt": "1", "model": "gpt"}, 404, "model 'gpt' is not served; the one that is: adder"),
    ({"prompt": "1", "model": 1}, 400, "model=1 is not a string"),
    ({"prompt": "1", "n": 0}, 400, "n=0 is not an integer in 1 .. 128"),
    ({"prompt": "1", "stream": 1}, 400, "stream=1 is not True or False"),
    ({"prompt": "1", "stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage=1 is not True or False"),
    ({"prompt": "1", "stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x is not supported"),
    ({"prompt": "1", "temperature": "hot"}, 400, "temperature='hot' is not a number"),
    ({"prompt": "1", "max_tokens": -1}, 400, "max_tokens=-1 is not a positive integer"),
    ({"prompt": "1", "max_tokens": 1, "max_completion_tokens": 2}, 400, "max_tokens and max_completion_tokens differ"),
    ({"prompt": "1", "logprobs": 30}, 400, "logprobs=30 is not"),
    ({"prompt": "1", "response_format": {"type": "xml"}}, 400, "response_format.type='xml' is not text, json_object or"),
    ({"prompt": "1", "structured_outputs": {"xml": "x"}}, 400, "structured_outputs: "),
    ({"prompt": "1", "user": 5}, 400, "user=5 is not a string"),
    ({"prompt": "1", "metadata": "x"}, 400, "metadata='x' is not an object"),
    ({"prompt": "1", "client_metadata": "x"}, 400, "client_metadata='x' is not an object"),
    ({"prompt": "1", "store": True}, 400, "store=True is not supported; leave it out"),
    ({"prompt": "1", "bad_words": "\ud800"}, 400, "bad_words is not text that UTF-8 can hold"),
    ({"prompt": "1", "stop": ["1", "\ud800"]}, 400, "stop is not text that UTF-8 can hold"),
    ({"prompt": "1", "\ud800": 1}, 400, "\\ud800 is not a field of this request"),
    ({"prompt": "1", "temprature": 1}, 400, "not a field of this request; leave it out; did you mean temperature?"),
]  # fmt: skip
MESSAGES = [
    ([], "messages=[] is not a list of messages"),
    ([{"content": "x"}], "messages[0]={'content': 'x'} is not an object with a role and content"),
    ([{"role": "user"}], "messages[0].content=None is not text"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content holds {'type': 'image_url'}; only text"),
    ([{"role": "user", "content": "x", "name": 5}], "messages[0].name=5 is not a string"),
    ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls of a message by 'user'; only an"),
    ([{"role": "user", "content": "x", "audio": {}}], "messages[0].audio is not supported; a message has role and"),
    ([{"role": "user", "content": "What?"}], "prompt='What?' has 'W', 'h', 'a', 't', '?', which this model"),
    ([{"role": "system", "content": "x"}], "the chat template refuses these messages: no system messages"),
]  # fmt: skip


def test_bodies_that_are_wrong_are_refused_in_one_line_of_the_apis_shape(served):
    import httpx

    wrong = [("/v1/completions", *one) for one in BODIES]
    wrong += [("/v1/chat/completions", {"messages": one}, 400, message) for one, message in MESSAGES]
    with httpx.Client(base_url=served.url, headers={"Content-Type": "application/json"}) as http:
        for path, body, status, message in wrong:
            answer = http.post(path, content=body if isinstance(body, bytes) else json.dumps(body))
            error = answer.json()["error"]
            assert answer.status_code == status and message in error["message"], (body, error)
            assert error["type"] == "invalid_request_error" and "\n" not in error["message"]
        assert http.post("/v1/completions", content="{}", headers={"Content-Type": "text/plain"}).status_code == 415
        assert http.get("/v1/completions").status_code == 405 and http.get("/x").json()["error"]["param"] is None
        assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 64
        assert http.get("/v1/models/adder").json()["id"] == "adder" and http.get("/v1/models/x").status_code == 404
    assert idle(served)


def test_a_client_that_leaves_within_its_body_is_no_error_in_the_log(served, caplog):
    import socket

    address = served.url.removeprefix("http://").split(":")
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    try:
        with socket.create_connection(address) as end:
            head = "POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", "Content-Length: 9"
            end.sendall("\r\n".join((*head, "", "{")).encode())
            until(lambda: served.server.server_state.tasks)
        until(lambda: not served.server.server_state.tasks)
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == []


def test_neutral_values_of_unsupported_fields_are_taken(client):
    neutral = {name: values[0] for name, values in fields.UNSUPPORTED.items() if values}
    neutral |= {"frequency_penalty": 0, "logit_bias": {}, "logprobs": False, "response_format": {"type": "text"}}
    neutral |= {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "flex", "safety_identifier": "x"}
    neutral |= {"client_metadata": {"session": "1"}}
    neutral |= {"prompt_cache_key": "k", "parallel_tool_calls": True, "stream_options": {"include_usage": True}}
    answer = client.completions.create(model="adder", prompt="123+456=", extra_body=neutral)
    assert answer.choices[0].text == "579" and answer.usage.completion_tokens > 0
    message = {"role": "user", "content": "123+456=", "name": "me", "reasoning_content": "a sum"}
    assert fields.Asked.of({"messages": [message]}, True, SamplingParams()).messages == [message]  # for the template
    chat = client.chat.completions.create(model="adder", messages=[message], extra_body={"tool_choice": "auto"})
    assert chat.choices[0].message.content == "579"


def test_a_client_that_leaves_ends_its_request_and_metrics_count_it(client, served):
    import httpx

    stream = client.completions.create(model="adder", prompt="123+456=", stream=True, n=3, **LONG)
    next(stream)
    stream.close()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{served.url}/v1/completions", json={"prompt": "1", "max_tokens": 60, "ignore_eos": True}, timeout=0.02
        )
    until(lambda: idle(served))
    text = httpx.get(f"{served.url}/metrics").text
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(found['weft:request_success_total{finished_reason="abort",model_name="adder"}']) >= 3
    assert float(found['weft:num_requests_running{model_name="adder"}']) == 0
    assert float(found['weft:generation_tokens_total{model_name="adder"}']) > 0


def test_keys_limits_and_the_end_of_a_server(served, monkeypatch):
    """Its engine is that of `served`, since a process has virtual ranks once."""
    import httpx

    from weft.serve import app, routes

    options = served.service.options
    service = app.Service(served.llm, app.ServeOptions(model_name="adder", api_key="key-ä", max_waiting=1))
    transport = httpx.ASGITransport(routes.create_app(service))
    assert options.api_key is None
    begun = []

    async def sends():
        yield b"{"
        begun.append("a body")
        await asyncio.Event().wait()

    async def renders(messages, variables):
        begun.append("a prompt")
        await asyncio.Event().wait()

    monkeypatch.setattr(served.llm, "chat_prompt", renders)

    async def main():
        async with httpx.AsyncClient(transport=transport, base_url="http://weft") as http:
            codes = []
            for key in ("", "Bearer key", "Bearer key-ä", "Basic key-ä"):
                codes.append((await http.get("/v1/models", headers={"Authorization": key.encode()})).status_code)
            codes.append((await http.get("/health")).status_code)
            key = {"Authorization": "Bearer key-ä".encode()}
            many = await http.post("/v1/completions", json={"prompt": "1", "n": 6}, headers=key)
            service._entering = 4
            more = await http.post("/v1/completions", json={"prompt": "1", "n": 2}, headers=key)
            service._entering = 0
            slashes = await http.post("/v1/completions/", json={"prompt": "1"}, headers={**key, "Host": "elsewhere"})
            codes.append(slashes.status_code)  # no redirect, which would name the host and have the key sent there
            send, chat = {**key, "Content-Type": "application/json"}, [{"role": "user", "content": "1"}]
            posts = (
                http.post("/v1/completions", content=sends(), headers=send),
                http.post("/v1/chat/completions", json={"messages": chat}, headers=key),
            )
            posted = [asyncio.create_task(post) for post in posts]
            while len(begun) < 2:
                await asyncio.sleep(0.001)
            service.stop()
            ended = [await http.post("/v1/completions", json={"prompt": "1"}, headers=key), await http.get("/health")]
            return codes, many, more, [*ended, *[await post for post in posted]]

    codes, many, more, ended = asyncio.run(main())
    assert codes == [401, 401, 200, 401, 200, 404]
    assert many.status_code == 400 and "the server holds 5 at a time; send fewer" in many.json()["error"]["message"]
    assert more.status_code == 503 and more.json()["error"]["code"] == "overloaded" and more.headers["Retry-After"]
    assert [one.json()["error"]["message"] for one in ended] == ["the server is shutting down"] * 4
    assert not service._begun and service._entering == 0


def test_an_answer_that_begins_as_its_client_leaves_is_ended(served):
    """At one step of the loop: the work has ended, and the task that waits for it is cancelled before it goes on."""
    service, ended = Service(served.llm, ServeOptions(model_name="adder")), []
    answer = Choices([SimpleNamespace(end=lambda: ended.append(True))], 1)

    async def work():
        service._answers.add(answer)
        return answer

    async def main():
        waiting = asyncio.create_task(service.unless_stopped(work()))
        await asyncio.sleep(0)
        while not service._answers:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0)

    asyncio.run(main())
    assert ended == [True] and not service._answers


def test_metrics_count_on_after_a_restart_of_the_ranks():
    """Every total of the engine begins again at 0, also where it has grown beyond the last one that was read."""
    load = [Load(preemptions=3, snapshots=SnapshotCounts(saved=5, used=1), speculation=Speculation(4, 9, 6, (6,), 1))]
    metrics = Metrics("adder", lambda: load[0])
    metrics.text()
    load[0] = Load(preemptions=1, snapshots=SnapshotCounts(saved=7, used=0), speculation=Speculation(5, 8, 2, (2,), 1))
    lines = metrics.text().decode().splitlines()
    for name, total in (
        ("num_preemptions", 4), ("state_snapshots_saved", 7), ("state_snapshots_used", 1), ("spec_decode_num_drafts", 5),
        ("spec_decode_num_draft_tokens", 17), ("spec_decode_num_accepted_tokens", 8),
    ):  # fmt: skip
        assert f'weft:{name}_total{{model_name="adder"}} {total}.0' in lines


def test_metrics_count_drafts():
    """Under vLLM's names, since the start, by place in the draft."""
    load = [Load()]
    metrics = Metrics("adder", lambda: load[0])
    for counts in (Speculation(2, 6, 3, (2, 1, 0), 3), Speculation(5, 12, 6, (4, 1, 1), 0)):
        load[0] = Load(speculation=counts)
        lines = metrics.text().decode().splitlines()
    for line in (
        "spec_decode_num_drafts_total{name} 5.0",
        "spec_decode_num_draft_tokens_total{name} 12.0",
        "spec_decode_num_accepted_tokens_total{name} 6.0",
        "spec_decode_draft_length{name} 0.0",
    ):
        assert "weft:" + line.replace("{name}", '{model_name="adder"}') in lines
    for place, count in enumerate((4, 1, 1)):
        labels = f'{{model_name="adder",position="{place}"}}'
        assert f"weft:spec_decode_num_accepted_tokens_per_pos_total{labels} {count}.0" in lines
