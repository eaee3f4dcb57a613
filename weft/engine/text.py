"""Chat templates, which a process with limits renders as prompts, and text of answers' tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders

from weft.arguments import quoted
from weft.engine.params import check_prompt
from weft.engine.tokenizer import named_tokens, token_ids_of
from weft.errors import CheckpointError
from weft.models.files import read_file, read_object
from weft.runtime.limited_process import LimitedProcess, ProcessFailed

SECONDS = 5.0
# Limit on the output: a context of a million tokens has four million characters.
CHARACTERS = 16 << 20
MEMORY = 1 << 30
_WORKER = Path(__file__).with_name("untrusted.py")


class RenderError(Exception):
    """Rendering error. ``kind``: "invalid" (not a template), "refused" (by the template) or "failed"."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


class Renderer:
    """Process that renders templates, started when first needed and after it had to be ended.

    It ends with this object. Threads take turns. The first text takes 0.2 s, further ones under a millisecond.
    """

    def __init__(self, seconds: float = SECONDS, characters: int = CHARACTERS, memory: int = MEMORY) -> None:
        self.seconds, self.characters, self.memory = seconds, characters, memory
        self._lock = threading.Lock()
        self._process: LimitedProcess | None = None

    def compile(self, source: str) -> None:
        """RenderError unless `source` is a template."""
        self._ask(source, None)

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """Rendered text, with JSON values as variables. RenderError where there is none."""
        return self._ask(source, variables)["text"]

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _ask(self, source: str, variables: dict[str, Any] | None) -> dict[str, str]:
        request = {"source": source, "variables": variables, "seconds": self.seconds, "characters": self.characters}
        with self._lock:
            try:
                if self._process is None or not self._process.usable:
                    self.close()
                    # A character has up to 6 bytes in JSON.
                    self._process = LimitedProcess(
                        _WORKER, {}, memory=self.memory, most=8 * self.characters + (1 << 16)
                    )
                answer = self._process.ask(request, self.seconds)
            except BaseException as error:  # also interrupts
                self.close()
                if isinstance(error, ProcessFailed):
                    raise RenderError("failed", str(error)) from None
                raise
        for kind in ("invalid", "refused", "failed"):
            if kind in answer:
                raise RenderError(kind, answer[kind])
        return answer


Json = None | bool | int | float | str | dict[str, "Json"] | list["Json"]
# NumPy's numbers and strings, as Python's.
_PLAIN: dict[type, Callable[[Any], Any]] = {Integral: int, Real: float, str: str}
MAX_DEPTH = 64


def as_json(name: str, value: object, depth: int = 0) -> Json:
    """Convert `value` to JSON's types. ValueError, which names the place, where that is impossible."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    for kind, plain in _PLAIN.items():
        if isinstance(value, kind):
            return plain(value)
    if depth < MAX_DEPTH and isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ValueError(
                f"{name} has the key {wrong[0]!r}, which is not text; chat templates get what JSON can hold"
            )
        return {str(key): as_json(f"{name}[{key!r}]", one, depth + 1) for key, one in value.items()}
    if depth < MAX_DEPTH and isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [as_json(f"{name}[{index}]", one, depth + 1) for index, one in enumerate(value)]
    raise ValueError(
        f"{name} is a {type(value).__name__}{' too deep' if depth >= MAX_DEPTH else ''}, which chat templates do not get; pass "
        f"text, numbers, lists and dictionaries"
    )


Message = Mapping[str, Any]
# Names of templates that are used, where a checkpoint has several.
USES = {"default", "tool_use"}
# Names under which a message's reasoning is given, the one that most templates read first.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Shared by all templates of this process.
_RENDERER = Renderer()


class ChatTemplate:
    """Jinja template of a checkpoint, rendered in another process with the variables of transformers.

    It comes from chat_template.jinja, else from tokenizer_config.json. Of several templates, `tool_use` serves where there are
    tools, else `default`.

    renderer  sets limits on time, memory and output; None: the one that all templates of this process share

    CheckpointError where the directory has no readable template.
    """

    def __init__(self, directory: Path, renderer: Renderer | None = None) -> None:
        self.directory, self._renderer = directory, renderer or _RENDERER
        self._special, self._sources = named_tokens(directory), template_sources(directory)
        for name in USES & self._sources.keys():
            try:
                self._renderer.compile(self._sources[name])
            except RenderError as error:
                which = "its chat template" if len(self._sources) == 1 else f"its chat template {quoted(name)}"
                raise CheckpointError(f"{directory}: {which} is not valid Jinja ({error})") from None

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """Prompt that the assistant's answer continues. ValueError for messages that the template refuses.

        variables  further variables of the template, such as {"enable_thinking": False}
        """
        if variables is not None and not isinstance(variables, Mapping):
            raise ValueError(f"variables={quoted(variables)} is not a dictionary")
        if not isinstance(messages, Sequence):
            raise ValueError(f"messages={quoted(messages)} is not a list of messages")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(
                    f"messages[{index}]={quoted(message)} is not a dictionary with a role, and mostly content"
                )
        known = {
            "tools": None,
            "documents": None,
            **self._special,
            **as_json("variables", variables or {}),
            "messages": [_message(message) for message in as_json("messages", messages)],
            "add_generation_prompt": True,
        }
        name = "tool_use" if known["tools"] is not None and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise ValueError(f"of the chat templates {', '.join(map(quoted, self._sources))} none is named 'default'")
        try:
            text = self._renderer.render(self._sources[name], known)
        except RenderError as error:
            verb = "refuses" if error.kind == "refused" else "fails on"
            raise ValueError(f"the chat template {verb} these messages: {error}") from None
        check_prompt("a message", text)
        return text


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Message as transformers gives it to a template: without null fields, its reasoning by all names."""
    known = {name: value for name, value in message.items() if value is not None}
    reasoning = next((known[name] for name in _REASONING if name in known), None)
    return known if reasoning is None else {"thinking": reasoning, **known, "reasoning_content": reasoning}


