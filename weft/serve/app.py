"""OpenAI's API over an AsyncLLM: answers whole and as streams, errors."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from weft.arguments import quoted, shortened
from weft.engine.answers import Piece
from weft.engine.async_llm import AsyncLLM
from weft.engine.params import SamplingParams, derived
from weft.errors import CheckpointError, RequestCancelled
from weft.runtime.logs import logger_of
from weft.serve import logprobs
from weft.serve.checks import BadField
from weft.serve.choices import REASONS, Choices
from weft.serve.dialect import Dialect
from weft.serve.echo import Echo
from weft.serve.fields import Asked
from weft.serve.metrics import Metrics
from weft.serve.options import ServeOptions
from weft.serve.parsing.reading import Delta
from weft.serve.reply import Reply, delta_of, message_of
from weft.text.tokenizer import TokenBytes

LONG_BODY_BYTES = 1 << 16
# Between the seeds of two requests: odd, unlike the strides between prompts and between answers of one.
SEED_STRIDE = 0xBF58476D1CE4E5B9
# Status of a request whose client has left, as in the log of nginx.
CLIENT_LEFT = 499
as_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
logger = logger_of(__name__)
T = TypeVar("T")


class ApiError(Exception):
    """Answer of OpenAI's shape to a request that is not served."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        # JSON can hold half of a surrogate pair, which a message repeats and UTF-8 cannot hold.
        message, param = (text and text.encode("utf-8", "backslashreplace").decode() for text in (message, param))
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def content(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Service:
    """State of a server: its engine, its metrics, and the answers that are being computed."""

    def __init__(self, llm: AsyncLLM, options: ServeOptions) -> None:
        self.llm, self.options = llm, options
        if options.model_name in self.adapters:
            raise ValueError(f"the model and an adapter are both named {quoted(options.model_name)}; rename one")
        self.metrics = Metrics(options.model_name, lambda: llm.load)
        self.created = int(time.time())
        self.token_bytes = None if llm.tokenizer is None else TokenBytes(llm.tokenizer)
        self.dialect = Dialect(llm.directory, llm.tokenizer, options.tool_call_parser, options.reasoning_parser)
        self._answers: set[Choices] = set()
        self._restarts = int(options.restart)  # that are left
        self._restarting: threading.Thread | None = None
        self._seeded = 0  # requests that have got a seed
        self._entering = 0  # choices that the engine has not accepted yet
        self._begun: set[asyncio.Task[Any]] = set()  # whose answers have not begun
        self._stopping = False

    def stop(self) -> None:
        """End all answers with an error, and refuse further requests. In the server's event loop."""
        self._stopping = True
        for answer in list(self._answers):
            answer.end()
        for task in self._begun:
            task.cancel()

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of work before an answer. ApiError if the server stops meanwhile, which cancels the work."""
        task = asyncio.create_task(work)
        self._begun.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            task.add_done_callback(self._end_unheard)  # it may have ended a moment ago
            self.check_ready()
            raise
        finally:
            self._begun.discard(task)
            task.cancel()

    def _end_unheard(self, task: asyncio.Task[Any]) -> None:
        """End an answer that nothing waits for any more."""
        if not task.cancelled() and task.exception() is None and isinstance(answer := task.result(), Choices):
            self.end(answer)

    def check_ready(self) -> None:
        """ApiError where no request can be served."""
        if self._restarting is not None or (self.llm.error is not None and self._restarts):
            raise ApiError(503, "the engine has failed and starts again; try again later", code="restarting")
        if self.llm.error is not None:
            raise ApiError(500, "the engine has failed, and the server ends; its log has the reason")
        if self._stopping:
            raise ApiError(503, "the server is shutting down", code="shutting_down")

    def recovers(self) -> bool:
        """True while the engine answers, or starts again after an error, which this begins."""
        if self._restarting is not None:
            if self._restarting.is_alive():
                return True
            self._restarting = None
        if self.llm.error is None:
            return True
        if not self._restarts:
            return False
        self._restarts -= 1
        logger.error("a rank has failed, and all ranks start again: %s", self.llm.error)
        # Not of asyncio's threads, whose end a signal would wait for.
        self._restarting = threading.Thread(target=self._restart, name="weft restart", daemon=True)
        self._restarting.start()
        return True

    def _restart(self) -> None:
        try:
            self.llm.restart()
        except Exception as error:
            logger.error("the ranks did not start again: %s", error)

    async def choices(self, asked: Asked, answer_id: str) -> Choices:
        """Submit what a request asks for. ApiError where it cannot be served."""
        self.check_ready()
        count = asked.n * (len(asked.prompts) or 1)
        active = self._entering + sum(len(answer.choices) for answer in self._answers)
        if count > self.most_requests:
            raise ApiError(
                400,
                f"this request has {count} answers, and the server holds {self.most_requests} at a time; send fewer",
            )
        if active + count > self.most_requests:
            raise ApiError(503, f"{active} requests run or wait; try again later", code="overloaded")
        self._entering += count
        try:
            prompts, params = asked.prompts, asked.params
            if asked.messages is not None:
                prompts = [await self.chat_prompt(asked.messages, self.dialect.variables(asked))]
                held = asked, prompts[0]
                # In a thread, since grammars of many tools take a while to write.
                params = (
                    await asyncio.to_thread(self.dialect.params, *held) if asked.tools else self.dialect.params(*held)
                )
            params = replace(self._with_seed(params), lora=self.adapter_of(asked.model))
            answer = await Choices.of(self.llm, prompts, params, asked.n, answer_id, self.metrics)
        except BadField as error:
            raise ApiError(400, shortened(error, 1000), error.param) from None
        except ValueError as error:
            self.check_ready()  # otherwise it may be the engine's end
            forced = asked.tools is not None and asked.tools.forced
            message = str(error).replace("structured_outputs:", "tools, as a grammar:", 1) if forced else str(error)
            raise ApiError(400, shortened(message, 1000), "tools" if forced else None) from None
        finally:
            self._entering -= count
        self._answers.add(answer)
        if self._stopping:
            self.end(answer)
        return answer

    @property
    def most_requests(self) -> int:
        """Number of requests that run or wait at most."""
        return self.llm.config.max_batch + self.options.max_waiting

    @property
    def adapters(self) -> list[str]:
        """Names of adapters, which requests send as their model."""
        return list(self.llm.config.lora or ())

    def adapter_of(self, model: str | None) -> str | None:
        """Adapter that a request's model names; None: the model itself."""
        return model if model in self.adapters else None

    def _with_seed(self, params: SamplingParams) -> SamplingParams:
        """The parameters, with a seed that follows from the server's where they have none."""
        if params.seed is not None or self.options.seed is None:
            return params
        self._seeded += 1
        return replace(params, seed=derived(self.options.seed, self._seeded, SEED_STRIDE))

    async def chat_prompt(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any] | None) -> list[int]:
        """Token ids of a conversation. ValueError where the chat template refuses it, ApiError without one."""
        try:
            return await self.llm.chat_prompt(self.dialect.messages(messages), variables)
        except CheckpointError:  # its text names folders of this machine
            raise ApiError(400, "the model has no chat template; send text to /v1/completions") from None

    def reply(self, asked: Asked, prompt: Sequence[int]) -> Reply:
        """Reader of one choice of an answer to this prompt."""
        return self.dialect.reply(asked, prompt)

    def end(self, answer: Choices) -> None:
        """Forget an answer, and cancel what of it has not ended."""
        answer.end()
        self._answers.discard(answer)

    def failure(self, error: BaseException) -> ApiError:
        """Error to report where an answer ends by `error`."""
        if isinstance(error, ApiError):
            return error
        try:
            self.check_ready()
        except ApiError as reason:
            return reason
        if isinstance(error, RequestCancelled):
            return ApiError(CLIENT_LEFT, str(error))
        logger.error("a request failed", exc_info=error)
        return ApiError(500, "the request failed; the server's log has the reason")


