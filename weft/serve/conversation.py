"""Messages of a conversation in OpenAI's form, as the chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from weft.arguments import quoted, shortened
from weft.serve.checks import BadField

# Texts of a message beside role and content, which the chat template may use.
OF_TEMPLATES = ("name", "reasoning", "reasoning_content", "tool_call_id")
MOST_CALLS = 512


def messages_of(value: object) -> list[dict[str, Any]]:
    """Messages for the chat template. BadField for ones that are none, or hold more than text and calls."""
    if not isinstance(value, list) or not value:
        raise BadField(f"messages={quoted(value)} is not a list of messages", "messages")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadField(f"{name}={quoted(message)} is not an object with a role and content", "messages")
    for key, value in message.items():
        if key not in ("role", "content", "tool_calls", *OF_TEMPLATES) and value not in (None, []):
            raise BadField(f"{name}.{shortened(key)} is not supported; a message has role and content", "messages")
    beside: dict[str, Any] = {key: message[key] for key in OF_TEMPLATES if message.get(key) is not None}
    for key, value in beside.items():
        if not isinstance(value, str):
            raise BadField(f"{name}.{key}={quoted(value)} is not a string", "messages")
    if calls := message.get("tool_calls"):
        beside["tool_calls"] = _calls(f"{name}.tool_calls", calls, message["role"])
    content = message.get("content")
    if content is None and message["role"] == "assistant" and beside.keys() - {"name"}:
        content = ""  # an answer that is calls, or reasoning, alone
    return {"role": message["role"], "content": text_of(f"{name}.content", content), **beside}


def text_of(name: str, content: object, types: Collection[str] = ("text",)) -> str:
    """Text of a message, also from parts of these types. BadField, of the field in `name`, for all else."""
    field = name.partition("[")[0]
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") not in types or not isinstance(part.get("text"), str):
                raise BadField(f"{name} holds {quoted(part)}; only text is supported", field)
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadField(f"{name}={quoted(content)} is not text or a list of parts", field)
    return content


def _calls(name: str, calls: object, role: str) -> list[dict[str, Any]]:
    """Calls of an answer, their arguments as objects: templates write them by their own rules."""
    if role != "assistant":
        raise BadField(f"{name} of a message by {quoted(role)}; only an assistant's message has calls", "messages")
    if not isinstance(calls, list) or len(calls) > MOST_CALLS:
        raise BadField(f"{name}={quoted(calls)} is not a list of at most {MOST_CALLS} calls", "messages")
    return [_call(f"{name}[{index}]", call) for index, call in enumerate(calls)]


def _call(name: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadField(f"{name}={quoted(call)} is not a call of a function", "messages")
    arguments = function.get("arguments")
    if not isinstance(arguments, (str, dict, type(None))):
        raise BadField(f"{name}.function.arguments={quoted(arguments)} is not JSON text", "messages")
    if not isinstance(call_id := call.get("id", ""), (str, type(None))):
        raise BadField(f"{name}.id={quoted(call_id)} is not a string", "messages")
    known = {"type": "function", "function": {"name": function["name"], "arguments": _arguments(arguments)}}
    return {"id": call_id, **known} if call_id else known


def _arguments(arguments: str | dict[str, Any] | None) -> Any:
    """Arguments as an object; text that is none, as a model may write, stays text."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
