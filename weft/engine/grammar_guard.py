"""Trial of untrusted grammars: each is first compiled in a process with limits.

A grammar of a few kilobytes can overflow the stack of the library that compiles it, which ends the process, or take minutes.
Ranks compile only what has passed.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from weft.arguments import shortened
from weft.engine.limited_process import LimitedProcess, ProcessFailed
from weft.engine.params import StructuredOutputsParams

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Grammars that are tried, or compiled by a rank, at the same time.
AT_ONCE = 4
# Grammars whose trial is remembered.
MOST_PASSED = 4096
# Bytes beyond those of the tokenizer.
MEMORY = 512 << 20
_WORKER = Path(__file__).with_name("grammar_process.py")


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

    ValueError as `check_guided`. Equal grammars are tried once, and those that passed last are remembered. Processes
    start when first needed, in a second for 150,000 tokens.

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
    text: Any = wrong.partition("\n<state>")[0]
    if "panic" in text.lower():
        text = "llguidance fails on this grammar by an error of its own; write it in another way"
    return ValueError(f"structured_outputs: {shortened(text)}")
