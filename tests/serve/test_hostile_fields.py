"""Fields of every path take any JSON: a body is read, or refused by a message that names a field."""

import copy
import json

import pytest

from weft.engine.params import SamplingParams
from weft.serve import embeddings, fields, response_fields, tokens
from weft.serve.app import ApiError
from weft.serve.checks import BadField

NESTED = ["x"]
for _ in range(200):
    NESTED = [NESTED]
VALUES = (
    None, True, 0, -1, 0.5, 1e999, 10**400, "", "x", "\ud800", [], [0], ["x"], {}, {"x": 1}, {"type": "x"}, NESTED,
)  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Add.", "parameters": SCHEMA, "strict": True}
ALLOWED = {"type": "function", "function": {"name": "add"}, "name": "add"}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
DEFAULTS = SamplingParams()
SAMPLING = {
    "temperature": 1, "top_p": 1, "top_k": 1, "min_p": 0, "presence_penalty": 0, "logit_bias": {"5": 1}, "bad_words": ["a"],
    "allowed_token_ids": [1], "seed": 1, "stop": ["a"], "stop_token_ids": [1], "min_tokens": 0, "ignore_eos": False,
    "cache_salt": "a", "user": "me", "metadata": {"a": "b"},
}  # fmt: skip
# Functions that read a body, and bodies of which each value is replaced.
PATHS = {
    "chat": (
        lambda body: fields.Asked.of(body, True, DEFAULTS),
        {
            **SAMPLING, "model": "m", "n": 1, "stream": True, "stream_options": {"include_usage": True},
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "1"}], "name": "me"},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "so"},
                {"role": "tool", "content": "1", "tool_call_id": "c"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [ALLOWED]}},
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 5, "documents": [{"a": 1}], "reasoning_effort": "low",
            "thinking_token_budget": 5, "include_reasoning": True, "chat_template_kwargs": {"a": 1},
        },
        {
            "messages": [{"role": "user", "content": "1"}], "tools": [ALLOWED],
            "tool_choice": {"type": "allowed_tools", "tools": [ALLOWED]},
        },
    ),
    "completions": (
        lambda body: fields.Asked.of(body, False, DEFAULTS),
        {
            **SAMPLING, "prompt": ["1", "2"], "echo": True, "logprobs": 1, "max_tokens": 5,
            "structured_outputs": {"choice": ["a"]},
        },
        {"prompt": [1, 2], "structured_outputs": {"json": SCHEMA}},
    ),
    "responses": (
        lambda body: response_fields.AskedResponse.of(body, DEFAULTS),
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}], "content": [{"text": "b"}]},
                {"type": "function_call", "name": "add", "call_id": "c", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [ALLOWED]},
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}, "reasoning": {"effort": "low"},
            "instructions": "Add.", "include": ["message.output_text.logprobs"], "top_logprobs": 1, "max_output_tokens": 5,
            "metadata": {"a": {"b": ["c"]}}, "user": "me", "parallel_tool_calls": True, "temperature": 1,
        },
    ),
    "embeddings": (
        embeddings.AskedVectors.of,
        {"input": ["1", "2"], "encoding_format": "base64", "dimensions": 2, "pooling": "last", "user": "a", "cache_salt": "a"},
        {"input": [[1, 2], [3]]},
    ),
    "tokenize": (
        tokens._tokenized_fields,
        {"prompt": "1", "model": "m", "return_token_strs": True},
        {"messages": [{"role": "user", "content": "1"}], "chat_template_kwargs": {"a": 1}},
    ),
    "detokenize": (tokens._detokenized_fields, {"tokens": [1, 2], "model": "m"}),
}  # fmt: skip


def places(value, at=()):
    """Path of every value within, its own first."""
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*at, key))


def with_value(body, at, value):
    if not at:
        return value
    body = copy.deepcopy(body)
    inner = body
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return body


@pytest.mark.parametrize("path", PATHS)
def test_any_json_in_place_of_any_value_is_read_or_refused(path):
    read, *bodies = PATHS[path]
    for body in bodies:
        taken = 0
        for at in places(body):
            for value in VALUES:
                try:
                    asked = read(with_value(body, at, value))
                    taken += 1
                except (BadField, ApiError) as error:
                    assert str(error) and "\n" not in str(error)
                else:
                    if path == "responses":  # these fields are sent back
                        json.dumps(asked.repeated, allow_nan=False, ensure_ascii=False).encode()
        assert taken
