"""Fields of a request to /v1/responses as a conversation: messages, tools, text formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.arguments import check_int, quoted, shortened
from weft.engine.params import SamplingParams
from weft.serve.checks import BadField, a_text, an_object, checked, given_of, of_type, refuse
from weft.serve.conversation import text_of
from weft.serve.fields import NOT_OF_THE_MODEL, SAMPLING, Asked
from weft.text.chat import as_json

# Fields that a conversation has by the same name; sampling parameters beside OpenAI's, as of vLLM.
AS_OF_CHAT = {
    "model", "temperature", "top_p", "stream", "parallel_tool_calls", "chat_template_kwargs", "include_reasoning",
    "thinking_token_budget", "structured_outputs", *SAMPLING, *NOT_OF_THE_MODEL,
} - {"max_tokens", "max_completion_tokens"}  # fmt: skip
OWN = ("include", "input", "instructions", "max_output_tokens", "reasoning", "text", "tool_choice", "tools",
       "top_logprobs")  # fmt: skip
# Fields of the API that are not supported, with values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "context_management": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "truncation": ("disabled",),
}
REMEDIES = {
    "store": "this server keeps no responses; send store false, and the whole conversation as input each time",
    "previous_response_id": "this server keeps no responses; send the whole conversation as input",
    "conversation": "this server keeps no conversations; send all items as input",
}
LOGPROBS = "message.output_text.logprobs"
# Of `include`: asks for nothing of a model whose reasoning is plain text.
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
# Fields of a conversation by the names that they have here, for errors.
NAMES_HERE = {"messages": "input", "response_format": "text", "max_completion_tokens": "max_output_tokens",
              "reasoning_effort": "reasoning"}  # fmt: skip
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXTS = ("input_text", "output_text", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedResponse:
    """A request for a response: the conversation that it asks about, and what its answer repeats of it."""

    asked: Asked
    repeated: dict[str, Any]

    @classmethod
    def of(cls, body: object, defaults: SamplingParams) -> AskedResponse:
        """Fields of a decoded JSON body. BadField for any that is wrong, unknown or not supported."""
        given = given_of(body)
        for name, value in given.items():
            if name not in AS_OF_CHAT and name not in OWN:
                if name in REMEDIES and value not in NEUTRAL[name]:
                    raise BadField(f"{name}={quoted(value)}: {REMEDIES[name]}", name)
                refuse(name, value, NEUTRAL, (*AS_OF_CHAT, *OWN))
        if "input" not in given:
            raise BadField("input is missing", "input")
        chat: dict[str, Any] = {name: given[name] for name in given if name in AS_OF_CHAT}
        chat["messages"] = _messages(given["input"], checked("instructions", a_text, given.get("instructions")))
        if (most := given.get("max_output_tokens")) is not None:
            chat["max_completion_tokens"] = checked("max_output_tokens", lambda name, n: check_int(name, n, 1), most)
        chat |= _tools(given) | _text_format(given.get("text")) | _reasoning(given.get("reasoning")) | _logprobs(given)
        try:
            asked = Asked.of(chat, True, defaults)
        except BadField as error:
            raise BadField(str(error), NAMES_HERE.get(error.param, error.param)) from None
        repeated = _repeated(given, asked)
        for name, value in repeated.items():
            checked(name, _check_sendable, value)
        return cls(asked=asked, repeated=repeated)


def _repeated(given: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """Fields of a response that repeat its request."""
    text = given.get("text") or {}
    reasoning = given.get("reasoning") or {}
    return {
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": given.get("metadata") or {},
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": False,
        "temperature": asked.params.temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_logprobs": given.get("top_logprobs", 0),
        "top_p": asked.params.top_p,
        "truncation": "disabled",
        "user": given.get("user"),
    }


def _check_sendable(name: str, value: object) -> None:
    """ValueError for what a response cannot repeat, though a request can hold it."""
    try:
        json.dumps(as_json(name, value), allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}={quoted(value)} is not text that UTF-8 can hold") from None
    except ValueError as error:
        raise ValueError(f"{name}={quoted(value)} cannot be repeated as JSON: {error}") from None


def _messages(value: object, instructions: str | None) -> list[dict[str, Any]]:
    """Messages of a conversation by its input items, instructions first."""
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise BadField(f"input={quoted(value)} is not text or a list of items", "input")
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    reasoning: list[str] = []  # of the answer that follows
    for index, item in enumerate(items):
        at = f"input[{index}]"
        if not isinstance(item, dict):
            raise BadField(f"{at}={quoted(item)} is not an item", "input")
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning.append(_reasoning_text(at, item))
        elif kind == "function_call":
            _add_call(at, item, messages, reasoning)
        elif kind == "function_call_output":
            messages.append(_output(at, item))
        elif kind == "message":
            _add_message(at, item, messages, reasoning)
        else:
            raise BadField(
                f"{at}.type={quoted(kind)} is not supported; send messages, function calls and outputs", "input"
            )
    return messages


def _add_message(at: str, item: Mapping[str, Any], messages: list[dict[str, Any]], reasoning: list[str]) -> None:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadField(f"{at}.role={quoted(role)} is not one of {', '.join(ROLES)}", "input")
    message = {"role": ROLES[role], "content": text_of(f"{at}.content", item.get("content"), TEXTS)}
    if role == "assistant":
        _add_reasoning(message, reasoning)
    if messages and message["role"] == "system" == messages[-1]["role"]:  # many templates take one
        messages[-1]["content"] += f"\n\n{message['content']}"
    else:
        messages.append(message)


def _add_call(at: str, item: Mapping[str, Any], messages: list[dict[str, Any]], reasoning: list[str]) -> None:
    """Add a call to the answer that it is a part of."""
    name, arguments, call_id = (
        checked(f"{at}.{key}", a_text, item.get(key)) for key in ("name", "arguments", "call_id")
    )
    if not name or not call_id:
        raise BadField(f"{at}={quoted(item)} is no call: it needs name, call_id and arguments", "input")
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or reasoning:
        last = {"role": "assistant", "content": None}
        _add_reasoning(last, reasoning)
        messages.append(last)
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}
    last.setdefault("tool_calls", []).append(call)


def _add_reasoning(message: dict[str, Any], reasoning: list[str]) -> None:
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
        reasoning.clear()


def _output(at: str, item: Mapping[str, Any]) -> dict[str, Any]:
    call_id = checked(f"{at}.call_id", a_text, item.get("call_id"))
    if not call_id:
        raise BadField(f"{at}.call_id is missing: it says which call this is the output of", "input")
    return {"role": "tool", "tool_call_id": call_id, "content": text_of(f"{at}.output", item.get("output"), TEXTS)}


def _reasoning_text(at: str, item: Mapping[str, Any]) -> str:
    parts = [
        part for key in ("summary", "content") for part in checked(f"{at}.{key}", of_type(list), item.get(key)) or ()
    ]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise BadField(f"{at}={quoted(item)} is no reasoning: its summary and content are lists of text", "input")
    return "\n".join(part["text"] for part in parts)


def _tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """Tools and tool_choice in a conversation's form."""
    tools, choice = given.get("tools"), given.get("tool_choice")
    checked("tools", of_type(list), tools)
    for index, tool in enumerate(tools or ()):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = quoted(tool.get("type") if isinstance(tool, dict) else tool)
            raise BadField(f"tools[{index}] of type {kind} is not supported; only functions are", "tools")
    fields = "name", "description", "parameters", "strict"
    chat: dict[str, Any] = {}
    if tools is not None:
        chat["tools"] = [
            {"type": "function", "function": {key: tool[key] for key in fields if key in tool}} for tool in tools
        ]
    return chat if choice is None else {**chat, "tool_choice": _tool_choice(choice)}


