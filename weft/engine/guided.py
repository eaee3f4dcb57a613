"""Grammars of answers: masks of the tokens that may come next, by llguidance, on every rank's CPU.

A grammar's state depends on the tokens alone, so all ranks compute the same masks and exchange nothing. A mask needs the token
before it on the host: meanwhile the GPU computes the next logits, and it waits for the mask only to choose.

A large grammar takes a second to compile. A thread does it, without Python's lock for most of the time, so that steps go on;
compiled ones are kept, and an answer takes a copy, in microseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy
import torch
from tokenizers import Tokenizer, decoders

from weft.arguments import shortened
from weft.engine.params import StructuredOutputsParams
from weft.runtime.arithmetic import cdiv

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_GRAMMARS = 64


class Guide:
    """Grammar of an answer and its state, which follows the answer's tokens.

    kind  of grammar, as llguidance names it
    ends  mask of the tokens that end an answer
    """

    def __init__(self, kind: str, matcher: LLMatcher, ends: torch.Tensor) -> None:
        self.kind, self._matcher, self._ends = kind, matcher, ends

    def take(self, token: int) -> None:
        """Go on by the token that was chosen. One behind the end, or below 0, changes nothing."""
        if token >= 0 and not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def begin_again(self, tokens: Sequence[int]) -> None:
        """Go back to the begin, then on by these tokens."""
        self._matcher.reset()
        for token in tokens:
            self.take(token)

    def mask(self) -> torch.Tensor:
        """Bits of the tokens that may come next, [cdiv(V, 32)] int32.

        At the end of the grammar those of the tokens that end an answer; none where no token fits, or where the library has
        given up.
        """
        if self._matcher.is_stopped():
            return torch.zeros_like(self._ends) if self._matcher.get_error() else self._ends
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)
        # A tokenizer may have fewer tokens than the model, which then may not choose the others.
        return torch.nn.functional.pad(bits, (0, len(self._ends) - len(bits)))


class Guides:
    """Grammars over the tokens of one tokenizer, compiled in a thread.

    The MOST_GRAMMARS last used are kept.

    ValueError without llguidance, and where no token ends an answer.

    vocab_size  of the model
    ends        end-of-sequence tokens
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Iterable[int]) -> None:
        try:
            import llguidance
        except ImportError:
            raise ValueError(
                "structured_outputs need llguidance, which is not installed: pip install 'weft[guided]'"
            ) from None
        ends = sorted(ends)
        if not ends:
            raise ValueError("structured_outputs need an end-of-sequence token, and this model has none")
        self._library, self._source = llguidance, (tokenizer, vocab_size, ends)
        self._tokenizer: LLTokenizer | None = (
            None  # once the thread has read it, which takes a second for 150,000 tokens
        )
        self._thread = ThreadPoolExecutor(1, "weft grammars")
        # By kind and text: those that are still referred to, and of these the kept ones, least recently used first.
        self._found: WeakValueDictionary[tuple[str, str], Future[LLMatcher]] = WeakValueDictionary()
        self._kept: OrderedDict[tuple[str, str], Future[LLMatcher]] = OrderedDict()
        bits = numpy.zeros(cdiv(vocab_size, 32) * 32, numpy.uint8)
        bits[ends] = 1
        self._ends = torch.from_numpy(numpy.packbits(bits, bitorder="little").view(numpy.int32))

    def prepare(self, asked: StructuredOutputsParams) -> Future[LLMatcher]:
        """Have a grammar compiled.

        As long as the future is referred to, `start` finds it. Its result raises as `start` does.
        """
        key = asked.grammar_text
        future = self._found.get(key)
        if future is None:
            self._found[key] = future = self._thread.submit(self._compile, *key)
        self._kept[key] = future
        self._kept.move_to_end(key)
        if len(self._kept) > MOST_GRAMMARS:
            self._kept.popitem(last=False)
        return future

    def start(self, asked: StructuredOutputsParams) -> Guide:
        """Guide of a new answer; waits until its grammar is compiled.

        ValueError for a grammar that is none, and for a tokenizer that llguidance cannot read.
        """
        return Guide(asked.grammar_text[0], self.prepare(asked).result().deep_copy(), self._ends)

    def _compile(self, kind: str, text: str) -> LLMatcher:
        """Matcher at the begin of a grammar, with its first mask, which takes longest."""
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        try:
            grammar = self._library.grammar_from(kind, text)
            matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
            if not (wrong := matcher.get_error()):
                matcher.compute_bitmask()
        except Exception as error:  # of the library's own
            wrong = str(error)
        if wrong:
            raise ValueError(f"structured_outputs: {shortened(wrong)}")
        return matcher

    def _read_tokenizer(self) -> LLTokenizer:
        tokenizer, vocab_size, ends = self._source
        try:
            source = tokenizer.to_str()
            if isinstance(tokenizer.decoder, decoders.Fuse):  # llguidance does not know it
                source = self._library.TokenizerWrapper(_spelled_out(tokenizer, ends[0]))
            return self._library.LLTokenizer(source, n_vocab=vocab_size, eos_token=ends)
        except Exception as error:  # of the library's own
            raise ValueError(f"structured_outputs: llguidance cannot read this tokenizer: {shortened(error)}") from None


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
