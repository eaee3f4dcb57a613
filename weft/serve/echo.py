"""Prompt before a completion, for `echo`: its text, and log-probabilities of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from weft.engine.answers import Piece
from weft.engine.params import Prompt, SamplingParams
from weft.serve import logprobs
from weft.text.stream import TextStream, token_texts
from weft.text.tokenizer import TokenBytes


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
