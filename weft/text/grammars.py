"""Grammars of answers: masks of the tokens that may come next, by llguidance, on every rank's CPU.

A grammar's state depends on the tokens alone, so all ranks compute the same masks and exchange nothing. A mask needs the token
before it on the host: meanwhile the GPU computes the next logits, and waits for the mask only to choose.

A large grammar takes a second to compile. Threads do it, mostly without Python's lock, so that steps go on; compiled grammars
are kept, and an answer takes a copy, in microseconds.

A process with limits tries grammars of users first: a few kilobytes can overflow the stack of the library that compiles them,
which ends the process, or take minutes. Ranks compile only what has passed.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy
import torch
from tokenizers import Tokenizer

from weft.arguments import shortened
from weft.runtime.arithmetic import cdiv
from weft.runtime.limited_process import LimitedProcess, ProcessFailed
from weft.text.structure import StructuredOutputsParams
from weft.text.untrusted import RANK_STACK, Vocabulary, compile_grammar, read_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from weft.runtime.team.team import Team

# Grammars that are tried, or compiled by a rank, at the same time.
AT_ONCE = 4
# Grammars whose trial is remembered.
MOST_PASSED = 4096
# Bytes beyond what the begun process has.
MEMORY = 512 << 20
_WORKER = Path(__file__).with_name("untrusted.py")


class Trial:
    """Trial of a grammar that requests wait for.

    future   its result is None, or raises ValueError
    waiting  number of these requests
    process  where it runs; None: not yet, or no more
    """

    def __init__(self) -> None:
        self.future: Future[None] = Future()
        self.waiting = 0
        self.process: LimitedProcess | None = None


class GrammarGuard:
    """Trials of grammars over the tokens of one tokenizer, AT_ONCE at a time.

    ValueError as `check_guided`. Equal grammars are tried once, and the last that passed are remembered. Processes start when
    first needed, in a second for 150,000 tokens.

    seconds  limit of a trial
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Iterable[int], seconds: float) -> None:
        self.seconds, ends = seconds, check_guided(ends)
        self._source = tokenizer, vocab_size, ends
        self._lock = threading.Lock()  # of all below
        self._threads = ThreadPoolExecutor(AT_ONCE, "weft grammar trials")
        self._idle: list[LimitedProcess] = []
        self._trials: dict[bytes, Trial] = {}
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._closed = False

    def begin(self, asked: StructuredOutputsParams) -> Trial:
        """Trial of a grammar, which the caller gives to `leave` afterwards."""
        key = key_of(asked)
        with self._lock:
            if (trial := self._trials.get(key)) is None:
                trial = Trial()
                if key in self._passed:
                    self._passed.move_to_end(key)
                    trial.future.set_result(None)
                    return trial
                self._trials[key] = trial
                self._threads.submit(self._run, trial, key, *asked.grammar_text)
            trial.waiting += 1
        return trial

    def leave(self, trial: Trial) -> None:
        """Wait for a trial no longer. One that nothing waits for ends."""
        with self._lock:
            trial.waiting -= 1
            if trial.waiting <= 0 and not trial.future.done():
                self._trials = {key: other for key, other in self._trials.items() if other is not trial}
                if trial.process is not None:
                    trial.process.kill()

    def check(self, grammars: Iterable[StructuredOutputsParams]) -> None:
        """Wait for all trials. ValueError for a grammar that is none, or is beyond the limits."""
        trials = [self.begin(asked) for asked in grammars]
        try:
            for trial in trials:
                trial.future.result()
        finally:
            for trial in trials:
                self.leave(trial)

    def close(self) -> None:
        """End the processes, and trials by an error."""
        with self._lock:
            self._closed = True
            for trial in self._trials.values():
                if trial.process is not None:
                    trial.process.kill()
            self._end_idle()
        self._threads.shutdown(wait=False)

    def _run(self, trial: Trial, key: bytes, kind: str, text: str) -> None:
        try:
            self._try(trial, kind, text)
        except BaseException as error:
            wrong: BaseException | None = error
        else:
            wrong = None
        with self._lock:
            trial.process = None
            if self._trials.get(key) is trial:
                del self._trials[key]
            if wrong is None:
                self._passed[key] = None
                if len(self._passed) > MOST_PASSED:
                    self._passed.popitem(last=False)
        if wrong is None:
            trial.future.set_result(None)
        else:
            trial.future.set_exception(wrong)

    def _try(self, trial: Trial, kind: str, text: str) -> None:
        process = self._process(trial)
        if process is None:
            raise ValueError("structured_outputs: the request was cancelled")
        try:
            answer = process.ask({"kind": kind, "text": text, "seconds": self.seconds}, self.seconds)
        except BaseException as error:
            process.close()
            if isinstance(error, ProcessFailed):
                raise ValueError(
                    f"structured_outputs: llguidance does not compile this grammar within its limits: {error}; simplify it"
                ) from None
            raise
        with self._lock:
            self._idle.append(process)
            if self._closed:
                self._end_idle()
        if "refused" in answer:
            raise refusal(answer["refused"])

    def _process(self, trial: Trial) -> LimitedProcess | None:
        """Process for a trial; None if nothing waits for it any more."""
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is not None and not process.usable:
            process.close()
            process = None
        if process is None and trial.waiting > 0 and not self._closed:
            tokenizer, vocab_size, ends = self._source
            hello = {"tokenizer": tokenizer.to_str(), "vocab_size": vocab_size, "ends": ends}
            try:
                process = LimitedProcess(_WORKER, hello, memory=MEMORY, most=1 << 20)
            except ValueError as error:
                raise refusal(str(error)) from None
        with self._lock:
            if trial.waiting > 0 and not self._closed:
                trial.process = process
                return process
            if process is not None:
                self._idle.append(process)
            if self._closed:
                self._end_idle()
        return None

    def _end_idle(self) -> None:
        for process in self._idle:
            process.close()
        self._idle.clear()


