"""Inference for an asyncio program: requests come, stream and are cancelled while it runs."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from os import PathLike
from typing import Any

from weft.arguments import check_heap_bytes, quoted
from weft.engine.answers import Completion, Load, Piece, join_pieces
from weft.engine.config import EngineConfig, watchers_of
from weft.engine.engine import Engine
from weft.engine.loop import Processes
from weft.engine.params import Prompt, SamplingParams, plain_prompt
from weft.engine.ranks import Placement, VirtualRanks
from weft.errors import RequestCancelled, WeftError
from weft.models import DecoderConfig
from weft.models.checkpoint import Checkpoint, Progress
from weft.runtime.early import EarlyProcesses
from weft.text.chat import ChatTemplate, Message
from weft.text.grammars import GrammarGuard
from weft.text.structure import StructuredOutputsParams
from weft.text.tokenizer import PromptReader, check_room, has_tokenizer, load_tokenizer


class TokenIds(list[int]):
    """Token ids of a prompt that has been checked."""


class Request:
    """A request that an AsyncLLM answers: an asynchronous iterator of its pieces.

    id      given to `submit`, or chosen by it
    prompt  token ids

    Iterate in the event loop that submitted it. `cancel` may be called from any thread. Pieces are kept until they are drawn.
    """

    def __init__(self, llm: AsyncLLM, number: int, request_id: str, prompt: Sequence[int]) -> None:
        self.id, self.prompt = request_id, prompt
        self._llm, self._number = llm, number
        self._loop, self._arrived = asyncio.get_running_loop(), asyncio.Queue[Sequence[Piece] | BaseException]()
        self._accepted: asyncio.Future[None] = self._loop.create_future()

    def cancel(self) -> None:
        """Remove the request from the batch; drawing then raises RequestCancelled.

        One that has ended stays as it is.
        """
        self._llm._cancel(self)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        async for pieces in self.arrivals():
            for piece in pieces:
                yield piece

    async def arrivals(self) -> AsyncIterator[list[Piece]]:
        """Yield the pieces that have arrived since the last ones were drawn, at least one each time."""
        last = False
        while not last:
            pieces: list[Piece] = []
            while not pieces or not self._arrived.empty():
                one = await self._arrived.get()
                if isinstance(one, BaseException):
                    raise one
                pieces += one
            last = pieces[-1].finish_reason is not None
            yield pieces

    def _take(self, arrived: Sequence[Piece] | BaseException | None) -> None:
        """Take what has arrived, in the loop of the request; None: the engine has accepted it."""
        if not self._accepted.done():
            if isinstance(arrived, BaseException):
                self._accepted.set_exception(arrived)
                return
            self._accepted.set_result(None)
        if arrived is not None:
            self._arrived.put_nowait(arrived)


class AsyncLLM:
    """Inference over several GPUs for an asyncio program; arguments as for LLM.

        llm = weft.AsyncLLM("path/of/Qwen3-32B", world_size=4)
        async for piece in llm.stream("The weft is", weft.SamplingParams(max_tokens=100)):
            print(piece.text, end="")
        llm.close()

    A request joins the running batch at the next step, and a cancelled one leaves it at the next step. Event loops of several
    threads may submit requests. Without requests the ranks sleep. Ranks on GPUs run in the processes of `early`
    (weft.runtime.early), if there are some.

    The first error of a rank ends all requests: each raises it, as does every further one, and `error` holds it. WeftError
    under torchrun, since this process starts the ranks. While an AsyncLLM has virtual ranks, its process can start no more.
    """

    def __init__(
        self,
        model: str | PathLike[str] | DecoderConfig | None = None,
        world_size: int | None = None,
        *,
        device: str = "auto",
        heap_bytes: int | None = None,
        progress: Progress | None = None,
        warm_up_progress: Progress | None = None,
        config: EngineConfig | None = None,
        early: EarlyProcesses | None = None,
        **options: object,
    ) -> None:
        watchers = watchers_of(progress, warm_up_progress)
        config, heap_bytes = EngineConfig.of(config, options), check_heap_bytes(heap_bytes)
        placed = Placement.of(model, world_size, device, config)
        if placed.torchrun:
            raise WeftError("AsyncLLM starts a process per GPU itself; run it without torchrun")
        self.world_size, self.device, self.directory = placed.world_size, placed.device, placed.directory
        self.config, self.max_seq_len = config, config.max_seq_len or placed.longest
        self.defaults, self.tokenizer = placed.defaults, None
        self.load, self.error = Load(), None
        self._template: ChatTemplate | None = None
        self._guard: GrammarGuard | None = None  # once a request has a grammar
        self._numbers = count()
        self._requests: dict[int, Request] = {}
        self._lock = threading.Lock()  # of `_requests` and `error`
        kind = Processes if self.device == "cuda" else VirtualRanks
        make = partial(Engine, placed.source, config=config)
        self._start = partial(kind, self.world_size, make, heap_bytes, watchers, self._take)
        start = self._start if early is None or kind is VirtualRanks else partial(self._start, early=early)
        has_text = self.directory is not None and has_tokenizer(self.directory)
        # The ranks wait for no tokenizer, which takes 0.5 s where it has 150,000 tokens.
        beside = ThreadPoolExecutor(1, "weft tokenizer")
        tokenizer = beside.submit(load_tokenizer, self.directory) if has_text else None
        beside.shutdown(wait=False)
        try:
            self._ranks: Processes | VirtualRanks = start()
        except Exception:
            if tokenizer is not None:
                tokenizer.result()  # ranks read it too: its own error says more than theirs
            raise
        try:
            if tokenizer is not None:
                self.tokenizer = tokenizer.result()
                self._reader = PromptReader(self.tokenizer, self.max_seq_len)
        except BaseException:
            self._ranks.close()
            raise

    async def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Request:
        """Submit a request, and wait until the engine has accepted it.

        prompt      text or a list of token ids, or what `encode` has made of it
        params      None: `defaults`
        request_id  to tell requests apart; None: one that no other has

        ValueError for a prompt or parameters that the engine refuses.
        """
        if self.error is not None:  # before any work: a closed guard of grammars takes none
            raise self.error
        params = self.defaults if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={quoted(params)} is not a SamplingParams")
        if params.seed is None:  # the same for all ranks
            params = replace(params, seed=secrets.randbits(63))
        prompt = await self.encode(prompt)
        if params.structured_outputs is not None:
            await self._try_grammar(params.structured_outputs)
        number = next(self._numbers)
        request = Request(self, number, f"request-{number}" if request_id is None else request_id, prompt)
        with self._lock:
            if self.error is not None:
                raise self.error
            self._requests[number] = request
        try:
            self._ranks.put(("submit", number, prompt if isinstance(prompt, str) else list(prompt), params))
            await request._accepted
        except BaseException:
            request.cancel()
            raise
        return request

    async def encode(self, prompt: Prompt) -> Prompt:
        """Token ids of a prompt, for several requests with it; a text stays where the model has no tokenizer.

        ValueError for one that leaves no room for an answer.
        """
        # In a thread, since a long prompt takes a while, and would hold up other streams.
        return prompt if isinstance(prompt, TokenIds) else await asyncio.to_thread(self._encode, prompt)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[Piece]:
        """Yield pieces as tokens arrive; arguments as in `submit`.

        Closing the generator, or cancelling its task, cancels the request.
        """
        request = await self.submit(prompt, params, request_id=request_id)
        try:
            async for piece in request:
                yield piece._replace(prompt=0)
        finally:
            request.cancel()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Completion:
        """Generate a completion; arguments as in `submit`, and cancelling as in `stream`."""
        pieces = [piece async for piece in self.stream(prompt, params, request_id=request_id)]
        return join_pieces(iter(pieces), 1)[0]

    async def embed(
        self, prompt: Prompt, *, pooling: str = "last", cache_salt: str | None = None, request_id: str | None = None
    ) -> bytes:
        """Vector of a prompt as fp32 numbers of 4 bytes (little-endian), not normalized.

        pooling  "last" or "mean", as of SamplingParams; other arguments as of it and of `submit`
        """
        params = SamplingParams(max_tokens=1, pooling=pooling, cache_salt=cache_salt)
        answer = await self.generate(prompt, params, request_id=request_id)
        if answer.error is not None:
            raise WeftError(answer.error.message)
        return answer.embedding

    async def chat_prompt(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of the prompt that the checkpoint's chat template makes of a conversation."""
        if self.directory is None or self.tokenizer is None:
            raise ValueError("a model without a tokenizer has no chat template; send token ids")
        return await asyncio.to_thread(self._chat_prompt, messages, variables)

    def cancel(self, request_id: str) -> None:
        """Cancel all requests of this id that have not ended; from any thread."""
        with self._lock:
            requests = [request for request in self._requests.values() if request.id == request_id]
        for request in requests:
            request.cancel()

    def restart(self) -> None:
        """Start all ranks again after the error of one, which has ended all requests. Blocks meanwhile."""
        before = self.error
        self._ranks.close()
        ranks = self._start()
        with self._lock:
            self._ranks = ranks
            if self.error is before:  # the new ranks have none
                self.load, self.error = Load(), None

    def close(self) -> None:
        """End the ranks with the step that runs, and requests by an error. A second call does nothing."""
        self._ranks.close()
        if self._guard is not None:
            self._guard.close()

    async def _try_grammar(self, asked: StructuredOutputsParams) -> None:
        """Wait until a grammar has passed its trial. ValueError if it does not.

        A trial that nothing waits for any more ends.
        """
        if self.directory is None or self.tokenizer is None:
            return  # the engine refuses it
        if self._guard is None:
            checkpoint = Checkpoint(self.directory)
            vocab_size, ends = DecoderConfig.of(checkpoint).vocab_size, checkpoint.eos_token_ids()
            self._guard = GrammarGuard(self.tokenizer, vocab_size, ends, self.config.grammar_seconds)
        trial = self._guard.begin(asked)
        passed = asyncio.wrap_future(trial.future)
        passed.add_done_callback(
            lambda one: one.cancelled() or one.exception()
        )  # read, also where nothing waits any more
        try:
            await asyncio.shield(passed)
        finally:
            self._guard.leave(trial)

    def _chat_prompt(self, messages: Sequence[Message], variables: Mapping[str, Any] | None) -> list[int]:
        if self._template is None:
            self._template = ChatTemplate(self.directory)
        text = self._template.render(messages, variables)
        # The template has written the special tokens already.
        return TokenIds(self._reader.read("prompt", text, add_special_tokens=False))

    def _encode(self, prompt: Prompt) -> Prompt:
        plain = plain_prompt("prompt", prompt)
        if isinstance(plain, str):
            return plain if self.tokenizer is None else TokenIds(self._reader.read("prompt", plain))
        check_room("prompt", len(plain), self.max_seq_len)
        return TokenIds(plain)

    def _cancel(self, request: Request) -> None:
        with self._lock:
            if self._requests.pop(request._number, None) is None:
                return
        self._ranks.put(("cancel", request._number))
        self._deliver([(request, RequestCancelled(request.id))])

    def _take(self, kind: str, value: Any) -> None:
        """Take a message of rank 0, on the thread that reads it."""
        if kind == "load":
            self.load = value
        elif kind == "pieces":
            by_request: dict[int, list[Piece]] = defaultdict(list)
            for piece in value:
                by_request[piece.prompt].append(piece)
            with self._lock:
                get = self._requests.get
                arrived = [(get(number), pieces) for number, pieces in by_request.items()]
                for number, pieces in by_request.items():
                    if pieces[-1].finish_reason is not None:
                        self._requests.pop(number, None)
            self._deliver(arrived)
        elif kind == "accepted":
            with self._lock:
                arrived = [(self._requests.get(number), None) for number in value]
            self._deliver(arrived)
        elif kind == "rejected":
            number, why = value
            with self._lock:
                request = self._requests.pop(number, None)
            self._deliver([(request, ValueError(why))])
        else:
            with self._lock:
                self.error = value
                requests = list(self._requests.values())
                self._requests.clear()
            self._deliver([(request, value) for request in requests])

    def _deliver(self, arrived: Sequence[tuple[Request | None, Sequence[Piece] | BaseException | None]]) -> None:
        """Hand arrived items to the loops of their requests, one wake-up each. None: cancelled meanwhile."""
        loops = defaultdict(list)
        for request, one in arrived:
            if request is not None:
                loops[request._loop].append((request, one))
        for loop, ones in loops.items():
            try:
                loop.call_soon_threadsafe(_take_all, ones)
            except RuntimeError:  # the loop was closed before its requests had ended
                for request, _ in ones:
                    request.cancel()


def _take_all(arrived: Sequence[tuple[Request, Sequence[Piece] | BaseException | None]]) -> None:
    for request, one in arrived:
        request._take(one)
