"""Choices of an answer: requests to the engine that share one response, counted and timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from weft.engine.answers import Piece
from weft.engine.async_llm import AsyncLLM, Request
from weft.engine.params import Prompt, SamplingParams, one_each
from weft.serve.metrics import Metrics

# OpenAI's reason for each of an engine's.
REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class Choice:
    """A choice, which counts and times its pieces as they are drawn."""

    def __init__(self, request: Request, begin: float, metrics: Metrics) -> None:
        self.request, self.tokens = request, 0
        self._metrics, self._begin, self._first, self._last = metrics, begin, begin, begin
        self._open = True
        metrics.prompt_tokens.inc(len(request.prompt))
        metrics.request_prompt.observe(len(request.prompt))

    async def arrivals(self) -> AsyncIterator[list[Piece]]:
        """Yield the pieces that have arrived, together: a slow client gets fewer and longer lists."""
        async for pieces in self.request.arrivals():
            for piece in pieces:
                self._count(piece)
            yield pieces

    def end(self) -> None:
        """Cancel the request, unless it has ended."""
        self.request.cancel()
        if self._open:
            self._close("abort")

    def _count(self, piece: Piece) -> None:
        if piece.error is not None:
            self._metrics.corrupted.inc(not piece.error.of_request)
            self._close("error")
            return
        now = time.perf_counter()
        self.tokens += 1
        self._metrics.generation_tokens.inc()
        if self.tokens == 1:
            self._first = now
            self._metrics.first_token.observe(now - self._begin)
        else:
            self._metrics.next_token.observe(now - self._last)
        self._last = now
        if piece.finish_reason is not None:
            self._close(REASONS[piece.finish_reason])

    def _close(self, reason: str) -> None:
        self._open = False
        self._metrics.ended[reason].inc()
        self._metrics.request_answer.observe(self.tokens)
        self._metrics.whole.observe(time.perf_counter() - self._begin)
        if self.tokens > 1:
            self._metrics.per_token.observe((self._last - self._first) / (self.tokens - 1))


class Choices:
    """All choices of a response: `n` for each prompt, in order."""

    def __init__(self, choices: Sequence[Choice], n: int) -> None:
        self.choices, self._n = choices, n

    @classmethod
    async def of(
        cls, llm: AsyncLLM, prompts: Sequence[Prompt], params: SamplingParams, n: int, name: str, metrics: Metrics
    ) -> Choices:
        """Submit all requests, or none. ValueError where the engine refuses one."""
        begin = time.perf_counter()
        # Once for the n choices.
        encoded = [await llm.encode(prompt) for prompt in prompts]
        asked = [(prompt, one) for prompt in encoded for one in one_each(params, n)]
        submitting = [asyncio.create_task(llm.submit(prompt, one, request_id=name)) for prompt, one in asked]
        try:
            submitted = await asyncio.gather(*submitting, return_exceptions=True)
        except asyncio.CancelledError:  # the accepted ones are cancelled here
            llm.cancel(name)
            raise
        choices = [Choice(one, begin, metrics) for one in submitted if isinstance(one, Request)]
        for one in submitted:
            if isinstance(one, BaseException):
                for choice in choices:
                    choice.end()
                raise one
        return cls(choices, n)

    def end(self) -> None:
        """Cancel the requests that have not ended."""
        for choice in self.choices:
            choice.end()

    def usage(self) -> dict[str, int]:
        prompts = sum(len(choice.request.prompt) for choice in self.choices[:: self._n])
        answers = sum(choice.tokens for choice in self.choices)
        return {"prompt_tokens": prompts, "completion_tokens": answers, "total_tokens": prompts + answers}

    async def arrivals(self) -> AsyncIterator[tuple[int, list[Piece]]]:
        """Yield (index of the choice, its pieces) in the order in which they arrive."""
        if len(self.choices) == 1:
            async for pieces in self.choices[0].arrivals():
                yield 0, pieces
            return
        arrived: asyncio.Queue[tuple[int, list[Piece]] | BaseException | None] = asyncio.Queue()

        async def draw(index: int, choice: Choice) -> None:
            try:
                async for pieces in choice.arrivals():
                    arrived.put_nowait((index, pieces))
                arrived.put_nowait(None)
            except BaseException as error:
                arrived.put_nowait(error)

        drawing = [asyncio.create_task(draw(index, choice)) for index, choice in enumerate(self.choices)]
        try:
            left = len(drawing)
            while left:
                one = await arrived.get()
                if isinstance(one, BaseException):
                    raise one
                if one is None:
                    left -= 1
                else:
                    yield one
        finally:
            for task in drawing:
                task.cancel()