class TeamGuard:
    """Guard of a team: rank 0 tries a grammar, and all ranks take its verdict."""

    def __init__(self, team: Team, guard: GrammarGuard) -> None:
        self._team, self._guard = team, guard
        self._passed: set[bytes] = set()  # the same on every rank

    def note(self, asked: StructuredOutputsParams) -> None:
        """Take it that a grammar has passed. Collective."""
        if len(self._passed) > MOST_PASSED:
            self._passed.clear()
        self._passed.add(key_of(asked))

    def check(self, grammars: Iterable[StructuredOutputsParams], settle: Callable[[], None]) -> None:
        """Wait for all trials. ValueError, the same on all ranks, for one that fails. Collective.

        settle  called before ranks exchange anything
        """
        new = {key: asked for asked in grammars if (key := key_of(asked)) not in self._passed}
        if not new:
            return
        settle()
        wrong = None
        if self._team.rank == 0:
            try:
                self._guard.check(new.values())
            except ValueError as error:
                wrong = str(error)
        if (wrong := self._team.exchange(wrong)[0]) is not None:
            raise ValueError(wrong)
        for asked in new.values():
            self.note(asked)


def check_guided(ends: Iterable[int]) -> list[int]:
    """Tokens that end an answer, in order. ValueError for none, and without llguidance."""
    if not _has_library():
        raise ValueError("structured_outputs need llguidance, which is not installed: pip install 'weft[guided]'")
    ends = sorted(ends)
    if not ends:
        raise ValueError("structured_outputs need an end-of-sequence token, and this model has none")
    return ends


def _has_library() -> bool:
    try:
        return find_spec("llguidance") is not None
    except ValueError:  # None stands in sys.modules
        return False


def key_of(asked: StructuredOutputsParams) -> bytes:
    """Digest of a grammar's kind and text."""
    kind, text = asked.grammar_text
    return hashlib.sha256(f"{kind} {text}".encode("utf-8", "surrogatepass")).digest()


def refusal(wrong: str) -> ValueError:
    """Error in one line for the library's text, without its dump of the state and the grammar."""
    text = wrong.partition("\n<state>")[0]
    if "panic" in text.lower():
        text = "llguidance fails on this grammar by an error of its own; write it in another way"
    return ValueError(f"structured_outputs: {shortened(text)}")


MOST_GRAMMARS = 64


class Guide:
    """Grammar of an answer and its state, which follows the answer's tokens.

    kind  of grammar, as llguidance names it
    ends  mask of the tokens that end an answer
    """

    def __init__(self, kind: str, matcher: LLMatcher, ends: torch.Tensor) -> None:
        self.kind, self._matcher, self._ends = kind, matcher, ends

    def take(self, token: int) -> None:
        """Go on by the token that was chosen. A token after the end, or below 0, changes nothing."""
        if token >= 0 and not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def begin_again(self, tokens: Sequence[int]) -> None:
        """Go back to the begin, then on by these tokens."""
        self._matcher.reset()
        for token in tokens:
            self.take(token)

    def mask(self) -> torch.Tensor:
        """Bits of the tokens that may come next, [cdiv(V, 32)] int32.

        At the end of the grammar, of the tokens that end an answer; none where no token fits, or the library has given up.
        """
        if self._matcher.is_stopped():
            return torch.zeros_like(self._ends) if self._matcher.get_error() else self._ends
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)
        # A tokenizer may have fewer tokens than the model, which may not choose the rest.
        return torch.nn.functional.pad(bits, (0, len(self._ends) - len(bits)))

    def masks(self, drafts: Sequence[int]) -> list[torch.Tensor]:
        """Masks as of `mask`, before the first of these tokens and after each that the grammar allows there."""
        masks, taken = [self.mask()], 0
        for draft in drafts:
            if draft < 0 or self._matcher.is_stopped() or not self._matcher.try_consume_tokens([draft]):
                break
            taken += 1
            masks.append(self.mask())
        if taken:
            self._matcher.rollback(taken)
        return masks


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
        # By kind and text: all that are still referred to, and the kept ones, least recently used first.
        self._known: WeakValueDictionary[tuple[str, str], Future[LLMatcher]] = WeakValueDictionary()
        self._kept: OrderedDict[tuple[str, str], Future[LLMatcher]] = OrderedDict()
        bits = numpy.zeros(cdiv(vocab_size, 32) * 32, numpy.uint8)
        bits[ends] = 1
        self._ends = torch.from_numpy(numpy.packbits(bits, bitorder="little").view(numpy.int32))

    def prepare(self, asked: StructuredOutputsParams) -> Future[LLMatcher]:
        """Have a grammar compiled.

        As long as the future is referred to, `start` finds it. Its result raises as `start` does.
        """
        key = asked.grammar_text
        future = self._known.get(key)
        if future is None:
            self._known[key] = future = self._threads.submit(self._compile, *key)
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
    threads, all_run = ThreadPoolExecutor(count, "weft grammars"), threading.Barrier(count)
    before = threading.stack_size(stack)
    try:
        for _ in range(count):  # one that waits at the barrier takes no further call, so each call starts a thread
            threads.submit(all_run.wait)
    finally:
        threading.stack_size(before)
    return threads
