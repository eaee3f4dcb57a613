"""Answers as deltas of content, reasoning and calls, and their JSON in a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.engine.answers import Piece
from weft.serve.fields import Asked
from weft.serve.parsing import Parser
from weft.serve.parsing.reading import Delta


class Reply:
    """Reader of one choice of an answer: pieces in, deltas out.

    parser  None: all text is content
    hidden  texts of special tokens that are no part of the answer, by id
    """

    def __init__(self, parser: Parser | None, hidden: dict[int, str], asked: Asked) -> None:
        self._parser, self._hidden = parser, hidden
        self._one = asked.tools is not None and not asked.tools.parallel
        self._reasons, self._silent = asked.include_reasoning, asked.prompt_only

    @property
    def called(self) -> bool:
        """True once there was a call."""
        return self._parser is not None and self._parser.called

    def push(self, pieces: Sequence[Piece]) -> list[Delta]:
        """Deltas of new pieces; the last piece of an answer has its end too."""
        text = "" if self._silent else "".join(self._text(piece) for piece in pieces)
        if self._parser is None:
            return [Delta("content", text)]  # also of an empty text: each event has content
        deltas = self._parser.feed(text, last=pieces[-1].finish_reason is not None)
        return [one for one in deltas if self._is_asked_for(one)]

    def _is_asked_for(self, delta: Delta) -> bool:
        return (self._reasons or delta.kind != "reasoning") and not (self._one and delta.index)

    def _text(self, piece: Piece) -> str:
        text = piece.text or ""
        return text.removesuffix(self._hidden.get(piece.token_id, "")) if piece.token_id is not None else text


def message_of(deltas: Sequence[Delta]) -> dict[str, Any]:
    """Message of a whole answer. Its content is null beside calls alone, as OpenAI's is."""
    said = delta_of(deltas)
    content = said.pop("content", None if "tool_calls" in said else "")
    for call in said.get("tool_calls", ()):
        del call["index"]
    return {"role": "assistant", "content": content, **said}


def delta_of(deltas: Sequence[Delta]) -> dict[str, Any]:
    """New part of a message: texts of deltas, joined by field, and of calls by index."""
    said: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if delta.kind != "call":
            field = "content" if delta.kind == "content" else "reasoning_content"
            said[field] = said.get(field, "") + delta.text
            continue
        call = calls.setdefault(delta.index, {"index": delta.index, "function": {"arguments": ""}})
        if delta.name is not None:
            call |= {"id": delta.id, "type": "function"}
            call["function"] = {"name": delta.name, "arguments": ""}
        call["function"]["arguments"] += delta.text
    return {**said, "tool_calls": list(calls.values())} if calls else said
