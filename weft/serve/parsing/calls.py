"""Readers of the tool calls that models write, by the names that vLLM has for them.

A call that is none, since what follows its mark has no function's name, stays content as it is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from weft.serve.checks import json_of
from weft.serve.parsing.reading import BLANKS, Output, Reading, Text, call_object

# Schemas of the functions' parameters, by function.
Schemas = Mapping[str, Mapping[str, Any]]
Reader = Callable[[Text, Output, Schemas], Reading[None]]


def hermes(text: Text, output: Output, schemas: Schemas) -> Reading[None]:
    """Read <tool_call>{"name": …, "arguments": {…}}</tool_call> among content."""
    while (mark := (yield from text.until(("<tool_call>",), output.content))) is not None:
        yield from _object_or_content(text, output, mark, "</tool_call>")


def llama3_json(text: Text, output: Output, schemas: Schemas) -> Reading[None]:
    """Read {"name": …, "parameters": {…}}, several parted by ";", which are the whole answer."""
    tag = yield from text.begins(("<|python_tag|>",))
    while (yield from text.peek()) == "{":
        if not (yield from _object_or_content(text, output, tag or "", ";")):
            break
        tag = None
    else:
        if tag is not None:
            output.content(tag)
    yield from text.until((), output.content)


def mistral(text: Text, output: Output, schemas: Schemas) -> Reading[None]:
    """Read [TOOL_CALLS]name[ARGS]{…}, perhaps with [CALL_ID], or [TOOL_CALLS] and a list of objects."""
    mark = "[TOOL_CALLS]"
    while (yield from text.until((mark,), output.content)) is not None:
        text.begin_record()
        begun = output.calls
        if (yield from text.begins(("[",))) is not None:
            while (yield from call_object(text, output)):
                if (yield from text.begins((",", "]"))) != ",":
                    break
        elif (yield from text.blanks()) == "{":
            yield from call_object(text, output)
        else:
            name, mark_after = yield from text.word(("[ARGS]", "[CALL_ID]", "{", mark))
            if mark_after == "[CALL_ID]":
                _, mark_after = yield from text.word(("[ARGS]",))
            if mark_after == "{":
                text.rest = "{" + text.rest
            if _is_name(name) and mark_after in ("[ARGS]", "{"):
                output.call(name.strip())
                yield from text.value(output.arguments)
        _content_unless_called(text, output, begun, mark)


def deepseek_v3(text: Text, output: Output, schemas: Schemas) -> Reading[None]:
    """Read the calls of DeepSeek V3 and R1, with a JSON block, and of V3.1, with JSON alone."""
    opening, begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    closing, separator = "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"
    while (mark := (yield from text.until((opening, begin, closing), output.content))) is not None:
        if mark != begin:
            continue
        text.begin_record()
        begun = output.calls
        name, after = yield from text.word((separator, end))
        if after == separator and (yield from text.blanks()) != "{":
            name, after = yield from text.word(("\n", end))
            yield from text.begins(("```json",))
        if _is_name(name) and after not in (None, end):
            output.call(name.strip())
            yield from text.value(output.arguments)
        _content_unless_called(text, output, begun, mark)
        if output.calls > begun:
            yield from text.begins(("```",))
            yield from text.begins((end,))


def qwen3_coder(text: Text, output: Output, schemas: Schemas) -> Reading[None]:
    """Read <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>.

    The outer tag may be missing.
    """
    while (mark := (yield from text.until(("<tool_call>", "<function="), output.content))) is not None:
        text.begin_record()
        begun, inner = output.calls, None
        if mark == "<tool_call>":
            inner = yield from text.begins(("<function=",))
        if mark == "<function=" or inner is not None:
            name, _ = yield from text.word((">",))
            if _is_name(name):
                arguments = _Arguments(output, name.strip(), schemas)
                while (yield from text.begins(("<parameter=",))) is not None:
                    key, after = yield from text.word((">",))
                    if after is None or not (yield from arguments.read(text, key, "</parameter>")):
                        break
                yield from text.begins(("</function>",))
                arguments.end()
        _content_unless_called(text, output, begun, mark)
        if output.calls > begun:
            yield from text.begins(("</tool_call>",))


def glm45(text: Text, output: Output, schemas: Schemas) -> Reading[None]:
    """Read <tool_call>NAME<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>."""
    end = "</tool_call>"
    while (mark := (yield from text.until(("<tool_call>",), output.content))) is not None:
        text.begin_record()
        begun = output.calls
        name, after = yield from text.word(("<arg_key>", end))
        if _is_name(name):
            arguments = _Arguments(output, name.strip(), schemas)
            while after == "<arg_key>":
                key, _ = yield from text.word(("</arg_key>",))
                if not key or (yield from text.begins(("<arg_value>",))) is None:
                    break
                if not (yield from arguments.read(text, key, "</arg_value>")):
                    break
                after = yield from text.begins(("<arg_key>", end))
            arguments.end()
        _content_unless_called(text, output, begun, mark)


def openai(text: Text, output: Output, schemas: Schemas | None) -> Reading[None]:
    """Read gpt-oss's messages: analysis is reasoning, one with a recipient a call, all else content.

    schemas  None: calls are content
    """
    ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
    first = yield from text.begins(("<|channel|>", "<|start|>", "<|message|>"))
    if first is None:
        yield from text.until((), output.content)
        return
    text.rest = first + text.rest
    while True:
        parts: list[str] = []
        if (yield from text.until(("<|message|>",), parts.append)) is None:
            return
        header = "".join(parts)
        recipient = re.search(r"to=(?:functions\.)?([^\s<]+)", header)
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        if recipient and schemas is not None:
            output.call(recipient[1])
            if (yield from text.begins(ends)) is not None:
                output.arguments("{}")
                continue
            if (yield from text.peek()) == "{":
                yield from text.value(output.arguments)
                yield from text.until(ends, lambda _: None)
            else:
                yield from text.until(ends, output.arguments)
        elif channel and channel[1] == "analysis":
            output.begin_reasoning()
            yield from text.until(ends, output.reasoning)
            output.end_reasoning()
        else:
            yield from text.until(ends, output.content)


def json_calls(text: Text, output: Output, schemas: Schemas) -> Reading[None]:
    """Read [{"name": …, "arguments": {…}}, …], as a grammar writes it."""
    yield from text.begins(("[",))
    while (yield from call_object(text, output)):
        if (yield from text.begins((",", "]"))) != ",":
            break
    yield from text.until((), lambda _: None)


# In the order in which a chat template is searched for a mark that only templates of this format have.
READERS: dict[str, Reader] = {
    "openai": openai,
    "deepseek_v3": deepseek_v3,
    "mistral": mistral,
    "glm45": glm45,
    "qwen3_coder": qwen3_coder,
    "hermes": hermes,
    "llama3_json": llama3_json,
}


class _Arguments:
    """Arguments of a call as a JSON object, from values that are written without quotes.

    A value whose schema says string becomes a string, piece by piece, and so does what is no JSON; all else stays as written.
    """

    def __init__(self, output: Output, name: str, schemas: Schemas) -> None:
        self._output, self._count, self._cut = output, 0, False
        properties = schemas.get(name, {}).get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        output.call(name)

    def read(self, text: Text, key: str, end: str) -> Reading[bool]:
        """Read a value up to its end mark. False where the text ends before."""
        key, parts = key.strip(), list[str]()
        self._output.arguments(("{" if not self._count else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._count += 1
        is_string = _is_string(self._properties.get(key))
        written = _Quoted(self._output.arguments).write if is_string else parts.append
        self._cut = (yield from text.until((end,), written)) is None
        if not self._cut:
            self._output.arguments('"' if is_string else _as_json("".join(parts)))
        return not self._cut

    def end(self) -> None:
        """End the object, unless the text has ended within a value."""
        if not self._cut:
            self._output.arguments("}" if self._count else "{}")


class _Quoted:
    """Pieces of a JSON string, without one newline at the begin and one at the end of its text."""

    def __init__(self, pass_on: Callable[[str], None]) -> None:
        self._pass_on, self._held, self._begun = pass_on, "", False
        pass_on('"')

    def write(self, text: str) -> None:
        if not self._begun and text:
            self._begun, text = True, text.removeprefix("\n")
        text = self._held + text
        kept = text.removesuffix("\n")
        self._held = text[len(kept) :]
        self._pass_on(json.dumps(kept, ensure_ascii=False)[1:-1])


def _is_name(name: str) -> bool:
    return re.fullmatch(r"[^\s<>{}\[\]\"']+", name.strip()) is not None


def _is_string(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _as_json(value: str) -> str:
    value = value.strip(BLANKS)
    try:
        json_of(value)
        return value
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)


def _object_or_content(text: Text, output: Output, mark: str, end: str) -> Reading[bool]:
    """Read a call and its end mark. False where it is none: then it is content, with the mark before it."""
    text.begin_record()
    begun = output.calls
    yield from call_object(text, output)
    _content_unless_called(text, output, begun, mark)
    if output.calls > begun:
        yield from text.begins((end,))
    return output.calls > begun


def _content_unless_called(text: Text, output: Output, begun: int, mark: str) -> None:
    """Give out what was recorded after a mark, with it, where no call came of it."""
    read = text.end_record()
    if output.calls == begun:
        output.content(mark + read)
