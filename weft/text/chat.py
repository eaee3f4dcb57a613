"""Chat templates, which a process with limits renders as prompts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from weft.arguments import check_utf_8, quoted
from weft.errors import CheckpointError
from weft.models.files import read_file, read_object
from weft.runtime.limited_process import LimitedProcess, ProcessFailed
from weft.text.tokenizer import named_tokens, token_ids_of

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
        for name, value in (variables or {}).items():
            if name == "messages" or (name == "add_generation_prompt" and value is not True):
                raise ValueError(
                    f"variables of the chat template hold {name}={quoted(value)}, which weft gives; leave it out"
                )
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
        check_utf_8("a message", text)
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
