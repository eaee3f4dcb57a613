"""State of a server over an AsyncLLM: requests in, responses whole or as streams, errors."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from weft.arguments import quoted, shortened
from weft.engine.answers import Piece
from weft.engine.async_llm import AsyncLLM
from weft.engine.params import SamplingParams, derived
from weft.errors import CheckpointError, RequestCancelled
from weft.runtime.logs import logger_of
from weft.serve.checks import BadField, json_of
from weft.serve.choices import Choices
from weft.serve.dialect import Dialect
from weft.serve.fields import Asked
from weft.serve.metrics import Metrics
from weft.serve.options import ServeOptions
from weft.text.tokenizer import TokenBytes

LONG_BODY_BYTES = 1 << 16
# Of a body's length that Python reads as a number.
MOST_DIGITS = 18
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
    too_long = ApiError(413, f"the body has more than {limit:,} bytes; send less, or raise --max-body-bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > MOST_DIGITS or int(length) > limit):
        raise too_long
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise too_long
    return body


async def read(service: Service, request: Request, fields_of: Callable[[object], T]) -> T:
    """Fields of a request, as `fields_of` takes them from its body. ApiError for a body that is no JSON."""
    body = await service.unless_stopped(body_of(request, service.options.max_body_bytes))

    def decoded() -> T:
        try:
            value = json_of(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {shortened(error)}") from None
        return fields_of(value)

    # In a thread, since a long body takes a while; a thread takes longer than a short one.
    return decoded() if len(body) < LONG_BODY_BYTES else await asyncio.to_thread(decoded)


class Answering(Protocol):
    """An answer while it arrives, as a path of the API sends it."""

    async def whole(self) -> dict[str, Any]:
        """Response once the answer has ended. ApiError where it ends by an error."""
        ...

    def events(self) -> AsyncIterator[str]:
        """Server-sent events of the answer as it grows, an error among them."""
        ...


async def respond(
    service: Service, request: Request, asked: Asked, answer_id: str, begin: Callable[[Choices], Answering]
) -> Response:
    """Response to what is asked, whole or as a stream; `begin` is called with the accepted answer."""
    check_model(service, asked.model)
    try:
        work = service.unless_stopped(service.choices(asked, answer_id))
        answer = await unless_left(request, asyncio.create_task(work))
    except Exception as error:
        raise service.failure(error) from None
    if answer is None:
        return Response(status_code=CLIENT_LEFT)
    answering = begin(answer)
    if asked.stream:
        return EventStream(answering.events(), lambda: service.end(answer))
    try:
        whole = await unless_left(request, asyncio.create_task(answering.whole()))
        if whole is None:
            return Response(status_code=CLIENT_LEFT)
        scored = asked.params.logprobs is not None
        return await asyncio.to_thread(JSONResponse, whole) if scored else JSONResponse(whole)
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


def check_pieces(pieces: list[Piece]) -> None:
    """ApiError if an error has ended the answer of these pieces: it ends the response, as vLLM's do."""
    if (error := pieces[-1].error) is not None:
        if not error.of_request:
            logger.error("a request failed: %s", error.message)
        raise ApiError(400 if error.of_request else 500, error.message)