class EventStream(StreamingResponse):
    """Server-sent events of an answer, which ends with the response, however that ends."""

    def __init__(self, events: AsyncIterator[str], end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:  # the server ends, and the client does not read: no error for the log
            pass
        finally:  # a client may have left before the first event was drawn
            self._end()


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


def check_model(service: Service, name: str | None) -> None:
    """ApiError for a model that is not served; None: any."""
    served = [service.options.model_name, *service.adapters]
    if name is not None and name not in served:
        which = "the one that is" if len(served) == 1 else "served are"
        raise ApiError(
            404, f"model {quoted(name)} is not served; {which}: {', '.join(served)}", "model", "model_not_found"
        )


async def body_of(request: Request, limit: int) -> bytearray:
    """Body of a request. ApiError for one that is too long or says that it is no JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which no page of another site can send unasked
        raise ApiError(415, f"content-type {quoted(kind)} is not application/json; send JSON")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise ApiError(413, f"the body has more than {limit:,} bytes; send less, or raise --max-body-bytes")
    return body


async def read(service: Service, request: Request, fields_of: Callable[[object], T]) -> T:
    """Fields of a request, as `fields_of` takes them from its body. ApiError for a body that is no JSON."""
    body = await service.unless_stopped(body_of(request, service.options.max_body_bytes))

    def decoded() -> T:
        try:
            value = json.loads(body, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {shortened(error)}") from None
        return fields_of(value)

    # In a thread, since a long body takes a while; a thread takes longer than a short one.
    return decoded() if len(body) < LONG_BODY_BYTES else await asyncio.to_thread(decoded)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


async def answer_to(service: Service, request: Request, shape: Shape) -> Response:
    """Response to a request to complete a conversation or prompts."""
    asked = await read(service, request, lambda body: Asked.of(body, shape is CHAT, service.llm.defaults))
    check_model(service, asked.model)
    answer_id = f"{shape.prefix}-{secrets.token_hex(12)}"
    try:
        answer = await unless_left(
            request, asyncio.create_task(service.unless_stopped(service.choices(asked, answer_id)))
        )
    except Exception as error:
        raise service.failure(error) from None
    if answer is None:
        return Response(status_code=CLIENT_LEFT)
    head = {"id": answer_id, "created": int(time.time()), "model": asked.model or service.options.model_name}
    if asked.stream:
        events = _events(service, answer, asked, shape, {**head, "object": shape.chunk})
        return EventStream(events, lambda: service.end(answer))
    try:
        choices = await unless_left(request, asyncio.create_task(_whole(service, answer, asked, shape)))
        if choices is None:
            return Response(status_code=CLIENT_LEFT)
        return JSONResponse({**head, "object": shape.object, "choices": choices, "usage": _usage(answer, asked)})
    except Exception as error:
        raise service.failure(error) from None
    finally:
        service.end(answer)


async def unless_left(request: Request, work: asyncio.Task[Any]) -> Any:
    """Result of a task; None if the client leaves before it is there, which cancels it."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(left())
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        leaving.cancel()
        work.cancel()


async def _whole(service: Service, answer: Choices, asked: Asked, shape: Shape) -> list[dict[str, Any]]:
    """Choices of an answer that is sent at once."""
    pieces: list[list[Piece]] = [[] for _ in answer.choices]
    async for index, arrived in answer.arrivals():
        check_pieces(arrived)
        pieces[index] += arrived
    choices = []
    for index, ones in enumerate(pieces):
        prompt = answer.choices[index].request.prompt
        reply = service.reply(asked, prompt)
        choice = _choice(service, index, shape, shape.whole(reply.push(ones)), ones, asked, reply)
        if asked.echo:
            choice = await _echoed(service, answer, asked, index, choice, ones[0])
        if asked.return_token_ids:
            choice["prompt_token_ids"] = list(prompt)
        choices.append(choice)
    return choices


async def _events(
    service: Service, answer: Choices, asked: Asked, shape: Shape, head: dict[str, Any]
) -> AsyncIterator[str]:
    """Events of an answer that is sent as it grows, an error among them."""
    rest = {"usage": None} if asked.include_usage else {}

    def event(choices: list[dict[str, Any]]) -> str:
        return f"data: {as_json({**head, 'choices': choices, **rest})}\n\n"

    try:
        replies = [service.reply(asked, choice.request.prompt) for choice in answer.choices]
        for index in range(len(answer.choices) if shape.first else 0):
            yield event([_choice(service, index, shape, shape.first, [], asked)])
        unbegun = {*range(len(answer.choices))} if asked.echo else set()
        async for index, pieces in answer.arrivals():
            reply = replies[index]
            deltas = reply.push(pieces)
            says_tokens = asked.return_token_ids or asked.params.logprobs is not None
            if not (deltas or says_tokens or pieces[-1].finish_reason):
                continue
            choice = _choice(service, index, shape, shape.part(deltas), pieces, asked, reply)
            if index in unbegun:
                unbegun.remove(index)
                choice = await _echoed(service, answer, asked, index, choice, pieces[0])
            yield event([choice])
            check_pieces(pieces)
        if asked.include_usage:
            rest = {"usage": _usage(answer, asked)}
            yield event([])
    except Exception as error:
        yield f"data: {as_json(service.failure(error).content)}\n\n"
    yield "data: [DONE]\n\n"


async def _echoed(
    service: Service, answer: Choices, asked: Asked, index: int, choice: dict[str, Any], first: Piece
) -> dict[str, Any]:
    """JSON of a choice with its prompt before it."""
    tokens, prompt = answer.choices[index].request.prompt, asked.prompts[index // asked.n]
    # In a thread, since a long prompt takes a while.
    echo = await asyncio.to_thread(Echo.of, prompt, tokens, asked.params, service.llm.tokenizer)
    return echo.begin(choice, first, asked.params.logprobs, service.token_bytes)


def _usage(answer: Choices, asked: Asked) -> dict[str, int]:
    """Tokens of prompts and answers."""
    usage = answer.usage()
    if asked.prompt_only:
        return {"prompt_tokens": usage["prompt_tokens"], "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
    return usage


def check_pieces(pieces: list[Piece]) -> None:
    """ApiError if an error has ended the answer of these pieces: it ends the response, as vLLM's do."""
    if (error := pieces[-1].error) is not None:
        if not error.of_request:
            logger.error("a request failed: %s", error.message)
        raise ApiError(400 if error.of_request else 500, error.message)


def _text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def _choice(
    service: Service,
    index: int,
    shape: Shape,
    content: dict[str, Any],
    pieces: list[Piece],
    asked: Asked,
    reply: Reply | None = None,
) -> dict[str, Any]:
    """JSON of a choice, or of its newest pieces. reply: which read them."""
    choice = {"index": index, **content, "logprobs": None, "finish_reason": None}
    if pieces:
        choice["finish_reason"] = REASONS.get(pieces[-1].finish_reason)
        if choice["finish_reason"] == "stop" and reply is not None and reply.called:
            choice["finish_reason"] = "tool_calls"
        pieces = [piece for piece in pieces if piece.token_id is not None and not asked.prompt_only]
        if asked.params.logprobs is not None:
            choice["logprobs"] = shape.logprobs(pieces, asked.params.logprobs, service.token_bytes)
        if asked.return_token_ids:
            choice["token_ids"] = [piece.token_id for piece in pieces]
    return choice
