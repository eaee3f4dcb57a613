"""Text that arrives in pieces, and deltas of content, reasoning and calls that readers make of it.

A reader is a generator that yields where it needs more text. What it reads depends on the whole text alone, never on how it was
cut into pieces, so an answer and its stream are the same.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Generator, Sequence
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
PassOn = Callable[[str], None]
BLANKS = " \t\r\n"
# A name or header that is longer is none.
LONGEST_NAME = 512


class Delta(NamedTuple):
    """New text of an answer.

    text   of a call: a piece of its arguments, which joined are JSON as the model wrote it
    index  of a call among the answer's calls
    id, name  of a call, with its first delta alone
    """

    kind: Literal["content", "reasoning", "call"]
    text: str
    index: int = 0
    id: str | None = None
    name: str | None = None


def call_id() -> str:
    """Id of a call, as OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """Id of a call of nine letters and digits, the only ones that Mistral's templates take."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class Output:
    """Deltas of an answer.

    Blanks are held back until it is known what follows: before and between calls, and around reasoning, they are no content.
    """

    def __init__(self, new_id: Callable[[], str] = call_id) -> None:
        self.deltas: list[Delta] = []
        self.calls = 0
        self._new_id, self._held, self._kind = new_id, "", "content"
        self._bare = False  # what came before was reasoning or a call, and no content since

    def content(self, text: str) -> None:
        self._text("content", text)

    def reasoning(self, text: str) -> None:
        self._text("reasoning", text)

    def call(self, name: str) -> None:
        """Begin a call, to which `arguments` then belong."""
        self._held, self._bare = "", True
        self.deltas.append(Delta("call", "", self.calls, self._new_id(), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        if text:
            self.deltas.append(Delta("call", text, self.calls - 1))

    def begin_reasoning(self) -> None:
        self._held, self._kind, self._bare = "", "reasoning", True

    def end_reasoning(self) -> None:
        self._held, self._kind, self._bare = "", "content", True

    def finish(self) -> None:
        """Give out the blanks that end the answer's content."""
        if self._held and not self._bare and self._kind == "content":
            self.deltas.append(Delta("content", self._held))
        self._held = ""

    def draw(self) -> list[Delta]:
        """The deltas since the last draw."""
        deltas, self.deltas = self.deltas, []
        return deltas

    def _text(self, kind: Literal["content", "reasoning"], text: str) -> None:
        if self._bare:
            text = text.lstrip(BLANKS)
        if not text:
            return
        text, self._held, self._bare = self._held + text, "", False
        if kept := text.rstrip(BLANKS):
            self.deltas.append(Delta(kind, kept))
        self._held = text[len(kept) :]


class Text:
    """Text of an answer so far, of which `rest` has not been read.

    ended   no more text comes
    record  text read since `begin_record`; None: it is not recorded
    """

    def __init__(self) -> None:
        self.rest, self.ended = "", False
        self.record: list[str] | None = None

    def skip(self, count: int) -> str:
        """Read these characters."""
        text, self.rest = self.rest[:count], self.rest[count:]
        if self.record is not None:
            self.record.append(text)
        return text

    def begin_record(self) -> None:
        self.record = []

    def end_record(self) -> str:
        text, self.record = "".join(self.record or ()), None
        return text

    def until(self, marks: Sequence[str], pass_on: PassOn) -> Reading[str | None]:
        """Pass on the text before the first of some marks, and read the mark. None: there is none."""
        while True:
            at, mark = self._first(marks)
            if mark is not None or self.ended:
                if at:
                    pass_on(self.skip(at))
                if mark is not None:
                    self.skip(len(mark))
                return mark
            if at:
                pass_on(self.skip(at))
            yield

    def _first(self, marks: Sequence[str]) -> tuple[int, str | None]:
        """(place, mark) of the first mark; without one (characters that belong to no mark, None)."""
        complete = min(((at, -len(mark), mark) for mark in marks if (at := self.rest.find(mark)) >= 0), default=None)
        begun = len(self.rest)
        if not self.ended:
            begun = min((_begun(self.rest, mark) for mark in marks), default=begun)
        if complete is not None and complete[0] < begun:
            return complete[0], complete[2]
        return begun, None

    def begins(self, marks: Sequence[str]) -> Reading[str | None]:
        """Read blanks and one of some marks, if the text goes on by it; otherwise neither."""
        while True:
            text = self.rest.lstrip(BLANKS)
            longer = [mark for mark in marks if mark.startswith(text) and mark != text]
            if self.ended or not longer:
                mark = max((mark for mark in marks if text.startswith(mark)), key=len, default=None)
                if mark is not None:
                    self.skip(len(self.rest) - len(text) + len(mark))
                return mark
            yield

    def word(self, marks: Sequence[str]) -> Reading[tuple[str, str | None]]:
        """(text before the first of some marks, the mark), both read.

        ("", None) where the text ends before a mark, or is too long.
        """
        parts: list[str] = []
        reading = self.until(marks, parts.append)
        while True:
            try:
                next(reading)
            except StopIteration as ended:
                mark = ended.value
                return ("".join(parts), mark) if mark is not None and _short(parts) else ("", None)
            if not _short(parts):
                return "", None
            yield

    def peek(self) -> Reading[str]:
        """The character after blanks, all unread; "" at the end of the text."""
        while not (text := self.rest.lstrip(BLANKS)) and not self.ended:
            yield
        return text[:1]

    def blanks(self) -> Reading[str]:
        """Read blanks. Returns the character after them, unread; "" at the end of the text."""
        letter = yield from self.peek()
        self.skip(len(self.rest) - len(self.rest.lstrip(BLANKS)))
        return letter

    def value(self, pass_on: PassOn) -> Reading[bool]:
        """Pass on a JSON value as it is written. False where there is none, or the text ends before it does."""
        first = yield from self.blanks()
        if not first or first in "]},:<":
            return False
        scan = Scan(first)
        while True:
            end = scan.end_in(self.rest)
            pass_on(self.skip(len(self.rest) if end is None else end))
            if end is not None:
                return True
            if self.ended:
                return scan.bare
            yield