def _tool_choice(choice: object) -> object:
    """tool_choice in a conversation's form."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        named = [
            {"type": "function", "function": {"name": one.get("name") if isinstance(one, dict) else None}}
            for one in choice["tools"]
        ]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": named}}
    return choice


def _text_format(text: object) -> dict[str, Any]:
    """Structure of the answer, as response_format."""
    if text is None:
        return {}
    checked("text", an_object, text)
    for name, value in text.items():
        if name not in ("format", "verbosity") or (name == "verbosity" and value not in (None, "medium")):
            raise BadField(f"text.{shortened(name)}={quoted(value)} is not supported; leave it out", "text")
    if (form := text.get("format")) is None:
        return {}
    checked("text.format", an_object, form)
    if form.get("type") == "json_schema":
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}}
    return {"response_format": {"type": form.get("type")}}


def _reasoning(reasoning: object) -> dict[str, Any]:
    if reasoning is None:
        return {}
    checked("reasoning", an_object, reasoning)
    for name, value in reasoning.items():
        if name != "effort" and not (name in ("summary", "generate_summary") and value in (None, "auto")):
            raise BadField(f"reasoning.{shortened(name)}={quoted(value)} is not supported; leave it out", "reasoning")
    return {} if reasoning.get("effort") is None else {"reasoning_effort": reasoning["effort"]}


def _logprobs(given: Mapping[str, Any]) -> dict[str, Any]:
    include = checked("include", of_type(list), given.get("include")) or []
    for one in include:
        if one not in INCLUDED:
            raise BadField(f"include holds {quoted(one)}, which is not supported; leave it out", "include")
    top = given.get("top_logprobs")
    if LOGPROBS not in include:
        if top:
            raise BadField(f"top_logprobs is for include={LOGPROBS}; send it too, or leave it out", "top_logprobs")
        return {}
    return {"logprobs": True} if top is None else {"logprobs": True, "top_logprobs": top}
