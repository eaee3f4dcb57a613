"""Forms in which the served model writes calls and reasoning: parsers, and grammars of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from weft.engine.params import SamplingParams
from weft.errors import CheckpointError
from weft.serve.checks import BadField
from weft.serve.fields import Asked
from weft.serve.parsing import ALIASES, NONE, SPECIAL_MARKS, Parser, marks_of, reasoning_parser_of, tool_parser_of
from weft.serve.parsing.frames import CHANNEL, FRAMES, Frame, Thinking, Tokens, grammar_of, structure_rule
from weft.serve.parsing.reasoning import HARMONY, is_closed, is_open
from weft.serve.reply import Reply
from weft.serve.tools import Tools
from weft.text.chat import template_sources
from weft.text.structure import StructuredOutputsParams

# Tokens at the end of a prompt that say whether it begins or ends reasoning.
PROMPT_END = 16
# In DeepSeek's templates; most write arguments by the filter tojson.
_JOINED_ARGUMENTS = re.compile(r"\+\s*[\w.'\"\[\]]*\barguments\b['\"\]]*\s*\+")
STRUCTURES = "response_format or structured_outputs"


class Prompted(NamedTuple):
    """Reasoning as the end of a prompt leaves it: begun (opened), ended (closed) or neither."""

    opened: bool
    closed: bool


class Dialect:
    """Parsers of a model's answers, by its chat template or by name.

    template   text of all its chat templates
    """

    def __init__(
        self, directory: Path | None, tokenizer: Tokenizer | None, tool_parser: str | None, reasoning_parser: str | None
    ) -> None:
        self._tokenizer, self.template = tokenizer, _template_text(directory)
        self._asked_for = tool_parser is not None
        self.tool_parser = _named(tool_parser, tool_parser_of(self.template))
        self.reasoning_parser = _named(reasoning_parser, reasoning_parser_of(self.template))
        added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        # The whole vocabulary would take 0.1 s to list; added tokens may leave ids out.
        count = 0 if tokenizer is None else max(tokenizer.get_vocab_size(), *(token_id + 1 for token_id in added), 0)
        self._tokens = Tokens({token.content: token_id for token_id, token in added.items()}, count, self._special)

    def variables(self, asked: Asked) -> dict[str, Any]:
        """Variables of the chat template. BadField for a field that the template does not read."""
        variables = dict(asked.variables or {})
        if asked.documents is not None:
            self._check_read("documents", "documents")
            variables["documents"] = asked.documents
        if asked.tools is not None:
            if not self._asked_for:
                self._check_read("tools", "tools")
            variables["tools"] = asked.tools.listed
        if asked.effort is not None:
            if "reasoning_effort" in self.template:
                variables["reasoning_effort"] = asked.effort
            else:
                self._check_read("reasoning_effort", "enable_thinking")
                variables["enable_thinking"] = asked.effort != NONE
        return variables

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages for the template.

        A developer's are the system's where it does not know them, and arguments of calls are text where it joins them to text.
        """
        messages = list(messages)
        if "developer" not in self.template:
            messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
        if _JOINED_ARGUMENTS.search(self.template):
            messages = [_with_text(one) if "tool_calls" in one else one for one in messages]
        return messages

    def params(self, asked: Asked, prompt: Sequence[int]) -> SamplingParams:
        """Parameters of the request, with a grammar where the answer is held to one.

        BadField for what the model's form of answers cannot hold.
        """
        prompted = self._prompted(prompt)
        grammar = self._grammar(asked, None if prompted.closed else self._thinking(asked, prompted.opened))
        params = asked.params
        if grammar is not None:
            params = replace(params, structured_outputs=StructuredOutputsParams(grammar=grammar))
        if any(self._parsers(asked, prompted)) and any(text in SPECIAL_MARKS for text in self._special.values()):
            params = replace(params, skip_special_tokens=False)
        return params

    def reply(self, asked: Asked, prompt: Sequence[int]) -> Reply:
        """Reader of one choice of an answer."""
        if asked.messages is None:
            return Reply(None, {}, asked)
        prompted = self._prompted(prompt)
        calls, reasoning = self._parsers(asked, prompted)
        if calls is None and reasoning is None:
            return Reply(None, {}, asked)
        schemas = {} if asked.tools is None else asked.tools.schemas
        hidden = {} if not asked.params.skip_special_tokens else self._special
        hidden = {token_id: text for token_id, text in hidden.items() if text not in SPECIAL_MARKS}
        return Reply(Parser(calls, reasoning, schemas, opened=prompted.opened), hidden, asked)

    def _prompted(self, prompt: Sequence[int]) -> Prompted:
        marks = marks_of(self.reasoning_parser)
        if marks is None or self._tokenizer is None:
            return Prompted(False, False)
        end = self._tokenizer.decode(list(prompt[-PROMPT_END:]), skip_special_tokens=False)
        return Prompted(is_open(marks, end), is_closed(marks, end))

    def _parsers(self, asked: Asked, prompted: Prompted) -> tuple[str | None, str | None]:
        """Parsers of the answer's calls and of its reasoning; None: it has none."""
        calls = None
        if asked.tools is not None:
            by_grammar = asked.tools.forced or asked.params.structured_outputs is not None
            calls = self._frame()[0] if by_grammar else self.tool_parser
        return calls, None if prompted.closed else self.reasoning_parser

    def _check_read(self, field: str, variable: str) -> None:
        if variable not in self.template:
            raise BadField(f"{field} is not supported by this model: its chat template does not read it", field)

    def _thinking(self, asked: Asked, opened: bool) -> Thinking | None:
        """Reasoning that may stand before the answer, as a grammar has it."""
        marks = CHANNEL if self.reasoning_parser == HARMONY else marks_of(self.reasoning_parser)
        if marks is not None and self._tokens.has(marks.end):
            return Thinking(begin=marks.begin, end=marks.end, opened=opened, budget=asked.thinking_budget)
        if asked.thinking_budget is not None:
            raise BadField(
                "thinking_token_budget is for models that end their reasoning by a special token, with a reasoning parser, and "
                "this one does not; leave it out", "thinking_token_budget",
            )  # fmt: skip
        return None

    def _grammar(self, asked: Asked, thinking: Thinking | None) -> str | None:
        """Grammar of the answer; None where the request's own serves."""
        tools, structure = asked.tools, asked.params.structured_outputs
        forced = tools is not None and bool(tools.forced)
        if forced and structure is not None:
            raise BadField(f"{STRUCTURES} with a tool_choice that forces a call; send one", "tool_choice")
        frame = FRAMES["openai"] if self.reasoning_parser == HARMONY else None
        if structure is None and not forced:
            limited = asked.thinking_budget is not None and thinking is not None
            return grammar_of(self._tokens, thinking, frame) if limited else None
        answer = None
        if tools is not None:
            _, frame = self._frame()
        if structure is not None:
            answer = structure_rule(structure)
            _check_alone(answer, tools, thinking)
            if answer is None or (frame is None and thinking is None):
                return None
        calls, parallel = (None, False) if tools is None else (tools.called, tools.parallel)
        return grammar_of(self._tokens, thinking, frame, calls, parallel=parallel, answer=answer)

    def _frame(self) -> tuple[str, Frame]:
        """Parser and frame of calls that a grammar writes."""
        parser = self.tool_parser
        if parser == "mistral" and "[ARGS]" not in self._tokens.added:
            return parser, replace(FRAMES["json"], begin="[TOOL_CALLS][")
        if parser == "deepseek_v3" and "```json" not in self.template:
            call = "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>"
            return parser, replace(FRAMES[parser], call=call, between="")
        return (parser, FRAMES[parser]) if parser in FRAMES else ("json", FRAMES["json"])


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Message whose calls have their arguments as text."""
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


def _template_text(directory: Path | None) -> str:
    if directory is None:
        return ""
    try:
        return "\n".join(template_sources(directory).values())
    except CheckpointError:
        return ""


def _named(name: str | None, by_template: str | None) -> str | None:
    return by_template if name is None else None if name == NONE else ALIASES.get(name, name)


def _check_alone(answer: str | None, tools: Tools | None, thinking: Thinking | None) -> None:
    """BadField where a request's own grammar has tools or reasoning beside it. answer: else, a rule."""
    if answer is None and (tools is not None or (thinking is not None and thinking.opened)):
        raise BadField(
            "structured_outputs.grammar cannot stand beside tools or after reasoning; send json, regex or choice",
            "structured_outputs",
        )
