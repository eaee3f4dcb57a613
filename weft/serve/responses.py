"""Path /v1/responses: OpenAI's Responses API without state, whole and as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from weft.engine.answers import Piece
from weft.serve import logprobs
from weft.serve.app import ApiError, Service, as_json, check_pieces, read, respond
from weft.serve.choices import Choices
from weft.serve.parsing.reading import Delta
from weft.serve.response_fields import AskedResponse

Event = dict[str, Any]
KINDS = {"content": "message", "reasoning": "reasoning", "call": "function_call"}
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


async def responses(service: Service, request: Request) -> Response:
    """Response to input items, whole or as a stream of events."""
    asked = await read(service, request, lambda body: AskedResponse.of(body, service.llm.defaults))
    response_id = f"resp_{secrets.token_hex(24)}"
    return await respond(
        service, request, asked.asked, response_id, lambda answer: Growing(service, asked, answer, response_id)
    )


class Growing:
    """A response while its answer arrives. Its events and its whole are made alike, so they agree."""

    def __init__(self, service: Service, asked: AskedResponse, answer: Choices, response_id: str) -> None:
        self._service, self._asked, self._answer = service, asked, answer
        self._id, self._created = response_id, int(time.time())
        self._items = Items()
        self._reasoning_tokens = 0

    async def whole(self) -> dict[str, Any]:
        """The response once its answer has ended. ApiError where it ends by an error."""
        async for _ in self._grow():
            pass
        return self._ended()

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events of the response, by OpenAI's names."""
        count = 0

        def sent(event: Event) -> str:
            nonlocal count
            text = f"event: {event['type']}\ndata: {as_json({**event, 'sequence_number': count})}\n\n"
            count += 1
            return text

        for name in ("response.created", "response.in_progress"):
            yield sent({"type": name, "response": self._json("in_progress")})
        try:
            async for event in self._grow():
                yield sent(event)
            ended = self._ended()
        except Exception as error:
            ended = self._failed(self._service.failure(error))
        yield sent({"type": f"response.{ended['status']}", "response": ended})

    async def _grow(self) -> AsyncIterator[Event]:
        """Events of the output's items, as pieces arrive."""
        asked = self._asked.asked
        reply = self._service.dialect.reply(asked, self._answer.choices[0].request.prompt)
        reason = None
        async for _, pieces in self._answer.arrivals():
            check_pieces(pieces)
            for piece in pieces:
                deltas = reply.push([piece])
                self._reasoning_tokens += bool(deltas) and all(one.kind == "reasoning" for one in deltas)
                for event in self._items.take(deltas, self._scores(piece)):
                    yield event
            reason = pieces[-1].finish_reason or reason
        for event in self._items.end(cut=reason == "length"):
            yield event

    def _scores(self, piece: Piece) -> list[dict[str, Any]]:
        """Log-probabilities of a token, if they are asked for."""
        top = self._asked.asked.params.logprobs
        if top is None or piece.token_id is None:
            return []
        return logprobs.of_chat([piece], top, self._service.token_bytes)["content"]

    def _ended(self) -> dict[str, Any]:
        return self._json("incomplete" if self._items.cut else "completed")

    def _failed(self, error: ApiError) -> dict[str, Any]:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        return {**self._json("failed"), "error": {"code": code, "message": error.message}}

    def _json(self, status: str) -> dict[str, Any]:
        usage = None
        if status != "in_progress":
            tokens = self._answer.usage()
            usage = {
                "input_tokens": tokens["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": tokens["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
                "total_tokens": tokens["total_tokens"],
            }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._asked.asked.model or self._service.options.model_name,
            "output": self._items.done,
            "usage": usage,
            **self._asked.repeated,
        }


class Items:
    """Items of a response's output: messages, reasoning and function calls, from deltas of the answer.

    done  items that have ended
    cut   the answer has ended at its longest
    """

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self.cut = False
        self._item: dict[str, Any] | None = None  # that grows
        self._call = 0  # index of its call, 0 of other items
        self._text, self._scored = "", []

    def take(self, deltas: Sequence[Delta], scores: list[dict[str, Any]]) -> Iterator[Event]:
        """Yield the events of new deltas.

        scores  log-probabilities of their token, which go with the text of a message
        """
        for delta in deltas:
            kind = KINDS[delta.kind]
            another = (
                self._item is None
                or self._item["type"] != kind
                or (kind == "function_call" and delta.index != self._call)
            )
            if another and not delta.text and delta.name is None:
                continue
            if another:
                yield from self._close("completed")
                yield from self._open(kind, delta)
            if not delta.text:
                continue
            self._text += delta.text
            event = {"type": f"response.{_named(kind)}.delta", **self._at(), "delta": delta.text}
            if kind == "message":
                event["logprobs"] = scores
                self._scored += scores
            yield event

    def end(self, *, cut: bool) -> Iterator[Event]:
        """Yield the events of the answer's end."""
        self.cut = cut
        if self._item is None and not self.done:
            yield from self._open("message", None)
        yield from self._close("incomplete" if cut else "completed")

    def _open(self, kind: str, delta: Delta | None) -> Iterator[Event]:
        self._text, self._scored, self._call = "", [], 0 if delta is None else delta.index
        item: dict[str, Any] = {
            "id": f"{PREFIXES[kind]}_{secrets.token_hex(24)}",
            "type": kind,
            "status": "in_progress",
        }
        if kind == "function_call":
            item |= {"call_id": delta.id, "name": delta.name, "arguments": ""}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"role": "assistant", "content": []}
        self._item = item
        yield {"type": "response.output_item.added", "output_index": len(self.done), "item": dict(item)}
        if kind != "function_call":
            yield {"type": "response.content_part.added", **self._at(), "part": self._part()}

    def _close(self, status: str) -> Iterator[Event]:
        """Yield the events of the end of the item that grows, if there is one."""
        if (item := self._item) is None:
            return
        kind = item["type"]
        done = {"type": f"response.{_named(kind)}.done", **self._at()}
        if kind == "function_call":
            item["arguments"] = self._text
            yield {**done, "arguments": self._text, "name": item["name"]}
        else:
            item["content"] = [self._part()]
            yield {**done, "text": self._text, **({"logprobs": self._scored} if kind == "message" else {})}
            yield {"type": "response.content_part.done", **self._at(), "part": self._part()}
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.done), "item": item}
        self.done.append(item)
        self._item = None

    def _at(self) -> dict[str, Any]:
        """Place of the item that grows, in an event."""
        at = {"item_id": self._item["id"], "output_index": len(self.done)}
        return at if self._item["type"] == "function_call" else {**at, "content_index": 0}

    def _part(self) -> dict[str, Any]:
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": self._scored}


def _named(kind: str) -> str:
    """Name of an item's text in events."""
    return {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}[kind]
