"""Paths /v1/chat/completions and /v1/completions: answers whole and as events, and `echo`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from tokenizers import Tokenizer

from weft.engine.answers import Piece
from weft.engine.params import Prompt, SamplingParams
from weft.serve import logprobs
from weft.serve.app import Service, as_json, check_pieces, read, respond
from weft.serve.choices import REASONS, Choices
from weft.serve.fields import Asked
from weft.serve.parsing.reading import Delta
from weft.serve.reply import Reply, delta_of, message_of
from weft.text.stream import TextStream, token_texts
from weft.text.tokenizer import TokenBytes


def _text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Names by which an endpoint's answers differ.

    whole, part  one choice as JSON: of an answer, from all its deltas; of a stream, from new ones
    first        JSON of a choice before its first piece; None: there is none
    logprobs     JSON of the log-probabilities of pieces, by (pieces, likeliest tokens, bytes of tokens)
    """

    prefix: str
    object: str
    chunk: str
    whole: Callable[[Sequence[Delta]], dict[str, Any]]
    part: Callable[[Sequence[Delta]], dict[str, Any]]
    first: dict[str, Any] | None
    logprobs: Callable[[list[Piece], int, TokenBytes | None], dict[str, Any]]


CHAT = Shape(
    prefix="chatcmpl",
    object="chat.completion",
    chunk="chat.completion.chunk",
    whole=lambda deltas: {"message": message_of(deltas)},
    part=lambda deltas: {"delta": delta_of(deltas)},
    first={"delta": {"role": "assistant", "content": ""}},
    logprobs=logprobs.of_chat,
)
COMPLETION = Shape(
    prefix="cmpl",
    object="text_completion",
    chunk="text_completion",
    whole=lambda deltas: {"text": _text(deltas)},
    part=lambda deltas: {"text": _text(deltas)},
    first=None,
    logprobs=logprobs.of_completion,
)


async def complete(service: Service, request: Request, shape: Shape) -> Response:
    """Response to a request to complete a conversation or prompts."""
    asked = await read(service, request, lambda body: Asked.of(body, shape is CHAT, service.llm.defaults))
    answer_id = f"{shape.prefix}-{secrets.token_hex(12)}"

    def begin(answer: Choices) -> Completing:
        return Completing(service, asked, shape, answer, answer_id)

    return await respond(service, request, asked, answer_id, begin)


