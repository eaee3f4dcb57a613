"""Grammars of answers: masks of the tokens that may come next, by llguidance, on every rank's CPU.

A grammar's state depends on the tokens alone, so all ranks compute the same masks and exchange nothing. A mask needs the token
before it on the host: meanwhile the GPU computes the next logits, and it waits for the mask only to choose.

A large grammar takes a second to compile. Threads do it, without Python's lock for most of the time, so that steps go on;
compiled ones are kept, and an answer takes a copy, in microseconds. What others wrote passes weft.engine.grammar_guard first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy
import torch
from tokenizers import Tokenizer

from weft.engine.grammar_guard import AT_ONCE, check_guided, refusal
from weft.engine.grammar_process import RANK_STACK, Vocabulary, compile_grammar, read_tokenizer
from weft.engine.params import StructuredOutputsParams
from weft.runtime.arithmetic import cdiv

if TYPE_CHECKING:
    from llguidance import LLMatcher

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
    """Grammars over the tokens of one tokenizer, compiled in threads.

    The MOST_GRAMMARS last used are kept.

    ValueError without llguidance, and where no token ends an answer.

    vocab_size  of the model
    ends        end-of-sequence tokens
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Iterable[int]) -> None:
        ends = check_guided(ends)
        self._source = tokenizer, vocab_size, ends
        # Once a thread has read it, which takes a second for 150,000 tokens.
        self._vocabulary: Vocabulary | None = None
        self._reading = threading.Lock()
        self._threads = _threads(AT_ONCE, RANK_STACK)
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
            self._found[key] = future = self._threads.submit(self._compile, *key)
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
        """Matcher at the begin of a grammar."""
        try:
            with self._reading:
                if self._vocabulary is None:
                    self._vocabulary = read_tokenizer(*self._source)
            return compile_grammar(self._vocabulary, kind, text)
        except ValueError as error:
            raise refusal(str(error)) from None


def _threads(count: int, stack: int) -> ThreadPoolExecutor:
    """Threads with stacks of this size."""
    found, all_run = ThreadPoolExecutor(count, "weft grammars"), threading.Barrier(count)
    before = threading.stack_size(stack)
    try:
        for _ in range(count):  # one that waits at the barrier takes no further call, so each call starts a thread
            found.submit(all_run.wait)
    finally:
        threading.stack_size(before)
    return found
