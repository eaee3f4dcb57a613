"""Grammars of answers, in Lark's syntax: calls as a model writes them, after reasoning.

A text that is one added token, such as <tool_call>, stands in a grammar by its id: llguidance takes no special token for
its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from weft.serve.parsing.reasoning import Marks
from weft.text.structure import StructuredOutputsParams

# Separators as Python's json and the templates' filter tojson write them: a model that may write any blanks may write no end.
COMPACT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
# Calls of one answer.
MOST_CALLS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Texts around calls; NAME and ARGUMENTS stand for the call's.

    alone   an answer has one call
    answer  text before an answer that is no call
    """

    call: str
    begin: str = ""
    between: str = ""
    end: str = ""
    alone: bool = False
    answer: str = ""


_OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
_JSON = Frame(call=_OBJECT, begin="[", between=", ", end="]")
_DEEPSEEK = Frame(
    begin="<｜tool▁calls▁begin｜>", end="<｜tool▁calls▁end｜>", between="\n",
    call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
)  # fmt: skip
# By parser; the parser "json" reads the calls of a parser that has no frame.
FRAMES = {
    "json": _JSON,
    "hermes": Frame(call=f"<tool_call>\n{_OBJECT}\n</tool_call>", between="\n"),
    "llama3_json": Frame(call='{"name": "NAME", "parameters": ARGUMENTS}', between="; "),
    "mistral": Frame(call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
    "deepseek_v3": _DEEPSEEK,
    "openai": Frame(
        call="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS", alone=True,
        answer="<|channel|>final<|message|>",
    ),
}  # fmt: skip
# Marks around reasoning as a channel.
CHANNEL = Marks("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """Reasoning before an answer.

    opened  the prompt has its begin; otherwise the answer may leave it out
    budget  most tokens of it; None: any number
    """

    begin: str
    end: str
    opened: bool
    budget: int | None = None


class Tokens:
    """Tokens of a tokenizer with a text of their own.

    added    ids by text
    count    of all tokens
    special  ids of the ones that are no text, such as ends of an answer
    """

    def __init__(self, added: Mapping[str, int], count: int, special: Collection[int] = ()) -> None:
        self.added, self.count, self.special = added, count, special
        texts = sorted((text for text in added if text), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None

    def has(self, text: str) -> bool:
        """True if a text begins by an added token."""
        return self._split is not None and self._split.match(text) is not None

    def literal(self, text: str) -> str:
        """Grammar of a text."""
        written = (f"<[{self.added[one]}]>" if one in self.added else _quoted(one) for one in self.parts(text))
        return " ".join(written)

    def without(self, *excluded: int) -> str:
        """Grammar of a token that is none of these."""
        bounds = [-1, *sorted({*excluded}), self.count]
        spans = ((low + 1, high - 1) for low, high in pairwise(bounds) if high - low > 1)
        return f"<[{','.join(f'{low}-{high}' for low, high in spans)}]>"

    def parts(self, text: str) -> list[str]:
        """Added tokens of a text, and the texts between."""
        return [one for one in (self._split.split(text) if self._split else [text]) if one]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def grammar_of(
    tokens: Tokens,
    thinking: Thinking | None,
    frame: Frame | None,
    calls: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    parallel: bool = True,
    answer: str | None = None,
) -> str:
    """Grammar of an answer: reasoning, then calls of these functions or an answer, where both are given.

    calls   schemas of parameters by function; None: no calls
    answer  grammar of an answer that is no call; None: none, or without calls any text; frame: of its form
    """
    rules: list[str] = []
    choices: list[str] = []
    if calls is not None and frame is not None:
        choices.append("calls")
        rules += _calls(tokens, frame, calls, parallel and not frame.alone)
    if answer is not None:
        choices.append("answer")
        rules.append(f"answer: {tokens.literal(frame.answer) if frame else ''} structure")
        rules.append(f"structure: {answer}")
    if not choices:
        choices.append("anything")
        rules += _anything(tokens, thinking, frame)
    think = ""
    if thinking is not None:
        think = "think " if thinking.opened else "think? "
        rules += _thinking(tokens, thinking)
    return "\n".join([f"start: {think}({' | '.join(choices)})", *rules, ""])


def _calls(tokens: Tokens, frame: Frame, calls: Mapping[str, Mapping[str, Any]], several: bool) -> list[str]:
    more = (
        f" ({tokens.literal(frame.between)} call){{0,{MOST_CALLS - 1}}}"
        if frame.between
        else f" call{{0,{MOST_CALLS - 1}}}"
    )
    rules = [f"calls: {tokens.literal(frame.begin)} call{more if several else ''} {tokens.literal(frame.end)}"]
    rules.append("call: " + " | ".join(f"call{index}" for index in range(len(calls))))
    before, after = frame.call.split("ARGUMENTS")
    for index, (name, schema) in enumerate(calls.items()):
        begin, end = tokens.literal(before.replace("NAME", name)), tokens.literal(after)
        rules += [f"call{index}: {begin} arguments{index} {end}", f"arguments{index}: {schema_rule(schema)}"]
    return rules


def _anything(tokens: Tokens, thinking: Thinking | None, frame: Frame | None) -> list[str]:
    """Rules of any answer, which does not begin as the reasoning before it does."""
    rules = [f"token: {tokens.without()}"]
    if thinking is None or thinking.opened:
        return ["anything: token*", *rules]
    if frame is not None and frame.answer:  # a message of another channel
        mark, *_ = tokens.parts(thinking.begin)
        return [f'anything: {tokens.literal(mark)} ("final" | "commentary") token*', *rules]
    first = tokens.added[tokens.parts(thinking.begin)[0]]
    return ["anything: (other token*)?", f"other: {tokens.without(first)}", *rules]


def _thinking(tokens: Tokens, thinking: Thinking) -> list[str]:
    """Rules of reasoning.

    Tokens are counted by a repetition: llguidance takes back no drafts where it counts itself.
    """
    begin = "" if thinking.opened else tokens.literal(thinking.begin)
    times = "*" if thinking.budget is None else f"{{0,{thinking.budget}}}"
    body = "" if thinking.budget == 0 else f"thought{times}"
    end = tokens.added[tokens.parts(thinking.end)[0]]
    rules = [f"think: {begin} {body} {tokens.literal(thinking.end)}"]
    return [*rules, f"thought: {tokens.without(end, *tokens.special)}"] if body else rules


def schema_rule(schema: Mapping[str, Any]) -> str:
    """Grammar of JSON that follows a schema."""
    return f"%json {json.dumps({**schema, **COMPACT})}"


def structure_rule(structure: StructuredOutputsParams) -> str | None:
    """Rule of an answer's structure; None for a grammar, which cannot stand within another."""
    if structure.json is not None or structure.json_object:
        return f"%json {structure.json or json.dumps({'type': 'object'})}"
    if structure.choice is not None:
        return " | ".join(map(_quoted, structure.choice))
    if structure.regex is not None:
        unescaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", structure.regex)
        return f"/{unescaped.replace(chr(10), chr(92) + 'n')}/"
    return None
