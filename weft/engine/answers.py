"""Requests of an engine, and what becomes of their tokens: text, log-probabilities, pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from weft.engine.logprobs import logprobs_of
from weft.engine.outputs import FinishReason, Logprobs, Piece
from weft.engine.scheduler import Sequence
from weft.engine.tokenizer import TextStream


@dataclass(slots=True, eq=False, kw_only=True)
class Answer(Sequence):
    """A request, and the answer that grows by its tokens.

    ends        tokens that end it, and the reason that each gives
    text        of its tokens; None without a tokenizer
    decode      text of a token by itself, for log-probabilities; None without a tokenizer
    prompt_index, index  `prompt` and `index` of its pieces
    pieces      list that they are added to
    """

    ends: dict[int, FinishReason]
    text: TextStream | None
    decode: Callable[[int], str | None]
    prompt_index: int = 0
    index: int = 0
    pieces: list[Piece] = field(default_factory=list)

    def take(self, token: int, row: list[float] | None) -> bool:
        """Add a token that has arrived, and its piece. True if the answer has ended.

        row  of weft.engine.logprobs, where log-probabilities are asked for
        """
        self.tokens.append(token)
        reason = self.ends.get(token)
        text = None
        if reason is not None:
            if self.text is not None:
                text, _ = self.text.finish()
        else:
            if len(self.tokens) == self.budget:
                reason = "length"
            if self.text is not None:
                text, stopped = self.text.push(token)
                if reason is not None and not stopped:
                    rest, stopped = self.text.finish()
                    text += rest
                if stopped:
                    reason = "stop"
        logprobs = of_prompt = None
        if self.params.logprobs is not None:
            logprobs = logprobs_of(row, token, self.params.logprobs, self.decode)
        if self.reads_all and len(self.tokens) == 1:
            of_prompt = self._logprobs_of_prompt()
        self.pieces.append(Piece(self.prompt_index, text, token, reason, logprobs, of_prompt, self.index))
        return reason is not None

    def _logprobs_of_prompt(self) -> list[Logprobs | None]:
        rows = (row for part in self.prompt_logprobs for row in part.tolist())
        pairs = zip(rows, self.prompt[1:], strict=True)
        return [None, *(logprobs_of(*pair, self.params.prompt_logprobs, self.decode) for pair in pairs)]
