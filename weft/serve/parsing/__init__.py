"""Parsers of what models write: reasoning and tool calls, as deltas of a growing text."""

from __future__ import annotations

from weft.serve.parsing.calls import READERS, Schemas, json_calls, openai
from weft.serve.parsing.reading import Delta, Output, Reading, Text, call_id, short_id
from weft.serve.parsing.reasoning import HARMONY, MARKS, Marks, read_reasoning

# Texts that only the chat templates of a format have, the surest first.
_OF_CALLS = {
    "openai": ("<|channel|>",),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>",),
    "mistral": ("[TOOL_CALLS]",),
    "glm45": ("<arg_key>",),
    "qwen3_coder": ("<function=",),
    "hermes": ("<tool_call>",),
    "llama3_json": ("<|python_tag|>", "ipython"),
}
_OF_REASONING = {
    HARMONY: ("<|channel|>",), "mistral": ("[THINK]",), "glm45": ("<arg_key>",), "deepseek_r1": ("<｜Assistant｜><think>",),
    "qwen3": ("</think>",),
}  # fmt: skip
# Marks that are special tokens of some models, which then have text for their sake.
SPECIAL_MARKS = frozenset((
    "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>", "<|python_tag|>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
))  # fmt: skip
NONE = "none"
# vLLM's further names of parsers that read the same here.
ALIASES = {"deepseek_v31": "deepseek_v3", "glm47": "glm45", "qwen3_xml": "qwen3_coder"}


def tool_parsers() -> tuple[str, ...]:
    """Names of the parsers of tool calls."""
    return (*READERS, *ALIASES)


def reasoning_parsers() -> tuple[str, ...]:
    """Names of the parsers of reasoning."""
    return (*MARKS, HARMONY)


def tool_parser_of(template: str) -> str | None:
    """Parser of the calls that a model with this chat template writes."""
    return _first(_OF_CALLS, template)


def reasoning_parser_of(template: str) -> str | None:
    """Parser of the reasoning that a model with this chat template writes."""
    return _first(_OF_REASONING, template)


def _first(marks: dict[str, tuple[str, ...]], template: str) -> str | None:
    return next((name for name, texts in marks.items() if any(text in template for text in texts)), None)


class Parser:
    """Parser of one answer: text in, deltas out.

    calls      name of tool_parsers, "json" for calls that a grammar writes as a list; None: calls stay content
    reasoning  name of reasoning_parsers; None: reasoning stays content
    schemas    of the functions' parameters, by function
    opened     the prompt has begun the reasoning
    """

    def __init__(
        self, calls: str | None, reasoning: str | None, schemas: Schemas | None = None, *, opened: bool = False
    ) -> None:
        self._text = Text()
        self._output = Output(short_id if calls == "mistral" else call_id)
        self._reading = self._read(calls, reasoning, schemas or {}, opened)
        self._over = False
        self._step()

    @property
    def called(self) -> bool:
        return self._output.calls > 0

    def feed(self, text: str, *, last: bool = False) -> list[Delta]:
        """Deltas that new text makes. last: no more comes."""
        self._text.rest += text
        self._text.ended = last
        self._step()
        if last:
            self._output.finish()
        return self._output.draw()

    def _step(self) -> None:
        if not self._over:
            try:
                next(self._reading)
            except StopIteration:
                self._over = True

    def _read(self, calls: str | None, reasoning: str | None, schemas: Schemas, opened: bool) -> Reading[None]:
        text, output = self._text, self._output
        if calls == "openai" or reasoning == HARMONY:
            yield from openai(text, output, schemas if calls == "openai" else None)
            return
        if reasoning is not None:
            yield from read_reasoning(text, output, MARKS[reasoning], opened)
        if calls is not None:
            yield from (json_calls if calls == "json" else READERS[calls])(text, output, schemas)
        yield from text.until((), output.content)


def marks_of(reasoning: str | None) -> Marks | None:
    """Marks around the reasoning of a parser; None where it is a channel."""
    return MARKS.get(reasoning or "")
