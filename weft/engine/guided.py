"""Grammars of answers: masks of the tokens that may come next, by llguidance, on every rank's CPU.

A grammar's state depends on the tokens alone, so all ranks compute the same masks and exchange nothing. A mask needs the token
before it on the host: meanwhile the GPU computes the next logits, and it waits for the mask only to choose.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy
import torch
from tokenizers import Tokenizer

from weft.arguments import shortened
from weft.engine.params import StructuredOutputsParams
from weft.runtime.arithmetic import cdiv

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Guide:
    """Grammar of an answer and its state, which follows the answer's tokens.

    ends  mask of the tokens that end an answer
    """

    def __init__(self, matcher: LLMatcher, ends: torch.Tensor) -> None:
        self._matcher, self._ends = matcher, ends

    def take(self, token: int) -> None:
        """Go on by the token that was chosen. One behind the end changes nothing."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def begin_again(self, tokens: Sequence[int]) -> None:
        """Go back to the begin, then on by these tokens."""
        self._matcher.reset()
        for token in tokens:
            self.take(token)

    def mask(self) -> torch.Tensor:
        """Bits of the tokens that may come next, [cdiv(V, 32)] int32.

        At the end of the grammar, or where no token fits, those of the tokens that end an answer.
        """
        if self._matcher.is_stopped():
            return self._ends
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)
        # A tokenizer may have fewer tokens than the model, which then may not choose the others.
        return torch.nn.functional.pad(bits, (0, len(self._ends) - len(bits)))


class Guides:
    """Grammars over the tokens of one tokenizer.

    ValueError without llguidance, and for a tokenizer that it cannot read.

    vocab_size  of the model
    ends        end-of-sequence tokens
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Iterable[int]) -> None:
        try:
            import llguidance
        except ImportError:
            raise ValueError(
                "structured_outputs need llguidance, which is not installed: pip install weft[guided]"
            ) from None
        ends = sorted(ends)
        if not ends:
            raise ValueError("structured_outputs need an end-of-sequence token, and this model has none")
        try:
            text = tokenizer.to_str()
            if (json.loads(text)["decoder"] or {}).get("type") == "Fuse":  # llguidance does not know it
                text = llguidance.TokenizerWrapper(_spelled_out(tokenizer, ends[0]))
            self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
        except Exception as error:  # of the library's own
            raise ValueError(f"structured_outputs: llguidance cannot read this tokenizer: {shortened(error)}") from None
        self._library = llguidance
        bits = numpy.zeros(cdiv(vocab_size, 32) * 32, numpy.uint8)
        bits[ends] = 1
        self._ends = torch.from_numpy(numpy.packbits(bits, bitorder="little").view(numpy.int32))

    def start(self, asked: StructuredOutputsParams) -> Guide:
        """Guide of a new answer. ValueError for a grammar that is not one."""
        kind, text = asked.grammar_text
        try:
            grammar = self._library.grammar_from(kind, text)
            matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
            wrong = matcher.get_error()
        except Exception as error:  # of the library's own
            wrong = str(error)
        if wrong:
            raise ValueError(f"structured_outputs: {shortened(wrong)}")
        return Guide(matcher, self._ends)


def _spelled_out(tokenizer: Tokenizer, end: int) -> _SpelledOut:
    """Tokenizer as llguidance asks for it, of one whose tokens' texts are joined as they are."""
    texts = [tokenizer.decode([token]).encode() for token in range(tokenizer.get_vocab_size())]
    return _SpelledOut(
        eos_token_id=end,
        bos_token_id=None,
        # llguidance's mark of tokens without text.
        tokens=[text or b"\xff<%d>" % token for token, text in enumerate(texts)],
        special_token_ids=[token for token, text in enumerate(texts) if not text],
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
    )


class _SpelledOut(SimpleNamespace):
    def __call__(self, text: str) -> list[int]:
        return self.encode(text)