def prompt_of(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of the rendered prompt. ValueError as in `ChatTemplate.render`."""
    # The template has written the special tokens already.
    text = template.render(messages, variables)
    return token_ids_of(tokenizer, "the rendered conversation", text, special=False)


def template_sources(directory: Path) -> dict[str, str]:
    """Chat templates of a checkpoint by name; one alone is the default. CheckpointError for none."""
    path, separate = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    files = {"default": separate} if separate.exists() else {}
    files |= {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if files:
        return {name: _text(file) for name, file in files.items()}
    source = read_object(path).get("chat_template") if path.exists() else None
    if isinstance(source, str):
        return {"default": source}
    if not source:
        raise CheckpointError(
            f"{directory}: no chat template in tokenizer_config.json and no chat_template.jinja; give it text, not a chat"
        )
    named = source if isinstance(source, list) else [None]
    if not all(
        isinstance(one, dict) and {str} == {type(one.get(key)) for key in ("name", "template")} for one in named
    ):
        raise CheckpointError(f"{path}: chat_template is neither text nor a list of objects with name and template")
    return {one["name"]: one["template"] for one in named}


def _text(file: Path) -> str:
    try:
        return read_file(file).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: not readable as text ({error}); download it again") from None


class StopStrings:
    """Automaton of strings.

    A state is the longest ending of the text so far that some string begins with; 0 is the empty one.

    empty    there is no string
    depth    of each state, its length
    longest  of each state, the length of the longest string that ends there, or 0
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.empty = not strings
        self._next: list[dict[str, int]] = [{}]
        self.depth, self.longest = [0], [0]
        for string in strings:
            state = 0
            for letter in string:
                if (after := self._next[state].get(letter)) is None:
                    after = self._next[state][letter] = len(self._next)
                    self._next.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.longest.append(0)
                state = after
            self.longest[state] = len(string)
        # State of the longest shorter ending; states are taken by their depth.
        self._shorter = [0] * len(self._next)
        ordered = list(self._next[0].values())
        for state in ordered:
            for letter, after in self._next[state].items():
                shorter = self._shorter[after] = self._step(self._shorter[state], letter)
                self.longest[after] = self.longest[after] or self.longest[shorter]
                ordered.append(after)

    def advance(self, state: int, text: str, begin: int) -> tuple[int, int]:
        """(state, end) after the characters from `begin` on, or after the first complete string."""
        for index in range(begin, len(text)):
            state = self._step(state, text[index])
            if self.longest[state]:
                return state, index + 1
        return state, len(text)

    def _step(self, state: int, letter: str) -> int:
        while state and letter not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(letter, 0)


# Decoders that join tokens' bytes or texts as they are.
JOINING = (decoders.ByteLevel, decoders.Fuse)
# Tokens after which a character that has not ended is none: it has up to 4 bytes.
MOST_UNDECIDED = 16


class TokenTexts(dict[int, str]):
    """Text of each token by itself, decoded when first asked for.

    "\ufffd" in it stands for bytes that are no character.
    """

    def __init__(self, tokenizer: Tokenizer, *, keep_special: bool) -> None:
        super().__init__()
        self._decode, self._skip = tokenizer.decode, not keep_special

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._decode([token_id], skip_special_tokens=self._skip)
        return text


def token_texts(tokenizer: Tokenizer, *, keep_special: bool) -> TokenTexts | None:
    """Texts of single tokens, to be joined; None for a decoder that looks at several tokens at once."""
    return TokenTexts(tokenizer, keep_special=keep_special) if isinstance(tokenizer.decoder, JOINING) else None


class TextStream:
    """Text of a growing sequence of tokens: pieces that, joined, are the text before a stop string.

    keep_stop     the text includes the stop string
    keep_special  special tokens have text too
    alone         `token_texts` with this keep_special: one look-up a token in place of decoding two; None: none are known

    The first stop string that is complete counts. Bytes of an unfinished character, and an ending that may begin a stop string,
    are held back until they are decided. Of bytes that are no character only the last is, so that a token decodes few bytes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: StopStrings | tuple[str, ...] = (),
        *,
        keep_stop: bool = False,
        keep_special: bool = False,
        alone: TokenTexts | None = None,
    ) -> None:
        self.tokenizer, self.alone = tokenizer, alone
        self._stops, self._state = stop if isinstance(stop, StopStrings) else StopStrings(stop), 0
        self.keep_stop, self.keep_special = keep_stop, keep_special
        self.token_ids: list[int] = []
        self.held = ""
        # Tokens before `read` are text already; from `first` on they are decoded again with each new one, because some
        # decoders treat the first token differently (a leading blank).
        self.first = self.read = 0
        self.ahead = 0  # characters after `read` that are text already
        self._given = self._waiting = 0  # characters given out, and characters that wait for an unfinished one

    @property
    def length(self) -> int:
        """Number of characters of the text so far, also of held back ones, without an unfinished one."""
        return self._given + len(self.held) + self._waiting

    def push(self, token_id: int) -> tuple[str, bool]:
        """(new text, whether a stop string ended it)."""
        decided = self.read == len(self.token_ids)
        self.token_ids.append(token_id)
        if decided and self.alone is not None and "\ufffd" not in (new := self.alone[token_id]):
            self.first, self.read = self.read, self.read + 1
            if self._stops.empty:
                self._given += len(new)
                return new, False
            self.held += new
            return self._release()
        new = self._new_text()
        self._waiting = 0
        if new and not new.endswith("\ufffd"):
            self.held += new
            self.first, self.read, self.ahead = self.read, len(self.token_ids), 0
        elif len(self.token_ids) - self.read > 2 * MOST_UNDECIDED:
            self.held += new[:-1]
            self.first = self.read = len(self.token_ids) - MOST_UNDECIDED
            self.ahead = len(self._decoded(self.token_ids[self.first :])) - 1
        else:
            self._waiting = len(new.rstrip("\ufffd"))
        return self._release()

    def finish(self) -> tuple[str, bool]:
        """Text that was held back, now that no token follows, as from `push`."""
        self.held += self._new_text()
        self.first, self.read, self.ahead, self._waiting = len(self.token_ids), len(self.token_ids), 0, 0
        text, stopped = self._release()
        self._given += len(self.held)
        rest, self.held, self._state = self.held, "", 0
        return (text, True) if stopped else (text + rest, False)

    def _new_text(self) -> str:
        before = self._decoded(self.token_ids[self.first : self.read])
        return self._decoded(self.token_ids[self.first :])[len(before) + self.ahead :]

    def _decoded(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=not self.keep_special)

    def _release(self) -> tuple[str, bool]:
        # What was held back is what the state stands for.
        state, end = self._stops.advance(self._state, self.held, self._stops.depth[self._state])
        if stop := self._stops.longest[state]:
            text, self.held, self._state = self.held[: end if self.keep_stop else end - stop], "", 0
        else:
            keep = self._stops.depth[state]
            text, self.held, self._state = self.held[: end - keep], self.held[end - keep :], state
        self._given += len(text)
        return text, stop > 0
