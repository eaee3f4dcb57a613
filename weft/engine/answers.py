"""Requests of an engine, and what becomes of their tokens: text, log-probabilities, pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from weft.engine.logprobs import logprobs_of
from weft.engine.outputs import Fault, FinishReason, Piece
from weft.engine.scheduler import Sequence
from weft.engine.tokenizer import TextStream
from weft.ops.vocab.sample_argmax import EXCLUDED


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

        token  of weft.engine.sampling: below 0 where none could be chosen
        row    of weft.engine.logprobs, where log-probabilities are asked for
        """
        rows = [row] if self.params.logprobs is not None else []
        of_prompt = self._rows_of_prompt() if self.reads_all and not self.tokens else None
        if (fault := self._fault(token, [*rows, *(of_prompt or ())])) is not None:
            return self._end(fault)
        self.tokens.append(token)
        reason, text, offset = self.ends.get(token), None, None
        if reason is not None:
            if self.text is not None:
                text, _ = self.text.finish()
                offset = self.text.length
        else:
            if len(self.tokens) == self.budget:
                reason = "length"
            if self.text is not None:
                offset = self.text.length
                text, stopped = self.text.push(token)
                if reason is not None and not stopped:
                    rest, stopped = self.text.finish()
                    text += rest
                if stopped:
                    reason = "stop"
        piece = Piece(self.prompt_index, text, token, reason, index=self.index)
        if rows:
            logprobs = logprobs_of(row, token, self.params.logprobs, self.decode)
            piece = piece._replace(logprobs=logprobs, offset=offset)
        if of_prompt is not None:
            pairs = zip(of_prompt, self.prompt[1:], strict=True)
            found = [logprobs_of(*pair, self.params.prompt_logprobs, self.decode) for pair in pairs]
            piece = piece._replace(prompt_logprobs=[None, *found])
        self.pieces.append(piece)
        return reason is not None

    def _rows_of_prompt(self) -> list[list[float]]:
        return [row for part in self.prompt_logprobs for row in part.tolist()]

    def _fault(self, token: int, rows: Iterable[list[float]]) -> Fault | None:
        """Cause of an error at this token, or in these rows of log-probabilities."""
        chosen = len(self.tokens)
        if token == EXCLUDED.value and self.adjusted is not None and self.adjusted.constraints(chosen):
            return Fault(f"no token is left for place {chosen} of the answer: {self.adjusted.named(chosen)}", True)
        if token >= 0 and not any(math.isnan(row[0]) for row in rows):
            return None
        return Fault(
            f"the model's logits are not finite (NaN or infinite) at place {chosen} of the answer, behind a prompt of "
            f"{len(self.prompt)} tokens: its weights or activations overflow; try another dtype, such as bfloat16 or float32",
            False,
        )

    def _end(self, fault: Fault) -> bool:
        """Add a piece with the error, and the text held back. True: the answer has ended."""
        self.corrupt = not fault.of_request
        text = None if self.text is None else self.text.finish()[0]
        self.pieces.append(Piece(self.prompt_index, text, None, "error", index=self.index, error=fault))
        return True
