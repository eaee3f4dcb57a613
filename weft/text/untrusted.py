"""Work on texts of users in processes with limits: compile grammars, render chat templates.

This file is a worker of weft.runtime.limited_main. There it imports nothing of weft, and only the library that it is asked for.

grammars   `hello` has {"tokenizer", "vocab_size", "ends"}; requests are {"kind", "text"}, answers {}, or {"refused"} with the
           library's text. Ranks call `read_tokenizer` and `compile_grammar` too, for grammars that have passed
templates  requests are {"source", "variables", "characters"}; variables null compiles only. Answers are {"text"}, {"invalid"},
           {"refused"} or {"failed"}
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

# The library follows a grammar's rules by recursion without a limit on its depth: 8 MiB, the usual stack of a thread, serve
# 2,300 rules in a chain. A rank, where an overflow would end the server, gives it twice the trial's stack.
TRIAL_STACK, RANK_STACK = 8 << 20, 16 << 20
# Masks and tokens are computed on the main thread of a rank, whose stack is larger. 128 KiB serve the longest chains.
MASK_STACK = 1 << 20
# Tokens that a trial goes on by.
STEPS = 8

Request = dict[str, Any]
Answer = dict[str, str]


def begin(hello: dict[str, Any]) -> Callable[[Request], Answer]:
    """Function that answers requests. Late imports happen here, before the limits."""
    if "tokenizer" not in hello:
        compiled = lru_cache(8)(make_environment().from_string)  # compiling takes milliseconds
        compiled("{{ range(2) | list | tojson }}").render()
        return partial(render, compiled)
    from tokenizers import Tokenizer

    vocabulary = read_tokenizer(Tokenizer.from_str(hello["tokenizer"]), hello["vocab_size"], hello["ends"])
    compile_grammar(vocabulary, "regex", "a?")
    return partial(_try_grammar, vocabulary, ~sum(1 << token for token in hello["ends"]))


class Vocabulary(NamedTuple):
    """Tokens of a model as llguidance reads them.

    unspelt  id after the model's tokens, for a forced text that no tokens spell; None where llguidance itself finds the tokens
             of a text
    reads    end of a message that no token fits
    """

    tokenizer: LLTokenizer
    unspelt: int | None = None
    reads: str = ""


def read_tokenizer(tokenizer: Tokenizer, vocab_size: int, ends: list[int]) -> Vocabulary:
    """Tokenizer of the library. ValueError for one that it cannot read."""
    import llguidance
    from tokenizers import decoders

    try:
        if not isinstance(tokenizer.decoder, decoders.Fuse):
            return Vocabulary(llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=ends))
        spelled = _SpelledOut(tokenizer, vocab_size, ends[0])  # llguidance does not know the decoder
        reads = f"; its tokens are {' '.join(text for text in spelled.texts if text)}"
        return Vocabulary(llguidance.LLTokenizer(spelled, eos_token=ends), vocab_size, reads)
    except Exception as error:  # the library has no narrower class
        raise ValueError(f"llguidance cannot read this tokenizer: {error}") from None


def compile_grammar(vocabulary: Vocabulary, kind: str, text: str) -> LLMatcher:
    """Matcher after its first mask, which takes longest. ValueError with the library's text."""
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


def _try_grammar(vocabulary: Vocabulary, ordinary: int, request: Request) -> Answer:
    """Compile a grammar and follow it for some tokens. `ordinary`: bits of the tokens that end no answer."""
    try:
        matcher = _on_stack(TRIAL_STACK, lambda: compile_grammar(vocabulary, request["kind"], request["text"]))
        _on_stack(MASK_STACK, lambda: _walk(matcher.deep_copy(), ordinary))
    except ValueError as error:
        return {"refused": str(error)[:10_000]}
    return {}


def _on_stack(size: int, run: Callable[[], Any]) -> Any:
    """Result of a call on a thread with this stack."""
    future: Future[Any] = Future()

    def target() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    threading.stack_size(size)
    threading.Thread(target=target).start()
    return future.result()


def _walk(matcher: LLMatcher, ordinary: int) -> None:
    """Take some tokens that the grammar allows, and begin again."""
    for _ in range(STEPS):
        allowed = 0 if matcher.is_stopped() else int.from_bytes(matcher.compute_bitmask(), "little") & ordinary
        if not allowed:
            break
        matcher.consume_token((allowed & -allowed).bit_length() - 1)
    matcher.reset()


class _SpelledOut:
    """Tokenizer as llguidance asks for it, of a model whose tokens' texts are joined as they are."""

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
        """Tokens of a text; for a text that no tokens spell, one that a model never chooses."""
        try:
            tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception:  # a tokenizer without a token for unknown text
            tokens = []
        return tokens if "".join(self.texts[token] for token in tokens) == text else [self._unspelt]


def render(compiled: Callable[[str], Any], request: Request) -> Answer:
    from jinja2 import TemplateError

    try:
        template = compiled(request["source"])
    except TemplateError as error:
        return {"invalid": _line_of(error)}
    except Exception as error:  # in constants, which are computed here
        return {"invalid": _named(error)}
    if request["variables"] is None:
        return {}
    try:
        pieces, left = [], request["characters"]
        for piece in template.generate(request["variables"]):
            left -= len(piece)
            if left < 0:
                return {"failed": f"it writes more than {request['characters']:,} characters"}
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except TemplateError as error:
        return {"refused": _line_of(error)}
    except Exception as error:  # in the template's arithmetic, or where content is None
        return {"failed": _named(error)}


def make_environment() -> SandboxedEnvironment:
    """Jinja environment with transformers' settings, names and tag `generation`."""
    from jinja2 import TemplateError, nodes  # torch needs it too
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Tag around the assistant's text, for training; here only a scope."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    extensions = [loopcontrols, Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Filter `tojson` without Jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {_line_of(error)}".removesuffix(": ")


def _line_of(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