class Completing:
    """A completion of a conversation or of prompts while it arrives."""

    def __init__(self, service: Service, asked: Asked, shape: Shape, answer: Choices, answer_id: str) -> None:
        self._service, self._asked, self._shape, self._answer = service, asked, shape, answer
        model = asked.model or service.options.model_name
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}

    async def whole(self) -> dict[str, Any]:
        """The completion once its answer has ended. ApiError where it ends by an error."""
        pieces: list[list[Piece]] = [[] for _ in self._answer.choices]
        async for index, arrived in self._answer.arrivals():
            check_pieces(arrived)
            pieces[index] += arrived
        choices = []
        for index, ones in enumerate(pieces):
            prompt = self._answer.choices[index].request.prompt
            reply = self._service.dialect.reply(self._asked, prompt)
            given = index, self._shape.whole(reply.push(ones)), ones, reply
            # In a thread with log-probabilities, of which a long answer has many; a thread takes longer than a short one.
            scored = self._asked.params.logprobs is not None
            choice = await asyncio.to_thread(self._choice, *given) if scored else self._choice(*given)
            if self._asked.echo:
                choice = await self._echoed(index, choice, ones[0])
            if self._asked.return_token_ids:
                choice["prompt_token_ids"] = list(prompt)
            choices.append(choice)
        return {**self._head, "object": self._shape.object, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        """Events of the answer as it grows, an error among them."""
        rest = {"usage": None} if self._asked.include_usage else {}

        def event(choices: list[dict[str, Any]]) -> str:
            content = {**self._head, "object": self._shape.chunk, "choices": choices, **rest}
            return f"data: {as_json(content)}\n\n"

        try:
            replies = [
                self._service.dialect.reply(self._asked, choice.request.prompt) for choice in self._answer.choices
            ]
            for index in range(len(replies) if self._shape.first else 0):
                yield event([self._choice(index, self._shape.first, [])])
            unbegun = {*range(len(replies))} if self._asked.echo else set()
            async for index, pieces in self._answer.arrivals():
                reply = replies[index]
                deltas = reply.push(pieces)
                says_tokens = self._asked.return_token_ids or self._asked.params.logprobs is not None
                if not (deltas or says_tokens or pieces[-1].finish_reason):
                    continue
                choice = self._choice(index, self._shape.part(deltas), pieces, reply)
                if index in unbegun:
                    unbegun.remove(index)
                    choice = await self._echoed(index, choice, pieces[0])
                yield event([choice])
                check_pieces(pieces)
            if self._asked.include_usage:
                rest = {"usage": self._usage()}
                yield event([])
        except Exception as error:
            yield f"data: {as_json(self._service.failure(error).content)}\n\n"
        yield "data: [DONE]\n\n"

    def _choice(
        self, index: int, content: dict[str, Any], pieces: list[Piece], reply: Reply | None = None
    ) -> dict[str, Any]:
        """JSON of a choice, or of its newest pieces. reply: which read them."""
        asked, service = self._asked, self._service
        choice = {"index": index, **content, "logprobs": None, "finish_reason": None}
        if pieces:
            choice["finish_reason"] = REASONS.get(pieces[-1].finish_reason)
            if choice["finish_reason"] == "stop" and reply is not None and reply.called:
                choice["finish_reason"] = "tool_calls"
            pieces = [piece for piece in pieces if piece.token_id is not None and not asked.prompt_only]
            if asked.params.logprobs is not None:
                choice["logprobs"] = self._shape.logprobs(pieces, asked.params.logprobs, service.token_bytes)
            if asked.return_token_ids:
                choice["token_ids"] = [piece.token_id for piece in pieces]
        return choice

    async def _echoed(self, index: int, choice: dict[str, Any], first: Piece) -> dict[str, Any]:
        """JSON of a choice with its prompt before it."""
        asked, service = self._asked, self._service
        tokens, prompt = self._answer.choices[index].request.prompt, asked.prompts[index // asked.n]
        # In a thread, since a long prompt takes a while.
        echo = await asyncio.to_thread(Echo.of, prompt, tokens, asked.params, service.llm.tokenizer)
        return echo.begin(choice, first, asked.params.logprobs, service.token_bytes)

    def _usage(self) -> dict[str, int]:
        """Tokens of prompts and answers."""
        usage = self._answer.usage()
        if self._asked.prompt_only:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """Prompt of a choice as its client gets it.

    text     as it was sent; of token ids their text; "" without a tokenizer
    tokens   its token ids
    offsets  characters of the text before each token
    """

    text: str
    tokens: Sequence[int]
    offsets: Sequence[int]

    @classmethod
    def of(cls, prompt: Prompt, tokens: Sequence[int], params: SamplingParams, tokenizer: Tokenizer | None) -> Echo:
        """Echo of a prompt with these token ids."""
        if tokenizer is None:
            return cls(text="", tokens=tokens, offsets=[0] * len(tokens))
        keep = not params.skip_special_tokens
        stream = TextStream(tokenizer, keep_special=keep, alone=token_texts(tokenizer, keep_special=keep))
        text, offsets = "", []
        for token in tokens:
            offsets.append(stream.length)
            text += stream.push(token)[0]
        text += stream.finish()[0]
        return cls(text=prompt if isinstance(prompt, str) else text, tokens=tokens, offsets=offsets)

    def begin(self, choice: dict[str, Any], first: Piece, top: int | None, names: TokenBytes | None) -> dict[str, Any]:
        """JSON of a choice, or of its first pieces, with the prompt before it.

        first  piece of the answer, with the prompt's log-probabilities where they are asked for
        top    number of likeliest tokens beside each; None: no log-probabilities are asked for
        """
        choice = {**choice, "text": self.text + choice["text"]}
        if top is None or first.prompt_logprobs is None:
            return choice
        likely = zip(self.tokens[1:], first.prompt_logprobs[1:], self.offsets[1:], strict=True)
        scored = [Piece(0, None, token, logprobs=one, offset=offset) for token, one, offset in likely]
        of_prompt = logprobs.of_completion(scored, top, names)
        # Nothing predicts the first token.
        unscored = {"tokens": logprobs.token_text(self.tokens[0], names), "text_offset": 0}
        answer = choice["logprobs"]
        answer["text_offset"] = [len(self.text) + offset for offset in answer["text_offset"]]
        joined = {name: [unscored.get(name), *of_prompt[name], *answer[name]] for name in of_prompt}
        return {**choice, "logprobs": joined}
