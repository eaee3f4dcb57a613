"""Compilation of grammars by llguidance; also a worker of weft.runtime.limited_main, which tries them.

The worker imports llguidance and tokenizers, and nothing of weft. Its `hello` has {"tokenizer", "vocab_size", "ends"}; requests
are {"kind", "text"}, and answers {}, or {"refused"} with the library's text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Tokenizer, decoders

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# The library follows a grammar's rules by recursion, and has no limit on its depth: 8 MiB, the usual stack of a thread, serve
# 2,300 rules in a chain. A rank, where an overflow would end the server, gives it twice the trial's stack.
TRIAL_STACK, RANK_STACK = 8 << 20, 16 << 20
# Masks and tokens are computed on the main thread of a rank, whose stack is larger. 128 KiB serve the longest chains.
MASK_STACK = 1 << 20
# Tokens that a trial goes on by.
STEPS = 8


class Vocabulary(NamedTuple):
    """Tokens of a model as llguidance reads them.

    unspelt  id behind the model's tokens, to which a forced text goes that no tokens spell; None where llguidance finds the
             tokens of a text by itself
    reads    end of a message that no token fits
    """

    tokenizer: LLTokenizer
    unspelt: int | None = None
    reads: str = ""


def read_tokenizer(tokenizer: Tokenizer, vocab_size: int, ends: list[int]) -> Vocabulary:
    """Tokenizer of the library. ValueError for one that it cannot read."""
    import llguidance

    try:
        if not isinstance(tokenizer.decoder, decoders.Fuse):
            return Vocabulary(llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=ends))
        spelled = _SpelledOut(tokenizer, vocab_size, ends[0])  # llguidance does not know the decoder
        reads = f"; its tokens are {' '.join(text for text in spelled.texts if text)}"
        return Vocabulary(llguidance.LLTokenizer(spelled, eos_token=ends), vocab_size, reads)
    except Exception as error:  # of the library's own
        raise ValueError(f"llguidance cannot read this tokenizer: {error}") from None


def compile_grammar(vocabulary: Vocabulary, kind: str, text: str) -> LLMatcher:
    """Matcher at the begin of a grammar, after its first mask. ValueError with the library's text.

    The first mask takes longest.
    """
    import llguidance

    mask = b""
    try:
        matcher = llguidance.LLMatcher(vocabulary.tokenizer, llguidance.grammar_from(kind, text), log_level=0)
        if not matcher.is_error():
            mask = matcher.compute_bitmask()
        wrong = matcher.get_error()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        wrong = f"{type(error).__name__}: {error}"
    forced = int.from_bytes(mask, "little")
    if wrong.startswith("NoExtension") or (vocabulary.unspelt is not None and forced == 1 << vocabulary.unspelt):
        wrong = f"no token of this model can begin a text that follows this grammar{vocabulary.reads}"
    if wrong:
        raise ValueError(wrong)
    return matcher


def begin(hello: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, str]]:
    """Function that answers requests."""
    ends = hello["ends"]
    vocabulary = read_tokenizer(Tokenizer.from_str(hello["tokenizer"]), hello["vocab_size"], ends)
    compile_grammar(vocabulary, "regex", "a?")  # late imports, before the limits
    return partial(_answer, vocabulary, ~sum(1 << token for token in ends))


def _answer(vocabulary: Vocabulary, others: int, request: dict[str, Any]) -> dict[str, str]:
    try:
        matcher = _on_stack(TRIAL_STACK, lambda: compile_grammar(vocabulary, request["kind"], request["text"]))
        _on_stack(MASK_STACK, lambda: _walk(matcher.deep_copy(), others))
    except ValueError as error:
        return {"refused": str(error)[:10_000]}
    return {}


def _on_stack(size: int, run: Callable[[], Any]) -> Any:
    """Result of a call on a thread with this stack."""
    found: list[Any] = []

    def target() -> None:
        try:
            found.append((run(), None))
        except BaseException as error:
            found.append((None, error))

    threading.stack_size(size)
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    result, error = found[0]
    if error is not None:
        raise error
    return result


def _walk(matcher: LLMatcher, others: int) -> None:
    """Take some tokens that the grammar allows, and begin again.

    others  bits of the tokens that end no answer
    """
    for _ in range(STEPS):
        allowed = 0 if matcher.is_stopped() else int.from_bytes(matcher.compute_bitmask(), "little") & others
        if not allowed:
            break
        matcher.consume_token((allowed & -allowed).bit_length() - 1)
    matcher.reset()


class _SpelledOut:
    """Tokenizer as llguidance asks for it, of one whose tokens' texts are joined as they are."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end: int) -> None:
        self._tokenizer, self._unspelt, self.eos_token_id = tokenizer, vocab_size, end
        count = tokenizer.get_vocab_size()
        self.texts = [tokenizer.decode([token]) for token in range(count)] + [""] * (vocab_size - count + 1)
        # llguidance's mark of tokens without text.
        self.tokens = [text.encode() or b"\xff<%d>" % token for token, text in enumerate(self.texts)]
        self.special_token_ids = [token for token, text in enumerate(self.texts) if not text]

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text, or for a text that no tokens spell one that a model never chooses."""
        try:
            tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception:  # a tokenizer without a token for unknown text
            tokens = []
        return tokens if "".join(self.texts[token] for token in tokens) == text else [self._unspelt]
