"""A checkpoint's chat template: messages to the text that the model was trained to continue."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.engine.answers import check_prompt, quoted
from weft.errors import CheckpointError
from weft.models.checkpoint import read_file, read_object

if TYPE_CHECKING:
    from jinja2 import Environment
    from tokenizers import Tokenizer

Message = Mapping[str, Any]


class ChatTemplate:
    """The Jinja template of chat_template.jinja, or else of tokenizer_config.json, run in a sandbox.

    CheckpointError where the directory has neither, or none that can be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._special, source = _read(directory)
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # mostly TemplateSyntaxError
            raise CheckpointError(f"{directory}: its chat template is not valid Jinja ({_line(error)})") from None

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """The prompt behind which the assistant's answer comes. `variables`: what else the template knows, such as
        {"enable_thinking": False}. ValueError for messages that it refuses or fails on."""
        from jinja2 import TemplateError

        if variables is not None and not isinstance(variables, Mapping):
            raise ValueError(f"variables={quoted(variables)} is not a dictionary")
        if not isinstance(messages, Sequence):
            raise ValueError(f"messages={quoted(messages)} is not a list of messages")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(
                    f"messages[{index}]={quoted(message)} is not a dictionary with a role, and mostly content"
                )
        words = {**self._special, **(variables or {}), "messages": list(messages), "add_generation_prompt": True}
        try:
            return self._template.render(words)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {_line(error)}") from None
        except Exception as error:  # of its own arithmetic, or of content that is None
            line = f"{type(error).__name__}: {_line(error)}"
            raise ValueError(f"the chat template fails on these messages: {line}") from None


def prompt_of(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The token ids of what the template renders. ValueError as of `ChatTemplate.render`."""
    text = template.render(messages, variables)
    check_prompt("a message", text)
    # The template has written the special tokens; the tokenizer must not add more.
    return tokenizer.encode(text, add_special_tokens=False).ids


def _environment() -> Environment:
    """What templates are written for: transformers' settings, the names that it adds, and its tag `generation`."""
    from jinja2 import nodes  # torch needs it too
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Marks what the assistant has said, for training. Here it is only a scope."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    extensions = [loopcontrols, Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _read(directory: Path) -> tuple[dict[str, str], str]:
    """(special tokens by name, the template's source)"""
    path, separate = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    config = read_object(path) if path.exists() else {}
    try:
        source = read_file(separate).decode("utf-8") if separate.exists() else config.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{separate}: not readable as text ({error}); download it again") from None
    if isinstance(source, list):  # several by name
        if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in source):
            raise CheckpointError(f"{path}: chat_template is a list of what are not objects with name and template")
        source = {one["name"]: one.get("template") for one in source}.get("default")
    if not isinstance(source, str):
        raise CheckpointError(
            f"{directory}: no chat template in tokenizer_config.json and no chat_template.jinja; give it text, not a chat"
        )
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
    }
    return special, source


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