class Scan:
    """Place in a JSON value that arrives in pieces.

    bare    a number or word, which ends before the next mark or blank
    depth   of brackets
    quoted  within a string; escaped: after a backslash there
    """

    def __init__(self, first: str) -> None:
        self.bare = first not in '"[{'
        self.depth, self.quoted, self.escaped = 0, False, False

    def end_in(self, text: str) -> int | None:
        """Number of characters up to the value's end; None: it goes on after this text."""
        for at, letter in enumerate(text):
            if self.bare and not self.quoted and (letter in BLANKS or letter in ",]}:<"):
                return at
            if self._is_closed_by(letter) and not self.bare:
                return at + 1
        return None

    def _is_closed_by(self, letter: str) -> bool:
        if self.escaped:
            self.escaped = False
        elif self.quoted:
            self.escaped, self.quoted = letter == "\\", letter != '"'
        elif letter == '"':
            self.quoted = True
        elif letter in "[{":
            self.depth += 1
        elif letter in "]}":
            self.depth -= 1
        return not (self.depth or self.quoted)


def _begun(text: str, mark: str) -> int:
    """Place from which on the end of a text may be the begin of a mark; else its length."""
    for at in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[at:]):
            return at
    return len(text)


def _short(parts: list[str]) -> bool:
    return sum(map(len, parts)) <= LONGEST_NAME


def call_object(text: Text, output: Output) -> Reading[bool]:
    """Read {"name": …, "arguments": {…}} as a call. False where it is none, which gives no call.

    The keys may have any order, `parameters` are arguments too, and `id` and `type` are passed over. Once the call has begun,
    what is not JSON ends it as it is.
    """
    if (yield from text.begins("{")) is None:
        return False
    begun, call, mark = output.calls, _Call(text, output), ","
    while mark == ",":
        key, mark = (yield from _string(text)), None
        if key is not None and (yield from text.begins(":")) is not None and (yield from call.member(key)):
            mark = yield from text.begins((",", "}"))
    if mark == "}":
        call.end()
    return output.calls > begun


class _Call:
    """A call that `call_object` reads: its name, and its arguments where they stand before that."""

    def __init__(self, text: Text, output: Output) -> None:
        self._text, self._output = text, output
        self._name: str | None = None
        self._early: list[str] | None = None

    def member(self, key: str) -> Reading[bool]:
        """Read the value of a key. False where the object is no call, or ends."""
        if key == "name" and self._name is None:
            self._name = yield from _string(self._text)
            if self._name and self._early is not None:
                self._output.call(self._name)
                self._output.arguments(_plain("".join(self._early)))
            return bool(self._name)
        if key in ("arguments", "parameters") and self._early is None:
            self._early = []
            if self._name is None:
                return (yield from self._text.value(self._early.append))
            self._output.call(self._name)
            return (yield from _arguments(self._text, self._output))
        return key in ("id", "type") and (yield from self._text.value(lambda _: None))

    def end(self) -> None:
        """Make the call of a function without arguments."""
        if self._name is not None and self._early is None:
            self._output.call(self._name)
            self._output.arguments("{}")


def _arguments(text: Text, output: Output) -> Reading[bool]:
    """Pass a JSON value on as the newest call's arguments; also one that stands in a string."""
    if (yield from text.blanks()) != '"':
        return (yield from text.value(output.arguments))
    parts: list[str] = []
    complete = yield from text.value(parts.append)
    output.arguments(_plain("".join(parts)))
    return complete


def _plain(arguments: str) -> str:
    """Arguments that are a JSON object as text in a string, as that object; all else as it is."""
    try:
        inner = json.loads(arguments) if arguments.startswith('"') else None
        return inner if isinstance(inner, str) and inner.encode() and isinstance(json.loads(inner), dict) else arguments
    except (ValueError, RecursionError):
        return arguments


def _string(text: Text) -> Reading[str | None]:
    """Read a JSON string. None where there is none, and for half of a surrogate pair."""
    if (yield from text.blanks()) != '"':
        return None
    parts: list[str] = []
    yield from text.value(parts.append)
    try:
        value = json.loads("".join(parts))
        value.encode()
        return value
    except ValueError:
        return None
